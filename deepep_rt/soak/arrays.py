"""Arrays of a soak run: generated from seeds, compared and overwritten where the Buffer works, by NumPy or by CuPy.

Row contents are a hash of a key and the coordinates of the row, so that a receiver generates what any source sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays.dtypes import DTYPES

POISON = 0xA5
"""The byte that outputs are filled with before the library gets their memory again."""

_NOT_A_NUMBER = 0xFF  # all bytes of a NaN: a sum shows that a row was read that nothing may read

_GOLDEN, _FIRST, _SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_CHUNK_BYTES = 64 << 20  # generated and compared at once
_SHOWN = 16  # bytes of a mismatch that are reported

# Finite numbers near 1: bits that are kept, and what is added to the exponent. Two elements of 2 bytes lie in a word.
_NUMBERS = {"bfloat16": (0x87FF87FF, 0x3C003C00), "float16": (0x9FFF9FFF, 0x2C002C00), "float32": (0x87FFFFFF, 0x3C000000)}

_SPIN = """extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}"""
_CYCLES_PER_S = 1.5e9  # about; how long a delay is does not matter


def row_keys(key: int, *coordinates: np.ndarray) -> np.ndarray:
    """A 32-bit key for each row, from the key of its array and the coordinates of the row."""
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
        """Random words, `[len(keys), num_words]` uint32."""
        xp = self.xp
        columns = xp.arange(num_words, dtype=xp.uint32) * xp.uint32(_GOLDEN)
        return _mix(xp, xp.asarray(keys)[:, None] ^ columns[None, :])

    def numbers(self, keys: np.ndarray, count: int, dtype: str) -> Any:
        """Random finite numbers, `[len(keys), count]`, as unsigned integers of the element's size."""
        kept, added = _NUMBERS[dtype]
        itemsize = DTYPES[dtype].itemsize
        words = self.words(keys, count * itemsize // 4)
        words &= self.xp.uint32(kept)
        words += self.xp.uint32(added)
        return words.view(f"u{itemsize}")

    def to_float32(self, raw: Any, dtype: str) -> Any:
        """Unsigned integers that `numbers` made, as float32."""
        if dtype == "bfloat16":
            return (raw.astype(np.uint32) << self.xp.uint32(16)).view(np.float32)
        return raw.view(dtype).astype(np.float32)

    def from_float32(self, values: Any, dtype: str) -> Any:
        """Finite float32, rounded to nearest and ties to even, as unsigned integers."""
        xp = self.xp
        if dtype != "bfloat16":
            return values.astype(dtype).view(f"u{DTYPES[dtype].itemsize}")
        bits = values.view(np.uint32)
        odd = (bits >> xp.uint32(16)) & xp.uint32(1)
        return ((bits + odd + xp.uint32(0x7FFF)) >> xp.uint32(16)).astype(np.uint16)

    # --- arrays ------------------------------------------------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> Any:
        """An array of the host, where the Buffer works."""
        return self.xp.asarray(array)

    def typed(self, array: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        """The same memory as another type. CuPy keeps arrays of bfloat16 and FP8, but computes nothing with them."""
        if self.on_gpu:
            return self.xp.ndarray(shape, np.dtype(dtype), array.data)
        return array.reshape(-1).view(np.dtype(dtype)).reshape(shape)

    def raw(self, array: Any) -> Any:
        """The bytes of an array, `[n]` uint8, the same memory."""
        if self.on_gpu:
            return self.xp.ndarray((array.nbytes,), np.uint8, array.data)
        return array.reshape(-1).view(np.uint8)

    def rows(self, array: Any, num_leading: int = 1) -> Any:
        """The bytes of an array by its first dimensions, `[..., bytes]` uint8, the same memory."""
        leading = array.shape[:num_leading]
        num_rows = int(np.prod(leading))
        return self.raw(array).reshape(*leading, array.nbytes // num_rows if num_rows else 0)

    def gather(self, array: Any, at: np.ndarray) -> Any:
        """Rows of a matrix of bytes, in a copy."""
        return self._wide(array)[self.put(at)].view(np.uint8)

    def scatter(self, array: Any, at: np.ndarray, contents: Any) -> None:
        """Write rows of a matrix of bytes."""
        self._wide(array)[self.put(at)] = self._wide(contents.view(np.uint8))

    def _wide(self, array: Any) -> Any:
        """A matrix of bytes as larger elements, if they fit: fewer to copy."""
        return array.view(np.uint32) if array.shape[1] % 4 == 0 else array

    def not_numbers(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array of NaN."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.typed(self.xp.full(num_bytes, _NOT_A_NUMBER, np.uint8), dtype, shape)

    def fill_not_numbers(self, array: Any) -> None:
        """Overwrite an array with NaN."""
        self.raw(array)[...] = _NOT_A_NUMBER

    def poison(self, array: Any) -> None:
        """Overwrite an output, if there is one."""
        if array is not None:
            self.raw(array)[...] = POISON

    def write(self, array: Any, contents: Any) -> None:
        """Copy bytes to the start of an array."""
        self.raw(array)[: contents.nbytes] = self.raw(contents)

    def is_same_memory(self, one: Any, other: Any) -> bool:
        """Whether two arrays start at the same address."""
        if self.on_gpu:
            return one.data.ptr == other.data.ptr
        return one.__array_interface__["data"][0] == other.__array_interface__["data"][0]

    # --- comparison --------------------------------------------------------------------------------------------------------------

    def difference(self, got: Any, want: Any) -> Any:
        """Compare bytes, `[n]` uint8 each; on a GPU without a wait.

        Returns:
            None where they are the same on the host. Otherwise int64: differing bytes, the first one, the first one shown, then the shown
            bytes of `want` and of `got`.
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
        """Rows in pieces that bound the memory of a comparison."""
        step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))

    # --- streams -----------------------------------------------------------------------------------------------------------------

    def main_stream(self) -> Any:
        """The stream of the run, to work on in a `with` block; CUDA graphs cannot be captured on the default one."""
        return self.xp.cuda.Stream(non_blocking=True) if self.on_gpu else contextlib.nullcontext()

    def where(self, way: str) -> dict[str, Any]:
        """Arguments of a call that say on which stream it runs, after all that the current one holds."""
        if way == "async":
            return {"async_finish": True}
        if not self.on_gpu or way == "plain":
            return {}
        here = self.xp.cuda.get_current_stream().record()
        if way == "event":
            return {"previous_event": here}
        self._side.wait_event(here)
        return {"stream": self._side}

    def delay(self, seconds: float) -> None:
        """Hold up this rank: its host half of the time, and its GPU."""
        if not seconds:
            return
        time.sleep(seconds / 2 if self.on_gpu else seconds)
        if self.on_gpu:
            self._spin((1,), (1,), (np.int64(seconds / 2 * _CYCLES_PER_S),))

    def clock(self) -> Any:
        """A point in time; see `seconds`."""
        if not self.on_gpu:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    def release(self) -> None:
        """Give back GPU memory that is free: a new Buffer may need it."""
        if self.on_gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two points, which have both passed."""
        return self.xp.cuda.get_elapsed_time(start, end) / 1e3 if self.on_gpu else end - start

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.on_gpu:
            self.xp.cuda.get_current_stream().synchronize()
