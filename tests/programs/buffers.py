"""Making, destroying and mixing Buffers."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import pickle
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
import oracle
import spmd
from mpi4py import MPI
from spmd import TIMEOUT_S, inputs_of_all, main, make_buffer, raises

from deepep_rt import (
    Buffer,
    EPConfigError,
    EPDestroyedError,
    EPInputError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
)
from deepep_rt.comm import rendezvous
from deepep_rt.comm.communicator import communicator_of
from deepep_rt.comm.rendezvous import Consensus
from deepep_rt.cuda import nvshmem as symmetric


def _check_round(comm: MPI.Intracomm, buffer: Buffer, seed: int) -> None:
    experts, rank = buffer.config.num_experts, comm.Get_rank()
    inputs = inputs_of_all(comm, seed, lambda rank: 4 + rank, hidden=32, num_topk=4, num_experts=experts)
    mine = inputs[rank]
    sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, experts))
    total, size, _ = oracle.expected_combine(
        rank, inputs, [oracle.expected_dispatch(r, inputs, experts).x for r in range(len(inputs))], experts
    )
    error = np.abs(buffer.combine(sent.recv_x, sent.handle).x - total)
    assert (error <= oracle.combine_tolerance("float32", size, len(inputs))).all()


def check_ranks_that_disagree_on_a_size(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    odd = rank == ranks - 1
    for name, usual, other in (
        ("hidden", 32, 64),
        ("num_topk", 4, 3),
        ("num_max_tokens_per_rank", 64, 65),
        ("dtype", "float32", "float16"),
    ):
        with raises(EPConfigError, name, f"rank 0 {usual!r}", f"rank {ranks - 1} {other!r}"):
            make_buffer(comm, num_experts=4 * ranks, **{name: other if odd else usual})
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        _check_round(comm, buffer, 1)


def check_settings_that_are_wrong_on_one_rank(comm: MPI.Intracomm) -> None:
    """The others are told at once which rank it is, and why."""
    ranks, start = comm.Get_size(), time.monotonic()
    if ranks == 1:
        return
    guilty = comm.Get_rank() == ranks - 1
    for name, wrong, why in (
        ("hidden", 7, "hidden=7"),
        ("timeout_s", -1.0, "timeout_s=-1.0"),
        ("num_experts", 4 * ranks + 1, "num_experts"),
        ("backend", "gpu", "'auto' or 'cuda' or 'host'"),
        ("network", "ib", "NetworkOptions"),
        *(
            (name, np.array(["host", "raise"]), f"{name}=<ndarray>")
            for name in ("backend", "on_timeout", "on_exhausted", "dtype")
        ),
        *((name, np.ones(3), f"{name}=<ndarray>") for name in ("hidden", "timeout_s", "low_latency")),
    ):
        settings = dict(num_max_tokens_per_rank=8, hidden=32, num_topk=4, num_experts=4 * ranks, backend="host", timeout_s=60)
        with raises(EPConfigError, why, *([] if guilty else [f"rank {ranks - 1} cannot make this Buffer"])):
            Buffer(comm, **{**settings, **({name: wrong} if guilty else {})})
    assert time.monotonic() - start < 30
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        _check_round(comm, buffer, 1)


def check_backend_choice(comm: MPI.Intracomm) -> None:
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        assert buffer.backend == "host"
    with raises(EPConfigError, "'gpu'", "'auto' or 'cuda' or 'host'"):
        Buffer(comm, num_max_tokens_per_rank=1, hidden=32, num_topk=1, num_experts=comm.Get_size(), backend="gpu")


def check_use_after_destroy(comm: MPI.Intracomm) -> None:
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    buffer = make_buffer(comm, num_experts=4 * comm.Get_size())
    sent = buffer.dispatch(x, idx)
    buffer.destroy()
    buffer.destroy()
    for call in (
        lambda: buffer.dispatch(x, idx),
        lambda: buffer.combine(x, sent.handle),
        lambda: buffer.backend,
        buffer.synchronize,
    ):
        with raises(EPDestroyedError, "destroyed", "make a new one"):
            call()
    assert sent.recv_x.shape[1] == 32  # results on the host outlive their Buffer


def check_handle_of_another_buffer(comm: MPI.Intracomm) -> None:
    experts = 4 * comm.Get_size()
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    with make_buffer(comm, num_experts=experts) as one, make_buffer(comm, num_experts=experts) as two:
        sent = one.dispatch(x, idx)
        with raises(EPInputError, "another Buffer"):
            two.combine(sent.recv_x, sent.handle)
        with raises(EPInputError, "another Buffer"):
            two.dispatch(x, handle=sent.handle)
        with raises(EPInputError, "DispatchResult", "expected the .handle"):
            one.combine(sent.recv_x, sent)
        _check_round(comm, two, 2)
        _check_round(comm, one, 3)


def check_two_buffers_at_once(comm: MPI.Intracomm) -> None:
    """Messages of Buffers over the same communicator never meet, even when ranks run ahead."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_buffer(comm, num_experts=4 * ranks) as one, make_buffer(comm, num_experts=8 * ranks) as two:
        for number in range(5):
            _check_round(comm, one, number)
            _check_round(comm, two, number)
            requests = [comm.isend(number, (rank + 1) % ranks, tag=tag) for tag in (1, 2)]  # the caller's own, in our tags
            assert [comm.recv(source=(rank - 1) % ranks, tag=tag) for tag in (1, 2)] == [number, number]
            for request in requests:
                request.wait()


