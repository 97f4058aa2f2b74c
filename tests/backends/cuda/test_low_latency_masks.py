"""Masked ranks in the low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import LowLatencyCalls, quick
from fake_gpu import BASE, FakeGpu, fake, make

from deepep_rt import EPInputError
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make", "quick"]


def test_masking_runs_a_lost_hook(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    """The caller cannot call it any more."""
    quick.dispatch(return_recv_hook=True)
    gc.collect()
    quick.buffer.mask_rank(2)
    assert [call.phases for call in fake.pop_launches()] == [1, 2]


def test_masks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True, on_timeout="mask") as buffer:
        calls, runtime = LowLatencyCalls(fake, buffer), buffer._backend.runtime
        mask = runtime.state + Layout(buffer.config).local.offsets["masked"] + 4 * 2
        fake.fills.clear()
        buffer.mask_rank(2)
        assert fake.fills == [(mask, 1, 1)]
        assert buffer.query_masked_ranks() == [2]
        sent = calls.dispatch(return_recv_hook=True)
        with pytest.raises(EPInputError, match="hooks of low_latency_dispatch are open"):
            buffer.unmask_rank(2)
        sent.hook()
        with pytest.raises(EPInputError, match="allow_multiple_reduction=False"):
            calls.combine(sent.handle, allow_multiple_reduction=False)
        fake.fills.clear()
        buffer.unmask_rank(2)
        (rows, unmasked) = fake.fills
        assert rows[1] == 0xFF, "half a row may have arrived, so all rows are marked as not arrived"
        assert unmasked == (mask, 0, 1)
        assert buffer.query_masked_ranks() == []
        runtime.page.masked[3] = 1  # as a kernel does it
        assert buffer.query_masked_ranks() == [3]
    assert BASE not in fake.freed, "rank 3 may not call destroy, so symmetric memory stays"


def test_masks_wait_for_earlier_calls(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    quick.dispatch()
    fake.requests.clear()
    quick.buffer.mask_rank(2)
    assert "synchronize" in fake.requests[: fake.requests.index("fill")]


def test_unreduced_rows_are_refused_with_masked_ranks(quick: LowLatencyCalls) -> None:
    sent, step = quick.dispatch(), quick.prepare(y=quick.y(), reduce="topk")
    step.dispatch()
    calls = (lambda: quick.combine(sent.handle, allow_multiple_reduction=False), step.combine)
    for call in calls:
        call()
    quick.buffer.mask_rank(2)
    for call in calls:
        with pytest.raises(EPInputError, match=r"allow_multiple_reduction=False|masked ranks"):
            call()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_kernels_masks_are_logged_once(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture, is_prepared: bool) -> None:
    """Once for each time that a kernel masks the rank. A mask of the program is not logged."""
    with make(low_latency=True, on_timeout="mask") as buffer:
        calls = LowLatencyCalls(fake, buffer)
        dispatch = calls.prepare().dispatch if is_prepared else calls.dispatch
        buffer.mask_rank(2)
        for _ in range(2):
            buffer._backend.runtime.page.masked[3] = 1  # as a kernel does it
            for _ in range(2):
                dispatch()
            buffer.unmask_rank(3)
        assert caplog.messages == ["rank 0: rank 3 is masked: it was silent for 1 s"] * 2
        buffer.unmask_rank(2)
