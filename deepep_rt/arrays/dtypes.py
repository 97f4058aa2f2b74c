"""Element types of arrays: their names, sizes and DLPack codes, and conversion to FP8 in NumPy.

Conversion to FP8 (e4m3fn) with scales gives the same bits as on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FP8_GROUP = 128
"""Channels that share a scale when this library converts to FP8."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its usual name, size in bytes and DLPack code."""

    name: str
    itemsize: int
    code: int
    bits: int


DTYPES = {
    d.name: d
    for d in (
        DType("bfloat16", 2, 4, 16),
        DType("float16", 2, 2, 16),
        DType("float32", 4, 2, 32),
        DType("float64", 8, 2, 64),
        DType("float8_e4m3fn", 1, 10, 8),
        DType("float8_e5m2", 1, 12, 8),
        DType("float8_e8m0fnu", 1, 14, 8),
        DType("int8", 1, 0, 8),
        DType("int16", 2, 0, 16),
        DType("int32", 4, 0, 32),
        DType("int64", 8, 0, 64),
        DType("uint8", 1, 1, 8),
        DType("uint16", 2, 1, 16),
        DType("uint32", 4, 1, 32),
        DType("bool", 1, 6, 8),
    )
}
BY_CODE = {(d.code, d.bits): d for d in DTYPES.values()}


MAX_E4M3 = np.float32(448)
"""The largest e4m3fn number. Scales map the largest channel of a group to it."""

MIN_AMAX = np.float32(1e-4)
"""The least largest channel that a scale is made for. A group of zeros needs a scale other than zero."""

_CODE_OF_NAN, _CODE_OF_MAX = 0x7F, 0x7E
_MIN_NORMAL = np.float32(2.0**-6)
_SUBNORMALS_PER_UNIT = np.float32(2.0**9)


def to_fp8(rows: np.ndarray, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale each group of 128 channels of `[n, hidden]` float32, and round it to e4m3fn. Scales ignore NaN.

    With `round_scale`, each scale is the least power of two that lets its group fit.

    Return the codes of the FP8 numbers, `[n, hidden]` uint8, and the scales, `[n, hidden // 128]` float32. A channel is its FP8 number
    times the scale of its group. A group with an infinity has an infinite scale, and its channels become NaN or 0.
    """
    groups = rows.reshape(rows.shape[0], rows.shape[1] // FP8_GROUP, FP8_GROUP)
    with np.errstate(all="ignore"):  # the docstring says what infinities and NaN become
        # np.fmax.reduce and np.nanmax ignore NaN too, but next to a signalling NaN they may lose the largest number.
        amax = np.maximum(np.where(np.isnan(groups), 0, np.abs(groups)).max(axis=2), MIN_AMAX)
        scales = amax / MAX_E4M3
        if round_scale:
            scales = _next_power_of_two(scales)
            inverses = np.float32(1) / scales  # exact
        else:
            inverses = MAX_E4M3 / amax
        codes = encode_e4m3(groups * inverses[:, :, None])
    return codes.reshape(rows.shape), scales


def to_ue8m0(scales: np.ndarray) -> np.ndarray:
    """Convert scales that are powers of two to UE8M0, uint8: e stands for 2**(e - 127)."""
    return (scales.view(np.uint32) >> 23).astype(np.uint8)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest e4m3fn, ties to even. Numbers that are too large become +-448, and NaN loses its sign."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    sizes = bits & 0x7FFFFFFF
    with np.errstate(all="ignore"):
        small = np.rint(sizes.view(np.float32) * _SUBNORMALS_PER_UNIT)  # 8 is the code of the least normal number: no gap
        small = np.where(sizes.view(np.float32) < _MIN_NORMAL, small, 0).astype(np.uint32)
    large = ((sizes + (0x7FFFF + (sizes >> 20 & 1))) >> 20) - ((127 - 7) << 3)  # keeps 3 bits; a carry raises the exponent
    codes = np.where(sizes < _MIN_NORMAL.view(np.uint32), small, np.minimum(large, _CODE_OF_MAX)) | (bits >> 24 & 0x80)
    return np.where(sizes > 0x7F800000, _CODE_OF_NAN, codes).astype(np.uint8)


def _next_power_of_two(values: np.ndarray) -> np.ndarray:
    """Round positive normal numbers up to powers of two. Infinity stays."""
    bits = values.view(np.uint32)
    return (((bits >> 23) + (bits & 0x7FFFFF != 0)) << 23).astype(np.uint32).view(np.float32)
