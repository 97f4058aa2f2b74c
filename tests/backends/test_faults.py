"""Faults of one rank in the middle of each call, on the host backend: runs tests/programs/faults.py."""

from __future__ import annotations

import os
import subprocess
import sys

import limits
import pytest
from paths import PROGRAMS, pythonpath


@pytest.mark.parametrize(("kinds", "number"), [(["raises"], 6), pytest.param([], 42, marks=pytest.mark.full)])
def test_rank_that_is_lost_in_a_call(kinds: list[str], number: int) -> None:
    """The rank is killed, sleeps, raises, or runs out of memory."""
    times = limits.slowness()
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "faults.py"), "1", *kinds],
        env={
            **os.environ,
            "PYTHONPATH": pythonpath(),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            limits.VARIABLE: str(times),
        },
        capture_output=True,
        text=True,
        timeout=limits.seconds(150, times),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed") == number, done.stdout
    assert ": failed" not in done.stdout
