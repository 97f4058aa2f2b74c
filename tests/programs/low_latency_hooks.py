"""Hooks of the low-latency calls: their order, their limit, and calls between a call and its hook."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import spmd
from low_latency_rounds import (
    NUM_TOPK,
    Batch,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
    run_checked_round,
)
from mpi4py import MPI
from scenario_table import FORMATS
from spmd import main, raises, same_bits

from deepep_rt import EPInputError


def check_hooks(comm: MPI.Intracomm) -> None:
    """With two open calls of each kind, each hook brings the result of its own call."""
    with make_low_latency_buffer(comm) as buffer:
        batches = [Batch(comm, buffer, seed) for seed in (17, 18)]
        for options in FORMATS[:2]:
            sent = [
                one.dispatch(early, return_recv_hook=True, **options) for one, early in zip(batches, (True, False), strict=True)
            ]
            for result, one in zip(sent, batches, strict=True):
                result.hook()
                one.check(result, **options)
            for reduce_early in (True, False):
                back = [
                    one.combine(result, reduce_early, return_recv_hook=True) for one, result in zip(batches, sent, strict=True)
                ]
                for result in back:
                    result.hook()
                for result, one in zip(back, batches, strict=True):
                    one.check_sum(result, reduce_early)


def check_hooks_that_were_lost(comm: MPI.Intracomm) -> None:
    """Rank 0 loses a hook, as after an exception. The next call, or a later hook, runs it."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 1)
        mine, y = inputs[rank], expert_outputs(buffer, 1)
        given = mine.x, mine.topk_idx
        for seed in range(3):
            sent = buffer.low_latency_dispatch(*given, use_fp8=False, return_recv_hook=True)
            if rank:
                sent.hook()
            del sent
            run_checked_round(comm, buffer, inputs, seed)
        sent = buffer.low_latency_dispatch(*given, topk_weights=mine.topk_weights, use_fp8=False)
        hooks = [
            buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, sent.handle, return_recv_hook=True).hook
            for _ in range(2)
        ]
        if rank:
            hooks[0]()
        del hooks[0]
        hooks[0]()
        run_checked_round(comm, buffer, inputs, 3)


def check_an_interrupted_low_latency_call(comm: MPI.Intracomm) -> None:
    """Host only: an exception interrupts rank 0 before it receives rows. The next call discards these rows, and the Buffer stays usable."""
    if spmd.backend != "host":
        return

    def fail(*_: Any) -> None:
        raise InterruptedError("between headers and rows")

    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 4, lambda rank: 3 if rank else 0)  # so few rows that MPI sends them eagerly
        for one in inputs:
            one.topk_idx[:] = np.arange(NUM_TOPK)  # experts of rank 0
        given = inputs[rank].x, inputs[rank].topk_idx
        if rank == 0:
            buffer._backend._channel.exchange_rows = fail
            with raises(InterruptedError):
                buffer.low_latency_dispatch(*given, use_fp8=False)
            del buffer._backend._channel.exchange_rows
        else:
            buffer.low_latency_dispatch(*given, use_fp8=False)
        run_checked_round(comm, buffer, make_low_latency_inputs(comm, 5), 5)


def check_order_of_hooks(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 19)

        def dispatch(hook: bool) -> Any:
            return batch.dispatch(early=False, return_recv_hook=hook)

        def combine(sent: Any, hook: bool) -> Any:
            return batch.combine(sent, return_recv_hook=hook)

        for _ in range(2):
            first, second = dispatch(True), dispatch(True)
            with raises(EPInputError, "2 open hooks", "num_slots=2"):
                dispatch(True)
            with raises(EPInputError, "low_latency_dispatch", "hooks are open"):
                dispatch(False)
            with raises(EPInputError, "order"):
                second.hook()
            with raises(EPInputError, "handle", "hook", "not called yet"):
                combine(first, False)
            first.hook()
            with raises(EPInputError, "called already"):
                first.hook()
            one = combine(first, True)  # hooks of combine have their own limit
            third = dispatch(True)
            two = combine(first, True)
            with raises(EPInputError, "low_latency_combine", "2 open hooks"):
                combine(first, True)
            with raises(EPInputError, "low_latency_combine", "hooks are open"):
                combine(first, False)
            with raises(EPInputError, "order"):
                two.hook()
            one.hook()
            two.hook()
            with raises(EPInputError, "order"):
                third.hook()
            second.hook()
            third.hook()
            for result in (first, second, third):
                batch.check(result)
                batch.check_sum(combine(result, False))
            batch.check_sum(one)
            batch.check_sum(two)
            run_checked_round(comm, buffer, batch.inputs, 19)


def check_more_slots(comm: MPI.Intracomm) -> None:
    for num_slots in (1, 3):
        with make_low_latency_buffer(comm, num_slots=num_slots) as buffer:
            batches = [Batch(comm, buffer, 20 + number) for number in range(num_slots)]
            sent = [one.dispatch(early=False, return_recv_hook=True) for one in batches]
            with raises(EPInputError, "open hooks", f"num_slots={num_slots}"):
                batches[0].dispatch(early=False, return_recv_hook=True)
            for result in sent:
                result.hook()
            for result, one in zip(sent, batches, strict=True):
                one.check(result)


def check_between_throughput_calls(comm: MPI.Intracomm) -> None:
    """Throughput calls on the same Buffer, also between a low-latency call and its hook."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        experts = buffer.config.num_experts
        for seed in range(30, 33):
            batch, others = Batch(comm, buffer, seed), make_low_latency_inputs(comm, seed + 10)
            mine, other = batch.mine, others[rank]
            before = buffer.dispatch(other.x, other.topk_idx, other.topk_weights)
            sent = batch.dispatch(early=False, return_recv_hook=True)
            between = buffer.dispatch(other.x, other.topk_idx, other.topk_weights)
            sent.hook()
            back = batch.combine(sent, return_recv_hook=True)
            summed = [buffer.combine(result.recv_x, result.handle).x for result in (before, between)]
            back.hook()
            batch.check(sent)
            batch.check_sum(back)
            expected = oracle.expected_dispatch(rank, others, experts)
            for result in (before, between):
                oracle.check_dispatch(result, expected)
            assert same_bits(*summed)
            with raises(EPInputError, "LowLatencyHandle", "DispatchResult"):
                buffer.combine(before.recv_x, sent.handle)
            with raises(EPInputError, "DispatchHandle", "LowLatencyDispatchResult"):
                buffer.low_latency_combine(batch.y, mine.topk_idx, mine.topk_weights, before.handle)


if __name__ == "__main__":
    main(__name__)
