"""A round of throughput calls that is compared with the oracle."""

from __future__ import annotations

import oracle
from mpi4py import MPI
from spmd import inputs_of_all

from deepep_rt import Buffer


def run_checked_round(comm: MPI.Intracomm, buffer: Buffer, seed: int) -> None:
    """Dispatch and combine, with different numbers of tokens on all ranks, and compare the results with the oracle."""
    num_experts, rank = buffer.config.num_experts, comm.Get_rank()
    inputs = inputs_of_all(comm, seed, lambda rank: 4 + rank, hidden=32, num_topk=4, num_experts=num_experts)
    mine = inputs[rank]
    sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, num_experts))
    rows = [oracle.expected_dispatch(r, inputs, num_experts).x for r in range(len(inputs))]
    back = buffer.combine(sent.recv_x, sent.handle)
    oracle.check_sums(back, rank, inputs, rows, num_experts, node_size=buffer.config.node_size)
