"""Buffers that sleep and wake: `Buffer.sleep`. On GPUs, their memory is CUDA's virtual memory."""

from __future__ import annotations

import time
import unittest.mock
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI
from spmd import TIMEOUT_S, idle_barrier, main, make_buffer, raises
from table import run_checked_round

from deepep_rt import EPAsleepError, EPDestroyedError, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.comm.timed_collectives import TimedCollectives


@contextmanager
def _buffer(comm: MPI.Intracomm, **settings: Any) -> Iterator[Any]:
    with make_buffer(comm, num_experts=4 * comm.Get_size(), **settings) as buffer:
        yield buffer


def _inputs(comm: MPI.Intracomm, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, comm.Get_rank()])
    return rng.standard_normal((7, 32), np.float32), rng.integers(0, 4 * comm.Get_size(), (7, 4))


def check_calls_while_it_sleeps(comm: MPI.Intracomm) -> None:
    x, idx = _inputs(comm)
    with _buffer(comm, statistics=True) as buffer:
        sent = buffer.dispatch(x, idx)
        step = buffer.prepare_throughput(x, sent.handle)
        assert not buffer.is_asleep
        buffer.sleep()
        assert buffer.is_asleep
        for call in (
            lambda: buffer.dispatch(x, idx),
            lambda: buffer.combine(sent.recv_x, sent.handle),
            step.dispatch,
            lambda: buffer.prepare_throughput(x, sent.handle),
            buffer.synchronize,
            buffer.check,
            buffer.copy_ceiling,
            buffer.sleep,
        ):
            with raises(EPAsleepError, "sleeps", "Call wake() on all ranks"):
                call()
        assert buffer.statistics().dispatch.calls == 1
        assert str(buffer.describe())
        assert buffer.backend in ("cuda", "host")
        assert buffer.num_sms > 0
        buffer.wake()
        assert not buffer.is_asleep
        with raises(EPInputError, "wake() of a Buffer that is awake"):
            buffer.wake()
        run_checked_round(comm, buffer, 1)


def check_it_goes_on_where_it_was(comm: MPI.Intracomm) -> None:
    """Handles and prepared calls stay, and so do results if the program asks for it."""
    x, idx = _inputs(comm)
    with _buffer(comm) as buffer:
        sent = buffer.dispatch(x, idx)
        step = buffer.prepare_throughput(x, sent.handle)
        wanted_rows, wanted = np.array(sent.recv_x), np.array(buffer.combine(sent.recv_x, sent.handle).x)
        for cycle in range(4):
            buffer.sleep(keep_results=True)
            idle_barrier(comm)
            buffer.wake()
            assert (np.asarray(sent.recv_x) == wanted_rows).all()
            again = (step.dispatch if cycle % 2 else lambda: buffer.dispatch(x, handle=sent.handle))()
            assert (np.asarray(again.recv_x) == wanted_rows).all(), cycle
            back = step.combine(again.recv_x) if cycle % 2 else buffer.combine(sent.recv_x, sent.handle)
            assert (np.asarray(back.x) == wanted).all(), cycle
            run_checked_round(comm, buffer, cycle)


def check_low_latency_calls(comm: MPI.Intracomm) -> None:
    x, idx = _inputs(comm)
    weights = np.full(idx.shape, 0.25, np.float32)
    with _buffer(comm, low_latency=True, dtype="bfloat16", hidden=128) as buffer:
        x = np.tile(x, 4).astype(buffer.config.dtype)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, return_recv_hook=True)
        with raises(EPInputError, "hooks of low_latency_dispatch are open"):
            buffer.sleep()
        sent.hook()
        first = np.array(buffer.low_latency_combine(sent.recv_x, idx, weights, sent.handle).x)
        for _ in range(3):
            buffer.sleep()
            buffer.wake()
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
            assert (np.asarray(buffer.low_latency_combine(sent.recv_x, idx, weights, sent.handle).x) == first).all()


def check_a_rank_that_does_something_else(comm: MPI.Intracomm) -> None:
    """All ranks hear of it at once."""
    x, idx = _inputs(comm)
    if comm.Get_size() == 1:
        return
    start, is_other = time.monotonic(), comm.Get_rank() == comm.Get_size() - 1
    buffer = make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s=TIMEOUT_S)
    run_checked_round(comm, buffer, 1)
    with raises(EPTimeoutError, "called sleep()" if is_other else f"rank {comm.Get_size() - 1}"):
        if is_other:
            buffer.dispatch(x, idx)
        else:
            buffer.sleep()
    buffer.destroy(in_touch=False)
    assert time.monotonic() - start < TIMEOUT_S
    with _buffer(comm) as other:
        run_checked_round(comm, other, 2)


def check_a_rank_that_does_not_come(comm: MPI.Intracomm) -> None:
    """To either. The Buffer sleeps on, and can be destroyed."""
    if comm.Get_size() == 1:
        return
    is_other = comm.Get_rank() == comm.Get_size() - 1
    for step in ("sleep", "wake"):
        buffer = make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s=1.0)
        if step == "wake":
            buffer.sleep()
        idle_barrier(comm)
        if not is_other:
            with raises(EPTimeoutError, step, f"rank {comm.Get_size() - 1}, which did not arrive"):
                getattr(buffer, step)()
            assert buffer.is_asleep == (step == "wake")
        idle_barrier(comm)
        buffer.destroy(in_touch=False)
        with raises(EPDestroyedError):
            buffer.is_asleep  # noqa: B018
    with _buffer(comm) as other:
        run_checked_round(comm, other, 2)


def check_it_ends_while_it_sleeps(comm: MPI.Intracomm) -> None:
    for _ in range(2):
        with _buffer(comm) as buffer:
            run_checked_round(comm, buffer, 1)
            buffer.sleep()
        with raises(EPDestroyedError):
            buffer.wake()


def check_an_interruption(comm: MPI.Intracomm) -> None:
    """Ctrl-C while it wakes up on one rank: it sleeps on there, and can be destroyed."""
    buffer = make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s=1.0)
    buffer.sleep()
    idle_barrier(comm)
    if comm.Get_rank() == 0:
        with raises(KeyboardInterrupt), unittest.mock.patch.object(TimedCollectives, "finish", side_effect=KeyboardInterrupt):
            buffer.wake()
        assert buffer.is_asleep
    else:
        with raises(EPTimeoutError, "rank 0"):
            buffer.wake()
    buffer.destroy(in_touch=False)
    with _buffer(comm) as other:
        run_checked_round(comm, other, 2)


def check_no_memory_to_keep_results(comm: MPI.Intracomm) -> None:
    """On one rank: all ranks stay awake, and say why."""
    x, idx = _inputs(comm)
    with _buffer(comm) as buffer:
        if buffer.backend == "host":
            return
        import torch

        from deepep_rt.cuda import local_heap

        sent = buffer.dispatch(torch.tensor(x).cuda(), torch.tensor(idx).cuda())
        refuses = unittest.mock.patch.object(local_heap.np, "empty", side_effect=MemoryError("no room"))
        with raises(EPOutOfMemoryError, "rank 0: host memory does not suffice to keep", "keep_results=False"):
            if comm.Get_rank() == 0:
                with refuses:
                    buffer.sleep(keep_results=True)
            else:
                buffer.sleep(keep_results=True)
        assert not buffer.is_asleep
        buffer.combine(sent.recv_x, sent.handle)
        run_checked_round(comm, buffer, 3)


if __name__ == "__main__":
    main(__name__)
