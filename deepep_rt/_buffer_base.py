"""The life of a Buffer: its backend, the lock around its calls, and how it ends."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from types import TracebackType
from typing import Any

from . import _statistics_files
from ._checks import flag
from .arrays.frameworks import of_event, of_stream
from .backends.base import Backend
from .backends.calls import Call
from .comm import process_end
from .errors import EPInputError
from .results import MAKE_ANOTHER, SharedByCopies
from .statistics import Statistics

_log = logging.getLogger("deepep_rt")
_living: weakref.WeakSet[BufferBase] = weakref.WeakSet()
_AFTER_FORK = (
    "this Buffer belongs to the process that this one was forked from; expected calls in that process only. Keep calls out of forked "
    "processes (a DataLoader's workers prepare batches, and run no model)"
)


def _detach_after_fork() -> None:
    """Refuse calls in a forked process: peers would take its messages for messages of its parent."""
    for buffer in _living:
        if buffer._backend is not None:
            buffer._call_lock.refuse(_AFTER_FORK)
            # Kept, so that this process releases nothing that its parent uses.
            buffer._parents_backend, buffer._backend = buffer._backend, None


os.register_at_fork(after_in_child=_detach_after_fork)


def living_buffers() -> list[BufferBase]:
    """Return the Buffers that the program holds, destroyed ones too."""
    return list(_living)


def begin_call(backend: Backend, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
    """Check how a call shall run, also on a backend without streams, and begin it. The call holds the lock."""
    if async_finish is not False:
        async_finish = flag(async_finish, "async_finish")
    if previous_event is not None:
        of_event(previous_event)
    if stream is not None:
        of_stream(stream)
    return backend.begin(x, async_finish, previous_event, stream)


class BufferBase(SharedByCopies):
    """The common part of all calls. Use `Buffer`."""

    _instead = MAKE_ANOTHER
    _backend: Backend | None = None
    _parents_backend: Backend | None = None

    def _start(self, rank: int, backend: Backend) -> None:
        self._rank, self._backend, self._info, self._call_lock = rank, backend, backend.info, backend.call_lock
        self.config = backend.info.config
        self._made_at = time.monotonic()
        _living.add(self)
        if self.config.statistics:
            _statistics_files.follow(self, backend, rank)

    def check(self) -> None:
        """Raise what the next call would raise: a silent peer, a difference between ranks, or a wrong input.

        This reads pinned memory (under a microsecond), waits for nothing and is not collective. It sees what the GPU has done so far.
        A loop that only replays CUDA graphs makes no calls that could raise: check after each replay, or after some. After a time-out,
        every replay gives NaN in its floating-point results.

        Raises:
            EPTimeoutError: If a peer did not answer. The Buffer is broken.
            EPInputError: If ranks gave different arguments, or an argument was wrong.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> graph.replay()
            >>> buffer.check()
        """
        self._live().check()

    def synchronize(self) -> None:
        """Wait on the host for all calls so far. If they were all on one stream, this waits for all work of that stream.

        Raises:
            EPTimeoutError: If a peer did not answer.
            EPInputError: While that stream is captured in a CUDA graph.

        Example:
            >>> buffer.synchronize()  # before reading a clock, or using results without a stream
        """
        backend = self._live()
        with backend.context:
            backend.synchronize()

    def statistics(self) -> Statistics:
        """Return what this rank has counted since the Buffer was made: calls, rows, bytes, waits for each rank, and use of memory.

        The Buffer has to be made with `statistics=True`. This is not collective, and waits for no call: it reads what the GPU has finished
        so far. A call that runs at the time may be counted in part. Any thread may call it.

        Returns:
            The numbers so far. Subtract an earlier result for those of an interval.

        Raises:
            EPInputError: If the Buffer was made without statistics, or while the stream of the last call is captured in a CUDA graph.
            EPDestroyedError: After `destroy()`.

        Example:
            >>> counted = buffer.statistics()
            >>> counted.dispatch.calls, counted.dispatch.wait_s
            (12, (0.0, 0.0031, 0.0002, 0.0002))
        """
        backend = self._live()
        if not self.config.statistics:
            raise EPInputError(
                "statistics=False; expected a Buffer that counts its calls. Make it with statistics=True, or set DEEPEP_RT_STATISTICS=1"
            )
        return backend.counters().of_rank(self._rank, time.monotonic() - self._made_at)

    def destroy(self, in_touch: bool = True) -> None:
        """Release the memory. Collective; do not use results afterwards. A second call does nothing.

        On GPUs, all ranks have to take part. Three kinds of ranks tell the others that they leave, and wait for no rank: a rank with a
        call that timed out, a rank that an exception took out of the `with` block, and a rank that has masked others. The memory of all
        ranks then stays allocated until the processes end, and a new Buffer may be made.

        A silent rank is waited for in two rounds of `timeout_s` (30 s at least), with a warning every 30 seconds. Then the memory stays
        allocated too, and this raises EPTimeoutError with the names of such ranks. With `on_timeout="mask"` a round takes `timeout_s`, and
        this warns instead.

        A signal handler or another thread may destroy a Buffer during a call. The call then raises EPDestroyedError, and this rank tells
        the others.

        Args:
            in_touch: False if the program knows that a rank is lost. This rank then waits for no other.

        Raises:
            EPTimeoutError: If a rank did not come, or if a peer did not answer in an earlier call that the host did not wait for.
                The Buffer is destroyed all the same. EPPeerError, if that rank has said why.
            EPInputError: As `synchronize`. The Buffer is destroyed, but the memory of all ranks stays allocated until the processes end.

        Example:
            >>> buffer.destroy()  # the end of a with block does the same
        """
        self._destroy(flag(in_touch, "in_touch"))

    def _destroy(self, in_touch: bool, error: BaseException | None = None) -> None:
        self._call_lock.refuse("this Buffer was destroyed; make a new one")
        backend, self._backend = self._backend, None
        if backend is None:
            return

        def finish(interruption: BaseException | None) -> None:
            if backend.call_lock.notice is not None:
                backend.call_lock.notice.drain()
            try:
                backend.destroy(in_touch and interruption is None, error or interruption)
            finally:
                if backend.call_lock.notice is not None:
                    backend.call_lock.notice.close()
                _statistics_files.end(self)

        self._call_lock.drain(finish)

    def _live(self) -> Backend:
        self._call_lock.check()
        assert self._backend is not None  # calls are refused before it goes
        return self._backend

    def _low_latency(self) -> Backend:
        if not self.config.low_latency:
            raise EPInputError(
                "low_latency=False; expected a Buffer with memory for low-latency calls. Make it with low_latency=True"
            )
        return self._live()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._destroy(error is None, error)  # after an error, the other ranks may not get here

    def __del__(self) -> None:
        if self._backend is not None:  # release is collective, and destructors run at no agreed time
            if (notice := self._backend.call_lock.notice) is not None:
                notice.leave(process_end.END, "its program dropped the Buffer without destroy()")
                process_end.deliver_at_exit(notice)
            _log.warning("a Buffer was dropped without destroy(): its memory stays allocated until the process ends")
            warnings.warn("a Buffer was dropped without destroy(); use `with Buffer(...)`", ResourceWarning, stacklevel=2)