def check_subcommunicators(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    half = comm.Split(rank % 2, -rank)  # the order of ranks is turned round, too
    with make_buffer(comm, num_experts=4 * ranks) as whole, make_buffer(half, num_experts=4 * half.Get_size()) as part:
        for number in range(3):
            _check_round(half, part, 20 + number + rank % 2)
            _check_round(comm, whole, number)
    half.Free()


def check_many_buffers_one_after_the_other(comm: MPI.Intracomm) -> None:
    for number in range(20):
        with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
            _check_round(comm, buffer, number)


def check_leaving_by_an_exception(comm: MPI.Intracomm) -> None:
    """When one rank leaves the block by an exception, nothing collective happens there; the others hear of it when they wait for it."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    start = time.monotonic()
    if rank == 0 or ranks == 1:
        with raises(KeyError, "mine"), make_buffer(comm, num_experts=4 * ranks) as buffer:
            buffer.dispatch(x, idx)
            raise KeyError("mine")
    else:
        with (
            raises(EPTimeoutError, "rank 0 in vain", "KeyError", "mine") as caught,
            make_buffer(comm, num_experts=4 * ranks) as buffer,
        ):
            buffer.dispatch(x, idx)
            buffer.dispatch(x, idx)
        assert caught.error.peer == 0
    assert time.monotonic() - start < TIMEOUT_S / 2
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        _check_round(comm, buffer, 1)


def check_a_part_that_fails_on_one_rank(comm: MPI.Intracomm) -> None:
    """The others hear of it at once, although that rank does nothing for MPI any more."""
    if comm.Get_size() == 1:
        return
    consensus, start = Consensus(communicator_of(comm)), time.monotonic()
    with consensus.step():
        pass
    if comm.Get_rank() == 0:
        with raises(KeyError), consensus.step():
            raise KeyError
        time.sleep(2)
    else:
        with raises(EPUnavailableError, "another rank could not make its part"), consensus.step():
            pass
        assert time.monotonic() - start < 1.5


def check_late_makers(comm: MPI.Intracomm) -> None:
    """A rank that comes after the others gave up does not wait for ever, and its communicator stays good; all find each other again."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    pauses = [1.2, 0.1, 0.0, 0.0] if rank == ranks - 1 else [0.0] * 4
    for pause in pauses:
        time.sleep(pause)
        try:
            buffer = make_buffer(comm, num_experts=4 * ranks, timeout_s=0.5)
            break
        except EPTimeoutError:
            continue
    assert comm.allgather(rank) == list(range(ranks))
    with buffer:
        _check_round(comm, buffer, 3)


def check_who_comes_late_does_not_go_on_alone(comm: MPI.Intracomm) -> None:
    """It finds the words of those who have given up; and all find each other again."""
    rank, size, ranks = comm.Get_rank(), comm.Get_size(), communicator_of(comm).Dup()
    if size == 1:
        return
    time.sleep(0.8 if rank == size - 1 else 0)
    with raises(EPTimeoutError, "a meeting"):
        rendezvous.timed_allgather(ranks, (rank,), 0.4, "a meeting", "all to come")
    comm.Barrier()
    assert rendezvous.timed_allgather(ranks, (rank, 7), TIMEOUT_S, "a meeting", "all to come") == [
        [other, 7] for other in range(size)
    ]


def check_what_is_no_communicator(comm: MPI.Intracomm) -> None:
    with raises(EPConfigError, "comm is a ProcessGroup", "mpi4py", "deepep_rt.torch.communicator"):
        make_buffer(type("ProcessGroup", (), {})(), num_experts=4)  # type: ignore[arg-type]
    with raises(EPConfigError, "COMM_NULL"):
        make_buffer(MPI.COMM_NULL, num_experts=4)
    with raises(EPConfigError, "network=3", "NetworkOptions"):
        make_buffer(comm, num_experts=4 * comm.Get_size(), network=3)
    with raises(EPConfigError, "timeout_s='3'"):
        make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s="3")


