"""JAX on GPUs, in processes of its own, as it has to be the first that starts CUDA: `mpirun -n N python -m pytest -m gpu tests/gpu_jax`."""

from __future__ import annotations

import pytest
from ranks import comm, pytest_runtest_logreport, together

__all__ = ["comm", "pytest_runtest_logreport", "together"]


@pytest.fixture(scope="session")
def jax(comm):
    """JAX on the GPU of this rank."""
    jax = pytest.importorskip("jax")
    from deepep_rt.jax import use_gpu_of_rank

    device = use_gpu_of_rank(comm)
    assert device.platform == "gpu", "this JAX is a build without CUDA"
    with jax.default_matmul_precision("highest"):
        yield jax
