"""Arrays in the memory of simulated GPUs, which is memory of this process."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from deepep_rt.arrays.view import Framework, View


class DeviceArray:
    """An argument of a call: an array in the memory of a rank's GPU."""

    def __init__(self, rank: int, ptr: int, shape: tuple[int, ...], dtype: str) -> None:
        self.rank, self.ptr, self.shape, self.dtype = rank, ptr, shape, dtype


class DeviceArrays(Framework):
    """The library of these arrays. Results are NumPy arrays in the memory of a GPU."""

    name = "arrays of GPUs on the CPU"

    def view(self, array: DeviceArray, what: str, stream: int | None) -> View:
        return View(array.ptr, array.shape, array.dtype, array.rank, array, self)

    def wrap(self, view: View) -> np.ndarray:
        return array_at(view.ptr, view.shape, view.dtype, view.owner)

    def current_stream(self, device: int) -> int:
        return callers_stream(device)


def callers_stream(rank: int) -> int:
    """The number of the stream on which the caller of a rank works."""
    return 100 + rank


def array_at(ptr: int, shape: tuple[int, ...], dtype: str, owner: Any = None) -> np.ndarray:
    """Return memory of a GPU as an array, without a copy. The array keeps `owner` alive."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * max(num_bytes, 1)).from_address(ptr)
    memory.owner = owner
    return np.frombuffer(memory, np.uint8, num_bytes).view(np.dtype(dtype)).reshape(shape)
