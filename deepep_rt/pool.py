"""Memory of results: pieces that live as long as the arrays made of them, and come back in stream order (`users`).

Memory comes back in finalizers, which may run in the middle of any method here, and in any thread. They only append to a deque.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

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


class Pool:
    """First-fit over one range of memory; large blocks go to its cells first, in turn.

    Large blocks are trimmed. Had they been packed, the holes that they leave would be too small for the next large one. And were the
    same cell taken each time, the next block would wait for those who still read the last one.

    Args:
        base: Address of the range.
        num_bytes: Its size.
        cell: Bytes of the largest block; 0: all blocks are packed.
    """

    def __init__(self, base: int, num_bytes: int, cell: int = 0) -> None:
        self.base, self._cell, self._last_cell = base, cell, -1
        self._free = [(0, num_bytes)]  # (offset, bytes), by offset, never adjacent
        self._used: list[tuple[int, int, Past]] = []  # (offset, bytes) of free memory that has been used; they do not overlap
        self._came_back: deque[tuple[int, int, Past]] = deque()
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
        offset = self._find(num_bytes)
        if offset is None:
            return None
        self._free = [part for extent in self._free for part in _without(extent, offset, num_bytes)]
        past: Past = ()
        used = []
        for begin, size, left in self._used:
            rest = _without((begin, size), offset, num_bytes)
            if rest != [(begin, size)]:
                past += left
            used += [(*part, left) for part in rest]
        self._used = used
        return Block(self, offset, num_bytes, self._users.let_finish(past, stream), stream, reader)

    def release(self, offset: int, num_bytes: int, past: Past, streams: tuple[int, ...]) -> None:
        """Take back what these streams have used, and what was not waited for before them."""
        if num_bytes:
            self._came_back.append((offset, num_bytes, self._users.left_by(streams, past)))

    @property
    def free_bytes(self) -> int:
        self._merge()
        return sum(size for _, size in self._free)

    def _find(self, num_bytes: int) -> int | None:
        fitting = [(offset, size) for offset, size in self._free if size >= num_bytes]
        if 2 * num_bytes > self._cell > 0:
            cells = [
                cell
                for offset, size in fitting
                for cell in range(align_up(offset, self._cell), offset + size - num_bytes + 1, self._cell)
            ]
            if cells:
                self._last_cell = min(cells, key=lambda cell: (cell <= self._last_cell, cell))
                return self._last_cell
        return fitting[0][0] if fitting else None

    def _merge(self) -> None:
        while self._came_back:
            offset, num_bytes, past = self._came_back.popleft()
            self._used.append((offset, num_bytes, past))
            merged: list[tuple[int, int]] = []
            for extent in sorted([*self._free, (offset, num_bytes)]):
                if merged and sum(merged[-1]) == extent[0]:
                    merged[-1] = (merged[-1][0], merged[-1][1] + extent[1])
                else:
                    merged.append(extent)
            self._free = merged


def _without(extent: tuple[int, int], offset: int, num_bytes: int) -> list[tuple[int, int]]:
    """What is left of an extent without another one."""
    begin, end = extent[0], sum(extent)
    if offset >= end or offset + num_bytes <= begin:
        return [extent]
    parts = [(begin, offset - begin), (offset + num_bytes, end - offset - num_bytes)]
    return [part for part in parts if part[1] > 0]


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
