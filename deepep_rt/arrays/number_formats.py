"""Conversion of rows to FP8 (e4m3fn) with scales, in NumPy, to the same bits as the GPU's conversion."""

from __future__ import annotations

import numpy as np

from .dtypes import FP8_GROUP

LARGEST = np.float32(448)
"""The largest e4m3fn number; the largest channel of a group is scaled to it."""

LEAST_AMAX = np.float32(1e-4)
"""Groups of smaller channels are scaled as if this were their largest: groups of zeros need a scale that can be divided by."""

_NAN, _TOP = 0x7F, 0x7E
_LEAST_NORMAL = np.float32(2.0**-6)
_SUBNORMALS = np.float32(2.0**9)  # steps in 1.0, of numbers below the least normal one


def to_fp8(rows: np.ndarray, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale each group of 128 channels and round it to e4m3fn.

    Args:
        rows: `[n, hidden]` float32, `hidden` a multiple of 128. NaN does not count for a group's scale.
        round_scale: Make the scales powers of two, the least that let the group fit.

    Returns:
        The bytes of the FP8 numbers, `[n, hidden]` uint8, and the scales, `[n, hidden // 128]` float32: a channel is its FP8 number
        times the scale of its group. A group with an infinity has an infinite scale and becomes NaN or 0.
    """
    groups = rows.reshape(rows.shape[0], rows.shape[1] // FP8_GROUP, FP8_GROUP)
    with np.errstate(all="ignore"):  # what infinities and NaN become is said above
        # np.fmax.reduce and np.nanmax ignore NaN too, but beside a signalling one they may lose the largest number.
        amax = np.maximum(np.where(np.isnan(groups), 0, np.abs(groups)).max(axis=2), LEAST_AMAX)
        scales = amax / LARGEST
        if round_scale:
            scales = _next_power_of_two(scales)
            inverses = np.float32(1) / scales  # exact
        else:
            inverses = LARGEST / amax
        codes = encode(groups * inverses[:, :, None])
    return codes.reshape(rows.shape), scales


def exponents(scales: np.ndarray) -> np.ndarray:
    """The UE8M0 form of scales that are powers of two: e stands for 2**(e - 127), uint8."""
    return (scales.view(np.uint32) >> 23).astype(np.uint8)


def encode(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest e4m3fn, ties to even; numbers too large become +-448, and NaN loses its sign."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    sizes = bits & 0x7FFFFFFF
    with np.errstate(all="ignore"):
        small = np.rint(sizes.view(np.float32) * _SUBNORMALS)  # 8 is the code of the least normal number: no gap
        small = np.where(sizes.view(np.float32) < _LEAST_NORMAL, small, 0).astype(np.uint32)
    large = ((sizes + (0x7FFFF + (sizes >> 20 & 1))) >> 20) - ((127 - 7) << 3)  # keeps 3 bits; a carry raises the exponent
    codes = np.where(sizes < _LEAST_NORMAL.view(np.uint32), small, np.minimum(large, _TOP)) | (bits >> 24 & 0x80)
    return np.where(sizes > 0x7F800000, _NAN, codes).astype(np.uint8)


def _next_power_of_two(values: np.ndarray) -> np.ndarray:
    """The least powers of two that are not below positive normal numbers; infinity stays."""
    bits = values.view(np.uint32)
    return (((bits >> 23) + (bits & 0x7FFFFF != 0)) << 23).astype(np.uint32).view(np.float32)
