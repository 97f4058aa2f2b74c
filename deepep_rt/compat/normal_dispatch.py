"""The two ways of a normal dispatch: along the routing of a handle, and along a new one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._checks import whole_number
from ..arrays.dtypes import DTYPES
from ..buffer import Buffer
from ..config import MAX_ALIGNMENT
from ..errors import EPInputError
from ..results import DispatchResult
from .buffer_cache import NormalBuffers, Shape
from .call_stream import CallStream
from .checks import backend_for, check_choices, check_layout, check_tensor
from .config import MOST_BYTES
from .handle_tables import topk_idx_of_ranks
from .handles import DispatchedHandle


@dataclass(slots=True)
class Rows:
    """The rows of a dispatch, and how the call runs."""

    x: torch.Tensor
    scales: torch.Tensor | None
    stream: CallStream
    num_sms: int


@dataclass(slots=True)
class Routing:
    """The arguments that decide where the tokens of a new dispatch go."""

    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    is_token_in_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    expert_alignment: int
    num_worst_tokens: int


@dataclass(slots=True)
class NewDispatch:
    """The outcome of a dispatch along a new routing."""

    buffer: Buffer
    sent: DispatchResult
    num_recv_tokens_per_expert_list: list[int]
    topk_idx: torch.Tensor
    """The expert numbers that the Buffer was given."""


def dispatch_known(rows: Rows, handle: DispatchedHandle) -> DispatchResult:
    """Send rows along the routing of an earlier dispatch."""
    handle.buffer.num_sms = rows.num_sms
    return handle.buffer.dispatch(
        rows.x, x_scales=rows.scales, handle=handle.routing, previous_event=rows.stream.previous_event, **rows.stream.options
    )


def check_routing(routing: Routing, num_tokens: int, num_ranks: int) -> None:
    """Check the arguments of a new dispatch, and convert its two numbers."""
    check_layout(routing.is_token_in_rank, routing.num_tokens_per_expert, routing.topk_idx, num_tokens, num_ranks)
    routing.expert_alignment = whole_number(routing.expert_alignment, "expert_alignment", 1, MAX_ALIGNMENT)
    worst = routing.num_worst_tokens
    routing.num_worst_tokens = 0 if worst is None else whole_number(worst, "num_worst_tokens", 0, MOST_BYTES)
    for tensor, name in ((routing.topk_idx, "topk_idx"), (routing.topk_weights, "topk_weights")):
        if tensor is not None:
            check_tensor(tensor, name)
    if routing.topk_idx is None and routing.topk_weights is not None:
        raise EPInputError("topk_idx=None with topk_weights; expected both or neither. Pass topk_idx too.")


def dispatch_new(rows: Rows, routing: Routing, normal: NormalBuffers, rank: int, num_ranks: int) -> NewDispatch:
    """Send rows along a new routing, in a Buffer of the call's shape."""
    num_tokens = rows.x.shape[0]
    check_routing(routing, num_tokens, num_ranks)
    shape, topk_idx, counts = _shape_and_topk_idx(rows, routing, normal, num_ranks)

    def send(buffer: Buffer, with_tokens: bool) -> DispatchResult:
        tensors = (rows.x, topk_idx, routing.topk_weights, rows.scales)
        x, idx, weights, scales = tensors if with_tokens else (t if t is None else t[:0] for t in tensors)
        buffer.num_sms = rows.num_sms
        return buffer.dispatch(
            x,
            idx,
            weights,
            x_scales=scales,
            num_worst_tokens=routing.num_worst_tokens or None,
            expert_alignment=routing.expert_alignment,
            previous_event=rows.stream.previous_event,
            **rows.stream.options,
        )

    if routing.num_worst_tokens:
        buffer = normal.buffer_for(shape, num_tokens, routing.num_worst_tokens)
        _check_room(num_tokens, buffer, routing.num_worst_tokens)
        return NewDispatch(buffer, send(buffer, True), [], topk_idx)
    buffer, sent, all_counts = normal.dispatch(shape, num_tokens, counts, send)
    received = sent.num_recv_tokens_per_expert_list or []
    if routing.topk_idx is None:  # the Buffer counted rows for ranks, not for experts
        of_this_rank = all_counts.sum(axis=0).reshape(num_ranks, -1)[rank]
        received = (-(-of_this_rank // routing.expert_alignment) * routing.expert_alignment).tolist()
    return NewDispatch(buffer, sent, received, topk_idx)


def _shape_and_topk_idx(
    rows: Rows, routing: Routing, normal: NormalBuffers, num_ranks: int
) -> tuple[Shape, torch.Tensor, list[int]]:
    """Return the shape of a call, its expert numbers, and the counts of experts that other ranks have to know."""
    hidden, dtype, backend = rows.x.shape[1], _widest_dtype(rows.x), backend_for(rows.x)
    topk_idx, num_experts = routing.topk_idx, routing.num_tokens_per_expert.shape[0]
    if topk_idx is not None:
        check_choices(topk_idx)
        return Shape(hidden, topk_idx.shape[1], num_experts, dtype, backend), topk_idx, []
    shape = normal.shape_for_ranks(hidden, dtype, backend)
    with rows.stream.current():
        rows.stream.record_use(routing.is_token_in_rank)
        check_number_of_ranks(routing, shape.num_topk, num_ranks)
        topk_idx = topk_idx_of_ranks(routing.is_token_in_rank, shape.num_topk, shape.num_experts // num_ranks)
        counts = [] if routing.num_worst_tokens else routing.num_tokens_per_expert.tolist()
    return shape, topk_idx, counts


def check_number_of_ranks(routing: Routing, most: int, num_ranks: int) -> None:
    """Raise EPInputError if a token without expert numbers goes to more ranks than a Buffer has choices. A capture cannot find that out."""
    in_rank = routing.is_token_in_rank
    if num_ranks <= most or not in_rank.shape[0] or (in_rank.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    found = int(in_rank.sum(1).max())
    if found > most:
        raise EPInputError(
            f"is_token_in_rank sends a token to {found} ranks, and topk_idx=None; expected at most {most} ranks. Pass topk_idx, or split "
            f"the batch."
        )


def _widest_dtype(x: torch.Tensor) -> str:
    """Return the dtype of a Buffer that takes such rows. FP8 rows come back as bfloat16."""
    return "bfloat16" if x.element_size() <= DTYPES["bfloat16"].itemsize else "float32"


def _check_room(num_tokens: int, buffer: Buffer, num_worst_tokens: int) -> None:
    room = buffer.config.num_max_tokens_per_rank
    if num_tokens > room:
        raise EPInputError(
            f"num_worst_tokens={num_worst_tokens} gives room for {room} tokens of each rank, and x has {num_tokens}; expected at least "
            f"the number of ranks times the most tokens of a rank. Pass more: the host does not wait, so ranks cannot agree on more."
        )
