"""Run `python -m deepep_rt soak --kill`: ranks are killed, stopped and added, and each damage is found."""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer")

from launch import environment, run_command
from paths import PROGRAMS

from deepep_rt import EPConfigError, EPError
from deepep_rt.soak import buffers, kill, member, plan, processes

COMMAND = "-m", "deepep_rt", "soak", "--kill", "--backend", "host"


def run(*words: object, status: int | None = 0) -> tuple[str, str]:
    return run_command(sys.executable, *words, status=status, limit_s=300, **environment())


def damaged(damage: str, *options: object) -> str:
    """Return what a run of damaged ranks prints."""
    return "".join(run(PROGRAMS / "damaged_kills.py", damage, *options, status=1))


def test_kills_joins_and_leaves(tmp_path: Path) -> None:
    report = tmp_path / "kills.json"
    printed, errors = run(*COMMAND, "--changes", 4, "--stops", 0, "--seed", 3, "--timeout-s", 30, "--json", report)
    assert errors == ""
    found = json.loads(report.read_text())
    assert (found["status"], found["seed"], found["left_behind"]) == ("passed", 3, [])
    assert found["changes"] == {"kill": 1, "stop": 0, "leave": 1, "wake": 1, "join": 1}, "the seed decides"
    assert found["rounds"] >= 5
    assert found["checked_bytes"] > 10**4
    assert 0 < found["calls"]["shrink"]["median_s"] <= found["calls"]["shrink"]["longest_s"]
    assert re.match(r"passed: 1 kill, 0 stops, 1 leave, 1 wake, 1 join in .* rounds, 0.0\d\d GB checked\n", printed), printed
    for row in ("shrink", "admit", "join", "wake", "a round after a kill"):
        assert re.search(rf"^{row} +\d+ +[\d.]+ +[\d.]+$", printed, re.MULTILINE), printed


@pytest.mark.full
def test_stops_too(seconds: Callable[[float], float]) -> None:
    words = "--ranks", 2, "--changes", 3, "--stops", 0.6, "--seed", 7, "--timeout-s", seconds(2)
    printed, _ = run(*COMMAND, *words)
    assert printed.startswith("passed: 1 kill, 1 stop, 0 leaves, 0 wakes, 1 join in "), printed


def test_rounds_for_gpus() -> None:
    """Graphs replay in each generation, and one along a routing of before is refused."""
    sizes = "--hidden", 256, "--experts", 6, "--topk", 2, "--low-latency-tokens", 8
    words = "--ranks", 2, "--changes", 2, "--stops", 0, "--seed", 0, "--timeout-s", 30
    printed, _ = run(PROGRAMS / "kills_as_on_gpus.py", *sizes, *words)
    assert printed.startswith("passed: 1 kill, 0 stops, 0 leaves, 0 wakes, 1 join"), printed


def test_a_wrong_bit_is_found() -> None:
    printed = damaged("bit", "--changes", 20, "--stops", 0, "--seed", 1, "--timeout-s", 30)
    assert printed.startswith("mismatch: ")
    assert re.search(r"MISMATCH on rank \d in round \d+ of seed 1: x of combine", printed)
    assert "1 of " in printed
    assert "soak --kill --backend host --ranks 3 --slots 4 --stops 0 --timeout-s 30 --seed 1 --changes " in printed


@pytest.mark.full
def test_what_ranks_leave_behind_is_found() -> None:
    printed = damaged("leak", "--changes", 4, "--stops", 0, "--seed", 1, "--timeout-s", 30)
    shared = re.findall(r"LEFT BEHIND: (/dev/shm/test[.]\d+)", printed)
    for path in shared:
        Path(path).unlink()
    assert printed.startswith("leak: ")
    assert shared
    for kind in (
        r"process \d+, which process \d+ started",
        r"temporary file \w+",
        r"rank \d .*: \d+ more descriptors and threads",
    ):
        assert re.search(f"LEFT BEHIND: {kind}", printed), kind


