"""Interrupted calls, forked processes, and Buffers that are destroyed during a call."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import traceback
import unittest.mock
import warnings
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import spmd
from limits import seconds
from mpi4py import MPI
from spmd import TIMEOUT_S, main, make_buffer, raises
from table import run_checked_round

from deepep_rt import Buffer, EPDestroyedError, EPInputError, EPTimeoutError


def check_leaving_by_an_exception(comm: MPI.Intracomm) -> None:
    """An exception takes one rank out of the `with` block. The other ranks raise when they wait for it."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    start = time.monotonic()
    if rank == 0 or ranks == 1:
        with raises(KeyError, "mine"), make_buffer(comm, num_experts=4 * ranks) as buffer:
            buffer.dispatch(x, idx)
            raise KeyError("mine")
    else:
        with (
            raises(EPTimeoutError, "rank 0", "left the Buffer", "KeyError", "mine") as caught,
            make_buffer(comm, num_experts=4 * ranks) as buffer,
        ):
            buffer.dispatch(x, idx)
            buffer.dispatch(x, idx)
        assert caught.error.peer == 0
    assert time.monotonic() - start < TIMEOUT_S / 2
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        run_checked_round(comm, buffer, 1)


def check_forked_process(comm: MPI.Intracomm) -> None:
    """The child may not call, because peers would match its messages with its parent's. The parent goes on."""
    hook = None
    with make_buffer(comm, num_experts=4 * comm.Get_size(), low_latency=spmd.backend == "host") as buffer:
        if spmd.backend == "host":
            x, idx = np.zeros((2, 32), ml_dtypes.bfloat16), np.zeros((2, 4), np.int64)
            hook = buffer.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True).hook
        child = os.fork()
        if not child:
            try:
                with raises(EPDestroyedError, "forked from"):
                    buffer.dispatch(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64))
                if hook is not None:
                    with raises(EPDestroyedError, "forked from"):
                        hook()
                buffer.destroy()
                del buffer
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        if hook is not None:
            hook()
        run_checked_round(comm, buffer, 5)


def check_interrupted_call(comm: MPI.Intracomm) -> None:
    """An interrupted rank cannot call again, because peers would match its next call with this one."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    num_tokens = 3 * rank  # rank 0 sends no rows, so the other ranks finish the call

    def call(buffer: Buffer) -> Any:
        x = np.full((num_tokens, buffer.config.hidden), rank, np.float32)
        return buffer.dispatch(x, np.tile(np.arange(buffer.config.num_topk), (num_tokens, 1)))

    buffer = make_buffer(comm, num_experts=4 * ranks, timeout_s=seconds(1.5), dtype="float32")
    if rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, seconds(0.3))
        with raises(KeyboardInterrupt):
            call(buffer)
        signal.signal(signal.SIGALRM, before)
        with raises(EPTimeoutError, "interrupted" if spmd.backend == "cuda" else "KeyboardInterrupt interrupted call 1"):
            call(buffer)
    else:
        time.sleep(seconds(0.6))
        call(buffer)
    comm.Barrier()  # on GPUs a rank that leaves ends its part of the call
    if rank:
        with raises(EPTimeoutError):
            call(buffer)
    buffer.destroy()


def check_destroy_during_a_call(comm: MPI.Intracomm) -> None:
    """A signal handler or another thread destroys the Buffer. The call raises at once, and the other ranks raise too."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    for source in ("signal", "thread"):
        buffer, start = make_buffer(comm, num_experts=4 * ranks), time.monotonic()
        if rank:
            time.sleep(seconds(0.5))
            with raises(EPTimeoutError, "rank 0", "left the Buffer", "EPDestroyedError"):
                for _ in range(3):
                    buffer.dispatch(x, idx)
            buffer.destroy()
        else:
            before = signal.signal(signal.SIGALRM, lambda *_, buffer=buffer: buffer.destroy())
            other = threading.Timer(seconds(0.2), buffer.destroy)
            signal.setitimer(signal.ITIMER_REAL, seconds(0.2)) if source == "signal" else other.start()
            with raises(EPDestroyedError, "this Buffer was destroyed"):
                buffer.dispatch(x, idx)
            if source == "thread":
                other.join()
            signal.signal(signal.SIGALRM, before)
            with raises(EPDestroyedError, "this Buffer was destroyed"):
                buffer.dispatch(x, idx)
        assert time.monotonic() - start < TIMEOUT_S / 2


def check_destroy_before_a_call_begins(comm: MPI.Intracomm) -> None:
    """Another thread destroys the Buffer after this thread has looked up the backend, and before it takes the lock."""
    buffer = make_buffer(comm, num_experts=4 * comm.Get_size())

    class DestroyingLock:
        def __enter__(self) -> None:
            buffer.destroy()
            lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

    lock = buffer._call_lock
    with unittest.mock.patch.object(DestroyingLock, "__getattr__", lambda _, name: getattr(lock, name), create=True):
        buffer._call_lock = DestroyingLock()
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            buffer.dispatch(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64))


