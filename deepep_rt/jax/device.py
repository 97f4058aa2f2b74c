"""Make JAX compute on the GPU of the rank, and check that the Buffer is on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jax

from .. import _env
from ..arrays import dlpack
from ..buffer import Buffer, check_buffer, info_of
from ..comm.convert import communicator_of
from ..errors import EPInputError, EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def use_gpu_of_rank(comm: Intracomm) -> jax.Device:
    """Make JAX compute on the GPU of this rank, or on the CPU if there is no GPU. A Buffer of this process uses the same GPU.

    Call it before anything else starts CUDA. JAX then sees only that GPU. CUDA sees it as the first of all GPUs, because the kernels write
    to the memory of the others.

    Args:
        comm: An mpi4py communicator. The number of this rank among the ranks of its host selects the GPU.

    Returns:
        The device.

    Raises:
        EPUnavailableError: If CUDA was started before in this process, and the rank's GPU is not the first one.
        EPTimeoutError: If a rank does not call it within `DEEPEP_RT_TIMEOUT_S`.

    Example:
        >>> use_gpu_of_rank(MPI.COMM_WORLD)
    """
    ranks = communicator_of(comm).meet(_env.timeout_s(), "use_gpu_of_rank", "all ranks of its communicator to call it")
    local_rank = ranks.ranks_on_host().index(ranks.Get_rank())
    ranks.release()
    if not (count := count_gpus()):
        return jax.local_devices()[0]
    from ..cuda import driver

    if not driver.has_started():
        _env.put_gpu_first(local_rank % count, count)
        local_rank = 0
    if ordinal := driver.use_device(local_rank):
        raise EPUnavailableError(
            f"CUDA was started with the GPU of this rank as number {ordinal}; JAX expects number 0. "
            f"Call use_gpu_of_rank before anything starts CUDA (PyTorch, CuPy)."
        )
    jax.config.update("jax_cuda_visible_devices", "0")
    device = jax.local_devices()[0]
    driver.make_current(0)  # the start of JAX has made another context current
    return device


def count_gpus() -> int:
    """Count the GPUs in another process, because CUDA must not start here before this process chooses its GPUs."""
    code = "from cuda.bindings import driver; driver.cuInit(0); print(driver.cuDeviceGetCount()[1])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    return int(output) if output.strip().isdigit() else 0  # no bindings, no driver, or no GPU


def check_device(buffer: Buffer, array: Any) -> None:
    """Raise EPInputError unless the array lies on the device of the Buffer."""
    kind, _ = array.__dlpack_device__()
    if (kind == dlpack.CPU) != (buffer.backend == "host"):
        where = "the CPU" if kind == dlpack.CPU else "a GPU"
        raise EPInputError(
            f"backend={buffer.backend!r}; expected {'host' if kind == dlpack.CPU else 'cuda'!r}, because JAX computes on {where}. "
            f"Make the Buffer with that backend, or set JAX_PLATFORMS."
        )
    if kind != dlpack.CPU:
        from cuda.bindings import driver as cuda

        from ..cuda.driver import ok

        ptr = dlpack.address(array.__dlpack__())
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = int(ok(cuda.cuPointerGetAttribute(attribute, ptr)))
        if device != info_of(buffer).device:
            raise EPInputError(
                f"JAX computes on GPU {device}; expected GPU {info_of(buffer).device}, which has the Buffer. "
                f"Call use_gpu_of_rank before the first use of JAX."
            )


def check_threads(buffer: Buffer) -> None:
    """Raise EPUnavailableError if XLA's threads may not call the MPI of this Buffer."""
    check_buffer(buffer)
    mpi = sys.modules.get("mpi4py.MPI")  # missing if the Buffer communicates over a store
    if buffer.backend == "host" and mpi and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise EPUnavailableError(
            f"MPI.Query_thread()={mpi.Query_thread()}; expected at least MPI_THREAD_SERIALIZED, because JAX calls back from its threads. "
            f"Leave mpi4py.rc.thread_level at its default."
        )
