"""Kernels on a rank's own arrays, without a Buffer. Wrappers use them where a library would need several passes over memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

from ..cuda import driver
from ..kernels.table import KERNELS
from ..kernels.tuning import local_constants
from . import current_gpu, loader
from .launch import Launcher

_BLOCKS_PER_SM = 8  # of 256 threads: at least as many as fit
_lock = threading.Lock()  # PyTorch runs a backward pass in another thread


def launch(name: str, stream: int, values: Mapping[str, int], max_blocks: int, dtype: str | None = None) -> None:
    """Launch a kernel on the GPU of the current context.

    Args:
        name: Its name in the kernel table.
        stream: The stream of the launch.
        values: The members of its Params, in their order.
        max_blocks: Blocks that have work. If there are none, this launches nothing.
        dtype: Element type, for a kernel that is compiled once for each.
    """
    if max_blocks > 0:
        with _lock:
            launcher, gpu_blocks = _launcher(name, dtype, current_gpu.target_arch(), current_gpu.context())
            launcher(stream, min(max_blocks, gpu_blocks), values)


def load(*names: str, dtype: str | None = None) -> None:
    """Load kernels. A later launch then does not fail for want of a kernel.

    Args:
        names: Their names in the kernel table.
        dtype: Element type, for kernels that are compiled once for each.
    """
    with _lock:
        for name in names:
            _launcher(name, dtype, current_gpu.target_arch(), current_gpu.context())


def zero_padding(stream: int, x: int, out: int, num_kept: int, num_rows: int, row_bytes: int) -> None:
    """Copy the first rows of `x` to `out`, and fill its other rows with zeros.

    Args:
        stream: The stream of the launch.
        x: Address on the GPU.
        out: Address on the GPU.
        num_kept: Address on the GPU of the number of rows to copy (int32).
        num_rows: Rows of `out`.
        row_bytes: Bytes of a row.
    """
    values = {"x": x, "out": out, "num_kept": num_kept, "num_rows": num_rows, "row_bytes": row_bytes}
    launch("zero_padding", stream, values, num_rows)


@functools.cache
def _launcher(name: str, dtype: str | None, arch: str, context: int) -> tuple[Launcher, int]:
    """Load a kernel; return its launcher, and the largest useful number of blocks on this GPU."""
    kernel, constants = KERNELS[name], local_constants(arch, dtype)
    function = loader.load(kernel, constants, arch)
    return Launcher(kernel, function, constants, {}), _BLOCKS_PER_SM * driver.num_sms(driver.current_device())
