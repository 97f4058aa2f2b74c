"""`bench/throughput.py` over declared nodes, and the rows that it counts as crossing."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
from launch import python_on
from paths import ROOT

from deepep_rt.bench.results import title
from deepep_rt.bench.throughput import num_crossings
from deepep_rt.config import Config


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


def test_declared_nodes_stand_in_the_result(tmp_path) -> None:
    file = tmp_path / "nodes.json"
    sizes = ["--hidden", "512", "--topk", "4", "--experts", "8", "--tokens", "64", "--sms", "8"]
    options = ["--backend", "host", "--quick", "--ranks-per-node", "2", "--path", "direct", "--json", file]
    command = python_on(4, ROOT / "bench/throughput.py", *sizes, *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads(file.read_text())
    assert (result["settings"]["ranks_per_node"], result["settings"]["path"]) == (2, "direct")
    assert title(result).endswith("random routing, nodes of 2")
