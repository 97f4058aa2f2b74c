"""`python -m deepep_rt statistics` with snapshots that no job has written."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")

from deepep_rt import CallStatistics, PoolUse, Statistics, _statistics_files
from deepep_rt._statistics_files import Snapshot
from deepep_rt.cli import app as cli
from deepep_rt.cli import slow_ranks
from deepep_rt.cli import statistics as command
from deepep_rt.cli.slow_ranks import judge, rates_of
from deepep_rt.jit import trusted_files

NOW, SECONDS = 1000.0, 5.0


def statistics(rank: int, seconds: float, calls: int, waits: list[float]) -> Statistics:
    """Make numbers with all waits in combine, and equal numbers of calls in dispatch and combine."""
    none = (0.0,) * len(waits)
    call = CallStatistics(calls, 10 * calls, 20 * calls, 1000 * calls, 2000 * calls, none)
    idle = CallStatistics(0, 0, 0, 0, 0, none)
    combine = dataclasses.replace(call, wait_s=tuple(waits))
    return Statistics(rank, seconds, call, combine, idle, idle, (calls,), PoolUse(50, 80, 100, 0))


def snapshot(rank: int, waits: list[float], *, age_s: float = 0.0, has_ended: bool = False, seconds: float = SECONDS) -> Snapshot:
    """Make the file of a rank that waited `waits` seconds for each rank in the last `seconds`, after 100 s without waits."""
    before, after = statistics(rank, 100.0, 100, [0.0] * len(waits)), statistics(rank, 100.0 + seconds, 150, waits)
    return Snapshot("job-1", len(waits), f"node{rank}", 10 + rank, NOW - age_s, has_ended, after, before)


def job(*waits: list[float]) -> list[Snapshot]:
    return [snapshot(rank, of_rank) for rank, of_rank in enumerate(waits)]


def verdict(snapshots: list[Snapshot]) -> str:
    return str(judge([rates_of(one, NOW) for one in snapshots], snapshots[0].num_ranks))


def test_rates() -> None:
    rates = rates_of(snapshot(1, [2.0, 0.0], age_s=1.5), NOW)
    assert rates.calls_per_s == dict(dispatch=10.0, combine=10.0, low_latency_dispatch=0.0, low_latency_combine=0.0)
    assert (rates.sent_bytes_per_s, rates.received_bytes_per_s) == (20_000, 40_000)
    assert rates.wait_shares == (0.4, 0.0)
    assert (rates.rank, rates.host, rates.state, rates.age_s, rates.seconds) == (1, "node1", "runs", 1.5, 5.0)


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ([[0, 0.1, 0, 2.0], [0.1, 0, 0, 2.1], [0.1, 0, 0, 2.05], [0, 0, 0, 0]], "rank 3 is slow: other ranks waited 41%"),
        (
            [[0, 2, 0, 1.5], [0, 0, 0, 1.5], [0, 2, 0, 1.5], [0, 2, 0, 0]],
            "rank 1 is slow: other ranks waited 40% of the last 5 s for it; rank 3 is slow: other ranks waited 30%",
        ),
        # Rank 0 could not send to rank 2 before rank 1 had come.
        ([[0, 2, 0], [0, 0, 0], [2, 2, 0]], "rank 1 is slow: other ranks waited 40%"),
        # Ranks waited for rank 1 by chance, and much less than for the slow rank.
        ([[0, 0.5, 0, 4], [0, 0, 0, 4], [0, 0.6, 0, 4], [0, 0.4, 0, 0]], "rank 3 is slow: other ranks waited 80%"),
        # This wait began before the interval.
        ([[0, 60], [0, 0]], "rank 1 is slow: other ranks waited 100%"),
    ],
)
def test_slow_ranks_are_named(waits: list[list[float]], text: str) -> None:
    assert verdict(job(*waits)) == f"{text} of the last 5 s for it"


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param([[0, 0.1], [0.1, 0]], id="short"),
        pytest.param([[0, 2, 2], [2, 0, 2], [2, 2, 0]], id="the same for all, as while rows are on their way"),
        pytest.param([[0, 0], [0, 0]], id="idle"),
        pytest.param([[0.0]], id="one rank"),
    ],
)
def test_no_rank_stands_out(waits: list[list[float]]) -> None:
    assert "no rank stands out" in verdict(job(*waits))


def both(**options: Any) -> list[Snapshot]:
    return [snapshot(rank, [0, 0], **options) for rank in range(2)]


SILENT = [*both()[:1], *both(age_s=slow_ranks.STALE_S + 1)[1:]]


@pytest.mark.parametrize(
    ("snapshots", "state", "text"),
    [
        (SILENT, "silent", "ranks that write no file any more: 1. Their processes have ended or hang"),
        ([snapshot(1, [0, 0, 0])], "runs", "ranks without a file: 0, 2. Let all ranks write to this folder"),
        (both(has_ended=True, age_s=1000), "destroyed", "the Buffer was destroyed"),
        (both(seconds=0.0), "runs", "no rank stands out in the last 0 s"),
    ],
)
def test_the_state_of_files(snapshots: list[Snapshot], state: str, text: str) -> None:
    rates = rates_of(snapshots[-1], NOW)
    assert (rates.state, max(rates.wait_shares)) == (state, 0.0)
    assert verdict(snapshots) == text


# --- the command ----------------------------------------------------------------------------------------------------------------------


def write(folder: Path, snapshots: list[Snapshot]) -> None:
    for one in snapshots:
        content: dict[str, Any] = {**dataclasses.asdict(one), "format": 1}
        (folder / f"{one.buffer}-rank{one.now.rank}.json").write_text(json.dumps(content))


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.run(["statistics", *words])
    out, err = capsys.readouterr()
    assert (caught.value.code or 0) == status, out + err
    return out, err


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock. Return the pauses that the command makes."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("COLUMNS", "200")
    return pauses


SLOW = ([0, 0, 2.0], [0, 0, 2.1], [0, 0, 0])


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path, job(*SLOW))
    out, _ = run(capsys, str(tmp_path))
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["Buffer", "job-1,", "over", "5", "s"]
    assert lines[3] == ["1", "node1", "20.0", "0.00", "0.00", "rank", "2,", "42%", "50%", "runs"]
    assert "rank 2 is slow: other ranks waited 41% of the last 5 s for it" in out


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path, job(*SLOW))
    (found,) = json.loads(run(capsys, str(tmp_path), "--json")[0])
    assert [one["rank"] for one in found["slow"]] == [2]
    assert found["verdict"].startswith("rank 2 is slow")
    assert [one["wait_shares"][2] for one in found["ranks"]] == pytest.approx([0.4, 0.42, 0.0])
    assert found["ranks"][0]["statistics"]["combine"]["calls"] == 150


def test_following_ends_with_the_buffers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [dataclasses.replace(one, has_ended=True) for one in job(*SLOW)]
    write(tmp_path, [dataclasses.replace(one, buffer="older") for one in ended])
    write(tmp_path, job(*SLOW))
    monkeypatch.setattr(time, "sleep", lambda pause: (clock.append(pause), len(clock) == 2 and write(tmp_path, ended)))
    out, _ = run(capsys, str(tmp_path), "--follow")
    assert clock == [command._FOLLOW_PERIOD_S] * 2
    assert out.count("rank 2 is slow") == 2
    assert "older" not in out


def test_a_folder_without_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    out, err = run(capsys, str(tmp_path))
    assert out == f"no Buffer writes statistics to {tmp_path} now\n"
    assert err == "other.json: no file of statistics of this version\n"


def test_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = run(capsys, str(tmp_path / "none"), status=1)
    assert "none is no folder; expected the one that DEEPEP_RT_STATISTICS of the job names" in err


def damaged(**changes: Any) -> str:
    return json.dumps({**dataclasses.asdict(snapshot(0, [0, 0])), "format": 1, **changes})


def with_numbers(**changes: Any) -> str:
    return damaged(now={**dataclasses.asdict(snapshot(0, [0, 0]).now), **changes})


CALLS = dict(calls=0, rows_sent=0, rows_received=0, bytes_sent=0, bytes_received=0, wait_s=[0, 0])


@pytest.mark.parametrize(
    "text",
    [
        damaged(num_ranks=-1),
        damaged(num_ranks="x"),
        damaged(num_ranks=True),
        damaged(num_ranks=1),  # fewer than the waits
        damaged(host=7),
        damaged(host="x\x1b]0;title\x07"),
        damaged(buffer="x\x1b[2J"),
        damaged(buffer="\u202eright to left"),
        damaged(written_at=None),
        damaged(written_at=float("nan")),
        damaged(has_ended=0),
        damaged(now=[]),
        damaged(more=1),
        with_numbers(rank=2),
        with_numbers(seconds="x"),
        with_numbers(seconds=-1.0),
        with_numbers(rows_by_expert=[None]),
        with_numbers(pool={}),
        with_numbers(dispatch={**CALLS, "calls": None}),
        with_numbers(dispatch={**CALLS, "calls": -1}),
        with_numbers(dispatch={**CALLS, "bytes_sent": 10**400}),
        with_numbers(dispatch={**CALLS, "wait_s": []}),
        with_numbers(dispatch={**CALLS, "wait_s": [0, float("inf")]}),
        "[" * 200_000,
        "1" * 5000,
        "\x00",
    ],
    ids=lambda text: text[-60:],
)
def test_damaged_files_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    write(tmp_path, job(*SLOW))
    (tmp_path / "x.json").write_text(text)
    for words in ((), ("--json",)):
        out, err = run(capsys, str(tmp_path), *words)
        assert "rank 2 is slow" in out
        assert err == "x.json: no file of statistics of this version\n"


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("job-1-rank0.json"),
    ],
    ids=["FIFO", "folder", "link to itself", "/dev/zero", "link"],
)
def test_only_regular_files_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Any) -> None:
    write(tmp_path, job(*SLOW))
    make(tmp_path / "x.json")
    out, err = run(capsys, str(tmp_path))
    assert "rank 2 is slow" in out
    assert err == "x.json: no file of statistics of this version (it cannot be read: it is no regular file)\n"


def test_names_of_files_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in (b"x\x1b[2J\n.json", b"\xff.json"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_text("{}")
    _, err = run(capsys, str(tmp_path))
    assert [line.partition(":")[0] for line in err.splitlines()] == ["x\\x1b[2J\\n.json", "\\udcff.json"]


def test_files_that_are_too_large(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, job(*SLOW))
    monkeypatch.setattr(_statistics_files, "_MAX_BYTES", 100)
    assert run(capsys, str(tmp_path))[1].count("(it has more than 100 bytes)") == 3


def test_files_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the folder is trusted too, so that a user can follow the job of another one."""
    write(tmp_path, job(*SLOW))
    real = trusted_files.status_of
    owners = {"folder": 1001, "file": 1001}

    def status_of(number: int) -> Any:
        found = real(number)
        uid = owners["folder" if stat.S_ISDIR(found.st_mode) else "file"]
        return SimpleNamespace(st_uid=uid, st_gid=1001, st_mode=found.st_mode)

    monkeypatch.setattr(trusted_files, "status_of", status_of)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert len(_statistics_files.read(tmp_path)[0]) == 3
    owners["file"] = 1002
    found, unknown = _statistics_files.read(tmp_path)
    assert (found, unknown[0]) == ([], ("job-1-rank0.json", "user 1002 owns it"))


def test_files_of_one_name_that_differ_in_their_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path, job(*SLOW))
    (tmp_path / "other.json").write_text(json.dumps({**dataclasses.asdict(snapshot(0, [0.0])), "format": 1}))
    out, _ = run(capsys, str(tmp_path))
    assert out.count("Buffer job-1, over") == 2
    assert "rank 2 is slow" in out


def test_a_folder_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert f"{tmp_path} cannot be read: Permission denied" in run(capsys, str(tmp_path), status=1)[1]
