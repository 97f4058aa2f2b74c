"""Track the streams that use an allocation, and order its next user after them. `StreamPool` allocates from a pool of the driver.

An allocation becomes free when its arrays die on the host, although kernels that use it may still be queued. Work of the next user is
ordered after the work that these streams held when the allocation died:

- the stream of the call, and the caller's current stream at the call;
- streams that a DLPack consumer named;
- the stream that was current when an array was made of the allocation, and the current stream of the thread that drops its last array.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from .._finalizers import finalize
from ..arrays.view import Framework
from ..errors import EPOutOfMemoryError, EPUnavailableError
from . import driver

PendingWork = tuple[tuple[int, driver.CudaEvent | None], ...]
"""Streams whose work may still use an allocation, each with an event after that work.

None in place of an event means all work that the stream holds when the next user asks.
"""

Streams = tuple[int, ...]

_SINGLE_STREAM_RUN = 64  # after so many allocations of one stream alone, the tracker assumes that there is no other stream
_MOST_DEFERRED = 2  # allocations whose readers are not done; as many micro-batches overlap

_deferred: deque[tuple[StreamTracker, int, int, PendingWork]] = deque()
"""Tracker, pointer, stream and pending work of memory to free."""


class Allocation:
    """Memory that was handed out, and the streams that use it. Code that makes arrays of it records further streams."""

    __slots__ = ("_framework", "_graph", "_streams")

    def __init__(self, stream: int, reader: int | None) -> None:
        self._streams: Streams = (stream,) if reader is None or reader == stream else (stream, reader)
        self._framework: tuple[Framework, int] | None = None

    def add_stream(self, stream: int) -> None:
        """Add a stream that uses the allocation."""
        if stream not in self._streams:
            self._streams += (stream,)

    @property
    def graph(self) -> Any:
        """The CapturedGraph whose capture has acquired the allocation, or None."""
        return getattr(self, "_graph", None)

    def acquired_in(self, graph: Any) -> None:
        """Note the CapturedGraph whose capture has acquired the allocation."""
        self._graph = graph

    def add_framework(self, framework: Framework, device: int) -> None:
        """Add an array library that makes an array of the allocation: its current stream uses it now, and when the array is dropped."""
        stream = framework.current_stream(device)
        if stream is not None:
            self._framework = framework, device
            self.add_stream(stream)

    def _final_streams(self) -> Streams:
        """Return the streams that use the allocation when it dies, in the thread that drops it. Finalizers call this: it does not raise."""
        if self._framework is not None:
            framework, device = self._framework
            try:
                stream = framework.current_stream(device)
            except Exception:  # the memory has to be released anyway
                stream = None
            if stream is not None:
                self.add_stream(stream)
        return self._streams


class StreamTracker:
    """Pending work of the allocations of one pool. While a single stream uses all of them, the tracker calls no driver function."""

    def __init__(self) -> None:
        self.context = driver.CurrentContext()  # allocations die at any time, and another library's context may be current then
        self._last_stream: Streams = ()  # of the last allocation that died: one stream
        self._run_length = 0

    def record(self, streams: Streams, pending: PendingWork = ()) -> PendingWork:
        """Return the work on these streams that the next user of a dying allocation has to wait for.

        `pending` is the work that the allocation itself did not wait for. Finalizers call this: it does not raise.
        """
        if not streams:
            return pending
        if streams == self._last_stream:
            run_length = self._run_length + 1
        else:
            run_length = _SINGLE_STREAM_RUN if len(streams) == 1 and not self._last_stream else 0
            self._last_stream = streams[-1:]
        self._run_length = run_length  # read the local variable below: another thread may change this one
        # A new event on a stream also covers earlier work of that stream.
        older = pending and tuple(entry for entry in pending if entry[0] not in streams)
        if run_length >= _SINGLE_STREAM_RUN:
            return (*older, (streams[0], None))
        with self.context:
            return (*older, *with_events((stream, None) for stream in streams))

    def with_late_events(self, works: Sequence[PendingWork], stream: int) -> Sequence[PendingWork]:
        """Return pending work with an event in each place of None, one for each stream. Captures of `stream` leave it as it is."""
        self._run_length = 0  # there is another stream now, whose allocations may live long
        recorded: dict[int, PendingWork] = {}

        def entry_of(other: int, event: driver.CudaEvent | None) -> PendingWork:
            if event is not None:
                return ((other, event),)
            if other not in recorded:
                recorded[other] = _record_event(other)
            return recorded[other]

        with self.context:
            if driver.is_capturing(stream):
                return works
            return [tuple(entry for one in work for entry in entry_of(*one)) for work in works]

    def order_after(self, pending: PendingWork, stream: int) -> PendingWork:
        """Order later work on `stream` after pending work. Return the part that the next user still has to wait for.

        Captured work is ordered only after other work of its capture. The program that replays the graph orders the rest.
        """
        if is_only_on(pending, stream):
            return ()
        others = [(other, event) for other, event in pending if other != stream]
        with self.context:
            if driver.is_capturing(stream):
                _order_in_capture(pending, stream)
                return pending
            entries = with_events(others)
            for _, event in entries:
                if event is not None:
                    driver.wait_event(stream, event.handle)
        return tuple(entry for entry in entries if entry[1] is None)


def is_only_on(pending: PendingWork, stream: int, another: int | None = None) -> bool:
    """Return whether only these streams have pending work."""
    for other, _ in pending:  # noqa: SIM110  # a loop is faster, and each call of a Buffer asks several times
        if other != stream and other != another:  # faster than a tuple
            return False
    return True


def has_no_event(pending: PendingWork, stream: int) -> bool:
    """Return whether another stream has pending work without an event."""
    for other, event in pending:  # noqa: SIM110  # as in is_only_on
        if event is None and other != stream:
            return True
    return False


def is_done(pending: PendingWork, stream: int) -> bool:
    """Return whether the pending work of all streams but this one is done. Do not call this in a capture, as `unfinished`."""
    return all(other == stream or (event is not None and event.done()) for other, event in pending)


def unfinished(pending: PendingWork) -> PendingWork:
    """Return pending work without the finished part. Do not call this in a capture: the driver would end the capture."""
    return tuple((stream, event) for stream, event in pending if event is None or not event.done())


def with_events(pending: Iterable[tuple[int, driver.CudaEvent | None]]) -> PendingWork:
    """Return pending work with an event in each place of None, unless its stream is captured. The tracker's context is current."""
    return tuple(entry for stream, event in pending for entry in (_record_event(stream) if event is None else ((stream, event),)))


