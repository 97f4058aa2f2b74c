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


def _start(kind, call, delay_us, size):
    words = [sys.executable, str(PROGRAMS / "gpu_faults.py"), "cuda", kind, call, str(delay_us), str(size)]
    return subprocess.Popen(
        words, env=environment(), start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def lose(comm, kind, call, delays_us=DELAYS_US):
    """Lose a rank after each of some delays, in programs that run at the same time."""
    if not comm.rank:
        programs = [_start(kind, call, delay_us, comm.size) for delay_us in delays_us]
        try:
            for delay_us, program in zip(delays_us, programs, strict=True):
                output, _ = program.communicate(timeout=LIMIT_S)
                assert program.returncode == 0, f"after {delay_us} us: {output}"
                assert output.count(" passed") == comm.size - kind.startswith("killed"), output
        finally:
            for program in programs:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)  # also the ranks that it started
                    print(program.communicate()[0])
    comm.Barrier()


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed(comm, call):
    lose(comm, "killed", call)


@pytest.mark.parametrize("call", ["low_latency_dispatch", "low_latency_combine", "hook"])
def test_a_rank_that_is_killed_while_timeouts_mask(comm, call):
    lose(comm, "killed_masked", call)


@pytest.mark.parametrize("kind", ["asleep", "raises"])
@pytest.mark.parametrize("call", ["dispatch", "combine", "low_latency_dispatch"])
def test_a_rank_that_sleeps_or_raises(comm, kind, call):
    lose(comm, kind, call, [100])
