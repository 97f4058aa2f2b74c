"""When the calls of a Buffer run: after what fills their arguments, after each other, and within the captures of CUDA graphs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ...arrays import frameworks
from ...arrays import stream_handles as handles
from ...arrays.view import HOST, Framework, View
from ...cuda import driver
from ...errors import EPInputError
from ...results import Event
from ..calls import Call


class _Capture:
    """The capture of a CUDA graph, as far as its calls go.

    It holds their arguments: while it goes on, their allocator would give their memory to a branch beside the call. Nobody says when it
    ends, and its stream may be gone by then; they are let go when the next one begins, or the host waits for all calls.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: list[Any] = []
        self.end: driver.CudaEvent  # of the last call


class _LastCall:
    """Where the last call of a Buffer ends.

    While one stream makes all the calls none has to wait for that, and to record an event in each would cost the host 2 us: who asks gets
    one behind all that the stream holds by then. Once there was a second stream each call records it: work that the caller has queued
    behind one, as the experts of a micro-batch, must not keep the next one waiting.
    """

    def __init__(self, stream: int) -> None:
        self.stream: int | None = None
        self._event = driver.CudaEvent(stream)  # one for all calls
        self._is_alone = True

    def ends_on(self, stream: int) -> None:
        """A call was queued."""
        is_alone = self._is_alone
        if stream != self.stream:
            # Who asks may be another thread, for which a per-thread default stream is another one.
            is_alone = self.stream is None and stream != handles.PER_THREAD
        if not is_alone:
            self._event.record(stream)  # before anybody is told to look at it
        self.stream, self._is_alone = stream, is_alone

    def end(self) -> driver.CudaEvent:
        """An event behind it. To ask changes nothing: any thread may, also while another one makes calls."""
        stream = self.stream
        if stream is None or not self._is_alone:
            return self._event
        if driver.is_capturing(stream):  # the event would be a part of the graph
            raise EPInputError(
                "the stream of the last call is captured in a CUDA graph, of which what waits for that call is no part; wait until the "
                "capture has ended"
            )
        return driver.CudaEvent(stream)


class CallOrder:
    """Orders the calls of one Buffer among streams. The host waits for none of it.

    Args:
        device: The GPU.
        context: Its context.
        check: Raises what the device has reported; called when the host has waited for a call.
    """

    def __init__(self, device: int, context: driver.CurrentContext, check: Callable[[], None]) -> None:
        self._device, self.context, self.check = device, context, check
        self.own_stream = driver.acquire_stream()
        self._last_call = _LastCall(self.own_stream)
        self._capture: _Capture | None = None  # the last one that had calls
        self._thread: int | None = None  # whose per-thread default stream has calls
        self._alive: deque[tuple[driver.CudaEvent, Any]] = deque()  # arguments that queued work still reads

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Decide where a call runs."""
        framework = frameworks.framework_of(x, "x")
        caller = framework.current_stream(self._device)
        launch = self.own_stream if async_finish or caller is None else caller
        if stream is not None:
            launch = handles.of_stream(stream)
        if launch == handles.PER_THREAD or caller == handles.PER_THREAD:
            self._check_thread()
        return Call(launch, caller, async_finish, previous_event, framework)

    def _check_thread(self) -> None:
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            raise EPInputError(
                "the per-thread default stream is another one in each thread, and calls of this Buffer came from two; make them from one, "
                "or work on a stream of your own"
            )
        self._thread = thread

    def enter(self, call: Call) -> None:
        """What is queued for the call from here on comes after earlier calls on other streams, and after what the caller asked for."""
        stream = call.stream
        if isinstance(call.previous_event, Event):
            call.previous_event.wait(stream)
        elif call.previous_event is not None:
            if event := handles.of_event(call.previous_event):
                driver.wait_event(stream, event)
        elif call.async_finish and call.caller_stream not in (None, stream):
            driver.wait_stream(stream, call.caller_stream)
        call.capture = driver.capture_id(stream)  # these waits may have drawn the stream into the caller's capture
        if call.capture is not None:
            if self._capture is not None and self._capture.number == call.capture:
                driver.wait_event(stream, self._capture.end.handle)
        elif stream != self._last_call.stream:
            end = self._last_call.end()  # has to live until the wait is queued
            driver.wait_event(stream, end.handle)

    def leave(self, call: Call, arguments: Any, own: Any, *views: View | None) -> None:
        """Remember where the call ends; hold the arguments of work that is not on the caller's own stream, as their allocator would
        give their memory away.

        Args:
            call: The call.
            arguments: What it reads and writes of the caller's.
            own: And of the Buffer's. That waits for its readers when it is handed out again, but not in captures.
            views: Arguments that may be of another library, or in host memory, whose allocators know nothing of the call's stream.
        """
        stream = call.stream
        must_hold = stream != call.caller_stream
        for view in views:
            if view is not None and (view.framework is not call.framework or view.device == HOST):
                must_hold = True
        if call.capture is not None:  # replays of a graph are ordered by whoever replays it
            if self._capture is None or self._capture.number != call.capture:
                self._capture = _Capture(call.capture)
            self._capture.end = driver.CudaEvent(stream)
            if must_hold:
                self._capture.held.append((arguments, own))
            return
        while self._alive and self._alive[0][0].done():
            self._alive.popleft()
        self._last_call.ends_on(stream)
        if must_hold:
            self._alive.append((driver.CudaEvent(stream), arguments))

    def extend(self, call: Call) -> None:
        """More was queued for the call, after `leave`, and outside of captures."""
        self._last_call.ends_on(call.stream)

    def current_stream(self, framework: Framework | None) -> int:
        """The stream that a caller works on now; the legacy default stream where its library does not tell."""
        return (framework and framework.current_stream(self._device)) or 0

    def event(self, call: Call) -> CallEnd:
        """The end of what the call has queued so far."""
        return CallEnd(self, call)

    def end(self) -> driver.CudaEvent:
        """An event behind all calls so far."""
        return self._last_call.end()

    def synchronize(self, end: driver.CudaEvent) -> None:
        """Wait on the host for it, and for what is queued beside the caller's work."""
        end.synchronize()
        driver.synchronize(self.own_stream)
        self._capture = None
        self.check()

    def forget_arguments(self) -> None:
        """All work is done: nothing reads the arguments any more."""
        self._alive.clear()
        self._capture = None


class CallEnd(Event):
    """The end of a call on the GPU. A CUDA event is recorded only where the call did not run in order with the caller's work."""

    __slots__ = ("_framework", "_marker", "_order", "_stream")

    def __init__(self, order: CallOrder, call: Call) -> None:
        self._order, self._framework, self._stream = order, call.framework, call.stream
        self._marker = self.handle = None
        if call.async_finish:
            self._marker = driver.CudaEvent(call.stream)
            self.handle = self._marker.handle

    def wait(self, stream: Any = None) -> None:
        waiting = self._order.current_stream(self._framework) if stream is None else handles.of_stream(stream)
        with self._order.context:  # whatever another library has made current by now
            if self._marker is not None:
                driver.wait_event(waiting, self._marker.handle)
            elif waiting != self._stream:
                driver.wait_stream(waiting, self._stream)

    def synchronize(self) -> None:
        with self._order.context:
            if self._marker is not None:
                self._marker.synchronize()
            else:
                driver.synchronize(self._stream)
            self._order.check()

    def record_again(self) -> None:
        """Move the event to the end of the call's work, after a hook has queued the rest."""
        if self._marker is not None:
            self._marker.record(self._stream)
