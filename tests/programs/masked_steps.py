"""Steps of low-latency calls on Buffers that mask ranks, for the programs that test them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import spmd
from limits import seconds
from low_latency_rounds import Batch, make_low_latency_buffer
from mpi4py import MPI
from spmd import idle_barrier

from deepep_rt import Buffer

TIMEOUT_S = seconds(2.0)
VARIANTS = tuple(dict(early=early, reduce_early=reduce_early) for early in (True, False) for reduce_early in (True, False))


def supported_reduction(reduce_early: bool) -> bool:
    """GPUs can exclude ranks only if experts' ranks add rows up."""
    return reduce_early or spmd.backend != "host"


def run_step(
    comm: MPI.Intracomm, buffer: Buffer, seed: int, live: Collection[int], *, early: bool = True, reduce_early: bool = True
) -> None:
    """Dispatch and combine, and compare with the oracle; `live`: the ranks that this rank exchanges rows with."""
    reduce_early = supported_reduction(reduce_early)
    batch = Batch(comm, buffer, seed, lambda rank: (5, 16, 0, 3)[(rank + seed) % 4])
    sent = batch.dispatch(early)
    back = batch.combine(sent, reduce_early)
    batch.check(sent, live)
    batch.check_sum(back, reduce_early, live)


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
