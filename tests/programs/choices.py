"""Low-latency calls whose choices of experts are unusual: named twice, too often, or not named to combine any more."""

from __future__ import annotations

import logging
from typing import Any

import low_latency_oracle
import ml_dtypes
import numpy as np
import oracle
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, raises, same_bits

from deepep_rt import Buffer, EPInputError

HIDDEN, NUM_TOPK, MAX_TOKENS = 256, 4, 8


class _Log(logging.Handler):
    """The warnings of deepep_rt while it is in use."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("deepep_rt").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("deepep_rt").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


def _buffer(comm: MPI.Intracomm, experts: int) -> Buffer:
    sizes = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_max_tokens_per_rank=MAX_TOKENS, num_experts=experts, dtype="bfloat16")
    return make_buffer(comm, low_latency=True, **sizes)


def _inputs(comm: MPI.Intracomm, seed: int, experts: int) -> list[oracle.RankInputs]:
    sizes = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=experts, dtype="bfloat16", skip_probability=0.2)
    return inputs_of_all(comm, seed, lambda rank: (8, 5, 0, 3)[rank % 4], **sizes)


def _outputs(buffer: Buffer, seed: int) -> list[np.ndarray]:
    c = buffer.config
    shape = (c.num_local_experts, c.num_max_recv_tokens, c.hidden)
    return [low_latency_oracle.outputs(seed, rank, shape) for rank in range(c.num_ranks)]


def _check_rounds(buffer: Buffer, inputs: list[oracle.RankInputs], named: np.ndarray | None, seed: int, rank: int) -> None:
    """Dispatch, and combine in both ways, with weights known early and late; `named`: of this rank, as in the oracle."""
    mine, experts, y = inputs[rank], buffer.config.num_experts, _outputs(buffer, seed)
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


def check_choices_left_out(comm: MPI.Intracomm) -> None:
    """What combine names no more is not added; rows that come all the same do not turn up in a later call."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    with _buffer(comm, experts) as buffer:
        for seed in range(6):
            inputs = _inputs(comm, seed, experts)
            rng = np.random.default_rng([seed, rank])
            kept = rng.random((len(inputs[rank].topk_idx), ranks)) < (0.5, 0.0)[seed % 2]
            home = inputs[rank].topk_idx // 4
            _check_rounds(buffer, inputs, (home >= 0) & np.take_along_axis(kept, np.maximum(home, 0), 1), seed, rank)
            _check_rounds(buffer, inputs, None, seed + 50, rank)


def check_single_choices_left_out(comm: MPI.Intracomm) -> None:
    """Without the experts' ranks adding up, each choice counts for itself."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    with _buffer(comm, experts) as buffer:
        for seed in range(4):
            inputs, y = _inputs(comm, seed, experts), _outputs(buffer, seed)
            mine = inputs[rank]
            named = np.random.default_rng([seed, rank]).random(mine.topk_idx.shape) < 0.5
            sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
            given = np.where(named, mine.topk_idx, -1)
            back = buffer.low_latency_combine(y[rank], given, mine.topk_weights, sent.handle, allow_multiple_reduction=False)
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=False, named=named)
            assert same_bits(np.asarray(back.x), wanted), seed
            _check_rounds(buffer, inputs, None, seed + 50, rank)


def check_experts_named_twice(comm: MPI.Intracomm) -> None:
    """A token gets a row for each choice, and each counts in the sum."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    with _buffer(comm, experts) as buffer:
        for seed in range(4):
            inputs = _inputs(comm, seed, experts)
            for r, theirs in enumerate(inputs):
                theirs.topk_idx[:] = np.random.default_rng([seed, r]).integers(-1, 3, theirs.topk_idx.shape)
            _check_rounds(buffer, inputs, None, seed, rank)


def check_experts_without_room(comm: MPI.Intracomm) -> None:
    """Rows past the room of an expert are dropped, count as nothing, and are warned of once."""
    rank, experts = comm.Get_rank(), 4 * comm.Get_size()
    with _Log() as log, _buffer(comm, experts) as buffer:
        inputs = _inputs(comm, 1, experts)
        for theirs in inputs:
            theirs.topk_idx[:] = 0  # of up to 8 tokens, 4 times each; room for 8 of each rank
        y, mine = _outputs(buffer, 1), inputs[rank]
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
    told = [line for line in log if "dropped" in line]
    assert len(told) == (rank == 0 and arrived > buffer.config.num_max_recv_tokens), told
    for line in told:
        assert f"rank 0: low_latency_dispatch received {arrived} rows for local expert 0" in line, line


def check_rows_past_worst(comm: MPI.Intracomm) -> None:
    """Rows past num_worst_tokens are warned of once."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with _Log() as log, make_buffer(comm, num_experts=4 * ranks) as buffer:
        x = np.zeros((8, 32), np.float32)
        idx = np.tile(np.arange(4), (8, 1))  # all go to rank 0
        for _ in range(3):
            sent = buffer.dispatch(x, idx, num_worst_tokens=7)
        assert np.asarray(sent.num_recv_tokens)[0] == (8 * ranks if rank == 0 else 0)
        buffer.synchronize()
        buffer.check()
    told = [line for line in log if "dropped" in line]
    assert len(told) == (rank == 0), told
    for line in told:
        assert f"rank 0: dispatch received {8 * ranks} rows; num_worst_tokens=7" in line, line


def check_other_choices_are_refused(comm: MPI.Intracomm) -> None:
    """Host only: combine names the experts that the dispatch got, or none."""
    experts = 4 * comm.Get_size()
    with _buffer(comm, experts) as buffer:
        x, weights = np.zeros((2, HIDDEN), ml_dtypes.bfloat16), np.ones((2, NUM_TOPK), np.float32)
        idx = np.array([[0, 1, 2, -1], [3, 2, 1, 0]])
        sent = buffer.low_latency_dispatch(x, idx, use_fp8=False)
        y = np.zeros((4, buffer.config.num_max_recv_tokens, HIDDEN), ml_dtypes.bfloat16)

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
