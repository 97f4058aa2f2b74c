"""Memory from a stream-ordered pool of the driver's, for what finds no room in a Buffer's own."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from . import driver
from .users import Piece, Users


class StreamPool:
    """A pool of the current context's GPU.

    It keeps what comes back, until the driver needs it for this process (`cudaMalloc` of any library) or the pool is destroyed. The
    driver's default pool gives memory back whenever the host waits for a stream; asking for 240 MB anew then takes a millisecond.
    """

    def __init__(self) -> None:
        self.users = Users()
        self._pool: Any = None  # most programs need none
        self._late: deque[tuple[int, int]] = deque()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> StreamMemory:
        """Memory for work on `stream`; `reader` may be another stream that will use it too."""
        if self._pool is None:
            self._pool = driver.new_memory_pool()
        self._free_late()
        return StreamMemory(self, driver.allocate_async(num_bytes, self._pool, stream), stream, reader)

    def free(self, ptr: int, stream: int) -> None:
        """Free memory in stream order, or later if the stream is captured just now: a graph does not free what it has not allocated."""
        if driver.is_capturing(stream):
            self._late.append((ptr, stream))
        else:
            driver.free_async(ptr, stream)

    def destroy(self) -> None:
        """Give the memory back; the driver waits for what is still in use."""
        if self._pool is not None:
            self._free_late()
            driver.destroy_memory_pool(self._pool)

    def _free_late(self) -> None:
        for _ in range(len(self._late)):
            self.free(*self._late.popleft())


class StreamMemory(Piece):
    """A piece of a stream-ordered pool; it goes back with the last reference, after what the streams that use it hold then."""

    __slots__ = ("_pool", "ptr")

    def __init__(self, pool: StreamPool, ptr: int, *streams: int | None) -> None:
        super().__init__(*streams)
        self.ptr, self._pool = ptr, pool

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            first, users = self._streams[0], self._pool.users
            with users.context:
                users.let_finish(users.left_by(self._streams[1:]), first)
                self._pool.free(self.ptr, first)
