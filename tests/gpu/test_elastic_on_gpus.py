"""Buffers whose ranks come and go, on GPUs. Rank 0 starts programs with processes of their own; they check themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from launch import environment
from paths import PROGRAMS, ROOT

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

LIMIT_S = 180


@pytest.fixture
def run(comm):
    """Return a function that runs a program without mpirun, and returns what it prints. Other ranks than 0 get nothing."""

    def run(*words, **more):
        if comm.rank:
            return None
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=environment(**more),
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also the ranks that it started
            pytest.fail(process.communicate()[0])
        assert process.returncode == 0, output
        return output

    return run


def ranks_of(comm):
    """Return how many ranks a program starts, so that each has a GPU of its own."""
    return max(2, min(comm.size, torch.cuda.device_count()))


def passed(comm, output):
    return comm.rank > 0 or output.splitlines()[-1] == "OK"


@pytest.mark.parametrize("name", ["elastic_training.py", "elastic_decode.py"])
def test_example(comm, run, name):
    ranks = ranks_of(comm)
    assert passed(
        comm, run(f"examples/{name}", "--backend", "cuda", "--ranks", ranks, "--slots", ranks + 1, DEEPEP_RT_SHARE_GPUS="1")
    )


@pytest.mark.parametrize("what", ["comes_and_goes", "losses"])
def test_nixl_ep(comm, run, what):
    assert passed(comm, run(PROGRAMS / "nixl_ep_ranks.py", what, "cuda", DEEPEP_RT_SHARE_GPUS="1"))


def test_growth(comm, run):
    """From 2 to 4 and 8 ranks, which share GPUs if there are fewer."""
    assert passed(comm, run(PROGRAMS / "growth.py", "--backend", "cuda", DEEPEP_RT_SHARE_GPUS="1"))


def test_kills(comm, run, tmp_path):
    ranks, path = ranks_of(comm), tmp_path / "report.json"
    words = ["--ranks", ranks, "--slots", ranks + 1, "--changes", 25, "--seed", 3, "--json", path]
    run("-m", "deepep_rt", "soak", "--kill", "--backend", "cuda", *words, DEEPEP_RT_SHARE_GPUS="1")
    if not comm.rank:
        document = json.loads(path.read_text())
        assert (document["status"], document["left_behind"]) == ("passed", [])
        assert sum(document["changes"].values()) >= 25


def test_slots_cost_no_time(comm, run, tmp_path):
    """Calls of Buffers with slots take as long as others, whether slots are absent or not."""
    ranks = min(comm.size, torch.cuda.device_count())
    if ranks < 2 or os.environ.get("DEEPEP_RT_SHARE_GPUS"):
        pytest.skip("speed needs a GPU for each of two ranks")
    path = tmp_path / "result.json"
    run("bench/elastic.py", "--ranks", ranks, "--slots", f"{ranks},8", "--changes", 1, "--kills", 0, "--json", path)
    if not comm.rank:
        slots = json.loads(path.read_text())["slots"]
        fixed = slots.pop("fixed")
        slower = {(kind, call): us / fixed[call] for kind, times in slots.items() for call, us in times.items()}
        assert max(slower.values()) < 1.1, slower
