"""Check the width of the commands' output for terminals, pipes and variables."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

pytest.importorskip("rich")

PRINT = "from deepep_rt._console import console; print(console(133).width)"


@pytest.mark.parametrize(
    ("columns", "environment", "printed"),
    [
        (100, {}, 100),
        (80, {}, 80),
        (0, {}, 133),
        (None, {}, 133),
        (None, {"COLUMNS": "99"}, 99),
        (None, {"COLUMNS": "80"}, 133),
    ],
)
def test_width(columns: int | None, environment: dict[str, str], printed: int) -> None:
    """Print to a terminal with this number of columns, or to a pipe (None).

    Open MPI gives its ranks a terminal without a size, even if their output goes to a file.
    """
    ours, theirs = os.pipe() if columns is None else pty.openpty()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    rest = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams = dict(stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-c", PRINT], **streams, check=True, env={**rest, **environment})
    assert os.read(ours, 100).split() == [str(printed).encode()]
    os.close(ours)
    os.close(theirs)
