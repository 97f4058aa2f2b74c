"""Make arrays on the machine of a benchmark, and describe it for the result file."""

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
from ..comm.convert import communicator_of
from ..errors import EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Machine:
    """One rank's GPU, or no GPU (backend "host"). Raise EPUnavailableError if there is no GPU."""

    def __init__(self, comm: Intracomm, backend: str) -> None:
        self.on_gpu, self._comm = backend == "cuda", comm
        if self.on_gpu:
            if reason := why_no_gpu():
                raise EPUnavailableError(
                    f"--backend=cuda needs a GPU: {reason}. Pass --backend host, which needs none, and --quick for a short run."
                )
            import cupy

            here = communicator_of(comm).ranks_on_host()
            cupy.cuda.Device(here.index(comm.Get_rank()) % cupy.cuda.runtime.getDeviceCount()).use()

    def upload(self, array: np.ndarray) -> Any:
        """Copy an array to the GPU. CuPy does not copy bfloat16 arrays, so the bytes are copied as integers."""
        if not self.on_gpu:
            return array
        import cupy

        raw = cupy.asarray(array.view(f"u{array.dtype.itemsize}"))
        return cupy.ndarray(array.shape, array.dtype, raw.data)

    def bf16(self, rng: np.random.Generator, num_rows: int, hidden: int) -> Any:
        """Make random rows. A block of rows is repeated, because generating all of them takes longer than measuring."""
        block = rng.standard_normal((min(max(num_rows, 1), 512), hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
        return self.upload(np.resize(block, (num_rows, hidden)))

    def download(self, array: Any) -> np.ndarray:
        """Copy an array to host memory."""
        return array.get() if self.on_gpu else np.asarray(array)

    def copied(self, array: Any) -> Any:
        """Return a copy of an array, in memory of its library."""
        out = self.upload(np.empty(array.shape, array.dtype))
        self.copy(array, out)
        return out

    def copy(self, source: Any, out: Any) -> None:
        """Copy the bytes of an array."""
        if self.on_gpu:
            out.data.copy_from_device_async(source.data, source.nbytes)
        else:
            out[...] = source

    def take(self, rows: Any, idx: Any, out: Any) -> None:
        """Copy `rows[idx]` to `out` in one pass. Rows have a multiple of 16 bytes."""
        if self.on_gpu:
            import cupy

            cupy.take(rows.view("complex128"), idx, axis=0, out=out.view("complex128"))
        else:
            np.take(rows.view(np.uint64), idx, axis=0, out=out.view(np.uint64))

    def name(self) -> str:
        """Return the name of the GPU, or the architecture of the processor."""
        if not self.on_gpu:
            return f"{platform.machine()}, host backend, no GPU"
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()

    def described(self) -> dict[str, Any]:
        """Describe the machine for the result file."""
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
