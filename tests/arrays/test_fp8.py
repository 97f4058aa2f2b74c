"""The NumPy conversion to FP8 against ml_dtypes, over all bfloat16 numbers."""

from __future__ import annotations

import low_latency_oracle
import ml_dtypes
import numpy as np
import pytest

from deepep_rt.arrays import dtypes as fp8


def _all_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def _reference(values: np.ndarray) -> np.ndarray:
    """Convert with ml_dtypes. It does not saturate and keeps the sign of NaN, so clip and replace NaN here."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes)


def test_encode_every_bfloat16() -> None:
    values = _all_bfloat16().astype(np.float32)
    np.testing.assert_array_equal(fp8.encode_e4m3(values), _reference(values))


def test_encode_ties_and_their_neighbours() -> None:
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2  # exact
    around = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf)), codes]
    top = np.array([448, 463.9, 464, 464.1, 480, 1e30, np.inf, 2.0**-10, 1e-40, 0], np.float32)
    values = np.concatenate([*around, top])
    values = np.concatenate([values, -values])
    np.testing.assert_array_equal(fp8.encode_e4m3(values), _reference(values))


def test_encode_random_float32() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    values = np.concatenate([values, (rng.standard_normal(1 << 18) * 4).astype(np.float32)])
    np.testing.assert_array_equal(fp8.encode_e4m3(values), _reference(values))


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("order", ["sorted", "mixed", "finite"])
def test_rows_of_every_bfloat16(order: str, round_scale: bool) -> None:
    values = _all_bfloat16()
    if order == "mixed":
        values = np.random.default_rng(2).permutation(values)
    if order == "finite":  # groups of all magnitudes, without infinities
        values = np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values))
    rows = values.reshape(-1, 256)
    codes, scales = fp8.to_fp8(rows.astype(np.float32), round_scale)
    wanted_codes, wanted_scales = low_latency_oracle.to_fp8(rows, round_scale)
    np.testing.assert_array_equal(codes, wanted_codes.view(np.uint8))
    np.testing.assert_array_equal(scales.view(np.uint32), wanted_scales.view(np.uint32))


def test_rounded_scales_are_the_least_that_fit() -> None:
    amax = np.concatenate([np.float32(448) * np.exp2(np.arange(-20, 20)), np.random.default_rng(3).random(1000) * 1e3]).astype(
        "f4"
    )
    rows = np.zeros((len(amax), 128), np.float32)
    rows[:, 5] = -amax
    codes, scales = fp8.to_fp8(rows, True)
    assert (np.frexp(scales)[0] == 0.5).all()
    quotient = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    assert (quotient <= scales[:, 0]).all()
    assert (quotient > scales[:, 0] / 2).all()
    assert (np.exp2(fp8.to_ue8m0(scales).astype(np.float32) - 127) == scales).all()
    assert ((codes & 0x7F) <= 0x7E).all()


def test_zeros_infinities_and_nan() -> None:
    rows = np.zeros((4, 128), np.float32)
    rows[1, :2] = np.inf, 1
    rows[2, :3] = np.nan, 2, -np.float32(np.nan)
    rows[3] = np.nan
    codes, scales = fp8.to_fp8(rows, False)
    assert scales[0, 0] == np.float32(1e-4) / np.float32(448)
    assert (codes[0] == 0).all()
    assert scales[1, 0] == np.inf
    assert codes[1, :3].tolist() == [0x7F, 0, 0]
    assert codes[2, :4].tolist() == [0x7F, 0x7E, 0x7F, 0]
    assert scales[2, 0] == np.float32(2) / np.float32(448)
    assert (codes[3] == 0x7F).all()


def test_no_rows() -> None:
    codes, scales = fp8.to_fp8(np.empty((0, 256), np.float32), True)
    assert (codes.shape, scales.shape, fp8.to_ue8m0(scales).shape) == ((0, 256), (0, 2), (0, 2))
