"""Ends a soak run that makes no progress, whatever it hangs in."""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_GRACE_S = 30.0  # past the time-outs of the library


class Watchdog(threading.Thread):
    """A thread that aborts all ranks when its rank gives no sign.

    Args:
        comm: The ranks.
        where: Says what this rank is doing.
    """

    def __init__(self, comm: Intracomm, where: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="deepep_rt soak watchdog")
        self._comm, self._where = comm, where
        self._limit_s, self._fed = math.inf, time.monotonic()
        self._stopped = threading.Event()

    def feed(self, timeout_s: float) -> None:
        """Give a sign. The next one is due when the library's own time-outs have passed, and some time more."""
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
            text = f"rank {self._comm.Get_rank()}: no progress for {silent_s:.0f} s in {self._where()}"
            print(f"{text}; all ranks are ended", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
            time.sleep(0.5)  # launchers drop what they have not read when a rank aborts
            self._comm.Abort(1)
