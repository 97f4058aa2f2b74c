"""Memory from a stream-ordered pool of the driver, for what finds no room in a Buffer's own."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from . import driver
from .users import Piece, Users


class StreamPool:
    """A Buffer's part of that pool.

    The pool keeps what comes back. The driver's default one gives memory back whenever the host waits for a stream; asking for 240 MB anew
    then takes a millisecond.
    """

    def __init__(self) -> None:
        self.users = Users()
        self._late: deque[tuple[int, int]] = deque()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> StreamMemory:
        """Memory for work on `stream`; `reader` may be another stream that will use it too."""
        self._free_late()
        return StreamMemory(self, driver.allocate_async(num_bytes, stream), stream, reader)

    def free(self, ptr: int, stream: int) -> None:
        """Free memory in stream order, or later if the stream is captured just now: a graph does not free what it has not allocated."""
        if driver.is_capturing(stream):
            self._late.append((ptr, stream))
        else:
            driver.free_async(ptr, stream)

    def destroy(self) -> None:
        """Give back what nothing uses."""
        self._free_late()
        driver.trim_memory_pool()

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
