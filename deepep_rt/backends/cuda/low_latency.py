"""The low-latency calls of the CUDA backend: one launch for a call, or one for its sending and one for its receiving half."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.view import HOST, Framework, View
from ...cuda import driver
from ...cuda.slots import Slot
from ...jit.launch import Launcher
from ...kernels.structs import LL_RECEIVE
from ...kernels.table import KERNELS
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..base import Call, LowLatencyCombineInputs, LowLatencyDispatchInputs, LowLatencyPreparation
from ..hooks import Hook, HookQueue, Hooks, check_hook_called
from .low_latency_kernels import LowLatencyKernels
from .monitor import whole_call
from .prepared_low_latency import PreparedLowLatency
from .runtime import CudaRuntime, to_host

_log = logging.getLogger("deepep_rt")

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


class LowLatency:
    """Both low-latency calls, and the masks of ranks.

    Args:
        runtime: The Buffer's memory and kernels.
        archs: The target of each rank's GPU.
    """

    def __init__(self, runtime: CudaRuntime, archs: Sequence[str]) -> None:
        config = runtime.config
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._page = config, runtime.page
        self.kernels = LowLatencyKernels(runtime, archs)
        self._known_masked: set[int] = set()
        self._combine_buffer: Slot | None = None
        self.hooks = Hooks(config.num_slots, runtime.call_lock)
        if config.low_latency:
            self.clear_inboxes()
            runtime.load([(kernel.name, None) for kernel in KERNELS.values() if kernel.low_latency and kernel.fits(config)])
            _live.add(self)
            _update_overlap()

    def close(self) -> None:
        """Let the kernels of another Buffer overlap, if it is the only one left."""
        _live.discard(self)
        _update_overlap()

    def allow_overlap(self, allowed: bool) -> None:
        """Set whether the next launches may start while the kernel before them ends."""
        self._runtime.allow_overlap(allowed)

    # --- masks -------------------------------------------------------------------------------------------------------------------

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from the calls from now on, or include it again."""
        self.hooks.check_none_open("masking or unmasking a rank")
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

    def warn_of_masked_ranks(self) -> None:
        """Warn, once for each, of ranks that kernels have masked."""
        for rank in set(self.masked_ranks()) - self._known_masked:
            self._known_masked.add(rank)
            _log.warning("rank %d: rank %d is masked: it was silent for %g s", self._runtime.rank, rank, self._config.timeout_s)

    # --- calls -------------------------------------------------------------------------------------------------------------------

    @whole_call("kPhaseLlRows")
    def dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """Send tokens to the ranks of their experts; receive them here, or in the hook."""
        stream, kernels = call.stream, self.kernels
        kernels.check_fp8(inputs)
        self.hooks.dispatch.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        x, idx, weights = self._runtime.on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights)
        format_ = kernels.row_format(inputs.use_fp8, inputs.use_ue8m0)
        if (into := inputs.into) is None:
            memory: Any = format_.memory.acquire(stream, call.caller_stream, call.capture, call.follows)
            results = memory.ptr + format_.x, memory.ptr + format_.scales
            tables: Any = kernels.handles.acquire(stream, call.caller_stream, call.capture, call.follows)
        else:
            memory, tables = into, into.tables
            results = into.recv_x.ptr, into.recv_scales.ptr if into.recv_scales else 0
        values = kernels.dispatch_params(inputs, (x, idx, weights), format_, tables.ptr, results, with_hook)
        make_views = functools.partial(kernels.dispatch_views, format_, results, memory, tables, x.framework, stream)
        end = call, (x, idx, weights, inputs), (tables, memory), inputs.topk_idx, inputs.topk_weights
        queue = self.hooks.dispatch if with_hook else None
        event, views, hook = self._run("ll_dispatch", values, call, end, queue, make_views, inputs.x.device == HOST)
        routing = tables, hook.state if hook else None
        handle = LowLatencyHandle(x.shape[0], self._runtime.info.serial, routing, weights is not None, x.framework)
        return LowLatencyDispatchResult(handle, event, hook, views)

    @whole_call("kPhaseLlCombineRows")
    def combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """Send the experts' rows back to the tokens' ranks; add them up here, or in the hook."""
        stream, handle, kernels = call.stream, inputs.handle, self.kernels
        tables, hook_state = handle.routing
        check_hook_called(hook_state)
        if not inputs.reduce_early:
            kernels.check_reduction(False)
        if inputs.compress is not None:
            kernels.check_compression(inputs.compress)
        self.hooks.combine.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        y, idx, weights = self._runtime.on_device(stream, inputs.y, inputs.topk_idx, inputs.topk_weights)
        num_tokens, given_out = handle.num_tokens, inputs.out
        if given_out is not None:
            owner, out = given_out.owner, given_out.ptr
        else:
            owner = kernels.sums.acquire(stream, call.caller_stream, call.capture, call.follows)
            out = owner.ptr
        arrays = y.ptr, idx, weights
        values = kernels.combine_params(
            inputs.signature, num_tokens, arrays, tables.ptr, out, inputs.reduce_early, handle.has_weights, with_hook
        )
        framework, shape = y.framework, (num_tokens, self._config.hidden)

        def make_views() -> Views:
            return {"x": given_out or self._runtime.result(out, shape, "bfloat16", owner, framework, stream)}

        kernel = kernels.combine_name(num_tokens, inputs.reduce_early, inputs.compress)
        given = inputs.topk_idx, inputs.topk_weights
        arguments = y, idx, weights, inputs.y, *given, given_out  # not the handle, which holds its tables
        end = call, arguments, (tables,) if given_out is not None else (tables, owner), *given
        queue = self.hooks.combine if with_hook else None
        is_host_caller = inputs.y.device == HOST
        event, views, hook = self._run(kernel, values, call, end, queue, make_views, is_host_caller, given_out)
        return LowLatencyCombineResult(event, hook, views)

    def combine_view(self, framework: Framework) -> View:
        """Return the memory of `Buffer.get_low_latency_combine_buffer`."""
        config, device = self._config, self._runtime.device
        shape = (config.num_local_experts, config.worst_recv_tokens, config.hidden)
        if self._combine_buffer is None:
            writer = framework.current_stream(device)  # 0 is a stream too
            memory = self.kernels.row_format().memory
            self._combine_buffer = memory.acquire(self._order.own_stream if writer is None else writer)
        return View(self._combine_buffer.ptr, shape, "bfloat16", device, self._combine_buffer, framework)

    def prepare(self, preparation: LowLatencyPreparation) -> PreparedLowLatency:
        """Prepare calls with these arguments, which lie in GPU memory."""
        return PreparedLowLatency(self._runtime, self.kernels, self.hooks, preparation, self.warn_of_masked_ranks)

    # --- launches ----------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        kernel: str,
        values: dict[str, Any],
        call: Call,
        end: tuple[Any, ...],
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
            end: The arguments of `CallOrder.record_end`, with the call's arguments and memory. They live until the last launch.
            queue: The queue of the hook, or None.
            make_views: Makes the results.
            is_host_caller: Whether the caller's arrays lie in host memory. Results are then copied there, now or by the hook.
            given: An array of the caller that is a result; it is not copied.

        Returns:
            The end of the call, a function that returns the results, and the hook.
        """
        if self._config.on_timeout == "mask":
            self.warn_of_masked_ranks()
        launch = self._runtime.launcher(kernel)
        if queue is not None:
            return self._send(launch, values, call, end, queue, make_views, is_host_caller, given)
        self._launch(launch, call.stream, values)
        self._order.record_end(*end)
        event = self._order.event(call)
        self._monitor.check_inputs()
        return event, self._runtime.for_caller(make_views, is_host_caller, call.stream, given), None

    def _launch(self, launch: Launcher, stream: int, values: dict[str, Any]) -> None:
        if self._runtime.network is not None:
            self._runtime.network.wake()  # both halves put something
        launch(stream, self.kernels.num_blocks, values)

    def _send(
        self,
        launch: Launcher,
        values: dict[str, Any],
        call: Call,
        end: tuple[Any, ...],
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
                self._order.record_end(*end)
                event.record_again()
            if is_host_caller:
                views.update(to_host(views, stream, given))
            self._monitor.check()  # after the launch: other ranks wait for this half, whatever the input was

        with self._monitor.call_half():
            self._launch(launch, stream, values)
            self._order.record_end(*end)
            event, views = self._order.event(call), make_views()
            return event, lambda: views, queue.append(receive, lambda: driver.capture_id(stream))
