"""Hold the model of several nodes to published figures, to measured near figures, and to its page."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("rich")

import model
import predict as program
import published
from predict import Asked, predict

from deepep_rt.bench.results import read
from deepep_rt.errors import EPConfigError

RESULTS = ROOT / "bench/results"
NEAR_FILES = [RESULTS / "h200x8_2026-11-22.json", RESULTS / "h200x8_2026-11-22_low_latency.json"]
PAGE = " ".join((ROOT / "bench/model.md").read_text().split())
FITTED = published.FITTED_US, published.FITTED_FAR_GB_S, published.FITTED_NEAR_GB_S


# --- published figures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published.ROWS, ids=lambda row: f"{row.mode}-{row.call}-{row.num_ranks}")
def test_a_published_figure_is_within_10_percent(row: published.PublishedRow) -> None:
    assert published.predict(row, published.machine()) == pytest.approx(row.value, rel=0.10)


def _mean_square(figures: Sequence[float], leave_out: int = -1) -> float:
    errors = published.relative_errors(published.machine(*figures))
    kept = [error for i, error in enumerate(errors) if i != leave_out]
    return sum(error * error for error in kept) / len(kept)


def _minimum(function: Callable[[Sequence[float]], float]) -> list[float]:
    """Go down along each axis in turn, with shorter and shorter steps."""
    best, steps = [25.0, 45.0, 150.0], [2.0, 2.0, 8.0]
    while max(steps) > 0.02:
        for i, step in enumerate(steps):
            better = [[*best[:i], best[i] + change, *best[i + 1 :]] for change in (step, -step)]
            lowest = min(better, key=function)
            if function(lowest) < function(best):
                best = lowest
            else:
                steps[i] = step / 2
    return best


def test_the_fitted_numbers_are_the_best_ones() -> None:
    """Least squares of relative errors over all 18 rows. The committed numbers are rounded."""
    assert len(published.ROWS) == 18
    best = _minimum(_mean_square)
    assert best == pytest.approx(FITTED, rel=0.05)
    assert math.sqrt(_mean_square(FITTED)) < 0.037
    assert math.sqrt(_mean_square(FITTED)) < math.sqrt(_mean_square(best)) + 0.001


def test_rows_that_the_fit_has_not_seen_are_near_too() -> None:
    """Fit without one row, and predict it. The combine of one node is the only row above 8 %."""
    unseen = {}
    for i, row in enumerate(published.ROWS):
        best = _minimum(lambda figures, i=i: _mean_square(figures, i))  # type: ignore[misc]
        unseen[row] = published.predict(row, published.machine(*best)) / row.value - 1
    worst = max(unseen, key=lambda row: abs(unseen[row]))
    assert (worst.mode, worst.call, worst.num_ranks) == ("low-latency", "combine", 8)
    assert abs(unseen.pop(worst)) < 0.15
    assert max(map(abs, unseen.values())) < 0.09


def test_deepep_counts_the_bytes_of_the_own_node() -> None:
    """8 experts of 4 nodes reach 3.61 nodes, of which 2.71 are others. 82 MB cross the network, and 109 MB are counted."""
    estimate = model.throughput(published.WORK, published.machine(), 4, "dispatch")
    assert estimate.far_bytes == pytest.approx(82.1e6, rel=1e-3)
    assert estimate.gb_s * estimate.us * 1e3 == pytest.approx(109.4e6, rel=1e-3)
    few = model.low_latency(published.WORK, published.machine(), 2, "dispatch")
    assert few.far_bytes == few.near_bytes == 128 * 8 * 7392 / 2
    ours = model.low_latency(model.Work(), published.machine(), 2, "dispatch")
    assert ours.far_bytes < few.far_bytes, "a row for each rank, not for each expert"


# --- properties --------------------------------------------------------------------------------------------------------------------

MACHINE = model.Machine(model.Link(400, 10), model.Link(300, 5), model.Link(40, 20, 50))


@pytest.mark.parametrize("call", model.CALLS)
def test_the_bottleneck_is_the_slowest_part(call: str) -> None:
    def limit(**figures: float) -> str:
        machine = dataclasses.replace(MACHINE, far=model.with_figures(MACHINE.far, **figures))
        return model.throughput(model.Work(), machine, 4, call).bottleneck

    assert limit() == "far"
    assert limit(gb_s=1e4) == "near"
    assert limit(message_us=1e3) == "messages"
    assert limit(us=1e6) == "latency"
    assert model.throughput(model.Work(), MACHINE, 1, call).bottleneck == "near"


def test_paths() -> None:
    """The direct path sends a row for each far rank, and the hierarchical one for each far node."""
    work = model.Work(groups=None)
    ways = {path: model.throughput(work, MACHINE, 4, "dispatch", path) for path in ("hierarchical", "direct")}
    traffic = work.traffic(4, 8, None)
    assert ways["direct"].far_bytes / ways["hierarchical"].far_bytes == pytest.approx(traffic.far_ranks / traffic.far_nodes)
    assert model.better_path(ways["hierarchical"], ways["direct"]) == "hierarchical"
    single = dataclasses.replace(MACHINE, node_size=1, near=model.Link(400, 500))  # nodes of one rank: near copies only cost time
    ways = {path: model.throughput(model.Work(tokens=64), single, 4, "dispatch", path) for path in ("hierarchical", "direct")}
    assert model.better_path(ways["hierarchical"], ways["direct"]) == "direct"


def test_efficiency_is_the_ideal_time_over_the_expected_one() -> None:
    estimate = model.throughput(model.Work(), MACHINE, 8, "combine")
    assert estimate.us == pytest.approx(30 + estimate.far_bytes / 40e3)
    assert estimate.efficiency == pytest.approx(estimate.far_bytes / 50e3 / estimate.us)


def test_more_ranks_than_experts() -> None:
    assert (
        model.low_latency(model.Work(), MACHINE, 256, "combine").us > model.low_latency(model.Work(), MACHINE, 128, "combine").us
    )


# --- near figures ------------------------------------------------------------------------------------------------------------------


def test_near_figures_come_from_results() -> None:
    found = model.near_of_results([read(file) for file in NEAR_FILES])
    for link, constant in (
        (found["near"], program.NEAR_H200),
        (found["near_low_latency"], program.NEAR_LOW_LATENCY_H200),
    ):
        assert (link.gb_s, link.us) == pytest.approx((constant.gb_s, constant.us), rel=0.01)
    # The line through all points returns each measured dispatch of the result that it comes from.
    result = read(NEAR_FILES[0])
    machine = model.Machine(found["near"], found["near_low_latency"], MACHINE.far)
    for tokens in (4096, 8192):
        measured = min(r["us"] for r in result["rows"] if r["work"] == "dispatch_fp8_known" and r["tokens"] == tokens)
        work = model.Work(tokens=tokens, groups=None)
        assert model.throughput(work, machine, 1, "dispatch").us == pytest.approx(measured, rel=0.08)


def test_the_newest_results_of_this_folder_are_taken(tmp_path: Path) -> None:
    for name, source in (("bench-2026-11-22-100000", NEAR_FILES[0]), ("bench-2026-11-21-100000", NEAR_FILES[0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "throughput.json").write_text(source.read_text())
    on_host = json.loads(NEAR_FILES[0].read_text())
    on_host["settings"]["backend"] = "host"
    (tmp_path / "bench-2026-11-23-100000").mkdir()
    (tmp_path / "bench-2026-11-23-100000/throughput.json").write_text(json.dumps(on_host))
    (tmp_path / "bench-2026-11-24-100000").mkdir()
    found = program.newest_results(tmp_path)
    assert found == [tmp_path / "bench-2026-11-22-100000/throughput.json"]
    assert program.machine_of(Asked(), found).where.startswith("near: bench-2026-11-22-100000/throughput.json; far: ib-ndr")
    assert program.newest_results(tmp_path / "bench-2026-11-24-100000") == []


def test_results_of_other_machines_are_refused() -> None:
    with pytest.raises(EPConfigError, match="expected one of several GPUs of one host"):
        model.near_of_results([read(RESULTS / "h200x4_2026-11-22_low_latency_nvshmem.json")])
    with pytest.raises(EPConfigError, match=r"results of \[4, 8\] ranks"):
        predict(Asked(), [RESULTS / "h200x4_2026-11-22.json", NEAR_FILES[1]])


WIRES = {gb_s: RESULTS / f"h200x2_2026-11-28_wire{gb_s}.json" for gb_s in (50, 100)}


def over_wire(gb_s: int, nodes: int, node_size: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Predict the calls of a result over a wire, on the hierarchical path."""
    asked = Asked(nodes=str(nodes), node_size=node_size, tokens=tokens, groups=0, far_from=WIRES[gb_s])
    rows = predict(asked)["rows"]
    return {row["call"]: row for row in rows if (row["mode"], row["path"]) == ("throughput", "hierarchical")}


