"""Notice Ctrl-C, so that all ranks of a soak run can end together."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_TEXT = b"soak: interrupted, and ends at the next synchronization of all ranks. A second signal ends it at once.\n"


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
