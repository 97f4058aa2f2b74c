"""Forms of calls on GPUs; see `backends.call_forms`. A form keeps the packed Params of its kernel, and a call changes the addresses there.

A form is of a plain call: without a hook, on the caller's current stream, with arrays of one library in GPU memory. So no call has to hold
its arguments. A call takes the steps of an ordinary one, whose methods are in `LowLatency` and `RowMover`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...arrays.view import HOST, View
from ...comm.call_signature import pack
from ...cuda.slots import Slot
from ...jit.launch import PreparedLaunch
from ...results import (
    CombineResult,
    DispatchHandle,
    DispatchResult,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
    Views,
)
from ..base import BufferInfo, Call, CallForm, CombineInputs, DispatchInputs, LowLatencyCombineInputs, LowLatencyDispatchInputs
from ..hooks import HookQueue, check_hook_called
from .low_latency import LowLatency, dispatch_kernel
from .monitor import whole_call
from .result_memory import ArrivedRows, combine_views
from .runtime import CudaRuntime
from .stream_order import CallEnd, must_hold_arguments
from .throughput import RowMover, receive_window


def _is_plain(call: Call, *views: View | None) -> bool:
    """Return whether a call can have a form. `views` are all of its arrays."""
    if call.async_finish or call.previous_event is not None or must_hold_arguments(call, views):
        return False
    return all(view is None or view.device != HOST for view in views)


def _without_owner(view: View | None) -> View | None:
    return None if view is None else replace(view, owner=None)


class _LowLatencyForm:
    """What both low-latency calls share."""

    def __init__(
        self,
        calls: LowLatency,
        runtime: CudaRuntime,
        kernel: str,
        params: dict[str, Any],
        addresses: tuple[str, str],  # the first and the last member of Params that differs between calls
        queue: HookQueue,
        x: View,
    ) -> None:
        self._monitor, self._order, self._network, self._runtime = runtime.monitor, runtime.order, runtime.network, runtime
        self._launch = runtime.launcher(kernel).prepare(calls.kernels.num_blocks, params)
        self._set_addresses = self._launch.members(*addresses)
        self._kernels, self._check_can_start, self._framework = calls.kernels, queue.check_can_start, x.framework
        self._warn = calls.warn_of_masked_ranks if runtime.config.on_timeout == "mask" else None

    def _run(self, call: Call, own: tuple[Any, ...]) -> CallEnd:
        if self._warn is not None:
            self._warn()
        if self._network is not None:
            self._network.wake()
        self._launch(call.stream)
        self._order.record_prepared_end(call, None, own)
        end = CallEnd(self._order, call)
        self._monitor.check_inputs()
        return end


class LowLatencyDispatchForm(_LowLatencyForm):
    """See `base.CallForm`."""

    def __init__(self, calls: LowLatency, runtime: CudaRuntime, inputs: LowLatencyDispatchInputs) -> None:
        kernels, x, arrays = calls.kernels, inputs.x, (inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.x_scales)
        self._format, self._capacity = kernels.row_format(inputs), runtime.config.num_ranks * inputs.num_max_tokens
        params = kernels.dispatch_params(inputs, arrays, self._format, 0, (0, 0), False)
        super().__init__(calls, runtime, dispatch_kernel(inputs), params, ("x", "recv_scales"), calls.hooks.dispatch, x)
        self._rows, self._tables = self._format.memory, kernels.handles
        self._x, self._scales = self._format.x, self._format.scales
        self._num_tokens, self._serial, self._has_weights = x.shape[0], runtime.info.serial, inputs.topk_weights is not None

    def takes(self, handle: Any) -> bool:
        """Return whether there is no handle."""
        return handle is None

    @whole_call("kPhaseLlRows")
    def __call__(self, call: Call, addresses: Sequence[int], handle: None) -> LowLatencyDispatchResult:
        """See `LowLatency.dispatch`."""
        self._check_can_start(False)
        self._order.enqueue_waits(call)
        stream, capture = call.stream, call.capture
        memory, tables = self._rows.acquire(stream, None, capture), self._tables.acquire(stream, None, capture)
        results = memory.ptr + self._x, memory.ptr + self._scales
        self._set_addresses(*addresses, tables.ptr, *results)
        end = self._run(call, (tables, memory))
        framework, capacity = self._framework, self._capacity
        make_views = functools.partial(
            self._kernels.dispatch_views, self._format, capacity, results, memory, tables, framework, stream
        )
        made = LowLatencyHandle(self._num_tokens, self._serial, (tables, None), self._has_weights, framework, capacity)
        return LowLatencyDispatchResult(made, end, None, make_views)


class LowLatencyCombineForm(_LowLatencyForm):
    """See `base.CallForm`."""

    def __init__(self, calls: LowLatency, runtime: CudaRuntime, inputs: LowLatencyCombineInputs) -> None:
        kernels, handle = calls.kernels, inputs.handle
        self._num_tokens, self._capacity, self._has_weights = handle.num_tokens, handle.capacity, handle.has_weights
        arrays = 0, inputs.topk_idx, inputs.topk_weights
        reduce_early, self._info = inputs.reduce_early, runtime.info
        params = kernels.combine_params(inputs.signature, self._num_tokens, arrays, 0, 0, reduce_early, self._has_weights, False)
        kernel = kernels.combine_name(self._num_tokens, reduce_early, inputs.compress)
        super().__init__(calls, runtime, kernel, params, ("y", "out"), calls.hooks.combine, inputs.y)
        self._reduce_early, self._sums = reduce_early, kernels.sums

    def takes(self, handle: Any) -> bool:
        """Return whether the handle is of such a dispatch of this Buffer, and of this generation."""
        return (
            type(handle) is LowLatencyHandle
            and handle.buffer_serial == self._info.serial
            and handle.born >= self._info.since
            and handle.num_tokens == self._num_tokens
            and handle.capacity == self._capacity
            and handle.has_weights == self._has_weights
        )

    @whole_call("kPhaseLlCombineRows")
    def __call__(self, call: Call, addresses: Sequence[int], handle: LowLatencyHandle) -> LowLatencyCombineResult:
        """See `LowLatency.combine`."""
        tables, hook_state = handle.routing
        check_hook_called(hook_state)
        if not self._reduce_early:
            self._kernels.check_reduction(False)
        self._check_can_start(False)
        self._order.enqueue_waits(call)
        owner = self._sums.acquire(call.stream, None, call.capture)
        self._set_addresses(*addresses, tables.ptr, owner.ptr)
        end = self._run(call, (tables, owner))
        return LowLatencyCombineResult(end, None, functools.partial(self._views, owner, call.stream))

    def _views(self, owner: Slot, stream: int) -> Views:
        shape = self._num_tokens, self._runtime.config.hidden
        return {"x": self._runtime.result(owner.ptr, shape, "bfloat16", owner, self._framework, stream)}


class _ThroughputForm:
    """What both throughput calls share."""

    def __init__(self, rows: RowMover, runtime: CudaRuntime, epoch: str) -> None:
        self._monitor, self._order, self._network, self._runtime = runtime.monitor, runtime.order, runtime.network, runtime
        self._mover, self._results = rows, rows.results
        self._epoch = "nodes" if runtime.config.has_network else epoch
        self._launches, self._purposes, self._info = runtime.launches(self._epoch), runtime.purposes, runtime.info
        self._launch: PreparedLaunch

    def _run(self, call: Call, own: tuple[Any, ...]) -> None:
        before = self._launches[0]
        if self._network is not None:
            self._network.wake()
        self._launch.num_blocks = self._mover.num_sms  # the program may have changed it
        self._launch(call.stream)
        self._order.record_prepared_end(call, None, own)
        self._purposes.note_launches(self._epoch, before + 1, self._launches[0])


class DispatchForm(_ThroughputForm):
    """See `base.CallForm`. Its handle repeats a routing, and the results have no `topk_idx`."""

    def __init__(self, rows: RowMover, runtime: CudaRuntime, inputs: DispatchInputs) -> None:
        super().__init__(rows, runtime, "dispatch")
        x, scales, handle = inputs.x, inputs.scales, inputs.handle
        assert handle is not None
        self._num_tokens, self._num_rows = handle.num_tokens, handle.num_recv_rows
        self._parts = runtime.layout.result(self._num_rows, x.row_bytes, scales.row_bytes if scales else 0, 0, False)
        self._kept_bytes = self._parts.offsets["x"] + self._num_rows * x.row_bytes
        window = receive_window(0, self._parts.offsets, self._num_rows)
        *self._window, _ = window.values()
        launcher, params = rows.dispatch_launch(pack(inputs.signature), (x, None, None, scales), 0, 0, window)
        self._launch = launcher.prepare(rows.num_sms, params)
        self._set_addresses = self._launch.members("x", "num_recv_per_expert")
        self._counts, offsets = rows.counts, runtime.layout.counts.offsets
        self._num_recv, self._per_expert = offsets["num_recv"], offsets["num_recv_per_expert"]
        self._arrays = _without_owner(x), None, None, _without_owner(scales)  # of the results

    def takes(self, handle: Any) -> bool:
        """Return whether the handle repeats a routing of this many rows, of this Buffer and this generation."""
        return _takes(self._info, handle, self._num_tokens, self._num_rows)

    @whole_call("kPhaseDispatchRows")
    def __call__(self, call: Call, addresses: Sequence[int], handle: DispatchHandle) -> DispatchResult:
        """See `ThroughputCalls.dispatch` and `RowMover.send_rows`."""
        self._order.enqueue_waits(call)
        stream, routing, (x, scales) = call.stream, handle.routing, addresses
        reserved = self._results.reserve(self._parts.num_bytes, call, stream)
        counts = self._counts.acquire(stream, None, call.capture)
        first, at = reserved.offset, counts.ptr
        window = [first + offset for offset in self._window]
        self._set_addresses(x, scales, 0, 0, routing.ptr, *window, self._num_rows, at + self._num_recv, at + self._per_expert)
        with self._mover.launching_rows():
            self._run(call, (routing, counts))
        owner, base = self._results.keep(reserved, self._kept_bytes, call, stream)
        self._monitor.check_inputs()
        make_views = functools.partial(self._views, (base, owner), (at, counts), stream)
        return DispatchResult(handle, CallEnd(self._order, call), make_views)

    def _views(self, rows: tuple[int, Any], counts: tuple[int, Any], stream: int) -> Views:
        offsets = self._parts.offsets
        return ArrivedRows(self._runtime, self._arrays, offsets, self._num_rows, rows=rows, counts=counts, stream=stream)()


class CombineForm(_ThroughputForm):
    """See `base.CallForm`."""

    def __init__(self, rows: RowMover, runtime: CudaRuntime, inputs: CombineInputs) -> None:
        super().__init__(rows, runtime, "combine")
        x, weights, handle = inputs.x, inputs.topk_weights, inputs.handle
        self._num_tokens, self._num_rows, self._has_weights = handle.num_tokens, handle.num_recv_rows, weights is not None
        self._parts = runtime.layout.combined(self._num_tokens, x.row_bytes, self._has_weights)
        launcher, params = rows.combine_launch(inputs, (x, weights, *inputs.biases), 0, 0)
        self._launch = launcher.prepare(rows.num_sms, params)
        self._set_addresses = self._launch.members("y", "out_topk_weights")
        has_network = runtime.config.has_network  # then a combine also says where the ranks of its node find its rows
        self._set_rows = rows.rows_setter(self._launch, x.row_bytes, self._num_rows) if has_network else None
        self._out, self._out_weights = self._parts.offsets["x"], self._parts.offsets["topk_weights"]
        self._x = replace(x, owner=None)

    def takes(self, handle: Any) -> bool:
        """See `DispatchForm.takes`."""
        return _takes(self._info, handle, self._num_tokens, self._num_rows)

    @whole_call("kPhaseCombineRows")
    def __call__(self, call: Call, addresses: Sequence[int], handle: DispatchHandle) -> CombineResult:
        """See `ThroughputCalls.combine` and `RowMover.add_up`."""
        self._order.enqueue_waits(call)
        stream, routing, (x, weights, bias) = call.stream, handle.routing, addresses
        owner = self._results.allocate_sums(self._parts.num_bytes, call)
        out = owner.ptr + self._out
        out_weights = owner.ptr + self._out_weights if self._has_weights else 0
        self._set_addresses(x, weights, bias, 0, routing.ptr, out, out_weights)
        if self._set_rows is not None:
            self._set_rows(x)
        self._run(call, (routing,))
        self._monitor.check_inputs()
        shown = out, out_weights if self._has_weights else None
        make_views = functools.partial(self._views, shown, owner, stream)
        return CombineResult(CallEnd(self._order, call), make_views)

    def _views(self, shown: tuple[int, int | None], owner: Any, stream: int) -> Views:
        return combine_views(self._runtime, self._x, self._num_tokens, *shown, owner, stream)()


FORMS = LowLatencyDispatchForm, LowLatencyCombineForm, DispatchForm, CombineForm


def _takes(info: BufferInfo, handle: Any, num_tokens: int, num_rows: int) -> bool:
    return (
        type(handle) is DispatchHandle
        and handle.num_recv_rows == num_rows
        and handle.num_tokens == num_tokens
        and handle.layout == "token"
        and handle.buffer_serial == info.serial
        and handle.born >= info.since
    )


def form_of(runtime: CudaRuntime, rows: RowMover, low_latency: LowLatency, inputs: Any, call: Call) -> CallForm | None:
    """See `Backend.call_form`."""
    is_dispatch = isinstance(inputs, (LowLatencyDispatchInputs, DispatchInputs))
    converts = inputs.use_fp8 if is_dispatch else inputs.compress == "fp8"
    if converts and low_latency.kernels.archs_without_fp8:  # an ordinary call says what happens then
        return None
    if isinstance(inputs, LowLatencyDispatchInputs):
        if _is_plain(call, inputs.x, inputs.topk_idx, inputs.topk_weights):
            return LowLatencyDispatchForm(low_latency, runtime, inputs)
    elif isinstance(inputs, LowLatencyCombineInputs):
        if _is_plain(call, inputs.y, inputs.topk_idx, inputs.topk_weights):
            return LowLatencyCombineForm(low_latency, runtime, inputs)
    elif inputs.handle is None or inputs.handle.layout != "token":
        return None
    elif isinstance(inputs, DispatchInputs):
        if not inputs.use_fp8 and _is_plain(call, inputs.x, inputs.scales):
            rows.check_support()
            return DispatchForm(rows, runtime, inputs)
    elif _is_plain(call, inputs.x, inputs.topk_weights, *inputs.biases):
        rows.check_support()
        return CombineForm(rows, runtime, inputs)
    return None
