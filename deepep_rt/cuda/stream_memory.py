"""Memory from a stream-ordered pool of the driver, for results that do not fit into a Buffer's own pool."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from .._finalizers import finalize
from ..errors import EPOutOfMemoryError
from . import driver
from .stream_tracking import Allocation, PendingWork, Streams, StreamTracker, is_done, with_events

_MOST_DEFERRED = 2  # allocations whose readers are not done; as many micro-batches overlap

_deferred: deque[tuple[StreamTracker, int, int, PendingWork]] = (
    deque()
)  # tracker, pointer, stream and pending work of memory to free


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

    def destroy(self) -> None:
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
