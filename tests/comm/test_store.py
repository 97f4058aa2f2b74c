"""`store`: the communicator over a store, the checks of the host backend over it, and processes that mpirun did not start."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from launch import environment, run_checks, run_without_mpirun
from memory_store import Store, on_all
from ports import free_port

from deepep_rt import Buffer, EPUnavailableError
from deepep_rt.comm.consensus import Consensus
from deepep_rt.comm.store import StoreCommunicator, pack
from deepep_rt.config import Config

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def test_collectives(ranks: list[StoreCommunicator]) -> None:
    for number in range(20):
        assert (
            on_all(ranks, lambda comm, number=number: comm.allgather((number, comm.Get_rank())))
            == [[(number, rank) for rank in range(3)]] * 3
        )
        assert on_all(ranks, lambda comm, number=number: comm.bcast(number + comm.Get_rank(), root=2)) == [number + 2] * 3
    arrays = [np.full(4, rank, np.int8) for rank in range(3)]
    on_all(ranks, lambda comm: comm.Bcast(arrays[comm.Get_rank()], root=1))
    assert all((array == 1).all() for array in arrays)
    assert len(ranks[0]._store.held) == 3, "all keys but the last are deleted"


def test_a_collective_reads_all_ranks_in_one_request(ranks: list[StoreCommunicator]) -> None:
    store = ranks[0]._store
    requests: list[list[str]] = []
    store.has_extended_api = lambda: True
    store.multi_get = lambda keys: requests.append(keys) or [store.held[key] for key in keys]
    store.get = None
    assert on_all(ranks, lambda comm: comm.allgather(comm.Get_rank())) == [[0, 1, 2]] * 3
    assert [len(keys) for keys in requests] == [3, 3, 3]


def test_messages(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    for number in range(3):
        a.isend(number, 1, tag=7)
    a.send_parts([np.arange(3), np.ones((2, 2), np.float32)], 1, tag=8)
    assert not b.iprobe(2, 7)
    for number in range(3):
        assert b.iprobe(0, 7)
        assert b.recv(source=0, tag=7) == number
    assert not b.iprobe(0, 7)
    parts = [np.zeros(3, np.int64), np.zeros((2, 2), np.float32)]
    late = b.Irecv(np.zeros(1, np.int64), 2, tag=8)
    assert not late.Test()
    assert b.receive_parts(parts, 0, tag=8).Test()
    assert (parts[0] == np.arange(3)).all()
    assert (parts[1] == 1).all()
    assert not a._store.held, "the receiver deletes them"


def test_a_cancelled_receive_takes_no_message(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
    cancelled = b.Irecv(first, 0, tag=1)
    cancelled.Cancel()
    a.Isend(np.array([5]), 1, tag=1)
    assert cancelled.Test()
    assert b.Irecv(second, 0, tag=1).Test()
    assert (first[0], second[0]) == (0, 5)


def test_duplicates_share_no_messages(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    one, other = a.Dup(), a.Dup()
    one.isend("one", 1, tag=1)
    other.isend("other", 1, tag=1)
    assert a.begin_private_comm()[0] is a.begin_private_comm()[0] is not a
    assert not b.iprobe(0, 1)
    assert [b.Dup().recv(0, 1), b.Dup().recv(0, 1)] == ["one", "other"]


def test_a_late_rank_finds_collectives_that_others_gave_up(ranks: list[StoreCommunicator]) -> None:
    early, late = ranks[:2], ranks[2]
    for number in range(3):
        for comm in early:
            assert not comm.Iallgather(np.array([number]), np.zeros((3, 1), np.int64)).Test()
    for number in range(3):
        gathered = np.zeros((3, 1), np.int64)
        assert late.Iallgather(np.array([9]), gathered).Test()
        assert gathered.tolist() == [[number], [number], [9]]


def test_a_store_that_has_ended(ranks: list[StoreCommunicator]) -> None:
    ranks[0]._store.fails = True
    with pytest.raises(EPUnavailableError, match=r"does not answer \(Connection reset by peer\)"):
        ranks[0].allgather(1)
    ranks[0].Free()  # the process that held the store has seen all others arrive
    ranks[0].abandon()
    assert not Consensus(ranks[0]).all_ok(True, "free memory", 5.0)


def test_free_waits_for_the_other_ranks(ranks: list[StoreCommunicator]) -> None:
    freed = []
    first = threading.Thread(target=lambda: (ranks[0].Free(), freed.append(0)))
    first.start()
    first.join(0.3)
    assert not freed
    on_all(ranks[1:], lambda comm: comm.Free())
    first.join(60)
    assert freed == [0]


def test_messages_of_any_size(ranks: list[StoreCommunicator]) -> None:
    sent = np.random.default_rng(1).integers(0, 255, 20 << 20, np.uint8)
    for size in (0, 1, 4 << 20, sent.nbytes):
        received = np.zeros(size, np.uint8)
        ranks[0].Isend(sent[:size], 1, tag=1)
        assert ranks[1].Irecv(received, 0, tag=1).Test()
        assert (received == sent[:size]).all()
    assert not ranks[0]._store.held
    outgoing = [np.arange(3)[:, None] + 10 * rank for rank in range(3)]
    incoming = [np.zeros((3, 1), int) for _ in range(3)]
    on_all(ranks, lambda comm: comm.Alltoall(outgoing[comm.Get_rank()], incoming[comm.Get_rank()]))
    assert [array[:, 0].tolist() for array in incoming] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_duplicates_keep_the_owner_of_a_store_alive() -> None:
    """It must not end while a duplicate uses it. Duplicates for the process do not keep it."""
    owned = Store()
    known = weakref.ref(owned)
    comm = StoreCommunicator(Store(), "test", 0, 1, owner=owned)
    comm.heard = functools.partial(lambda duplicate: None, comm.Dup())  # as while ranks make a Buffer
    made, of_process = comm.Dup(), comm.dup_for_process()
    del owned, comm
    assert known() is not None
    del made
    assert known() is None
    assert of_process.allgather(1) == [1]


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["allgather", "bcast", "recv"])
def test_values_of_other_programs_are_not_run(ranks: list[StoreCommunicator], tmp_path: Path, way: str) -> None:
    """Any program that reaches the store's port can write to it."""
    a, b, c = ranks
    data = pickle.dumps(Trap(tmp_path / "made"))
    if way == "recv":
        b.isend("text", 0, tag=1)
        a._store.held["test/1>0/1/0/0"] = data
        action = lambda: a.recv(source=1, tag=1)  # noqa: E731
    else:
        for comm in (b, c):
            comm._start_allgather("text")
        a._store.held["test/all/1/1"] = data
        action = lambda: getattr(a, way)("text")  # noqa: E731
    with pytest.raises(EPUnavailableError, match=r"rank 0: the store .* holds a value under test/.* that no rank of this Buffer"):
        action()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("data", [b"", b"5", b'"text"', b'{"array": ["<i8", [3], "AAAAAAAAAAA="]}', pack(np.zeros((5, 5)))])
