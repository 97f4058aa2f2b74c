"""The report and the traces of layers whose experts start as rows arrive. The measurement needs GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("ml_dtypes")

import experts_as_rows_arrive as program


def test_a_range_begins_with_the_copy_that_tells_of_it() -> None:
    kernel = {"cat": "kernel", "ts": 5.0, "dur": 9.0}
    events = [
        {"cat": "user_annotation", "ts": 130.0, "dur": 40.0},
        {"cat": "gpu_memcpy", "ts": 98.0, "dur": 2.0},
        kernel.copy(),
        {"cat": "user_annotation", "ts": 30.0, "dur": 20.0},
        {"cat": "gpu_memcpy", "ts": 8.0, "dur": 2.0},
    ]
    program._begin_at_copies(events)
    assert [(event["ts"], event["dur"]) for event in events if event["cat"] == "user_annotation"] == [(100.0, 70.0), (10.0, 40.0)]
    assert kernel in events


def test_table() -> None:
    times = dict(dispatch_us=400.0, product_us=4000.0, rest_us=3000.0)
    layers = dict(sequence_us=8000.0, as_rows_arrive_us=7600.0, fixed_sequence_us=8000.0, fixed_as_rows_arrive_us=8200.0)
    row = program.Row(rows="bf16", tokens=4096, sms=24, **times, **layers)
    settings = program.Settings().described("events")["settings"]
    result = {
        "settings": settings,
        "rows": [vars(row)],
        "num_ranks": 2,
        "machine": "a GPU",
        "boundary": "events",
        "date": "today",
    }
    text = program.markdown(result)
    assert "| bf16 | 4096 | 24 | 400 | 4000 | 3000 | 8000 | 7600 | 5.0 | 8000 | 8200 | -2.5 |" in text
    assert "2 ranks, a GPU, hidden 7168" in text