def check_calls_from_arguments(comm: MPI.Intracomm) -> None:
    """A method of an argument makes a call. This call is refused, because it would change the order of calls; the outer call goes on."""

    class Argument:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.refused = array, 0

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            with raises(EPInputError, "this thread is in the middle of a call", "__dlpack__"):
                buffer.dispatch(self.array, idx)
            self.refused += 1
            return self.array.__dlpack__(**options)

    idx = np.zeros((2, 4), np.int64)
    if spmd.backend != "host":
        return
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        x = Argument(np.zeros((2, 32), np.float32))
        buffer.dispatch(x, idx)
        assert x.refused
        run_checked_round(comm, buffer, 2)


def check_failure_notice_without_text(comm: MPI.Intracomm) -> None:
    """The notice reaches the other ranks, although the text of the exception cannot be shown."""

    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    start = time.monotonic()
    if rank == 0:
        with raises(Broken), make_buffer(comm, num_experts=4 * ranks):
            raise Broken
    else:
        with (
            raises(EPTimeoutError, "rank 0", "left the Buffer", "Broken", "KeyError"),
            make_buffer(comm, num_experts=4 * ranks) as buffer,
        ):
            for _ in range(2):
                buffer.dispatch(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64))
    assert time.monotonic() - start < TIMEOUT_S / 2


def check_memory_of_unfinished_sends(comm: MPI.Intracomm) -> None:
    """A rank times out, drops its Buffer and goes on with MPI. Its peer receives its rows after that."""
    if comm.Get_size() != 2 or spmd.backend != "host":
        return
    rank, sizes = comm.Get_rank(), dict(num_max_tokens_per_rank=512, hidden=4096, num_topk=1, dtype="float32")
    buffer = make_buffer(comm, num_experts=comm.Get_size(), timeout_s=seconds(0.5), **sizes)
    x, idx = np.full((512, 4096), rank, np.float32), np.full((512, 1), 1 - min(rank, 1), np.int64)
    if rank == 0:
        with raises(EPTimeoutError):
            buffer.dispatch(x, idx)
        buffer.destroy()
        del buffer
        gc.collect()
        garbage = [np.full((512, 4096), -1, np.float32) for _ in range(3)]
        end = time.monotonic() + seconds(2)
        while time.monotonic() < end:
            MPI.COMM_WORLD.Iprobe()
        del garbage
    else:
        channel = buffer._backend._channel
        exchange_rows, channel._timeout_s = channel.exchange_rows, seconds(2.0)
        channel.exchange_rows = lambda *given: time.sleep(seconds(1.2)) or exchange_rows(*given)
        with contextlib.suppress(EPTimeoutError):
            buffer.dispatch(x, idx)
        buffer.destroy()


def check_unfinished_messages_outlive_the_buffer(comm: MPI.Intracomm) -> None:
    if spmd.backend != "host":
        return
    buffer, retained = make_buffer(comm, num_experts=4 * comm.Get_size()), []
    channel = buffer._backend._channel
    done, pending = (SimpleNamespace(is_done=lambda done=done: done) for done in (True, False))
    channel._unfinished += [done, pending]
    with unittest.mock.patch.object(type(channel._comm), "retain", lambda self, *held: retained.append(held)):
        buffer.destroy()
    assert retained == [([pending],)]


def check_calls_from_two_threads(comm: MPI.Intracomm) -> None:
    """A call is refused while another thread is in a call, which goes on."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        if rank == 0:
            refused: list[str] = []

            def call() -> None:
                time.sleep(seconds(0.2))
                with raises(EPInputError, "another thread", "a Buffer for each") as caught:
                    buffer.combine(None, None)
                refused.append(str(caught.error))

            other = threading.Thread(target=call)
            other.start()
            run_checked_round(comm, buffer, 1)
            other.join()
            assert refused
        else:
            time.sleep(seconds(0.6))
            run_checked_round(comm, buffer, 1)


def check_dropping_without_destroy_warns(comm: MPI.Intracomm) -> None:
    log = unittest.mock.patch.object(logging.getLogger("deepep_rt"), "warning")  # Python hides a ResourceWarning by default
    with log as logged, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = make_buffer(comm, num_experts=4 * comm.Get_size())
        del buffer
        gc.collect()
    assert "dropped without destroy()" in str(logged.call_args)
    assert any(issubclass(w.category, ResourceWarning) and "destroy" in str(w.message) for w in caught)


if __name__ == "__main__":
    main(__name__)
