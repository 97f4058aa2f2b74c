"""Convert the rows of a dispatch to FP8."""

from __future__ import annotations

from ...arrays.dtypes import FP8_GROUP, to_fp8, to_ue8m0
from ...arrays.host_memory import Result, rows_of, to_float32
from ...arrays.view import View


def convert(x: View, round_scale: bool, use_ue8m0: bool) -> tuple[View, View]:
    """Return rows as float8_e4m3fn, and their scales.

    Args:
        x: `[n, hidden]` of a type that combine takes.
        round_scale: Make the scales powers of two.
        use_ue8m0: Return such scales as their 8-bit exponents.
    """
    codes, factors = to_fp8(to_float32(rows_of(x), x.dtype), round_scale)
    if use_ue8m0:
        factors = to_ue8m0(factors)
    rows = Result(x.shape, "float8_e4m3fn")
    rows.rows[...] = codes
    scales = Result((x.shape[0], x.shape[1] // FP8_GROUP), factors.dtype.name)
    scales.values[...] = factors
    return rows.view(x.framework), scales.view(x.framework)
