"""The low-latency mode of DeepEP V1's Buffer, and its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._checks import argument_error, flag, instance, whole_number
from ..buffer import Buffer
from ..errors import EPInputError, EPUnavailableError
from ..results import LowLatencyDispatchResult
from .base import Calls, knows_other_versions, tells_refusals
from .checks import Tensors, backend_for, check_choices, check_handle, check_tensor, rows_and_scales, without_gradient
from .config import MOST_BYTES
from .events import CallStream, EventOverlap
from .handles import ExpertHandle


class LowLatencyCalls(Calls):
    """The calls of the low-latency mode."""

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Mask the ranks that do not make this call (with `enable_shrink`). Nothing needs cleaning: each mode has its own memory.

        Raises:
            EPInputError: Without `low_latency_mode`.
        """
        buffers = self._state.low_latency_buffers()
        tokens = whole_number(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank", 1, MOST_BYTES)
        hidden = whole_number(hidden, "hidden", 1, MOST_BYTES)
        num_experts = whole_number(num_experts, "num_experts", 1, MOST_BYTES)
        if self._state.enable_shrink:
            buffers.find_silent_ranks(tokens, hidden, num_experts)

    @tells_refusals
    @knows_other_versions
    def low_latency_dispatch(
        self,
        x: Tensors,
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
        """Send a few tokens to their experts with low latency. The rows that arrive lie expert by expert.

        Args:
            x: `[num_tokens, hidden]` bfloat16. DeepEP takes no other rows. Here, rows that the program has quantised travel as they are,
                whatever `use_fp8` says: a pair of rows and scales, or rows alone. In uint8, a byte holds two of the `hidden` numbers.
            topk_idx: `[num_tokens, num_topk]` int64 or int32, expert numbers, all different for one token; -1 skips.
            num_max_dispatch_tokens_per_rank: The largest number of tokens of a rank in this call. The same on all ranks. One Buffer serves
                all numbers up to its own.
            num_experts: Experts over all ranks.
            cumulative_local_expert_recv_stats: `[num_local_experts]` int32. The call adds the tokens that arrive.
            dispatch_wait_recv_cost_stats: `[num_ranks]` int64. The call adds the nanoseconds of waiting for each source.
            use_fp8: Send float8_e4m3fn with a scale for each 128 channels.
            round_scale: Make the scales powers of two.
            use_ue8m0: Deliver such scales as exponents, four in an int32. `hidden` must then be a multiple of 512.
            async_finish: Run on the communication stream. The event then tells when the call is done.
            return_recv_hook: Only send. The hook receives. Not together with `async_finish`.

        Returns:
            `recv_x` `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]`. With FP8, a pair of it and the
            scales: `[..., hidden // 128]` float32 or `[..., hidden // 512]` int32, the last two dimensions in column-major order.
            With quantised rows, a pair if `x` is one. Scales of 4 bytes have that order too, and others lie row by row.
            Then `recv_count` `[num_local_experts]` int32, `handle`, `event`, and `hook` (None without `return_recv_hook`).

        Raises:
            EPInputError: If an argument is wrong, or `low_latency_mode` is off.
            EPConfigError: If no Buffer can have the sizes of the arguments.
            EPUnavailableError: With `use_fp8` on an sm_80 GPU.

        Example:
            >>> recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, 128, 256, return_recv_hook=True)
            >>> hook()
        """
        buffers = self._state.low_latency_buffers()
        _check_hook(async_finish, return_recv_hook)
        x, scales = rows_and_scales(x)
        check_tensor(topk_idx, "topk_idx")
        x = without_gradient(x)
        check_choices(topk_idx)
        is_quantised = x.dtype is not torch.bfloat16
        hidden, num_topk = x.shape[1] * (2 if x.dtype is torch.uint8 else 1), topk_idx.shape[1]
        num_tokens = whole_number(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank", 1, MOST_BYTES)
        num_experts = whole_number(num_experts, "num_experts", 1, MOST_BYTES)
        if x.shape[0] > num_tokens:
            raise EPInputError(
                f"x.shape={list(x.shape)}; expected at most num_max_dispatch_tokens_per_rank={num_tokens} tokens. Pass the most that a "
                f"rank has."
            )
        use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
        if is_quantised:
            use_fp8 = round_scale = use_ue8m0 = False
        if use_ue8m0 and hidden % 512:
            raise EPInputError(f"hidden={hidden}; expected a multiple of 512 with use_ue8m0=True. Pass use_ue8m0=False.")
        buffer = buffers.buffer_for(num_tokens, hidden, num_topk, num_experts, backend_for(x))
        topk_idx = _padded(topk_idx, num_topk, buffer, -1)
        stream = CallStream(x, self.get_comm_stream, None, async_finish)
        sent = buffer.low_latency_dispatch(
            x,
            topk_idx,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            return_recv_hook=return_recv_hook,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            x_scales=scales,
            num_max_tokens=num_tokens,
            **stream.options,
        )
        handle = ExpertHandle(buffer, sent.handle, num_topk)
        recv_x, hook = _receive(sent, handle, stream, use_fp8 or scales is not None, use_ue8m0)
        event = stream.finish(x, scales, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        return recv_x, sent.num_recv_tokens_per_expert, handle, event, hook

    def low_latency_dispatch_fp4(
        self,
        x: torch.Tensor,
        scales: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertHandle, EventOverlap, Callable[[], None] | None]:
        """Send rows of NVFP4 with their scales. TensorRT-LLM's version of DeepEP has this call.

        Args:
            x: `[num_tokens, hidden // 2]` uint8, two numbers in a byte.
            scales: `[num_tokens, hidden // 16]` uint8.
            topk_idx: As in `low_latency_dispatch`, and so are the others.
            num_max_dispatch_tokens_per_rank: See there.
            num_experts: See there.
            async_finish: See there.
            return_recv_hook: See there.

        Returns:
            The rows, their scales, `recv_count`, `handle`, `event`, and `hook` of `low_latency_dispatch((x, scales), ...)`.

        Raises:
            EPInputError: As there.

        Example:
            >>> recv_x, recv_scales, recv_count, handle, event, hook = buffer.low_latency_dispatch_fp4(x, scales, topk_idx, 128, 256)
        """
        sizes = num_max_dispatch_tokens_per_rank, num_experts
        how = dict(async_finish=async_finish, return_recv_hook=return_recv_hook)
        (recv_x, recv_scales), *rest = self.low_latency_dispatch((x, scales), topk_idx, *sizes, **how)
        return recv_x, recv_scales, *rest

    @tells_refusals
    @knows_other_versions
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
        """Send the experts' outputs back. Each token gets the sum of its experts' rows, times its weights.

        Args:
            x: `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]` bfloat16. Not read with `zero_copy`.
            topk_idx: The argument of the dispatch.
            topk_weights: `[num_tokens, num_topk]` float32.
            handle: The handle of the dispatch.
            use_logfmt: Send the rows as 10-bit logarithms: `compress="log10"` of `deepep_rt.Buffer.low_latency_combine`. The format differs
                from DeepEP's, and `hidden` is a multiple of 512.
            zero_copy: Read the rows from the tensor that `get_next_low_latency_combine_buffer` returned.
            async_finish: Run on the communication stream. The event then tells when the call is done.
            return_recv_hook: Only send. The hook receives. Not together with `async_finish`.
            out: `[num_tokens, hidden]` bfloat16, to which the call writes the result.
            combine_wait_recv_cost_stats: Not supported.

        Returns:
            `[num_tokens, hidden]` bfloat16, the event, and the hook (None without `return_recv_hook`).

        Raises:
            EPInputError: If an argument is wrong.
            EPUnavailableError: For `combine_wait_recv_cost_stats`.

        Example:
            >>> combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
        """
        self._state.low_latency_buffers()
        check_handle(handle, ExpertHandle, "low_latency_dispatch")
        _check_hook(async_finish, return_recv_hook)
        zero_copy, use_logfmt = flag(zero_copy, "zero_copy"), flag(use_logfmt, "use_logfmt")
        if combine_wait_recv_cost_stats is not None:
            raise EPUnavailableError(
                "combine_wait_recv_cost_stats was given; expected None, because only dispatches measure waiting. "
                "Leave it out, or use dispatch_wait_recv_cost_stats."
            )
        buffer = handle.buffer
        if not zero_copy:
            check_tensor(x, "x")
        x = without_gradient(x)
        topk_idx = _padded(topk_idx, handle.num_topk, buffer, -1)
        topk_weights = _padded(without_gradient(topk_weights), handle.num_topk, buffer, 0)
        stream = CallStream(x, self.get_comm_stream, None, async_finish)
        back = buffer.low_latency_combine(
            buffer.get_low_latency_combine_buffer(handle.routing) if zero_copy else x,
            topk_idx,
            topk_weights,
            handle.routing,
            compress="log10" if use_logfmt else None,
            out=out,
            return_recv_hook=return_recv_hook,
            **stream.options,
        )
        combined = back.x if out is None else out
        return combined, stream.finish(x, topk_idx, topk_weights, combined), back.hook

    def get_next_low_latency_combine_buffer(self, handle: ExpertHandle) -> torch.Tensor:
        """Return memory for the experts' outputs, for `low_latency_combine(zero_copy=True)`.

        Returns:
            `[num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden]` bfloat16, the same for all handles of these sizes.
        """
        self._state.low_latency_buffers()
        check_handle(handle, ExpertHandle, "low_latency_dispatch")
        return handle.buffer.get_low_latency_combine_buffer(handle.routing)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return a tensor without elements. DeepEP returns its memory, which programs set to zero before ranks come back.

        This library needs no such cleaning: `low_latency_clean_mask_buffer` does all of it.

        Args:
            dtype: The dtype of the tensor.
            size: Its shape, which has no elements.
            offset: Accepted without effect.
            use_rdma_buffer: Must be True, for the low-latency mode.

        Returns:
            A tensor of `size`, or `[0]`, on the GPU if there is one.

        Raises:
            EPInputError: If `dtype` is not PyTorch's, or `low_latency_mode` is off.
            EPUnavailableError: Without `use_rdma_buffer`, or if `size` has elements.

        Example:
            >>> buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        """
        self._state.check_live()
        instance(dtype, "dtype", torch.dtype, "Pass one.")
        shape = [0] if size is None else _shape_of(size)
        if not flag(use_rdma_buffer, "use_rdma_buffer") or 0 not in shape:
            raise EPUnavailableError(
                f"get_local_buffer_tensor: use_rdma_buffer={use_rdma_buffer} and size={shape[:4]}; expected True and no elements. "
                f"Call get_next_low_latency_combine_buffer for rows that combine reads without a copy."
            )
        self._state.low_latency_buffers()
        return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Exclude a rank from low-latency calls (`mask=True`), or include it again.

        See `deepep_rt.Buffer.mask_rank` and `unmask_rank`. No hook may be open. All ranks must have made the same number of calls before a
        rank is included again.

        Raises:
            EPInputError: If the Buffer was made without `enable_shrink`, or there is no such other rank.
        """
        self._state.maskable_buffers("low_latency_update_mask_buffer").set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each excluded rank, and 0 for the others, to `mask_status` `[num_ranks]` int32.

        The host waits for the current stream.

        Raises:
            EPInputError: If the Buffer was made without `enable_shrink`, or the shape is wrong.
        """
        buffers = self._state.maskable_buffers("low_latency_query_mask_buffer")
        check_tensor(mask_status, "mask_status")
        if mask_status.is_cuda:
            torch.cuda.current_stream().synchronize()  # a running call may mask a rank
        masked = buffers.masked_ranks()
        num_ranks = self._state.num_ranks
        if mask_status.shape != (num_ranks,):
            raise EPInputError(f"mask_status.shape={list(mask_status.shape)}; expected [{num_ranks}]. Make one of that shape.")
        mask_status.copy_(torch.tensor([rank in masked for rank in range(num_ranks)], dtype=mask_status.dtype, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Include all ranks again, as `low_latency_update_mask_buffer(rank, mask=False)` does for one.

        Raises:
            EPInputError: If the Buffer was made without `enable_shrink`.
        """
        buffers = self._state.maskable_buffers("low_latency_clean_mask_buffer")
        for rank in buffers.masked_ranks():
            buffers.set_mask(rank, False)


def _shape_of(size: Any) -> list[int]:
    if not isinstance(size, (tuple, list)):
        raise argument_error(size, "size", "a shape such as [0, 128]", "Pass one, or None.")
    return [whole_number(extent, "size", 0, MOST_BYTES) for extent in size]


def _receive(
    sent: LowLatencyDispatchResult, handle: ExpertHandle, stream: CallStream, has_scales: bool, use_ue8m0: bool
) -> tuple[Tensors, Callable[[], None] | None]:
    """Return the rows as DeepEP does, with scales in column-major order, and the hook of the call."""
    recv_x: Tensors = sent.recv_x
    copies = []  # of scales, from one tensor to another, when rows have arrived
    if has_scales:
        if sent.recv_x_scales is None:
            raise EPUnavailableError(
                "use_fp8=True; expected False, because these GPUs cannot convert to FP8. Pass use_fp8=False."
            )
        scales = sent.recv_x_scales.view(torch.int32) if use_ue8m0 else sent.recv_x_scales
        recv_x = (sent.recv_x, scales)
        if scales.itemsize == 4:
            with stream.current():
                columns = torch.empty(scales.mT.shape, dtype=scales.dtype, device=scales.device).mT
            stream.record_use(columns)
            recv_x = (sent.recv_x, columns)
            copies.append((columns, scales))

    def copy_scales() -> None:
        with stream.current():
            while copies:  # this holds no tensor afterwards
                target, source = copies.pop()
                target.copy_(source)

    if sent.hook is None:
        copy_scales()
        return recv_x, None
    handle.is_received, receive = False, sent.hook

    def hook() -> None:
        receive()
        copy_scales()
        handle.is_received = True

    return recv_x, hook


def _padded(choices: torch.Tensor, num_topk: int, buffer: Buffer, value: int) -> torch.Tensor:
    """Pad the caller's `[num_tokens, num_topk]` to the top-k of the Buffer, which may be larger.

    Return any other shape as it is: the Buffer refuses it.
    """
    missing = buffer.config.num_topk - num_topk
    if not missing or not isinstance(choices, torch.Tensor) or choices.dim() != 2 or choices.shape[1] != num_topk:
        return choices
    return torch.nn.functional.pad(choices, (0, missing), value=value)


def _check_hook(async_finish: bool, return_recv_hook: bool) -> None:
    if flag(async_finish, "async_finish") and flag(return_recv_hook, "return_recv_hook"):
        raise EPInputError(
            "async_finish=True with return_recv_hook=True; expected one of them, because a hook receives on the stream of its call. "
            "Leave one out."
        )
