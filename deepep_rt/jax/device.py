"""Where JAX computes: on the GPU of the rank, which has to be the one that a Buffer is on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jax

from .. import _env
from .._checks import instance
from ..arrays import dlpack
from ..buffer import Buffer, info_of
from ..comm.convert import communicator_of
from ..errors import EPInputError, EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def use_gpu_of_rank(comm: Intracomm) -> jax.Device:
    """Let JAX compute on the GPU of this rank, on which a Buffer of this process is then made too; where there is none, on the CPU.

    Call it first of all. It shows JAX that GPU alone, and CUDA that GPU as the first of all: the kernels write to the memory of the others.

    Args:
        comm: An mpi4py communicator; the GPU is the one with the number of this rank among those of the same host.

    Returns:
        The device.

    Raises:
        EPUnavailableError: if CUDA was started before in this process, and the rank's GPU is not the first there.

    Example:
        >>> use_gpu_of_rank(MPI.COMM_WORLD)
    """
    ranks = communicator_of(comm)
    local_rank = ranks.ranks_on_host().index(ranks.Get_rank())
    if not (count := count_gpus()):
        return jax.local_devices()[0]
    from ..cuda import driver

    if not driver.has_started():
        _env.put_gpu_first(local_rank % count, count)
        local_rank = 0
    if ordinal := driver.use_device(local_rank):
        raise EPUnavailableError(
            f"CUDA was started before, with the GPU of this rank as number {ordinal}, and JAX is only known to work here on number 0; "
            f"call use_gpu_of_rank before anything starts CUDA (PyTorch, CuPy)"
        )
    jax.config.update("jax_cuda_visible_devices", "0")
    device = jax.local_devices()[0]
    driver.make_current(0)  # JAX has made another one current while it started
    return device


def count_gpus() -> int:
    """Asked in a process of its own: CUDA does not start here before it is decided which GPUs it sees."""
    code = "from cuda.bindings import driver; driver.cuInit(0); print(driver.cuDeviceGetCount()[1])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    return int(said) if said.strip().isdigit() else 0  # no bindings, no driver, or no GPU


def check_device(buffer: Buffer, array: Any) -> None:
    """JAX has to compute where the Buffer is."""
    kind, _ = array.__dlpack_device__()
    if (kind == dlpack.CPU) != (buffer.backend == "host"):
        where = "the CPU" if kind == dlpack.CPU else "a GPU"
        raise EPInputError(
            f"JAX computes on {where}, but this Buffer has backend={buffer.backend!r}; make it with "
            f"backend={'host' if kind == dlpack.CPU else 'cuda'!r}, or let JAX use the other (JAX_PLATFORMS)"
        )
    if kind != dlpack.CPU:
        from cuda.bindings import driver as cuda

        from ..cuda.driver import ok

        ptr = dlpack.address(array.__dlpack__())
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = int(ok(cuda.cuPointerGetAttribute(attribute, ptr)))
        if device != info_of(buffer).device:
            raise EPInputError(
                f"JAX computes on GPU {device}, but this Buffer is on GPU {info_of(buffer).device}; call use_gpu_of_rank before JAX is used"
            )


def check_buffer(buffer: Any) -> None:
    """Raise EPInputError unless it is a Buffer."""
    instance(buffer, "buffer", Buffer, "Pass the Buffer that dispatches.")


def check_threads(buffer: Buffer) -> None:
    """Raise unless it is a Buffer, and XLA's threads may call what carries it."""
    check_buffer(buffer)
    mpi = sys.modules.get("mpi4py.MPI")  # not loaded where a Buffer speaks over a store
    if buffer.backend == "host" and mpi and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise EPUnavailableError(
            "JAX calls back from threads of its own, but this MPI was started for one thread; start it with MPI_THREAD_MULTIPLE "
            "(mpi4py does, unless mpi4py.rc.thread_level says otherwise)"
        )