def check_copies_of_a_model(comm: MPI.Intracomm) -> None:
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        assert copy.deepcopy({"layer": buffer})["layer"] is buffer
        with raises(TypeError, "a Buffer cannot be pickled", "state_dict"):
            pickle.dumps(buffer)


def check_a_process_that_is_forked_off(comm: MPI.Intracomm) -> None:
    """What it sent would be taken for its parent's, which goes on as before."""
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
        _check_round(comm, buffer, 5)


def check_an_interrupted_call(comm: MPI.Intracomm) -> None:
    """Who is thrown out of the middle of a call cannot go on as if nothing had happened: its next call would be taken for this one."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    num_tokens = 3 * rank  # rank 0 has none: the others get on without it

    def call(buffer: Buffer) -> Any:
        x = np.full((num_tokens, buffer.config.hidden), rank, np.float32)
        return buffer.dispatch(x, np.tile(np.arange(buffer.config.num_topk), (num_tokens, 1)))

    buffer = make_buffer(comm, num_experts=4 * ranks, timeout_s=1.5, dtype="float32")
    if rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with raises(KeyboardInterrupt):
            call(buffer)
        signal.signal(signal.SIGALRM, before)
        with raises(EPTimeoutError, "interrupted" if spmd.backend == "cuda" else "KeyboardInterrupt interrupted call 1"):
            call(buffer)
    else:
        time.sleep(0.6)
        call(buffer)
        with raises(EPTimeoutError):
            call(buffer)
    buffer.destroy()


def check_the_end_in_the_middle_of_a_call(comm: MPI.Intracomm) -> None:
    """From a signal handler, or from another thread: the call says so at once, and the others hear of it."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    for way in ("signal", "thread"):
        buffer, start = make_buffer(comm, num_experts=4 * ranks), time.monotonic()
        if rank:
            time.sleep(0.5)
            with raises(EPTimeoutError, "rank 0 in vain", "EPDestroyedError"):
                for _ in range(3):
                    buffer.dispatch(x, idx)
            buffer.destroy()
        else:
            before = signal.signal(signal.SIGALRM, lambda *_, buffer=buffer: buffer.destroy())
            other = threading.Timer(0.2, buffer.destroy)
            signal.setitimer(signal.ITIMER_REAL, 0.2) if way == "signal" else other.start()
            with raises(EPDestroyedError, "this Buffer was destroyed"):
                buffer.dispatch(x, idx)
            if way == "thread":
                other.join()
            signal.signal(signal.SIGALRM, before)
            with raises(EPDestroyedError, "this Buffer was destroyed"):
                buffer.dispatch(x, idx)
        assert time.monotonic() - start < TIMEOUT_S / 2


def check_a_buffer_that_ends_before_a_call_begins(comm: MPI.Intracomm) -> None:
    """A thread has found the Buffer alive, and its turn comes when another one has destroyed it."""
    buffer = make_buffer(comm, num_experts=4 * comm.Get_size())

    class Late:
        def __enter__(self) -> None:
            buffer.destroy()
            turns.__enter__()

        def __exit__(self, *error: Any) -> None:
            turns.__exit__(*error)

    turns, late = buffer._call_lock, Late()
    with unittest.mock.patch.object(Late, "__getattr__", lambda _, name: getattr(turns, name), create=True):
        buffer._call_lock = late
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            buffer.dispatch(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64))


def check_calls_from_an_argument(comm: MPI.Intracomm) -> None:
    """They would change the order of calls; and the call whose argument it is goes on."""

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
        _check_round(comm, buffer, 2)


def check_failure_notices_that_cannot_be_shown(comm: MPI.Intracomm) -> None:
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
        with raises(EPTimeoutError, "rank 0 in vain", "Broken", "KeyError"), make_buffer(comm, num_experts=4 * ranks) as buffer:
            for _ in range(2):
                buffer.dispatch(np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64))
    assert time.monotonic() - start < TIMEOUT_S / 2