def test_collectives_of_arrays_refuse_other_values(ranks: list[StoreCommunicator], data: bytes) -> None:
    a, b, c = ranks
    for comm in (b, c):
        comm.Iallgather(np.zeros(1, np.int64), np.zeros((3, 1), np.int64))
    a._store.held["test/all/1/1"] = data
    with pytest.raises(EPUnavailableError, match="no rank of this Buffer wrote"):
        a.Iallgather(np.zeros(1, np.int64), np.zeros((3, 1), np.int64)).Test()


@pytest.mark.parametrize("pieces", [b"x", b"", b"-1", b"0"])
def test_messages_of_another_length_are_refused(ranks: list[StoreCommunicator], pieces: bytes) -> None:
    a, b, _ = ranks
    b.Isend(np.zeros(3), 0, tag=1)
    a._store.held["test/1>0/1/0"] = pieces
    with pytest.raises(EPUnavailableError, match="no rank of this Buffer wrote"):
        a.Irecv(np.zeros(3), 1, tag=1).Test()
    c, d = ranks[1:]
    d.Isend(np.zeros(4), 1, tag=2)
    with pytest.raises(EPUnavailableError, match="no rank of this Buffer wrote"):
        c.Irecv(np.zeros(3), 2, tag=2).Test()


@pytest.mark.parametrize("rounds", [1, 10])
def test_freed_communicators_leave_no_keys(ranks: list[StoreCommunicator], rounds: int) -> None:
    def use(comm: StoreCommunicator) -> None:
        for _ in range(rounds):
            made = comm.Dup()
            made.Iallgather(np.zeros(1, np.int64), np.zeros((3, 1), np.int64))  # and is not waited for
            made.allgather(1)
            made.Free()
            comm.allgather(1)

    on_all(ranks, use)
    assert len(ranks[0]._store.held) == 3


