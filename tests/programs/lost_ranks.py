"""Ranks that a time-out masks: they stop, are slow, or stop in the middle of a call.

Checks that return at once unless `spmd.backend` is "host" use internals of the host backend. The others run on GPUs too.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import oracle
import spmd
from expect import logged_warnings
from limits import seconds
from low_latency_rounds import Batch, make_low_latency_buffer, make_low_latency_inputs
from masked_steps import (
    TIMEOUT_S,
    VARIANTS,
    buffer_that_some_leave,
    run_all_steps,
    run_step,
    set_masks,
    supported_reduction,
    unmask_all,
)
from mpi4py import MPI
from scenario_table import choose
from spmd import idle_barrier, main, raises

from deepep_rt import Buffer, EPTimeoutError

STEPS_AFTER = 40


def check_rank_that_stops(comm: MPI.Intracomm) -> None:
    """The other ranks mask it, log this once, and go on without another wait."""
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with buffer_that_some_leave(comm, on_timeout="mask") as buffer, logged_warnings() as warnings:
        for seed in range(500, 505):
            run_step(comm, buffer, seed, all_ranks, **VARIANTS[seed % 4])
        assert buffer.query_masked_ranks() == []
        if rank != last:
            start = time.monotonic()
            run_step(comm, buffer, 505, all_ranks[:-1])
            waited_s = time.monotonic() - start
            assert TIMEOUT_S * 0.9 <= waited_s < TIMEOUT_S + seconds(5), waited_s
            assert buffer.query_masked_ranks() == [last]
            for seed in range(506, 506 + STEPS_AFTER):
                run_step(comm, buffer, seed, all_ranks[:-1], **VARIANTS[seed % 4])
            assert buffer.query_masked_ranks() == [last]
            buffer.synchronize()
            if spmd.backend == "host":
                assert len(warnings) == 1, warnings
                assert f"waited {TIMEOUT_S:g} s for rank {last}" in warnings[0], warnings
        idle_barrier(comm)


def check_rank_silent_before_combine(comm: MPI.Intracomm) -> None:
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    for number, variant in enumerate((VARIANTS[0], VARIANTS[3])):
        with buffer_that_some_leave(comm, on_timeout="mask") as buffer:
            batch, early = Batch(comm, buffer, 700 + number, lambda rank: 9), supported_reduction(variant["reduce_early"])
            sent = batch.dispatch(variant["early"])
            batch.check(sent)
            if rank != last:
                batch.check_sum(batch.combine(sent, early), early, answering=all_ranks[:-1])
                assert buffer.query_masked_ranks() == [last]
                run_all_steps(comm, buffer, 710, all_ranks[:-1])
            idle_barrier(comm)


def check_slow_rank_that_returns(comm: MPI.Intracomm) -> None:
    """Later calls must discard its late messages. Its own results are not checked, because they depend on timing."""
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with make_low_latency_buffer(comm, timeout_s=TIMEOUT_S, on_timeout="mask") as buffer:
        for seed in (800, 820):
            run_all_steps(comm, buffer, seed, all_ranks)
            if rank == last:
                time.sleep(1.5 * TIMEOUT_S)
                for number, variant in enumerate(VARIANTS):
                    batch = Batch(comm, buffer, seed + 4 + number, lambda rank: 9)
                    batch.combine(batch.dispatch(variant["early"]), supported_reduction(variant["reduce_early"]))
            else:
                run_all_steps(comm, buffer, seed + 4, all_ranks[:-1])
                assert buffer.query_masked_ranks() == [last]
            buffer.synchronize()
            unmask_all(comm, buffer)
            run_all_steps(comm, buffer, seed + 8, all_ranks)


def check_late_messages_of_every_kind(comm: MPI.Intracomm) -> None:
    """A slow rank that masks no peer, and large messages: it receives no rows, and all of its own rows are late."""
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    settings = dict(hidden=4096, num_max_tokens_per_rank=20)  # 20 rows are beyond what MPI sends eagerly
    with make_low_latency_buffer(comm, timeout_s=TIMEOUT_S, on_timeout="mask", **settings) as buffer:
        batch = Batch(comm, buffer, 900, lambda rank: 20, changed=choose(lambda *_: np.arange(4)))  # experts of rank 0
        for _ in range(2):
            for live in (all_ranks, all_ranks[:-1], all_ranks):
                is_slow = rank == last and len(live) < len(all_ranks)
                if is_slow:
                    time.sleep(1.5 * TIMEOUT_S)
                sent = batch.dispatch(early=True)
                if not is_slow:
                    batch.check(sent, live)
                    if rank != last:
                        assert buffer.query_masked_ranks() == ([] if live is all_ranks else [last])
                buffer.synchronize()
                if live is not all_ranks:
                    unmask_all(comm, buffer)
                    back = batch.combine(sent, reduce_early=False)  # of the call with a lost rank
                    if rank != last:
                        batch.check_sum(back, False, live)


def check_silent_ranks_raise_by_default(comm: MPI.Intracomm) -> None:
    """A silent rank breaks a Buffer with on_timeout="raise", also if the program has masked another rank."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 2:
        return
    silent, masked = ranks - 1, 0
    with buffer_that_some_leave(comm) as buffer:
        live = set_masks(comm, buffer, {masked}, True)
        run_step(comm, buffer, 1100, live)
        if rank not in (silent, masked):
            batch = Batch(comm, buffer, 1101)
            with raises(EPTimeoutError, f"rank {silent}") as caught:
                batch.dispatch()
                buffer.synchronize()
            assert caught.error.peer == silent
            assert buffer.query_masked_ranks() == [masked]
            with raises(EPTimeoutError, "broken" if spmd.backend == "host" else "cannot be used any more"):
                batch.dispatch()
        idle_barrier(comm)


