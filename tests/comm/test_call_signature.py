"""`call_signature`: one number for the kernels, and the text of a mismatch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.comm.call_signature import CALL_KINDS, Signature, describe_mismatch, fields, is_low_latency, pack, unpack
from deepep_rt.config import MAX_ALIGNMENT, MAX_ROW_BYTES, Config

dtypes = st.sampled_from([None, *DTYPES])
low_latency_calls = st.builds(
    lambda *given: Signature(*given),
    st.sampled_from(CALL_KINDS),
    st.sampled_from(list(DTYPES)),
    st.sampled_from([None, "int32", "int64"]),
    st.sampled_from([None, "float32"]),
    dtypes,
    st.booleans(),
)
calls = st.builds(
    lambda call, *rest: Signature(*call[:6], *rest),
    low_latency_calls,
    st.booleans(),
    st.sampled_from(["row", "column"]),
    st.integers(0, MAX_ROW_BYTES // 16).map(lambda vectors: 16 * vectors),
    st.integers(0, MAX_ROW_BYTES // 16),
    st.integers(1, MAX_ALIGNMENT),
)


@given(calls, calls)
def test_each_signature_has_its_own_number(one: Any, other: Any) -> None:
    assert unpack(pack(one)) == fields(one)
    assert (pack(one) == pack(other)) is (one == other)
    assert pack(one) < 1 << 64


@given(low_latency_calls)
def test_low_latency_combines_compare_32_bits(call: Any) -> None:
    assert pack(call) < 1 << 32


def test_low_latency_dispatches_name_their_sizes() -> None:
    def one(row_bytes: int, scale_bytes: int, most: int) -> tuple[int, ...]:
        sizes = dict(row_bytes=row_bytes, scale_bytes=scale_bytes, alignment_or_step=most)
        return call("low_latency_dispatch", "uint8", "int64", None, "uint8", **sizes)

    same = one(1440, 90, 128)
    for other, name, values in (
        (one(1456, 90, 128), "bytes of a row of x", "rank 0: 1440, rank 1: 1456"),
        (one(1440, 91, 128), "bytes of a row of x_scales", "rank 0: 90, rank 1: 91"),
        (one(1440, 90, 64), "num_max_tokens", "rank 0: 128, rank 1: 64"),
    ):
        assert f"disagree on the {name} of this call: {values}" in str(describe_mismatch({0: same, 1: other}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_the_largest_rows_have_a_number(dtype: str) -> None:
    """A signature that does not fit is an error in `pack`, not a wrong number."""
    hidden = MAX_ROW_BYTES // DTYPES[dtype].itemsize
    config = Config(2, 8, hidden, 1, 2, dtype=dtype)
    pack(Signature("dispatch", "uint8", x_scales="uint8", scale_bytes=config.most_scale_bytes(16), row_bytes=config.row_bytes))
    with pytest.raises(ValueError, match="not in range"):
        pack(Signature("dispatch", "uint8", row_bytes=MAX_ROW_BYTES + 16))


def call(kind: str, x: str, *rest: Any, serial: int = 0, **named: Any) -> tuple[int, ...]:
    """Return the numbers that ranks compare: the fields, and the number of the handle."""
    return (*fields(Signature(kind, x, *rest, **named)), serial)


def test_a_mismatch_names_the_field_and_the_values() -> None:
    same = call("dispatch", "bfloat16", "int64", serial=3)
    assert describe_mismatch({0: same, 1: same}) is None
    found = describe_mismatch({0: same, 2: call("dispatch", "bfloat16", "int64", "float32", serial=3)})
    assert found
    for text in ("topk_weights", "rank 0: None", "rank 2: float32"):
        assert text in found
    assert "handle (number of its dispatch)" in str(describe_mismatch({0: same, 1: (*same[:-1], 4)}))


def test_a_mismatch_after_a_conversion() -> None:
    for kind in ("low_latency_dispatch", "dispatch"):
        fp8, bf16 = (call(kind, dtype, "int64") for dtype in ("float8_e4m3fn", "bfloat16"))
        assert "x of this call, after use_fp8" in str(describe_mismatch({0: fp8, 1: bf16}))
        wide, narrow = (call(kind, "float8_e4m3fn", idx) for idx in ("int64", "int32"))
        assert "use_fp8" not in str(describe_mismatch({0: wide, 1: narrow})), "these options do not change topk_idx"


@pytest.mark.parametrize(
    ("name", "argument", "values"),
    [
        ("round_scale", "round_scale", (False, True)),
        ("zero_padding", "zero_padding", (False, True)),
        ("scales_layout", "scales_layout", ("row", "column")),
        ("bytes of a row of x", "row_bytes", (3584, 7168)),
        ("bytes of a row of x_scales", "scale_bytes", (8, 12)),
        ("expert_alignment", "alignment_or_step", (1, 128)),
    ],
)
def test_the_text_of_each_argument(name: str, argument: str, values: tuple[Any, Any]) -> None:
    one, other = (call("dispatch", "uint8", "int64", x_scales="uint8", **{argument: value}) for value in values)
    assert describe_mismatch({0: one, 1: other}) == (
        f"dispatch: the ranks disagree on the {name} of this call: rank 0: {values[0]}, rank 1: {values[1]}; expected the same on all "
        f"ranks. Pass arrays of the same dtypes, and the same arguments, to dispatch on every rank"
    )


def test_the_whole_text() -> None:
    plain = {2: call("dispatch", "bfloat16"), 5: call("dispatch", "float16")}
    assert describe_mismatch(plain) == (
        "dispatch: the ranks disagree on the x of this call: rank 2: bfloat16, rank 5: float16; expected the same on all ranks. "
        "Pass arrays of the same dtypes, and the same arguments, to dispatch on every rank"
    )
    cast = "the x_scales of this call, after use_fp8 and use_ue8m0 have taken effect: rank 0: None, rank 1: uint8; expected"
    scaled = {rank: call("low_latency_dispatch", "float8_e4m3fn", x_scales=dtype) for rank, dtype in enumerate((None, "uint8"))}
    assert cast in str(describe_mismatch(scaled))
    steps = {rank: call("combine with reduce='topk'", "bfloat16", alignment_or_step=rank + 2) for rank in range(2)}
    assert describe_mismatch(steps) == (
        "combine with reduce='topk': the ranks disagree on the step (a rank did not end its last call) of this call: rank 0: 2, rank 1: 3; "
        "expected the same on all ranks. Make a new Buffer on all ranks"
    )
    kinds = {rank: call(kind, "uint8") for rank, kind in enumerate(("dispatch", "combine"))}
    assert describe_mismatch(kinds) == (
        "the ranks disagree on the kind of this call: rank 0: dispatch, rank 1: combine; expected the same on all ranks. Make the same "
        "calls in the same order on every rank"
    )


def test_the_fields_of_a_call_without_other_arrays() -> None:
    given = Signature("combine", "bfloat16")
    assert fields(given) == unpack(pack(given)) == (2, 1, *[0] * 9)


def test_every_kind_has_a_signature_of_its_own() -> None:
    assert [unpack(pack(Signature(kind, "bfloat16")))[0] for kind in CALL_KINDS] == list(range(len(CALL_KINDS)))


def test_kinds_of_low_latency() -> None:
    """The first field decides."""
    for number, kind in enumerate(CALL_KINDS):
        assert is_low_latency((number, 0)) is is_low_latency((number, 3)) is kind.startswith("low_latency")


@pytest.mark.parametrize("name", ["x", "x_scales"])
def test_signatures_with_different_dtypes_differ(name: str) -> None:
    assert len({pack(Signature("dispatch", "int8")._replace(**{name: dtype})) for dtype in DTYPES}) == len(DTYPES)
