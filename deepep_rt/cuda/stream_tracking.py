"""Which streams use a piece of memory, and how its next user is ordered after them.

A piece may be handed out again as soon as its arrays have died on the host, although kernels that use it may still be queued. Work of the
next user is ordered after what these streams held when the piece died:

- the stream of the call, and the caller's current stream at the call;
- streams that a DLPack consumer named;
- the stream that was current when an array was made of the piece, and the one that is current where its last array is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import EPUnavailableError
from . import driver

if TYPE_CHECKING:
    from ..arrays.view import Framework

Past = tuple[tuple[int, driver.CudaEvent | None], ...]
"""Streams whose work may still use a piece, each with an event behind that work; None stands for all that the stream will hold by then."""

Streams = tuple[int, ...]

_IN_A_ROW = 64  # pieces of one stream alone, after which the others are thought to be gone


class Piece:
    """Memory that is handed out, and the streams that use it. Who makes arrays of it tells of further streams."""

    __slots__ = ("_library", "_streams")

    def __init__(self, stream: int, reader: int | None) -> None:
        self._streams: Streams = (stream,) if reader is None or reader == stream else (stream, reader)
        self._library: tuple[Framework, int] | None = None

    def used_on(self, stream: int) -> None:
        """Another stream works with it."""
        if stream not in self._streams:
            self._streams += (stream,)

    def used_by(self, library: Framework, device: int) -> None:
        """An array library makes an array of it: its current stream works with it, now and when the array is dropped."""
        stream = library.current_stream(device)
        if stream is not None:
            self._library = library, device
            self.used_on(stream)

    def _end(self) -> Streams:
        """The streams that use it as it dies, in the thread that drops it. Finalizers ask, so it does not raise."""
        if self._library is not None:
            library, device = self._library
            try:
                stream = library.current_stream(device)
            except Exception:  # the memory has to come back all the same
                stream = None
            if stream is not None:
                self.used_on(stream)
        return self._streams


class Users:
    """The streams that use what comes from one place. Where one stream does everything, the driver is asked nothing."""

    def __init__(self) -> None:
        self.context = driver.CurrentContext()  # memory comes back at any time, whatever another library has made current
        self._last: Streams = ()  # one
        self._in_a_row = 0

    def left_by(self, streams: Streams, past: Past = ()) -> Past:
        """What a piece leaves behind that dies now: these streams, and what was left to them. Finalizers ask, so it does not raise."""
        if not streams:
            return past
        if streams == self._last:
            in_a_row = self._in_a_row + 1
        else:
            in_a_row = _IN_A_ROW if len(streams) == 1 and not self._last else 0
            self._last = streams[-1:]
        self._in_a_row = in_a_row  # which another thread may change before it is read again
        # A new mark stands for what its stream held before, too.
        older = past and tuple(mark for mark in past if mark[0] not in streams)
        if in_a_row >= _IN_A_ROW:
            return (*older, (streams[0], None))
        with self.context:
            return (*older, *(mark for stream in streams for mark in _mark(stream)))

    def let_finish(self, past: Past, stream: int) -> Past:
        """Order later work on `stream` after it; returns what has to be left to the next user.

        Captured work is ordered after other work of its capture alone, and for the rest by whoever replays the graph.
        """
        if is_own(past, stream):
            return ()
        others = [(other, event) for other, event in past if other != stream]
        with self.context:
            if driver.is_capturing(stream):
                _order_in_capture(past, stream)
                return past
            marks = [mark for other, event in others for mark in (_mark(other) if event is None else ((other, event),))]
            for _, event in marks:
                if event is not None:
                    driver.wait_event(stream, event.handle)
        return tuple(mark for mark in marks if mark[1] is None)


def is_own(past: Past, stream: int) -> bool:
    """Whether no other stream is in it."""
    for other, _ in past:  # noqa: SIM110  # a loop is quicker, and each call of a Buffer asks several times
        if other != stream:
            return False
    return True


def unfinished(past: Past) -> Past:
    """The same without work that has ended. Not for captures, in which nobody may ask that."""
    return tuple((stream, event) for stream, event in past if event is None or not event.done())


def _mark(stream: int) -> Past:
    """Stands for the work that a stream holds now; to wait for what is queued later would tie streams to each other."""
    try:
        # An event in a capture says nothing of the work before it.
        return ((stream, None if driver.is_capturing(stream) else driver.CudaEvent(stream)),)
    except EPUnavailableError:  # it was destroyed, perhaps with work on it (the driver may as well crash when asked)
        driver.synchronize_all()
        return ()


def _order_in_capture(past: Past, stream: int) -> None:
    """Order later work on a captured stream after what other streams of its capture hold."""
    capture = _capture_of(stream)
    for other, event in past:
        if event is None and other != stream and capture is not None and _capture_of(other) == capture:
            driver.wait_stream(stream, other)


def _capture_of(stream: int) -> int | None:
    try:
        return driver.capture_id(stream)
    except EPUnavailableError:  # the default stream while one that waits for it is captured, or a stream that was destroyed
        return None