def test_no_rank_waits_for_one_that_abandons(ranks: list[StoreCommunicator], seconds: Callable[[float], float]) -> None:
    ranks[0].abandon()
    start = time.monotonic()
    on_all(ranks[1:], lambda comm: comm.Free())
    assert time.monotonic() - start < seconds(1)


def test_no_rank_waits_for_one_that_destroys_its_buffer_alone(
    ranks: list[StoreCommunicator], seconds: Callable[[float], float]
) -> None:
    sizes = dict(num_max_tokens_per_rank=8, hidden=64, num_topk=1, num_experts=3, timeout_s=seconds(5.0), backend="host")
    made = on_all(ranks, lambda comm: Buffer(comm, **sizes))
    start = time.monotonic()
    made[0].destroy(in_touch=False)
    on_all(ranks[1:], lambda comm: made[comm.Get_rank()].destroy())
    assert time.monotonic() - start < seconds(1)


def test_a_monitor_over_a_store_that_has_ended(ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch) -> None:
    """It also stops the kernels. If time-outs mask, the Buffer continues."""
    pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    from deepep_rt.backends.cuda.monitor import Monitor
    from deepep_rt.cuda import driver

    written: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: written.append((ptr, value)))
    page: Any = SimpleNamespace(check_peers=lambda: None)
    config = Config(3, 8, 64, 2, 12, low_latency=True, timeout_s=5.0)
    ranks[0]._store.fails = True
    Monitor(ranks[0], replace(config, on_timeout="mask"), page, 1 << 20).check_failure_notices()
    monitor = Monitor(ranks[0], config, page, 1 << 20)
    for _ in range(2):
        with pytest.raises(EPUnavailableError, match="does not answer"):
            monitor.check_failure_notices() if not written else monitor.check_peers()
    assert monitor.is_broken
    assert [value for _, value in written] == [1]


@pytest.mark.full
@needs_torch
@pytest.mark.parametrize(("program", "num_ranks"), [("table", 3), ("bad_calls", 2), ("buffers", 2), ("low_latency", 2)])
def test_checks_of_the_host_backend(program: str, num_ranks: int) -> None:
    run_checks(num_ranks, program, "--store")


@needs_torch
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_processes_that_were_spawned(num_ranks: int) -> None:
    """Mpirun started the program that spawns them, and its variables do not describe the processes."""
    assert "all passed" in run_without_mpirun("host", str(num_ranks), PMI_RANK="0", PMI_SIZE="1")


@pytest.mark.full
@needs_torch
def test_processes_of_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "all passed" in run_without_mpirun("host", launcher=launcher, PMI_RANK="0", PMI_SIZE="1")


@needs_torch
def test_the_rank_that_holds_the_store_raises() -> None:
    """The other rank learns why, although the store ends with the process."""
    code = """
import sys, torch, torch.distributed as dist
from deepep_rt import Buffer
from deepep_rt.torch import communicator
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], rank=rank, world_size=2)
with Buffer(communicator(), num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=2, backend="host") as buffer:
    if rank == 0:
        raise KeyError("mine")
    buffer.dispatch(torch.ones(4, 64).bfloat16(), torch.zeros(4, 1, dtype=torch.int64))
"""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), port],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in started]
    assert "KeyError: 'mine'" in outputs[0]
    assert "rank 0 left the Buffer" in outputs[1], outputs[1]
    assert "KeyError: 'mine'" in outputs[1]
