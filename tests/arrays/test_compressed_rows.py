"""`compressed_rows`: each format against its description, with integers and with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_rt.arrays.compressed_rows import (
    COMPRESSIONS,
    LOG10_CODES,
    LOG10_LEAST,
    LOG10_OCTAVES,
    compress,
    compressed_row_bytes,
    expand,
)

HIDDEN = 384


def _there_and_back(rows: np.ndarray, compression: str) -> np.ndarray:
    packed = compress(rows, compression)
    assert packed.shape == (len(rows), compressed_row_bytes(rows.shape[1], compression))
    assert not (np.ascontiguousarray(packed).view(np.uint32) == 0xFFFFFFFF).any(), "this word marks empty memory"
    return expand(packed, rows.shape[1], compression)


def _rows(seed: int, kind: str, num_rows: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (num_rows, HIDDEN)
    values = {
        "normal": rng.standard_normal(shape),
        "heavy tails": rng.standard_t(1.5, shape),
        "sparse": rng.standard_normal(shape) * (rng.random(shape) < 0.05),
        "many sizes": np.exp2(rng.uniform(-100, 100, shape)) * rng.choice([-1, 1], shape),
        "equal": np.full(shape, -1.0),
        "tiny": rng.standard_normal(shape) * 2.0**-90,
        "subnormal": rng.integers(-9, 9, shape) * 2.0**-149,
        "zero": np.zeros(shape),
    }[kind]
    return values.astype(np.float32)


KINDS = ("normal", "heavy tails", "sparse", "many sizes", "equal", "tiny", "subnormal", "zero")


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_the_nearest_e4m3_number(kind: str) -> None:
    rows = _rows(1, kind)
    groups = rows.reshape(len(rows), -1, 128)
    amax = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(2.0**-100))
    numbers = (groups * (np.float32(448) / amax)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted = (numbers * (amax / np.float32(448))).reshape(rows.shape)
    assert (_there_and_back(rows, "fp8") == wanted).all()


@pytest.mark.parametrize("kind", KINDS)
def test_log10_is_the_nearest_code(kind: str) -> None:
    """Sizes are the bits of float32, as integers. Close to the middle between two codes, either is right."""
    rows = _rows(2, kind)
    back = _there_and_back(rows, "log10")
    before, after = (np.abs(a).view(np.uint32).astype(np.int64).reshape(len(rows), -1, 128) for a in (rows, back))
    largest = before.max(axis=2, keepdims=True)
    before = np.where(largest < LOG10_LEAST, 0, before)
    largest = before.max(axis=2, keepdims=True)
    least = np.where(before == 0, largest, before).min(axis=2, keepdims=True)
    step = np.maximum(-(-np.minimum(largest - least, LOG10_OCTAVES << 23) // (LOG10_CODES - 1)), 2)
    slack = step // 2 + (step >> 14) + 1
    is_near = np.abs(after - before) <= slack
    below_all_codes = largest - before >= (LOG10_CODES - 1) * step + slack - (step >> 13) - 2
    if kind == "equal":  # all lower bits are set, so the first of 16 codes becomes one less
        is_near |= (np.arange(128) % 16 == 0) & (after == before - step)
    assert (np.where((after == 0) & (before > 0), below_all_codes, is_near)).all()
    assert (np.signbit(rows) == np.signbit(back)).all()


@pytest.mark.parametrize(("compression", "kind", "most"), [
    ("fp8", "normal", 0.027), ("fp8", "heavy tails", 0.027), ("fp8", "sparse", 0.027),
    ("log10", "normal", 0.004), ("log10", "heavy tails", 0.004), ("log10", "sparse", 0.002),
])  # fmt: skip
def test_error_of_the_norm(compression: str, kind: str, most: float) -> None:
    rows = _rows(3, kind)
    error = np.linalg.norm(_there_and_back(rows, compression) - rows) / np.linalg.norm(rows)
    assert most / 20 < error < most


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_infinities_and_nan_stay_visible(compression: str) -> None:
    rows = _rows(4, "normal", 4)
    rows[0, 5], rows[1, 130], rows[2, 7] = np.inf, -np.inf, np.nan
    back = _there_and_back(rows, compression)
    assert np.isnan(back[0, :128]).all()
    assert np.isnan(back[1, 128:256]).all()
    assert np.isnan(back[2, 7])
    for row, group in ((0, 0), (1, 1), (2, 0)):
        others = np.arange(HIDDEN) // 128 != group
        assert np.isfinite(back[row, others]).all()
    assert np.isfinite(back[3]).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.sampled_from(COMPRESSIONS))
def test_any_bits(bits: list[int], compression: str) -> None:
    """Every word of memory, NaN included, survives with its sign or becomes NaN, and no group changes another one."""
    rows = np.zeros((1, 256), np.float32)
    rows[0, 128 : 128 + len(bits)] = np.array(bits, np.uint32).view(np.float32)
    back = _there_and_back(rows, compression)
    assert (back[0, :128] == 0).all()
    mine, theirs = rows[0, 128:], back[0, 128:]
    assert np.isnan(theirs[np.isnan(mine) | np.isinf(mine)]).all()
    if np.isfinite(mine).all():
        assert np.isfinite(theirs).all()
        assert ((np.sign(theirs) == np.sign(mine)) | (theirs == 0)).all()
        assert (np.abs(theirs) <= np.abs(mine).max() * np.float32(1.07)).all() or np.abs(mine).max() < 2.0**-110


def test_no_rows() -> None:
    for compression in COMPRESSIONS:
        assert _there_and_back(np.zeros((0, HIDDEN), np.float32), compression).shape == (0, HIDDEN)
