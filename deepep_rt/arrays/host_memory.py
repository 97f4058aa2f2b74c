"""Host memory of the host backend: results, Views as rows of bytes, and conversions of element types."""

from __future__ import annotations

import numpy as np

from .dtypes import DTYPES, FP8_GROUP, to_fp8, to_ue8m0
from .view import HOST, Framework, View, host_bytes

_ALIGNMENT = 64  # JAX adopts host memory only with this alignment


class Result:
    """Aligned memory of a result, as rows of bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: str, fill: int | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * DTYPES[dtype].itemsize
        num_bytes = shape[0] * row_bytes
        allocate = np.zeros if fill == 0 else np.empty  # pages of zeros take no memory until they are used
        memory = allocate((-(-num_bytes // _ALIGNMENT) + 2) * _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self.ptr = memory.ctypes.data + start
        self.rows = memory[start : start + num_bytes].reshape(shape[0], row_bytes)
        if fill:
            self.rows[...] = fill

    @property
    def values(self) -> np.ndarray:
        """The rows as numbers of a type that NumPy knows, `[rows, numbers of a row]`."""
        return self.rows.view(self.dtype)

    @staticmethod
    def of(values: np.ndarray) -> Result:
        """Copy whole numbers to int32."""
        result = Result(values.shape, "int32")
        result.rows.view(np.int32).reshape(values.shape)[...] = values
        return result

    def view(self, framework: Framework) -> View:
        return View(self.ptr, tuple(self.shape), self.dtype, HOST, self.rows, framework)


def rows_of(view: View) -> np.ndarray:
    """The memory of a View as `[rows, row_bytes]` uint8, without a copy."""
    return host_bytes(view).reshape(view.shape[0], view.row_bytes)


def values_of(view: View) -> np.ndarray:
    """The memory of a View as `[rows, numbers of a row]` of a type that NumPy knows, without a copy."""
    return rows_of(view).view(view.dtype)


def to_float32(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Convert rows of bytes to numbers."""
    if dtype == "bfloat16":  # NumPy does not know it: a bfloat16 is the upper half of a float32
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(dtype).astype(np.float32, copy=False)


def from_float32(values: np.ndarray, dtype: str, rows: np.ndarray) -> None:
    """Round numbers to the nearest of the type, ties to even, and write them to `rows`."""
    if dtype != "bfloat16":
        rows.view(dtype)[...] = values
        return
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    rows.view(np.uint16)[...] = np.where(
        np.isnan(values), 0x7FFF, rounded
    )  # 0x7FFF is the only NaN that a GPU's conversion gives


def fp8_rows(x: View, round_scale: bool, use_ue8m0: bool) -> tuple[View, View]:
    """Convert rows of a type that combine takes to float8_e4m3fn; return them and their scales.

    `round_scale` makes the scales powers of two. `use_ue8m0` returns such scales as their 8-bit exponents.
    """
    codes, factors = to_fp8(to_float32(rows_of(x), x.dtype), round_scale)
    if use_ue8m0:
        factors = to_ue8m0(factors)
    rows = Result(x.shape, "float8_e4m3fn")
    rows.rows[...] = codes
    scales = Result((x.shape[0], x.shape[1] // FP8_GROUP), factors.dtype.name)
    scales.values[...] = factors
    return rows.view(x.framework), scales.view(x.framework)
