"""Standard output of the commands."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_UNKNOWN = 80  # columns that rich assumes where nothing tells


def console(width_of_logs: int) -> Console:
    """Standard output. Where neither COLUMNS nor a terminal says how wide it is (a log file, mpirun), lines are so many columns wide."""
    found = Console(highlight=False)
    return found if found.width != _UNKNOWN or _columns() == _UNKNOWN else Console(highlight=False, width=width_of_logs)


def _columns() -> int:
    """What the terminal says; 0 if there is none, or if it does not know (Open MPI gives its ranks one of no size)."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return 0