@pytest.mark.parametrize("gb_s", WIRES)
def test_far_figures_come_from_a_wire(gb_s: int) -> None:
    """The prediction returns the calls that it comes from, and never more than the wire carries."""
    measured = {(row["work"], row["tokens"]): row["us"] for row in read(WIRES[gb_s])["rows"]}
    for tokens in (512, 4096):
        found = over_wire(gb_s, 2, 1, tokens)
        assert found["dispatch"]["us"] == pytest.approx(measured["dispatch_fp8_known", tokens], rel=0.08)
        assert found["combine"]["us"] == pytest.approx(measured["combine_bf16", tokens], rel=0.08)
    assert all(row["far_bytes"] / row["us"] / 1e3 < gb_s for row in over_wire(gb_s, 32, 8, 4096).values())


@pytest.mark.parametrize(("nodes", "size"), [(2, 1), (8, 1), (2, 4), (4, 2), (2, 8), (4, 8), (8, 8), (32, 8)])
def test_the_page_has_the_part_of_the_wire(nodes: int, size: int) -> None:
    cells = []
    for gb_s in WIRES:
        for tokens in (128, 512, 4096):
            found = over_wire(gb_s, nodes, size, tokens)
            parts = (found[call] for call in ("dispatch", "combine"))
            cells.append(
                " / ".join(
                    f"{row['far_bytes'] / gb_s / 10 / row['us']:.0f}{'*' * (row['bottleneck'] == 'near')}" for row in parts
                )
            )
    assert f"| {nodes}x{size} | {' | '.join(cells)} |" in PAGE


