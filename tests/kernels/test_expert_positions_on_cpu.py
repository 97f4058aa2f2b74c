"""The kernel expert_positions, compiled for the CPU, compared with NumPy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from deepep_rt.jit.launch import launch_local
from deepep_rt.kernels.tuning import MAX_POSITION_BLOCKS
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import array_at, callers_stream
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import broken, seeds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

NAMES = ("positions", "offsets", "ends", "totals", "sources")
EXPERTS, TOPK, CAPACITY = 5, 3, 90


def aligned(count, alignment):
    return -(-count // alignment) * alignment


def expected_tables(idx, src_idx, num_recv, counts, alignment, limit):
    """Compute the tables one choice after the other."""
    capacity, num_topk = idx.shape
    num_tokens, limit = min(num_recv, capacity), sum(counts) if limit < 0 else limit
    first = np.concatenate([[0], np.cumsum(counts)])
    found = [int((idx[:num_tokens] == e).sum()) for e in range(len(counts))]
    is_complete = [num_recv > capacity or aligned(n, alignment) == count for n, count in zip(found, counts, strict=True)]
    positions, taken = np.full(idx.shape, -1, np.int32), [0] * len(counts)
    for token, choice in np.ndindex(num_tokens, num_topk):
        e = int(idx[token, choice])
        if not 0 <= e < len(counts):
            continue
        row = first[e] + taken[e]
        taken[e] += 1
        positions[token, choice] = row if is_complete[e] and row < limit else -1
    return dict(
        positions=positions,
        offsets=np.minimum(first, limit).astype(np.int32),
        ends=np.array([min(first[e] + n, limit) if is_complete[e] else -1 for e, n in enumerate(found)], np.int32),
        totals=np.array([first[-1], num_tokens], np.int32),
        sources=src_idx[:num_tokens],
    )


class Launches:
    """Launches on one GPU, which share the memory that counts them."""

    def __init__(self, machine):
        self._machine = machine
        self._progress = machine.put(0, np.zeros(1 + MAX_POSITION_BLOCKS, np.int32))
        self._block_counts = machine.put(0, np.zeros((MAX_POSITION_BLOCKS, EXPERTS), np.int64))

    def launch(self, idx, num_recv, counts, *, alignment, limit, num_blocks):
        """Queue a launch. Return its expected tables, and those that it writes."""
        put = lambda values: self._machine.put(0, values)  # noqa: E731
        capacity, num_topk = idx.shape
        src_idx = np.arange(2 * capacity, dtype=np.int32).reshape(capacity, 2)
        expected = expected_tables(idx, src_idx, num_recv, counts, alignment, limit)
        shapes = {**{name: table.shape for name, table in expected.items()}, "sources": src_idx.shape}
        tables = {name: put(np.full(shapes[name], -77, np.int32)) for name in NAMES}
        given = dict(
            topk_idx=put(idx),
            src_idx=put(src_idx),
            num_recv=put(np.array([num_recv], np.int32)),
            num_per_expert=put(np.int32(counts)),
        )
        memory = {**given, **tables, "progress": self._progress, "block_counts": self._block_counts}
        numbers = dict(
            idx_bytes=idx.itemsize,
            num_topk=num_topk,
            num_experts=len(counts),
            alignment=alignment,
            capacity=capacity,
            num_rows=limit,
        )
        values = {**{name: array.ptr for name, array in memory.items()}, **numbers}
        launch_local("expert_positions", callers_stream(0), values, num_blocks)
        return SimpleNamespace(expected=expected, tables=tables)


def check(made):
    for name, want in made.expected.items():
        table = made.tables[name]
        got = array_at(table.ptr, table.shape, table.dtype)
        np.testing.assert_array_equal(got[: len(want)], want, err_msg=name)
        assert (got[len(want) :] == -77).all(), f"{name}: nothing is written past the rows"


def random_launch(launches, rng):
    """Launch with random choices. Some calls have failed: the numbers of choices are not those that the counts tell."""
    num_recv, alignment = int(rng.integers(0, CAPACITY + 20)), int(rng.integers(1, 6))
    idx = rng.integers(-2, EXPERTS + 1, (CAPACITY, TOPK)).astype(("int32", "int64")[rng.integers(2)])
    chosen = idx[: min(num_recv, CAPACITY)]
    counts = [aligned(int((chosen == e).sum()), alignment) for e in range(EXPERTS)]
    for e in rng.permutation(EXPERTS)[: int(rng.choice([0, 0, 1, EXPERTS]))]:
        counts[e] = int(rng.integers(0, 40)) * alignment
    limit = [-1, sum(counts), int(rng.integers(0, sum(counts) + 30))][rng.integers(3)]
    num_blocks = int(rng.choice([1, 2, 5, 40]))
    return launches.launch(idx, num_recv, counts, alignment=alignment, limit=limit, num_blocks=num_blocks)


def run_launches(machine, seed, count):
    launches, rng = Launches(machine), np.random.default_rng(seed)
    made = [random_launch(launches, rng) for _ in range(count)]
    machine.run()
    for one in made:
        check(one)


def fails(folder, seed):
    """Return whether a seed shows that the kernel in `folder` is broken."""
    try:
        with Machine(1, seed, cuda_src=folder) as machine:
            run_launches(machine, seed, 8)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("seed", seeds(4))
def test_tables(seed):
    with Machine(1, seed, ("sm_80", "sm_90")[seed % 2], num_sms=(None, 1, 3)[seed % 3]) as machine:
        run_launches(machine, seed, 8)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"kTileExperts = 1024", "kTileExperts = 2", id="tiles-of-experts"),
        pytest.param(r"min\(kWarps, kPositionCounts", "min(3, kPositionCounts", id="few-warps"),
    ],
)
def test_many_experts(tmp_path, pattern, replacement):
    """With many experts, shared memory has room for a part of them, or of the warps."""
    folder = broken(tmp_path, "experts/expert_positions.cu", pattern, replacement)
    for seed in range(2):
        with Machine(1, seed, cuda_src=folder) as machine:
            run_launches(machine, seed, 6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"__syncthreads\(\);\n    publish_counts", "publish_counts", id="no-barrier-before-sums"),
        pytest.param(r"while \(static_cast<u32>\(words\[b\]\[j\]\) != epoch\)", "if (false)", id="counts-without-wait"),
        pytest.param(r"progress->epoch = epoch;", "progress->epoch = 0;", id="counts-of-an-earlier-launch"),
        pytest.param(r"while \(ld_acquire_gpu\([^;{]*\) \{\n    \}", "", id="no-wait-for-positions"),
        pytest.param(r"if \(shared.is_incomplete\) take_back[^;]*;", "", id="rows-of-a-failed-call"),
    ],
)
def test_broken_kernels_fail(tmp_path, pattern, replacement):
    folder = broken(tmp_path, "experts/expert_positions.cu", pattern, replacement)
    assert any(fails(folder, seed) for seed in range(60))
