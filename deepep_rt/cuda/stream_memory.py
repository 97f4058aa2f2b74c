"""Memory from a stream-ordered pool of the driver, for what finds no room in a Buffer's own."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from . import driver
from .stream_tracking import Past, Piece, Users

_late: deque[tuple[Users, int, int, Past]] = deque()  # what could not be freed when it died: whose, pointer, stream, who used it


class StreamPool:
    """A Buffer's part of that pool.

    The pool keeps what comes back. The driver's default one gives memory back whenever the host waits for a stream; asking for 240 MB anew
    then takes a millisecond.
    """

    def __init__(self) -> None:
        self._users = Users()

    def allocate(self, num_bytes: int, stream: int, reader: int | None = None) -> StreamMemory:
        """Memory for work on `stream`; `reader` may be another stream that will use it too."""
        _free_late()
        return StreamMemory(self._users, driver.allocate_async(num_bytes, stream), stream, reader)

    def destroy(self) -> None:
        """Give back what nothing uses."""
        _free_late()
        driver.trim_memory_pool()


class StreamMemory(Piece):
    """A piece of a stream-ordered pool; it goes back with the last reference, after what the streams that use it hold then."""

    __slots__ = ("_users", "ptr")

    def __init__(self, users: Users, ptr: int, stream: int, reader: int | None) -> None:
        super().__init__(stream, reader)
        self.ptr, self._users = ptr, users

    def __del__(self, _is_ending: Any = sys.is_finalizing) -> None:
        if not _is_ending():
            _free(self._users, self.ptr, self._streams[0], self._users.left_by(self._end()[1:]))


def _free(users: Users, ptr: int, stream: int, past: Past) -> None:
    """Free memory in stream order, or later if a capture is in the way: a graph does not free what it has not allocated."""
    with users.context:
        left = users.let_finish(past, stream)
        if left or driver.is_capturing(stream):
            _late.append((users, ptr, stream, left))
        else:
            driver.free_async(ptr, stream)


def _free_late() -> None:
    for _ in range(len(_late)):
        _free(*_late.popleft())
