"""Processes that each see one GPU, as the workers of Ray. Rank 0 starts them, and the others wait.

The test prints its result: `mpirun -n 2 python -m pytest -m gpu -s tests/gpu/test_hidden_gpus.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from launch import environment
from paths import PROGRAMS

pytestmark = pytest.mark.gpu

LIMIT_S = 200


@pytest.mark.parametrize("memory", ["virtual", "CUDA IPC"])  # of NVSHMEM
def test_buffers_work_or_name_the_hidden_gpus(comm, memory):
    """NVSHMEM finds hidden GPUs through NVML. If that is not enough, the error names the remedy."""
    import torch

    if comm.size > torch.cuda.device_count() or comm.size == 1:
        pytest.skip("needs a GPU for each of two ranks or more")
    if not comm.rank:
        debug = {
            "DEEPEP_RT_SYMMETRIC_MEMORY": "nvshmem",
            "NVSHMEM_DEBUG": "INFO",
            "NVSHMEM_DEBUG_SUBSYS": "INIT,TOPO,TRANSPORT,MEM",
        }
        more = {**debug, **({} if memory == "virtual" else {"NVSHMEM_DISABLE_CUDA_VMM": "1"})}
        words = [sys.executable, str(PROGRAMS / "spawned.py"), "cuda", str(comm.size), "one-gpu"]
        done = subprocess.run(words, env=environment(**more), capture_output=True, text=True, timeout=LIMIT_S, check=False)
        output = done.stdout + done.stderr
        works = done.returncode == 0 and "all passed" in output
        print(f"\nhidden GPUs, {memory} memory: {'works' if works else 'refused'}")
        print("\n".join(re.findall(r".*(?:reach \d|Handle Type|NVML|VISIBLE_DEVICES|not accessible).*", output)))
        assert works or "Rank 0 sees 1 GPUs, and its host holds" in output, output
    comm.Barrier()
