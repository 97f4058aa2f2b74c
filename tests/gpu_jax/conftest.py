"""Test JAX on GPUs: `mpirun -n N python -m pytest -m gpu tests/gpu_jax`. JAX has to start CUDA, so other tests run in other processes."""

from __future__ import annotations

import pytest
from ranks import comm, pytest_runtest_logreport, together

__all__ = ["comm", "pytest_runtest_logreport", "together"]


@pytest.fixture(scope="session")
def jax(comm):
    """Return JAX, which computes on the GPU of this rank."""
    jax = pytest.importorskip("jax")
    from deepep_rt.jax import use_gpu_of_rank

    device = use_gpu_of_rank(comm)
    assert device.platform == "gpu", "this build of JAX lacks CUDA"
    with jax.default_matmul_precision("highest"):
        yield jax
