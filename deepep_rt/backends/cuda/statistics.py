"""Read what kernels have counted (`common/statistics.cuh`), at any time and without waiting for them."""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack, suppress

import numpy as np

from ...cuda import driver
from ...errors import EPError
from ...kernels import structs
from ...kernels.layout import Layout
from ...statistics import CALL_KINDS, NUMBERS, CallStatistics, Counters
from .result_memory import ResultMemory


class GpuStatistics:
    """The numbers of one Buffer. `state` is the address of its local memory.

    `resources` releases what the constructor acquires. Call `close` before.
    """

    def __init__(
        self, layout: Layout, state: int, context: driver.CurrentContext, results: ResultMemory, resources: ExitStack
    ) -> None:
        self._context, self._results = context, results
        self._struct, self._num_experts = structs.CallStatistics.dtype(layout.constants), layout.config.num_local_experts
        regions = layout.local.offsets
        first = regions["statistics"]
        self._address, self._num_bytes = state + first, regions["longest_waits"] - first
        self._expert_rows = regions["expert_rows"] - first
        # Calls of other threads hold no lock here: a copy on a stream of its own needs no order with them.
        self._stream = driver.acquire_stream()
        self._copy = driver.allocate_pinned(self._num_bytes)
        resources.callback(self._release)
        # A signal handler that destroys the Buffer may interrupt a reading of the same thread.
        self._lock, self._is_reading, self._is_closed = threading.RLock(), False, False
        self._last_bytes = bytes(self._num_bytes)

    def counters(self) -> Counters:
        """Return the numbers of what the GPU has done so far. After `close`, those of then."""
        with self._lock:
            if not self._is_closed:
                self._read()
            found = self._last_bytes
        structures = np.frombuffer(found[: self._expert_rows], np.uint8)
        calls = tuple(
            CallStatistics(**{name: int(counted[name]) for name in NUMBERS}, wait_s=tuple((counted["waits"] / 1e9).tolist()))
            for counted in structures[: len(CALL_KINDS) * self._struct.itemsize].view(self._struct)
        )
        rows = np.frombuffer(found, np.uint64, self._num_experts, self._expert_rows)
        return Counters(calls, tuple(rows.tolist()), self._results.use)

    def close(self) -> None:
        """Keep the last numbers. The memory may be freed afterwards."""
        with self._lock:
            if not self._is_closed and not self._is_reading:
                with suppress(EPError):  # the GPU may have failed
                    self._read()
            self._is_closed = True

    def _release(self) -> None:
        if not self._is_reading:  # otherwise the interrupted reading goes on to use both
            driver.release_stream(self._stream)
            driver.free_pinned(self._copy)

    def _read(self) -> None:
        self._is_reading = True
        try:
            # Another thread may be in a capture of a CUDA graph. These requests are no part of it, and do not end it.
            with self._context, driver.relaxed_capture_mode():
                driver.copy_async(self._copy, self._address, self._num_bytes, self._stream)
                driver.synchronize(self._stream)
            if not self._is_closed:  # by a signal handler
                self._last_bytes = ctypes.string_at(self._copy, self._num_bytes)
        finally:
            self._is_reading = False
