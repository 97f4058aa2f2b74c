"""deepep_rt.torch on the host backend: launches the programs of tests/mpi_host that need PyTorch."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest
from test_host_backend import _launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def _run(program: str, num_ranks: int) -> None:
    output = _launch(num_ranks, program).stdout
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_communicator(num_ranks: int) -> None:
    _run("torch_groups", num_ranks)


def test_processes_that_mpirun_did_not_start() -> None:
    """torch.distributed has two ranks, MPI has one here and one there: said, instead of a Buffer of one rank each."""
    code = """
import sys, torch.distributed as dist, deepep_rt
from deepep_rt.torch import communicator
dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2)
try:
    communicator()
except deepep_rt.EPConfigError as error:
    print(error)
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], env={**os.environ, **place}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert "not started by one mpirun: MPI counts [1, 1] processes" in output
