"""`rendezvous` and `timed_collectives`: ranks come, come late, or do not come, and those that wait are told which."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import Store, on_all

from deepep_rt import EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from deepep_rt.comm import rendezvous, timed_collectives
from deepep_rt.comm.failure_notice import FailureNotice
from deepep_rt.comm.rendezvous import Consensus, agree_on_measurement, private_comm, timed_allgather
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.timed_collectives import format_ranks
from deepep_rt.cuda import nvshmem as symmetric


@pytest.fixture
def ranks() -> list[StoreCommunicator]:
    store = Store()
    return [StoreCommunicator(store, "test", rank, 3) for rank in range(3)]


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def test_all_come(ranks: list[StoreCommunicator]) -> None:
    found = on_all(ranks, lambda comm: timed_allgather(comm, (comm.rank, 7), 10.0, "a meeting", "all to come"))
    assert found == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_rank_that_comes_late_does_not_go_on_alone(ranks: list[StoreCommunicator]) -> None:
    """It finds the words of the others, which are not there any more; and then all find each other."""
    for comm in ranks[:2]:
        assert not comm.Iallgather(np.array([1, 5, *6 * [0]]), np.zeros((3, 8), np.int64)).Test()
    with pytest.raises(EPTimeoutError) as caught:
        timed_allgather(ranks[2], (5,), 0.2, "a meeting", "all to come")
    assert caught.value.peer == 0
    assert "for ranks 0, 1, which did not come" in str(caught.value)
    late = outcome(lambda: timed_allgather(ranks[0], (5,), 0.1, "a meeting", "all to come"))
    assert isinstance(late, EPTimeoutError), "nobody has said twice that all are there"
    assert on_all(ranks, lambda comm: timed_allgather(comm, (6, 7), 10.0, "another meeting", "all to come")) == [[[6, 7]] * 3] * 3


@pytest.mark.parametrize("missing", [[2], [0, 1]])
def test_ranks_that_do_not_come_are_named(ranks: list[StoreCommunicator], missing: list[int]) -> None:
    here = [comm for comm in ranks if comm.rank not in missing]
    steps = {
        "a meeting": lambda comm: timed_allgather(comm, (), 0.2, "a meeting", "all to come"),
        "gathering": lambda comm: comm.allgather(1),
        "an exchange": lambda comm: comm.Alltoall(np.zeros((3, 1)), np.zeros((3, 1))),
    }
    for comm in here:
        comm.timeout_s = 0.2
    for phase, step in steps.items():
        start = time.monotonic()
        errors = on_all(here, lambda comm, step=step: outcome(lambda: step(comm.Dup())))
        assert 0.2 <= time.monotonic() - start < 3
        for comm, error in zip(here, errors, strict=True):
            assert isinstance(error, EPTimeoutError)
            assert (error.rank, error.peer) == (comm.rank, missing[0])
            assert phase in error.phase
            assert f"timeout_s=0.2: rank {comm.rank} waited" in str(error)
            if phase != "an exchange":  # of which a rank knows only whom it waits for first
                assert f"for {format_ranks(missing)}, which did not come" in str(error)


def test_how_ranks_are_named() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([3, 5]) == "ranks 3, 5"
    assert format_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert format_ranks(range(60)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 52 more"


def test_a_limit_is_kept_by_duplicates(ranks: list[StoreCommunicator]) -> None:
    comm = private_comm(ranks[0], 5.0, "", "")
    assert comm.timeout_s == comm.Dup().timeout_s == comm.dup_for_process().timeout_s == 5.0
    assert ranks[0].timeout_s == float("inf"), "the caller's own has none"


def test_requests_are_done_now_or_soon() -> None:
    clock = time.monotonic()
    soon: Any = SimpleNamespace(Test=lambda: time.monotonic() > clock + 0.1)
    never: Any = SimpleNamespace(Test=lambda: False)
    assert timed_collectives.wait_all([], 0.0)
    assert not timed_collectives.wait_all([soon], 0.0)
    assert timed_collectives.wait_all([soon], 5.0)
    assert not timed_collectives.wait_all([soon, never], 0.1)


def test_all_or_none(ranks: list[StoreCommunicator]) -> None:
    everybody = [Consensus(comm) for comm in ranks]

    def all_ok(comm: StoreCommunicator, sound: bool) -> Any:
        return everybody[comm.rank].all_ok(sound, "be here", 0.3), everybody[comm.rank].silent_ranks

    assert on_all(ranks, lambda comm: all_ok(comm, True)) == [(True, [])] * 3
    assert on_all(ranks, lambda comm: all_ok(comm, comm.rank != 1)) == [(False, [])] * 3
    assert on_all(ranks[:2], lambda comm: all_ok(comm, True)) == [(False, [2])] * 2
    error = everybody[0].timeout_error()
    assert (error.peer, error.rank) == (2, 0)
    assert "timeout_s=0.3" in str(error)
    assert "for rank 2, which did not come; expected all ranks to be here" in str(error)
    assert all_ok(ranks[2], True) == (False, [0, 1]), "it comes late, and nobody answers it"


def test_a_rank_says_for_whom_it_waits(ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REMINDER_S", 0.1)
    with pytest.warns(UserWarning, match=r"rank 0 has waited 0 of 0\.25 s for ranks 1, 2 to be here") as said:
        Consensus(ranks[0]).all_ok(True, "be here", 0.25)
    assert len(said) == 2


def test_a_part_of_making_a_buffer(ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_COMPILING_S", 0.3)
    for comm in ranks:
        comm.timeout_s = 0.1
    everybody = [Consensus(comm) for comm in ranks]

    def step(comm: StoreCommunicator, fails: int) -> Any:
        def make() -> None:
            with everybody[comm.rank].step():
                if comm.rank == fails:
                    raise KeyError("mine")

        return type(outcome(make))

    assert on_all(ranks, lambda comm: step(comm, -1)) == [type(None)] * 3
    assert on_all(ranks, lambda comm: step(comm, 1)) == [EPUnavailableError, KeyError, EPUnavailableError]
    assert on_all(ranks[1:], lambda comm: step(comm, -1)) == [EPTimeoutError] * 2


def test_measurements_are_compared(ranks: list[StoreCommunicator]) -> None:
    def agree(comm: StoreCommunicator, **given: Any) -> Any:
        return outcome(lambda: agree_on_measurement(comm, 5.0, **given))

    assert on_all(ranks, lambda comm: agree(comm, rows=3)) == [None] * 3
    for error in on_all(ranks, lambda comm: agree(comm, rows=3, size=comm.rank)):
        assert isinstance(error, EPInputError)
        assert "rank 0: rows=3, size=0; rank 1: rows=3, size=1; rank 2: rows=3, size=2" in str(error)
    for error in on_all(ranks, lambda comm: agree(comm, has_memory=comm.rank == 1, rows=3)):
        assert isinstance(error, EPOutOfMemoryError)
        assert "ranks 0, 2" in str(error)


class Nvshmem:
    """Its start waits for all ranks, and for nothing else."""

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
        self._barrier.wait(3)

    def my_pe(self) -> int:
        return self._rank

    def n_pes(self) -> int:
        return 3


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts NVSHMEM on some of three ranks."""
    driver = pytest.importorskip("deepep_rt.cuda.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    monkeypatch.setattr(driver, "CurrentContext", lambda: threading.Lock())  # any context
    monkeypatch.setattr(driver, "num_devices", lambda: 8)
    for name, value in dict(_START_S=0.3, _ROLL_CALL_S=0.5, _REMINDER_S=0.1, _lost_start="").items():
        monkeypatch.setattr(symmetric, name, value)

    def start(comm: StoreCommunicator, barrier: threading.Barrier, fails: bool = False) -> Any:
        nvshmem = Nvshmem(comm.rank, barrier, fails)
        return outcome(lambda: symmetric._start(comm, nvshmem, {}))

    return start


@pytest.mark.filterwarnings("ignore:rank . waits for NVSHMEM's start")
def test_a_start_of_nvshmem_that_does_not_end(ranks: list[StoreCommunicator], starts: Any) -> None:
    """A rank is lost in it: the others say which, and do not start it again."""

    def start(comm: StoreCommunicator) -> Any:
        if comm.rank == 1:  # it goes as far as the start
            comm.ranks_on_host()
            return comm.Bcast(np.zeros(16, np.int8))
        return starts(comm, together_)

    together_ = threading.Barrier(3)
    lost = on_all(ranks, start)
    for error in (lost[0], lost[2]):
        assert isinstance(error, EPTimeoutError)
        assert error.peer == 1
        assert "timeout_s=0.8: rank" in str(error)
        assert "the start of NVSHMEM for rank 1, which did not come" in str(error)
    with pytest.raises(EPUnavailableError, match="Start the program again"):
        symmetric.load()


@pytest.mark.filterwarnings("ignore:rank . waits for NVSHMEM's start")
def test_a_network_over_which_nvshmem_does_not_start(ranks: list[StoreCommunicator], starts: Any) -> None:
    for error in on_all(ranks, lambda comm: starts(comm, threading.Barrier(2))):
        assert isinstance(error, EPTimeoutError)
        assert "did not end within 0.3 s, and all ranks wait in it" in str(error)


def test_a_start_of_nvshmem(ranks: list[StoreCommunicator], starts: Any) -> None:
    barrier = threading.Barrier(3)
    found = on_all(ranks, lambda comm: starts(comm, barrier))
    assert [(made.my_pe, made.num_pes) for made in found] == [(0, 3), (1, 3), (2, 3)]
    assert not symmetric._lost_start
    for error in on_all(ranks, lambda comm: starts(comm, barrier, fails=True)):
        assert isinstance(error, EPUnavailableError)
        assert "no network" in str(error)


def test_last_words_of_an_error_without_a_text(ranks: list[StoreCommunicator]) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    words = [FailureNotice(comm) for comm in ranks]
    speaker = threading.Thread(target=words[0].notify, args=(Broken(),))
    speaker.start()
    end = time.monotonic() + 5
    while not words[1].failed_peers() and time.monotonic() < end:
        time.sleep(0.01)
    words[2].start_listening()
    while not words[2].failed_peers() and time.monotonic() < end:
        time.sleep(0.01)
    speaker.join()
    assert "Broken: (its __str__ raises KeyError)" in str(words[1].error(0, "rows"))
