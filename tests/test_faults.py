"""Faults of one rank in the middle of each call, on the host backend: tests/faults.py in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_a_rank_that_is_lost_in_a_call() -> None:
    """Killed, asleep, thrown out by an exception, or out of memory."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(TESTS / "faults.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed") == 42, done.stdout
    assert ": failed" not in done.stdout
