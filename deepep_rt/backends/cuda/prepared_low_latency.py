"""Prepared low-latency calls of the CUDA backend: memory, parameters and results are bound once, and a call only launches.

Every call takes the steps of an ordinary one: it looks for time-outs, waits for calls on other streams, launches, and notes its end.
So prepared and ordinary calls may follow each other in any order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ...arrays import stream_handles
from ...arrays.view import HOST, View
from ...cuda import driver
from ...cuda.pool import Slot
from ...errors import EPInputError
from ...kernels.structs import LL_RECEIVE
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..calls import Call, LowLatencyPreparation
from ..hooks import Hook, HookQueue, Hooks, OwnHooks, check_hook_called
from ..prepared_calls import no_dispatch
from .low_latency_kernels import LowLatencyKernels
from .runtime import CudaRuntime
from .stream_order import CallEnd, must_hold_arguments

_Result = TypeVar("_Result", LowLatencyDispatchResult, LowLatencyCombineResult)


class PreparedLowLatency:
    """See `base.PreparedCalls`. All calls write to the same memory.

    Args:
        runtime: The Buffer's memory and kernels.
        kernels: Parameters and memory of its low-latency kernels.
        hooks: The open hooks of the Buffer.
        preparation: The arguments of the calls.
        warn_of_masked_ranks: Warns of ranks that kernels have masked.

    Raises:
        EPInputError: If the library of `x` has no current stream, and the program has chosen none.
        EPUnavailableError: If a rank's GPU cannot convert to FP8, which the combines need.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        kernels: LowLatencyKernels,
        hooks: Hooks,
        preparation: LowLatencyPreparation,
        warn_of_masked_ranks: Callable[[], None],
    ) -> None:
        given, with_hook, out = preparation.dispatch, preparation.with_hook, preparation.out
        x, idx, weights = given.x, given.topk_idx, given.topk_weights
        assert weights is not None
        if preparation.stream is None and x.framework.current_stream(runtime.device) is None:
            raise EPInputError(
                "x: its library does not tell its current stream, so prepared calls could not wait for new values in x; expected arrays "
                "of PyTorch or CuPy, or a stream. Pass stream="
            )
        kernels.check_fp8(given)
        kernels.check_reduction(preparation.reduce_early)
        kernels.check_compression(preparation.compress)
        self._kernels, self._hooks, self._own_hooks, self._with_hook = kernels, hooks, OwnHooks(hooks), with_hook
        self._reduce_early, self._check_peers = preparation.reduce_early, runtime.monitor.check_peers
        self._warn = warn_of_masked_ranks if runtime.config.on_timeout == "mask" else None
        self._has_dispatched = False
        self._new_handle = new_handle = functools.partial(_new_handle, runtime.info.serial, x)

        format_ = kernels.row_format(given.use_fp8, given.use_ue8m0)
        with runtime.order.before_calls() as stream:
            memory, tables = format_.memory.acquire(stream), kernels.handles.acquire(stream)
            sums = kernels.sums.acquire(stream) if out is None else None
        self._tables = tables
        results = memory.ptr + format_.x, memory.ptr + format_.scales
        params = kernels.dispatch_params(given, (x, idx, weights), format_, tables.ptr, results, with_hook)

        def make_sent(event: Event, stream: int) -> LowLatencyDispatchResult:
            views = functools.partial(kernels.dispatch_views, format_, results, memory, tables, x.framework, stream)
            return LowLatencyDispatchResult(new_handle(tables, None), event, None, views)

        self._dispatch = _RepeatedCall(
            runtime, "ll_dispatch", kernels.num_blocks, params, preparation, (memory, tables), hooks.dispatch, make_sent
        )
        num_tokens = x.shape[0]
        address = out.ptr if sums is None else sums.ptr  # type: ignore[union-attr]
        arrays = 0, idx, weights  # the address of y comes with the first combine
        params = kernels.combine_params(
            preparation.combine_kind, num_tokens, arrays, tables.ptr, address, preparation.reduce_early, True, with_hook
        )

        def make_back(event: Event, stream: int) -> LowLatencyCombineResult:
            def views() -> Views:
                shape = num_tokens, runtime.config.hidden
                return {"x": out or runtime.result(address, shape, "bfloat16", sums, x.framework, stream)}

            return LowLatencyCombineResult(event, None, views)

        own = (tables,) if sums is None else (tables, sums)
        name = kernels.combine_name(num_tokens, preparation.reduce_early, preparation.compress)
        self._combine = _RepeatedCall(runtime, name, kernels.num_blocks, params, preparation, own, hooks.combine, make_back)

    def dispatch(self) -> LowLatencyDispatchResult:
        """Launch the dispatch, or its sending half."""
        self._check_peers()
        if self._with_hook:
            self._own_hooks.check_can_dispatch()
        self._hooks.dispatch.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        self._has_dispatched = True
        if not self._with_hook:
            return self._dispatch.run()
        sent, hook = self._dispatch.send()
        self._own_hooks.dispatch = hook.state
        sent.handle = self._new_handle(self._tables, hook.state)
        return sent

    def set_rows(self, y: View) -> None:
        """Let later combines read `y`."""
        if y.device == HOST:
            raise EPInputError("y is in host memory; expected GPU memory in prepared calls whose x is there. Move the array")
        if self._with_hook:
            self._own_hooks.check_can_combine()  # the receiving half of a call gets the same rows as its sending half
        self._combine.set_rows(y)

    def combine(self) -> LowLatencyCombineResult:
        """Launch the combine, or its sending half."""
        self._check_peers()
        if not self._has_dispatched:
            raise no_dispatch()
        if not self._reduce_early:
            self._kernels.check_reduction(False)
        if self._with_hook:
            check_hook_called(self._own_hooks.dispatch)
            self._own_hooks.check_can_combine()
        self._hooks.combine.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        if not self._with_hook:
            return self._combine.run()
        back, hook = self._combine.send()
        self._own_hooks.combine = hook.state
        return back


