"""The calls that `Buffer.autotune` measures: a dispatch along a random routing, and the combine of its rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from ...arrays.dtypes import DTYPES, FP8_GROUP
from ...arrays.frameworks import VIEWS
from ...arrays.view import View
from ...comm.call_signature import pack
from ...config import COMBINE_DTYPES
from ...cuda import driver
from ...jit.launch import PreparedLaunch
from ..base import Call, CombineInputs, DispatchInputs
from .runtime import CudaRuntime
from .throughput import RowMover, receive_window

_SEED = 29
_RANDOM_BYTES = 1 << 20


class TuningInputs:
    """Arrays of one rank, and launches of its kernels. Rows arrive in the region `landing`, so results of the program stay as they are.

    Args:
        runtime: The Buffer's memory and kernels.
        mover: Moves rows by token.
        num_tokens: Tokens of this rank.
        dtype: Element type of the dispatched rows.
        resources: Frees the arrays.

    Raises:
        EPOutOfMemoryError: if the GPU has no memory for the arrays, or if the program holds so many results that the pool has no room.
    """

    def __init__(self, runtime: CudaRuntime, mover: RowMover, num_tokens: int, dtype: str, resources: ExitStack) -> None:
        config, self._stream = runtime.config, runtime.order.own_stream
        self._runtime, self._mover, self._resources = runtime, mover, resources
        # In the dispatch that makes the handle, this could fail on one rank only.
        mover.results.reserve_for_repeats(runtime.layout.max_result_bytes, self._stream)
        self._x = self._random((num_tokens, config.hidden), dtype)
        has_scales = DTYPES[dtype].itemsize == 1 and config.hidden % FP8_GROUP == 0
        self._scales = self._random((num_tokens, config.hidden // FP8_GROUP), "float32") if has_scales else None
        rng = np.random.default_rng([_SEED, runtime.rank])
        chosen = np.argpartition(rng.random((num_tokens, config.num_experts), np.float32), config.num_topk - 1, axis=1)
        self._idx = self._copied(np.ascontiguousarray(chosen[:, : config.num_topk], np.int64))
        self._parts: Any = None

    def route(self) -> None:
        """Make the routing with a dispatch. Collective."""
        order = self._runtime.order
        call: Call = order.begin(self._x, False, None, self._stream)
        inputs = DispatchInputs(self._x, self._idx, None, self._scales, None, None, 1)
        self._handle, _ = self._mover.send_rows(inputs, call)
        self._runtime.synchronize()

    def make_rows(self) -> None:
        """Make the rows of the combine, and the memory of all results.

        Raises:
            EPOutOfMemoryError: if the GPU has no memory for them.
        """
        config, layout, handle = self._runtime.config, self._runtime.layout, self._handle
        scale_bytes = self._scales.row_bytes if self._scales else 0
        self._parts = layout.result(handle.num_recv_rows, self._x.row_bytes, scale_bytes, 0, False)
        self._counts = self._mover.counts.acquire(self._stream)
        self._y = None
        if config.dtype in COMBINE_DTYPES:
            self._y = self._random((handle.num_recv_rows, config.hidden), config.dtype)
            parts = layout.combined(handle.num_tokens, self._y.row_bytes, False)
            self._sums = self._allocate(parts.num_bytes) + parts.offsets["x"]

    @property
    def calls(self) -> tuple[str, ...]:
        """The kernels that this Buffer can measure. A Buffer for rows that cannot be added up has no combine."""
        return ("dispatch",) if self._y is None else ("dispatch", "combine")

    def launch_of(self, call: str) -> PreparedLaunch:
        """Prepare the launch of a kernel, in the shape that the runtime now uses."""
        arrays: tuple[View | None, ...]
        if call == "dispatch":
            arrays = self._x, None, None, self._scales
            landing = self._runtime.regions.offsets["landing"]
            window = receive_window(landing, self._parts.offsets, self._handle.num_recv_rows)
            signature = DispatchInputs(self._x, None, None, self._scales, self._handle, None, 1).signature
            tables, counts = self._handle.routing.ptr, self._counts.ptr
            launcher, params = self._mover.dispatch_launch(pack(signature), arrays, tables, counts, window)
        else:
            assert self._y is not None
            inputs = CombineInputs(self._y, self._handle, None, ())
            launcher, params = self._mover.combine_launch(inputs, (self._y, None), self._sums, 0)
        return launcher.prepare(self._mover.num_sms, params)

    def _random(self, shape: tuple[int, int], dtype: str) -> View:
        """Make an array of random bytes: a copy of zeros would need less power, and would be faster."""
        num_bytes = shape[0] * shape[1] * DTYPES[dtype].itemsize
        ptr, filled = self._allocate(num_bytes), min(num_bytes, _RANDOM_BYTES)
        start = np.random.default_rng(_SEED).integers(0, 256, max(filled, 1), dtype=np.uint8)
        driver.copy_async(ptr, start.ctypes.data, filled, self._stream)
        while filled < num_bytes:
            size = min(filled, num_bytes - filled)
            driver.copy_async(ptr + filled, ptr, size, self._stream)
            filled += size
        driver.synchronize(self._stream)
        return self._view(ptr, shape, dtype)

    def _copied(self, values: np.ndarray) -> View:
        ptr = self._allocate(values.nbytes)
        driver.copy_async(ptr, values.ctypes.data, values.nbytes, self._stream)
        driver.synchronize(self._stream)
        return self._view(ptr, values.shape, values.dtype.name)

    def _view(self, ptr: int, shape: tuple[int, ...], dtype: str) -> View:
        return View(ptr, shape, dtype, self._runtime.device, None, VIEWS)

    def _allocate(self, num_bytes: int) -> int:
        ptr = driver.allocate(num_bytes)
        self._resources.callback(driver.free, ptr)
        return ptr
