"""Test `deepep_rt.compat.ElasticBuffer` on the host backend. The program compares each mode and field with an oracle."""

from __future__ import annotations

import importlib.util

import pytest
from launch import run_checks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 4))])
def test_program(num_ranks: int) -> None:
    run_checks(num_ranks, "deepep_v2")


@pytest.mark.full
def test_program_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "2")
    run_checks(4, "deepep_v2")


def test_programs_see_the_version_that_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepep_rt import EPConfigError, _env, compat

    assert compat.__version__ == "1.2.1"
    for setting, version in (("", "1.2.1"), ("1", "1.2.1"), ("2", "2.1.0")):
        monkeypatch.setenv("DEEPEP_RT_DEEPEP_VERSION", setting)
        assert _env.deepep_version() == version
    monkeypatch.setenv("DEEPEP_RT_DEEPEP_VERSION", "3")
    with pytest.raises(EPConfigError, match="DEEPEP_RT_DEEPEP_VERSION='3'; expected 1 or 2"):
        _env.deepep_version()
