"""Large matrix products, to run beside calls of a Buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def on_gpu(comm: Intracomm, size: int) -> Callable[[], Any]:
    """Return a product of square BF16 matrices, which PyTorch queues on the current stream of CuPy. Collective.

    Raises:
        EPUnavailableError: on all ranks, if a rank has no PyTorch with CUDA.
    """
    reason = ""
    try:
        import torch

        if not torch.cuda.is_available():
            reason = f"torch {torch.__version__} finds no GPU"
    except ImportError as error:
        reason = f"torch cannot be imported ({error})"
    if reason := next(filter(None, comm.allgather(reason)), ""):
        raise EPUnavailableError(f"{reason}; expected PyTorch with CUDA for the matrix product. Install it")
    import cupy

    torch.cuda.set_device(cupy.cuda.Device().id)
    left, right, out = (
        torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(3)
    )  # zeros would take less power, and so run faster

    def multiply() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.mm(left, right, out=out)

    multiply()
    torch.cuda.synchronize()
    return multiply


def leave_sms(num_sms: int) -> None:
    """Let later products of this process leave SMs to other kernels; 0: none. PyTorch's interface for it is experimental.

    Only its calls of cuBLASLt pass the number on.

    Raises:
        EPUnavailableError: if this PyTorch has none.
    """
    import torch

    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if set_carveout is None:
        raise EPUnavailableError(
            f"torch {torch.__version__} cannot leave SMs to other kernels; expected 2.7 or newer. Install it, or leave out --leave-sms"
        )
    torch.backends.cuda.preferred_blas_library("cublaslt" if num_sms else "default")
    set_carveout(num_sms or None)


def on_host(size: int) -> Callable[[], Any]:
    """Return a product of int32 matrices. NumPy makes it in one thread, and would take all cores of the ranks for floats."""
    left, right, out = (np.ones((size, size), np.int32) for _ in range(3))
    return lambda: np.matmul(left, right, out=out)
