"""Standard output of the commands."""

from __future__ import annotations

import sys

from rich.console import Console

_UNKNOWN = 80  # columns that rich assumes where nothing tells


def console(width_of_logs: int) -> Console:
    """Standard output. Where it is no terminal (a log file, mpirun) and COLUMNS does not say, lines are so many columns wide."""
    found = Console(highlight=False)
    return found if sys.stdout.isatty() or found.width != _UNKNOWN else Console(highlight=False, width=width_of_logs)
