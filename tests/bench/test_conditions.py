"""What a benchmark is measured on: the machine, declared nodes, and no stored tunings, which would differ between machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_bench
from mpi4py import MPI

pytest.importorskip("rich")

from deepep_rt import EPUnavailableError, _env
from deepep_rt.bench import machine, program, run
from deepep_rt.bench.results import title
from deepep_rt.bench.throughput import num_crossings
from deepep_rt.config import Config


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPEP_RT_TUNING", raising=False)


def test_the_command_leaves_stored_tunings_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(run, "need", lambda *_: None)
    monkeypatch.setattr(run, "_run", lambda *_: seen.append(_env.tuning()))
    run.measure("all", tmp_path / "out", [], quick=True, backend="host", sizes=run.AskedSizes(None, None, None), commit=None)
    assert seen == [False, False]
    assert _env.tuning()


def test_the_programs_leave_stored_tunings_out() -> None:
    seen = []

    def measure(comm: Any, settings: Any) -> None:
        seen.append(_env.tuning())

    given = argparse.Namespace(compare=None, json=None)
    program.run_program(MPI.COMM_WORLD, given, program.Settings, measure)
    assert seen == [False]
    assert _env.tuning()


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "the CUDA driver sees no GPU")
    with pytest.raises(EPUnavailableError, match=r"sees no GPU\. Pass --backend host, which needs none"):
        machine.Machine(MPI.COMM_SELF, "cuda")
    assert not machine.Machine(MPI.COMM_SELF, "host").on_gpu


def _config(ranks_per_node: int, path: str) -> Config:
    sizes = dict(num_max_tokens_per_rank=8, hidden=512, num_topk=4, num_experts=8)
    return Config(num_ranks=4, ranks_per_node=ranks_per_node, path=path, **sizes)


@pytest.mark.parametrize(
    ("ranks_per_node", "path", "crossings"),
    [(4, "hierarchical", 2 + 0 + 3), (2, "hierarchical", 1 + 0 + 1), (2, "direct", 1 + 0 + 2), (1, "direct", 2 + 0 + 3)],
)
def test_a_row_crosses_once_for_each_place_outside(ranks_per_node: int, path: str, crossings: int) -> None:
    ranks = np.array([[0, 1, 2, 2], [0, 0, 0, 0], [3, 2, 1, 0]])
    assert num_crossings(ranks, 0, _config(ranks_per_node, path)) == crossings


def test_declared_nodes_stand_in_the_result(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    sizes = ["--hidden", "512", "--topk", "4", "--experts", "8", "--tokens", "64", "--sms", "8"]
    run_bench(4, "bench/throughput.py", "--quick", *sizes, "--ranks-per-node", "2", "--path", "direct", "--json", file)
    result = json.loads(file.read_text())
    assert (result["settings"]["ranks_per_node"], result["settings"]["path"]) == (2, "direct")
    assert title(result).endswith("random routing, nodes of 2")