def test_far_figures_need_a_wire_and_two_numbers_of_tokens() -> None:
    result = read(WIRES[50])
    few = {**result, "rows": [row for row in result["rows"] if row["tokens"] == 512]}
    for other in (read(NEAR_FILES[0]), few):
        with pytest.raises(EPConfigError, match="over a wire between nodes of one rank"):
            model.far_of_result(other, program.NEAR_H200)


def test_the_examples_hold() -> None:
    assert doctest.testmod(model).failed == 0


def test_a_line_through_odd_points() -> None:
    line = model.fit_line([(1e6, 12.0), (2e6, 14.0), (4e6, 18.0)])
    assert (line.gb_s, line.us) == pytest.approx((500.0, 10.0))
    assert model.fit_line([(1e6, 10.0)]).us == 0.0, "one point has no latency"
    assert model.fit_line([(1e6, 10.0), (2e6, 30.0)]).us == 0.0
    with pytest.raises(EPConfigError, match="do not grow"):
        model.fit_line([(1e6, 20.0), (1e9, 10.0), (1e9, 10.0)])


# --- the command and the page ------------------------------------------------------------------------------------------------------


def _command(*words: str) -> int:
    try:
        program.main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command_prints_json_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert _command("--nodes", "1,2", "--json", "--out", str(tmp_path), "--nic", "tcp-25", "--from", str(NEAR_FILES[0])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "model.json").read_text())
    assert found["machine"]["far"]["line_gb_s"] == 3.125
    assert {(row["nodes"], row["mode"], row["path"]) for row in found["rows"]} == {
        (1, "throughput", "near"), (2, "throughput", "hierarchical"), (2, "throughput", "direct"),
        (1, "low-latency", "near"), (2, "low-latency", "direct"),
    }  # fmt: skip
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")
    assert "| low-latency | combine | 8 | 114 us |" in (tmp_path / "model.md").read_text()


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert _command("--nodes", "8") == 0
    shown = capsys.readouterr().out
    assert re.search(r"8 +│ +64 +│ hierarchical \* ", shown)
    assert "3.6 % rms, 8.9 % at worst" in shown
    assert all(text in " ".join(shown.split()) for text in program.assumptions())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes='0'; expected numbers of 1 to 4096"),
        (["--nodes", "1,x"], "--nodes='1,x'; expected"),
        (["--nic", "carrier-pigeon"], "--nic='carrier-pigeon'; expected one of ib-hdr"),
        (["--nic-gb-s", "0"], "--nic-gb-s=0.0; expected a number above 0"),
        (["--near-us", "nan"], "--near-us=nan; expected 0 or more"),
        (["--from", "missing.json"], "missing.json cannot be read"),
        (["--groups", "1", "--topk", "300"], "num_topk=300; expected at most"),
    ],
)
def test_wrong_options_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(*words) == 1
    assert message in capsys.readouterr().err


def _cells(table: Any) -> list[str]:
    return [" | ".join(row) for row in table.rows]


def test_the_page_has_todays_figures_and_assumptions() -> None:
    found = predict(Asked())
    assert len(found["assumptions"]) == 7
    for text in found["assumptions"]:
        assert text in PAGE
    for table in program.tables(found):
        for row in _cells(table):
            assert f"| {row.replace('*', chr(92) + '*')} |" in PAGE, row
