"""Memory of results: blocks of a range, and slots of equal size. An allocation lives as long as the arrays made of it.

Finalizers release memory. They may run inside any method of this module, and in any thread, so they only append to a deque.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import deque
from typing import Any

from .._finalizers import finalize
from ..kernels.regions import align_up
from . import driver
from .stream_tracking import Allocation, PendingWork, Streams, StreamTracker, is_only_on, unfinished


class Block(Allocation):
    """A block of a pool. Its last reference releases it."""

    __slots__ = ("_pending", "_pool", "num_bytes", "offset")

    def __init__(self, pool: Pool, offset: int, num_bytes: int, pending: PendingWork, stream: int, reader: int | None) -> None:
        super().__init__(stream, reader)
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._pending = pool, pending

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def trim(self, num_bytes: int) -> None:
        """Release the tail, which holds no rows."""
        num_bytes = align_up(num_bytes)
        self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, self._pending, self._streams[:1])
        self.num_bytes = num_bytes

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():  # at the end of Python, modules that this needs may be gone
            finalize(self._pool.release, self.offset, self.num_bytes, self._pending, self._final_streams())


Extent = tuple[int, int]
"""A part of a pool: its first offset, and the offset after its end."""


class Pool:
    """One range of memory. A block gets the first offset that no other stream is busy with; large blocks start at a free cell if possible.

    Large blocks are trimmed. If they were packed, the holes between them would be too small for the next large block.

    Args:
        base: Address of the range.
        num_bytes: Its size.
        cell: Bytes of the largest block; 0: all blocks are packed.
    """

    def __init__(self, base: int, num_bytes: int, cell: int = 0) -> None:
        self.base, self.num_bytes, self._cell = base, num_bytes, cell
        self._free: list[Extent] = [(0, num_bytes)]  # in order, never adjacent
        self._used: list[tuple[Extent, PendingWork]] = []  # free memory that was used before, oldest first, without overlap
        self._released: deque[tuple[Extent, PendingWork]] = deque()
        self._tracker = StreamTracker()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> Block | None:
        """Allocate a block; None if there is no room.

        Args:
            num_bytes: Its size.
            stream: The stream that fills it.
            reader: The stream that will read it, if it is another one.
        """
        num_bytes = align_up(max(num_bytes, 1))
        if (begin := self._reuse_last(num_bytes, stream)) is not None:
            return Block(self, begin, num_bytes, (), stream, reader)
        self._merge_released()
        begin = self._find(num_bytes, stream)
        if begin is None:
            return None
        taken = begin, begin + num_bytes
        self._free = [part for extent in self._free for part in _without(extent, taken)]
        pending: PendingWork = ()
        used = []
        for extent, work in self._used:
            rest = _without(extent, taken)
            if rest != [extent]:
                pending += work
            used += [(part, work) for part in rest]
        self._used = used
        return Block(self, begin, num_bytes, self._tracker.order_after(pending, stream), stream, reader)

    def release(self, offset: int, num_bytes: int, pending: PendingWork, streams: Streams) -> None:
        """Take back memory that `streams` used, with the work that was pending before them."""
        if num_bytes:
            self._released.append(((offset, offset + num_bytes), self._tracker.record(streams, pending)))

    @property
    def used_bytes(self) -> int:
        """Bytes that callers hold. Any thread may read it; during a call of another thread, it may be a little too large."""
        free = sum(end - begin for begin, end in tuple(self._free))
        return max(self.num_bytes - free - sum(end - begin for (begin, end), _ in self._released.copy()), 0)

    @property
    def free_bytes(self) -> int:
        self._merge_released()
        return sum(end - begin for begin, end in self._free)

    def _reuse_last(self, num_bytes: int, stream: int) -> int | None:
        """Return the offset of the block that was just released, if size and stream are the same. Equal calls in a row take this path."""
        if len(self._released) != 1:
            return None
        (begin, end), pending = self._released[0]
        if end - begin != num_bytes or not is_only_on(pending, stream) or (self._is_large(num_bytes) and begin % self._cell):
            return None
        self._released.popleft()  # it never entered the free list
        return begin

    def _find(self, num_bytes: int, stream: int) -> int | None:
        """Return the first offset that no other stream is busy with, or else the one whose last user left first."""
        foreign = [extent for extent, pending in self._used if not is_only_on(pending, stream)]
        offsets = self._candidates(num_bytes, foreign)
        if len(offsets) < 2 or not foreign or driver.is_capturing(stream):
            return offsets[0] if offsets else None
        self._used = [(extent, unfinished(pending)) for extent, pending in self._used]
        busy = [(age, extent) for age, (extent, pending) in enumerate(self._used) if not is_only_on(pending, stream)]

        def last_use(offset: int) -> int:
            return max((age for age, (begin, end) in busy if begin < offset + num_bytes and offset < end), default=-1)

        return min(offsets, key=last_use)

    def _candidates(self, num_bytes: int, avoided: list[Extent]) -> list[int]:
        """Return offsets where a block fits, including those right after avoided extents. Early ones keep free memory in large parts."""
        fitting = [(begin, end - num_bytes) for begin, end in self._free if end - begin >= num_bytes]
        if self._is_large(num_bytes):
            cells = [cell for first, last in fitting for cell in range(align_up(first, self._cell), last + 1, self._cell)]
            if cells:
                return cells
        ends = [end for _, end in avoided]
        return [offset for first, last in fitting for offset in (first, *sorted(end for end in ends if first < end <= last))]

    def _is_large(self, num_bytes: int) -> bool:
        return 2 * num_bytes > self._cell > 0

    def _merge_released(self) -> None:
        while self._released:
            extent, pending = self._released.popleft()
            self._used.append((extent, pending))
            begin, end = extent
            at = bisect(self._free, extent)
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end))


def _without(extent: Extent, taken: Extent) -> list[Extent]:
    """Return the parts of an extent that are not in `taken`."""
    (begin, end), (other_begin, other_end) = extent, taken
    return [part for part in ((begin, min(end, other_begin)), (max(begin, other_end), end)) if part[0] < part[1]]


class Slots:
    """Slots of equal size in plain device memory. More are allocated when all are in use. `destroy` frees all of them.

    Args:
        num_bytes: Size of a slot.
        count: Slots to start with.
    """

    def __init__(self, num_bytes: int, count: int) -> None:
        self._num_bytes = num_bytes
        self._memory = [driver.allocate(num_bytes) for _ in range(count)]
        self._free: deque[tuple[int, PendingWork]] = deque((ptr, ()) for ptr in self._memory)
        self._tracker = StreamTracker()

    def acquire(self, stream: int, reader: int | None = None) -> Slot:
        """Get a slot for work on `stream`. `reader` may be another stream that will use it too."""
        if self._free:
            ptr, pending = last = self._free.pop()
            if is_only_on(pending, stream):
                return Slot(self, ptr, (), stream, reader)
            self._free.append(last)
            ptr, pending = self._free.popleft()  # free for the longest time, so its pending work is the most likely to have ended
        else:
            ptr, pending = driver.allocate(self._num_bytes), ()
            self._memory.append(ptr)
        return Slot(self, ptr, self._tracker.order_after(pending, stream), stream, reader)

    def release(self, ptr: int, pending: PendingWork, streams: Streams) -> None:
        """Take back a slot that `streams` used, with the work that was pending before them."""
        self._free.append((ptr, self._tracker.record(streams, pending)))

    def destroy(self) -> None:
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
