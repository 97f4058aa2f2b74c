"""The logger "deepep_rt": silent by default, and one line per Buffer at level INFO."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from launch import python_on, run_command

import deepep_rt
from deepep_rt.backends import agreement
from deepep_rt.jit import build

PROGRAM = """
import logging, sys
{setup}
from mpi4py import MPI
from deepep_rt import Buffer
for _ in range(2):
    with Buffer(MPI.COMM_WORLD, num_max_tokens_per_rank=8, hidden=64, num_topk=2, num_experts=4, backend="host"):
        pass
if MPI.COMM_WORLD.rank == 0:  # the lines of two ranks could mix
    logging.getLogger("deepep_rt").warning("a warning")
"""


def run(setup: str) -> list[str]:
    return "".join(run_command(*python_on(2, "-c", PROGRAM.format(setup=setup)))).splitlines()


def test_the_logger_is_silent_by_default() -> None:
    assert run("") == [], "the program decides whether to show warnings, too"


def test_one_line_for_each_buffer_from_rank_0() -> None:
    lines = run("logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s %(message)s', stream=sys.stdout)")
    made = "INFO deepep_rt Buffer of 2 ranks: host backend, MPI, 0.00 GB a rank, kernels: 0 from the cache and 0 compiled"
    assert [line for line in lines if "WARNING" not in line] == [made, made]


def test_the_line_describes_the_buffer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "stats", build.Stats(hits=3, misses=2))

    class Rank:
        def __init__(self, rank: int) -> None:
            self.Get_rank, self.Get_size = lambda: rank, lambda: 16

    with caplog.at_level(logging.INFO, logger="deepep_rt"):
        for rank in range(2):
            agreement.announce(Rank(rank), "CUDA (sm_90)", "NVLink", 1_440_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "Buffer of 16 ranks: CUDA (sm_90), NVLink, 1.44 GB a rank, kernels: 3 from the cache and 2 compiled"
    ]


def test_all_modules_use_one_logger() -> None:
    package = Path(deepep_rt.__file__).parent
    named = {name for path in package.rglob("*.py") for name in re.findall(r"getLogger\((.*?)\)", path.read_text())}
    assert named - {'"nixl"'} == {'"deepep_rt"', "__name__"}  # NIXL's own, which is quiet while an agent is made
    assert isinstance(logging.getLogger("deepep_rt").handlers[0], logging.NullHandler)
