"""Memory of results: blocks of a range. An allocation lives as long as the arrays made of it.

Memory that a capture has acquired serves captures only: a replay of its graph writes there at any time.

Finalizers release memory. They may run inside any method of this module, and in any thread, so they only append to a deque.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from typing import Any

from .._finalizers import finalize
from ..kernels.regions import align_up
from . import driver
from .captured_graph import CapturedGraph
from .stream_tracking import Allocation, PendingWork, Streams, StreamTracker, has_no_event, is_only_on, unfinished


class Block(Allocation):
    """A block of a pool. Its last reference releases it."""

    __slots__ = ("_pending", "_pool", "num_bytes", "offset")

    def __init__(self, pool: Pool, offset: int, num_bytes: int, pending: PendingWork, stream: int, reader: int | None) -> None:
        # Without a call of the base class, as in a Slot.
        self._streams, self._framework = (stream,) if reader is None or reader == stream else (stream, reader), None
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._pending = pool, pending

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def trim(self, num_bytes: int) -> None:
        """Release the tail, which holds no rows."""
        num_bytes = align_up(num_bytes)
        if num_bytes != self.num_bytes:
            self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, self._pending, self._streams[:1])
            self.num_bytes = num_bytes

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():  # at the end of Python, modules that this needs may be gone
            streams = self._streams if self._framework is None else self._final_streams()
            finalize(self._pool.release, self.offset, self.num_bytes, self._pending, streams)


Extent = tuple[int, int]
"""A part of a pool: its first offset, and the offset after its end."""


class Pool:
    """One range of memory. A block gets the first offset that no other stream is busy with; large blocks start at a free cell if possible.

    Large blocks are trimmed. If they were packed, the holes between them would be too small for the next large block. `cell` is the bytes
    of the largest block; 0: all blocks are packed.
    """

    def __init__(self, base: int, num_bytes: int, cell: int = 0) -> None:
        self.base, self._cell = base, cell
        self._all: list[Extent] = [(0, num_bytes)] if num_bytes else []  # in order
        self._free = self._all.copy()  # in order, never adjacent
        self._used: list[tuple[Extent, PendingWork]] = []  # free memory that was used before, oldest first, without overlap
        self._released: deque[tuple[Extent, PendingWork]] = deque()
        self._tracker = StreamTracker()
        self._captured: Pool | None = None  # the memory of captures

    def allocate(
        self, num_bytes: int, stream: int, reader: int | None = None, graph: CapturedGraph | None = None
    ) -> Block | None:
        """Allocate a block that `stream` fills; None if there is no room. `graph` is the one that it is captured in.

        `reader` is the stream that will read the block, if it is another one.
        """
        num_bytes = align_up(max(num_bytes, 1))
        if graph is not None:
            return self._allocate_in_capture(num_bytes, stream, reader, graph)
        return self._allocate(num_bytes, stream, reader)

    @property
    def num_bytes(self) -> int:
        """Bytes of the range and of what was added to it."""
        return sum(end - begin for begin, end in self._all)

    def in_use(self) -> list[tuple[int, int]]:
        """Return the parts that the program or a captured graph holds: the address and the bytes of each."""
        self._merge_released()
        held = self._all
        for begin, end in self._free:
            held = [
                part for extent in held for part in (_without(extent, begin, end) if _overlap(extent, begin, end) else [extent])
            ]
        return [(self.base + begin, end - begin) for begin, end in held]

    def add(self, begin: int, end: int) -> None:
        """Add memory at these offsets, which no block has had since it was removed."""
        self._all = sorted([*self._all, (begin, end)])
        self._insert_free(begin, end)

    def remove(self, begin: int, end: int) -> bool:
        """Remove memory that was added, if no block has a part of it. Return whether it was removed. No work may use it any more."""
        self._merge_released()
        if not any(first <= begin and end <= last for first, last in self._free):
            return False
        self._take(begin, end)
        self._all.remove((begin, end))
        return True

    def _allocate_in_capture(self, num_bytes: int, stream: int, reader: int | None, graph: CapturedGraph) -> Block | None:
        if self._captured is None:
            self._captured = Pool(self.base, 0, self._cell)
        block = self._captured._allocate(num_bytes, stream, reader) or self._allocate(num_bytes, stream, reader)
        if block is not None:
            block._pool = self._captured
            block.acquired_in(graph)
        return block

    def _allocate(self, num_bytes: int, stream: int, reader: int | None) -> Block | None:
        if (begin := self._reuse_last(num_bytes, stream)) is not None:
            return Block(self, begin, num_bytes, (), stream, reader)
        self._merge_released()
        begin = self._find(num_bytes, stream)
        if begin is None:
            return None
        pending = self._take(begin, begin + num_bytes)
        if has_no_event(
            pending, stream
        ):  # so has other memory, and later calls must not wait for what its stream gets from now on
            works = self._tracker.with_late_events([pending, *(work for _, work in self._used)], stream)
            pending, self._used = works[0], [(extent, work) for (extent, _), work in zip(self._used, works[1:], strict=True)]
        return Block(self, begin, num_bytes, self._tracker.order_after(pending, stream), stream, reader)

    def _take(self, begin: int, end: int) -> PendingWork:
        """Remove a part of the free memory. Return the work that used it before."""
        free, used = self._free, self._used
        at = bisect(free, (begin + 1,)) - 1
        free[at : at + 1] = _without(free[at], begin, end)
        pending: PendingWork = ()
        for number in range(len(used) - 1, -1, -1):
            extent, work = used[number]
            if extent[0] < end and begin < extent[1]:
                pending = work + pending
                used[number : number + 1] = [(part, work) for part in _without(extent, begin, end)]
        return pending

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
        candidates = self._candidates(num_bytes, foreign)
        if not foreign:
            return next(candidates, None)
        offsets = list(candidates)
        if len(offsets) < 2 or driver.is_capturing(stream):
            return offsets[0] if offsets else None
        self._used = [(extent, unfinished(pending)) for extent, pending in self._used]
        busy = [(age, extent) for age, (extent, pending) in enumerate(self._used) if not is_only_on(pending, stream)]

        def last_use(offset: int) -> int:
            return max((age for age, (begin, end) in busy if begin < offset + num_bytes and offset < end), default=-1)

        return min(offsets, key=last_use)

    def _candidates(self, num_bytes: int, avoided: list[Extent]) -> Iterator[int]:
        """Yield offsets where a block fits, including those right after avoided extents. Early ones keep free memory in large parts."""
        if self._is_large(num_bytes):
            has_cells = False
            for first, end in self._free:
                for cell in range(align_up(first, self._cell), end - num_bytes + 1, self._cell):
                    has_cells = True
                    yield cell
            if has_cells:
                return
        for first, end in self._free:
            last = end - num_bytes
            if first <= last:
                yield first
                yield from sorted(begin for _, begin in avoided if first < begin <= last)

    def _is_large(self, num_bytes: int) -> bool:
        return 2 * num_bytes > self._cell > 0

    def _merge_released(self) -> None:
        while self._released:
            extent, pending = self._released.popleft()
            self._used.append((extent, pending))
            self._insert_free(*extent)

    def _insert_free(self, begin: int, end: int) -> None:
        at = bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end))


def _overlap(extent: Extent, begin: int, end: int) -> bool:
    return extent[0] < end and begin < extent[1]


def _without(extent: Extent, begin: int, end: int) -> list[Extent]:
    """Return the parts of an extent that are not between `begin` and `end`, which overlap with it."""
    first, last = extent
    if first < begin:
        return [(first, begin), (end, last)] if end < last else [(first, begin)]
    return [(end, last)] if end < last else []
