"""A Buffer with slots grows, and all processes that wait join at once."""

from __future__ import annotations

import sys

import pytest
from launch import environment, run_command
from paths import PROGRAMS


@pytest.mark.parametrize(("seed", "rounds"), [(1, 1), pytest.param(2, 6, marks=pytest.mark.full)])
def test_growth_from_two_ranks_to_eight(seed: int, rounds: int) -> None:
    words = str(PROGRAMS / "growth.py"), "--seed", str(seed), "--rounds", str(rounds)
    assert "OK" in run_command(sys.executable, *words, **environment())[0]
