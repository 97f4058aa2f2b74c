"""The host backend on 1 to 8 ranks: runs the programs of tests/programs under mpirun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import limits
import pytest
from launch import launch, run_checks

LATE = [
    "late_dispatch",
    "late_cached_dispatch",
    "late_combine",
    "late_low_latency_dispatch",
    "late_low_latency_combine",
    "never",
    "lost_between_counts_and_rows",
    "never_made",
    "never_measures",
]


SIZES = {
    **dict.fromkeys(["table", "prepared_throughput", "bad_calls", "low_latency", "frameworks"], ("8", "4", "3", "1")),
    "buffers": ("8", "1"),  # with all sizes, this program would take the longest
}
"""Programs, and the numbers of ranks that they run on besides 2."""


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (1, 4))])
def test_buffers_that_sleep(num_ranks: int) -> None:
    run_checks(num_ranks, "sleeping")


@pytest.mark.parametrize("program", SIZES)
def test_program_on_two_ranks(program: str) -> None:
    run_checks(2, program)


@pytest.mark.full
@pytest.mark.parametrize("program", SIZES)
def test_program(program: str) -> None:
    """All other numbers of ranks share one start, because a start takes longer than most checks."""
    output = run_checks(8, program, "--sizes", *SIZES[program])
    passed = set(re.findall(r"(check_\w+) on (\d): passed", output))
    checks = {check for check, _ in passed}
    assert passed == {(check, size) for check in checks for size in SIZES[program]}, output


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, ""), pytest.param(8, "4", marks=pytest.mark.full)])
@pytest.mark.parametrize("scenario", LATE)
def test_late_rank(scenario: str, num_ranks: int, ranks_per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", ranks_per_node)
    output = launch(num_ranks, "late", scenario)
    assert output.count("passed") == num_ranks, output


@pytest.fixture(scope="module", autouse=True)
def masked_ranks(request: pytest.FixtureRequest) -> Iterator[dict[int, Future[str]]]:
    """Run the checks of masks while the other tests of this file run. They mostly wait for time-outs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.function is test_masked_ranks]
    sizes, slowness = [item.callspec.params["num_ranks"] for item in items], limits.slowness()
    with ThreadPoolExecutor() as pool:
        yield {num_ranks: pool.submit(run_checks, num_ranks, "masks", slowness=slowness) for num_ranks in sizes}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_masked_ranks(num_ranks: int, masked_ranks: dict[int, Future[str]]) -> None:
    """A single rank has no peer to mask. Eight ranks run these checks on GPUs (test_same_checks); on two cores they would take 90 s."""
    masked_ranks[num_ranks].result()
