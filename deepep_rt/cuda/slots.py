"""Memory of results: slots of equal size. `pool` has blocks of any size, and says what finalizers and captures do."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import Any

from .._finalizers import finalize
from ..errors import EPOutOfMemoryError
from . import driver
from .captured_graph import CapturedGraph
from .local_heap import LocalHeap
from .stream_tracking import Allocation, PendingWork, Streams, StreamTracker, is_done, is_only_on, with_events


class Slots:
    """Slots of equal size in device memory. More are allocated when all are in use. `destroy` frees all of them.

    Their memory is that of `heap`, which frees it as a whole. Default: memory of the driver.

    Work on a stream should not wait for another stream whose work still uses a slot: two Buffers could then wait for each other. So more
    slots are also allocated while others are busy, up to twice as many as the program has held at once.
    """

    def __init__(self, num_bytes: int, count: int, heap: LocalHeap | None = None) -> None:
        self.num_bytes, self._heap = num_bytes, heap
        self._memory = [self._allocate() for _ in range(count)]
        self._free: deque[tuple[int, PendingWork]] = deque((ptr, ()) for ptr in self._memory)
        self._most_held = self._num_usual = count  # slots that the program has held at once, and slots that captures do not have
        self._tracker = StreamTracker()
        self._captured: Slots | None = None  # the slots of captures

    def acquire(
        self, stream: int, reader: int | None = None, graph: CapturedGraph | None = None, follows: int | None = None
    ) -> Slot:
        """Get a slot for work on `stream`. `graph` is the one that it is captured in. `reader` is another stream that will use the slot.

        `stream` already waits for the work of the stream `follows`.
        """
        if graph is not None:
            return self._acquire_in_capture(stream, reader, graph)
        if self._free:
            ptr, pending = last = self._free.pop()
            if is_only_on(pending, stream):
                return Slot(self, ptr, (), stream, reader)
            self._free.append(last)
            ptr, pending = self._choose(stream, follows)
        else:
            ptr, pending = self._grow()
            self._most_held = max(self._most_held, self._num_usual - len(self._free))
        return Slot(self, ptr, self._tracker.order_after(pending, stream), stream, reader)

    def _choose(self, stream: int, follows: int | None) -> tuple[int, PendingWork]:
        """Return a slot that other streams do not delay, or a new one, or else the one that has been free for the longest time."""
        if (follows is not None and is_only_on(self._free[0][1], stream, follows)) or driver.is_capturing(stream):
            return self._free.popleft()
        with self._tracker.context:
            for _ in range(len(self._free)):
                ptr, pending = self._free.popleft()
                pending = with_events(pending)
                if is_done(pending, stream):
                    return ptr, ()
                self._free.append((ptr, pending))
        if self._num_usual < 2 * self._most_held:
            with contextlib.suppress(EPOutOfMemoryError):
                return self._grow()
        return self._free.popleft()

    def _allocate(self) -> int:
        return driver.allocate(self.num_bytes) if self._heap is None else self._heap.allocate(self.num_bytes)

    def _grow(self) -> tuple[int, PendingWork]:
        ptr = self._allocate()
        self._memory.append(ptr)
        self._num_usual += 1
        return ptr, ()

    def _acquire_in_capture(self, stream: int, reader: int | None, graph: CapturedGraph) -> Slot:
        if self._captured is None:
            self._captured = Slots(self.num_bytes, 0)
        captured = self._captured
        free = captured._free or self._free
        if free is self._free:
            if not free:
                free.append(self._grow())
            self._num_usual -= 1
        last_is_only_here = is_only_on(free[-1][1], stream)
        ptr, pending = free.pop() if last_is_only_here else free.popleft()
        slot = Slot(captured, ptr, self._tracker.order_after(pending, stream), stream, reader)
        slot.acquired_in(graph)
        return slot

    def release(self, ptr: int, pending: PendingWork, streams: Streams) -> None:
        """Take back a slot that `streams` used, with the work that was pending before them."""
        self._free.append((ptr, self._tracker.record(streams, pending)))

    def in_use(self) -> list[tuple[int, int]]:
        """Return the slots that the program or a captured graph holds: the address and the bytes of each."""
        free = {ptr for ptr, _ in self._free}
        return [(ptr, self.num_bytes) for ptr in self._memory if ptr not in free]

    def destroy(self) -> None:
        if self._heap is None:
            for ptr in self._memory:
                driver.free(ptr)


class Slot(Allocation):
    """One of the Slots. Its last reference releases it."""

    __slots__ = ("_pending", "_slots", "ptr")

    def __init__(self, slots: Slots, ptr: int, pending: PendingWork, stream: int, reader: int | None) -> None:
        # Without a call of the base class: low-latency calls make one or two slots.
        self._streams, self._framework = (stream,) if reader is None or reader == stream else (stream, reader), None
        self.ptr, self._slots, self._pending = ptr, slots, pending

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            streams = self._streams if self._framework is None else self._final_streams()
            finalize(self._slots.release, self.ptr, self._pending, streams)
