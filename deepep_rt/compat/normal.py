"""The normal mode of DeepEP V1's Buffer: dispatch and combine of many tokens."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import instance, whole_number
from ..config import MAX_EXPERTS
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchResult
from ..torch import tensor_ops
from .base import Calls, tells_refusals
from .call_stream import CallStream
from .checks import Tensors, check_handle, check_tensor, rows_and_scales, without_gradient
from .config import Config
from .events import EventOverlap
from .handle_tables import tokens_for_nodes
from .handles import DispatchedHandle, InternodeHandle, NormalHandle, handle_of
from .normal_dispatch import NewDispatch, Routing, Rows, dispatch_known, dispatch_new


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
        rows = Rows(x, scales, stream, num_sms)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise EPInputError("handle and top-k tensors were given; expected one of them. Leave the top-k tensors out.")
            handle = handle_of(handle)
            check_handle(handle, DispatchedHandle, "dispatch")
            sent = dispatch_known(rows, handle)
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
        made = dispatch_new(rows, routing, normal, self._state.rank, self._state.num_ranks)
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

    def internode_dispatch(
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
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensors, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchedHandle | None, EventOverlap]:
        """Make a `dispatch` between nodes. `dispatch` does the same, and takes `num_worst_tokens` too.

        Args, results and errors are those of `dispatch`.

        Raises:
            EPUnavailableError: If all ranks are on one node.
        """
        self._check_several_nodes("dispatch")
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            config=config,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def internode_combine(
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
        """Make a `combine` between nodes. `combine` does the same.

        Args, results and errors are those of `combine`.

        Raises:
            EPUnavailableError: If all ranks are on one node.
        """
        self._check_several_nodes("combine")
        return self.combine(x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream)

    def _check_several_nodes(self, call: str) -> None:
        if self._state.num_nodes == 1:
            raise EPUnavailableError(
                f"internode_{call}: the {self._state.num_ranks} ranks are on one node; expected several. Call {call}, or declare nodes "
                f"with DEEPEP_RT_RANKS_PER_NODE."
            )

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
            return *_copied(stream, *topk), between_nodes
        experts, weights, source_tokens = _copied(stream, *topk, sent.recv_src_idx[:, 1])
        return experts, weights, NormalHandle(made.buffer, sent.handle, is_token_in_rank, source_tokens)

    def _received(self, stream: CallStream, sent: DispatchResult) -> Tensors:
        rows, scales = self._results(stream, sent.recv_x, sent.recv_x_scales)
        return rows if scales is None else (rows, scales)

    def _results(self, stream: CallStream, *results: torch.Tensor | None) -> tuple[Any, ...]:
        """Return results as they are, in the library's memory, or (`copies_results`) copies in PyTorch's memory."""
        return _copied(stream, *results) if self.copies_results else results

    def _num_sms_of(self, config: Config | None) -> int:
        if config is None:
            return self.num_sms
        return instance(config, "config", Config, "Make one, or leave it out.").num_sms


def _copied(stream: CallStream, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Copy tensors to PyTorch's memory, on the stream of the call."""
    with stream.current():
        copies = tuple(None if tensor is None else tensor.clone() for tensor in tensors)
    stream.record_use(*copies)
    return copies
