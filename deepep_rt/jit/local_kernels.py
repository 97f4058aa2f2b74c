"""Kernels that work on a rank's own arrays, without a Buffer; for the wrappers, whose libraries would take many passes over memory."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping

from ..cuda import driver
from ..kernels.table import KERNELS
from ..kernels.tuning import local_constants
from . import build as jit
from .launch import Launcher

_BLOCKS_PER_SM = 8  # of 256 threads: at least as many as fit
_launching = threading.Lock()  # a backward pass runs in a thread of its own


def launch(name: str, stream: int, values: Mapping[str, int], most_blocks: int, dtype: str | None = None) -> None:
    """Launch a kernel on the GPU of the current context.

    Args:
        name: Its name in the kernel table.
        stream: Where to.
        values: The members of its Params, in their order.
        most_blocks: Blocks that have something to do. None are launched if there is nothing.
        dtype: Element type, for a kernel that is compiled once for each.
    """
    if most_blocks > 0:
        with _launching:
            launcher, room = _launcher(name, dtype, jit.current_arch(), jit.current_context())
            launcher(stream, min(most_blocks, room), values)


def zero_padding(stream: int, x: int, out: int, num_kept: int, num_rows: int, row_bytes: int) -> None:
    """Copy the rows of `x` before the number at `num_kept` (int32) to `out`, and zero its other rows. All are addresses on the GPU."""
    values = {"x": x, "out": out, "num_kept": num_kept, "num_rows": num_rows, "row_bytes": row_bytes}
    launch("zero_padding", stream, values, num_rows)


@functools.cache
def _launcher(name: str, dtype: str | None, arch: str, context: int) -> tuple[Launcher, int]:
    """A loaded kernel, and the most blocks that are worth launching."""
    kernel, constants = KERNELS[name], local_constants(arch, dtype)
    with driver.relaxed_capture_mode():  # also where the first call is captured
        function = jit.load(kernel, constants, arch)
        return Launcher(kernel, function, constants, {}), _BLOCKS_PER_SM * driver.num_sms(driver.current_device())
