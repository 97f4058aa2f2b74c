"""Memory of results: pieces that live as long as the arrays made of them, and come back in stream order (`users`).

Memory comes back in finalizers, which may run in the middle of any method here, and in any thread. Of a pool they only append to a deque.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import deque
from typing import Any

from ..kernels.layout import align_up
from . import driver
from .stream_tracking import Past, Piece, Streams, Users, is_own, unfinished


class Block(Piece):
    """A piece of a pool; it goes back with its last reference."""

    __slots__ = ("_past", "_pool", "num_bytes", "offset")

    def __init__(self, pool: Pool, offset: int, num_bytes: int, past: Past, stream: int, reader: int | None) -> None:
        super().__init__(stream, reader)
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._past = pool, past

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def trim(self, num_bytes: int) -> None:
        """Give the tail back: no row lies there."""
        num_bytes = align_up(num_bytes)
        self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, self._past, self._streams[:1])
        self.num_bytes = num_bytes

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():  # what is still held when Python ends meets modules that are half gone
            self._pool.release(self.offset, self.num_bytes, self._past, self._end())


Extent = tuple[int, int]
"""A part of a pool, from one offset up to another."""


class Pool:
    """One range of memory. A block gets the first place that no other stream is busy with; large ones go to cells, if one is free.

    Large blocks are trimmed. Had they been packed, the holes that they leave would be too small for the next large one.

    Args:
        base: Address of the range.
        num_bytes: Its size.
        cell: Bytes of the largest block; 0: all blocks are packed.
    """

    def __init__(self, base: int, num_bytes: int, cell: int = 0) -> None:
        self.base, self._cell = base, cell
        self._free: list[Extent] = [(0, num_bytes)]  # in order, never adjacent
        self._used: list[tuple[Extent, Past]] = []  # free memory that has been used, by age; it does not overlap
        self._came_back: deque[tuple[Extent, Past]] = deque()
        self._users = Users()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> Block | None:
        """A block, or None if there is no room.

        Args:
            num_bytes: Its size.
            stream: The stream that fills it.
            reader: The stream that will read it, if it is another one.
        """
        num_bytes = align_up(max(num_bytes, 1))
        if (begin := self._again(num_bytes, stream)) is not None:
            return Block(self, begin, num_bytes, (), stream, reader)
        self._merge()
        begin = self._find(num_bytes, stream)
        if begin is None:
            return None
        taken = begin, begin + num_bytes
        self._free = [part for extent in self._free for part in _without(extent, taken)]
        past: Past = ()
        used = []
        for extent, left in self._used:
            rest = _without(extent, taken)
            if rest != [extent]:
                past += left
            used += [(part, left) for part in rest]
        self._used = used
        return Block(self, begin, num_bytes, self._users.let_finish(past, stream), stream, reader)

    def release(self, offset: int, num_bytes: int, past: Past, streams: Streams) -> None:
        """Take back what these streams have used, and what was not waited for before them."""
        if num_bytes:
            self._came_back.append(((offset, offset + num_bytes), self._users.left_by(streams, past)))

    @property
    def free_bytes(self) -> int:
        self._merge()
        return sum(end - begin for begin, end in self._free)

    def _again(self, num_bytes: int, stream: int) -> int | None:
        """Where a block lay that has just come back, if it was as large and no other stream used it: what equal calls in a row find."""
        if len(self._came_back) != 1:
            return None
        (begin, end), past = self._came_back[0]
        if end - begin != num_bytes or not is_own(past, stream) or (self._is_large(num_bytes) and begin % self._cell):
            return None
        self._came_back.popleft()  # it never became free
        return begin

    def _find(self, num_bytes: int, stream: int) -> int | None:
        """Where a block goes: the first place that nobody is busy with, or else the one whose last user left first."""
        foreign = [extent for extent, past in self._used if not is_own(past, stream)]
        places = self._places(num_bytes, foreign)
        if len(places) < 2 or not foreign or driver.is_capturing(stream):
            return places[0] if places else None
        self._used = [(extent, unfinished(past)) for extent, past in self._used]
        busy = [(age, extent) for age, (extent, past) in enumerate(self._used) if not is_own(past, stream)]

        def last_use(place: int) -> int:
            return max((age for age, (begin, end) in busy if begin < place + num_bytes and place < end), default=-1)

        return min(places, key=last_use)

    def _places(self, num_bytes: int, avoided: list[Extent]) -> list[int]:
        """Offsets that a block may get, also right behind what it had better not get; the first ones keep the memory in larger pieces."""
        fitting = [(begin, end - num_bytes) for begin, end in self._free if end - begin >= num_bytes]
        if self._is_large(num_bytes):
            cells = [cell for first, last in fitting for cell in range(align_up(first, self._cell), last + 1, self._cell)]
            if cells:
                return cells
        behind = [end for _, end in avoided]
        return [place for first, last in fitting for place in (first, *sorted(end for end in behind if first < end <= last))]

    def _is_large(self, num_bytes: int) -> bool:
        return 2 * num_bytes > self._cell > 0

    def _merge(self) -> None:
        while self._came_back:
            extent, past = self._came_back.popleft()
            self._used.append((extent, past))
            begin, end = extent
            at = bisect(self._free, extent)
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end))


def _without(extent: Extent, taken: Extent) -> list[Extent]:
    """What is left of one without another."""
    (begin, end), (other_begin, other_end) = extent, taken
    return [part for part in ((begin, min(end, other_begin)), (max(begin, other_end), end)) if part[0] < part[1]]


class Slots:
    """Equal pieces of plain device memory; more are allocated when all are taken, and none is given back before the end.

    Args:
        num_bytes: Size of a slot.
        count: Slots to start with.
    """

    def __init__(self, num_bytes: int, count: int) -> None:
        self._num_bytes = num_bytes
        self._memory = [driver.allocate(num_bytes) for _ in range(count)]
        self._free: deque[tuple[int, Past]] = deque((ptr, ()) for ptr in self._memory)
        self._users = Users()

    def take(self, stream: int, reader: int | None = None) -> Slot:
        """A slot for work on `stream`; `reader` may be another stream that will use it too."""
        if self._free:
            ptr, past = last = self._free.pop()
            if is_own(past, stream):
                return Slot(self, ptr, (), stream, reader)
            self._free.append(last)  # other streams may be busy with it: the one that has been free longest
            ptr, past = self._free.popleft()
        else:
            ptr, past = driver.allocate(self._num_bytes), ()
            self._memory.append(ptr)
        return Slot(self, ptr, self._users.let_finish(past, stream), stream, reader)

    def give_back(self, ptr: int, past: Past, streams: Streams) -> None:
        self._free.append((ptr, self._users.left_by(streams, past)))

    def destroy(self) -> None:
        for ptr in self._memory:
            driver.free(ptr)


class Slot(Piece):
    """One of the Slots; it goes back with its last reference."""

    __slots__ = ("_past", "_slots", "ptr")

    def __init__(self, slots: Slots, ptr: int, past: Past, stream: int, reader: int | None) -> None:
        super().__init__(stream, reader)
        self.ptr, self._slots, self._past = ptr, slots, past

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            self._slots.give_back(self.ptr, self._past, self._end())
