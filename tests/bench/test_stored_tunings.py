"""Benchmarks leave stored tunings out: figures of machines compare only with the same settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from deepep_rt import _env

pytest.importorskip("rich")
MPI = pytest.importorskip("mpi4py.MPI")
program = pytest.importorskip("deepep_rt.bench.program")
run = pytest.importorskip("deepep_rt.bench.run")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPEP_RT_TUNING", raising=False)


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(run, "need", lambda *_: None)
    monkeypatch.setattr(run, "_run", lambda *_: seen.append(_env.tuning()))
    run.measure("all", tmp_path / "out", [], quick=True, backend="host", sizes=run.AskedSizes(None, None, None), commit=None)
    assert seen == [False, False]
    assert _env.tuning()


def test_the_programs() -> None:
    seen = []

    def measure(comm: Any, settings: Any) -> None:
        seen.append(_env.tuning())

    given = argparse.Namespace(compare=None, json=None)
    program.run_program(MPI.COMM_WORLD, given, program.Settings, measure)
    assert seen == [False]
    assert _env.tuning()
