"""Generate, compare and overwrite arrays of a soak run with NumPy or CuPy.

Row contents are a hash of a key and the coordinates of the row, so a receiver can generate the rows of any source.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 and FP8 by name then)
import numpy as np

from ..arrays.dtypes import DTYPES

POISON = 0xA5
"""The byte that fills outputs before their memory returns to the library."""

_NOT_A_NUMBER = 0xFF  # all bytes of a NaN, which makes a sum show the read of an undefined row

_GOLDEN, _FIRST, _SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_CHUNK_BYTES = 64 << 20  # generated and compared at once
_SHOWN = 16  # bytes of a mismatch that are reported

# Finite numbers near 1: a mask of kept bits, and the addend of the exponent. A word holds two elements of 2 bytes.
_NUMBERS = {"bfloat16": (0x87FF87FF, 0x3C003C00), "float16": (0x9FFF9FFF, 0x2C002C00), "float32": (0x87FFFFFF, 0x3C000000)}

_SPIN = """extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}"""
_CYCLES_PER_S = 1.5e9  # approximate, because the length of a delay does not matter


def row_keys(key: int, *coordinates: np.ndarray) -> np.ndarray:
    """Make a 32-bit key for each row from the key of its array and the coordinates of the row."""
    mixed = _mix(np, np.full(len(coordinates[0]), key & 0xFFFFFFFF, np.uint32))
    for position, coordinate in enumerate((np.full(1, key >> 32), *coordinates)):
        mixed = _mix(np, mixed + np.asarray(coordinate).astype(np.uint32) * np.uint32(_GOLDEN) + np.uint32(position))
    return mixed


def _mix(xp: Any, words: Any) -> Any:
    """Spread each bit of 32-bit words over all bits, in place."""
    words ^= words >> xp.uint32(16)
    words *= xp.uint32(_FIRST)
    words ^= words >> xp.uint32(13)
    words *= xp.uint32(_SECOND)
    words ^= words >> xp.uint32(16)
    return words


class Arrays:
    """NumPy or CuPy, and the streams of the GPU."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.xp: Any = np
        if on_gpu:
            import cupy

            self.xp = cupy
            self._side = cupy.cuda.Stream(non_blocking=True)
            self._spin = cupy.RawKernel(_SPIN, "spin")

    # --- contents ----------------------------------------------------------------------------------------------------------------

    def words(self, keys: np.ndarray, num_words: int) -> Any:
        """Generate random words, `[len(keys), num_words]` uint32."""
        xp = self.xp
        columns = xp.arange(num_words, dtype=xp.uint32) * xp.uint32(_GOLDEN)
        return _mix(xp, xp.asarray(keys)[:, None] ^ columns[None, :])

    def numbers(self, keys: np.ndarray, count: int, dtype: str) -> Any:
        """Generate random finite numbers, `[len(keys), count]`, as unsigned integers of the element's size."""
        kept, added = _NUMBERS[dtype]
        itemsize = DTYPES[dtype].itemsize
        words = self.words(keys, count * itemsize // 4)
        words &= self.xp.uint32(kept)
        words += self.xp.uint32(added)
        return words.view(f"u{itemsize}")

    def to_float32(self, raw: Any, dtype: str) -> Any:
        """Convert unsigned integers of `numbers` to float32."""
        if dtype == "bfloat16":
            return (raw.astype(np.uint32) << self.xp.uint32(16)).view(np.float32)
        return raw.view(dtype).astype(np.float32)

    def from_float32(self, values: Any, dtype: str) -> Any:
        """Round finite float32 to nearest, ties to even, and return unsigned integers."""
        xp = self.xp
        if dtype != "bfloat16":
            return values.astype(dtype).view(f"u{DTYPES[dtype].itemsize}")
        bits = values.view(np.uint32)
        odd = (bits >> xp.uint32(16)) & xp.uint32(1)
        return ((bits + odd + xp.uint32(0x7FFF)) >> xp.uint32(16)).astype(np.uint16)

    # --- arrays ------------------------------------------------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> Any:
        """Copy an array of the host to the device of the Buffer."""
        return self.xp.asarray(array)

    def typed(self, array: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """View the same memory as another type. CuPy has arrays of bfloat16 and FP8, but no operations on them."""
        if self.on_gpu:
            return self.xp.ndarray(shape, np.dtype(dtype), array.data)
        return array.reshape(-1).view(np.dtype(dtype)).reshape(shape)

    def raw(self, array: Any) -> Any:
        """View the bytes of an array, `[n]` uint8, in the same memory."""
        if self.on_gpu:
            return self.xp.ndarray((array.nbytes,), np.uint8, array.data)
        return array.reshape(-1).view(np.uint8)

    def rows(self, array: Any, num_leading: int = 1) -> Any:
        """View the bytes of an array by its first dimensions, `[..., bytes]` uint8, in the same memory."""
        leading = array.shape[:num_leading]
        num_rows = int(np.prod(leading))
        return self.raw(array).reshape(*leading, array.nbytes // num_rows if num_rows else 0)

    def gather(self, array: Any, at: np.ndarray) -> Any:
        """Copy rows of a matrix of bytes."""
        return self._wide(array)[self.put(at)].view(np.uint8)

    def scatter(self, array: Any, at: np.ndarray, contents: Any) -> None:
        """Write rows of a matrix of bytes."""
        self._wide(array)[self.put(at)] = self._wide(contents.view(np.uint8))

    def _wide(self, array: Any) -> Any:
        """View a matrix of bytes as larger elements if they fit, so that there are fewer to copy."""
        return array.view(np.uint32) if array.shape[1] % 4 == 0 else array

    def not_numbers(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Make an array of NaN."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.typed(self.xp.full(num_bytes, _NOT_A_NUMBER, np.uint8), dtype, shape)

    def fill_not_numbers(self, array: Any) -> None:
        """Overwrite an array with NaN."""
        self.raw(array)[...] = _NOT_A_NUMBER

    def poison(self, array: Any) -> None:
        """Overwrite an output with `POISON`. None: there is no output."""
        if array is not None:
            self.raw(array)[...] = POISON

    def write(self, array: Any, contents: Any) -> None:
        """Copy bytes to the start of an array."""
        self.raw(array)[: contents.nbytes] = self.raw(contents)

    def is_same_memory(self, one: Any, other: Any) -> bool:
        """Tell whether two arrays start at the same address."""
        if self.on_gpu:
            return one.data.ptr == other.data.ptr
        return one.__array_interface__["data"][0] == other.__array_interface__["data"][0]

    # --- comparison --------------------------------------------------------------------------------------------------------------

    def difference(self, got: Any, want: Any) -> Any:
        """Compare bytes, `[n]` uint8 each. On a GPU this does not wait.

        Return None if they are equal on the host. Otherwise int64: the number of differing bytes, the first one, the first shown byte, then
        the shown bytes of `want` and of `got`.
        """
        xp, size = self.xp, len(got)
        if not size:
            return None
        wrong = got != want
        if not self.on_gpu and not wrong.any():
            return None
        first = wrong.argmax().astype(np.int64)
        start = first - first % _SHOWN
        shown = xp.clip(start + xp.arange(_SHOWN), 0, size - 1)
        parts = xp.stack([wrong.sum().astype(np.int64), first, start]), want[shown], got[shown]
        return xp.concatenate([part.astype(np.int64) for part in parts])

    def chunks(self, num_rows: int, row_bytes: int) -> Iterator[slice]:
        """Split rows into chunks, which bound the memory of a comparison."""
        step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))

    # --- streams -----------------------------------------------------------------------------------------------------------------

    def main_stream(self) -> Any:
        """Make the stream of the run, for a `with` block. CUDA graphs cannot be captured on the default stream."""
        return self.xp.cuda.Stream(non_blocking=True) if self.on_gpu else contextlib.nullcontext()

    def stream_arguments(self, mode: str) -> dict[str, Any]:
        """Return the arguments that choose the stream of a call, which runs after all work of the current stream."""
        if mode == "async":
            return {"async_finish": True}
        if not self.on_gpu or mode == "plain":
            return {}
        here = self.xp.cuda.get_current_stream().record()
        if mode == "event":
            return {"previous_event": here}
        self._side.wait_event(here)
        return {"stream": self._side}

    def delay(self, seconds: float) -> None:
        """Delay this rank. On GPUs, the host and the GPU each take half of the delay."""
        if not seconds:
            return
        time.sleep(seconds / 2 if self.on_gpu else seconds)
        if self.on_gpu:
            self._spin((1,), (1,), (np.int64(seconds / 2 * _CYCLES_PER_S),))

    def clock(self) -> Any:
        """Record a point in time for `seconds`."""
        if not self.on_gpu:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    def release(self) -> None:
        """Return free GPU memory to the driver, because a new Buffer may need it."""
        if self.on_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    def seconds(self, start: Any, end: Any) -> float:
        """Compute the time between two points that have passed."""
        return self.xp.cuda.get_elapsed_time(start, end) / 1e3 if self.on_gpu else end - start

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.on_gpu:
            self.xp.cuda.get_current_stream().synchronize()
