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


def print_width(stdout: int, **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    subprocess.run(
        [sys.executable, "-c", PRINT],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        check=True,
        env={**kept, **environment},
    )


@pytest.mark.parametrize(("columns", "printed"), [(100, 100), (80, 80), (0, 133)])
def test_a_terminal(columns: int, printed: int) -> None:
    """Open MPI gives its ranks a terminal without a size, even if their output goes to a file."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    print_width(theirs)
    assert os.read(ours, 100).split() == [str(printed).encode()]
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(("environment", "printed"), [({}, 133), ({"COLUMNS": "99"}, 99), ({"COLUMNS": "80"}, 133)])
def test_a_log(environment: dict[str, str], printed: int) -> None:
    ours, theirs = os.pipe()
    print_width(theirs, **environment)
    os.close(theirs)
    with os.fdopen(ours) as output:
        assert output.read().split() == [str(printed)]
