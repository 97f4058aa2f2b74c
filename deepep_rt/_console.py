"""Print to the standard output of the commands."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from .errors import EPError

_UNKNOWN = 80  # columns that rich assumes if it finds no width


def console(width_of_logs: int) -> Console:
    """Make the console of standard output.

    Texts are printed unchanged, because texts from files may contain brackets and colons, which rich takes for markup and emoji.

    `width_of_logs` counts if neither COLUMNS nor a terminal gives a width, as in a log file or under mpirun. COLUMNS=80 is no width,
    because launchers set it without a terminal.
    """
    plain: dict[str, Any] = dict(highlight=False, markup=False, emoji=False)
    found = Console(**plain)
    is_known = found.width != _UNKNOWN or _terminal_columns() == _UNKNOWN
    return found if is_known else Console(**plain, width=width_of_logs)


def printable(text: str) -> str:
    """Return a text from a file, or the name of one, with escapes in place of characters that a terminal would obey or cannot show."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _terminal_columns() -> int:
    """Return the width of the terminal, or 0 if it is unknown (Open MPI gives its ranks a terminal without a size)."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout else 0
    except OSError:
        return 0


@contextmanager
def printing() -> Iterator[None]:
    """Wrap the block that prints. Characters that standard output cannot encode become escapes.

    Raise EPError if standard output is closed or cannot be written, for example because the disk is full.
    """
    if sys.stdout is None:  # closed: print and rich would drop all text without an error
        raise EPError("standard output is closed. Redirect it to a file or a terminal.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: typer ends the command without a message
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # buffered text would fail again when Python ends
        raise EPError(f"standard output cannot be written: {error.strerror}. Redirect it to another file.") from error
