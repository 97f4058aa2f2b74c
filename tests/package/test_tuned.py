"""`tuned`: the choice from measured times, and its table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_rt import CopyShape, Tuning, TuningResult, TuningRow
from deepep_rt.tuned import CALLS, WITHIN, choose

A, B = CopyShape(2, 7, 14336), CopyShape(1, 12, 14336)


def _rows(times: dict[int, tuple[float, float]], shape: CopyShape | None = None) -> list[TuningRow]:
    """Make rows of dispatch and combine from their times by SMs."""
    return [TuningRow(call, sms, shape, us) for sms, both in times.items() for call, us in zip(CALLS, both, strict=True)]


def test_the_fewest_sms_within_the_limit_are_chosen() -> None:
    """Dispatch and combine count together: with 16 SMs, a slower dispatch is made up for by a faster combine."""
    assert choose(_rows({8: (200, 200), 16: (104, 97), 24: (100, 100), 64: (99.5, 100)})) == Tuning(16)
    assert choose(_rows({8: (200, 200), 16: (104, 99), 24: (100, 100), 64: (99.5, 100)})) == Tuning(24)


def test_a_faster_shape_is_chosen_for_its_call_alone() -> None:
    rows = [*_rows({16: (104, 104), 24: (100, 100)}), TuningRow("dispatch", 16, A, 96), TuningRow("combine", 16, B, 110)]
    assert choose(rows) == Tuning(16, dispatch=A)
    rows.append(TuningRow("combine", 16, A, 95))
    assert choose(rows) == Tuning(16, dispatch=A, combine=A)
    assert choose(rows).shapes == {"dispatch": A, "combine": A}


def test_a_hardly_faster_shape_is_not_chosen() -> None:
    """The usual shape needs no more kernels."""
    assert choose([*_rows({24: (100, 100)}), TuningRow("dispatch", 24, A, 99.6)]) == Tuning(24)
    assert choose([*_rows({24: (100, 100)}), TuningRow("dispatch", 24, A, 99.4)]) == Tuning(24, dispatch=A)


def test_fewer_sms_are_compared_with_the_fastest_shapes_of_all() -> None:
    """With 8 SMs the usual shapes seem good enough, until a shape makes 64 SMs faster."""
    rows = _rows({8: (101, 101), 64: (100, 100)})
    assert choose(rows).num_sms == 8
    assert choose([*rows, TuningRow("dispatch", 64, A, 90)]) == Tuning(64, dispatch=A)


def test_a_buffer_without_combine() -> None:
    assert choose([TuningRow("dispatch", 8, None, 100), TuningRow("dispatch", 16, None, 99)]) == Tuning(8)


@given(st.data())
def test_a_choice_is_never_far_from_the_fastest(data: st.DataObject) -> None:
    times = st.floats(1, 1000)
    shapes = st.lists(st.sampled_from([A, B]), unique=True)
    rows = [
        TuningRow(call, sms, shape, data.draw(times))
        for call in CALLS
        for sms in data.draw(st.just((8, 24, 64)))
        for shape in (None, *data.draw(shapes))
    ]
    chosen = choose(rows)
    by_candidate = {(row.call, row.num_sms, row.shape): row.us for row in rows}
    total = sum(by_candidate[call, chosen.num_sms, getattr(chosen, call)] for call in CALLS)
    best = min(
        sum(min(row.us for row in rows if (row.call, row.num_sms) == (call, sms)) for call in CALLS) for sms in (8, 24, 64)
    )
    assert total <= (1 + WITHIN) * best


def test_the_table() -> None:
    rows = (*_rows({8: (200, 220.04), 16: (100, 120)}), TuningRow("dispatch", 16, A, 90))
    text = str(TuningResult(choose(rows), rows, 4096, "bfloat16", 12.4, "/cache/tunings/a.json"))
    lines = [line.split("  ") for line in text.splitlines()]
    assert text.startswith("4096 tokens of bfloat16 a rank, measured in 12 s\nSMs")
    found = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["8", "usual", "200.0", "usual", "220.0", "420.0"] in found
    assert ["16", "2 warps, 7 stages, 14336 bytes", "90.0", "usual", "120.0", "210.0", "chosen"] in found
    assert ["dispatch", "usual", "100.0"] in found
    assert ["dispatch", "2 warps, 7 stages, 14336 bytes", "90.0", "chosen"] in found
    assert text.endswith("saved in /cache/tunings/a.json")
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    ("tuning", "text"),
    [
        (Tuning(24), "24 SMs; dispatch: usual; combine: usual"),
        (Tuning(16, B, A), "16 SMs; dispatch: 1 warp, 12 stages, 14336 bytes; combine: 2 warps, 7 stages, 14336 bytes"),
    ],
)
def test_texts(tuning: Tuning, text: str) -> None:
    assert str(tuning) == text
