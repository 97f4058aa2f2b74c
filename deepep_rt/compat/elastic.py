"""`ElasticBuffer` of DeepEP V2: one dispatch and one combine for training, prefill and decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import _env
from .._checks import argument_error, flag, whole_number
from ..backends.agreement import creation_comm
from ..comm.convert import communicator_of
from ..comm.failure_notice import FailureNotice, making
from ..config import MAX_ALIGNMENT, MAX_EXPERTS, MAX_SMS, MAX_TIMEOUT_S, MAX_TOPK, usual_sms
from ..errors import EPConfigError, EPInputError
from ..network import NetworkOptions
from ..torch.process_group import communicator
from .base import BufferState, Calls, tells_refusals
from .buffer import placement, ranks_of
from .buffer_cache import ElasticBuffers, Shape
from .checks import Tensors, backend_for, check_choices, check_handle, check_tensor, rows_and_scales, without_gradient
from .config import MOST_BYTES, expected_ranks_per_node, normal_bytes
from .elastic_handle import EPHandle, most_expanded_rows
from .events import CallStream, EventHandle, EventOverlap
from .normal import copied, widest_dtype

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from ..results import DispatchResult

_ALIGNMENT = 2 << 20  # of DeepEP's buffers


class ElasticBuffer(Calls):
    """DeepEP V2's `ElasticBuffer`, for expert parallelism. The constructor and every call are collective.

    Args:
        group: A `torch.distributed` group, an mpi4py communicator, or None.
        num_bytes: Kept as an attribute. A Buffer takes the memory that its calls need. None: `get_buffer_size_hint` of the next arguments.
        num_cpu_bytes: Must be 0: this library has no storage on the host.
        num_max_tokens_per_rank: The most tokens of a rank, for calls that do not name a number. Needed if `num_bytes` is None.
        hidden: Elements of a row. Rows of packed numbers with half as many bytes belong to it.
        num_topk: Kept as an attribute. Calls have that of their `topk_idx`.
        use_fp8_dispatch: Kept as an attribute. A dispatch of FP8 rows needs no setting.
        deterministic: Kept as an attribute. Results have the same bits in every run anyway.
        allow_hybrid_mode: Between nodes, send a token once to a node, and pass it on there. False: send it to each rank.
        allow_multiple_reduction: False: `combine` of expanded rows sends the row of each choice, and rounds once.
        prefer_overlap_with_compute: Kept as an attribute, without effect.
        sl_idx: Service level of InfiniBand between hosts; `EP_OVERRIDE_RDMA_SL` overrides it.
        num_allocated_qps: Connections to each peer on another host (NVSHMEM's IBGDA). 0: 17, or 65 with `allow_hybrid_mode`.
        num_cpu_timeout_secs: Accepted without effect.
        num_gpu_timeout_secs: Seconds after which a silent peer raises EPTimeoutError, unless `DEEPEP_RT_TIMEOUT_S` is set.
        explicitly_destroy: Kept as an attribute. A program may always call `destroy`.
        comm: An mpi4py communicator, if `group` is None.

    Attributes:
        rank_idx, num_ranks: This rank, and the ranks of the group.
        num_scaleout_ranks, num_scaleup_ranks: See `get_logical_domain_size`.
        num_rdma_ranks, num_nvlink_ranks: See `get_physical_domain_size`.

    Raises:
        EPConfigError: If there is neither a group nor a communicator, or sizes are missing or out of range.

    Example:
        >>> import deepep_rt.compat as deep_ep
        >>> buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    """

    copies_results: bool = False
    """True: `dispatch` and `combine` copy their results to PyTorch's memory, which programs may resize and `record_stream`."""
    num_slots: int = 2
    """The number of largest dispatch results that fit a new Buffer at once."""
    network: NetworkOptions | None = None
    """How new Buffers reach ranks of other nodes. None: as `compat.Buffer.network`."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        comm: Intracomm | None = None,
    ) -> None:
        ranks = ranks_of(group, comm)
        own = creation_comm(ranks, _env.timeout_s())
        with making(ranks, own, "the making of a Buffer") as notices:  # other ranks hear if this one refuses its arguments
            number = functools.partial(whole_number, error=EPConfigError)
            is_set = functools.partial(flag, error=EPConfigError)
            self.group = comm if group is None else group
            self.rank_idx, self.num_ranks = ranks.Get_rank(), ranks.Get_size()
            self.num_max_tokens_per_rank = number(num_max_tokens_per_rank, "num_max_tokens_per_rank", 0, MOST_BYTES)
            self.hidden, self.num_topk = number(hidden, "hidden", 0, MOST_BYTES), number(num_topk, "num_topk", 0, MAX_TOPK)
            self.use_fp8_dispatch = is_set(use_fp8_dispatch, "use_fp8_dispatch")
            self.deterministic = is_set(deterministic, "deterministic")
            self.allow_hybrid_mode = is_set(allow_hybrid_mode, "allow_hybrid_mode")
            self.allow_multiple_reduction = is_set(allow_multiple_reduction, "allow_multiple_reduction")
            self.prefer_overlap_with_compute = is_set(prefer_overlap_with_compute, "prefer_overlap_with_compute")
            self.explicitly_destroy = is_set(explicitly_destroy, "explicitly_destroy")
            if number(num_cpu_bytes, "num_cpu_bytes", 0, MOST_BYTES):
                raise argument_error(
                    num_cpu_bytes, "num_cpu_bytes", "0, because there is no Engram here", "Leave it out.", EPConfigError
                )
            if num_bytes is None:
                num_bytes = self.get_buffer_size_hint(self.group, self.num_max_tokens_per_rank, self.hidden, self.num_topk)
            self.num_bytes = number(num_bytes, "num_bytes", 0, MOST_BYTES)
            sl_idx = number(_env.deepep_service_level(sl_idx), "sl_idx", 0, 15)
            self.num_allocated_qps = (
                number(num_allocated_qps, "num_allocated_qps", 0, MOST_BYTES) or (17, 65)[self.allow_hybrid_mode]
            )
            number(num_cpu_timeout_secs, "num_cpu_timeout_secs", 1, int(MAX_TIMEOUT_S))
            limit_s = float(number(num_gpu_timeout_secs, "num_gpu_timeout_secs", 1, int(MAX_TIMEOUT_S)))
            self._timeout_s = _env.timeout_s(limit_s)
            node, is_one_host = placement(own)
            notice = FailureNotice(own.Dup())
            self._buffers = ElasticBuffers(ranks, **self._settings(node, is_one_host, sl_idx))
            self._state = BufferState(self.rank_idx, self.num_ranks, node, None, None, False, notice, self._buffers)
            notices.append(notice)
        own.release()
        ranks.heard = functools.partial(notice.heard, "the making of a Buffer")
        self._comm = ranks
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)

    def _settings(self, node: int, is_one_host: bool, service_level: int) -> dict[str, Any]:
        """Return the arguments that all Buffers have in common."""
        settings: dict[str, Any] = {"num_slots": self.num_slots, "timeout_s": self._timeout_s}
        if node < self.num_ranks:
            network = self.network
            if network is None and not is_one_host:
                network = NetworkOptions(ibgda=True, connections_per_peer=self.num_allocated_qps, service_level=service_level)
            path = "hierarchical" if self.allow_hybrid_mode else "direct"
            settings |= {"ranks_per_node": node, "network": network, "path": path}
        return settings

    # --- calls -------------------------------------------------------------------------------------------------------------------

    @tells_refusals
    def dispatch(
        self,
        x: Tensors,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensors, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token to the ranks that hold its experts, once to each rank.

        Args:
            x: `[num_tokens, hidden]` bfloat16, or a pair: rows in FP8 or packed bytes, and their scales `[num_tokens, packs]` of 4 bytes.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers; -1 skips. None with `handle`.
            topk_weights: `[num_tokens, num_topk]` float32, or None.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32. The call adds the tokens that arrive.
            num_experts: Experts over all ranks. Needed without `handle`.
            num_max_tokens_per_rank: The most tokens of a rank, the same on all ranks. Default: that of the handle or the constructor.
            expert_alignment: Round the count of each expert up to a multiple of this. Default: that of the handle, or 1.
            num_sms: SMs of the call. 0: this library's choice.
            num_qps: Accepted without effect.
            previous_event: The event after which the call starts, instead of the work of the current stream.
            previous_event_before_epilogue: The call starts after this event too.
            async_with_compute_stream: Run on the communication stream. The event then tells when the call is done.
            allocate_on_comm_stream: Accepted without effect.
            handle: Repeat the routing of an earlier dispatch. The host does not wait.
            do_handle_copy: Keep a copy of `topk_idx` in the handle, so that the program may change it.
            do_cpu_sync: Wait on the host for the counts, so that results have as many rows as arrived. False: they have room for all that
                can arrive, and a CUDA graph can capture the call. Default: True without a handle.
            do_expand: A row for each choice of this rank, expert by expert, instead of a row for each token. As in `handle`.
            do_zero_padding: With `do_expand`, fill padding rows with zeros.
            use_tma_aligned_col_major_sf: Deliver scales column by column, each column rounded up to 16 bytes.

        Returns:
            `recv_x` (a pair if `x` is one), `recv_topk_idx` (local numbers; None with `do_expand`), `recv_topk_weights` (None without
            weights; `[rows]` with `do_expand`), `handle` and `event`.

        Raises:
            EPInputError: If an argument is wrong or missing.
            EPConfigError: If no Buffer can have the sizes of the arguments.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> recv_x, recv_topk_idx, recv_topk_weights, handle, _ = buffer.dispatch(x, topk_idx, topk_weights, num_experts=256)
        """
        self._state.check_live()
        x, scales = map(without_gradient, rows_and_scales(x))
        topk_weights, num_sms = without_gradient(topk_weights), whole_number(num_sms, "num_sms", 0, MAX_SMS)
        whole_number(num_qps, "num_qps", 0, MOST_BYTES)
        do_expand, zero = flag(do_expand, "do_expand"), flag(do_zero_padding, "do_zero_padding")
        by_column = flag(use_tma_aligned_col_major_sf, "use_tma_aligned_col_major_sf") and scales is not None
        if zero and not do_expand:
            raise EPInputError(
                "do_zero_padding=True with do_expand=False; expected do_expand=True with it. Leave one of them out."
            )
        keeps_copy, stats = flag(do_handle_copy, "do_handle_copy"), cumulative_local_expert_recv_stats
        if num_experts is not None:
            num_experts = whole_number(num_experts, "num_experts", 1, MAX_EXPERTS, multiple_of=self.num_ranks)
        if handle is not None:
            self._check_handle(handle)
            given = topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand
            _check_repetition(handle, *given)
        if stats is not None and (experts_of_all := num_experts if handle is None else handle.num_experts):
            _check_stats(stats, experts_of_all // self.num_ranks)
        stream = CallStream(
            x,
            self.get_comm_stream,
            previous_event,
            flag(async_with_compute_stream, "async_with_compute_stream"),
            previous_event_before_epilogue,
        )
        if scales is not None:
            _check_scales(scales, x.shape[0])
            if not scales.is_contiguous():
                with stream.current():
                    stream.record_use(scales)
                    scales = scales.contiguous()
        options: dict[str, Any] = {"x_scales": scales, "previous_event": stream.previous_event, **stream.options}
        if do_expand:
            options |= {"layout": "expert", "zero_padding": zero, "scales_layout": "column" if by_column else "row"}
        if handle is not None:
            buffer, made, topk_idx = handle.buffer, handle, handle.topk_idx
            self._buffers.use_sms(buffer, num_sms or handle.num_sms)
            idx = topk_idx if topk_weights is not None or not do_expand else None
            sent = buffer.dispatch(x, idx, topk_weights, handle=handle.routing, **options)
        else:
            sizes = num_experts, num_max_tokens_per_rank, expert_alignment
            sent, made = self._dispatch_new(x, topk_idx, topk_weights, *sizes, num_sms, do_cpu_sync, keeps_copy, stream, options)
        # Programs hold the weights for a backward pass, and change the expert numbers in place. The handle has another copy of these.
        experts, weights = copied(stream, None if do_expand else sent.recv_topk_idx, sent.recv_topk_weights)
        if stats is not None:
            with stream.current():
                stats += made.num_unaligned_recv_tokens_per_expert
            stream.record_use(stats, made.num_unaligned_recv_tokens_per_expert)
        rows, received_scales = self._results(stream, sent.recv_x, _scales_of(sent, do_expand, by_column, stream))
        received = rows if scales is None else (rows, received_scales)
        return received, experts, weights, made, stream.finish(x, scales, topk_idx, topk_weights)

    def _dispatch_new(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
        num_sms: int,
        do_cpu_sync: bool | None,
        keeps_copy: bool,
        stream: CallStream,
        options: dict[str, Any],
    ) -> tuple[DispatchResult, EPHandle]:
        """Dispatch along a new routing. The handle has copies: a program holds it from step to step, and one array of a result keeps the
        memory of all its arrays.
        """
        if topk_idx is None or num_experts is None:
            missing = "topk_idx" if topk_idx is None else "num_experts"
            raise EPInputError(f"{missing}=None and handle=None; expected topk_idx and num_experts, or a handle. Pass them.")
        check_tensor(topk_idx, "topk_idx")
        check_choices(topk_idx)
        if topk_weights is not None:
            check_tensor(topk_weights, "topk_weights")
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        most = whole_number(most, "num_max_tokens_per_rank", 1, MOST_BYTES, remedy="Pass it here or to the constructor.")
        alignment = whole_number(1 if expert_alignment is None else expert_alignment, "expert_alignment", 1, MAX_ALIGNMENT)
        if x.shape[0] > most:
            raise EPInputError(
                f"x.shape={list(x.shape)}; expected at most num_max_tokens_per_rank={most} tokens. Pass a larger number on all ranks."
            )
        num_topk, all_tokens = topk_idx.shape[1], most * self.num_ranks
        has_sync = True if do_cpu_sync is None else flag(do_cpu_sync, "do_cpu_sync")
        expanded = most_expanded_rows(all_tokens, num_topk, num_experts // self.num_ranks, alignment)
        shape = Shape(self._hidden_of(x), num_topk, num_experts, widest_dtype(x), backend_for(x))
        most_here = max(most, self.num_max_tokens_per_rank)
        buffer = self._buffers.buffer_for(shape, most_here, 0 if has_sync else all_tokens, num_sms)
        by_expert = "layout" in options
        if not has_sync:
            options = options | {"num_worst_tokens": expanded if by_expert else all_tokens}
        sent = buffer.dispatch(x, topk_idx, topk_weights, expert_alignment=alignment, **options)
        sources, experts, offsets, kept = copied(
            stream,
            sent.recv_src_idx,
            None if by_expert else sent.recv_topk_idx,
            sent.expert_offsets if by_expert else None,
            topk_idx if keeps_copy else None,
        )
        handle = EPHandle(
            buffer,
            sent.handle,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=num_sms,
            topk_idx=topk_idx if kept is None else kept,
            rank=self.rank_idx,
            num_scaleup_ranks=self.num_scaleup_ranks,
            sources=sources,
            experts=experts,
            offsets=offsets,
            most_expanded=expanded,
        )
        return sent, handle

    @tells_refusals
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send rows back to the ranks of their tokens, and add up the rows of each token there, without weights.

        Args:
            x: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`.
            handle: The handle of the dispatch.
            topk_weights: `[rows of recv_x, num_topk]` float32, or `[rows of recv_x]` of an expanded dispatch. They return to the tokens.
            bias: One tensor or a pair of tensors, `[num_tokens, hidden]`, dtype of `x`. They are added to the sum.
            num_sms: SMs of the call. 0: those of the dispatch.
            num_qps: Accepted without effect.
            previous_event: The event after which the call starts, instead of the work of the current stream.
            previous_event_before_epilogue: The call starts after this event too.
            async_with_compute_stream: Run on the communication stream. The event then tells when the call is done.
            allocate_on_comm_stream: Accepted without effect.

        Returns:
            The sums `[num_tokens, hidden]`, the weights `[num_tokens, num_topk]` or None, and the event.

        Raises:
            EPInputError: If an argument is wrong.
            EPTimeoutError: If a peer did not answer.

        Example:
            >>> combined_x, _, _ = buffer.combine(y, handle)
        """
        self._state.check_live()
        self._check_handle(handle)
        check_tensor(x, "x")
        x, topk_weights = without_gradient(x), without_gradient(topk_weights)
        bias = tuple(map(without_gradient, bias)) if isinstance(bias, (tuple, list)) else without_gradient(bias)
        stream = CallStream(
            x,
            self.get_comm_stream,
            previous_event,
            flag(async_with_compute_stream, "async_with_compute_stream"),
            previous_event_before_epilogue,
        )
        whole_number(num_qps, "num_qps", 0, MOST_BYTES)
        self._buffers.use_sms(handle.buffer, whole_number(num_sms, "num_sms", 0, MAX_SMS) or handle.num_sms)
        reduce = "topk" if handle.do_expand and not self.allow_multiple_reduction else "rank"
        back = handle.buffer.combine(
            x,
            handle.routing,
            topk_weights=topk_weights,
            bias=bias,
            reduce=reduce,
            previous_event=stream.previous_event,
            **stream.options,
        )
        sums, weights = self._results(stream, back.x, back.topk_weights)
        return sums, weights, stream.finish(x, topk_weights)

    def _hidden_of(self, x: torch.Tensor) -> int:
        """Return the elements of a row. A byte of packed rows has two."""
        columns = int(x.shape[1])
        is_packed = x.element_size() == 1 and not x.is_floating_point() and 2 * columns == self.hidden
        return self.hidden if is_packed else columns

    def _check_handle(self, handle: Any) -> None:
        check_handle(handle, EPHandle, "dispatch")
        if handle.buffer not in self._buffers.living:
            raise EPInputError(
                "handle is of another ElasticBuffer; expected one of this ElasticBuffer. Call the one that dispatched."
            )

    def _results(self, stream: CallStream, *results: torch.Tensor | None) -> tuple[Any, ...]:
        return copied(stream, *results) if self.copies_results else results

    # --- the rest ----------------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the memory. Collective. Results must not be used afterwards."""
        state = self._state
        if state.is_destroyed:
            return
        state.is_destroyed = True
        state.notice.close()
        self._buffers.destroy()
        state.notice.end()

    def check(self) -> None:
        """Raise the error that the next call would raise, for loops that only replay CUDA graphs. DeepEP has no such call."""
        self._buffers.check()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait on the host until the work of the streams of all ranks is done.

        Args:
            use_comm_stream: Wait for the communication stream; False: for the current stream.
            with_cpu_sync: Wait for all work of this GPU.
            sequential: Accepted without effect.

        Raises:
            EPInputError: During the capture of a CUDA graph.
            EPTimeoutError: If a rank does not come.
        """
        self._state.check_live()
        if torch.cuda.is_available():
            if torch.cuda.is_current_stream_capturing():
                raise EPInputError("barrier: a CUDA graph is being captured; expected no capture. Call it before.")
            all_work = flag(with_cpu_sync, "with_cpu_sync")
            stream = self.get_comm_stream() if flag(use_comm_stream, "use_comm_stream") else torch.cuda.current_stream()
            torch.cuda.synchronize() if all_work else stream.synchronize()
        self._comm.meet(self._timeout_s, "barrier", "all ranks to call barrier").release()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes of such a Buffer on each rank, a multiple of 2 MiB. The number of experts, which calls name, matters little.

        Raises:
            EPConfigError: If a size is out of range.
        """
        num_ranks = communicator_of(group if hasattr(group, "Get_size") else communicator(group)).Get_size()
        tokens = whole_number(num_max_tokens_per_rank, "num_max_tokens_per_rank", 1, MOST_BYTES, error=EPConfigError)
        hidden = whole_number(hidden, "hidden", 1, MOST_BYTES, error=EPConfigError)
        experts = num_ranks * max(1, min(8, MAX_EXPERTS // num_ranks))
        topk = min(whole_number(num_topk, "num_topk", 0, MAX_TOPK, error=EPConfigError) or 8, experts)
        node = expected_ranks_per_node(num_ranks)
        num_bytes = normal_bytes(num_ranks, tokens, hidden, topk, experts, "bfloat16", ElasticBuffer.num_slots, node)
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    @staticmethod
    def capture() -> EventHandle:
        """Return an event after the work that the current stream holds now."""
        return EventHandle()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, and the ranks of a node."""
        return self._state.num_nodes, self._state.ranks_per_node

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the number of groups between which tokens travel once, and the ranks of such a group: those of a node with
        `allow_hybrid_mode`, and otherwise all ranks.
        """
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the SMs of a call with `num_sms=0`. They do not depend on the arguments."""
        whole_number(num_experts, "num_experts", 1, MAX_EXPERTS)
        whole_number(num_topk, "num_topk", 1, MAX_TOPK)
        whole_number(num_scaleout_topk, "num_scaleout_topk", 0, MAX_TOPK)
        return next((buffer.num_sms for buffer in self._buffers.living), usual_sms(self.num_ranks, self._state.num_nodes))

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return a number for `num_qps`, which has no effect here: at most `num_allocated_qps`."""
        sms = whole_number(num_sms, "num_sms", 1, MAX_SMS)
        return min(16 * sms + 1 if self.allow_hybrid_mode else min(sms, 9), self.num_allocated_qps)


def _check_repetition(
    handle: EPHandle,
    topk_idx: Any,
    num_experts: Any,
    num_max_tokens_per_rank: Any,
    expert_alignment: Any,
    do_cpu_sync: Any,
    do_expand: bool,
) -> None:
    """Raise EPInputError unless the arguments are those of the handle, or left out."""
    if topk_idx is not None:
        raise EPInputError("topk_idx with handle; expected one of them. Leave topk_idx out: the handle has it.")
    if do_cpu_sync is not None and flag(do_cpu_sync, "do_cpu_sync"):
        raise EPInputError("do_cpu_sync=True with handle; expected False or None, because the counts are known. Leave it out.")
    names = "num_experts", "num_max_tokens_per_rank", "expert_alignment"
    for name, value in zip(names, (num_experts, num_max_tokens_per_rank, expert_alignment), strict=True):
        if value is not None and whole_number(value, name, 0, MOST_BYTES) != getattr(handle, name):
            raise argument_error(value, name, f"{getattr(handle, name)}, as in the handle", "Leave it out.")
    if do_expand != handle.do_expand:
        raise argument_error(do_expand, "do_expand", f"{handle.do_expand}, as in the handle", "Pass that.")


def _check_stats(stats: Any, num_experts: int) -> None:
    name = "cumulative_local_expert_recv_stats"
    check_tensor(stats, name)
    if list(stats.shape) != [num_experts] or stats.dtype is not torch.int32:
        raise EPInputError(
            f"{name}.shape={list(stats.shape)}, dtype={stats.dtype}; expected [{num_experts}] int32. Make it with torch.zeros."
        )


def _check_scales(scales: torch.Tensor, num_tokens: int) -> None:
    shape = list(scales.shape)
    if len(shape) != 2 or shape[0] != num_tokens or scales.element_size() != 4:
        raise EPInputError(
            f"x[1].shape={shape}, dtype={scales.dtype}; expected [{num_tokens}, packs] of a dtype of 4 bytes. View packed bytes as int32."
        )


def _scales_of(sent: DispatchResult, do_expand: bool, by_column: bool, stream: CallStream) -> torch.Tensor | None:
    """Return the scales of the rows, `[rows, packs]`. By column, columns lie contiguously, each with a multiple of 4 scales."""
    scales, rows = sent.recv_x_scales, sent.handle.num_recv_rows
    if scales is None or not by_column:
        return scales
    if do_expand:
        return scales.t()[:rows]
    with stream.current():
        columns: Sequence[int] = (1, -(-rows // 4) * 4)
        found = torch.empty_strided(tuple(scales.shape), tuple(columns), dtype=scales.dtype, device=scales.device)
        found.copy_(scales)
    stream.record_use(found)
    return found
