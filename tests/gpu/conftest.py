"""GPU tests run under mpirun, and every rank runs the same tests: `mpirun -n N python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import sys

import pytest
from ranks import comm, pytest_runtest_logreport, together

__all__ = ["comm", "pytest_runtest_logreport", "together"]


@pytest.fixture(autouse=True)
def _device(request):
    if "comm" in request.fixturenames:
        import torch

        torch.cuda.set_device(request.getfixturevalue("comm").Get_rank() % torch.cuda.device_count())


@pytest.fixture(autouse=True)
def _process_groups():
    yield
    if (dist := sys.modules.get("torch.distributed")) and dist.is_available():
        # Later tests would use the ranks of that group.
        assert not dist.is_initialized(), "the test has left a process group behind"
