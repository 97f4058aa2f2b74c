"""Symmetric memory of CUDA's virtual memory: real processes share it on a machine without a GPU, and die."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launch import environment, run_checks
from limits import seconds
from paths import PROGRAMS

pytest.importorskip("cuda.bindings.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 3, 13))])
def test_ranks_share_memory(num_ranks: int) -> None:
    """A queue of a socket holds 10 messages, so 13 ranks fill it."""
    run_checks(num_ranks, "heap")


@pytest.mark.parametrize("program", ["mailbox", "heap_growth"])
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 3, 13))])
def test_memory_grows(program: str, num_ranks: int) -> None:
    run_checks(num_ranks, program)


FULL = ("send", "create", "export", "introduce", "receive", "reserve", "import", "end")


@pytest.mark.parametrize("step", ["map", *(pytest.param(step, marks=pytest.mark.full) for step in FULL)])
def test_a_rank_dies_while_ranks_share_memory(step: str) -> None:
    pytest.importorskip("torch", reason="its store connects processes without mpirun")
    words = [sys.executable, str(PROGRAMS / "heap_faults.py"), step, "3"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=seconds(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == 2
