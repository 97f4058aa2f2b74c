"""Low-latency combines whose rows travel compressed: the bits of the oracle, and calls that are refused. It runs with `low_latency`."""

from __future__ import annotations

from typing import Any

import low_latency_oracle
import numpy as np
from low_latency_rounds import (
    MAX_TOKENS,
    NUM_TOPK,
    assert_same,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
)
from mpi4py import MPI
from spmd import raises

from deepep_rt import EPInputError
from deepep_rt.arrays.compressed_rows import COMPRESSIONS

HIDDEN = 512


def check_compressed_low_latency_rows(comm: MPI.Intracomm) -> None:
    """The plain calls in between find memory that the compressed rows have left empty."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm, hidden=HIDDEN) as buffer:
        for seed in range(4):
            inputs = make_low_latency_inputs(comm, seed, hidden=HIDDEN)
            mine, y = inputs[rank], expert_outputs(buffer, seed, special=seed == 3)
            for compress in (None, *COMPRESSIONS, *reversed(COMPRESSIONS), None):
                weights = mine.topk_weights if seed % 2 else None
                sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=weights, use_fp8=False)
                back = buffer.low_latency_combine(
                    y[rank], mine.topk_idx, mine.topk_weights, sent.handle, compress=compress, return_recv_hook=seed == 2
                )
                if back.hook is not None:
                    back.hook()
                wanted = low_latency_oracle.expected_combine(
                    rank, inputs, y, buffer.config.num_experts, reduce_early=True, compress=compress
                )
                assert_same(f"compress={compress}, seed {seed}", back.x, wanted)


def check_wrong_low_latency_compression(comm: MPI.Intracomm) -> None:
    idx, weights = np.zeros((MAX_TOKENS, NUM_TOPK), np.int64), np.ones((MAX_TOKENS, NUM_TOPK), np.float32)
    for hidden, allowed in ((HIDDEN, True), (384, False)):
        with make_low_latency_buffer(comm, hidden=hidden) as buffer:
            (one,) = make_low_latency_inputs(comm, 1, lambda rank: MAX_TOKENS, hidden=hidden)[:1]
            sent = buffer.low_latency_dispatch(one.x, idx, use_fp8=False)
            (y,) = expert_outputs(buffer, 1)[:1]
            combine: Any = buffer.low_latency_combine
            if allowed:
                with raises(EPInputError, "compress=", "fp8"):
                    combine(y, idx, weights, sent.handle, compress="fp4")
                with raises(EPInputError, "allow_multiple_reduction=False"):
                    combine(y, idx, weights, sent.handle, compress="fp8", allow_multiple_reduction=False)
            else:
                with raises(EPInputError, "hidden=384", "multiple of 512"):
                    combine(y, idx, weights, sent.handle, compress="log10")
            assert combine(y, idx, weights, sent.handle).x.shape == (MAX_TOKENS, hidden)


def check_ranks_that_disagree_on_low_latency_compression(comm: MPI.Intracomm) -> None:
    """Host only: on GPUs, a difference breaks the Buffer."""
    rank = comm.Get_rank()
    if comm.Get_size() == 1:
        return
    with make_low_latency_buffer(comm, hidden=HIDDEN) as buffer:
        inputs = make_low_latency_inputs(comm, 5, hidden=HIDDEN)
        mine, y = inputs[rank], expert_outputs(buffer, 5)[rank]
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
        with raises(EPInputError, "kind", "rank 0: low_latency_combine with compress='fp8'", "rank 1: low_latency_combine"):
            compress = None if rank % 2 else "fp8"
            buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, sent.handle, compress=compress)