def _record_event(stream: int) -> PendingWork:
    """Return an entry for the work that a stream holds now. Waiting for later work as well would tie streams to each other."""
    try:
        # An event recorded in a capture does not cover work before the capture.
        return ((stream, None if driver.is_capturing(stream) else driver.CudaEvent(stream)),)
    except EPUnavailableError:  # the stream was destroyed, perhaps with work on it; the driver may also crash instead
        driver.synchronize_all()
        return ()


def _order_in_capture(pending: PendingWork, stream: int) -> None:
    """Order later work on a captured stream after the work of other streams in the same capture."""
    capture = _capture_of(stream)
    for other, event in pending:
        if event is None and other != stream and capture is not None and _capture_of(other) == capture:
            driver.wait_stream(stream, other)


def _capture_of(stream: int) -> int | None:
    try:
        return driver.capture_id(stream)
    except EPUnavailableError:  # the stream was destroyed, or is the default stream while a stream that waits for it is captured
        return None


class StreamPool:
    """The part of the driver's pool that one Buffer uses.

    This pool keeps freed memory. The driver's default pool returns memory to the system whenever the host waits for a stream; the next
    request for 240 MB then takes a millisecond.
    """

    def __init__(self) -> None:
        self._tracker = StreamTracker()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> StreamMemory:
        """Allocate memory for work on `stream`. `reader` may be another stream that will use it too."""
        _free_deferred(_MOST_DEFERRED)
        try:
            ptr = driver.allocate_async(num_bytes, stream)
        except EPOutOfMemoryError:
            _free_deferred(0)
            ptr = driver.allocate_async(num_bytes, stream)
        return StreamMemory(self._tracker, ptr, stream, reader)

    def trim(self) -> None:
        """Return unused memory to the driver."""
        _free_deferred(0)
        driver.trim_memory_pool()


class StreamMemory(Allocation):
    """An allocation of a stream-ordered pool. Its last reference frees it, after the work that its streams hold at that time."""

    __slots__ = ("_tracker", "ptr")

    def __init__(self, tracker: StreamTracker, ptr: int, stream: int, reader: int | None) -> None:
        super().__init__(stream, reader)
        self.ptr, self._tracker = ptr, tracker

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            finalize(_release, self._tracker, self.ptr, self._final_streams())


def _release(tracker: StreamTracker, ptr: int, streams: Streams) -> None:
    """Free memory, or defer it until its readers are done: a wait for them would delay all later work on the stream of the call."""
    pending: PendingWork = ()
    if len(streams) > 1:
        with tracker.context:
            pending = with_events((stream, None) for stream in streams[1:])
    if pending:
        _deferred.append((tracker, ptr, streams[0], pending))
    else:
        _free(tracker, ptr, streams[0], ())


def _free(tracker: StreamTracker, ptr: int, stream: int, pending: PendingWork) -> None:
    """Free memory in stream order. Defer it in a capture: a graph must not free memory that it did not allocate."""
    with tracker.context:
        remaining = tracker.order_after(pending, stream)
        if remaining or driver.is_capturing(stream):
            _deferred.append((tracker, ptr, stream, remaining))
        else:
            driver.free_async(ptr, stream)


def _free_deferred(most: int) -> None:
    """Free deferred memory whose readers are done. Of the other, let at most some wait: the stream of the oldest waits for its readers."""
    for _ in range(len(_deferred)):
        tracker, ptr, stream, pending = _deferred.popleft()
        with tracker.context:
            pending = with_events(pending)
        if is_done(pending, stream):
            _free(tracker, ptr, stream, ())
        elif len(_deferred) < most:
            _deferred.append((tracker, ptr, stream, pending))
        else:
            _free(tracker, ptr, stream, pending)
