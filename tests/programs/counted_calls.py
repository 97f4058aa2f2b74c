"""`Buffer.statistics`: rows, waits for a late rank, and files for the command line."""

from __future__ import annotations

import os
import tempfile
import time
import unittest.mock
from pathlib import Path

import numpy as np
import spmd
from limits import seconds
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, raises

from deepep_rt import Buffer, EPConfigError, EPDestroyedError, EPInputError, Statistics, _statistics_files
from deepep_rt.cli import slow_ranks
from deepep_rt.statistics import CALL_KINDS

LATE, LATE_S, NUM_CALLS = 1, seconds(0.03), 4
SIZES = dict(hidden=128, num_topk=2, dtype="bfloat16", low_latency=True)


class Calls:
    """Calls of all kinds with the same tokens."""

    def __init__(self, comm: MPI.Intracomm, buffer: Buffer) -> None:
        experts = buffer.config.num_experts
        sizes = dict(hidden=128, num_topk=2, num_experts=experts, skip_probability=0.1, dtype="bfloat16")
        self.inputs = inputs_of_all(comm, 3, lambda rank: 20 + rank, **sizes)
        self._buffer, self._mine = buffer, self.inputs[comm.Get_rank()]
        owner = [np.where(one.topk_idx >= 0, one.topk_idx // buffer.config.num_local_experts, -1) for one in self.inputs]
        ranks = range(comm.Get_size())
        self.rows = np.array([[(mine == rank).any(1).sum() for rank in ranks] for mine in owner])  # [source, destination]

    def make(self, kind: str) -> None:
        mine, config = self._mine, self._buffer.config
        if kind == "dispatch":
            self.sent = self._buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, expert_alignment=8)
        elif kind == "combine":
            self._buffer.combine(self.sent.recv_x, self.sent.handle)
        elif kind == "low_latency_dispatch":
            self.few = self._buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=mine.topk_weights, use_fp8=False)
        else:
            y = np.zeros((config.num_local_experts, config.worst_recv_tokens, config.hidden), mine.x.dtype)
            self._buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, self.few.handle)


def check_rows_and_waits(comm: MPI.Intracomm) -> None:
    """Each kind of call counts its own, and names the rank that is late."""
    rank, ranks = comm.Get_rank(), comm.Get_size()
    with make_buffer(comm, num_experts=4 * ranks, statistics=True, **SIZES) as buffer:
        calls = Calls(comm, buffer)
        for kind in CALL_KINDS:
            for _ in range(NUM_CALLS):
                time.sleep(LATE_S if rank == LATE else 0.0)
                calls.make(kind)
        buffer.synchronize()
        counted = buffer.statistics()
    sent, received = NUM_CALLS * calls.rows[rank].sum(), NUM_CALLS * calls.rows[:, rank].sum()
    for kind in CALL_KINDS:
        of_kind = getattr(counted, kind)
        moved = (of_kind.rows_sent, of_kind.rows_received)
        assert of_kind.calls == NUM_CALLS, kind
        assert moved == ((sent, received) if "dispatch" in kind else (received, sent)), (kind, moved)
        assert of_kind.bytes_sent == of_kind.rows_sent * 256, kind
        assert of_kind.bytes_received == of_kind.rows_received * 256, kind
        others = [wait for peer, wait in enumerate(of_kind.wait_s) if peer not in (rank, LATE)]
        assert of_kind.wait_s[rank] == 0
        if rank != LATE:
            assert of_kind.wait_s[LATE] > 0.7 * NUM_CALLS * LATE_S, (kind, of_kind.wait_s)
            assert all(wait < of_kind.wait_s[LATE] / 2 for wait in others), (kind, of_kind.wait_s)
    chosen = np.concatenate([one.topk_idx.reshape(-1) for one in calls.inputs])
    mine = range(4 * rank, 4 * rank + 4)
    assert counted.rows_by_expert == tuple(int((chosen == expert).sum()) * 2 * NUM_CALLS for expert in mine)
    assert counted.rank == rank
    assert (counted.pool.capacity_bytes > 0) == (spmd.backend == "cuda")


def check_rows_of_choices(comm: MPI.Intracomm) -> None:
    """With reduce="topk", and with allow_multiple_reduction=False, each choice has a row."""
    rank, ranks = comm.Get_rank(), comm.Get_size()
    with make_buffer(comm, num_experts=4 * ranks, statistics=True, **SIZES) as buffer:
        calls = Calls(comm, buffer)
        mine, config = calls.inputs[rank], buffer.config
        sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout="expert")
        buffer.combine(sent.recv_x, sent.handle, reduce="topk")
        few = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
        y = np.zeros((4, config.worst_recv_tokens, config.hidden), mine.x.dtype)
        buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, few.handle, allow_multiple_reduction=False)
        buffer.synchronize()
        counted = buffer.statistics()
    chosen = np.concatenate([one.topk_idx.reshape(-1) for one in calls.inputs])
    for combine in (counted.combine, counted.low_latency_combine):
        assert combine.rows_sent == (chosen // 4 == rank).sum()
        assert combine.rows_received == (mine.topk_idx >= 0).sum()


def check_files(comm: MPI.Intracomm) -> None:
    """Each rank writes its file, all under one name, and the reader names the rank that is late."""
    rank, ranks = comm.Get_rank(), comm.Get_size()
    folder = Path(comm.bcast(tempfile.mkdtemp() if rank == 0 else None))
    with unittest.mock.patch.dict(os.environ, DEEPEP_RT_STATISTICS=str(folder)):
        buffer = make_buffer(comm, num_experts=4 * ranks, **SIZES)
    calls = Calls(comm, buffer)
    comm.Barrier()
    assert len(_statistics_files.read(folder)[0]) == ranks, "a new Buffer has a file at once"
    written = 0.0
    while written < 1.1:  # until the thread has written two more
        time.sleep(LATE_S if rank == LATE else 0.0)
        calls.make("dispatch")
        snapshots, unknown = _statistics_files.read(folder)
        written = comm.allreduce(min(snapshot.now.seconds for snapshot in snapshots), MPI.MIN)
    assert unknown == []
    assert len({snapshot.buffer for snapshot in snapshots}) == 1
    rates = [slow_ranks.rates_of(snapshot, time.time()) for snapshot in snapshots]
    verdict = slow_ranks.judge(rates, ranks)
    assert [slow for slow, _ in verdict.slow] == [LATE], str(verdict)
    buffer.destroy()
    comm.Barrier()
    assert [snapshot.has_ended for snapshot in _statistics_files.read(folder)[0]] == [True] * ranks


def check_errors(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_buffer(comm, num_experts=4 * ranks) as buffer, raises(EPInputError, "statistics=False", "DEEPEP_RT_STATISTICS=1"):
        buffer.statistics()
    with raises(EPDestroyedError, "destroyed"):
        buffer.statistics()
    with raises(EPConfigError, "statistics", "rank 0 True", f"rank {ranks - 1} False"):
        make_buffer(comm, num_experts=4 * ranks, statistics=rank == 0)
    with make_buffer(comm, num_experts=4 * ranks, statistics=True) as buffer:
        assert isinstance(buffer.statistics(), Statistics)


if __name__ == "__main__":
    main(__name__)
