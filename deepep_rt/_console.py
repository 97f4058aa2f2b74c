"""The standard output of the commands."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from .errors import EPError

_UNKNOWN = 80  # the columns that rich assumes where it finds no width


def console(width_of_logs: int) -> Console:
    """Make the console of standard output.

    Texts are printed as they are: brackets and colons, which rich may take for markup and emoji, come from files too.

    Args:
        width_of_logs: Columns of a line where neither COLUMNS nor a terminal gives a width, as in a log file or under mpirun.
    """
    plain: dict[str, Any] = dict(highlight=False, markup=False, emoji=False)
    found = Console(**plain)
    is_known = found.width != _UNKNOWN or shutil.get_terminal_size((0, 0)).columns == _UNKNOWN
    return found if is_known else Console(**plain, width=width_of_logs)


@contextmanager
def printing() -> Iterator[None]:
    """Wrap everything that prints. Characters that standard output cannot encode become escapes.

    Raises:
        EPError: where standard output is closed or cannot be written, such as one on a full disk.
    """
    if sys.stdout is None:  # it is closed; print and rich would then drop everything without an error
        raise EPError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe; typer ends such a command without a message
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail again when Python ends
        raise EPError(f"standard output cannot be written: {error.strerror}") from error
