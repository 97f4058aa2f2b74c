"""The order of a Buffer's calls: after the work that fills their arguments, after each other, and within captures of CUDA graphs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ...arrays import frameworks
from ...arrays import frameworks as handles
from ...arrays.view import HOST, Framework, View
from ...cuda import driver
from ...cuda.captured_graph import CapturedGraph
from ...errors import EPInputError
from ...results import Event
from ..base import Call


class _LastCall:
    """The end of the last call of a Buffer.

    If all calls are on one stream, no call has to wait for it. An event in each call would cost the host 2 us, so `end` records one only on
    request, after all work that the stream holds by then.

    After a call on a second stream, each call records an event. The caller may have queued work after a call, such as the experts of a
    micro-batch. The next call must not wait for that work.
    """

    def __init__(self, stream: int) -> None:
        self.stream: int | None = None
        self._event = driver.CudaEvent(stream)  # one for all calls
        self.is_only_stream = True

    def record(self, stream: int) -> None:
        """Note that a call was queued on `stream`."""
        is_only_stream = self.is_only_stream
        if stream != self.stream:
            # The handle of a per-thread default stream means another stream in the thread that calls `end`.
            is_only_stream = self.stream is None and stream != handles.PER_THREAD
        if not is_only_stream:
            self._event.record(stream)  # before other threads can see that they have to use this event
        self.stream, self.is_only_stream = stream, is_only_stream

    def extend(self, first_stream: int) -> None:
        """Cover the work that was queued on the stream of the last call since then, or on `first_stream` if there was no call."""
        if self.stream is None or not self.is_only_stream:
            self._event.record(first_stream if self.stream is None else self.stream)

    def end(self) -> driver.CudaEvent:
        """Return an event after the last call. This changes nothing, so any thread may call it, also during a call of another thread."""
        stream = self.stream
        if stream is None or not self.is_only_stream:
            return self._event
        if driver.is_capturing(stream):  # the event would become a part of the graph
            raise EPInputError(
                "the stream of the last call is captured in a CUDA graph; work outside of the graph cannot wait for that call. "
                "Wait until the capture has ended"
            )
        return driver.CudaEvent(stream)


class CallOrder:
    """Orders the calls of one Buffer among streams. The host waits only in `synchronize`.

    `check` raises what the device has reported. It runs after the host has waited for a call.
    """

    def __init__(self, device: int, context: driver.CurrentContext, check: Callable[[], None]) -> None:
        self._device, self.context, self.check = device, context, check
        self.own_stream = driver.acquire_stream()
        self._last_call = _LastCall(self.own_stream)
        self._capture: CapturedGraph | None = None  # the last one that had calls
        self._graphs: list[CapturedGraph] = []  # that hold memory
        self.has_captured = False
        self._newest_stream: int | None = None  # of the last call, captured or not
        self._per_thread_user: int | None = None  # the thread with calls on its per-thread default stream
        self._arguments: deque[tuple[driver.CudaEvent, Any]] = deque()  # of calls that may still run, oldest first

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Choose the stream of a call."""
        framework = frameworks.FRAMEWORK_OF_CLASS.get(type(x)) or frameworks.framework_of(x, "x")
        caller = framework.current_stream(self._device)
        launch = self.own_stream if async_finish or caller is None else caller
        if stream is not None:
            launch = handles.of_stream(stream)
        if launch == handles.PER_THREAD or caller == handles.PER_THREAD:
            self._check_thread()
        return Call(launch, caller, async_finish, previous_event, framework)

    def begin_again(self, call: Call, stream: int | None) -> None:
        """Choose the stream of a prepared call, whose `Call` is used again and has a framework. `stream` is the one that the program has
        chosen, or None.
        """
        assert call.framework is not None
        caller = call.framework.current_stream(self._device)
        if stream is None:
            stream = self.own_stream if call.async_finish or caller is None else caller
        if stream == handles.PER_THREAD or caller == handles.PER_THREAD:
            self._check_thread()
        call.stream, call.caller_stream = stream, caller

    @contextmanager
    def before_calls(self) -> Iterator[int]:
        """Enter to acquire memory for prepared calls. Yield a stream: all later calls run after the work that it gets in the block.

        Raise EPInputError while this stream is captured in a CUDA graph.
        """
        stream = self._last_call.stream
        if stream is None:
            stream = self.own_stream
        elif stream == handles.PER_THREAD:
            self._check_thread()
        if driver.is_capturing(stream):
            raise EPInputError(
                "a call is prepared while the stream of the last call is captured in a CUDA graph; expected no capture, because later "
                "calls could not wait for the call's memory. Prepare the call before the capture"
            )
        yield stream
        self._last_call.extend(stream)

    def _check_thread(self) -> None:
        thread = threading.get_ident()
        if self._per_thread_user not in (None, thread):
            raise EPInputError(
                "two threads make calls of this Buffer on the per-thread default stream, which is another stream in each thread; expected "
                "one thread. Make all calls from one thread, or pass stream="
            )
        self._per_thread_user = thread

    def enqueue_waits(self, call: Call) -> None:
        """Queue the call's waits: for earlier calls on other streams, and for the work that the caller named."""
        stream = call.stream
        if call.previous_event is not None:
            self._wait_for_previous(call)
        elif call.async_finish and call.caller_stream not in (None, stream):
            driver.wait_stream(stream, call.caller_stream)
            call.follows = call.caller_stream
        number = driver.capture_id(stream)  # these waits may have made the stream a part of the caller's capture
        call.capture = None if number is None else self._capture_of(number)
        if call.capture is not None:
            if call.capture.end is not None:
                driver.wait_event(stream, call.capture.end.handle)
        elif stream != self._last_call.stream:
            end = self._last_call.end()  # the event has to exist until the wait is queued
            driver.wait_event(stream, end.handle)

    def _capture_of(self, number: int) -> CapturedGraph:
        """Return the graph of a capture. The arguments of the capture before are dropped: it has ended."""
        if self._capture is None or self._capture.number != number:
            self.drop_ended_graphs()
            self._capture, self.has_captured = CapturedGraph(number), True
        return self._capture

    def drop_ended_graphs(self) -> None:
        """Drop what captures have held for their calls, and what graphs held that cannot be replayed any more."""
        self._graphs = [graph for graph in self._graphs if not graph.has_ended()]
        if self._capture is not None:
            self._capture.arguments.clear()

    def _wait_for_previous(self, call: Call) -> None:
        if isinstance(call.previous_event, Event):
            call.previous_event.wait(call.stream)
        elif event := handles.of_event(call.previous_event):
            driver.wait_event(call.stream, event)

    def record_end(self, call: Call, arguments: Any, own: Any, *views: View | None) -> None:
        """Note the end of a call. Hold its arguments as long as the call may run, if their allocator could reuse their memory before.

        The call reads or writes `arguments`, the caller's memory, and `own`, the Buffer's. Pools of `own` wait for its readers, but not for
        replays of a graph. `views` are arguments of other libraries, or in host memory. Their allocators do not know the stream of the
        call.
        """
        must_hold = must_hold_arguments(call, views)
        self.record_prepared_end(call, arguments if must_hold else None, own)
        if must_hold and call.capture is None:
            self.hold(driver.CudaEvent(call.stream), arguments)

    def record_prepared_end(self, call: Call, held: Any, own: Iterable[Any]) -> None:
        """Note the end of a prepared call, which holds its arguments itself.

        `held` are the arguments, if a capture must hold them until it has ended, or None. `own` is as of `record_end`. What the capture has
        not acquired, its graph holds as long as it can be replayed.
        """
        stream = self._newest_stream = call.stream
        capture: CapturedGraph | None = call.capture
        if capture is not None:  # the caller orders the replays of a graph
            capture.end = driver.CudaEvent(stream)
            if held is not None:
                capture.arguments.append((held, own))  # no wait orders reuse after readers in a parallel branch
            for allocation in own:
                if capture.hold(allocation, stream) and capture not in self._graphs:
                    self._graphs.append(capture)
            return
        while self._arguments and self._arguments[0][0].done():
            self._arguments.popleft()
        if stream != self._last_call.stream or not self._last_call.is_only_stream:
            self._last_call.record(stream)

    def hold(self, end: driver.CudaEvent, arguments: Any) -> None:
        """Hold arguments until the work before an event is done. Finalizers call this: it calls no driver."""
        self._arguments.append((end, arguments))

    def move_end(self, call: Call) -> None:
        """Move the end of a call after more work that it has queued since `record_end`. Not in captures."""
        self._last_call.record(call.stream)

    def current_stream(self, framework: Framework | None) -> int:
        """The stream that a caller works on now. If its library does not tell, the legacy default stream."""
        return (framework and framework.current_stream(self._device)) or 0

    def event(self, call: Call) -> CallEnd:
        """Make the event of the work that the call has queued so far."""
        return CallEnd(self, call)

    def check_not_captured(self, action: str) -> None:
        """Raise EPInputError while the stream of the last call is captured in a CUDA graph. `action` names what the caller wants to do."""
        if self._newest_stream is not None and driver.is_capturing(self._newest_stream):
            raise EPInputError(
                f"{action} during the capture of a CUDA graph; expected it outside of captures, because replays do not repeat it. Call it "
                f"after the capture has ended"
            )

    def end(self) -> driver.CudaEvent:
        """Return an event after all calls so far."""
        return self._last_call.end()

    def synchronize(self, end: driver.CudaEvent) -> None:
        """Wait on the host for `end` and for the Buffer's own stream; then raise what the device has reported."""
        end.synchronize()
        driver.synchronize(self.own_stream)
        self.drop_ended_graphs()
        self.check()

    def drop_arguments(self) -> None:
        """Drop the arguments of all calls. No call may run any more."""
        self._arguments = deque(maxlen=0)  # prepared calls may hand over theirs later
        for graph in self._graphs:
            graph.drop_memory()
        self._capture, self._graphs = None, []