@pytest.mark.full
def test_a_hang_is_found() -> None:
    printed = damaged("hang", "--changes", 20, "--stops", 0, "--seed", 1, "--timeout-s", 1)
    assert re.search(
        r"error: after \d changes? of seed 1, rank .*: nothing heard within .* Repeat it: python -m deepep_rt soak", printed
    )
    assert "in hang" in printed, "the stacks"


# --- parts -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "3"], "--rounds is 3; expected it only without --kill"),
        (["--groups", "2,1"], "--groups is 2,1; expected it only without"),
        (["--ranks", "5", "--slots", "4"], "--ranks is 5 and --slots is 4"),
        (["--changes", "0"], "--changes is 0"),
        (["--stops", "2"], "--stops is 2"),
        (["--hidden", "7"], "hidden=7"),
        (["--low-latency-tokens", "2"], "--low-latency-tokens is 2; expected at least the 4"),
    ],
)
def test_wrong_options_are_errors(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepep_rt.cli import app

    monkeypatch.setattr(processes, "COMMAND", ["false"])
    with pytest.raises(SystemExit) as end:
        app.run([*COMMAND[2:], *options])
    assert end.value.code == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_options_of_kill_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    from deepep_rt.cli import app

    with pytest.raises(SystemExit):
        app.run(["soak", "--changes", "3"])
    assert "--changes is 3; expected it only with --kill" in capsys.readouterr().err


def test_several_processes_may_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill._env, "launch", lambda: kill._env.Launch("MPICH", 0, 2))
    with pytest.raises(EPConfigError, match="one of 2 processes of MPICH"):
        kill.Kills(backend="host").check()


def test_a_process_that_ends_by_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COMMAND", ["false"])
    with pytest.raises(
        EPError, match=r"^after 0 changes of seed 1, rank \d \(process \d+\) ended with status 1; expected the Buffer"
    ):
        kill.run(kill.Kills(backend="host", seed=1))


def test_a_rank_that_was_left_out_by_mistake_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COMMAND", ["sh", "-c", """echo '{"event": "evicted"}'"""])
    with pytest.raises(EPError, match=r"was left out by the others; .* pass a larger --timeout-s"):
        kill.run(kill.Kills(backend="host", seed=1))


def test_only_shared_memory_of_the_run_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names of other programs can hold the number of a process of the run: of an earlier program, or of one that runs now."""
    shared, segments = tmp_path / "shm", tmp_path / "segments"
    shared.mkdir()
    early = shared / f"mpich_shm_{os.getpid():x}_0"
    early.touch()
    os.utime(early, (time.time() - 60,) * 2)
    monkeypatch.setattr(processes, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(processes, "_SYSTEM_V", segments)
    monkeypatch.setattr(processes, "COMMAND", ["true"])
    run = processes.Processes(lambda process, event: None)
    run.start(member.Given("", rank=0, ranks=1, slots=1, backend="host", timeout_s=1, seed=0, sizes={}))
    run.end()
    (pid,) = (process.pid for process in run.all)
    with (shared / f"open.{pid}").open("w"), (shared / f"mapped.{pid}").open("w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
        file.close()
        early.rename(shared / f"mpich_shm_{pid:x}_0")
        left = shared / f"cuda.shm.0.{pid:x}.1"
        left.touch()
        rows = [[0, number, 0, 0, pid, 0, 0, 0, 0, 0, 0, 0, 0, int(when)] for number, when in ((5, 1e9), (6, time.time()))]
        segments.write_text("\n".join(["names", *(" ".join(map(str, row)) for row in rows)]))
        assert run.left_behind() == [str(left), "shared memory segment 6"]
        memory.close()


def test_plans_have_both_modes_in_one_buffer() -> None:
    """The choices of absent slots do not count, and no time-out masks."""
    for seed in range(8):
        options = buffers.Options(seed=seed, num_ranks=4, on_gpu=seed % 2 == 0, has_slots=True, rounds_per_buffer=1 << 61)
        shape = buffers.buffer_of(options, 0).shape
        assert (shape.low_latency, shape.on_timeout) == (True, "raise")
        assert buffers.buffer_of(options, 0).ranks_per_node is None
        kinds = {plan.round_of(options, number).kind for number in range(100)}
        assert {"throughput", "expert_rows", "low_latency"} <= kinds
