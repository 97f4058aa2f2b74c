"""The low-latency mode of DeepEP V1's Buffer, and its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .._checks import flag, whole_number
from ..errors import EPInputError, EPUnavailableError
from .base import Calls, backend_of, check_handle, check_rows, check_tensor, without_gradient
from .buffer_cache import LowLatencyBuffers
from .config import MOST_BYTES
from .events import EventOverlap, Placement
from .handles import ExpertHandle

if TYPE_CHECKING:
    from ..buffer import Buffer
    from .base import Tensors


class LowLatencyCalls(Calls):
    """The calls of the low-latency mode."""

    enable_shrink: bool
    _low_latency: LowLatencyBuffers | None

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to clean: the two modes have memory of their own. With `enable_shrink`, ranks that do not call this are masked.

        Raises:
            EPInputError: without `low_latency_mode`.
        """
        buffers = self._need_low_latency()
        tokens = whole_number(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank", 1, MOST_BYTES)
        hidden = whole_number(hidden, "hidden", 1, MOST_BYTES)
        num_experts = whole_number(num_experts, "num_experts", 1, MOST_BYTES)
        if self.enable_shrink:
            buffers.find_silent_ranks(tokens, hidden, num_experts)

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
            EPConfigError: if there can be no Buffer of the sizes that the arguments have.
            EPUnavailableError: if `use_fp8` is asked of an sm_80 GPU.

        Example:
            >>> recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, 128, 256, return_recv_hook=True)
            >>> hook()
        """
        buffers = self._need_low_latency()
        _check_hook(async_finish, return_recv_hook)
        check_rows(x)
        check_tensor(topk_idx, "topk_idx")
        x = without_gradient(x)
        hidden, num_topk = x.shape[1], topk_idx.shape[-1] if topk_idx.dim() else 0
        num_tokens = whole_number(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank", 1, MOST_BYTES)
        num_experts = whole_number(num_experts, "num_experts", 1, MOST_BYTES)
        use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
        if use_ue8m0 and hidden % 512:
            raise EPInputError(f"use_ue8m0 packs four scales of 128 channels; hidden is {hidden}, no multiple of 512")
        buffer = buffers.take(num_tokens, hidden, num_topk, num_experts, backend_of(x))
        topk_idx = _widened(topk_idx, num_topk, buffer, -1)
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
        if use_fp8 and sent.recv_x_scales is None:
            raise EPUnavailableError(
                "these GPUs cannot convert to FP8, and with use_fp8=True a pair is expected back; pass use_fp8=False"
            )
        made = ExpertHandle(buffer, sent.handle, num_topk)
        recv_x: Tensors = sent.recv_x
        copies = []  # to be made when rows have come
        if use_fp8:
            scales = sent.recv_x_scales.view(torch.int32) if use_ue8m0 else sent.recv_x_scales
            with place.here():
                columns = torch.empty(scales.mT.shape, dtype=scales.dtype, device=scales.device).mT
            place.share(columns)
            recv_x = (sent.recv_x, columns)
            copies.append((columns, scales))

        def finish() -> None:
            with place.here():
                while copies:  # and nothing is held afterwards
                    to, source = copies.pop()
                    to.copy_(source)

        hook = None
        if sent.hook is None:
            finish()
        else:
            made.is_received, receive = False, sent.hook

            def hook() -> None:
                receive()
                finish()
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
        check_handle(handle, ExpertHandle, "low_latency_dispatch")
        _check_hook(async_finish, return_recv_hook)
        zero_copy = flag(zero_copy, "zero_copy")
        if flag(use_logfmt, "use_logfmt"):
            raise EPUnavailableError("use_logfmt=True: this library sends combine's rows as bfloat16 only; leave it out")
        if combine_wait_recv_cost_stats is not None:
            raise EPUnavailableError(
                "combine_wait_recv_cost_stats: only dispatches measure waiting here; leave it out, or use dispatch_wait_recv_cost_stats"
            )
        buffer = handle.buffer
        if not zero_copy:
            check_tensor(x, "x")
        x = without_gradient(x)
        topk_idx = _widened(topk_idx, handle.num_topk, buffer, -1)
        topk_weights = _widened(without_gradient(topk_weights), handle.num_topk, buffer, 0)
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
        check_handle(handle, ExpertHandle, "low_latency_dispatch")
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

        Waits for the current stream.

        Raises:
            EPInputError: if the Buffer was made without `enable_shrink`, or the shape is another one.
        """
        buffers = self._need_shrink("low_latency_query_mask_buffer")
        check_tensor(mask_status, "mask_status")
        if mask_status.is_cuda:
            torch.cuda.current_stream().synchronize()  # a call that is under way may mask a rank
        masked = buffers.masked_ranks()
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


def _widened(choices: torch.Tensor, num_topk: int, buffer: Buffer, none: int) -> torch.Tensor:
    """The caller's `[num_tokens, num_topk]` as wide as the Buffer wants it, which may take more experts a token.

    What has another shape stays as it is: the Buffer refuses it.
    """
    missing = buffer.config.num_topk - num_topk
    if not missing or not isinstance(choices, torch.Tensor) or choices.dim() != 2 or choices.shape[1] != num_topk:
        return choices
    return torch.nn.functional.pad(choices, (0, missing), value=none)


def _check_hook(async_finish: bool, return_recv_hook: bool) -> None:
    if flag(async_finish, "async_finish") and flag(return_recv_hook, "return_recv_hook"):
        raise EPInputError("async_finish and return_recv_hook exclude each other: a hook receives on the stream of its call")
