"""Faults of one rank on the host backend: in the middle of each call, and while it makes a Buffer."""

from __future__ import annotations

import os
import subprocess
import sys

import limits
import pytest
from launch import environment, launch, run_checks
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


@pytest.mark.parametrize(("kills", "num_ranks"), [(1, 3), pytest.param(4, 4, marks=pytest.mark.full)])
def test_survivors_of_random_kills(kills: int, num_ranks: int) -> None:
    """Any rank may die, in any call. The others make a new Buffer each time, and go on."""
    pytest.importorskip("torch", reason="its store connects processes without mpirun")
    words = [sys.executable, str(PROGRAMS / "kills.py"), "host", str(kills), str(num_ranks), "3"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=limits.seconds(300), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"passed: {kills} kills in" in done.stdout


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_rank_that_is_interrupted(num_ranks: int) -> None:
    """Ctrl-C while a Buffer is made or in a measurement, and Buffers that exceptions leave: the next Buffer works."""
    run_checks(num_ranks, "interrupted")


@pytest.mark.parametrize("rank_0", ["alone", pytest.param("other", marks=pytest.mark.full)])
def test_processes_end_after_a_timeout(rank_0: str) -> None:
    """Also MPI ends. It is not stopped by messages or collectives that no rank has finished."""
    assert launch(4, "ends_after_timeout", rank_0).count("ends") == 4
