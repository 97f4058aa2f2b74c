"""Ranks that find each other in a store: the checks of the host backend over it, and processes that mpirun did not start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_host_backend import _launch

from deepep_rt import EPUnavailableError
from deepep_rt.store_comm import StoreCommunicator

TESTS = Path(__file__).resolve().parent
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


class Store:
    """What a store does, in this process. `fails`: whoever held it is gone."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails = False

    def set(self, key: str, value: bytes) -> None:
        self._look()
        self.held[key] = value

    def get(self, key: str) -> bytes:
        self._look()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._look()
        return all(key in self.held for key in keys)

    def delete_key(self, key: str) -> bool:
        self._look()
        return self.held.pop(key, None) is not None

    def _look(self) -> None:
        if self.fails:
            raise RuntimeError("Connection reset by peer\nwith a long trace")


def on_all(ranks: list[StoreCommunicator], call: Any) -> list[Any]:
    """What a call gives on each rank."""
    found: list[Any] = [None] * len(ranks)

    def run(i: int) -> None:
        found[i] = call(ranks[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture
def ranks() -> list[StoreCommunicator]:
    store = Store()
    return [StoreCommunicator(store, "test", rank, 3) for rank in range(3)]


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
    assert len(ranks[0]._store.held) == 3, "all but the last keys went"


def test_messages(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    for number in range(3):
        a.isend(number, 1, tag=7)
    a.Isend([np.arange(3), np.ones((2, 2), np.float32)], 1, tag=8)
    assert not b.iprobe(2, 7)
    for number in range(3):
        assert b.iprobe(0, 7)
        assert b.recv(source=0, tag=7) == number
    assert not b.iprobe(0, 7)
    parts = [np.zeros(3, np.int64), np.zeros((2, 2), np.float32)]
    late = b.Irecv(np.zeros(1, np.int64), 2, tag=8)
    assert not late.Test()
    assert b.Irecv(parts, 0, tag=8).Test()
    assert (parts[0] == np.arange(3)).all()
    assert (parts[1] == 1).all()
    assert not a._store.held, "who receives cleans up"


def test_a_receive_that_was_cancelled_takes_nothing(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
    given_up = b.Irecv(first, 0, tag=1)
    given_up.Cancel()
    a.Isend(np.array([5]), 1, tag=1)
    assert given_up.Test()
    assert b.Irecv(second, 0, tag=1).Test()
    assert (first[0], second[0]) == (0, 5)


def test_duplicates_share_nothing(ranks: list[StoreCommunicator]) -> None:
    a, b, _ = ranks
    one, other = a.Dup(), a.Dup()
    one.isend("one", 1, tag=1)
    other.isend("other", 1, tag=1)
    assert a.own() is a.own() is not a
    assert not b.iprobe(0, 1)
    assert [b.Dup().recv(0, 1), b.Dup().recv(0, 1)] == ["one", "other"]


def test_a_collective_that_some_gave_up_is_found_by_who_comes_late(ranks: list[StoreCommunicator]) -> None:
    early, late = ranks[:2], ranks[2]
    for number in range(3):
        for comm in early:
            assert not comm.Iallgather(np.array([number]), np.zeros((3, 1), np.int64)).Test()
    for number in range(3):
        heard = np.zeros((3, 1), np.int64)
        assert late.Iallgather(np.array([9]), heard).Test()
        assert heard.tolist() == [[number], [number], [9]]


def test_a_store_that_is_gone(ranks: list[StoreCommunicator]) -> None:
    ranks[0]._store.fails = True
    with pytest.raises(EPUnavailableError, match=r"does not answer \(Connection reset by peer\)"):
        ranks[0].allgather(1)
    ranks[0].Free()  # whoever held it has seen all others there


def test_who_frees_waits_for_the_others(ranks: list[StoreCommunicator]) -> None:
    gone = []
    first = threading.Thread(target=lambda: (ranks[0].Free(), gone.append(0)))
    first.start()
    first.join(0.3)
    assert not gone
    on_all(ranks[1:], lambda comm: comm.Free())
    first.join(5)
    assert gone == [0]


@needs_torch
@pytest.mark.parametrize(("program", "num_ranks"), [("dispatch", 3), ("bad_calls", 2), ("buffers", 3), ("low_latency", 2)])
def test_checks_of_the_host_backend(program: str, num_ranks: int) -> None:
    output = _launch(num_ranks, program, "--store").stdout
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output


@needs_torch
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_processes_that_were_spawned(num_ranks: int) -> None:
    assert "all passed" in run_without_mpirun("host", str(num_ranks))


@needs_torch
def test_processes_of_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "all passed" in run_without_mpirun("host", launcher=launcher)


def run_without_mpirun(*arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """What tests/spawned.py prints, in processes that know of no mpirun."""
    launchers = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "SLURM_", "PRTE_", "OPAL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "mpi_host"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *launcher, str(TESTS / "spawned.py"), *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
