"""The machine that a benchmark runs on: arrays on it, and what a result file says about it."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from .._version import __version__
from ..backends.agreement import why_no_gpu
from ..errors import EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Machine:
    """One rank's GPU, or none (backend "host").

    Raises:
        EPUnavailableError: if there is no GPU.
    """

    def __init__(self, comm: Intracomm, backend: str) -> None:
        self.on_gpu, self._comm = backend == "cuda", comm
        if self.on_gpu:
            if reason := why_no_gpu():
                raise EPUnavailableError(
                    f"no GPU to measure on: {reason}; --backend host does without, and --quick keeps it short"
                )
            import cupy

            cupy.cuda.Device(comm.Split_type(MPI.COMM_TYPE_SHARED).rank % cupy.cuda.runtime.getDeviceCount()).use()

    def upload(self, array: np.ndarray) -> Any:
        """To the GPU. CuPy keeps bfloat16 arrays but copies none, so the bytes go over as integers."""
        if not self.on_gpu:
            return array
        import cupy

        raw = cupy.asarray(array.view(f"u{array.dtype.itemsize}"))
        return cupy.ndarray(array.shape, array.dtype, raw.data)

    def bf16(self, rng: np.random.Generator, num_rows: int, hidden: int) -> Any:
        """Random rows: one block of them over and over, as making them takes longer than measuring."""
        block = rng.standard_normal((min(max(num_rows, 1), 512), hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
        return self.upload(np.resize(block, (num_rows, hidden)))

    def name(self) -> str:
        """Of the GPU, or of the processor's kind."""
        if not self.on_gpu:
            return f"{platform.machine()}, host backend, no GPU"
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()

    def described(self) -> dict[str, Any]:
        """What a result file says about the machine."""
        return {
            "machine": self.name(),
            "num_ranks": self._comm.size,
            "deepep_rt": __version__,
            "mpi": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
            "drivers": self._drivers(),
        }

    def _drivers(self) -> dict[str, Any]:
        if not self.on_gpu:
            return {}
        import cupy
        from cuda.bindings import nvrtc

        loaded = Path("/proc/driver/nvidia/version")
        found = re.search(r"\d+\.\d+[.\d]*", loaded.read_text()) if loaded.exists() else None
        runtime = cupy.cuda.runtime
        versions = {"CUDA runtime (CuPy's)": runtime.runtimeGetVersion(), "CUDA of the driver": runtime.driverGetVersion()}
        return {"driver": found and found[0], **versions, "NVRTC": ".".join(map(str, nvrtc.nvrtcVersion()[1:]))}