def _new_handle(serial: int, x: View, tables: Slot, state: Any) -> LowLatencyHandle:
    return LowLatencyHandle(x.shape[0], serial, (tables, state), True, x.framework)


class _RepeatedCall(Generic[_Result]):
    """A dispatch or a combine: its stream, its launches, and the arrays that it uses.

    Args:
        runtime: The Buffer's memory and kernels.
        kernel: Name of the kernel.
        num_blocks: Blocks of its grid.
        params: The members of its Params.
        preparation: The arguments of the calls.
        own: The Buffer's memory that the call uses.
        queue: The queue of its hooks.
        make_result: Makes the result of calls on a stream. The event is that of their end.
    """

    _end: driver.CudaEvent | None = None  # of the last call, if this object must hold its arguments

    def __init__(
        self,
        runtime: CudaRuntime,
        kernel: str,
        num_blocks: int,
        params: dict[str, Any],
        preparation: LowLatencyPreparation,
        own: tuple[Slot, ...],
        queue: HookQueue,
        make_result: Callable[[Event, int], _Result],
    ) -> None:
        given, stream = preparation.dispatch, preparation.stream
        self._order, self._monitor, self._network, self._queue = runtime.order, runtime.monitor, runtime.network, queue
        launcher = runtime.launcher(kernel)
        self._launch = launcher.prepare(num_blocks, params)
        self._launch_receiving = launcher.prepare(num_blocks, {**params, "phases": LL_RECEIVE})
        halves = (self._launch, self._launch_receiving) if preparation.with_hook else (self._launch,)
        self._set_address_of_rows = [half.member("y") for half in halves] if "y" in params else []
        self._stream = None if stream is None else stream_handles.of_stream(stream)
        self._call = Call(-1, None, preparation.async_finish, None, given.x.framework)
        self._own = own
        self._make_result: Callable[[Event, int], _Result] = make_result
        self._with_hook = preparation.with_hook
        self._views: tuple[View | None, ...] = (given.topk_idx, given.topk_weights)
        self._arguments: tuple[Any, ...] = (given, preparation.out)
        # The arguments and the Buffer's memory, if an allocator could reuse the arguments' memory before calls have run.
        self._held: tuple[Any, Any] | None = None
        self._last: tuple[int, int | None] | None = None  # the streams of the last call
        self._event: CallEnd | None = None
        self._result: _Result

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the order of calls hold the arguments of calls that may still run."""
        end, self._end = self._end, None
        if end is not None and self._held is not None:
            self._order.hold(end, self._held[0])  # not the memory of results, whose slots wait for their streams

    def set_rows(self, y: View) -> None:
        """Use other rows of the experts from now on. Only for a combine."""
        self._hand_over()
        for set_address in self._set_address_of_rows:
            set_address(y.ptr)
        self._arguments, self._views = (*self._arguments[:2], y), (*self._views[:2], y)
        if self._held is not None:
            self._held = self._arguments, self._own
        if y.framework is not self._call.framework:
            self._last = None  # the next call asks again whether it must hold its arguments

    def run(self) -> _Result:
        """Launch a whole call."""
        self._begin()
        self._launch(self._call.stream)
        self._note_end()
        self._monitor.check_inputs()
        return self._result

    def send(self) -> tuple[_Result, Hook]:
        """Launch the sending half. The hook launches the receiving half on the same stream."""
        self._begin()
        with self._monitor.call_half():
            stream = self._call.stream
            self._launch(stream)
            self._note_end()
            hook = self._queue.append(self._receive, lambda: driver.capture_id(stream))
        # The prepared call must not keep the hook: if the caller drops it, the next call runs it.
        result: _Result = object.__new__(type(self._result))
        result.__dict__.update(self._result.__dict__)
        result.hook = hook
        return result, hook

    def _receive(self) -> None:
        self._monitor.check_peers()
        with self._monitor.call_half():
            self._order.enqueue_waits(self._call)
            if self._network is not None:
                self._network.wake()
            self._launch_receiving(self._call.stream)
            self._note_end()
        self._monitor.check()  # after the launch: other ranks wait for this half, whatever the input was

    def _note_end(self) -> None:
        call, held = self._call, self._held
        self._order.record_prepared_end(call, held)
        if held is not None and call.capture is None:
            if self._end is None:
                self._end = driver.CudaEvent(call.stream)
            else:
                self._end.record(call.stream)
        if self._event is not None:  # always, after the first call has begun
            self._event.record_again()

    def _begin(self) -> None:
        """Choose the stream, and queue the waits of the call."""
        call = self._call
        self._order.begin_again(call, self._stream)
        if (call.stream, call.caller_stream) != self._last:
            self._move()
        self._order.enqueue_waits(call)
        if self._network is not None:
            self._network.wake()

    def _move(self) -> None:
        """Follow a change of streams or arguments: make results for these streams, and see what has to be held."""
        call = self._call
        self._hand_over()
        self._last = call.stream, call.caller_stream
        for memory in self._own:
            memory.add_stream(call.stream)
            if call.caller_stream is not None:
                memory.add_stream(call.caller_stream)
        self._held = (self._arguments, self._own) if must_hold_arguments(call, *self._views) else None
        if self._event is None or self._event.stream != call.stream:
            self._event = self._order.event(call)
            self._result = self._make_result(self._event, call.stream)
            if self._with_hook:  # each call has a result of its own, and all share these arrays
                for name in ("recv_x", "recv_x_scales", "num_recv_tokens_per_expert", "x"):
                    getattr(self._result, name, None)
