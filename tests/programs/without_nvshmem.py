"""Buffers inside one host where NVSHMEM is not installed. The driver does nothing, except for the virtual memory of `virtual_gpu`."""

from __future__ import annotations

import os
import sys

import virtual_gpu
from mpi4py import MPI
from spmd import main, raises

from deepep_rt import Buffer, EPUnavailableError
from deepep_rt.jit import launch

GPU = virtual_gpu.install()
launch.load = lambda kernel, constants, arch: launch.LoadedKernel(7, constants[kernel.threads], 0)


def _make(comm: MPI.Intracomm, setting: str) -> Buffer:
    os.environ["DEEPEP_RT_SYMMETRIC_MEMORY"] = setting
    sizes = dict(num_max_tokens_per_rank=8, hidden=128, num_topk=2, num_experts=4 * comm.Get_size(), timeout_s=20.0)
    return Buffer(comm, backend="cuda", **sizes, low_latency=True)  # type: ignore[arg-type]


def check_buffers_need_no_nvshmem(comm: MPI.Intracomm) -> None:
    for setting in ("heap", "auto", "auto"):
        with _make(comm, setting) as buffer:
            assert "provider   CUDA virtual memory, shared by descriptors" in str(buffer.describe())
            assert GPU.left != (0, 0, 0)
        assert GPU.left == (0, 0, 0)
    assert "nvshmem" not in sys.modules


def check_errors_where_virtual_memory_fails_too(comm: MPI.Intracomm) -> None:
    """The error of "auto" has both reasons. That of "heap" asks for no NVSHMEM."""
    GPU.fail = {"export", "ipc"}
    try:
        with raises(EPUnavailableError, "CUDA_ERROR_NOT_SUPPORTED", "NVSHMEM: rank 0: NVSHMEM or nvshmem4py is not installed"):
            _make(comm, "auto")
        with raises(EPUnavailableError, "CUDA_ERROR_NOT_SUPPORTED") as caught:
            _make(comm, "heap")
        assert "NVSHMEM" not in str(caught.error)
    finally:
        GPU.fail = set()
    with raises(EPUnavailableError, "NVSHMEM or nvshmem4py is not installed"):
        _make(comm, "nvshmem")
    assert GPU.left == (0, 0, 0)


if __name__ == "__main__":
    main(__name__)
