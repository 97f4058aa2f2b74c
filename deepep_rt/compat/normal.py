"""The normal mode of DeepEP V1's Buffer: dispatch and combine of many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .._checks import argument_error, instance, whole_number
from ..arrays.dtypes import DTYPES
from ..backends.inputs import MOST_ALIGNMENT
from ..buffer import Buffer
from ..config import MAX_EXPERTS
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchResult
from ..torch import tensor_ops as torch_kernels
from . import handle_tables as compat_routing
from .base import Calls, backend_of, check_handle, check_rows, check_tensor, without_gradient
from .buffer_cache import NormalBuffers, Shape
from .config import MOST_BYTES, Config
from .events import EventOverlap, Placement
from .handles import NormalHandle, whole

if TYPE_CHECKING:
    from .base import Tensors


class NormalCalls(Calls):
    """The calls of the normal mode."""

    num_sms: int
    copies_results: bool
    _normal: NormalBuffers | None

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go. `dispatch` counts by itself; this is for callers that want the numbers.

        Args:
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers; -1 skips.
            num_experts: Experts over all ranks.
            previous_event: Start after this event instead of after the current stream.
            async_finish: Run on the communication stream; the event tells when it is done.
            allocate_on_comm_stream: Accepted; without effect.

        Returns:
            `num_tokens_per_rank` `[num_ranks]` int32, None (for DeepEP's RDMA ranks), `num_tokens_per_expert` `[num_experts]` int32,
            `is_token_in_rank` `[num_tokens, num_ranks]` bool, and the event.

        Example:
            >>> per_rank, _, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 256)
        """
        check_tensor(topk_idx, "topk_idx")
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
            raise EPInputError(
                f"topk_idx has shape {list(topk_idx.shape)} and dtype {topk_idx.dtype}; expected [num_tokens, num_topk] int64 or int32. "
                f"Convert it."
            )
        num_experts = whole_number(num_experts, "num_experts", 1, MAX_EXPERTS, multiple_of=self.group_size)
        place = Placement(topk_idx, self.get_comm_stream, previous_event, async_finish)
        with place.here():
            per_rank, per_expert, goes = torch_kernels.dispatch_layout(topk_idx, num_experts, self.group_size)
        place.share(topk_idx, per_rank, per_expert, goes)
        return per_rank, None, per_expert, goes, place.finish(per_rank, per_expert, goes)

    def dispatch(
        self,
        x: Tensors,
        handle: NormalHandle | None = None,
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
    ) -> tuple[Tensors, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        """Send each token to the ranks that hold its experts, once to each rank.

        Args:
            x: `[num_tokens, hidden]` bfloat16 (float16 and float32 work too), or a pair of it in float8_e4m3fn and its scales
                `[num_tokens, hidden // 128]` float32.
            handle: Repeat the routing of an earlier dispatch; nothing is counted, and neither top-k argument is given.
            num_tokens_per_rank: From `get_dispatch_layout`; not looked at.
            num_tokens_per_rdma_rank: Not looked at.
            is_token_in_rank: From `get_dispatch_layout`. Without `topk_idx` it decides where tokens go.
            num_tokens_per_expert: From `get_dispatch_layout`; its length is the number of experts. Needed without a handle.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers; -1 skips. Decides where tokens go.
            topk_weights: `[num_tokens, num_topk]` float32.
            expert_alignment: Counts for each expert are rounded up to a multiple of this.
            num_worst_tokens: Rows that the results get instead of what arrived, so that the host does not wait. The same on all ranks,
                and at least the tokens of all ranks together, for no row to be lost.
            config: Its `num_sms` counts.
            previous_event: Start after this event instead of after the current stream.
            async_finish: Run on the communication stream; the event tells when it is done.
            allocate_on_comm_stream: Accepted; without effect.

        Returns:
            `recv_x` (a pair where `x` is one), `recv_topk_idx`, `recv_topk_weights`, `num_recv_tokens_per_expert_list` (empty with
            `num_worst_tokens`), `handle`, `event`. With a handle, all but the first and the last are None.

        Raises:
            EPInputError: if an argument is wrong or missing, or `num_nvl_bytes` was 0.
            EPConfigError: if there can be no Buffer of the sizes that the arguments have.
            EPUnavailableError: if the ranks are on several hosts.
            EPTimeoutError: if a peer did not answer.

        Example:
            >>> recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
            ...     x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank,
            ...     is_token_in_rank=is_token_in_rank, num_tokens_per_expert=per_expert)
        """
        normal, num_sms = self._need_normal(), self._sms(config)
        rows, scales = map(without_gradient, _rows_and_scales(x))
        topk_weights = without_gradient(topk_weights)
        place = Placement(rows, self.get_comm_stream, previous_event, async_finish)
        if scales is not None and not scales.is_contiguous():  # DeepEP takes column-major ones too
            with place.here():
                place.share(scales)
                scales = scales.contiguous()
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise EPInputError("dispatch got a handle and top-k tensors; a handle repeats a routing without them")
            handle = whole(handle)
            check_handle(handle, NormalHandle, "dispatch")
            handle.buffer.num_sms = num_sms
            sent = handle.buffer.dispatch(rows, x_scales=scales, handle=handle.own, previous_event=place.event, **place.options)
            return self._received(place, sent), None, None, None, None, place.finish(rows, scales)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise EPInputError(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, or a handle; get_dispatch_layout "
                "returns them"
            )
        num_tokens, dtype, backend = rows.shape[0], _width(rows), backend_of(rows)
        _check_layout(is_token_in_rank, num_tokens_per_expert, topk_idx, num_tokens, self.group_size)
        num_experts = num_tokens_per_expert.shape[0]
        expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MOST_ALIGNMENT)
        num_worst_tokens = 0 if num_worst_tokens is None else whole_number(num_worst_tokens, "num_worst_tokens", 0, MOST_BYTES)
        counts: list[int] = []
        if topk_idx is not None:
            check_tensor(topk_idx, "topk_idx")
            shape = Shape(rows.shape[1], topk_idx.shape[-1] if topk_idx.dim() else 0, num_experts, dtype, backend)
            chosen = topk_idx
        else:
            if topk_weights is not None:
                raise EPInputError("dispatch got topk_weights without topk_idx; pass both, or neither")
            shape = normal.shape_for_ranks(rows.shape[1], dtype, backend)
            with place.here():
                place.share(is_token_in_rank)
                local = shape.num_experts // self.group_size
                chosen = compat_routing.choices_of_ranks(is_token_in_rank, shape.num_topk, local)
                counts = [] if num_worst_tokens else num_tokens_per_expert.tolist()

        def send(buffer: Buffer, whole: bool) -> DispatchResult:
            part = [t if t is None or whole else t[:0] for t in (rows, chosen, topk_weights, scales)]
            buffer.num_sms = num_sms
            return buffer.dispatch(
                *part[:3],
                x_scales=part[3],
                num_worst_tokens=num_worst_tokens or None,
                expert_alignment=expert_alignment,
                previous_event=place.event,
                **place.options,
            )

        if num_worst_tokens:
            buffer = normal.take(shape, num_tokens, -(-num_worst_tokens // self.group_size))
            _check_room(num_tokens, buffer, num_worst_tokens)
            sent = send(buffer, True)
            told: list[int] = []
        else:
            buffer, sent, all_counts = normal.dispatch(shape, num_tokens, counts, send)
            told = sent.num_recv_tokens_per_expert_list or []
            if topk_idx is None:  # the Buffer counted rows for ranks
                mine = all_counts.sum(axis=0).reshape(self.group_size, -1)[self.rank]
                told = (-(-mine // expert_alignment) * expert_alignment).tolist()
        with place.here():
            # Copies: the memory of all results lives as long as one of them, and programs hold these from step to step.
            recv_src_idx = sent.recv_src_idx[:, 1].clone()
            topk = sent.recv_topk_idx, sent.recv_topk_weights
            experts, weights = (None if t is None or topk_idx is None else t.clone() for t in topk)
        place.share(*(t for t in (recv_src_idx, experts, weights) if t is not None))
        made = NormalHandle(buffer, sent.handle, recv_src_idx, is_token_in_rank)
        return self._received(place, sent), experts, weights, told, made, place.finish(rows, scales, chosen, topk_weights)

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to the ranks of their tokens, and add up the rows of each token there; without weights.

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32.
            handle: The handle of the dispatch.
            topk_weights: `[rows of recv_x, num_topk]` float32, to be added up too, or None.
            bias: One tensor, or a pair, `[num_tokens, hidden]`, dtype of `x`: added to the sum.
            config: Its `num_sms` counts.
            previous_event: Start after this event instead of after the current stream.
            async_finish: Run on the communication stream; the event tells when it is done.
            allocate_on_comm_stream: Accepted; without effect.

        Returns:
            The sums `[num_tokens, hidden]`, the sums of `topk_weights` or None, and the event.

        Raises:
            EPInputError: if an argument is wrong.
            EPUnavailableError: if the ranks are on several hosts.
            EPTimeoutError: if a peer did not answer.

        Example:
            >>> combined_x, _, event = buffer.combine(y, handle)
        """
        self._need_normal()
        handle = whole(handle)
        check_handle(handle, NormalHandle, "dispatch")
        check_tensor(x, "x")
        x, topk_weights = without_gradient(x), without_gradient(topk_weights)
        bias = tuple(map(without_gradient, bias)) if isinstance(bias, (tuple, list)) else without_gradient(bias)
        place = Placement(x, self.get_comm_stream, previous_event, async_finish)
        handle.buffer.num_sms = self._sms(config)
        back = handle.buffer.combine(
            x, handle.own, topk_weights=topk_weights, bias=bias, previous_event=place.event, **place.options
        )
        sums, weight_sums = self._handed_out(place, back.x, back.topk_weights)
        return sums, weight_sums, place.finish(x, topk_weights)

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not in this library.

        Raises:
            EPUnavailableError: always.
        """
        raise EPUnavailableError("internode_dispatch: between hosts there is low_latency_dispatch; inside one, call dispatch")

    def internode_combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not in this library.

        Raises:
            EPUnavailableError: always.
        """
        raise EPUnavailableError("internode_combine: between hosts there is low_latency_combine; inside one, call combine")

    def _received(self, place: Placement, sent: DispatchResult) -> Tensors:
        rows, scales = self._handed_out(place, sent.recv_x, sent.recv_x_scales)
        return rows if scales is None else (rows, scales)

    def _handed_out(self, place: Placement, *results: torch.Tensor | None) -> tuple[Any, ...]:
        """Results as the caller gets them: views of the library's memory, or copies in PyTorch's."""
        if not self.copies_results:
            return results
        with place.here():
            copies = tuple(None if result is None else result.clone() for result in results)
        place.share(*(copy for copy in copies if copy is not None))
        return copies

    def _sms(self, config: Config | None) -> int:
        """The SMs of a call."""
        if config is None:
            return self.num_sms
        return instance(config, "config", Config, "Make one, or leave it out.").num_sms

    def _need_normal(self) -> NormalBuffers:
        self._check_live()
        if self._ranks_per_host != self.group_size:
            raise EPUnavailableError(
                f"the {self.group_size} ranks are on {self.group_size // self._ranks_per_host} hosts; dispatch and combine expect one. "
                f"Call low_latency_dispatch and low_latency_combine"
            )
        if self._normal is None:
            raise EPInputError("this Buffer has no memory for dispatch and combine; make it with num_nvl_bytes, such as int(1e9)")
        return self._normal


def _rows_and_scales(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The two parts of FP8 rows; of other rows, these and None."""
    if not isinstance(x, tuple):
        check_rows(x)
        return x, None
    if len(x) != 2:
        raise argument_error(x, "x", "a tensor, or a pair of rows and scales", "Pass one of them.")
    rows, scales = x
    check_rows(rows)
    check_tensor(scales, "x[1]")
    return rows, scales


def _check_layout(goes: Any, num_tokens_per_expert: Any, topk_idx: Any, num_tokens: int, num_ranks: int) -> None:
    """Check what `get_dispatch_layout` returns; of `is_token_in_rank` (`goes`) the shape only where it decides where tokens go."""
    from_layout = "Pass what get_dispatch_layout returned."
    instance(goes, "is_token_in_rank", torch.Tensor, from_layout)
    instance(num_tokens_per_expert, "num_tokens_per_expert", torch.Tensor, from_layout)
    shape, wanted = list(goes.shape), [num_tokens, num_ranks]
    if topk_idx is None and (shape != wanted or goes.dtype is not torch.bool):
        raise EPInputError(f"is_token_in_rank has shape {shape} and dtype {goes.dtype}; expected {wanted} bool. {from_layout}")
    if num_tokens_per_expert.dim() != 1:
        shape = list(num_tokens_per_expert.shape)
        raise EPInputError(f"num_tokens_per_expert has shape {shape}; expected [num_experts]. {from_layout}")


def _width(x: torch.Tensor) -> str:
    """The dtype of a Buffer that takes such rows. FP8 rows come back as bfloat16."""
    return "bfloat16" if x.element_size() <= DTYPES["bfloat16"].itemsize else "float32"


def _check_room(num_tokens: int, buffer: Buffer, num_worst_tokens: int) -> None:
    room = buffer.config.num_max_tokens_per_rank
    if num_tokens > room:
        raise EPInputError(
            f"x has {num_tokens} tokens, and there is room for {room}. With num_worst_tokens={num_worst_tokens} the host does not wait, so "
            f"that ranks cannot agree on more; give a num_worst_tokens of at least the number of ranks times the most tokens of a rank"
        )
