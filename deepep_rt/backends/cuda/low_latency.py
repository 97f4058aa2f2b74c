"""The low-latency calls of the CUDA backend: one launch for a call, or one for its sending and one for its receiving part."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

from ...arrays.dtypes import FP8_GROUP
from ...arrays.view import HOST, Framework, View
from ...comm import call_signature
from ...cuda import driver
from ...cuda.pool import Slot, Slots
from ...errors import EPInputError, EPUnavailableError
from ...kernels.layout import Layout
from ...kernels.structs import LL_RECEIVE, LL_SEND
from ...kernels.table import KERNELS
from ...kernels.tuning import has_fp8
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..calls import Call, LowLatencyCombineInputs, LowLatencyDispatchInputs
from ..hooks import Hook, HookQueue, Hooks, check_hook_called
from .backend import DeviceBackend, address_of
from .transfer import to_host

_log = logging.getLogger("deepep_rt")

_PHASES = {False: LL_SEND | LL_RECEIVE, True: LL_SEND}
"""What a call launches, by whether it has a hook, which launches the rest."""


_living: weakref.WeakSet[DeviceLowLatencyBackend] = weakref.WeakSet()
"""Backends with low-latency calls that were not destroyed."""


def _allow_overlap() -> None:
    """Let a low-latency kernel start while the one before it in its stream ends, if all such kernels are of one Buffer.

    Blocks that start early hold SMs until then. Those of two Buffers can keep each other's kernels from the GPU, on ranks that launch in
    different orders, for ever. A captured graph keeps what it was captured with. That is safe: a Buffer captures graphs that overlap
    only while it is alone, so graphs of two living Buffers never both do.
    """
    for backend in _living:
        for launcher in backend._launchers.values():
            launcher.allow_overlap(len(_living) == 1)


class _Results:
    """Results of one kind of dispatch: their memory, and what lies where in it."""

    def __init__(self, slots: Callable[[int], Slots], layout: Layout, use_fp8: bool, use_ue8m0: bool) -> None:
        parts = layout.low_latency_result(use_fp8=use_fp8, use_ue8m0=use_ue8m0)
        self.memory = slots(parts.num_bytes)
        self.x, self.scales = parts.offsets["x"], parts.offsets["scales"]
        self.dtype = "float8_e4m3fn" if use_fp8 else "bfloat16"
        self.scale_dtype = None if not use_fp8 else "uint8" if use_ue8m0 else "float32"


class DeviceLowLatencyBackend(DeviceBackend):
    """The CUDA backend with both kinds of calls; the arguments are those of `DeviceBackend`."""

    def _make_own_part(self) -> None:
        super()._make_own_part()
        config = self.config
        self._ll_handle_map = self._layout.low_latency_handle
        self._ll_handles = self._slots(self._ll_handle_map.num_bytes, self._layout.num_handles if config.low_latency else 0)
        # Where results of a dispatch lie, and memory for them, by use_fp8 and use_ue8m0; it is kept, and handed out again.
        self._ll_results = {
            kind: _Results(self._slots, self._layout, *kind) for kind in ((False, False), (True, False), (True, True))
        }
        self._ll_sums = self._slots(config.num_max_tokens_per_rank * config.hidden * 2)
        # Rows travel in one form: what one rank's GPU lacks, all go without.
        self._without_fp8 = [rank for rank, arch in enumerate(self._archs) if not has_fp8(arch)]
        self._has_told_fp8 = False
        # The same in every call: a rank with few tokens may get many from others.
        self._num_blocks = min(config.low_latency_sms, driver.num_sms(self.device), max(2 * config.num_max_tokens_per_rank, 16))
        self._least_large_combine = math.inf if config.has_network else config.least_large_combine(self._num_blocks)
        self._known_masked: set[int] = set()
        self._ll_combine_buffer: Slot | None = None
        self._hooks = Hooks(config.num_slots, self.call_lock)
        if config.low_latency:
            self._clear_rows()
            for kernel in KERNELS.values():
                if kernel.low_latency and kernel.fits(config):
                    self._launcher(kernel.name)
            _living.add(self)
            _allow_overlap()

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        try:
            super().destroy(in_touch, error)
        finally:
            _living.discard(self)
            _allow_overlap()

    def set_mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out of the calls from now on, or let it take part again."""
        self._hooks.check_none_open("masking or unmasking a rank")
        self.synchronize()
        if not masked:
            self._clear_rows()  # it may have sent half a row
        mask = self._state + self._layout.local.offsets["masked"] + 4 * rank
        driver.fill(mask, int(masked), 1)  # the low byte of an int32
        driver.synchronize(0)
        self._page.masked[rank] = masked
        (self._known_masked.add if masked else self._known_masked.discard)(rank)

    def masked_ranks(self) -> list[int]:
        return self._page.masked.nonzero()[0].tolist()

    def _clear_rows(self) -> None:
        """Say of all rows of the inboxes that they have not come."""
        inboxes = self._layout.low_latency
        start = inboxes.offsets["messages"]
        driver.fill(self._memory.ptr + self._map.offsets["low_latency"] + start, 0xFF, inboxes.num_bytes - start)
        driver.synchronize(0)

    def _give_up_fp8(self, inputs: LowLatencyDispatchInputs) -> None:
        """Make it a dispatch of bfloat16 rows, and say so, once."""
        rank = self._without_fp8[0]
        arch = self._archs[rank]
        if inputs.into is not None:  # made for FP8
            raise EPUnavailableError(
                f"use_fp8=True; rank {rank}'s {arch} cannot convert to FP8. Pass use_fp8=False on all ranks: rows travel as bfloat16"
            )
        if not self._has_told_fp8:
            self._has_told_fp8 = True
            _log.warning(
                "rank %d: rank %d's %s cannot convert to FP8: rows travel and arrive as bfloat16, without scales. Pass use_fp8=False on "
                "all ranks",
                self._comm.Get_rank(),
                rank,
                arch,
            )
        inputs.use_fp8 = inputs.round_scale = inputs.use_ue8m0 = False

    def _tell_masked(self) -> None:
        """Warn, once, of ranks that kernels have masked."""
        for rank in set(self.masked_ranks()) - self._known_masked:
            self._known_masked.add(rank)
            _log.warning("rank %d: rank %d is masked: it was silent for %g s", self._comm.Get_rank(), rank, self.config.timeout_s)

    def _is_sound(self) -> bool:
        return super()._is_sound() and not self.masked_ranks()

    def low_latency_dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        config, stream = self.config, call.stream
        if inputs.use_fp8 and self._without_fp8:
            self._give_up_fp8(inputs)
        self._hooks.dispatch.check_can_start(with_hook)
        self._order.enter(call)
        x, idx, weights = self._on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights)
        results = self._ll_results[inputs.use_fp8, inputs.use_ue8m0]
        if (into := inputs.into) is None:
            memory: Any = results.memory.acquire(stream, call.caller_stream)
            recv_x, recv_scales = memory.ptr + results.x, memory.ptr + results.scales
            slot: Any = self._ll_handles.acquire(stream, call.caller_stream)
        else:
            memory, slot = into, into.tables
            recv_x, recv_scales = into.recv_x.ptr, into.recv_scales.ptr if into.recv_scales else 0
        values = {
            "phases": _PHASES[with_hook],
            "num_tokens": x.shape[0],
            "x": x.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": address_of(weights),
            "handle": slot.ptr,
            "recv_x": recv_x,
            "recv_scales": recv_scales,
            "recv_stats": inputs.recv_stats.ptr if inputs.recv_stats else 0,
            "wait_stats": inputs.wait_stats.ptr if inputs.wait_stats else 0,
            "idx_bytes": idx.itemsize,
            "use_fp8": inputs.use_fp8,
            "round_scale": inputs.round_scale,
            "use_ue8m0": inputs.use_ue8m0,
            "check": config.check_inputs,
            "call_signature": call_signature.pack(
                "low_latency_dispatch", results.dtype, idx.dtype, weights.dtype if weights else None, results.scale_dtype
            ),
        }
        framework = x.framework

        def views() -> Views:
            experts, most, hidden = config.num_local_experts, config.num_max_recv_tokens, config.hidden
            counts = slot.ptr + self._ll_handle_map.offsets["num_recv_per_expert"]
            found: Views = {
                "num_recv_per_expert": self._result(counts, (experts,), "int32", slot, framework, stream),
                "x": self._result(recv_x, (experts, most, hidden), results.dtype, memory, framework, stream),
            }
            if kind := results.scale_dtype:
                found["scales"] = self._result(recv_scales, (experts, most, hidden // FP8_GROUP), kind, memory, framework, stream)
            return found

        given = inputs.topk_idx, inputs.topk_weights
        leave = functools.partial(self._order.leave, call, (x, idx, weights, inputs), (slot, memory), *given)
        hooks = self._hooks.dispatch if with_hook else None
        event, made, hook = self._run("ll_dispatch", values, call, leave, hooks, views, inputs.x.device == HOST)
        handle = LowLatencyHandle(x.shape[0], self._serial, (slot, hook.state if hook else None), weights is not None, framework)
        return LowLatencyDispatchResult(handle, event, hook, made)

    def low_latency_combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        config, stream, handle = self.config, call.stream, inputs.handle
        slot, hook_state = handle.routing
        check_hook_called(hook_state)
        if not inputs.reduce_early and (config.on_timeout == "mask" or self.masked_ranks()):
            # Such rows lie by choice, not by sender: what a lost rank has sent could be taken for another one's.
            raise EPInputError(
                "allow_multiple_reduction=False goes neither with on_timeout='mask' nor with masked ranks on GPUs; leave it out"
            )
        self._hooks.combine.check_can_start(with_hook)
        self._order.enter(call)
        y, idx, weights = self._on_device(stream, inputs.y, inputs.topk_idx, inputs.topk_weights)
        num_tokens = handle.num_tokens
        if inputs.out is not None:
            owner, out = inputs.out.owner, inputs.out.ptr
        else:
            owner = self._ll_sums.acquire(stream, call.caller_stream)
            out = owner.ptr
        values = {
            "phases": _PHASES[with_hook],
            "num_tokens": num_tokens,
            "y": y.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": weights.ptr,
            "handle": slot.ptr,
            "out": out,
            "idx_bytes": idx.itemsize,
            "reduce_early": inputs.reduce_early,
            "has_weights": handle.has_weights,
            "call_signature": call_signature.pack(
                "low_latency_combine" if inputs.reduce_early else "low_latency_combine with allow_multiple_reduction=False",
                "bfloat16",
                None,
                None,
            ),
        }
        framework, into = y.framework, inputs.out

        def views() -> Views:
            return {"x": into or self._result(out, (num_tokens, config.hidden), "bfloat16", owner, framework, stream)}

        kernel = "ll_combine_large" if num_tokens >= self._least_large_combine and inputs.reduce_early else "ll_combine"
        given = inputs.topk_idx, inputs.topk_weights
        arguments = y, idx, weights, inputs.y, *given, into  # and not the handle, which would hold its tables
        leave = functools.partial(self._order.leave, call, arguments, (slot, owner), *given)
        hooks = self._hooks.combine if with_hook else None
        event, made, hook = self._run(kernel, values, call, leave, hooks, views, inputs.y.device == HOST, into)
        return LowLatencyCombineResult(event, hook, made)

    def low_latency_combine_view(self, framework: Framework) -> View:
        config = self.config
        shape = (config.num_local_experts, config.num_max_recv_tokens, config.hidden)
        if self._ll_combine_buffer is None:
            writer = framework.current_stream(self.device)  # 0 is a stream too
            memory = self._ll_results[False, False].memory
            self._ll_combine_buffer = memory.acquire(self._order.own_stream if writer is None else writer)
        return View(self._ll_combine_buffer.ptr, shape, "bfloat16", self.device, self._ll_combine_buffer, framework)

    def _run(
        self,
        kernel: str,
        values: dict[str, Any],
        call: Call,
        leave: Callable[[], None],
        hooks: HookQueue | None,
        views: Callable[[], Views],
        on_host: bool,
        into: View | None = None,
    ) -> tuple[Event, Callable[[], Views], Hook | None]:
        """Launch a call; with a hook, only its sending half, and the hook launches the rest on the same stream.

        Args:
            kernel: Its name.
            values: Members of its Params.
            call: The call.
            leave: `CallOrder.leave` with what the call needs, all of which it keeps until the rest is launched.
            hooks: Where its hook is noted, if it has one.
            views: Makes its results.
            on_host: The caller works in host memory, and gets copies of the results (not of `into`), now or from the hook.
            into: What the caller gave to be written to.
        """
        stream = call.stream
        if self.config.on_timeout == "mask":
            self._tell_masked()
        launch = self._launcher(kernel)
        if hooks is None:
            launch(stream, self._num_blocks, values)
            leave()
            event = self._order.event(call)
            self._watch.check_inputs()
            return event, self._for_caller(views, on_host, stream, into), None

        def receive() -> None:
            self._watch.check_peers()
            with self._watch.half_a_call():
                self._order.enter(call)
                launch(stream, self._num_blocks, {**values, "phases": LL_RECEIVE})
                leave()
                event.record_again()
            if on_host:
                made.update(to_host(made, stream, into))
            self._watch.check()  # at last: bad input does not keep a call from its second half

        with self._watch.half_a_call():
            launch(stream, self._num_blocks, values)
            leave()
            event, made = self._order.event(call), views()
            return event, lambda: made, hooks.append(receive, lambda: driver.capture_id(stream))
