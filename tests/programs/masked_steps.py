"""Steps of low-latency calls on Buffers that mask ranks, for the programs that test them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import low_latency_oracle
import numpy as np
import oracle
import spmd
from limits import seconds
from low_latency_rounds import assert_same, expert_outputs, make_low_latency_buffer, make_low_latency_inputs
from mpi4py import MPI
from spmd import idle_barrier

from deepep_rt import Buffer

TIMEOUT_S = seconds(2.0)
VARIANTS = tuple(dict(early=early, reduce_early=reduce_early) for early in (True, False) for reduce_early in (True, False))


def supported_reduction(reduce_early: bool) -> bool:
    """GPUs can exclude ranks only if experts' ranks add rows up."""
    return reduce_early or spmd.backend != "host"


def dispatch(buffer: Buffer, mine: oracle.RankInputs, early: bool = True, **options: Any) -> Any:
    """Make a low-latency dispatch of this rank's inputs; `early`: with the weights."""
    weights = mine.topk_weights if early else None
    return buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=weights, **{"use_fp8": False, **options})


def combine(buffer: Buffer, mine: oracle.RankInputs, y: np.ndarray, sent: Any, reduce_early: bool = True, **options: Any) -> Any:
    """Make the combine that follows `dispatch`."""
    return buffer.low_latency_combine(
        y, mine.topk_idx, mine.topk_weights, sent.handle, allow_multiple_reduction=reduce_early, **options
    )


def run_step(
    comm: MPI.Intracomm, buffer: Buffer, seed: int, live: Collection[int], *, early: bool = True, reduce_early: bool = True
) -> None:
    """Dispatch and combine, and compare with the oracle; `live`: the ranks that this rank exchanges rows with."""
    rank, experts, reduce_early = comm.Get_rank(), buffer.config.num_experts, supported_reduction(reduce_early)
    inputs, y = make_low_latency_inputs(comm, seed, lambda rank: (5, 16, 0, 3)[(rank + seed) % 4]), expert_outputs(buffer, seed)
    sent = dispatch(buffer, inputs[rank], early)
    back = combine(buffer, inputs[rank], y[rank], sent, reduce_early)
    low_latency_oracle.check_dispatch(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts, live=live))
    wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=reduce_early, live=live)
    assert_same(f"step {seed}", back.x, wanted)


def run_all_steps(comm: MPI.Intracomm, buffer: Buffer, seed: int, live: Collection[int]) -> None:
    """Run a step of each variant."""
    for number, variant in enumerate(VARIANTS):
        run_step(comm, buffer, seed + number, live, **variant)


def set_masks(comm: MPI.Intracomm, buffer: Buffer, ranks: Collection[int], masked: bool) -> list[int]:
    """Mask or unmask some ranks: each of them is left alone, and the other ranks stay together.

    Returns:
        The ranks that this rank exchanges rows with from now on.
    """
    rank = comm.Get_rank()
    all_ranks = range(comm.Get_size())
    live = [rank] if rank in ranks else [peer for peer in all_ranks if peer not in ranks]
    idle_barrier(comm)
    for peer in set(all_ranks) - set(live):
        (buffer.mask_rank if masked else buffer.unmask_rank)(peer)
    idle_barrier(comm)
    return live if masked else list(all_ranks)


def unmask_all(comm: MPI.Intracomm, buffer: Buffer) -> None:
    """Unmask every rank on every rank."""
    idle_barrier(comm)
    for peer in buffer.query_masked_ranks():
        buffer.unmask_rank(peer)
    assert buffer.query_masked_ranks() == []
    idle_barrier(comm)


@contextmanager
def buffer_that_some_leave(comm: MPI.Intracomm, **settings: Any) -> Iterator[Buffer]:
    """Make a Buffer in which some ranks stop making calls."""
    buffer = make_low_latency_buffer(comm, timeout_s=TIMEOUT_S, **settings)
    with buffer:
        yield buffer
    idle_barrier(comm)
