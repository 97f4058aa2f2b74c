"""`call_signature`: one number for the kernels, and the text of a mismatch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.comm.call_signature import CALL_KINDS, describe_mismatch, fields, is_low_latency, pack, unpack
from deepep_rt.config import MAX_ROW_BYTES

MOST_SCALE_BYTES = MAX_ROW_BYTES  # a row has fewer scales than elements
dtypes = st.sampled_from([None, *DTYPES])
calls = st.tuples(
    st.sampled_from(CALL_KINDS),
    st.sampled_from(list(DTYPES)),
    dtypes,
    dtypes,
    dtypes,
    st.integers(0, MOST_SCALE_BYTES),
)


@given(calls, calls)
def test_each_signature_has_its_own_number(one: Any, other: Any) -> None:
    assert unpack(pack(*one)) == fields(*one)
    assert (pack(*one) == pack(*other)) is (one == other)
    assert pack(*one) < 1 << 64
    assert pack(*one[:5]) < 1 << 32  # low-latency kernels compare 32 bits


def test_a_mismatch_names_the_field_and_the_values() -> None:
    same = (*fields("dispatch", "bfloat16", "int64", None, None), 3)
    assert describe_mismatch({0: same, 1: same}) is None
    other = (*fields("dispatch", "bfloat16", "int64", "float32", None), 3)
    found = describe_mismatch({0: same, 2: other})
    assert found
    for text in ("topk_weights", "rank 0: None", "rank 2: float32"):
        assert text in found
    fp8, bf16 = ((*fields("low_latency_dispatch", dtype, "int64", None, None), 0) for dtype in ("float8_e4m3fn", "bfloat16"))
    assert "x of this call, after use_fp8" in str(describe_mismatch({0: fp8, 1: bf16}))
    wide, narrow = ((*fields("low_latency_dispatch", "bfloat16", idx, None, None), 0) for idx in ("int64", "int32"))
    assert "use_fp8" not in str(describe_mismatch({0: wide, 1: narrow})), "these options do not change topk_idx"
    assert "handle (number of its dispatch)" in str(describe_mismatch({0: same, 1: (*same[:-1], 4)}))


def test_the_whole_text() -> None:
    def call(kind: str, x: str, scales: str | None) -> tuple[int, ...]:
        return (*fields(kind, x, "int64", None, scales, 8 if scales else 0), 0)

    plain = {2: call("dispatch", "bfloat16", None), 5: call("dispatch", "float16", None)}
    assert describe_mismatch(plain) == (
        "the ranks disagree on the x of this call; expected the same on all ranks. rank 2: bfloat16, rank 5: float16"
    )
    cast = ", after use_fp8 and use_ue8m0 have taken effect; expected the same on all ranks. "
    scaled = {0: call("low_latency_dispatch", "bfloat16", None), 1: call("low_latency_dispatch", "bfloat16", "uint8")}
    assert describe_mismatch(scaled) == f"the ranks disagree on the x_scales of this call{cast}rank 0: None, rank 1: uint8"
    numbers = {0: (*call("dispatch", "uint8", "uint8"),), 1: (*call("dispatch", "uint8", "uint8")[:5], 12, 0)}
    assert describe_mismatch(numbers) == (
        "the ranks disagree on the bytes of a row of x_scales of this call; expected the same on all ranks. rank 0: 8, rank 1: 12"
    )


def test_the_fields_of_a_call_without_scales() -> None:
    call = "combine", "bfloat16", None, None, None
    assert fields(*call) == unpack(pack(*call)) == (2, 1, 0, 0, 0, 0)


def test_every_kind_has_a_signature_of_its_own() -> None:
    assert [unpack(pack(kind, "bfloat16", None, None))[0] for kind in CALL_KINDS] == list(range(len(CALL_KINDS)))


def test_kinds_of_low_latency() -> None:
    """The first field decides."""
    for number, kind in enumerate(CALL_KINDS):
        assert is_low_latency((number, 0)) is is_low_latency((number, 3)) is kind.startswith("low_latency")


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "x_scales"])
def test_signatures_with_different_dtypes_differ(name: str) -> None:
    call = dict(kind="dispatch", x="bfloat16", topk_idx=None, topk_weights=None, x_scales=None)
    assert len({pack(**{**call, name: dtype}) for dtype in DTYPES}) == len(DTYPES)  # type: ignore[arg-type]
