"""Ranks that leave a Buffer or refuse a call, on the host backend: runs tests/programs/leaving.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import python_on
from paths import PROGRAMS, pythonpath

LEFT = ["uncaught_exception", "dropped", "sigterm", "refused_and_left", "failed_making"]
MORE = [
    *("system_exit", "last_line", "sigterm_in_a_library", "sigterm_of_the_program", "interrupted_call", "normal_end"),
    *("refused_and_repeated", "refused_and_made_another_call", "refused_and_silent", "wrong_setting", "left_while_making"),
    "interrupted_making",
    *("left_before_destroy", "left_before_a_collective"),
]
COMPAT = [
    *("compat_other_tokens", "compat_other_tokens_at_first", "compat_other_hidden", "compat_growth", "compat_refused"),
    *("compat_refused_at_first", "compat_wrong_setting"),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def run(*scenarios: str) -> None:
    words = [sys.executable, str(PROGRAMS / "leaving.py"), *scenarios]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed") == len(scenarios), done.stdout


def test_ranks_that_leave() -> None:
    """The others hear who and why within 2 s, although their time-out is 300 s."""
    run(*LEFT)


@pytest.mark.full
def test_more_ways_to_leave() -> None:
    run(*MORE)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_buffers_of_deepep_v1() -> None:
    run(*COMPAT)


@pytest.mark.full
@pytest.mark.parametrize(
    "scenario",
    ["uncaught_exception", "system_exit", "dropped", "normal_end", "refused_and_left", "failed_making", "interrupted_making"],
)
def test_ranks_that_leave_over_mpi(scenario: str, tmp_path: Path) -> None:
    words = python_on(3, PROGRAMS / "leaving.py", "--mpi", scenario, tmp_path)
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.count(f"{scenario} ends") >= 2, done.stdout + done.stderr
    if scenario == "normal_end":
        assert "Error" not in done.stdout + done.stderr
        return
    heard = [json.loads((tmp_path / f"heard{rank}").read_text()) for rank in (0, 2)]
    assert all("rank 1" in text for _, _, text in heard), heard  # the program has compared the times
