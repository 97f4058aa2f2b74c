"""The low-latency calls of the CUDA backend: one launch for a call, or one for its sending and one for its receiving half."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.dtypes import FP8_GROUP
from ...arrays.view import HOST, Framework, View
from ...comm import call_signature
from ...cuda import driver
from ...cuda.pool import Slot
from ...errors import EPInputError, EPUnavailableError
from ...jit.launch import Launcher
from ...kernels.structs import LL_RECEIVE, LL_SEND
from ...kernels.table import KERNELS
from ...kernels.tuning import has_fp8
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..calls import Call, LowLatencyCombineInputs, LowLatencyDispatchInputs
from ..hooks import Hook, HookQueue, Hooks, check_hook_called
from .runtime import CudaRuntime, address_of
from .transfer import to_host

_log = logging.getLogger("deepep_rt")

_PHASES = {False: LL_SEND | LL_RECEIVE, True: LL_SEND}
"""The phases that a call launches, by whether it has a hook. The hook launches the rest."""

_live: weakref.WeakSet[LowLatency] = weakref.WeakSet()
"""Objects of Buffers with low-latency calls that were not destroyed."""


def _update_overlap() -> None:
    """Let a low-latency kernel start while the kernel before it in its stream ends, but only if one Buffer has such kernels.

    Blocks that start early hold SMs. Ranks may launch the kernels of two Buffers in different orders. Then the early blocks of each Buffer
    could keep the other Buffer's kernels off the GPU forever.

    A CUDA graph keeps the setting of its capture. That is safe: a Buffer captures overlap only while it is alone, so two live Buffers
    never both have such graphs.
    """
    for calls in _live:
        calls.allow_overlap(len(_live) == 1)


class _RowFormat:
    """Results of dispatch with one format of rows: their memory, offsets and dtypes. Slots keep the memory for later calls."""

    def __init__(self, runtime: CudaRuntime, use_fp8: bool, use_ue8m0: bool) -> None:
        parts = runtime.layout.low_latency_result(use_fp8=use_fp8, use_ue8m0=use_ue8m0)
        self.memory = runtime.slots(parts.num_bytes)
        self.x, self.scales = parts.offsets["x"], parts.offsets["scales"]
        self.dtype = "float8_e4m3fn" if use_fp8 else "bfloat16"
        self.scale_dtype = None if not use_fp8 else "uint8" if use_ue8m0 else "float32"


class LowLatency:
    """Both low-latency calls, and the masks of ranks.

    Args:
        runtime: The Buffer's memory and kernels.
        archs: The target of each rank's GPU.
    """

    def __init__(self, runtime: CudaRuntime, archs: Sequence[str]) -> None:
        config, layout = runtime.config, runtime.layout
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._page = config, runtime.page
        self._handles = runtime.slots(layout.low_latency_handle.num_bytes, layout.num_handles if config.low_latency else 0)
        self._formats = {
            (use_fp8, use_ue8m0): _RowFormat(runtime, use_fp8, use_ue8m0)
            for use_fp8, use_ue8m0 in ((False, False), (True, False), (True, True))
        }
        self._sums = runtime.slots(config.num_max_tokens_per_rank * config.hidden * 2)
        # Rows travel in one format. If the GPU of one rank cannot convert to FP8, no rank converts.
        self._archs_without_fp8 = {rank: arch for rank, arch in enumerate(archs) if not has_fp8(arch)}
        self._has_warned_of_fp8 = False
        # The same for every call: a rank with few tokens may receive many.
        self._num_blocks = min(
            config.low_latency_sms, driver.num_sms(runtime.device), max(2 * config.num_max_tokens_per_rank, 16)
        )
        self._least_large_combine = math.inf if config.has_network else config.least_large_combine(self._num_blocks)
        self._known_masked: set[int] = set()
        self._combine_buffer: Slot | None = None
        self._hooks = Hooks(config.num_slots, runtime.call_lock)
        if config.low_latency:
            self.clear_inboxes()
            for kernel in KERNELS.values():
                if kernel.low_latency and kernel.fits(config):
                    runtime.launcher(kernel.name)
            _live.add(self)
            _update_overlap()

    def close(self) -> None:
        """Let the kernels of another Buffer overlap, if it is the only one left."""
        _live.discard(self)
        _update_overlap()

    def allow_overlap(self, allowed: bool) -> None:
        """Set whether the next launches may start while the kernel before them ends."""
        for launcher in self._runtime.launchers.values():
            launcher.allow_overlap(allowed)

    # --- masks -------------------------------------------------------------------------------------------------------------------

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from the calls from now on, or include it again."""
        self._hooks.check_none_open("masking or unmasking a rank")
        self._runtime.synchronize()
        if not masked:
            self.clear_inboxes()  # the rank may have sent half a row
        mask = self._runtime.state + self._runtime.layout.local.offsets["masked"] + 4 * rank
        driver.fill(mask, int(masked), 1)  # the low byte of an int32
        driver.synchronize(0)
        self._page.masked[rank] = masked
        (self._known_masked.add if masked else self._known_masked.discard)(rank)

    def masked_ranks(self) -> list[int]:
        """List the ranks that the calls exclude, ascending."""
        return self._page.masked.nonzero()[0].tolist()

    def clear_inboxes(self) -> None:
        """Mark every row of the inboxes as not arrived."""
        inboxes = self._runtime.layout.low_latency
        start = inboxes.offsets["messages"]
        driver.fill(self._runtime.address_of_region("low_latency") + start, 0xFF, inboxes.num_bytes - start)
        driver.synchronize(0)

    def _warn_of_masked_ranks(self) -> None:
        """Warn, once for each, of ranks that kernels have masked."""
        for rank in set(self.masked_ranks()) - self._known_masked:
            self._known_masked.add(rank)
            _log.warning("rank %d: rank %d is masked: it was silent for %g s", self._runtime.rank, rank, self._config.timeout_s)

    # --- calls -------------------------------------------------------------------------------------------------------------------

    def dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """Send tokens to the ranks of their experts; receive them here, or in the hook."""
        stream = call.stream
        if inputs.use_fp8 and self._archs_without_fp8:
            self._fall_back_to_bfloat16(inputs)
        self._hooks.dispatch.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        x, idx, weights = self._runtime.on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights)
        format_ = self._formats[inputs.use_fp8, inputs.use_ue8m0]
        if (into := inputs.into) is None:
            memory: Any = format_.memory.acquire(stream, call.caller_stream)
            recv_x, recv_scales = memory.ptr + format_.x, memory.ptr + format_.scales
            tables: Any = self._handles.acquire(stream, call.caller_stream)
        else:
            memory, tables = into, into.tables
            recv_x, recv_scales = into.recv_x.ptr, into.recv_scales.ptr if into.recv_scales else 0
        values = {
            "phases": _PHASES[with_hook],
            "num_tokens": x.shape[0],
            "x": x.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": address_of(weights),
            "handle": tables.ptr,
            "recv_x": recv_x,
            "recv_scales": recv_scales,
            "recv_stats": inputs.recv_stats.ptr if inputs.recv_stats else 0,
            "wait_stats": inputs.wait_stats.ptr if inputs.wait_stats else 0,
            "idx_bytes": idx.itemsize,
            "use_fp8": inputs.use_fp8,
            "round_scale": inputs.round_scale,
            "use_ue8m0": inputs.use_ue8m0,
            "check": self._config.check_inputs,
            "call_signature": call_signature.pack(
                "low_latency_dispatch", format_.dtype, idx.dtype, weights.dtype if weights else None, format_.scale_dtype
            ),
        }
        make_views = functools.partial(self._dispatch_views, format_, recv_x, recv_scales, memory, tables, x.framework, stream)
        given = inputs.topk_idx, inputs.topk_weights
        record_end = functools.partial(self._order.record_end, call, (x, idx, weights, inputs), (tables, memory), *given)
        queue = self._hooks.dispatch if with_hook else None
        event, views, hook = self._run("ll_dispatch", values, call, record_end, queue, make_views, inputs.x.device == HOST)
        routing = tables, hook.state if hook else None
        handle = LowLatencyHandle(x.shape[0], self._runtime.info.serial, routing, weights is not None, x.framework)
        return LowLatencyDispatchResult(handle, event, hook, views)

    def _dispatch_views(
        self, format_: _RowFormat, recv_x: int, recv_scales: int, memory: Any, tables: Any, framework: Framework, stream: int
    ) -> Views:
        config, result = self._config, self._runtime.result
        experts, rows, hidden = config.num_local_experts, config.worst_recv_tokens, config.hidden
        counts = tables.ptr + self._runtime.layout.low_latency_handle.offsets["num_recv_per_expert"]
        views: Views = {
            "num_recv_per_expert": result(counts, (experts,), "int32", tables, framework, stream),
            "x": result(recv_x, (experts, rows, hidden), format_.dtype, memory, framework, stream),
        }
        if format_.scale_dtype:
            shape = experts, rows, hidden // FP8_GROUP
            views["scales"] = result(recv_scales, shape, format_.scale_dtype, memory, framework, stream)
        return views

    def _fall_back_to_bfloat16(self, inputs: LowLatencyDispatchInputs) -> None:
        """Change an FP8 dispatch to a bfloat16 dispatch, and warn once.

        Raises:
            EPUnavailableError: if the caller has already allocated memory for FP8 results.
        """
        rank, arch = next(iter(self._archs_without_fp8.items()))
        if inputs.into is not None:
            raise EPUnavailableError(
                f"use_fp8=True; rank {rank}'s {arch} cannot convert to FP8. Pass use_fp8=False on all ranks: rows travel as bfloat16"
            )
        if not self._has_warned_of_fp8:
            self._has_warned_of_fp8 = True
            _log.warning(
                "rank %d: rank %d's %s cannot convert to FP8: rows travel and arrive as bfloat16, without scales. Pass use_fp8=False on "
                "all ranks",
                self._runtime.rank,
                rank,
                arch,
            )
        inputs.use_fp8 = inputs.round_scale = inputs.use_ue8m0 = False

    def combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """Send the experts' rows back to the tokens' ranks; add them up here, or in the hook."""
        stream, handle = call.stream, inputs.handle
        tables, hook_state = handle.routing
        check_hook_called(hook_state)
        if not inputs.reduce_early and (self._config.on_timeout == "mask" or self.masked_ranks()):
            # Such rows lie by choice, not by sender. A row of a lost rank could pass for a row of another rank.
            raise EPInputError(
                "allow_multiple_reduction=False; expected True on GPUs with on_timeout='mask' or masked ranks. Leave it out"
            )
        if inputs.compress == "fp8" and self._archs_without_fp8:
            rank, arch = next(iter(self._archs_without_fp8.items()))
            raise EPUnavailableError(
                f"compress='fp8'; expected GPUs with FP8 on all ranks, but rank {rank} has {arch}. Leave it out on all ranks"
            )
        self._hooks.combine.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        y, idx, weights = self._runtime.on_device(stream, inputs.y, inputs.topk_idx, inputs.topk_weights)
        num_tokens, given_out = handle.num_tokens, inputs.out
        if given_out is not None:
            owner, out = given_out.owner, given_out.ptr
        else:
            owner = self._sums.acquire(stream, call.caller_stream)
            out = owner.ptr
        values = {
            "phases": _PHASES[with_hook],
            "num_tokens": num_tokens,
            "y": y.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": weights.ptr,
            "handle": tables.ptr,
            "out": out,
            "idx_bytes": idx.itemsize,
            "reduce_early": inputs.reduce_early,
            "has_weights": handle.has_weights,
            "call_signature": call_signature.pack(inputs.kind, "bfloat16", None, None),
        }
        framework, shape = y.framework, (num_tokens, self._config.hidden)

        def make_views() -> Views:
            return {"x": given_out or self._runtime.result(out, shape, "bfloat16", owner, framework, stream)}

        kernel = "ll_combine_large" if num_tokens >= self._least_large_combine and inputs.reduce_early else "ll_combine"
        if inputs.compress:
            kernel = f"{kernel}_{inputs.compress}"
        given = inputs.topk_idx, inputs.topk_weights
        arguments = y, idx, weights, inputs.y, *given, given_out  # not the handle, which holds its tables
        record_end = functools.partial(self._order.record_end, call, arguments, (tables, owner), *given)
        queue = self._hooks.combine if with_hook else None
        is_host_caller = inputs.y.device == HOST
        event, views, hook = self._run(kernel, values, call, record_end, queue, make_views, is_host_caller, given_out)
        return LowLatencyCombineResult(event, hook, views)

    def combine_view(self, framework: Framework) -> View:
        """Return the memory of `Buffer.get_low_latency_combine_buffer`."""
        config, device = self._config, self._runtime.device
        shape = (config.num_local_experts, config.worst_recv_tokens, config.hidden)
        if self._combine_buffer is None:
            writer = framework.current_stream(device)  # 0 is a stream too
            memory = self._formats[False, False].memory
            self._combine_buffer = memory.acquire(self._order.own_stream if writer is None else writer)
        return View(self._combine_buffer.ptr, shape, "bfloat16", device, self._combine_buffer, framework)

    # --- launches ----------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        kernel: str,
        values: dict[str, Any],
        call: Call,
        record_end: Callable[[], None],
        queue: HookQueue | None,
        make_views: Callable[[], Views],
        is_host_caller: bool,
        given: View | None = None,
    ) -> tuple[Event, Callable[[], Views], Hook | None]:
        """Launch a call, or only its sending half if it has a hook.

        Args:
            kernel: Its name.
            values: Members of its Params.
            call: The call.
            record_end: `CallOrder.record_end` with the arguments and memory of the call. It keeps them until the last launch.
            queue: The queue of the hook, or None.
            make_views: Makes the results.
            is_host_caller: Whether the caller's arrays lie in host memory. Results are then copied there, now or by the hook.
            given: An array of the caller that is a result; it is not copied.

        Returns:
            The end of the call, a function that returns the results, and the hook.
        """
        if self._config.on_timeout == "mask":
            self._warn_of_masked_ranks()
        launch = self._runtime.launcher(kernel)
        if queue is not None:
            return self._send(launch, values, call, record_end, queue, make_views, is_host_caller, given)
        self._launch(launch, call.stream, values)
        record_end()
        event = self._order.event(call)
        self._monitor.check_inputs()
        return event, self._runtime.for_caller(make_views, is_host_caller, call.stream, given), None

    def _launch(self, launch: Launcher, stream: int, values: dict[str, Any]) -> None:
        if self._runtime.network is not None:
            self._runtime.network.wake()  # both halves put something
        launch(stream, self._num_blocks, values)

    def _send(
        self,
        launch: Launcher,
        values: dict[str, Any],
        call: Call,
        record_end: Callable[[], None],
        queue: HookQueue,
        make_views: Callable[[], Views],
        is_host_caller: bool,
        given: View | None,
    ) -> tuple[Event, Callable[[], Views], Hook]:
        """Launch the sending half of a call, and make the hook that launches the receiving half on the same stream."""
        stream = call.stream

        def receive() -> None:
            self._monitor.check_peers()
            with self._monitor.call_half():
                self._order.enqueue_waits(call)
                self._launch(launch, stream, {**values, "phases": LL_RECEIVE})
                record_end()
                event.record_again()
            if is_host_caller:
                views.update(to_host(views, stream, given))
            self._monitor.check()  # after the launch: other ranks wait for this half, whatever the input was

        with self._monitor.call_half():
            self._launch(launch, stream, values)
            record_end()
            event, views = self._order.event(call), make_views()
            return event, lambda: views, queue.append(receive, lambda: driver.capture_id(stream))
