"""`compressed_rows`: each format against its description, with integers and with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_rt.arrays.compressed_rows import COMPRESSIONS, compress, compressed_row_bytes, expand

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


def _power_of_two(groups: np.ndarray, most: float) -> np.ndarray:
    """Return the least power of two of which the largest channel of each group is at most `most` times."""
    largest = np.maximum(np.abs(groups).max(axis=2, keepdims=True), 2.0**-100).astype(np.float64)
    powers = np.exp2(np.floor(np.log2(largest)))
    return np.where(largest / powers <= most, powers, 2 * powers)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_the_nearest_e4m3_number(kind: str) -> None:
    rows = _rows(1, kind)
    groups = rows.reshape(len(rows), -1, 128)
    scales = _power_of_two(groups, 1.75) / 256
    numbers = (groups / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert (_there_and_back(rows, "fp8") == (numbers * scales).reshape(rows.shape)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_log10_is_the_nearest_of_its_numbers(kind: str) -> None:
    rows = _rows(2, kind)
    groups = rows.reshape(len(rows), -1, 128)
    scales = _power_of_two(groups, 1.86328125) / 16
    numbers = np.array([(128 + m) * 2.0 ** (e - 6) - 2 for e in range(4) for m in range(128)])[:-1]
    sizes = (np.abs(groups) / scales).reshape(-1)
    after = (np.abs(_there_and_back(rows, "log10")).reshape(groups.shape) / scales).reshape(-1)
    assert np.isin(after, numbers).all()
    right = np.searchsorted(numbers, sizes).clip(1, len(numbers) - 1)
    assert (
        np.abs(after - sizes) <= np.minimum(np.abs(sizes - numbers[right - 1]), np.abs(numbers[right] - sizes)) + 2.0**-22
    ).all()
    assert (np.signbit(rows) == np.signbit(_there_and_back(rows, "log10"))).all()


def test_log10_ties_go_to_even_codes() -> None:
    rows = np.zeros((1, HIDDEN), np.float32)
    rows[0, :6] = (
        16,
        1 / 128,
        3 / 128,
        -5 / 128,
        6 + 1 / 16,
        -(14 + 1 / 8),
    )  # the scale is 1, and the steps are 1/64, 1/16 and 1/8
    assert _there_and_back(rows, "log10")[0, :6].tolist() == [16, 0, 2 / 64, -2 / 64, 6.0625, -14.125]
    rows[0, 1:3] = 2 + 1 / 64, 2 + 3 / 64
    assert _there_and_back(rows, "log10")[0, 1:3].tolist() == [2, 2 + 2 / 32]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_channel_has_its_place(compression: str) -> None:
    """One channel other than zero among zeros, of each number of the format."""
    rows = np.zeros((HIDDEN, HIDDEN), np.float32)
    np.fill_diagonal(rows, np.where(np.arange(HIDDEN) % 2, -1, 1) * (8 + np.arange(HIDDEN) % 7))
    assert (_there_and_back(rows, compression) == rows).all()


@pytest.mark.parametrize(("compression", "kind", "most"), [
    ("fp8", "normal", 0.028), ("fp8", "heavy tails", 0.028), ("fp8", "sparse", 0.028),
    ("log10", "normal", 0.0022), ("log10", "heavy tails", 0.003), ("log10", "sparse", 0.0022),
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
    assert np.isnan(back[2, :128]).all()
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
    if np.abs(mine).max() < 2.0**127:
        assert np.isfinite(theirs).all()
        assert ((np.sign(theirs) == np.sign(mine)) | (theirs == 0)).all()
        assert (np.abs(theirs) <= np.abs(mine).max() * np.float32(1.07)).all() or np.abs(mine).max() < 2.0**-110


def test_no_rows() -> None:
    for compression in COMPRESSIONS:
        assert _there_and_back(np.zeros((0, HIDDEN), np.float32), compression).shape == (0, HIDDEN)
