"""The normal mode of DeepEP V1's Buffer: dispatch and combine of many tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .._checks import instance, whole_number
from ..arrays.dtypes import DTYPES
from ..buffer import Buffer
from ..config import MAX_ALIGNMENT, MAX_EXPERTS
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchResult
from ..torch import tensor_ops
from .base import Calls, tells_refusals
from .buffer_cache import NormalBuffers, Shape
from .checks import (
    Tensors,
    backend_for,
    check_choices,
    check_handle,
    check_layout,
    check_tensor,
    rows_and_scales,
    without_gradient,
)
from .config import MOST_BYTES, Config
from .events import CallStream, EventOverlap
from .handles import DispatchedHandle, InternodeHandle, NormalHandle, handle_of

R = TypeVar("R")


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


def _between_nodes(call: Callable[..., R], without: str | None = None) -> Callable[..., R]:
    """Make the call of ranks on several nodes that takes the arguments of another call, except one."""
    name, signature = call.__name__, inspect.signature(call)
    place = list(signature.parameters).index(without) if without else len(signature.parameters)

    @functools.wraps(call)
    def made(self: NormalCalls, *given: Any, **options: Any) -> R:
        if without in options:
            raise TypeError(f"{made.__qualname__}() got an unexpected keyword argument {without!r}")
        state = self._state
        if state.num_nodes == 1:
            raise EPUnavailableError(
                f"internode_{name}: the {state.num_ranks} ranks are on one node; expected several. Call {name}, or declare nodes "
                f"with DEEPEP_RT_RANKS_PER_NODE."
            )
        if without and len(given) >= place:  # `self` is not in `given`
            given = (*given[: place - 1], signature.parameters[without].default, *given[place - 1 :])
        made_call: Callable[..., R] = getattr(self, name)  # a subclass may have its own
        return made_call(*given, **options)

    made.__name__, made.__qualname__ = f"internode_{name}", f"NormalCalls.internode_{name}"
    made.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for parameter in signature.parameters.values() if parameter.name != without]
    )
    more = f", and takes `{without}` too" if without else ""
    made.__doc__ = f"""Make a `{name}` between nodes. `{name}` does the same{more}.

        Args, results and errors are those of `{name}`.

        Raises:
            EPUnavailableError: If all ranks are on one node.
        """
    return made


class NormalCalls(Calls):
    """The calls of the normal mode."""

    num_sms: int
    copies_results: bool

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go. `dispatch` counts by itself, so only callers that need the numbers need this.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers; -1 skips.
            num_experts: Experts over all ranks.
            previous_event: The event after which the call starts, instead of the work of the current stream.
            async_finish: Run on the communication stream. The event then tells when the call is done.
            allocate_on_comm_stream: Accepted without effect.

        Returns:
            `num_tokens_per_rank` `[num_ranks]` int32, `num_tokens_per_rdma_rank` `[num_nodes]` int32 (None on one node),
            `num_tokens_per_expert` `[num_experts]` int32, `is_token_in_rank` `[num_tokens, num_ranks]` bool, and the event.

        Example:
            >>> per_rank, per_node, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 256)
        """
        check_tensor(topk_idx, "topk_idx")
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
            raise EPInputError(
                f"topk_idx.shape={list(topk_idx.shape)}, dtype={topk_idx.dtype}; expected [num_tokens, num_topk] int64 or int32. "
                f"Convert it."
            )
        num_experts = whole_number(num_experts, "num_experts", 1, MAX_EXPERTS, multiple_of=self._state.num_ranks)
        stream = CallStream(topk_idx, self.get_comm_stream, previous_event, async_finish)
        state = self._state
        with stream.current():
            per_rank, per_expert, in_rank = tensor_ops.dispatch_layout(topk_idx, num_experts, state.num_ranks)
            per_node = tokens_for_nodes(in_rank, state.ranks_per_node) if state.num_nodes > 1 else None
        stream.record_use(topk_idx, per_rank, per_node, per_expert, in_rank)
        return per_rank, per_node, per_expert, in_rank, stream.finish(per_rank, per_node, per_expert, in_rank)

    @tells_refusals
    def dispatch(
        self,
        x: Tensors,
        handle: DispatchedHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensors, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchedHandle | None, EventOverlap]:
        """Send each token to the ranks that hold its experts, once to each rank.

        Args:
            x: `[num_tokens, hidden]` bfloat16 (float16 and float32 work too), or a pair of it in float8_e4m3fn and its scales
                `[num_tokens, hidden // 128]` float32.
            handle: Repeat the routing of an earlier dispatch, without counting. Give neither top-k argument then.
            num_tokens_per_rank: From `get_dispatch_layout`. Its values are not read.
            num_tokens_per_rdma_rank: From `get_dispatch_layout`, and needed on several nodes without a handle. Its values are not read.
            is_token_in_rank: From `get_dispatch_layout`. It decides where tokens go if `topk_idx` is None.
            num_tokens_per_expert: From `get_dispatch_layout`. Its length is the number of experts. Needed without a handle.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers; -1 skips. Decides where tokens go.
            topk_weights: `[num_tokens, num_topk]` float32.
            expert_alignment: The counts for each expert are rounded up to a multiple of this.
            num_worst_tokens: The fixed number of rows of the results, so the host does not wait. The same on all ranks. No row is lost
                if it is at least the number of tokens of all ranks together.
            config: Only its `num_sms` has an effect.
            previous_event: The event after which the call starts, instead of the work of the current stream.
            async_finish: Run on the communication stream. The event then tells when the call is done.
            allocate_on_comm_stream: Accepted without effect.

        Returns:
            `recv_x` (a pair if `x` is one), `recv_topk_idx`, `recv_topk_weights`, `num_recv_tokens_per_expert_list` (empty with
            `num_worst_tokens`), `handle` and `event`. With a handle, only the first and the last are not None.

        Raises:
            EPInputError: If an argument is wrong or missing, or `num_nvl_bytes` was 0.
            EPConfigError: If no Buffer can have the sizes of the arguments.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
            ...     x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank,
            ...     is_token_in_rank=is_token_in_rank, num_tokens_per_expert=per_expert)
        """
        normal, num_sms = self._state.normal_buffers(), self._num_sms_of(config)
        x, scales = map(without_gradient, rows_and_scales(x))
        topk_weights = without_gradient(topk_weights)
        stream = CallStream(x, self.get_comm_stream, previous_event, async_finish)
        if scales is not None and not scales.is_contiguous():  # DeepEP takes column-major ones too
            with stream.current():
                stream.record_use(scales)
                scales = scales.contiguous()
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise EPInputError("handle and top-k tensors were given; expected one of them. Leave the top-k tensors out.")
            handle = handle_of(handle)
            check_handle(handle, DispatchedHandle, "dispatch")
            buffer, given = handle.buffer, dict(x_scales=scales, handle=handle.routing, previous_event=stream.previous_event)
            buffer.num_sms = num_sms
            sent = buffer.dispatch(x, **given, **stream.options)
            return self._received(stream, sent), None, None, None, None, stream.finish(x, scales)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise EPInputError(
                "handle=None; expected num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert instead. "
                "Pass the results of get_dispatch_layout."
            )
        if num_tokens_per_rdma_rank is None and self._state.num_nodes > 1:
            raise EPInputError(
                f"num_tokens_per_rdma_rank=None with ranks on {self._state.num_nodes} nodes; expected a tensor. Pass the second result of "
                f"get_dispatch_layout."
            )
        routing = Routing(topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, expert_alignment, num_worst_tokens)
        made = dispatch_new(Rows(x, scales, stream, num_sms), routing, normal, self._state.rank, self._state.num_ranks)
        experts, weights, made_handle = self._routing_results(made, is_token_in_rank, topk_idx is not None, stream)
        received, counts = self._received(stream, made.sent), made.num_recv_tokens_per_expert_list
        return received, experts, weights, counts, made_handle, stream.finish(x, scales, made.topk_idx, topk_weights)

    @tells_refusals
    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchedHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to the ranks of their tokens, and add up the rows of each token there, without weights.

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32.
            handle: The handle of the dispatch.
            topk_weights: `[rows of recv_x, num_topk]` float32, which are added up too, or None.
            bias: One tensor or a pair of tensors, `[num_tokens, hidden]`, dtype of `x`. They are added to the sum.
            config: Only its `num_sms` has an effect.
            previous_event: The event after which the call starts, instead of the work of the current stream.
            async_finish: Run on the communication stream. The event then tells when the call is done.
            allocate_on_comm_stream: Accepted without effect.

        Returns:
            The sums `[num_tokens, hidden]`, the sums of `topk_weights` or None, and the event.

        Raises:
            EPInputError: If an argument is wrong.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> combined_x, _, event = buffer.combine(y, handle)
        """
        self._state.normal_buffers()
        handle = handle_of(handle)
        check_handle(handle, DispatchedHandle, "dispatch")
        check_tensor(x, "x")
        x, topk_weights = without_gradient(x), without_gradient(topk_weights)
        bias = tuple(map(without_gradient, bias)) if isinstance(bias, (tuple, list)) else without_gradient(bias)
        stream = CallStream(x, self.get_comm_stream, previous_event, async_finish)
        handle.buffer.num_sms = self._num_sms_of(config)
        back = handle.buffer.combine(
            x, handle.routing, topk_weights=topk_weights, bias=bias, previous_event=stream.previous_event, **stream.options
        )
        sums, weight_sums = self._results(stream, back.x, back.topk_weights)
        return sums, weight_sums, stream.finish(x, topk_weights)

    internode_dispatch = _between_nodes(dispatch, without="num_worst_tokens")
    internode_combine = _between_nodes(combine)

    def _routing_results(
        self, made: NewDispatch, is_token_in_rank: torch.Tensor, has_topk: bool, stream: CallStream
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, DispatchedHandle]:
        """Return expert numbers, weights and the handle of a new dispatch.

        They are copies, because programs hold them from step to step. One result would keep the memory of all results of the call.
        """
        sent = made.sent
        topk = (sent.recv_topk_idx, sent.recv_topk_weights) if has_topk else (None, None)
        if self._state.num_nodes > 1:
            between_nodes = InternodeHandle(made.buffer, sent.handle, is_token_in_rank, sent.num_recv_tokens, self._state.rank)
            return *copied(stream, *topk), between_nodes
        experts, weights, source_tokens = copied(stream, *topk, sent.recv_src_idx[:, 1])
        return experts, weights, NormalHandle(made.buffer, sent.handle, is_token_in_rank, source_tokens)

    def _received(self, stream: CallStream, sent: DispatchResult) -> Tensors:
        rows, scales = self._results(stream, sent.recv_x, sent.recv_x_scales)
        return rows if scales is None else (rows, scales)

    def _results(self, stream: CallStream, *results: torch.Tensor | None) -> tuple[Any, ...]:
        """Return results as they are, in the library's memory, or (`copies_results`) copies in PyTorch's memory."""
        return copied(stream, *results) if self.copies_results else results

    def _num_sms_of(self, config: Config | None) -> int:
        if config is None:
            return self.num_sms
        return instance(config, "config", Config, "Make one, or leave it out.").num_sms


def copied(stream: CallStream, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Copy tensors to PyTorch's memory, on the stream of the call."""
    with stream.current():
        copies = tuple(None if tensor is None else tensor.clone() for tensor in tensors)
    stream.record_use(*copies)
    return copies


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
    hidden, dtype, backend = rows.x.shape[1], widest_dtype(rows.x), backend_for(rows.x)
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


