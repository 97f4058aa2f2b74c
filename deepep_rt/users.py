"""Which streams use a piece of memory, and how its next user is ordered after them.

A piece may be handed out again as soon as its arrays have died on the host, although kernels that use it may still be queued: work of the
next user is ordered after what the streams that used it (the call's, the caller's, a DLPack consumer's) held when it died.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import driver

Past = tuple[tuple[int, driver.CudaEvent | None], ...]
"""Streams whose work may still use a piece, each with an event behind that work; None stands for all that the stream will hold by then."""


class Piece:
    """Memory that is handed out, and the streams that use it. Who makes arrays of it tells of further streams."""

    __slots__ = ("_streams",)

    def __init__(self, *streams: int | None) -> None:
        self._streams = tuple(dict.fromkeys(stream for stream in streams if stream is not None))

    def used_on(self, stream: int) -> None:
        """Another stream works with it."""
        if stream not in self._streams:
            self._streams += (stream,)


class Users:
    """The streams that use what comes from one place. Where one stream does everything, this costs nothing."""

    def __init__(self) -> None:
        self.context = driver.CurrentContext()  # memory comes back at any time, whatever another library has made current
        self._first: int | None = None
        self._are_several = False

    def left_by(self, streams: Sequence[int], past: Past = ()) -> Past:
        """What a piece leaves behind that dies now: these streams, and what was left to them."""
        for stream in streams:
            if self._first is None:
                self._first = stream
            self._are_several |= stream != self._first
        if not self._are_several:
            return tuple(dict.fromkeys((*past, *((stream, None) for stream in streams))))
        # What is queued later shall not be waited for: that would tie streams to each other. An event in a capture says nothing.
        with self.context:
            now = [(stream, None if driver.is_capturing(stream) else driver.CudaEvent(stream)) for stream in streams]
        return tuple(dict.fromkeys((*past, *now)))

    def let_finish(self, past: Past, stream: int) -> Past:
        """Order later work on `stream` after it; returns what has to be left to the next user.

        Captured work is ordered by whoever replays the graph.
        """
        others = [(other, event) for other, event in past if other != stream]
        if not others:
            return ()
        with self.context:
            if driver.is_capturing(stream):
                return past
            left = []
            for other, event in others:
                if event is not None:
                    driver.wait_event(stream, event.handle)
                elif driver.is_capturing(other):
                    left.append((other, event))
                else:
                    driver.wait_stream(stream, other)
        return tuple(left)