def _stop_after_headers(buffer: Buffer, call: Any) -> None:
    """Begin a call, and stop it when its headers are on their way."""

    def fail(*_: Any) -> None:
        raise InterruptedError("between headers and rows")

    backend: Any = buffer._backend
    backend._channel._wait = fail
    with raises(InterruptedError):
        call()


def _check_survivors(comm: MPI.Intracomm, receivers: Collection[int], topk_idx: Any) -> None:
    """The last rank stops after its headers, which reach some ranks, and before its rows. The other ranks go on together."""
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with buffer_that_some_leave(comm, on_timeout="mask") as buffer:
        run_step(comm, buffer, 1200, all_ranks)
        batch, live = Batch(comm, buffer, 1201, lambda rank: 9), all_ranks[:-1]
        batch.inputs[last].topk_idx[:] = topk_idx
        if rank == last:
            for peer in set(live) - set(receivers):
                buffer.mask_rank(np.int64(peer))
            _stop_after_headers(buffer, batch.dispatch)
        else:
            sent = batch.dispatch()
            batch.check(sent, live)
            for reduce_early in sorted({True, supported_reduction(False)}):
                batch.check_sum(batch.combine(sent, reduce_early), reduce_early, live)
            assert buffer.query_masked_ranks() == [last]
            for seed in range(1210, 1220):
                run_step(comm, buffer, seed, live, **VARIANTS[seed % 4])
            assert buffer.query_masked_ranks() == [last]
        idle_barrier(comm)


def check_headers_without_rows(comm: MPI.Intracomm) -> None:
    """All ranks wait for its rows; or one rank waits for them, and the others wait for that rank in the next call."""
    if spmd.backend != "host":
        return
    all_ranks = range(comm.Get_size())
    experts = 4 * comm.Get_size()
    _check_survivors(comm, all_ranks, np.arange(36).reshape(9, 4) % experts)
    _check_survivors(comm, all_ranks, np.arange(4))  # experts of rank 0


def check_headers_that_reach_one_rank(comm: MPI.Intracomm) -> None:
    """This rank waits for the rows, and the other ranks wait for headers."""
    if spmd.backend != "host":
        return
    _check_survivors(comm, {0}, np.arange(4))
    _check_survivors(comm, {comm.Get_size() // 2}, np.arange(36).reshape(9, 4) % (4 * comm.Get_size()))


def check_headers_of_combine_without_rows(comm: MPI.Intracomm) -> None:
    if spmd.backend != "host":
        return
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    for number, variant in enumerate(VARIANTS[:3]):
        with buffer_that_some_leave(comm, on_timeout="mask") as buffer:
            batch, early = Batch(comm, buffer, 1250 + number, lambda rank: 9), supported_reduction(variant["reduce_early"])
            sent = batch.dispatch(variant["early"])
            if rank == last:
                _stop_after_headers(buffer, partial(batch.combine, sent, early))
            else:
                batch.check_sum(batch.combine(sent, early), early, answering=all_ranks[:-1])
                assert buffer.query_masked_ranks() == [last]
                run_all_steps(comm, buffer, 1260, all_ranks[:-1])
            idle_barrier(comm)


def check_throughput_calls_discard_old_headers(comm: MPI.Intracomm) -> None:
    """A rank that missed low-latency calls receives their headers in a throughput call."""
    if spmd.backend != "host":
        return
    rank, last, all_ranks = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with buffer_that_some_leave(comm, on_timeout="mask") as buffer:
        if rank != last:
            run_all_steps(comm, buffer, 1300, all_ranks[:-1])
        idle_barrier(comm)
        inputs = make_low_latency_inputs(comm, 1301)
        sent = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)
        oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, buffer.config.num_experts))
        idle_barrier(comm)


if __name__ == "__main__":
    main(__name__)
