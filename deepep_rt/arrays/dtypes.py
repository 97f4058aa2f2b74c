"""Element types of arrays: their names, sizes and DLPack codes."""

from __future__ import annotations

from dataclasses import dataclass

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
