"""Standard output of the commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from .errors import EPError

_UNKNOWN = 80  # columns that rich assumes where nothing tells


def console(width_of_logs: int) -> Console:
    """Standard output. Where neither COLUMNS nor a terminal says how wide it is (a log file, mpirun), lines are so many columns wide.

    Texts are printed as they are: brackets and colons, which rich may take for markup and emoji, come from files too.
    """
    plain: dict[str, Any] = dict(highlight=False, markup=False, emoji=False)
    found = Console(**plain)
    return found if found.width != _UNKNOWN or _columns() == _UNKNOWN else Console(**plain, width=width_of_logs)


@contextmanager
def printing() -> Iterator[None]:
    """Around all that is printed. What standard output cannot encode becomes an escape.

    Raises:
        EPError: where standard output is closed or cannot be written, such as one on a full disk.
    """
    if sys.stdout is None:  # Python's way to say closed; print and rich would drop everything in silence
        raise EPError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; typer ends such a command without a word
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail again when Python ends
        raise EPError(f"standard output cannot be written: {error.strerror}") from error


def _columns() -> int:
    """What the terminal says; 0 if there is none, or if it does not know (Open MPI gives its ranks one of no size)."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout else 0
    except OSError:
        return 0
