"""`consensus`: a step succeeds on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from memory_store import on_all, outcome

from deepep_rt import EPTimeoutError, EPUnavailableError
from deepep_rt.comm import consensus
from deepep_rt.comm.consensus import Consensus
from deepep_rt.comm.store import StoreCommunicator


def test_reports_of_all_ranks(ranks: list[StoreCommunicator], seconds: Callable[[float], float]) -> None:
    limit_s = seconds(0.3)
    made = [Consensus(comm) for comm in ranks]

    def all_ok(comm: StoreCommunicator, ok: bool) -> Any:
        return made[comm.rank].all_ok(ok, "be here", limit_s), made[comm.rank].silent_ranks

    assert on_all(ranks, lambda comm: all_ok(comm, True)) == [(True, [])] * 3
    assert on_all(ranks, lambda comm: all_ok(comm, comm.rank != 1)) == [(False, [])] * 3
    assert on_all(ranks[:2], lambda comm: all_ok(comm, True)) == [(False, [2])] * 2
    error = made[0].timeout_error()
    assert (error.peer, error.rank, error.phase) == (2, 0, "the step to be here")
    assert f"timeout_s={limit_s:g}; expected all ranks to be here" in str(error)
    assert "for rank 2, which did not arrive" in str(error)
    assert all_ok(ranks[2], True) == (False, [0, 1]), "it is late, and gets no answer"


def test_a_rank_that_waits_warns(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]
) -> None:
    monkeypatch.setattr(consensus, "_REMINDER_S", seconds(0.1))
    limit_s = seconds(0.25)
    with pytest.warns(UserWarning, match=rf"rank 0 has waited \d+ of {limit_s:g} s for ranks 1, 2 to be here") as warned:
        Consensus(ranks[0]).all_ok(True, "be here", limit_s)
    assert len(warned) == 2


def test_a_step_of_making_a_buffer(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]
) -> None:
    monkeypatch.setattr(consensus, "_COMPILING_S", seconds(0.3))
    for comm in ranks:
        comm.timeout_s = seconds(0.1)
    made = [Consensus(comm) for comm in ranks]

    def step(comm: StoreCommunicator, failing_rank: int) -> Any:
        def make() -> None:
            with made[comm.rank].step():
                if comm.rank == failing_rank:
                    raise KeyError("mine")

        return type(outcome(make))

    assert on_all(ranks, lambda comm: step(comm, -1)) == [type(None)] * 3
    assert on_all(ranks, lambda comm: step(comm, 1)) == [EPUnavailableError, KeyError, EPUnavailableError]
    assert on_all(ranks[1:], lambda comm: step(comm, -1)) == [EPTimeoutError] * 2
