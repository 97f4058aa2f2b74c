"""`failure_notice`: ranks that leave tell their peers why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from memory_store import make_ranks, on_all, outcome

from deepep_rt import Buffer, EPTimeoutError, EPUnavailableError
from deepep_rt.comm import failure_notice, process_end
from deepep_rt.comm.failure_notice import FAILURE_NOTICE_TAG, CallProgress, FailureNotice
from deepep_rt.comm.store import StoreCommunicator


@pytest.fixture
def notices(ranks: list[StoreCommunicator]) -> list[FailureNotice]:
    return [FailureNotice(comm) for comm in ranks]


def _start_notifying(notice: FailureNotice, error: BaseException) -> threading.Thread:
    thread = threading.Thread(target=notice.notify, args=(error,))
    thread.start()
    return thread


def test_an_error_without_a_text(notices: list[FailureNotice], seconds: Callable[[float], float]) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    leaving = _start_notifying(notices[0], Broken())
    end = time.monotonic() + seconds(5)
    while not notices[1].failed_peers() and time.monotonic() < end:
        time.sleep(0.01)
    notices[2].start_listening()
    while not notices[2].failed_peers() and time.monotonic() < end:
        time.sleep(0.01)
    leaving.join()
    assert "Broken: (its __str__ raises KeyError)" in str(notices[1].error(0, "rows"))


def test_what_a_lost_rank_has_said_counts(ranks: list[StoreCommunicator], notices: list[FailureNotice]) -> None:
    """The system may tell of the end of a process before its last notice is read."""
    notices[1].leave(process_end.END, "its program ended")
    notices[0].lose(1, "its process has ended")
    notices[0].lose(2, "its process has ended")
    assert notices[0].lost == (1, 2)
    notices[0].drain()
    assert notices[0].lost == (2,)
    assert "its program ended" in str(notices[0].error(1, "rows"))
    assert notices[0].error(2, "rows").ranks == (2,)


def test_notify_waits_for_the_readers(
    ranks: list[StoreCommunicator],
    notices: list[FailureNotice],
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[float], float],
) -> None:
    """The store may end with the process of the leaving rank."""
    monkeypatch.setattr(process_end, "_DELIVERY_S", seconds(1.0))
    failed: list[int] = []

    def listen(notice: FailureNotice) -> None:
        end = time.monotonic() + seconds(5)
        while time.monotonic() < end and not failed:
            failed.extend(notice.failed_peers())
            time.sleep(0.01)

    listeners = [threading.Thread(target=listen, args=(notice,)) for notice in notices[1:]]
    for listener in listeners:
        listener.start()
    start = time.monotonic()
    notices[0].notify(KeyError("mine"))
    assert not any(f"/{FAILURE_NOTICE_TAG}/" in key for key in ranks[0]._store.held), "all peers have read it"
    assert time.monotonic() - start < seconds(0.9)
    for listener in listeners:
        listener.join()
    assert failed
    notices[1].notify(KeyError("no peer listens"))
    assert seconds(0.9) < time.monotonic() - start < seconds(4)


def test_earlier_data_of_a_leaving_rank_may_still_arrive(notices: list[FailureNotice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_notice, "_GRACE_S", 60.0)
    leaving = _start_notifying(notices[0], KeyError("mine " * 50))
    while not notices[1]._left:
        assert notices[1].failed_peers() == []
    time.sleep(0.01)
    assert notices[1].failed_peers() == []
    monkeypatch.setattr(failure_notice, "_GRACE_S", 0.0)
    assert notices[1].failed_peers() == [0]
    assert "mine " * 50 in str(notices[1].error(0, "rows")), "the whole text arrives"
    leaving.join()


def test_a_rank_that_does_something_else(ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer misses it if the peer does not do the same."""
    monkeypatch.setattr(failure_notice, "_GRACE_S", 0.0)
    progress = CallProgress("the making of a Buffer")
    peer = FailureNotice(ranks[1], progress)
    FailureNotice(ranks[0]).go_elsewhere(progress.name, "it makes another Buffer")
    assert peer.refusals() == ""
    progress.name = "dispatch"
    assert peer.refusals() == ". Rank 0 does not take part: it makes another Buffer"
    assert peer.failed_peers() == [0]
    assert peer.error(0, "rows").call_idx == 0


@pytest.mark.parametrize("error", [EPUnavailableError("the store has ended"), RuntimeError("MPI has failed")])
def test_a_notice_that_cannot_be_sent_is_no_error(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ranks[0], "isend", fail)
    notice = FailureNotice(ranks[0])
    notice.refuse(KeyError("mine"), "dispatch")
    assert notice.has_refused


def test_the_store_ends_after_a_notice(
    ranks: list[StoreCommunicator], notices: list[FailureNotice], seconds: Callable[[float], float]
) -> None:
    """It lives in the process of a rank, which may leave as soon as all peers have read why."""
    leaving = _start_notifying(notices[0], KeyError("mine"))
    while not notices[1]._left or not notices[2]._left:
        notices[1].failed_peers()
        notices[2].failed_peers()
    leaving.join()
    ranks[0]._store.fails = True
    end = time.monotonic() + seconds(5)
    while not (failed := notices[1].failed_peers()) and time.monotonic() < end:
        time.sleep(0.01)
    assert failed == [0]


def test_a_call_names_the_rank_that_ended_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store ends while the call still waits for data that the rank sent before its notice."""
    ranks = make_ranks(2)
    store = ranks[0]._store
    sizes = dict(
        num_max_tokens_per_rank=8, hidden=64, num_topk=1, num_experts=2, timeout_s=120.0, dtype="float32", backend="host"
    )
    buffers = on_all(ranks, lambda comm: Buffer(comm, **sizes))
    delete_key = store.delete_key

    def end_after_the_notice(key: str) -> bool:
        deleted = delete_key(key)
        store.fails = f"/{FAILURE_NOTICE_TAG}/" in key
        return deleted

    monkeypatch.setattr(store, "delete_key", end_after_the_notice)

    def use(comm: StoreCommunicator) -> None:
        with buffers[comm.rank] as buffer:
            if comm.rank == 0:
                raise KeyError("mine")
            buffer.dispatch(np.ones((4, 64), np.float32), np.zeros((4, 1), np.int64))

    error = on_all(ranks, lambda comm: outcome(lambda: use(comm)))[1]
    assert isinstance(error, EPTimeoutError), error
    assert "rank 0 left the Buffer" in str(error)
    assert "KeyError: 'mine'" in str(error)
    assert "the store" in str(error.__cause__)
