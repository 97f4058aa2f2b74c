"""Making, using and destroying Buffers. `buffer_failures` and `consensus` run with it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import platform
import time
import unittest.mock
from types import SimpleNamespace

import numpy as np
import spmd
from limits import seconds
from mpi4py import MPI
from spmd import TIMEOUT_S, main, make_buffer, raises
from table import run_checked_round

from deepep_rt import Buffer, EPConfigError, EPDestroyedError, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.comm.convert import communicator_of
from deepep_rt.comm.timed_collectives import wait_all


def check_sizes_that_differ(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    is_last = rank == ranks - 1
    for name, usual, other in (
        ("hidden", 32, 64),
        ("num_topk", 4, 3),
        ("num_max_tokens_per_rank", 64, 65),
        ("dtype", "float32", "float16"),
        ("path", "hierarchical", "direct"),
    ):
        with raises(EPConfigError, name, f"rank 0 {usual!r}", f"rank {ranks - 1} {other!r}"):
            make_buffer(comm, num_experts=4 * ranks, **{name: other if is_last else usual})
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        run_checked_round(comm, buffer, 1)


def check_wrong_settings_on_one_rank(comm: MPI.Intracomm) -> None:
    """The error on the other ranks names this rank and its setting, without a wait."""
    ranks, start = comm.Get_size(), time.monotonic()
    if ranks == 1:
        return
    is_culprit = comm.Get_rank() == ranks - 1
    for name, wrong, text in (
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
        settings = dict(
            num_max_tokens_per_rank=8, hidden=32, num_topk=4, num_experts=4 * ranks, backend="host", timeout_s=seconds(60)
        )
        with raises(EPConfigError, text, *([] if is_culprit else [f"rank {ranks - 1} cannot make this Buffer"])):
            Buffer(comm, **{**settings, **({name: wrong} if is_culprit else {})})
    assert time.monotonic() - start < seconds(30)
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        run_checked_round(comm, buffer, 1)


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
        run_checked_round(comm, two, 2)
        run_checked_round(comm, one, 3)


def check_two_buffers_at_once(comm: MPI.Intracomm) -> None:
    """Messages of Buffers over the same communicator stay apart, also if ranks run ahead."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_buffer(comm, num_experts=4 * ranks) as one, make_buffer(comm, num_experts=8 * ranks) as two:
        for number in range(5):
            run_checked_round(comm, one, number)
            run_checked_round(comm, two, number)
            requests = [comm.isend(number, (rank + 1) % ranks, tag=tag) for tag in (1, 2)]  # tags of the backend
            assert [comm.recv(source=(rank - 1) % ranks, tag=tag) for tag in (1, 2)] == [number, number]
            assert wait_all(requests, TIMEOUT_S)


def check_descriptions(comm: MPI.Intracomm) -> None:
    """All ranks have the same description. The path between nodes is chosen from rates that are measured once."""
    size = comm.Get_size()
    node = size // 2 if size % 2 == 0 else 1
    with make_buffer(comm, num_experts=4 * size) as buffer:
        plain = buffer.describe()
    assert (plain.num_nodes, plain.path, plain.measured) == (1, "", None)
    assert set(plain.hosts) == {platform.node()}
    found = []
    for remeasure in ("1", "0"):
        variables = unittest.mock.patch.dict(os.environ, DEEPEP_RT_REMEASURE=remeasure)
        with variables, make_buffer(comm, num_experts=4 * size, ranks_per_node=node) as buffer:
            found.append(buffer.describe())
            assert found[-1].path == ("" if node == size else buffer.config.path)
    for description in found:
        assert {str(description)} == set(communicator_of(comm).allgather(str(description)))
        assert (description.measured is not None) == (1 < node < size)
    assert (found[0].measured, found[0].path) == (found[1].measured, found[1].path)
    with make_buffer(comm, num_experts=4 * size, ranks_per_node=node, path="direct") as buffer:
        assert (buffer.describe().path or "direct", buffer.describe().measured) == ("direct", None)
    with raises(EPDestroyedError):
        buffer.describe()


def check_subcommunicators(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    half = comm.Split(rank % 2, -rank)  # ranks in reverse order
    with make_buffer(comm, num_experts=4 * ranks) as whole, make_buffer(half, num_experts=4 * half.Get_size()) as part:
        for number in range(3):
            run_checked_round(half, part, 20 + number + rank % 2)
            run_checked_round(comm, whole, number)
    half.Free()


def check_many_buffers_in_turn(comm: MPI.Intracomm) -> None:
    for number in range(20):
        with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
            run_checked_round(comm, buffer, number)


def check_ranks_that_make_buffers_late(comm: MPI.Intracomm) -> None:
    """A rank makes its Buffer after the other ranks have timed out. All ranks retry, and then make it together."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    pauses = [seconds(1.2), seconds(0.1), 0.0, 0.0] if rank == ranks - 1 else [0.0] * 4
    for pause in pauses:
        time.sleep(pause)
        try:
            buffer = make_buffer(comm, num_experts=4 * ranks, timeout_s=seconds(0.5))
            break
        except EPTimeoutError:
            continue
    assert comm.allgather(rank) == list(range(ranks))
    with buffer:
        run_checked_round(comm, buffer, 3)


def check_wrong_communicators(comm: MPI.Intracomm) -> None:
    with raises(EPConfigError, "comm=<ProcessGroup", "mpi4py", "deepep_rt.torch.communicator"):
        make_buffer(type("ProcessGroup", (), {})(), num_experts=4)  # type: ignore[arg-type]
    with raises(EPConfigError, "COMM_NULL"):
        make_buffer(MPI.COMM_NULL, num_experts=4)
    with raises(EPConfigError, "network=3", "NetworkOptions"):
        make_buffer(comm, num_experts=4 * comm.Get_size(), network=3)
    with raises(EPConfigError, "timeout_s='3'"):
        make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s="3")


def check_copies_of_buffers(comm: MPI.Intracomm) -> None:
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        assert copy.deepcopy({"layer": buffer})["layer"] is buffer
        with raises(TypeError, "a Buffer cannot be pickled", "state_dict"):
            pickle.dumps(buffer)


def check_copy_ceiling_excludes_own_rows(comm: MPI.Intracomm) -> None:
    """The result counts the bytes that one rank sends to the others. A single rank copies to itself."""
    if spmd.backend != "host":
        return
    clock = SimpleNamespace(perf_counter=iter([5.0, 7.0]).__next__)
    with (
        make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer,
        unittest.mock.patch("deepep_rt.backends.host.backend.time", clock),
    ):
        rates = buffer._backend.copy_ceilings(row_bytes=8, num_rows=3, iterations=4)
        assert rates == {"messages": 3 * 8 * max(comm.Get_size() - 1, 1) / 0.5}


def check_copy_ceiling_arguments(comm: MPI.Intracomm) -> None:
    """If the arguments differ, all ranks raise before they begin a transfer."""
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
        run_checked_round(comm, buffer, 1)
    assert time.monotonic() - start < TIMEOUT_S


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
    main(__name__, "buffer_failures", "consensus")
