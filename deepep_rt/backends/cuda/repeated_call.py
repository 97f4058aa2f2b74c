"""A call that repeats with the same arguments and results: its stream, its launch, and the arrays that it uses.

Every call takes the steps of an ordinary one: it waits for calls on other streams, launches, and notes its end. So repeated and ordinary
calls may follow each other in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..._finalizers import finalize
from ...arrays import frameworks
from ...arrays.view import View
from ...cuda import driver
from ...errors import EPInputError
from ...jit.launch import PreparedLaunch
from ...results import CombineResult, DispatchResult, Event, LowLatencyCombineResult, LowLatencyDispatchResult
from ..base import Call
from .runtime import CudaRuntime
from .stream_order import CallEnd, must_hold_arguments

_Result = TypeVar("_Result", DispatchResult, CombineResult, LowLatencyDispatchResult, LowLatencyCombineResult)


class Memory(Protocol):
    """The Buffer's memory that a call uses. Its pool waits for the streams of its users."""

    def add_stream(self, stream: int) -> None:
        """Add a stream that uses the memory."""


class RepeatedCall(Generic[_Result]):
    """A dispatch or a combine. Each call chooses the stream of `call`; `stream` is the one that the program has chosen, or None.

    `own` is the Buffer's memory that the call uses.
    """

    _end: driver.CudaEvent | None = None  # of the last call, if this object must hold its arguments

    def __init__(self, runtime: CudaRuntime, call: Call, stream: Any, own: tuple[Memory, ...]) -> None:
        self._order, self._monitor, self._network = runtime.order, runtime.monitor, runtime.network
        self._purposes = runtime.purposes
        self._call, self._own = call, own
        self._stream = None if stream is None else frameworks.of_stream(stream)
        self._arguments: tuple[Any, ...] = ()
        self._views: tuple[View | None, ...] = ()
        self._held: tuple[Any, ...] | None = (
            None  # the arguments, if their allocator could reuse their memory before calls have run
        )
        self._last: tuple[int, int | None] | None = None  # the streams of the last call
        self._event: CallEnd | None = None
        self._result: _Result

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            finalize(self._hand_over)

    def set_launch(self, launch: PreparedLaunch, make_result: Callable[[Event, int], _Result]) -> None:
        """Set what later calls launch. `make_result` makes the result of calls on a stream, with the event of their end. It may not hold
        this object.
        """
        self.launch = launch
        self._make_result: Callable[[Event, int], _Result] = make_result
        self._last = self._event = None  # the next call makes a result

    def set_arguments(self, arguments: tuple[Any, ...], *views: View | None) -> None:
        """Set the arguments of later calls: the caller's memory that the call reads or writes. The library of `views` may be another than
        the caller's.
        """
        self._hand_over()
        self._arguments, self._views = arguments, views
        if self._held is not None:
            self._held = arguments
            return
        for view in views:
            if view is not None and view.framework is not self._call.framework:
                self._last = None  # the next call asks again whether it must hold its arguments

    def run(self) -> _Result:
        """Launch a whole call."""
        self._begin()
        self.launch(self._call.stream)
        self._note_end()
        self._monitor.check_inputs()
        return self._result

    def _hand_over(self) -> None:
        """Let the order of calls hold the arguments of calls that may still run."""
        end, self._end = self._end, None
        if end is not None and self._held is not None:
            self._order.hold(end, self._held)

    def _begin(self) -> None:
        """Choose the stream, and queue the waits of the call."""
        call, self._purposes.newest = self._call, ""
        self._order.begin_again(call, self._stream)
        if (call.stream, call.caller_stream) != self._last:
            self._move()
        self._order.enqueue_waits(call)
        if self._network is not None:
            self._network.wake()

    def _note_end(self) -> None:
        call, held = self._call, self._held
        self._order.record_prepared_end(call, held, self._own)
        if held is not None and call.capture is None:
            if self._end is None:
                self._end = driver.CudaEvent(call.stream)
            else:
                self._end.record(call.stream)
        if self._event is not None:  # always, after the first call has begun
            self._event.record_again()

    def _move(self) -> None:
        """Follow a change of streams or arguments: make results for these streams, and see what has to be held."""
        call = self._call
        self._hand_over()
        self._last = call.stream, call.caller_stream
        for memory in self._own:
            memory.add_stream(call.stream)
            if call.caller_stream is not None:
                memory.add_stream(call.caller_stream)
        self._held = self._arguments if must_hold_arguments(call, self._views) else None
        if self._event is None or self._event.stream != call.stream:
            self._event = self._order.event(call)
            self._result = self._make_result(self._event, call.stream)


def check_stream(runtime: CudaRuntime, x: View, stream: Any) -> None:
    """Raise EPInputError if the library of `x` has no current stream, and the program has chosen none."""
    if stream is None and x.framework.current_stream(runtime.device) is None:
        raise EPInputError(
            "x: its library does not tell its current stream, so prepared calls could not wait for new values in x; expected arrays "
            "of PyTorch or CuPy, or a stream. Pass stream="
        )
