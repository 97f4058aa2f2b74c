"""Low-latency calls with unusual choices: experts that are named twice, too often, or in the dispatch alone."""

from __future__ import annotations

from typing import Any

import low_latency_oracle
import ml_dtypes
import numpy as np
import oracle
from expect import logged_warnings
from low_latency_rounds import HIDDEN, NUM_TOPK, expert_outputs, make_low_latency_buffer, make_low_latency_inputs
from mpi4py import MPI
from spmd import main, make_buffer, raises, same_bits

from deepep_rt import Buffer, EPInputError

MAX_TOKENS = 8


def _buffer(comm: MPI.Intracomm) -> Buffer:
    return make_low_latency_buffer(comm, num_max_tokens_per_rank=MAX_TOKENS)


def _inputs(comm: MPI.Intracomm, seed: int) -> list[oracle.RankInputs]:
    return make_low_latency_inputs(comm, seed, lambda rank: (8, 5, 0, 3)[rank % 4])


def _run_rounds(buffer: Buffer, inputs: list[oracle.RankInputs], named: np.ndarray | None, seed: int, rank: int) -> None:
    """Dispatch with and without weights, and combine each in both ways. `named`: as in the oracle, for this rank."""
    mine, experts, y = inputs[rank], buffer.config.num_experts, expert_outputs(buffer, seed)
    given = mine.topk_idx if named is None else np.where(named, mine.topk_idx, -1)
    for weights in (mine.topk_weights, None):
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=weights, use_fp8=False)
        low_latency_oracle.check_dispatch(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts))
        for reduce_early in (True, False):
            back = buffer.low_latency_combine(
                y[rank], given, mine.topk_weights, sent.handle, allow_multiple_reduction=reduce_early
            )
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=reduce_early, named=named)
            assert same_bits(np.asarray(back.x), wanted), (reduce_early, weights is None)


def check_excluded_ranks(comm: MPI.Intracomm) -> None:
    """Combine does not add choices that it does not name. Their rows still arrive, and must not appear in a later call."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with _buffer(comm) as buffer:
        for seed in range(6):
            inputs = _inputs(comm, seed)
            rng = np.random.default_rng([seed, rank])
            kept = rng.random((len(inputs[rank].topk_idx), ranks)) < (0.5, 0.0)[seed % 2]
            owner = inputs[rank].topk_idx // 4
            _run_rounds(buffer, inputs, (owner >= 0) & np.take_along_axis(kept, np.maximum(owner, 0), 1), seed, rank)
            _run_rounds(buffer, inputs, None, seed + 50, rank)


def check_excluded_choices(comm: MPI.Intracomm) -> None:
    """If experts' ranks do not add rows up, combine may exclude single choices."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    with _buffer(comm) as buffer:
        for seed in range(4):
            inputs, y = _inputs(comm, seed), expert_outputs(buffer, seed)
            mine = inputs[rank]
            named = np.random.default_rng([seed, rank]).random(mine.topk_idx.shape) < 0.5
            sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
            given = np.where(named, mine.topk_idx, -1)
            back = buffer.low_latency_combine(y[rank], given, mine.topk_weights, sent.handle, allow_multiple_reduction=False)
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=False, named=named)
            assert same_bits(np.asarray(back.x), wanted), seed
            _run_rounds(buffer, inputs, None, seed + 50, rank)


def check_experts_named_twice(comm: MPI.Intracomm) -> None:
    """A token gets a row for each choice, and the sum counts each row."""
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        for seed in range(4):
            inputs = _inputs(comm, seed)
            for r, theirs in enumerate(inputs):
                theirs.topk_idx[:] = np.random.default_rng([seed, r]).integers(-1, 3, theirs.topk_idx.shape)
            _run_rounds(buffer, inputs, None, seed, rank)


def check_experts_without_room(comm: MPI.Intracomm) -> None:
    """Rows that do not fit are dropped, add nothing to sums, and cause one warning."""
    rank, experts = comm.Get_rank(), 4 * comm.Get_size()
    with logged_warnings() as log, _buffer(comm) as buffer:
        inputs = _inputs(comm, 1)
        for theirs in inputs:
            theirs.topk_idx[:] = 0  # of up to 8 tokens, 4 times each; room for 8 of each rank
        y, mine = expert_outputs(buffer, 1), inputs[rank]
        arrived = NUM_TOPK * sum(len(theirs.topk_idx) for theirs in inputs)
        for _ in range(3):
            sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
            low_latency_oracle.check_dispatch(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts))
            for reduce_early in (True, False):
                back = buffer.low_latency_combine(
                    y[rank], mine.topk_idx, mine.topk_weights, sent.handle, allow_multiple_reduction=reduce_early
                )
                wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=reduce_early)
                assert same_bits(np.asarray(back.x), wanted), reduce_early
        buffer.synchronize()
        buffer.check()
    warnings = [line for line in log if "dropped" in line]
    assert len(warnings) == (rank == 0 and arrived > buffer.config.worst_recv_tokens), warnings
    for line in warnings:
        assert f"rank 0: low_latency_dispatch received {arrived} rows for local expert 0" in line, line


def check_rows_past_worst(comm: MPI.Intracomm) -> None:
    """Rows past num_worst_tokens cause one warning."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with logged_warnings() as log, make_buffer(comm, num_experts=4 * ranks) as buffer:
        x = np.zeros((8, 32), np.float32)
        idx = np.tile(np.arange(4), (8, 1))  # all go to rank 0
        for _ in range(3):
            sent = buffer.dispatch(x, idx, num_worst_tokens=7)
        assert np.asarray(sent.num_recv_tokens)[0] == (8 * ranks if rank == 0 else 0)
        buffer.synchronize()
        buffer.check()
    warnings = [line for line in log if "dropped" in line]
    assert len(warnings) == (rank == 0), warnings
    for line in warnings:
        assert f"rank 0: dispatch received {8 * ranks} rows; num_worst_tokens=7" in line, line


def check_other_choices_are_refused(comm: MPI.Intracomm) -> None:
    """Host only: combine refuses other experts than those of the dispatch."""
    experts = 4 * comm.Get_size()
    with _buffer(comm) as buffer:
        x, weights = np.zeros((2, HIDDEN), ml_dtypes.bfloat16), np.ones((2, NUM_TOPK), np.float32)
        idx = np.array([[0, 1, 2, -1], [3, 2, 1, 0]])
        sent = buffer.low_latency_dispatch(x, idx, use_fp8=False)
        y = np.zeros((4, buffer.config.worst_recv_tokens, HIDDEN), ml_dtypes.bfloat16)

        def combine(token: int, choice: int, value: Any, **how: Any) -> Any:
            given = idx.copy()
            given[token, choice] = value
            return buffer.low_latency_combine(y, given, weights, sent.handle, **how)

        for value, token, choice in ((2, 0, 0), (1, 0, 3), (experts, 1, 1), (-1, 1, 2)):
            with raises(EPInputError, f"topk_idx[{token}, {choice}]={value}; expected {idx[token, choice]}"):
                combine(token, choice, value)
        with raises(EPInputError, "topk_idx[1, 0]=1"):
            combine(1, 0, 1, allow_multiple_reduction=False)
        combine(1, 2, -1, allow_multiple_reduction=False)


if __name__ == "__main__":
    main(__name__)
