"""Ranks that a program masks and unmasks. `lost_ranks` runs with it.

Checks that return at once unless `spmd.backend` is "host" use internals of the host backend. The others run on GPUs too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import oracle
import spmd
from low_latency_rounds import Batch, make_low_latency_buffer, make_low_latency_inputs
from masked_steps import (
    buffer_that_some_leave,
    run_all_steps,
    run_step,
    set_masks,
    supported_reduction,
    unmask_all,
)
from mpi4py import MPI
from spmd import idle_barrier, main, raises

from deepep_rt import EPInputError


def check_masked_by_hand(comm: MPI.Intracomm) -> None:
    """Mask the first rank, the last, and both. All ranks make the same calls, masked ranks alone. Then unmask them."""
    last, all_ranks = comm.Get_size() - 1, range(comm.Get_size())
    with make_low_latency_buffer(comm) as buffer:
        assert buffer.query_masked_ranks() == []
        run_all_steps(comm, buffer, 100, all_ranks)
        for number, masked in enumerate(({last}, {0}, {0, last})):
            live = set_masks(comm, buffer, masked, True)
            assert buffer.query_masked_ranks() == sorted(set(all_ranks) - set(live))
            run_all_steps(comm, buffer, 110 + 20 * number, live)
            live = set_masks(comm, buffer, masked, False)
            assert buffer.query_masked_ranks() == []
            run_all_steps(comm, buffer, 120 + 20 * number, live)


def check_masked_in_fp8_and_with_hooks(comm: MPI.Intracomm) -> None:
    last = comm.Get_size() - 1
    with make_low_latency_buffer(comm) as buffer:
        for masked in (True, False):
            live = set_masks(comm, buffer, {last}, masked)
            batch = Batch(comm, buffer, 200)
            sent = batch.dispatch(use_fp8=True, return_recv_hook=True)
            sent.hook()
            back = batch.combine(sent, return_recv_hook=True)
            back.hook()
            batch.check(sent, live, use_fp8=True)
            batch.check_sum(back, live=live)


def check_masked_rank_need_not_call(comm: MPI.Intracomm) -> None:
    """It makes no low-latency calls. Throughput calls ignore masks, so all ranks make them."""
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    with buffer_that_some_leave(comm) as buffer:
        live = set_masks(comm, buffer, {last}, True)
        for seed in range(300, 303):
            if rank != last:
                run_all_steps(comm, buffer, 4 * seed, live)
            inputs = make_low_latency_inputs(comm, seed)
            sent = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)
            oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, buffer.config.num_experts))
            assert buffer.combine(sent.recv_x, sent.handle).x.shape == inputs[rank].x.shape


def check_handles_from_before_a_mask(comm: MPI.Intracomm) -> None:
    """And handles from before an unmask: rows travel between ranks that took part in the dispatch and take part in the combine."""
    last, all_ranks = comm.Get_size() - 1, range(comm.Get_size())
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 400, lambda rank: 9)
        before = [batch.dispatch(early) for early in (True, False)]
        live = set_masks(comm, buffer, {last}, True)
        during = [batch.dispatch(early) for early in (True, False)]

        def check(sent: Any, sources: Collection[int], answering: Collection[int]) -> None:
            for reduce_early in sorted({True, supported_reduction(False)}):
                batch.check_sum(batch.combine(sent, reduce_early), reduce_early, sources, answering)

        for sent in before:
            check(sent, all_ranks, live)
        for sent in during:
            check(sent, live, live)
        set_masks(comm, buffer, {last}, False)
        for sent in before:
            check(sent, all_ranks, all_ranks)
        for sent in during:
            check(sent, live, live)
        run_all_steps(comm, buffer, 410, all_ranks)


def check_wrong_ranks_to_mask(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        for call in (buffer.mask_rank, buffer.unmask_rank):
            for wrong in (rank, -1, ranks, True, False, float(1 - min(rank, 1)), "1", None):
                with raises(EPInputError, repr(wrong)):
                    call(wrong)
        assert buffer.query_masked_ranks() == []
        run_step(comm, buffer, 1000, range(ranks))
    with spmd.make_buffer(comm, num_experts=4 * ranks) as buffer:
        for call in (lambda: buffer.mask_rank(1), lambda: buffer.unmask_rank(1), buffer.query_masked_ranks):
            with raises(EPInputError, "low_latency=True"):
                call()


def check_masks_do_not_change_while_hooks_are_open(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    peer = (rank + 1) % ranks
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 1200)
        sent = batch.dispatch(return_recv_hook=True)
        for call in (buffer.mask_rank, buffer.unmask_rank):
            with raises(EPInputError, "hooks of low_latency_dispatch are open"):
                call(peer)
        sent.hook()
        back = batch.combine(sent, return_recv_hook=True)
        with raises(EPInputError, "hooks of low_latency_combine are open"):
            buffer.mask_rank(peer)
        back.hook()
        assert buffer.query_masked_ranks() == []
        batch.check_sum(back)


def check_unmasking_after_different_calls(comm: MPI.Intracomm) -> None:
    """Host only: a rank that missed calls raises, and the other ranks raise or mask it. No rank matches different calls."""
    if spmd.backend != "host":
        return
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with buffer_that_some_leave(comm, on_timeout="mask") as buffer:
        live = set_masks(comm, buffer, {last}, True)
        if rank != last:
            run_all_steps(comm, buffer, 1400, live)
        unmask_all(comm, buffer)
        if rank == last:
            with raises(EPInputError, "low-latency call 1 of this rank meets call 9", "expected the same number of calls"):
                Batch(comm, buffer, 1404).dispatch()
        else:
            run_step(comm, buffer, 1404, all_ranks[:-1])
            assert buffer.query_masked_ranks() == [last]
        idle_barrier(comm)


if __name__ == "__main__":
    main(__name__, "lost_ranks")
