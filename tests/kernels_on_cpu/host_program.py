"""The host program of one rank, in a thread that runs only when the machine lets it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class HostProgram(threading.Thread):
    """Run `program(rank)`. One program runs at a time, and only within `resume`, so that a seed repeats a run."""

    def __init__(self, rank: int, program: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self.rank, self._program = rank, program
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._error: BaseException | None = None
        self._must_end = False
        self.has_ended = False  # is_alive() stays true for a moment after that, and a resume() then would wait for ever
        self.start()

    def run(self) -> None:
        self._may_run.acquire()
        try:
            self._result = self._program(self.rank)
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._has_stopped.release()

    def resume(self) -> None:
        """Run the program until it pauses or ends."""
        if not self.has_ended:
            self._may_run.release()
            self._has_stopped.acquire()

    def pause(self) -> None:
        """Stop until the next `resume`. The program calls this."""
        self._has_stopped.release()
        self._may_run.acquire()
        if self._must_end:
            raise SystemExit

    def end(self) -> None:
        """End the program, also while it waits."""
        self._must_end = True
        self._may_run.release()
        self.join()

    def result(self) -> Any:
        """Return the result of the program, or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._result
