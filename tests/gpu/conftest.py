"""GPU tests run under mpirun, every rank the same tests: `mpirun -n N python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest
from ranks import comm, pytest_runtest_logreport, together

__all__ = ["comm", "pytest_runtest_logreport", "together"]


@pytest.fixture(autouse=True)
def _device(request):
    if "comm" in request.fixturenames:
        import torch

        torch.cuda.set_device(request.getfixturevalue("comm").Get_rank() % torch.cuda.device_count())
        yield
        # The tests after it would take the ranks of that group for theirs.
        assert not torch.distributed.is_initialized(), "the test has left a process group behind"
    else:
        yield
