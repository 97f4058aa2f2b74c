"""Combine with rows that are compressed on the way back: the bits of the oracle, bounded errors, and calls that are refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
from expect import raises
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, outputs_of_all, same_bits

from deepep_rt import EPInputError
from deepep_rt.arrays.compressed_rows import COMPRESSIONS

HIDDEN, NUM_TOPK, EACH = 384, 4, 3
WORST_ERRORS = {"fp8": 0.03, "log10": 0.006}  # of the norm; a rounding to bfloat16 alone gives 0.0017


def _tokens(rank: int) -> int:
    return (9, 0, 17, 4)[rank % 4]


def _setup(comm: MPI.Intracomm, seed: int, dtype: str) -> tuple[dict[str, int], list[oracle.RankInputs], list[np.ndarray]]:
    sizes = dict(hidden=HIDDEN, num_topk=min(NUM_TOPK, EACH * comm.Get_size()), num_experts=EACH * comm.Get_size())
    inputs = inputs_of_all(comm, seed, _tokens, skip_probability=0.2, dtype=dtype, **sizes)
    return sizes, inputs, outputs_of_all(inputs, sizes["num_experts"], seed, HIDDEN, dtype)


def check_sums_of_compressed_rows(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    for seed, dtype in enumerate(("bfloat16", "float16", "float32")):
        sizes, inputs, outputs = _setup(comm, seed, dtype)
        experts, mine = sizes["num_experts"], inputs[rank]
        weights = outputs_of_all(inputs, experts, seed + 100, sizes["num_topk"], "float32")
        biases = tuple(np.random.default_rng([seed, rank, i]).standard_normal(mine.x.shape).astype(dtype) for i in range(2))
        with make_buffer(comm, **sizes, dtype=dtype) as buffer:
            handle = buffer.dispatch(mine.x, mine.topk_idx).handle
            for compress in (*COMPRESSIONS, None, *COMPRESSIONS):
                got = buffer.combine(outputs[rank], handle, topk_weights=weights[rank], bias=biases, compress=compress)
                options = dict(all_weights=weights, biases=biases, compress=compress)
                oracle.check_sums(got, rank, inputs, outputs, experts, **options)
                again = buffer.combine(outputs[rank], handle, topk_weights=weights[rank], bias=biases, compress=compress)
                assert same_bits(again.x, got.x)


def check_compressed_sums_of_nodes(comm: MPI.Intracomm) -> None:
    """What crosses between nodes is compressed. Nodes of one rank, and of half of the ranks on both paths."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    ways = [(1, "hierarchical")] if ranks > 1 else []
    if ranks % 2 == 0 and ranks > 2:
        ways += [(ranks // 2, "hierarchical"), (ranks // 2, "direct")]
    for seed, (node_size, path) in enumerate(ways):
        for dtype in ("bfloat16", "float32"):
            sizes, inputs, outputs = _setup(comm, 20 + seed, dtype)
            experts, mine = sizes["num_experts"], inputs[rank]
            weights = outputs_of_all(inputs, experts, seed + 100, sizes["num_topk"], "float32")
            bias = np.random.default_rng([seed, rank]).standard_normal(mine.x.shape).astype(dtype)
            with make_buffer(comm, **sizes, dtype=dtype, ranks_per_node=node_size, path=path) as buffer:
                handle = buffer.dispatch(mine.x, mine.topk_idx).handle
                for compress in (*COMPRESSIONS, None, *COMPRESSIONS):
                    got = buffer.combine(outputs[rank], handle, topk_weights=weights[rank], bias=bias, compress=compress)
                    options = dict(all_weights=weights, biases=(bias,), compress=compress, node_size=node_size, path=path)
                    oracle.check_sums(got, rank, inputs, outputs, experts, **options)


def check_errors_of_compressed_rows(comm: MPI.Intracomm) -> None:
    sizes, inputs, outputs = _setup(comm, 7, "bfloat16")
    mine, rank = inputs[comm.Get_rank()], comm.Get_rank()
    with make_buffer(comm, **sizes) as buffer:
        handle = buffer.dispatch(mine.x, mine.topk_idx).handle
        exact, _, _ = oracle.expected_combine(rank, inputs, outputs, sizes["num_experts"])
        norm = np.linalg.norm(exact)
        plain = np.linalg.norm(buffer.combine(outputs[rank], handle).x.astype(np.float64) - exact)
        for compress, worst in WORST_ERRORS.items():
            error = np.linalg.norm(buffer.combine(outputs[rank], handle, compress=compress).x.astype(np.float64) - exact)
            assert error <= worst * norm, (compress, error / norm if norm else 0)
            assert norm == 0 or error > plain, f"{compress}: the rows did not lose bits, so they were not compressed"


def check_compressed_rows_by_expert(comm: MPI.Intracomm) -> None:
    """A rank adds up its rows of a token, rounds the sum to the rows' type, and compresses it."""
    sizes, inputs, _ = _setup(comm, 3, "bfloat16")
    experts, rank, mine = sizes["num_experts"], comm.Get_rank(), inputs[comm.Get_rank()]
    expected = [oracle.expected_expert_rows(r, inputs, experts) for r in range(comm.Get_size())]
    draw = np.random.default_rng(4)
    y = [draw.standard_normal(rows.x.shape, np.float32).astype(ml_dtypes.bfloat16) for rows in expected]
    with make_buffer(comm, **sizes) as buffer:
        handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout="expert").handle
        for weighted in (False, True):
            by_token = [
                oracle.rows_by_token(r, inputs, experts, y[r], expected[r], weights=expected[r].weights if weighted else None)
                for r in range(comm.Get_size())
            ]
            for compress in COMPRESSIONS:
                how = dict(topk_weights=expected[rank].weights, weighted=weighted, compress=compress)
                got = buffer.combine(y[rank], handle, **how)
                wanted, _ = oracle.expected_sums(rank, inputs, by_token, experts, compress=compress)
                assert same_bits(got.x, wanted)


def check_wrong_compression(comm: MPI.Intracomm) -> None:
    sizes, inputs, outputs = _setup(comm, 5, "bfloat16")
    mine, y = inputs[comm.Get_rank()], outputs[comm.Get_rank()]
    with make_buffer(comm, **sizes) as buffer:
        handle = buffer.dispatch(mine.x, mine.topk_idx).handle
        combine: Any = buffer.combine
        for wrong in ("fp4", "", 8, True):
            with raises(EPInputError, "compress=", "fp8"):
                combine(y, handle, compress=wrong)
        by_expert = buffer.dispatch(mine.x, mine.topk_idx, layout="expert")
        rows = np.zeros(by_expert.recv_x.shape, ml_dtypes.bfloat16)
        with raises(EPInputError, "reduce='topk'"):
            combine(rows, by_expert.handle, compress="fp8", reduce="topk")
        if comm.Get_size() > 1:  # the ranks do not agree
            formats = (*COMPRESSIONS, None)
            mixed = formats[comm.Get_rank() % len(formats)]
            with raises(EPInputError, "the ranks disagree on the kind of this call", "compress="):
                combine(y, handle, compress=mixed)
                buffer.synchronize()
        oracle.check_sums(combine(y, handle), comm.Get_rank(), inputs, outputs, sizes["num_experts"])
    with make_buffer(comm, **{**sizes, "hidden": 192}) as buffer:
        x = np.ones((2, 192), ml_dtypes.bfloat16)
        sent = buffer.dispatch(x, np.zeros((2, sizes["num_topk"]), np.int64))
        with raises(EPInputError, "hidden=192", "multiple of 128"):
            buffer.combine(sent.recv_x, sent.handle, compress="log10")


if __name__ == "__main__":
    main(__name__)
