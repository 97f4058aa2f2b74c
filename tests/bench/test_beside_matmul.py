"""Calls beside a matrix product: which units count, and the program on two ranks without GPUs."""

from __future__ import annotations

import functools
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from launch import run_bench

pytest.importorskip("rich")
pytest.importorskip("ml_dtypes")

import beside_matmul
import side_by_side
from mpi4py import MPI
from side_by_side import Load

from deepep_rt import EPConfigError


def test_units_count_while_all_loads_run() -> None:
    """The first load runs from 0 to 9, the second from 2.5 to 7. Units outside of that have other lengths."""
    first = [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0]
    second = [2.5, 3.0, 3.5, 7.0]
    assert side_by_side.mean_seconds([first, second]) == pytest.approx([1.0, 1.5])
    assert side_by_side.mean_seconds([first]) == pytest.approx([1.5])


@pytest.mark.parametrize("second", [[10.0, 11.0], [1.2, 1.4, 1.6]])
def test_loads_that_never_ran_together(second: list[float]) -> None:
    assert math.inf in side_by_side.mean_seconds([[0.0, 1.0, 2.0], second])


@pytest.mark.parametrize("num_short", [2, 100])
def test_a_run_that_is_too_short_is_repeated_with_more_units(monkeypatch: pytest.MonkeyPatch, num_short: int) -> None:
    """On a busy machine a product may begin and end no unit in a run. Runs with more units follow, not so many that they never end."""
    runs: list[list[int | None]] = []

    def run(loads: list[Load]) -> list[float]:
        runs.append([load.units for load in loads])
        return [math.inf if len(runs) <= num_short else 3.0, 1.0]

    monkeypatch.setattr(beside_matmul, "run_side_by_side", run)
    monkeypatch.setattr(beside_matmul, "product_on_host", lambda size: None)
    monkeypatch.setattr(beside_matmul.Bench, "alone", lambda self, loads: 0.0)
    settings = beside_matmul.Settings(backend="host", repeats=2)
    bench = beside_matmul.Bench(MPI.COMM_SELF, settings, beside_matmul.Machine(MPI.COMM_SELF, "host"))
    loads = [Load(lambda: None, None), Load(lambda: None, 8)]
    if num_short == 2:
        assert bench.timed(loads) == [3.0, 1.0]
        assert runs == [[None, 8], [None, 16], [None, 32], [None, 32]]
    else:
        with pytest.raises(EPConfigError, match=r"\[512\] units.*Pass a larger --window-ms"):
            bench.timed(loads)
        assert len(runs) == 7


def test_loads_on_the_host() -> None:
    """Loads with a number of units do so many, in turns. The one without goes on until they are done, in a thread."""
    done: list[str] = []
    products: list[int] = []

    def unit(name: str) -> None:
        done.append(name)
        seen = len(products)
        while len(products) == seen:  # the thread goes on during each unit
            time.sleep(1e-4)

    counted = [Load(functools.partial(unit, name), 3) for name in "ab"]
    marks = side_by_side._marks_on_host([Load(lambda: products.append(0), None), *counted])
    assert done == list("ababab")
    assert [len(times) for times in marks] == [len(products) + 1, 4, 4]
    assert marks[0][0] <= marks[1][0]
    assert marks[0][-1] >= marks[2][-2]


def test_rows_are_counted_once_for_each_rank() -> None:
    topk_idx = np.array([[0, 1], [1, 2], [3, 5], [-1, 4]])
    assert beside_matmul.num_sent_rows(topk_idx, 2, 3) == 1 + 2 + 2 + 1
    assert [beside_matmul.num_sent_rows(topk_idx, 2, 3, rank) for rank in range(3)] == [2, 2, 2]


def test_slower_percent() -> None:
    assert beside_matmul.slower_percent(200.0, 250.0) == pytest.approx(25.0)


def test_the_program(tmp_path: Path) -> None:
    file, buffers = tmp_path / "result.json", 2
    sizes = [
        "--quick",
        "--tokens",
        "16",
        "--low-latency-tokens",
        "4",
        "--hidden",
        "128",
        "--experts",
        "16",
        "--sms",
        "8",
        "--matrix",
        "48",
    ]
    done = run_bench(2, "bench/beside_matmul.py", *sizes, "--buffers", buffers, "--json", file)
    result = json.loads(file.read_text())
    assert {"date", "commit", "versions", "boundary", "byte_formula", "machine", "settings"} <= set(result)
    assert [(row["work"], row["buffers"], row["sms"], row["tokens"]) for row in result["rows"]] == [
        *((work, buffers, 8, 16) for work in ("dispatch", "combine", "both")),
        ("low_latency", buffers, 8, 4),
    ]
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert lines[0][:3] == ["work", "Buffers", "SMs"]
    for row, line in zip(result["rows"], lines[2:], strict=True):
        assert row["bytes"] > row["remote_bytes"] > 0
        assert min(row[f"{name}_us"] for name in ("alone", "beside", "matmul_alone", "matmul_beside")) > 0
        percent = 100 * (row["beside_us"] / row["alone_us"] - 1)
        product = 100 * (row["matmul_beside_us"] / row["matmul_alone_us"] - 1)
        assert (line[0], line[6], line[10]) == (row["work"], f"{percent:.1f}", f"{product:.1f}")
    dispatch, combine, both, low_latency = result["rows"]
    assert dispatch["bytes"] == combine["bytes"] == both["bytes"] / 2
    assert low_latency["bytes"] % (128 + 4 + 256) == 0


def test_wrong_options_are_named() -> None:
    with pytest.raises(EPConfigError, match=r"--buffers=3; expected 1 or 2. Pass one of them"):
        beside_matmul.Settings(buffers=3)
    with pytest.raises(EPConfigError, match=r"--leave-sms with --backend=host; expected GPUs\. Leave one of them out"):
        beside_matmul.Settings(leave_sms=True, backend="host")


def test_the_report_says_that_the_product_leaves_sms() -> None:
    settings = vars(beside_matmul.Settings(leave_sms=True))
    result = dict(settings=settings, rows=[], num_ranks=2, machine="a GPU", byte_formula="", boundary="", date="")
    assert "matrices, which leaves the SMs of the calls free: 2 ranks" in beside_matmul.markdown(result)
