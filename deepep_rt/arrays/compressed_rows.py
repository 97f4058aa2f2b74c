"""Compress rows of channels for the way back of a combine, in NumPy, to the same bits as on GPUs (cuda_src/common/compressed.cuh).

A compressed row has a byte for each channel, then parts that depend on the format. Groups of 128 channels share a head.

- "fp8": the byte is an e4m3fn number. The head is a float32 scale. A channel is the product of both.
- "log10": the byte has the sign and the upper 7 bits of a code of 9 bits. The lower 2 bits follow, 16 channels in a word. Code 0 is zero.
  The bits of a positive float32, read as an integer, are a logarithm that is linear within each octave. The codes 1 to `LOG10_CODES` divide
  the range of a group in these logarithms evenly, and the last one is the largest channel. The head has the logarithm of that channel and
  the distance of two codes. A range ends `LOG10_OCTAVES` octaves below the largest channel, and smaller channels become zero.

No word of a row has all bits set, because low-latency calls mark empty memory with it. The bytes of "log10" never have all bits set, and
where the lower bits of 16 channels would, the code of the first of them becomes one less.
"""

from __future__ import annotations

import functools

import numpy as np

from .dtypes import FP8_GROUP
from .number_formats import to_fp8

COMPRESSIONS = ("fp8", "log10")
"""Formats of rows on their way."""

LOW_LATENCY_CHANNELS = 512
"""Low-latency calls compress rows of a multiple of it: their warps convert so many channels at a time."""

LOG10_CODES = 507
"""Codes other than zero. With 508, a byte could have all bits set."""

LOG10_OCTAVES = 14
"""Larger ranges lose precision, and smaller ones lose small channels: with 14, normal and heavy-tailed rows are as exact as with 32."""

LOG10_LEAST = 2048
"""The bits of the least largest channel of a group: 2**-138. Smaller groups become zero."""

LEAST_FP8_AMAX = np.float32(2.0**-100)
"""The least largest channel of a group that an FP8 scale is made for. Smaller groups lose precision, and scales stay normal numbers."""

_LOW_BITS_CHANNELS = 16  # of a word
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def compressed_row_bytes(hidden: int, compression: str) -> int:
    """Return the bytes of a compressed row, a multiple of 16. `hidden` is a multiple of 128."""
    groups = hidden // FP8_GROUP
    used = hidden + (4 * groups if compression == "fp8" else hidden // 4 + 8 * groups)
    return -(-used // 16) * 16


def compress(rows: np.ndarray, compression: str) -> np.ndarray:
    """Compress rows.

    Args:
        rows: `[n, hidden]` float32, `hidden` a multiple of 128.
        compression: One of `COMPRESSIONS`.

    Returns:
        `[n, compressed_row_bytes]` uint8. If a channel is infinite, its group becomes NaN. If a channel is NaN, its group ("log10") or the
        channel ("fp8") becomes NaN.
    """
    parts = _to_fp8(rows) if compression == "fp8" else _to_log10(rows)
    packed = np.zeros((len(rows), compressed_row_bytes(rows.shape[1], compression)), np.uint8)
    start = 0
    for part in parts:
        num_bytes = part.nbytes // max(len(rows), 1)
        packed[:, start : start + num_bytes] = part.reshape(len(rows), num_bytes // part.itemsize).view(np.uint8)
        start += num_bytes
    return packed


def expand(packed: np.ndarray, hidden: int, compression: str) -> np.ndarray:
    """Convert compressed rows, `[n, compressed_row_bytes]` uint8, to float32, `[n, hidden]`."""
    groups = hidden // FP8_GROUP
    num_rows = len(packed)
    high = packed[:, :hidden].reshape(num_rows, groups, FP8_GROUP)
    if compression == "fp8":
        scales = np.ascontiguousarray(packed[:, hidden : hidden + 4 * groups]).view(np.float32)
        with np.errstate(all="ignore"):
            return (_e4m3_numbers()[high] * scales[:, :, None]).reshape(num_rows, hidden)
    start = hidden + hidden // 4
    words = np.ascontiguousarray(packed[:, hidden:start]).view(np.uint32)
    low = (words[:, :, None] >> (2 * np.arange(_LOW_BITS_CHANNELS, dtype=np.uint32)) & 3).reshape(high.shape)
    heads = np.ascontiguousarray(packed[:, start : start + 8 * groups]).view(np.uint32).reshape(num_rows, groups, 2)
    codes = (high.astype(np.uint32) & 0x7F) << 2 | low
    largest, step = heads[:, :, :1], heads[:, :, 1:]
    sizes = np.where(codes == 0, 0, largest - (LOG10_CODES - codes) * step)
    return (sizes | (high.astype(np.uint32) & 0x80) << 24).astype(np.uint32).view(np.float32).reshape(num_rows, hidden)


def _to_fp8(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    return to_fp8(rows, round_scale=False, least_amax=LEAST_FP8_AMAX)


def _to_log10(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    bits = np.ascontiguousarray(rows).view(np.uint32).reshape(len(rows), rows.shape[1] // FP8_GROUP, FP8_GROUP)
    sizes = bits & np.uint32(0x7FFFFFFF)
    most = sizes.max(axis=2, keepdims=True)
    least = (sizes - np.uint32(1)).min(axis=2, keepdims=True) + np.uint32(1)  # of the channels other than zero
    is_finite = most < _INFINITY
    most = np.where(most < LOG10_LEAST, np.uint32(0), most)
    lowest = np.where(most == 0, np.uint32(0), most - np.uint32(LOG10_CODES - 2))  # all codes stay above zero
    span = np.minimum(np.minimum(most - least, np.uint32(LOG10_OCTAVES << 23)), lowest)
    step = np.maximum((span + np.uint32(LOG10_CODES - 2)) // np.uint32(LOG10_CODES - 1), np.uint32(2))
    # The kernel multiplies instead of dividing. The first bit of `scaled` is set, so that its inverse has all bits of a float32.
    shift = np.uint32(32) - np.frexp(step)[1].astype(np.uint32)
    scaled = (step << shift).astype(np.float32)
    inverse = (np.float32(1) / scaled * np.float32(2.0**62)).astype(np.uint64)
    below = (most - sizes + step // np.uint32(2)).astype(np.uint64) * inverse >> (np.uint64(62) - shift)
    codes = np.where((sizes == 0) | (below >= LOG10_CODES), 0, LOG10_CODES - below.astype(np.int64))
    codes = np.where(is_finite, codes, LOG10_CODES).astype(np.uint32)
    high = (bits >> 24 & 0x80 | codes >> 2).astype(np.uint8)
    shifts = 2 * np.arange(_LOW_BITS_CHANNELS, dtype=np.uint32)
    low = np.bitwise_or.reduce(
        (codes & 3).reshape(len(rows), rows.shape[1] // _LOW_BITS_CHANNELS, _LOW_BITS_CHANNELS) << shifts, axis=2
    ).astype(np.uint32)
    low -= low == 0xFFFFFFFF
    heads = np.concatenate([np.where(is_finite, most, _NAN), np.where(is_finite, step, 0)], axis=2).astype(np.uint32)
    return high, low, heads


@functools.cache
def _e4m3_numbers() -> np.ndarray:
    """Return the number of each e4m3fn code, `[256]` float32."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -sizes, sizes)).astype(np.float32)
