"""Symmetric memory of CUDA's virtual memory: real processes share it on a machine without a GPU, and die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, run_checks, run_command
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


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 3, 16))])
def test_ways_to_share_memory(num_ranks: int) -> None:
    run_checks(num_ranks, "heap_ways")


FULL = ("send", "create", "export", "introduce", "receive", "reserve", "import", "end")
FULL += ("files-send", "pidfd-copy", "fabric-import", "ipc-allocate", "ipc-open")


@pytest.mark.parametrize("steps", [("map",), pytest.param(FULL, marks=pytest.mark.full, id="others")])
def test_a_rank_dies_while_ranks_share_memory(steps: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="its store connects processes without mpirun")
    words = [sys.executable, str(PROGRAMS / "heap_faults.py"), "3", *steps]
    env = environment(DEEPEP_RT_SOCKET_DIR=str(tmp_path))
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=seconds(90), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {f"{step}: rank {rank} passed" for step in steps for rank in range(2)}
    assert passed <= set(done.stdout.splitlines())


@pytest.mark.parametrize("rounds", [8, pytest.param(40, marks=pytest.mark.full)])
def test_slots_whose_processes_come_and_go(rounds: int) -> None:
    """Members that are killed, given up or new. None reaches memory of a generation that it is no member of, and nothing stays."""
    out, _ = run_command(sys.executable, PROGRAMS / "heap_slots.py", 1, rounds, limit_s=60 + 4 * rounds, **environment())
    assert out.endswith("OK\n")