def must_hold_arguments(call: Call, views: Iterable[View | None]) -> bool:
    """Return whether the allocator of a call's arguments could reuse their memory before the call has run. Arguments as of `record_end`."""
    if call.stream != call.caller_stream:
        return True
    for view in views:  # noqa: SIM110  # a loop is faster, and each call asks
        if view is not None and (view.framework is not call.framework or view.device == HOST):
            return True
    return False


class CallEnd(Event):
    """The end of a call on the GPU.

    It has a CUDA event only if the call did not run on the caller's stream. Otherwise it stands for all work of the call's stream.
    """

    __slots__ = ("_event", "_framework", "_order", "stream")

    def __init__(self, order: CallOrder, call: Call) -> None:
        self._order, self._framework, self.stream = order, call.framework, call.stream
        self._event = self.handle = None
        if call.async_finish:
            self._event = driver.CudaEvent(call.stream)
            self.handle = self._event.handle

    def wait(self, stream: Any = None) -> None:
        waiting = self._order.current_stream(self._framework) if stream is None else handles.of_stream(stream)
        with self._order.context:  # another library may have made another context current
            if self._event is not None:
                driver.wait_event(waiting, self._event.handle)
            elif waiting != self.stream:
                driver.wait_stream(waiting, self.stream)

    def synchronize(self) -> None:
        with self._order.context:
            if self._event is not None:
                self._event.synchronize()
            else:
                driver.synchronize(self.stream)
            self._order.check()

    def record_again(self) -> None:
        """Move the event to the end of the call's work, after a hook has queued the rest."""
        if self._event is not None:
            self._event.record(self.stream)
