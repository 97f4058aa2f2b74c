"""The kernel list_choices, compiled for the CPU, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from deepep_rt.jit.launch import launch_local
from deepep_rt.kernels.structs import ChoiceRow
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import array_at, callers_stream
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import broken

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

RANKS, TOPK, TOKENS = 5, 3, 700
DTYPE = ChoiceRow.dtype({})


def made(seed, num_rows):
    """Make the tables of `num_rows` rows by token. Their sources ascend, and the tokens of each. Some ranks send none."""
    rng = np.random.default_rng(seed)
    every = [(rank, token) for rank in rng.permutation(RANKS)[: rng.integers(1, RANKS + 1)] for token in range(TOKENS)]
    kept = sorted(every[i] for i in rng.permutation(len(every))[:num_rows])
    sources = np.array(kept, np.int32).reshape(-1, 2)
    positions = np.where(rng.random((len(kept), TOPK)) < 0.6, rng.permutation(len(kept) * TOPK).reshape(-1, TOPK), -1)
    return positions.astype(np.int32), sources, rng.random(max(1, len(kept) * TOPK), np.float32)


def expected(positions, sources, weights, first_token, window_tokens):
    rows, first = [], np.zeros(RANKS + 1, np.int32)
    for (rank, token), of_row in zip(sources, positions, strict=True):
        if first_token <= token < first_token + window_tokens:
            found = [k for k in range(TOPK) if of_row[k] >= 0]
            first[rank + 1 :] += len(found)
            rows += [(of_row[k], (token - first_token) * TOPK + k, rank, weights[of_row[k]]) for k in found]
    return np.array(rows, DTYPE), first


def run(machine, seed, num_rows, first_token=0, window_tokens=TOKENS, weighted=True):
    positions, sources, weights = made(seed, num_rows)
    want, first = expected(positions, sources, weights if weighted else 0 * weights, first_token, window_tokens)
    put = lambda values: machine.put(0, values)  # noqa: E731
    out = {"rows": put(np.full((positions.size + 1) * 4, -77, np.int32)), "first": put(np.full(RANKS + 2, -77, np.int32))}
    given = dict(positions=positions, totals=np.array([0, len(sources)], np.int32), sources=sources)
    memory = {name: put(values if values.size else np.zeros(1, np.int32)) for name, values in given.items()}
    memory["weights"] = put(weights)
    addresses = {name: array.ptr for name, array in {**memory, **out}.items()}
    if not weighted:
        addresses["weights"] = 0
    numbers = dict(num_topk=TOPK, num_ranks=RANKS, first_token=first_token, window_tokens=window_tokens)
    launch_local("list_choices", callers_stream(0), {**addresses, **numbers}, 1)
    machine.run()
    rows, found = (array_at(array.ptr, array.shape, array.dtype) for array in out.values())
    np.testing.assert_array_equal(found, [*first, -77])
    np.testing.assert_array_equal(rows[: 4 * len(want)], want.view(np.int32))
    assert (rows[4 * len(want) :] == -77).all(), "nothing is written past the list"


@pytest.mark.parametrize("num_rows", [0, 1, 33, 1024, 2500])
def test_rows_of_all_tokens(num_rows):
    with Machine(1, num_rows) as machine:
        run(machine, num_rows, num_rows, weighted=num_rows != 33)


def test_windows():
    with Machine(1, 1, "sm_80") as machine:
        for seed, (first, tokens) in enumerate(((0, 200), (200, 200), (600, 200), (TOKENS, 10))):
            run(machine, seed, 1500, first, tokens)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"found \+= ", "found = ", id="rows-of-earlier-turns"),
        pytest.param(r"source_before \+ 1", "source.x", id="sources-without-rows"),
    ],
)
def test_a_mistake_fails(tmp_path, pattern, replacement):
    folder = broken(tmp_path, "experts/list_choices.cu", pattern, replacement)
    with Machine(1, 0, cuda_src=folder) as machine, pytest.raises(AssertionError):
        run(machine, 1, 1500)
