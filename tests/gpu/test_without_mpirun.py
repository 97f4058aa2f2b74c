"""Processes without mpirun, on GPUs. Rank 0 starts them, and the others wait."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launch import environment, run_without_mpirun
from ports import free_port

pytestmark = pytest.mark.gpu

DRIVER_BEFORE_RUNTIME = """
import sys
from cuda.bindings import driver
driver.cuInit(0)
import cupy
cupy.cuda.Device(0).use()  # now CUDA's runtime is loaded
import torch.distributed as dist
from deepep_rt import Buffer
from deepep_rt.torch import communicator
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[1], rank=0, world_size=1)
with Buffer(communicator(), num_max_tokens_per_rank=8, hidden=256, num_topk=1, num_experts=1) as buffer:
    print(buffer.backend)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_buffers(comm, launcher):
    if not comm.rank:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(comm.size))
        words = ("cuda", str(comm.size)) if launcher == "spawn" else ("cuda",)
        output = run_without_mpirun(*words, launcher=() if launcher == "spawn" else torchrun)
        assert "all passed" in output
    comm.Barrier()


def test_a_process_ends_well(comm):
    """CUDA may shut down before NVSHMEM. A network thread of NVSHMEM would then crash the process."""
    if not comm.rank:
        words = [sys.executable, "-c", DRIVER_BEFORE_RUNTIME, str(free_port())]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "cuda\n"), done.stderr
    comm.Barrier()
