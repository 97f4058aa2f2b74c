"""`consensus` and `timed_collectives`: ranks arrive, arrive late, or do not arrive, and errors name the missing ones."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import on_all, outcome

from deepep_rt import Buffer, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.backends import agreement
from deepep_rt.comm.consensus import COPY_CEILING, agree_on_measurement, begin_measurement, timed_allgather
from deepep_rt.comm.meeting import Meeting
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.timed_collectives import format_ranks, wait_all


def gather(comm: StoreCommunicator, values: tuple[int, ...] = (), timeout_s: float = 10.0) -> list[list[int]]:
    return timed_allgather(comm, values, timeout_s, "a test", "all ranks to arrive")


def test_all_ranks_arrive(ranks: list[StoreCommunicator]) -> None:
    assert on_all(ranks, lambda comm: gather(comm, (comm.rank, 7))) == [[[0, 7], [1, 7], [2, 7]]] * 3


def test_a_late_rank_does_not_continue_alone(ranks: list[StoreCommunicator]) -> None:
    """It finds the messages of ranks that have given up. Then all ranks find each other."""
    for error in on_all(ranks[:2], lambda comm: outcome(lambda: gather(comm, (5,), 0.2))):
        assert isinstance(error, EPTimeoutError)
        assert "for rank 2, which did not arrive" in str(error)
    late = outcome(lambda: gather(ranks[2], (5,), 0.2))
    assert isinstance(late, EPTimeoutError), "the others have not confirmed that all are there"
    assert late.peer == 0
    assert "for ranks 0, 1, which did not arrive" in str(late)
    assert on_all(ranks, lambda comm: gather(comm, (6, 7))) == [[[6, 7]] * 3] * 3
    assert on_all(ranks, lambda comm: gather(comm, (comm.rank,))) == [[[0], [1], [2]]] * 3


def test_an_interruption_at_any_message(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]
) -> None:
    """One rank leaves the making of a Buffer at each of its messages. The others hear it, and the next Buffer of all ranks works."""
    limit_s, long_s = seconds(2.0), seconds(20.0)
    monkeypatch.setattr(agreement, "_CREATION_TIMEOUT_S", limit_s)
    sizes: dict[str, Any] = dict(num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=3, dtype="float32", backend="host")
    store, real = ranks[0]._store, type(ranks[0]._store).set
    victim: list[int] = []
    left = 0

    def set_key(key: str, value: bytes) -> None:
        nonlocal left
        if threading.get_ident() in victim:
            left -= 1
            if left == 0:
                raise KeyError("mine")
        real(store, key, value)

    def make_and_leave(comm: StoreCommunicator, timeout_s: float) -> Buffer:
        made = Buffer(comm, timeout_s=timeout_s, **sizes)
        made.destroy(in_touch=False)
        return made

    def make(comm: StoreCommunicator, timeout_s: float) -> Any:
        if comm.rank == 1 and timeout_s == limit_s:
            victim[:] = [threading.get_ident()]
        made = outcome(lambda: make_and_leave(comm, timeout_s))
        victim.clear()
        return made

    monkeypatch.setattr(store, "set", set_key)
    for step in range(1, 100):
        left = step
        interrupted = on_all(ranks, lambda comm: make(comm, limit_s))[1]
        monkeypatch.setattr(agreement, "_CREATION_TIMEOUT_S", long_s)
        made = on_all(ranks, lambda comm: make(comm, long_s))
        assert [type(each) for each in made] == [Buffer] * 3, (step, made, interrupted)
        monkeypatch.setattr(agreement, "_CREATION_TIMEOUT_S", limit_s)
        if left > 0:
            break
        assert isinstance(interrupted, KeyError | EPTimeoutError)
    assert 10 < step < 100, "a Buffer takes more messages than that"


def test_a_slow_rank_ends_a_meeting_after_the_others_began_the_next(ranks: list[StoreCommunicator]) -> None:
    meetings = slow, *quick = [Meeting(comm) for comm in ranks]
    for meeting in meetings:
        meeting.begin()
    for meeting in (*meetings, *quick):
        meeting.Test()
    assert all(meeting.Test() for meeting in quick)
    first = {meeting.end() for meeting in quick}
    for meeting in quick:
        meeting.begin()
    assert slow.Test()
    assert first == {slow.end()}
    slow.begin()
    for meeting in 2 * meetings:
        meeting.Test()
    assert all(meeting.Test() for meeting in meetings)
    assert len(first | {meeting.end() for meeting in meetings}) == 2


def test_a_rank_that_leaves_a_meeting_is_heard_once(ranks: list[StoreCommunicator]) -> None:
    """A late rank hears it too. The attempt after it is another one, and waits for all ranks."""
    meetings = leaver, *others = [Meeting(comm) for comm in ranks]
    leaver.begin()
    leaver.leave("signal", "SIGTERM ended its process")
    for meeting in others:
        meeting.begin()
        assert not meeting.Test()
        error = meeting.error("a test")
        assert error is not None
        assert (error.peer, error.reason) == (0, "SIGTERM ended its process")
        assert meeting.error("a test") is None
    for meeting in meetings:
        meeting.begin()
    for meeting in 2 * meetings:
        meeting.Test()
        assert meeting.error("a test") is None
    assert all(meeting.Test() for meeting in meetings)


def test_ranks_that_all_leave_a_meeting_do_not_hear_it_in_the_next(ranks: list[StoreCommunicator]) -> None:
    """Ctrl-C reaches all ranks."""
    meetings = [Meeting(comm) for comm in ranks]
    for meeting in meetings:
        meeting.begin()
        meeting.leave("exception", "KeyboardInterrupt")
    meetings[0].begin()
    assert not meetings[0].Test()
    assert meetings[0].error("a test") is None, "the others left the attempt before"
    for meeting in meetings[1:]:
        meeting.begin()
    for meeting in 2 * meetings:
        meeting.Test()
    assert all(meeting.Test() for meeting in meetings)


@pytest.mark.parametrize("missing", [[2], [0, 1]])
def test_errors_name_missing_ranks(ranks: list[StoreCommunicator], missing: list[int], seconds: Callable[[float], float]) -> None:
    limit_s = seconds(0.2)
    present = [comm for comm in ranks if comm.rank not in missing]
    steps = {
        "a test": lambda comm: gather(comm, timeout_s=limit_s),
        "an allgather": lambda comm: comm.allgather(1),
        "an all-to-all": lambda comm: comm.Alltoall(np.zeros((3, 1)), np.zeros((3, 1))),
    }
    for comm in present:
        comm.timeout_s = limit_s
    for phase, step in steps.items():
        start = time.monotonic()
        errors = on_all(present, lambda comm, step=step: outcome(lambda: step(comm.Dup())))
        assert limit_s <= time.monotonic() - start < limit_s + seconds(3)
        for comm, error in zip(present, errors, strict=True):
            assert isinstance(error, EPTimeoutError)
            assert (error.rank, error.peer, error.phase) == (comm.rank, missing[0], phase)
            text = str(error)
            assert text.startswith(f"timeout_s={limit_s:g}; expected all ranks to ")
            assert f"Rank {comm.rank} waited in {phase} for " in text
            if phase != "an all-to-all":  # there, a rank knows only the first rank that it waits for
                assert f"for {format_ranks(missing)}, which did not arrive" in text


def test_text_of_ranks() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([3, 5]) == "ranks 3, 5"
    assert format_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert format_ranks(range(60)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 52 more"


def test_duplicates_have_the_same_limit(ranks: list[StoreCommunicator]) -> None:
    comm = on_all(ranks, lambda comm: comm.meet(5.0, "", ""))[0]
    assert comm.timeout_s == comm.Dup().timeout_s == comm.dup_for_process().timeout_s == 5.0
    assert ranks[0].timeout_s == float("inf"), "the caller's communicator has no limit"


def test_wait_all() -> None:
    polls = itertools.count()
    soon: Any = SimpleNamespace(Test=lambda: next(polls) >= 3)
    never: Any = SimpleNamespace(Test=lambda: False)
    assert wait_all([], 0.0)
    assert not wait_all([soon], 0.0)
    assert wait_all([soon], 600.0)
    assert not wait_all([soon, never], 0.1)


@pytest.mark.parametrize(
    "call", [lambda comm: agree_on_measurement(comm, 0.3, rows=3), lambda comm: begin_measurement(comm, 0.3)]
)
def test_measurements_end_in_time(ranks: list[StoreCommunicator], call: Any) -> None:
    for error in on_all(ranks[:2], lambda comm: outcome(lambda: call(comm))):
        assert isinstance(error, EPTimeoutError)
        assert "timeout_s=0.3" in str(error)
        assert COPY_CEILING in str(error)


def test_all_ranks_compare_arguments_of_measurements(ranks: list[StoreCommunicator]) -> None:
    def agree(comm: StoreCommunicator, **arguments: Any) -> Any:
        return outcome(lambda: agree_on_measurement(comm, 5.0, **arguments))

    assert on_all(on_all(ranks, lambda comm: agree(comm, rows=3)), lambda met: met.allgather(met.rank)) == [[0, 1, 2]] * 3
    for error in on_all(ranks, lambda comm: agree(comm, rows=3, size=comm.rank)):
        assert isinstance(error, EPInputError)
        assert "rank 0: rows=3, size=0; rank 1: rows=3, size=1; rank 2: rows=3, size=2" in str(error)
    for error in on_all(ranks, lambda comm: agree(comm, has_memory=comm.rank == 1, rows=3)):
        assert isinstance(error, EPOutOfMemoryError)
        assert "ranks 0, 2" in str(error)
