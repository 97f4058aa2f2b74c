"""Ctrl-C on one rank while it makes a Buffer or measures, and many Buffers that exceptions leave. Then all ranks make another Buffer."""

from __future__ import annotations

import os
import signal
import time
import unittest.mock
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from mpi4py import MPI
from spmd import TIMEOUT_S, main, make_buffer, raises

from deepep_rt import Buffer, EPTimeoutError, EPUnavailableError
from deepep_rt.backends import agreement
from deepep_rt.comm.convert import communicator_of
from deepep_rt.comm.mpi import MpiCommunicator
from deepep_rt.comm.timed_collectives import TimedCollectives

SHORT_S = 0.4  # the other ranks of an interrupted step wait as long; whether they all wait for it does not matter
VICTIM = 1


def use_another_buffer(comm: Any) -> None:
    with make_buffer(comm, num_experts=comm.Get_size(), num_topk=1) as buffer:
        x = np.full((3, 32), comm.Get_rank(), np.float32)
        sent = buffer.dispatch(x, np.arange(3)[:, None] % comm.Get_size())
        assert (np.asarray(buffer.combine(sent.recv_x, sent.handle).x) == x).all()


def make_interrupted_buffer(comm: Any) -> bool:
    """Make a Buffer that an interruption ends on one rank. Return whether it ended there."""
    try:
        with unittest.mock.patch.object(agreement, "_CREATION_TIMEOUT_S", SHORT_S):
            buffer = make_buffer(comm, num_experts=comm.Get_size(), num_topk=1, timeout_s=SHORT_S)
    except (EPTimeoutError, KeyboardInterrupt) as error:
        return isinstance(error, KeyboardInterrupt)
    buffer.destroy(in_touch=False)
    return False


def check_interrupted_steps(comm: Any) -> None:
    """Rank 1 leaves each wait in which a Buffer is made. All ranks make the next Buffer at once."""
    if comm.Get_size() == 1:
        return
    finish, count = TimedCollectives.finish, 0

    def interrupted(step: int) -> Callable[..., None]:
        def wait(self: Any, *arguments: Any, **options: Any) -> None:
            nonlocal count
            count += 1
            if comm.Get_rank() == VICTIM and count == step:
                raise KeyboardInterrupt
            finish(self, *arguments, **options)

        return wait

    step, is_reached = 0, True
    while is_reached:
        step, count = step + 1, 0
        with unittest.mock.patch.object(TimedCollectives, "finish", interrupted(step)):
            is_reached = make_interrupted_buffer(comm)
        is_reached = any(comm.allgather(is_reached))  # like programs, which agree before they make another Buffer
        use_another_buffer(comm)
    assert step > 8, "the ranks wait more often than that for each other"


def check_interruptions_at_any_time(comm: Any) -> None:
    """A signal arrives on rank 1 at any time while it makes a Buffer, also in the middle of messages that MPI still writes."""
    if comm.Get_size() == 1:
        return
    rng, before = np.random.default_rng(comm.Get_rank()), signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(int(os.environ.get("INTERRUPTIONS", "6"))):
        comm.Barrier()
        try:
            if comm.Get_rank() == VICTIM:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.02))
            make_interrupted_buffer(comm)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:  # after the Buffer was made
            pass
        comm.Barrier()
        use_another_buffer(comm)
    signal.signal(signal.SIGALRM, before)


def check_interrupted_measurement(comm: Any) -> None:
    """The other ranks name the rank that left `copy_ceiling`, also before it measures. It can be called again on the same Buffer."""
    if comm.Get_size() == 1:
        return
    buffer = make_buffer(comm, num_experts=comm.Get_size(), num_topk=1, timeout_s=2.0, hidden=4096, num_max_tokens_per_rank=8)
    is_victim, start = comm.Get_rank() == VICTIM, time.monotonic()
    if is_victim:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    with raises(KeyboardInterrupt) if is_victim else raises(EPTimeoutError, f"rank {VICTIM}"):
        buffer.copy_ceiling(num_rows=500, iterations=10**6)
    if is_victim:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < TIMEOUT_S
    comm.Barrier()
    buffer.destroy(in_touch=False)
    with make_buffer(comm, num_experts=comm.Get_size(), num_topk=1) as buffer:
        step = unittest.mock.patch.object(MpiCommunicator, "Alltoall", side_effect=KeyError("mine"))
        with raises(KeyError, "mine"), step:
            buffer.copy_ceiling(num_rows=8, iterations=2)
        assert buffer.copy_ceiling(num_rows=8, iterations=2) > 0


def check_tags_are_given_back(comm: Any) -> None:
    """A Buffer that all ranks destroy keeps no tags, and neither does a measurement."""
    if isinstance(comm, MPI.Comm):
        use_another_buffer(comm)
        with make_buffer(comm, num_experts=comm.Get_size(), num_topk=1) as buffer:
            buffer.copy_ceiling(num_rows=8, iterations=2)
        assert communicator_of(comm)._duplicate._in_use == {0}


def check_buffers_that_exceptions_leave(comm: Any) -> None:
    """They take no communicators of MPI. A range of tags stays in use by each, and an error tells when none is free."""
    if isinstance(comm, MPI.Comm):
        made, mpi = [], MPI.Intracomm(comm)
        for _ in range(5):
            with raises(KeyError, "mine"), make_buffer(mpi, num_experts=mpi.size, num_topk=1):
                made.append(communicator_of(mpi)._duplicate)
                raise KeyError("mine")
        assert len(set(map(id, made))) == 1
        use_another_buffer(mpi)
        with (
            unittest.mock.patch.object(made[0], "_num_channels", 8),
            raises(EPUnavailableError, "all 8 ranges of message tags", "left by an exception", "new communicator"),
            ExitStack() as held,
        ):
            for _ in range(8):
                held.callback(make_buffer(mpi, num_experts=mpi.size, num_topk=1).destroy, in_touch=False)


def check_too_many_communicators(comm: Any) -> None:
    """The error says that MPI has no communicator left."""
    if not isinstance(comm, MPI.Comm) or "MPICH" not in MPI.Get_library_version():
        return
    held: list[MPI.Comm] = []
    try:
        with raises(MPI.Exception):
            while True:
                held.append(comm.Dup())
        with raises(EPUnavailableError, "MPI cannot duplicate the communicator", "MPICH 2,048", "comm.Free()"):
            Buffer(held[0], num_max_tokens_per_rank=4, hidden=32, num_topk=1, num_experts=comm.Get_size(), backend="host")
    finally:
        for each in held[1:]:
            each.Free()
    use_another_buffer(held[0])


if __name__ == "__main__":
    main(__name__)