def check_memory_that_mpi_still_reads(comm: MPI.Intracomm) -> None:
    """A rank that gave up forgets its Buffer, and goes on with MPI; its rows are taken up later than that."""
    if comm.Get_size() != 2 or spmd.backend != "host":
        return
    rank, sizes = comm.Get_rank(), dict(num_max_tokens_per_rank=512, hidden=4096, num_topk=1, dtype="float32")
    buffer = make_buffer(comm, num_experts=comm.Get_size(), timeout_s=0.5, **sizes)
    x, idx = np.full((512, 4096), rank, np.float32), np.full((512, 1), 1 - min(rank, 1), np.int64)
    if rank == 0:
        with raises(EPTimeoutError):
            buffer.dispatch(x, idx)
        buffer.destroy()
        del buffer
        gc.collect()
        rubbish = [np.full((512, 4096), -1, np.float32) for _ in range(3)]
        end = time.monotonic() + 3
        while time.monotonic() < end:
            MPI.COMM_WORLD.Iprobe()
        del rubbish
    else:
        channel = buffer._backend._channel
        exchange_rows, channel._timeout_s = channel.exchange_rows, 4.0
        channel.exchange_rows = lambda *given: time.sleep(1.5) or exchange_rows(*given)
        with contextlib.suppress(EPTimeoutError):
            buffer.dispatch(x, idx)
        buffer.destroy()


def check_the_ceiling_counts_what_goes_to_others(comm: MPI.Intracomm) -> None:
    """Bytes a second and rank; a rank alone copies to itself."""
    if spmd.backend != "host":
        return
    clock = SimpleNamespace(perf_counter=iter([5.0, 7.0]).__next__)
    with (
        make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer,
        unittest.mock.patch("deepep_rt.backends.host.backend.time", clock),
    ):
        assert buffer._backend.copy_ceiling(row_bytes=8, num_rows=3, iterations=4) == 3 * 8 * max(comm.Get_size() - 1, 1) / 0.5


def check_measurements_that_differ(comm: MPI.Intracomm) -> None:
    """All ranks hear of it, and nobody waits for a transfer that another rank does not make."""
    rank, start = comm.Get_rank(), time.monotonic()
    if comm.Get_size() == 1:
        return
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        for name, values in (("row_bytes", (16, 32)), ("num_rows", (4, 5)), ("iterations", (1, 2))):
            words = [f"rank {r}: " for r in range(2)] + [f"{name}={value}" for value in values]
            with raises(EPInputError, "copy_ceiling", *words, "same on all ranks"):
                buffer.copy_ceiling(**{"row_bytes": 16, "num_rows": 4, "iterations": 1, name: values[rank % 2]})
        for name in ("num_rows", "iterations"):
            with raises(EPInputError, name, str(2**62)):
                buffer.copy_ceiling(**{name: 2**62})
        with unittest.mock.patch("deepep_rt.backends.host.backend._MAX_MEASURED_BYTES", 1 << 16):
            assert buffer.copy_ceiling(num_rows=2**31 - 1, iterations=1) > 0
        if spmd.backend == "host":
            full = unittest.mock.patch("deepep_rt.backends.host.backend.np.ones", side_effect=MemoryError)
            with full if rank == 1 else contextlib.nullcontext(), raises(EPOutOfMemoryError, "no memory for the rows on rank 1"):
                buffer.copy_ceiling(num_rows=1)
        _check_round(comm, buffer, 1)
    assert time.monotonic() - start < TIMEOUT_S


def check_messages_that_nobody_took(comm: MPI.Intracomm) -> None:
    """MPI may still read them: they outlive the Buffer."""
    if spmd.backend != "host":
        return
    buffer, kept = make_buffer(comm, num_experts=4 * comm.Get_size()), []
    channel = buffer._backend._channel
    taken, pending = (SimpleNamespace(is_done=lambda done=done: done) for done in (True, False))
    channel._unfinished += [taken, pending]
    with unittest.mock.patch.object(type(channel._comm), "retain", lambda self, *held: kept.append(held)):
        buffer.destroy()
    assert kept == [([pending],)]


