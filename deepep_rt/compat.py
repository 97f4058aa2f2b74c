"""DeepEP V1's Python interface on top of `deepep_rt.Buffer`: `import deepep_rt.compat as deep_ep`.

Names, arguments, defaults and results are those of DeepEP 1.2; docs/coming-from-deepep.md says what differs. Tensors are PyTorch's: on
GPUs, or on the CPU, where calls run on the host backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from . import buffer as _core
from . import compat_routing
from .arrays import DTYPES
from .comm import ranks_per_host
from .compat_config import Config
from .compat_events import EventHandle, EventOverlap, Placement
from .compat_handles import ExpertHandle, NormalHandle
from .compat_memory import LowLatencyBuffers, NormalBuffers, Shape
from .errors import EPConfigError, EPDestroyedError, EPInputError, EPUnavailableError
from .network import NetworkOptions
from .results import DispatchResult
from .torch import communicator

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    Tensors: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]

topk_idx_t = torch.int64
"""What expert numbers are in DeepEP; int32 is welcome too."""


class Buffer:
    """DeepEP V1's `Buffer`. Making it, and every call, is collective: all ranks do it in the same order.

    Args:
        group: A `torch.distributed` group whose processes mpirun started, or None.
        num_nvl_bytes: Memory for the normal mode (`dispatch`, `combine`) on each rank. Tells how many tokens room is made for at first;
            where calls have more, more is taken. 0: no normal mode.
        num_rdma_bytes: Accepted; the low-latency mode takes what its calls need.
        low_latency_mode: Whether the low-latency calls may be made.
        num_qps_per_rank: Connections to each peer on another host (NVSHMEM's IBGDA).
        allow_nvlink_for_low_latency_mode: False: low-latency calls go through NVSHMEM also between the ranks of a host.
        allow_mnnvl: Accepted; without effect.
        use_fabric: Accepted; without effect.
        explicitly_destroy: Accepted; `destroy` may be called in any case, and nothing is given back without it.
        enable_shrink: Low-latency calls leave silent ranks out, and the mask calls work.
        comm: An mpi4py communicator, where `group` is None.

    Raises:
        EPConfigError: if there is neither a group nor a communicator, or torchrun started the processes.
        EPUnavailableError: if `num_nvl_bytes` asks for the normal mode with ranks on several hosts.

    Example:
        >>> import deepep_rt.compat as deep_ep
        >>> buffer = deep_ep.Buffer(group, num_nvl_bytes=int(1e9))
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Intracomm | None = None,
    ) -> None:
        if group is None and comm is None:
            raise EPConfigError(
                "neither group nor comm was given; pass a torch.distributed group, or an mpi4py communicator as comm="
            )
        ranks: Intracomm = communicator(group) if group is not None else comm  # type: ignore[assignment]
        self.rank, self.group_size = ranks.Get_rank(), ranks.Get_size()
        self.group = comm if group is None else group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self._comm_stream: Any = None
        self._destroyed = False
        self._normal = NormalBuffers(ranks, num_nvl_bytes) if num_nvl_bytes else None
        settings: dict[str, Any] = {"on_timeout": "mask" if enable_shrink else "raise"}
        if not allow_nvlink_for_low_latency_mode:
            settings["ranks_per_node"] = 1
        if low_latency_mode and ranks_per_host(ranks) < self.group_size:
            settings["network"] = NetworkOptions(ibgda=True, connections_per_peer=num_qps_per_rank)
        self._low_latency = LowLatencyBuffers(ranks, **settings) if low_latency_mode else None

    def destroy(self) -> None:
        """Give the memory back. Collective; results that are still held must not be used afterwards."""
        self._destroyed = True
        for buffers in (self._normal, self._low_latency):
            if buffers is not None:
                buffers.destroy()

    # --- settings and sizes ------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 conversion works: kernels are compiled for the GPU at hand."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of the normal mode; takes effect where memory is made: with the first call of each hidden size and routing.

        Raises:
            EPInputError: if the number is odd.
        """
        if new_num_sms % 2:
            raise EPInputError(f"new_num_sms is {new_num_sms}; expected an even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The configuration that `dispatch` takes without one: `num_sms`, whatever the number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The configuration that `combine` takes without one: `num_sms`, whatever the number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that the low-latency mode takes on each rank with such calls (of up to 8 experts a token)."""
        return _core.Buffer.size_hint(
            num_ranks,
            num_max_tokens_per_rank=num_max_dispatch_tokens_per_rank,
            hidden=hidden,
            num_topk=min(8, num_experts),
            num_experts=num_experts,
            low_latency=True,
        )["total"]

    # --- streams -----------------------------------------------------------------------------------------------------------------

    @staticmethod
    def capture() -> EventOverlap:
        """An event after the work that the current stream holds now."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """The `torch.cuda.Stream` on which calls with `async_finish` run.

        Raises:
            EPUnavailableError: without a GPU.
        """
        if self._comm_stream is None:
            if not torch.cuda.is_available():
                raise EPUnavailableError("get_comm_stream: there is no GPU, and so there are no streams")
            self._comm_stream = torch.cuda.Stream()
        return self._comm_stream

    # --- the normal mode ---------------------------------------------------------------------------------------------------------

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
        if topk_idx.dim() != 2 or num_experts % self.group_size:
            raise EPInputError(
                f"topk_idx has shape {list(topk_idx.shape)} and num_experts is {num_experts}; expected [num_tokens, num_topk] and a "
                f"multiple of the {self.group_size} ranks"
            )
        place = Placement(topk_idx, self.get_comm_stream, previous_event, async_finish)
        with place.here():
            per_rank, per_expert, goes = compat_routing.dispatch_layout(topk_idx, num_experts, self.group_size)
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
            config: Where memory is made for this call, its `num_sms` counts.
            previous_event: Start after this event instead of after the current stream.
            async_finish: Run on the communication stream; the event tells when it is done.
            allocate_on_comm_stream: Accepted; without effect.

        Returns:
            `recv_x` (a pair where `x` is one), `recv_topk_idx`, `recv_topk_weights`, `num_recv_tokens_per_expert_list` (empty with
            `num_worst_tokens`), `handle`, `event`. With a handle, all but the first and the last are None.

        Raises:
            EPInputError: if an argument is wrong or missing, or `num_nvl_bytes` was 0.
            EPTimeoutError: if a peer did not answer.

        Example:
            >>> recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
            ...     x, topk_idx=topk_idx, topk_weights=topk_weights, num_tokens_per_rank=per_rank,
            ...     is_token_in_rank=is_token_in_rank, num_tokens_per_expert=per_expert)
        """
        normal = self._need_normal()
        rows, scales = x if isinstance(x, tuple) else (x, None)
        place = Placement(rows, self.get_comm_stream, previous_event, async_finish)
        if scales is not None and not scales.is_contiguous():  # DeepEP takes column-major ones too
            with place.here():
                place.share(scales)
                scales = scales.contiguous()
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise EPInputError("dispatch got a handle and top-k tensors; a handle repeats a routing without them")
            _check_handle(handle, NormalHandle, "dispatch")
            sent = handle.buffer.dispatch(rows, x_scales=scales, handle=handle.own, previous_event=place.event, **place.options)
            return _received(sent), None, None, None, None, place.finish(rows, scales)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise EPInputError(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, or a handle; get_dispatch_layout "
                "returns them"
            )
        num_tokens, num_sms = rows.shape[0], (config or self.get_dispatch_config(self.group_size)).num_sms
        num_experts, dtype, backend = num_tokens_per_expert.shape[0], _width(rows), _backend(rows)
        counts: list[int] = []
        if topk_idx is not None:
            shape = Shape(rows.shape[1], topk_idx.shape[1], num_experts, dtype, backend)
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

        def send(buffer: _core.Buffer, whole: bool) -> DispatchResult:
            part = [t if t is None or whole else t[:0] for t in (rows, chosen, topk_weights, scales)]
            return buffer.dispatch(
                *part[:3],
                x_scales=part[3],
                num_worst_tokens=num_worst_tokens or None,
                expert_alignment=expert_alignment,
                previous_event=place.event,
                **place.options,
            )

        if num_worst_tokens:
            buffer = normal.take(shape, num_tokens, -(-num_worst_tokens // self.group_size), num_sms)
            _check_room(num_tokens, buffer, num_worst_tokens)
            sent = send(buffer, True)
            told: list[int] = []
        else:
            buffer, sent, all_counts = normal.dispatch(shape, num_tokens, counts, num_sms, send)
            told = sent.num_recv_tokens_per_expert_list or []
            if topk_idx is None:  # the Buffer counted rows for ranks
                mine = all_counts.sum(axis=0).reshape(self.group_size, -1)[self.rank]
                told = (-(-mine // expert_alignment) * expert_alignment).tolist()
        with place.here():
            # A copy: the memory of all results lives as long as one of them.
            recv_src_idx = sent.recv_src_idx[:, 1].clone()
        place.share(recv_src_idx)
        made = NormalHandle(buffer, sent.handle, recv_src_idx, is_token_in_rank)
        topk = (sent.recv_topk_idx, sent.recv_topk_weights) if topk_idx is not None else (None, None)
        return _received(sent), *topk, told, made, place.finish(rows, scales, chosen, topk_weights)

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
            config: Accepted; the memory of the handle's dispatch has its number of SMs.
            previous_event: Start after this event instead of after the current stream.
            async_finish: Run on the communication stream; the event tells when it is done.
            allocate_on_comm_stream: Accepted; without effect.

        Returns:
            The sums `[num_tokens, hidden]`, the sums of `topk_weights` or None, and the event.

        Raises:
            EPInputError: if an argument is wrong.
            EPTimeoutError: if a peer did not answer.

        Example:
            >>> combined_x, _, event = buffer.combine(y, handle)
        """
        self._need_normal()
        _check_handle(handle, NormalHandle, "dispatch")
        place = Placement(x, self.get_comm_stream, previous_event, async_finish)
        back = handle.buffer.combine(
            x, handle.own, topk_weights=topk_weights, bias=bias, previous_event=place.event, **place.options
        )
        return back.x, back.topk_weights, place.finish(x, topk_weights)

    # --- the low-latency mode ----------------------------------------------------------------------------------------------------

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: the two modes have memory of their own, and neither has to be cleaned.

        Raises:
            EPInputError: without `low_latency_mode`.
        """
        self._need_low_latency()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensors, torch.Tensor, ExpertHandle, EventOverlap, Callable[[], None] | None]:
        """Send a few tokens to their experts as fast as possible; what arrives lies expert by expert.

        Args:
            x: `[num_tokens, hidden]` bfloat16.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers, a token's all different; -1 skips.
            num_max_dispatch_tokens_per_rank: Most tokens of a rank, the same on all ranks.
            num_experts: Experts over all ranks.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32; the tokens that arrive are added to it.
            dispatch_wait_recv_cost_stats: `[num_ranks]` int64; nanoseconds of waiting for each source are added to it.
            use_fp8: Send float8_e4m3fn with a scale for each 128 channels.
            round_scale: Make the scales powers of two.
            use_ue8m0: Deliver such scales as exponents, four to an int32. `hidden` is a multiple of 512 then.
            async_finish: Run on the communication stream; the event tells when it is done.
            return_recv_hook: Only send; calling the hook receives. Not together with `async_finish`.

        Returns:
            `recv_x` `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`, with FP8 a pair of it and the scales
            (`[..., hidden // 128]` float32 or `[..., hidden // 512]` int32, whose last two dimensions lie in column-major order);
            `recv_count` `[num_local_experts]` int32; `handle`; `event`; `hook` (None without `return_recv_hook`).

        Raises:
            EPInputError: if an argument is wrong, or `low_latency_mode` is off.

        Example:
            >>> recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, 128, 256, return_recv_hook=True)
            >>> hook()
        """
        buffers = self._need_low_latency()
        _check_hook(async_finish, return_recv_hook)
        num_tokens, (hidden, num_topk) = num_max_dispatch_tokens_per_rank, (x.shape[1], topk_idx.shape[1])
        if use_ue8m0 and hidden % 512:
            raise EPInputError(f"use_ue8m0 packs four scales of 128 channels; hidden is {hidden}, no multiple of 512")
        buffer = buffers.take(num_tokens, hidden, num_topk, num_experts, _backend(x))
        place = Placement(x, self.get_comm_stream, None, async_finish)
        sent = buffer.low_latency_dispatch(
            x,
            topk_idx,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            return_recv_hook=return_recv_hook,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            **place.options,
        )
        made = ExpertHandle(buffer, sent.handle)
        recv_x: Tensors = sent.recv_x
        deliver: Callable[[], Any] = lambda: None  # noqa: E731
        if use_fp8:
            scales = sent.recv_x_scales.view(torch.int32) if use_ue8m0 else sent.recv_x_scales
            with place.here():
                columns = torch.empty(scales.mT.shape, dtype=scales.dtype, device=scales.device).mT
                deliver = lambda: columns.copy_(scales)  # noqa: E731
                if not return_recv_hook:
                    deliver()
            place.share(columns)
            recv_x = (sent.recv_x, columns)
        hook = None
        if sent.hook is not None:
            made.is_received, receive = False, sent.hook

            def hook() -> None:
                receive()
                with place.here():
                    deliver()
                made.is_received = True

        event = place.finish(x, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        return recv_x, sent.num_recv_tokens_per_expert, made, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: ExpertHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Bring the experts' outputs back: each token gets the sum of its experts' rows times its weights.

        Args:
            x: `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]` bfloat16. Not looked at with `zero_copy`.
            topk_idx: As given to the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: The handle of the dispatch.
            use_logfmt: Not in this library.
            zero_copy: The rows are in the tensor that `get_next_low_latency_combine_buffer` returned.
            async_finish: Run on the communication stream; the event tells when it is done.
            return_recv_hook: Only send; calling the hook receives. Not together with `async_finish`.
            out: `[num_tokens, hidden]` bfloat16 to write the result to.
            combine_wait_recv_cost_stats: Not in this library.

        Returns:
            `[num_tokens, hidden]` bfloat16, the event, and the hook (None without `return_recv_hook`).

        Raises:
            EPInputError: if an argument is wrong.
            EPUnavailableError: for `use_logfmt` and `combine_wait_recv_cost_stats`.

        Example:
            >>> combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
        """
        self._need_low_latency()
        _check_handle(handle, ExpertHandle, "low_latency_dispatch")
        _check_hook(async_finish, return_recv_hook)
        if use_logfmt:
            raise EPUnavailableError("use_logfmt=True: this library sends combine's rows as bfloat16 only; leave it out")
        if combine_wait_recv_cost_stats is not None:
            raise EPUnavailableError(
                "combine_wait_recv_cost_stats: only dispatches measure waiting here; leave it out, or use dispatch_wait_recv_cost_stats"
            )
        buffer = handle.buffer
        place = Placement(x, self.get_comm_stream, None, async_finish)
        back = buffer.low_latency_combine(
            buffer.get_low_latency_combine_buffer(handle.own) if zero_copy else x,
            topk_idx,
            topk_weights,
            handle.own,
            out=out,
            return_recv_hook=return_recv_hook,
            **place.options,
        )
        combined = back.x if out is None else out
        return combined, place.finish(x, topk_idx, topk_weights, combined), back.hook

    def get_next_low_latency_combine_buffer(self, handle: ExpertHandle) -> torch.Tensor:
        """Memory for the experts' outputs, for `low_latency_combine(zero_copy=True)`.

        Returns:
            `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]` bfloat16; one for all handles of these sizes.
        """
        self._need_low_latency()
        _check_handle(handle, ExpertHandle, "low_latency_dispatch")
        return handle.buffer.get_low_latency_combine_buffer(handle.own)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of low-latency calls (`mask=True`), or let it take part again.

        See `deepep_rt.Buffer.mask_rank` and `unmask_rank`: no hook may be open, and all ranks have made the same number of calls when one
        is let in again.

        Raises:
            EPInputError: if the Buffer was made without `enable_shrink`, or there is no such other rank.
        """
        self._need_shrink("low_latency_update_mask_buffer").set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is left out, and 0 for the others, to `mask_status` `[num_ranks]` int32.

        Raises:
            EPInputError: if the Buffer was made without `enable_shrink`, or the shape is another one.
        """
        masked = self._need_shrink("low_latency_query_mask_buffer").masked_ranks()
        if mask_status.shape != (self.group_size,):
            raise EPInputError(f"mask_status has shape {list(mask_status.shape)}; expected [{self.group_size}]")
        mask_status.copy_(
            torch.tensor([rank in masked for rank in range(self.group_size)], dtype=mask_status.dtype, device="cpu")
        )

    def low_latency_clean_mask_buffer(self) -> None:
        """Let all ranks take part again, as with `low_latency_update_mask_buffer(rank, mask=False)` for each.

        Raises:
            EPInputError: if the Buffer was made without `enable_shrink`.
        """
        buffers = self._need_shrink("low_latency_clean_mask_buffer")
        for rank in buffers.masked_ranks():
            buffers.set_mask(rank, False)

    # --- what is not here --------------------------------------------------------------------------------------------------------

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> NoReturn:
        """Not in this library: its memory is no array of the caller's.

        Raises:
            EPUnavailableError: always.
        """
        raise EPUnavailableError(
            "get_local_buffer_tensor: the memory of this library is not open to callers; for rows that combine shall read without a copy, "
            "use get_next_low_latency_combine_buffer"
        )

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

    @property
    def runtime(self) -> NoReturn:
        """Not in this library: DeepEP's C++ object.

        Raises:
            EPUnavailableError: always.
        """
        raise EPUnavailableError("runtime: there is no C++ object behind this Buffer; use the methods of the Buffer")

    # --- checks ------------------------------------------------------------------------------------------------------------------

    def _need_normal(self) -> NormalBuffers:
        self._check_live()
        if self._normal is None:
            raise EPInputError("this Buffer has no memory for dispatch and combine; make it with num_nvl_bytes, such as int(1e9)")
        return self._normal

    def _need_low_latency(self) -> LowLatencyBuffers:
        self._check_live()
        if self._low_latency is None:
            raise EPInputError("this Buffer has no memory for low-latency calls; make it with low_latency_mode=True")
        return self._low_latency

    def _need_shrink(self, what: str) -> LowLatencyBuffers:
        buffers = self._need_low_latency()
        if not self.enable_shrink:
            raise EPInputError(f"{what}: make the Buffer with enable_shrink=True to leave ranks out")
        return buffers

    def _check_live(self) -> None:
        if self._destroyed:
            raise EPDestroyedError("this Buffer was destroyed; make a new one")


def _received(sent: DispatchResult) -> Tensors:
    return sent.recv_x if sent.recv_x_scales is None else (sent.recv_x, sent.recv_x_scales)


def _backend(x: torch.Tensor) -> str:
    return "cuda" if x.is_cuda else "host"


def _width(x: torch.Tensor) -> str:
    """The dtype of a Buffer that takes such rows. FP8 rows come back as bfloat16."""
    return "bfloat16" if x.element_size() <= DTYPES["bfloat16"].itemsize else "float32"


def _check_room(num_tokens: int, buffer: _core.Buffer, num_worst_tokens: int) -> None:
    room = buffer.config.num_max_tokens_per_rank
    if num_tokens > room:
        raise EPInputError(
            f"x has {num_tokens} tokens, and there is room for {room}. With num_worst_tokens={num_worst_tokens} the host does not wait, so "
            f"that ranks cannot agree on more; give a num_worst_tokens of at least the number of ranks times the most tokens of a rank"
        )


def _check_handle(handle: Any, kind: type, source: str) -> None:
    if not isinstance(handle, kind):
        raise EPInputError(f"handle is a {type(handle).__name__}; pass what {source} returned as its handle, whole")


def _check_hook(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise EPInputError("async_finish and return_recv_hook exclude each other: a hook receives on the stream of its call")
