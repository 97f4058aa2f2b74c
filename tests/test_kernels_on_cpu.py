"""The CUDA kernels, compiled for the CPU, against the oracles: every rank of a Buffer in this process, threads in random order."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (dtypes for NumPy)
import numpy as np
import pytest
from kernels_on_cpu import compiler
from kernels_on_cpu.machine import Machine
from low_latency_oracle import check_dispatch, expected_combine, expected_dispatch, outputs
from oracle import make_inputs

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SMALL = dict(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True, low_latency_sms=2)


def inputs_of(config, seed):
    """What each rank gives: a random number of tokens, of whose choices some are none."""
    return [
        make_inputs(
            seed, rank, int(np.random.default_rng([seed, rank]).integers(0, config.num_max_tokens_per_rank + 1)),
            config.hidden, config.num_topk, config.num_experts, skip_probability=0.1, dtype="bfloat16",
        )
        for rank in range(config.num_ranks)
    ]  # fmt: skip


def same(got, want):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert (got.view(np.uint8) == want.view(np.uint8)).all(), np.argwhere(got != want)[:4]


def low_latency_round(machine, buffers, seed):
    config = buffers[0].config
    inputs = inputs_of(config, seed)
    ranks, put = range(config.num_ranks), machine.put
    shape = config.num_local_experts, config.num_max_recv_tokens, config.hidden
    y = [outputs(seed, rank, shape) for rank in ranks]
    idx = [put(r, inputs[r].topk_idx) for r in ranks]
    weights = [put(r, inputs[r].topk_weights) for r in ranks]
    sent = [
        b.low_latency_dispatch(put(r, inputs[r].x), idx[r], topk_weights=weights[r], use_fp8=False) for r, b in enumerate(buffers)
    ]
    back = [b.low_latency_combine(put(r, y[r]), idx[r], weights[r], sent[r].handle) for r, b in enumerate(buffers)]
    machine.run()
    for rank in ranks:
        check_dispatch(sent[rank], expected_dispatch(rank, inputs, config.num_experts))
        same(back[rank].x, expected_combine(rank, inputs, y, config.num_experts, reduce_early=True))


@pytest.mark.parametrize("seed", range(2))
def test_low_latency(seed):
    with Machine(2, seed) as machine:
        buffers = machine.buffers(**SMALL)
        for call in range(3):
            low_latency_round(machine, buffers, 10 * seed + call)
