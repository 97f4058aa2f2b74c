"""What a Buffer counts, on the host backend. The kernels' side is in tests/kernels/test_statistics_on_cpu.py."""

from __future__ import annotations

import gc
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch import run_checks
from mpi4py import MPI

from deepep_rt import Buffer, EPConfigError, _env, _statistics_files
from deepep_rt.arrays.compressed_rows import COMPRESSIONS, compressed_row_bytes
from deepep_rt.backends.host.messages import MessageChannel
from deepep_rt.backends.host.statistics import HostStatistics, StepTimer
from deepep_rt.config import Config
from deepep_rt.kernels.table import KERNELS
from deepep_rt.statistics import CALL_KINDS

SIZES = dict(num_max_tokens_per_rank=8, hidden=128, num_topk=2, num_experts=4, backend="host")
X, IDX = np.ones((3, 128), np.float16), np.array([[0, 1]] * 3)


def test_on_three_ranks() -> None:
    run_checks(3, "counted_calls")


def make(**settings: object) -> Buffer:
    return Buffer(MPI.COMM_SELF, **{**SIZES, **settings})


def test_numbers_become_json() -> None:
    with make(statistics=True) as buffer:
        before = buffer.statistics()
        buffer.dispatch(X, IDX)
        after = buffer.statistics()
    assert before.dispatch.calls == 0
    assert after.seconds > before.seconds > 0
    found = json.loads(json.dumps(after.to_dict()))
    assert found["dispatch"] == dict(
        calls=1, rows_sent=3, rows_received=3, bytes_sent=3 * 256, bytes_received=3 * 256, wait_s=[0.0]
    )
    assert found["rows_by_expert"] == [3, 3, 0, 0]
    assert set(found) == {"rank", "seconds", "rows_by_expert", "pool", *CALL_KINDS}


def test_a_repeated_routing_counts_no_experts_again() -> None:
    with make(statistics=True) as buffer:
        sent = buffer.dispatch(X, IDX, expert_alignment=4)
        buffer.dispatch(X, handle=sent.handle)
        counted = buffer.statistics()
    assert (counted.dispatch.calls, counted.dispatch.rows_sent) == (2, 6)
    assert counted.rows_by_expert == (3, 3, 0, 0), "padding does not count"


@pytest.mark.parametrize("form", COMPRESSIONS)
def test_compressed_rows_count_as_they_travel(form: str) -> None:
    with make(statistics=True) as buffer:
        sent = buffer.dispatch(X, IDX)
        buffer.combine(sent.recv_x, sent.handle, compress=form)
        combine = buffer.statistics().combine
    assert combine.bytes_sent == combine.bytes_received == 3 * compressed_row_bytes(128, form)


def test_each_kernel_of_a_call_has_its_kind() -> None:
    """A kernel without a kind counts nothing."""
    kinds = {name: CALL_KINDS[kernel.call_kind] for name, kernel in KERNELS.items() if kernel.call_kind >= 0}
    assert {name for name, kernel in KERNELS.items() if not kernel.is_local} - set(kinds) == {
        "link_rates",
        "wire",
        "copy_bandwidth",
        "await_tiles",  # waits for this rank itself, which does not count
    }
    for name, kind in kinds.items():
        assert kind == ("low_latency_" * name.startswith("ll_") + ("combine" if "combine" in name else "dispatch")), name


def test_calls_that_fail_do_not_count() -> None:
    with make(statistics=True) as buffer:
        with pytest.raises(ValueError, match="topk_idx"):
            buffer.dispatch(X, np.full((3, 2), 9))
        assert buffer.statistics().dispatch.calls == 0
        buffer.dispatch(X, IDX)
        assert buffer.statistics().dispatch.calls == 1


def test_without_statistics_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStatistics, "__init__", lambda *_: pytest.fail("it counts"))
    with make() as buffer:
        buffer.dispatch(X, IDX)


def test_the_timer_of_a_step() -> None:
    """The longest wait for each peer counts, from the first poll without success."""
    done: set[int] = {3}
    messages = [SimpleNamespace(peer=peer, is_done=lambda peer=peer: peer in done) for peer in (1, 2, 3, 3)]
    waits = np.zeros(4)
    timer = StepTimer(messages, waits)
    timer.look()
    time.sleep(0.02)
    done.add(1)
    timer.look()
    time.sleep(0.02)
    done.add(2)
    timer.end()
    assert waits[0] == 0
    assert waits[3] == 0, "it was there at the first poll"
    assert 0.02 <= waits[1] < waits[2] - 0.015
    before = waits.copy()
    StepTimer(messages, waits).end()  # all was there
    assert (waits == before).all()


def test_measurements_are_no_calls() -> None:
    statistics = HostStatistics(Config(2, 8, 64, 2, 4))
    assert statistics.step([]) is None
    statistics.add_rows(1, 1, 1)
    assert statistics.counters().calls[0].rows_sent == 0
    assert MessageChannel.__init__.__defaults__[-1] is None


# --- the variable, and files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts", "folder"), [("", False, None), ("1", True, None), ("0", False, None), ("/a/b", True, "/a/b")]
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, counts: bool, folder: str | None) -> None:
    monkeypatch.setenv("DEEPEP_RT_STATISTICS", text)
    assert _env.statistics() == Config(2, 8, 64, 2, 4).statistics == counts
    assert _env.statistics_folder() == (folder and Path(folder))
    assert not Config(2, 8, 64, 2, 4, statistics=False).statistics


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_STATISTICS", "a/relative/path")
    with pytest.raises(
        EPConfigError, match="DEEPEP_RT_STATISTICS='a/relative/path'; expected 0, 1 or the absolute path of a folder"
    ):
        make()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPEP_RT_STATISTICS", str(tmp_path / "made"))
    monkeypatch.setattr(_statistics_files, "_PERIOD_S", 0.01)
    return tmp_path / "made"


def test_the_thread_ends_with_the_last_buffer(folder: Path) -> None:
    writer = _statistics_files._writer
    with make(), make():
        assert writer._thread is not None
        thread = writer._thread
        time.sleep(0.05)
        assert len(_statistics_files.read(folder)[0]) == 2
    thread.join()
    assert not list(folder.glob(".*")), "no draft stays"
    assert all(snapshot.has_ended for snapshot in _statistics_files.read(folder)[0])


@pytest.mark.filterwarnings("ignore:a Buffer was dropped")
def test_a_dropped_buffer_is_not_held(folder: Path) -> None:
    buffer = make()
    thread = _statistics_files._writer._thread
    assert thread is not None
    del buffer
    gc.collect()
    thread.join()


def test_a_folder_that_cannot_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The program goes on, and the log says so once."""
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "deepep_rt"), make() as buffer:
        time.sleep(0.05)
        buffer.dispatch(X, IDX)
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "old.json").write_text('{"format": 0}')
    (tmp_path / ".draft.json").write_text("{")
    found, unknown = _statistics_files.read(tmp_path)
    assert (found, [name for name, _ in unknown]) == ([], ["old.json", "other.json"])
