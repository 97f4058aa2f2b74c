"""Memory of results: pieces that live as long as the arrays made of them, and come back in stream order.

A piece may be handed out again as soon as its arrays have died on the host, although kernels that use it may still be queued: work of the
next user is ordered after what the streams that used it (the call's, the caller's, a DLPack consumer's) hold by then.

Memory comes back in finalizers, which may run in the middle of any method here, and in any thread. They only append to a deque: first who
used a piece, then the piece; whoever hands a piece out looks at both in the opposite order.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import driver
from .layout import align_up


class Readers:
    """The streams whose work may still use memory that came back."""

    def __init__(self) -> None:
        self.context = driver.CurrentContext()  # memory comes back at any time, whatever another library has made current
        self._came_back: deque[tuple[int, driver.CudaEvent | None]] = deque()
        self._streams: set[int] = set()
        self._events: list[tuple[int, driver.CudaEvent]] = []

    def add(self, streams: Sequence[int]) -> None:
        """Memory came back that these streams have used. Where one stream does everything, this costs nothing."""
        if len(streams) == 1:
            self._came_back.append((streams[0], None))
        elif streams:  # what is queued later shall not be waited for: that would tie a communication stream to its caller's
            with self.context:
                self._came_back += [(stream, driver.CudaEvent(stream)) for stream in streams if not driver.is_capturing(stream)]

    def let_finish_before(self, stream: int) -> None:
        """Order later work on `stream` after them. Captured work is left to whoever replays the graph."""
        while self._came_back:
            other, event = self._came_back.popleft()
            if event is None:
                self._streams.add(other)
            else:
                self._events.append((other, event))
        if not self._events and (not self._streams or (stream in self._streams and len(self._streams) == 1)):
            return
        others = self._streams - {stream}
        with self.context:
            if driver.is_capturing(stream):
                return
            for other, event in self._events:
                if other != stream:
                    driver.wait_event(stream, event.handle)
            for other in others:
                if not driver.is_capturing(other):
                    driver.wait_stream(stream, other)
        self._events.clear()
        self._streams = {stream}  # it stands for all of them now


class Block:
    """A piece of a pool; it goes back with its last reference."""

    __slots__ = ("_pool", "_users", "num_bytes", "offset")

    def __init__(self, pool: Pool, offset: int, num_bytes: int, users: tuple[int, ...]) -> None:
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._users = pool, users

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def used_on(self, stream: int) -> None:
        """Another stream works with it."""
        if stream not in self._users:
            self._users += (stream,)

    def trim(self, num_bytes: int) -> None:
        """Give the tail back: nothing was, or will be, written there."""
        num_bytes = align_up(num_bytes)
        if num_bytes < self.num_bytes:
            self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, ())
            self.num_bytes = num_bytes

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():  # what is still held when Python ends meets modules that are half gone
            self._pool.release(self.offset, self.num_bytes, self._users)


class Pool:
    """First-fit over one range of memory; large blocks go to its cells first.

    Large blocks are trimmed. Had they been packed, the holes that they leave would be too small for the next large one.

    Args:
        base: Address of the range.
        num_bytes: Its size.
        cell: Bytes of the largest block; 0: all blocks are packed.
    """

    def __init__(self, base: int, num_bytes: int, cell: int = 0) -> None:
        self.base, self._cell = base, cell
        self._free = [(0, num_bytes)]  # (offset, bytes), by offset, never adjacent
        self._came_back: deque[tuple[int, int]] = deque()
        self._readers = Readers()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> Block | None:
        """A block, or None if there is no room.

        Args:
            num_bytes: Its size.
            stream: The stream that fills it.
            reader: The stream that will read it, if it is another one.
        """
        num_bytes = align_up(max(num_bytes, 1))
        self._merge()
        is_large = 2 * num_bytes > self._cell > 0
        for start_at in (self._cell, 1) if is_large else (1,):
            for i, (offset, size) in enumerate(self._free):
                start = align_up(offset, start_at)
                before, behind = start - offset, offset + size - start - num_bytes
                if behind >= 0:
                    parts = [(offset, before), (start + num_bytes, behind)]
                    self._free[i : i + 1] = [part for part in parts if part[1]]
                    self._readers.let_finish_before(stream)
                    return Block(self, start, num_bytes, _users(stream, reader))
        return None

    def release(self, offset: int, num_bytes: int, users: Sequence[int]) -> None:
        if not num_bytes:
            return
        self._readers.add(users)
        self._came_back.append((offset, num_bytes))

    @property
    def free_bytes(self) -> int:
        self._merge()
        return sum(size for _, size in self._free)

    def _merge(self) -> None:
        while self._came_back:
            merged: list[tuple[int, int]] = []
            for extent in sorted([*self._free, self._came_back.popleft()]):
                if merged and sum(merged[-1]) == extent[0]:
                    merged[-1] = (merged[-1][0], merged[-1][1] + extent[1])
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
        self._free = list(self._memory)
        self._readers = Readers()

    def take(self, stream: int, reader: int | None = None) -> Slot:
        """A slot for work on `stream`; `reader` may be another stream that will use it too."""
        if self._free:
            ptr = self._free.pop()  # first: another one that comes back meanwhile has not been waited for
        else:
            ptr = driver.allocate(self._num_bytes)
            self._memory.append(ptr)
        self._readers.let_finish_before(stream)
        return Slot(self, ptr, _users(stream, reader))

    def give_back(self, ptr: int, users: Sequence[int]) -> None:
        self._readers.add(users)
        self._free.append(ptr)

    def destroy(self) -> None:
        for ptr in self._memory:
            driver.free(ptr)


class Slot:
    """One of the Slots; it goes back with its last reference."""

    __slots__ = ("_slots", "_users", "ptr")

    def __init__(self, slots: Slots, ptr: int, users: tuple[int, ...]) -> None:
        self.ptr, self._slots, self._users = ptr, slots, users

    def used_on(self, stream: int) -> None:
        """Another stream works with it."""
        if stream not in self._users:
            self._users += (stream,)

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            self._slots.give_back(self.ptr, self._users)


_late: deque[tuple[int, int]] = deque()


def free_async(ptr: int, stream: int) -> None:
    """Free stream-ordered memory, or later if the stream is captured just now: a graph does not free what it has not allocated."""
    if driver.is_capturing(stream):
        _late.append((ptr, stream))
    else:
        driver.free_async(ptr, stream)


class StreamMemory:
    """Memory from the driver's stream-ordered pool; it goes back with the last reference, after what the streams that use it hold then."""

    def __init__(self, num_bytes: int, stream: int) -> None:
        for _ in range(len(_late)):
            free_async(*_late.popleft())
        self.ptr, self.stream = driver.allocate_async(num_bytes, stream), stream
        self._readers = Readers()

    def used_on(self, stream: int) -> None:
        """Another stream works with it."""
        self._readers.add([stream])

    def __del__(self, _free: Any = free_async, _is_ending: Any = sys.is_finalizing) -> None:
        if hasattr(self, "_readers") and not _is_ending():
            with self._readers.context:
                self._readers.let_finish_before(self.stream)
                _free(self.ptr, self.stream)


def _users(stream: int, reader: int | None) -> tuple[int, ...]:
    return (stream,) if reader is None or reader == stream else (stream, reader)
