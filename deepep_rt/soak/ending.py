"""End a soak run before its time: on all ranks together after Ctrl-C, and at once if a rank makes no progress."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_TEXT = b"soak: interrupted, and ends at the next synchronization of all ranks. A second signal ends it at once.\n"
_GRACE_S = 30.0  # added to the time-outs of the library


class Interruption:
    """Within a `with` block of the main thread, SIGINT and SIGTERM set `is_set`. A second signal ends the process.

    With `prints`, this rank says so on standard error.
    """

    def __init__(self, *, prints: bool) -> None:
        self.is_set, self._prints = False, prints
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # Open MPI and Slurm send SIGTERM
            self._handlers[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a handler that is not Python's

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        signal.signal(number, signal.SIG_DFL)
        if self._prints:
            os.write(2, _TEXT)  # print fails if it is called within a print


class Watchdog(threading.Thread):
    """A thread that aborts all ranks when its rank stops feeding it. `activity` returns the current activity of this rank."""

    def __init__(self, comm: Intracomm, activity: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="deepep_rt soak watchdog")
        self._comm, self._activity = comm, activity
        self._limit_s, self._fed = math.inf, time.monotonic()
        self._stopped = threading.Event()

    def feed(self, timeout_s: float) -> None:
        """Record progress. The next call is due when the library's time-outs and a margin have passed."""
        self._limit_s, self._fed = 2 * timeout_s + _GRACE_S, time.monotonic()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(1.0):
            silent_s = time.monotonic() - self._fed
            if silent_s < self._limit_s:
                continue
            text = f"rank {self._comm.Get_rank()}: no progress for {silent_s:.0f} s in {self._activity()}"
            print(f"{text}; all ranks are ended", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
            time.sleep(0.5)  # launchers drop unread output when a rank aborts
            self._comm.Abort(1)
