"""Memory of results: blocks that live as long as the arrays made of them, and come back in stream order.

A block may be handed out again as soon as its arrays have died on the host, although kernels that read it may still be queued: the next
user's work is ordered after them, because it is launched on the same stream, or because the stream waits for the event that was recorded
when the block came back (blocks that were lent to another stream than the one that filled them).
"""

from __future__ import annotations

from . import driver
from .layout import align_up


class Block:
    """A piece of a pool; it goes back with its last reference."""

    def __init__(self, pool: Pool, offset: int, num_bytes: int, consumer: int | None) -> None:
        self.offset, self.num_bytes = offset, num_bytes
        self._pool, self._consumer = pool, consumer

    @property
    def ptr(self) -> int:
        return self._pool.base + self.offset

    def trim(self, num_bytes: int) -> None:
        """Give the tail back: nothing was, or will be, written there."""
        num_bytes = align_up(num_bytes)
        if num_bytes < self.num_bytes:
            self._pool.release(self.offset + num_bytes, self.num_bytes - num_bytes, None)
            self.num_bytes = num_bytes

    def __del__(self) -> None:
        self._pool.release(self.offset, self.num_bytes, self._consumer)


class Pool:
    """First-fit over one range of memory.

    Args:
        base: Address of the range.
        num_bytes: Its size.
    """

    def __init__(self, base: int, num_bytes: int) -> None:
        self.base = base
        self._free = [(0, num_bytes)]  # (offset, bytes), by offset, never adjacent
        self._pending: list[driver.CudaEvent] = []  # what other streams still do with blocks that came back

    def allocate(self, num_bytes: int, stream: int, consumer: int | None) -> Block | None:
        """A block for work on `stream`, or None if there is no room.

        Args:
            num_bytes: Its size.
            stream: The stream that fills it.
            consumer: Another stream that will read it, if any.
        """
        num_bytes = align_up(max(num_bytes, 1))
        for i, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[i : i + 1] = [(offset + num_bytes, size - num_bytes)] if size > num_bytes else []
                self._await_readers(stream)
                return Block(self, offset, num_bytes, consumer if consumer != stream else None)
        return None

    def release(self, offset: int, num_bytes: int, consumer: int | None) -> None:
        if not num_bytes:
            return
        if consumer is not None:
            self._pending.append(driver.CudaEvent(consumer))
        merged: list[tuple[int, int]] = []
        for extent in sorted([*self._free, (offset, num_bytes)]):
            if merged and sum(merged[-1]) == extent[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + extent[1])
            else:
                merged.append(extent)
        self._free = merged

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def _await_readers(self, stream: int) -> None:
        for event in self._pending:
            driver.wait_event(stream, event.handle)
        self._pending.clear()


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

    @property
    def is_empty(self) -> bool:
        """Whether the next `take` allocates."""
        return not self._free

    def take(self) -> Slot:
        if not self._free:
            self._memory.append(driver.allocate(self._num_bytes))
            self._free.append(self._memory[-1])
        return Slot(self, self._free.pop())

    def give_back(self, ptr: int) -> None:
        self._free.append(ptr)

    def destroy(self) -> None:
        for ptr in self._memory:
            driver.free(ptr)


class Slot:
    """One of the Slots; it goes back with its last reference."""

    def __init__(self, slots: Slots, ptr: int) -> None:
        self.ptr, self._slots = ptr, slots

    def __del__(self) -> None:
        self._slots.give_back(self.ptr)
