"""Standard output of the commands."""

from __future__ import annotations

import sys

from rich.console import Console


def console(width_of_logs: int) -> Console:
    """Standard output. Where it is no terminal, lines are so many columns wide: not folded at 80 in log files and under mpirun."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width_of_logs)