def widest_dtype(x: torch.Tensor) -> str:
    """Return the dtype of a Buffer that takes such rows. FP8 rows come back as bfloat16."""
    return "bfloat16" if x.element_size() <= DTYPES["bfloat16"].itemsize else "float32"


def _check_room(num_tokens: int, buffer: Buffer, num_worst_tokens: int) -> None:
    room = buffer.config.num_max_tokens_per_rank
    if num_tokens > room:
        raise EPInputError(
            f"num_worst_tokens={num_worst_tokens} gives room for {room} tokens of each rank, and x has {num_tokens}; expected at least "
            f"the number of ranks times the most tokens of a rank. Pass more: the host does not wait, so ranks cannot agree on more."
        )


def topk_idx_of_ranks(is_token_in_rank: torch.Tensor, num_topk: int, num_local_experts: int) -> torch.Tensor:
    """Make a `topk_idx` that sends a token to these ranks, at most `num_topk`. The first expert of a rank stands for the rank."""
    num_tokens, num_ranks = is_token_in_rank.shape
    first = torch.arange(num_ranks, dtype=torch.int32, device=is_token_in_rank.device) * num_local_experts
    chosen = torch.where(is_token_in_rank, first, -1)
    if num_ranks > num_topk:
        return chosen.sort(dim=1, descending=True).values[:, :num_topk].contiguous()
    topk_idx = torch.full((num_tokens, num_topk), -1, dtype=torch.int32, device=is_token_in_rank.device)
    topk_idx[:, :num_ranks] = chosen
    return topk_idx


def tokens_for_nodes(is_token_in_rank: torch.Tensor, ranks_per_node: int) -> torch.Tensor:
    """Count the tokens for each node, `[num_nodes]` int32. A token counts once for a node."""
    num_tokens, num_ranks = is_token_in_rank.shape
    is_in_node = is_token_in_rank.view(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(2)
    return is_in_node.sum(0, dtype=torch.int32)
