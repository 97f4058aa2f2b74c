"""The host backend on 1 to 8 ranks: runs the programs of tests/programs under mpirun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("program", ["dispatch", "combine", "rounds", "bad_calls", "buffers", "low_latency", "choices"])
def test_program(program: str, num_ranks: int) -> None:
    run_checks(num_ranks, program)


def test_arrays_of_frameworks() -> None:
    sizes = ("8", "4", "3", "2", "1")  # in one start, because loading the libraries takes long
    output = run_checks(8, "frameworks", "--sizes", *sizes)
    assert re.findall(r"check_torch on (\d): passed", output) == list(sizes)


@pytest.fixture(scope="module")
def masked_ranks() -> Iterator[dict[int, Future[str]]]:
    """Run the checks on 2 and on 4 ranks at the same time, because they mostly wait for time-outs."""
    with ThreadPoolExecutor() as pool:
        yield {num_ranks: pool.submit(run_checks, num_ranks, "masks") for num_ranks in (2, 4)}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_masked_ranks(num_ranks: int, masked_ranks: dict[int, Future[str]]) -> None:
    """A single rank has no peer to mask. Eight ranks run these checks on GPUs (test_same_checks); on two cores they would take 90 s."""
    masked_ranks[num_ranks].result()


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, ""), (8, "4")])
@pytest.mark.parametrize("scenario", LATE)
def test_late_rank(scenario: str, num_ranks: int, ranks_per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", ranks_per_node)
    output = launch(num_ranks, "late", scenario)
    assert output.count("passed") == num_ranks, output
