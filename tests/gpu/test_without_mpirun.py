"""Processes that mpirun did not start, on GPUs: rank 0 starts them, and the others wait."""

from __future__ import annotations

import pytest
from test_store_comm import run_without_mpirun

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_buffers(comm, launcher):
    if not comm.rank:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(comm.size))
        words = ("cuda", str(comm.size)) if launcher == "spawn" else ("cuda",)
        output = run_without_mpirun(*words, launcher=() if launcher == "spawn" else torchrun)
        assert "all passed" in output
    comm.Barrier()