def check_parting(comm: MPI.Intracomm) -> None:
    """Memory is freed by all ranks or by none, whoever goes early or comes late; and nobody waits for whoever went."""
    odd, rank = comm.Get_size() - 1, comm.Get_rank()
    assert Consensus(communicator_of(comm)).all_ok(True, "be here", 20.0)
    start, parting = time.monotonic(), Consensus(communicator_of(comm))
    assert not parting.all_ok(rank != odd, "be here", 20.0)
    assert not parting.silent_ranks, "it has said that it does not come"
    assert time.monotonic() - start < 10
    if odd == 0:
        return
    parting = Consensus(communicator_of(comm))
    assert parting.all_ok(True, "be here", 20.0)
    if rank == odd:
        time.sleep(1.5)
    assert not parting.all_ok(True, "be here", 0.5)
    assert parting.silent_ranks == ([odd] if rank != odd else list(range(odd)))
    error = parting.timeout_error()
    assert (error.peer, error.rank) == (parting.silent_ranks[0], rank)
    assert f"for rank{'s' * (len(parting.silent_ranks) > 1)} {parting.silent_ranks[0]}" in str(error)


def check_memory_of_several_groups(comm: MPI.Intracomm) -> None:
    """NVSHMEM frees it on all ranks of its runtime, and waits for all of them; one that does not free is heard of by all groups."""
    rank, size, freed = comm.Get_rank(), comm.Get_size(), []
    if size == 1 or spmd.backend != "host":
        return  # on GPUs: check_subcommunicators
    nvshmem = SimpleNamespace(malloc=lambda num_bytes: 1 << 40, ptr=lambda ptr, pe: ptr, free=freed.append)
    runtime = symmetric.Runtime(communicator_of(comm), rank, size)
    with unittest.mock.patch.multiple(symmetric, load=lambda: nvshmem, _runtime=runtime):
        for odd in (None, 0, size - 1):
            memory = symmetric.SymmetricMemory(communicator_of(MPI.COMM_SELF), 64, 5.0)
            assert memory.is_of_several_buffers
            if memory.all_free(rank != odd, 5.0):
                memory.free()
            assert len(freed) == (odd is None)
            freed.clear()
            comm.Barrier()


def check_threads(comm: MPI.Intracomm) -> None:
    """A thread that comes while another one is in a call is refused, and the call of the other is not disturbed."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        if rank == 0:
            refused: list[str] = []

            def second() -> None:
                time.sleep(0.2)
                with raises(EPInputError, "another thread", "a Buffer for each") as caught:
                    buffer.combine(None, None)
                refused.append(str(caught.error))

            other = threading.Thread(target=second)
            other.start()
            _check_round(comm, buffer, 1)
            other.join()
            assert refused
        else:
            time.sleep(0.6)
            _check_round(comm, buffer, 1)


def check_who_waits_without_a_limit_says_so(comm: MPI.Intracomm) -> None:
    late = comm.Get_size() - 1
    if late == 0:
        return
    consensus = Consensus(communicator_of(comm))
    with warnings.catch_warnings(record=True) as caught, unittest.mock.patch.object(rendezvous, "_REMINDER_S", 0.4):
        warnings.simplefilter("always")
        if comm.Get_rank() == late:
            time.sleep(1.2)
        assert consensus.all_ok(True, "be here", 20.0)
    said = [str(warning.message) for warning in caught]
    if comm.Get_rank() == late:
        assert not said
    else:
        assert len(said) >= 2, said
        assert any(f"of 20 s for rank {late} to be here" in text for text in said), said


def check_dropping_without_destroy_warns(comm: MPI.Intracomm) -> None:
    log = unittest.mock.patch.object(logging.getLogger("deepep_rt"), "warning")  # warnings of this kind are hidden by default
    with log as logged, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = make_buffer(comm, num_experts=4 * comm.Get_size())
        del buffer
        gc.collect()
    assert "dropped without destroy()" in str(logged.call_args)
    assert any(issubclass(w.category, ResourceWarning) and "destroy" in str(w.message) for w in caught)


def check_host_events_and_streams(comm: MPI.Intracomm) -> None:
    x, idx = np.zeros((2, 32), np.float32), np.zeros((2, 4), np.int64)
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        sent = buffer.dispatch(x, idx, async_finish=True)
        sent.event.wait()
        sent.event.synchronize()
        assert sent.event.handle is None
        back = buffer.combine(sent.recv_x, sent.handle, previous_event=sent.event, async_finish=True)
        back.event.synchronize()
        buffer.synchronize()


if __name__ == "__main__":
    main(__name__)
