"""Memory of results: pieces that live as long as the arrays made of them, and come back in stream order (`users`).

Memory comes back in finalizers, which may run in the middle of any method here, and in any thread. Of a pool they only append to a deque.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, NamedTuple

from . import driver
from .layout import align_up
from .users import Past, Piece, Users


class Block(Piece):
    """A piece of a pool; it goes back with its last reference."""

    __slots__ = ("_past", "_pool", "num_bytes", "offset")

    def __init__(self, pool: Pool, offset: int, num_bytes: int, past: Past, *streams: int | None) -> None:
        super().__init__(*streams)
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._past = pool, past

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def trim(self, num_bytes: int) -> None:
        """Give the tail back: nothing was, or will be, written there."""
        num_bytes = align_up(num_bytes)
        if num_bytes < self.num_bytes:
            self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, self._past, self._streams[:1])
            self.num_bytes = num_bytes

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():  # what is still held when Python ends meets modules that are half gone
            self._pool.release(self.offset, self.num_bytes, self._past, self._streams)


class Extent(NamedTuple):
    """A part of a pool."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    def overlaps(self, other: Extent) -> bool:
        return self.offset < other.end and other.offset < self.end

    def without(self, other: Extent) -> list[Extent]:
        """What is left of it without another one."""
        if not self.overlaps(other):
            return [self]
        before, behind = other.offset - self.offset, self.end - other.end
        return [Extent(offset, size) for offset, size in ((self.offset, before), (other.end, behind)) if size > 0]


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
        self._free = [Extent(0, num_bytes)]  # by offset, never adjacent
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
        self._merge()
        offset = self._find(num_bytes, stream)
        if offset is None:
            return None
        taken = Extent(offset, num_bytes)
        self._free = [part for extent in self._free for part in extent.without(taken)]
        past = tuple(mark for extent, left in self._used if extent.overlaps(taken) for mark in left)
        self._used = [(part, left) for extent, left in self._used for part in extent.without(taken)]
        return Block(self, offset, num_bytes, self._users.let_finish(past, stream), stream, reader)

    def release(self, offset: int, num_bytes: int, past: Past, streams: tuple[int, ...]) -> None:
        """Take back what these streams have used, and what was not waited for before them."""
        if num_bytes:
            self._came_back.append((Extent(offset, num_bytes), self._users.left_by(streams, past)))

    @property
    def free_bytes(self) -> int:
        self._merge()
        return sum(extent.num_bytes for extent in self._free)

    def _find(self, num_bytes: int, stream: int) -> int | None:
        """Where a block goes: the first place that nobody is busy with, or the one that has been free longest."""
        places = self._places(num_bytes)
        has_others = any(other != stream for _, past in self._used for other, _ in past)
        if len(places) < 2 or not has_others or driver.is_capturing(stream):
            return places[0] if places else None
        self._used = [(extent, self._users.unfinished(past, stream)) for extent, past in self._used]
        busy = [(age, extent) for age, (extent, past) in enumerate(self._used) if any(other != stream for other, _ in past)]

        def last_use(place: int) -> int:
            return max((age for age, extent in busy if extent.overlaps(Extent(place, num_bytes))), default=-1)

        return min(places, key=last_use)

    def _places(self, num_bytes: int) -> list[int]:
        """Offsets that a block may get; the first ones keep the memory in larger pieces."""
        fitting = [(extent.offset, extent.end - num_bytes) for extent in self._free if extent.num_bytes >= num_bytes]
        if 2 * num_bytes > self._cell > 0:
            cells = [cell for first, last in fitting for cell in range(align_up(first, self._cell), last + 1, self._cell)]
            if cells:
                return cells
        ends = [extent.end for extent, _ in self._used]
        return sorted({place for first, last in fitting for place in (first, *ends) if first <= place <= last})

    def _merge(self) -> None:
        while self._came_back:
            came_back, past = self._came_back.popleft()
            self._used.append((came_back, past))
            merged: list[Extent] = []
            for extent in sorted([*self._free, came_back]):
                if merged and merged[-1].end == extent.offset:
                    merged[-1] = Extent(merged[-1].offset, merged[-1].num_bytes + extent.num_bytes)
                else:
                    merged.append(extent)
            self._free = merged


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
        if self._free:  # the last one, unless other streams may be busy with it: then the one that has been free longest
            is_own = all(other == stream for other, _ in self._free[-1][1])
            ptr, past = self._free.pop() if is_own else self._free.popleft()
        else:
            ptr, past = driver.allocate(self._num_bytes), ()
            self._memory.append(ptr)
        return Slot(self, ptr, self._users.let_finish(past, stream), stream, reader)

    def give_back(self, ptr: int, past: Past, streams: tuple[int, ...]) -> None:
        self._free.append((ptr, self._users.left_by(streams, past)))

    def destroy(self) -> None:
        for ptr in self._memory:
            driver.free(ptr)


class Slot(Piece):
    """One of the Slots; it goes back with its last reference."""

    __slots__ = ("_past", "_slots", "ptr")

    def __init__(self, slots: Slots, ptr: int, past: Past, *streams: int | None) -> None:
        super().__init__(*streams)
        self.ptr, self._slots, self._past = ptr, slots, past

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            self._slots.give_back(self.ptr, self._past, self._streams)
