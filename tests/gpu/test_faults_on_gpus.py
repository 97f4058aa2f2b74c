"""A rank is lost in the middle of a call on GPUs. Runs tests/programs/gpu_faults.py in processes without mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from launch import environment
from paths import PROGRAMS

pytestmark = pytest.mark.gpu

LIMIT_S = 150
CALLS = ("dispatch", "dispatch_no_wait", "combine", "low_latency_dispatch", "low_latency_combine", "hook")
DELAYS_US = (0, 100, 2000)  # before the launch, during the kernel, and between calls


def lose(comm, kind, call, delay_us):
    if not comm.rank:
        words = [sys.executable, str(PROGRAMS / "gpu_faults.py"), "cuda", kind, call, str(delay_us), str(comm.size)]
        process = subprocess.Popen(
            words, env=environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also the ranks that it started
            pytest.fail(f"the program did not end\n{process.communicate()[0]}", pytrace=False)
        assert process.returncode == 0, output
        assert output.count(" passed") == comm.size - kind.startswith("killed"), output
    comm.Barrier()


@pytest.mark.parametrize("delay_us", DELAYS_US)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed(comm, call, delay_us):
    lose(comm, "killed", call, delay_us)


@pytest.mark.parametrize("delay_us", DELAYS_US)
@pytest.mark.parametrize("call", ["low_latency_dispatch", "low_latency_combine", "hook"])
def test_a_rank_that_is_killed_while_timeouts_mask(comm, call, delay_us):
    lose(comm, "killed_masked", call, delay_us)


@pytest.mark.parametrize("kind", ["asleep", "raises"])
@pytest.mark.parametrize("call", ["dispatch", "combine", "low_latency_dispatch"])
def test_a_rank_that_sleeps_or_raises(comm, kind, call):
    lose(comm, kind, call, 100)
