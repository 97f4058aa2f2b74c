"""The start of NVSHMEM on three ranks: it succeeds, fails, or does not end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import make_ranks, on_all, outcome

from deepep_rt import EPTimeoutError, EPUnavailableError
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.cuda import nvshmem


class Nvshmem:
    """Bindings whose start waits for all ranks, and for nothing else."""

    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=8)
    Init_status = SimpleNamespace(STATUS_IS_INITIALIZED=2)

    def __init__(self, rank: int, barrier: threading.Barrier, fails: bool = False) -> None:
        self._rank, self._barrier, self._fails = rank, barrier, fails

    def uniqueid(self) -> Any:
        return SimpleNamespace(ptr=0, _data=np.zeros(16, np.int8))

    def InitAttr(self) -> Any:
        return SimpleNamespace(ptr=0)

    def get_uniqueid(self, ptr: int) -> None: ...
    def set_attr_uniqueid_args(self, *_: Any) -> None: ...
    def hostlib_init_attr(self, *_: Any) -> None:
        if self._fails:
            raise ValueError("no network")
        self._barrier.wait(10 * nvshmem._START_S)

    def my_pe(self) -> int:
        return self._rank

    def n_pes(self) -> int:
        return 3


@pytest.fixture
def ranks() -> list[StoreCommunicator]:
    return make_ranks()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]) -> Any:
    """Return a function that starts NVSHMEM on one rank."""
    driver = pytest.importorskip("deepep_rt.cuda.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    monkeypatch.setattr(driver, "CurrentContext", lambda: threading.Lock())  # any context manager
    monkeypatch.setattr(driver, "num_devices", lambda: 8)
    for name, value in dict(_START_S=seconds(0.3), _ROLL_CALL_S=seconds(0.5), _REMINDER_S=seconds(0.1), _lost_start="").items():
        monkeypatch.setattr(nvshmem, name, value)

    def start(comm: StoreCommunicator, barrier: threading.Barrier, fails: bool = False) -> Any:
        return outcome(lambda: nvshmem._start(comm, Nvshmem(comm.rank, barrier, fails), {}))

    return start


@pytest.mark.filterwarnings("ignore:rank . has waited .* NVSHMEM's start")
def test_a_start_that_one_rank_does_not_join(ranks: list[StoreCommunicator], start: Any) -> None:
    """The other ranks name it, and do not start NVSHMEM again."""
    barrier = threading.Barrier(3)

    def run(comm: StoreCommunicator) -> Any:
        if comm.rank == 1:  # it leaves just before the start
            comm.ranks_on_host()
            return comm.Bcast(np.zeros(16, np.int8))
        return start(comm, barrier)

    lost = on_all(ranks, run)
    for error in (lost[0], lost[2]):
        assert isinstance(error, EPTimeoutError)
        assert error.peer == 1
        assert f"timeout_s={nvshmem._START_S + nvshmem._ROLL_CALL_S:g}; expected all ranks to start it" in str(error)
        assert "the start of NVSHMEM for rank 1, which did not arrive" in str(error)
    with pytest.raises(EPUnavailableError, match="Start the program again"):
        nvshmem.load()


@pytest.mark.filterwarnings("ignore:rank . has waited .* NVSHMEM's start")
def test_a_network_over_which_nvshmem_does_not_start(ranks: list[StoreCommunicator], start: Any) -> None:
    for error in on_all(ranks, lambda comm: start(comm, threading.Barrier(2))):
        assert isinstance(error, EPTimeoutError)
        assert f"did not end within {nvshmem._START_S:g} s, and all ranks wait in it" in str(error)


def test_a_start_that_succeeds_or_fails(ranks: list[StoreCommunicator], start: Any) -> None:
    barrier = threading.Barrier(3)
    found = on_all(ranks, lambda comm: start(comm, barrier))
    assert [(made.my_pe, made.num_pes) for made in found] == [(0, 3), (1, 3), (2, 3)]
    assert not nvshmem._lost_start
    for error in on_all(ranks, lambda comm: start(comm, barrier, fails=True)):
        assert isinstance(error, EPUnavailableError)
        assert "no network" in str(error)
