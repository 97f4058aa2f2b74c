"""Convert rows to the formats in which they travel, with NumPy or CuPy, to the bits that kernels and the host backend compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import FP8_GROUP
from .arrays import Arrays

_LARGEST = np.float32(448)  # of e4m3fn
_LEAST = np.float32(1e-4)  # lower bound of a group's largest channel in dispatches
_LEAST_COMPRESSED = np.float32(2.0**-100)  # the same in combines


def to_fp8(arrays: Arrays, rows: Any, *, round_scale: bool, ue8m0: bool) -> tuple[Any, Any]:
    """Convert rows of finite bfloat16 to e4m3fn with a scale for each 128 channels, rounded to nearest, ties to even.

    Args:
        arrays: NumPy or CuPy.
        rows: `[n, hidden]` uint16.
        round_scale: Round scales to powers of two.
        ue8m0: Return scales as exponents.

    Returns:
        `[n, hidden]` uint8, and `[n, hidden // 128]` float32 or uint8.
    """
    xp = arrays.xp
    groups = arrays.to_float32(rows, "bfloat16").reshape(len(rows), rows.shape[1] // FP8_GROUP, FP8_GROUP)
    largest = xp.maximum(abs(groups).max(axis=2), _LEAST)
    scales, factors = largest / _LARGEST, _LARGEST / largest
    if round_scale:
        bits = scales.view(np.uint32)
        up = ((bits & xp.uint32(0x7FFFFF)) != 0).astype(np.uint32)
        scales = (((bits >> xp.uint32(23)) + up) << xp.uint32(23)).view(np.float32)
        factors = xp.float32(1) / scales
    codes = _e4m3_codes(arrays, abs(groups) * factors[:, :, None]).astype(np.uint8).reshape(rows.shape)
    codes |= (rows >> np.uint16(8) & np.uint16(0x80)).astype(np.uint8)
    if ue8m0:
        return codes, (scales.view(np.uint32) >> xp.uint32(23)).astype(np.uint8)
    return codes, scales


def after_compression(arrays: Arrays, rows: Any, form: str) -> Any:
    """Return finite rows as a combine with `compress=form` adds them.

    Args:
        arrays: NumPy or CuPy.
        rows: `[n, hidden]` float32, `hidden` a multiple of 128.
        form: One of `COMPRESSIONS`.

    Returns:
        `[n, hidden]` float32.
    """
    made = arrays.xp.zeros(rows.shape, np.float32)
    for part in arrays.chunks(len(rows), rows.nbytes // max(len(rows), 1)):  # a part needs several times its memory
        groups = rows[part].reshape(-1, FP8_GROUP)
        changed = _after_fp8(arrays, groups) if form == "fp8" else _after_log10(arrays, groups)
        made[part] = changed.reshape(rows[part].shape)
    return made


def _after_fp8(arrays: Arrays, groups: Any) -> Any:
    scales = _power_of_two(arrays, groups, most=1.75) * np.float32(2.0**-8)
    codes = _e4m3_codes(arrays, abs(groups) / scales).reshape(groups.shape)
    sizes = arrays.put(_e4m3_sizes())[codes] * scales
    return _with_signs(arrays, sizes.view(np.uint32), groups)


def _after_log10(arrays: Arrays, groups: Any) -> Any:
    """Round each size, in units in which the largest is at most 29.8, plus 2, to 8 significant bits, and take 2 away."""
    xp = arrays.xp
    scales = _power_of_two(arrays, groups, most=1.86328125) / np.float32(16)
    sums = abs(groups) / scales + np.float32(2)
    steps = (sums.view(np.uint32) & xp.uint32(0x7F800000)).view(np.float32) * np.float32(1 / 128)
    sizes = (xp.rint(sums / steps) * steps - np.float32(2)) * scales
    return _with_signs(arrays, sizes.view(np.uint32), groups)


def _power_of_two(arrays: Arrays, groups: Any, *, most: float) -> Any:
    """Return the least power of two of which the largest channel is at most `most` times, `[n, 1]`."""
    xp = arrays.xp
    largest = xp.maximum(abs(groups).max(axis=1), _LEAST_COMPRESSED)[:, None]
    powers = (largest.view(np.uint32) & xp.uint32(0x7F800000)).view(np.float32)
    return xp.where(largest / powers > np.float32(most), np.float32(2), np.float32(1)) * powers


def _with_signs(arrays: Arrays, sizes: Any, rows: Any) -> Any:
    """Combine the bits of positive float32 with the signs of rows."""
    return (sizes | rows.view(np.uint32) & arrays.xp.uint32(1 << 31)).view(np.float32)


def _e4m3_codes(arrays: Arrays, sizes: Any) -> Any:
    """Round positive numbers to e4m3fn, and return the codes, `[sizes.size]` int64."""
    middles = arrays.put(_middles())
    sizes = arrays.xp.minimum(sizes, _LARGEST).reshape(-1)
    codes = arrays.xp.searchsorted(middles, sizes)
    is_tie = middles[arrays.xp.minimum(codes, len(middles) - 1)] == sizes
    codes += is_tie & (codes % 2 == 1)
    return codes


def _e4m3_sizes() -> np.ndarray:
    """List the finite magnitudes of e4m3fn, ascending."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)).astype(np.float32)


def _middles() -> np.ndarray:
    """List the midpoints between adjacent magnitudes of e4m3fn, ascending."""
    sizes = _e4m3_sizes()
    return (sizes[1:] + sizes[:-1]) / np.float32(2)
