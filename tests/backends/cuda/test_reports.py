"""Reports of kernels about low-latency combines and rows without room, and `Buffer.check`, on a fake GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import Array, FakeGpu, arguments, fake, make

from deepep_rt import EPDestroyedError, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.comm import call_signature
from deepep_rt.kernels import structs

__all__ = ["fake", "make"]


def _report_timeout(page: Any) -> None:
    page.report["rank"], page.report["peer"], page.report["phase"], page.timed_out.value = 0, 2, 12, 1


def test_check_raises_what_a_call_would(fake: FakeGpu, make: Any) -> None:
    """A loop that only replays CUDA graphs makes no call that could raise."""
    buffer = make(low_latency=True)
    page = buffer._backend.runtime.page
    buffer.check()
    page.bad_input.value = 1
    with pytest.raises(EPInputError, match="It was skipped"):
        buffer.check()
    buffer.check()
    _report_timeout(page)
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 2: the rows of a low-latency combine"):
            buffer.check()
    buffer.destroy()
    with pytest.raises(EPDestroyedError):
        buffer.check()


def test_check_makes_no_driver_request(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        fake.requests.clear()
        called: list[str] = []
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        try:
            buffer.check()
        finally:
            sys.setprofile(None)
        assert fake.requests == []
        assert len(called) <= 10, "programs may call it in each step, so it is short"


def test_combines_with_other_choices(fake: FakeGpu, make: Any) -> None:
    """The report holds one choice, as combine got it and as the dispatch got it. One call raises it."""
    with make(low_latency=True) as buffer:
        page, experts = buffer._backend.runtime.page, buffer.config.num_experts
        for now, shown in ((5, "5"), (-1, "-1"), (experts, "an expert that does not exist")):
            page.report["other_choice"] = 1 << 63 | (7 * 4 + 2) << 32 | (now + 1) << 16 | 4
            page.has_events.value = 1
            with pytest.raises(EPInputError, match=rf"low_latency_combine: topk_idx\[7, 2\]={shown}; expected 3, as"):
                buffer.check()
            buffer.check()


def test_two_events_are_both_raised(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        page = buffer._backend.runtime.page
        page.report["other_choice"], page.report["too_many"] = 1 << 63 | 2 << 32 | 3 << 16 | 4, 2 << 32 | 1000
        page.has_events.value = 1
        with pytest.raises(EPOutOfMemoryError, match="rank 1"):
            buffer.check()
        with pytest.raises(EPInputError, match="low_latency_combine"):
            buffer.check()
        buffer.check()


def test_rows_without_room_are_logged_once(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    for word, value, wanted in (
        ("no_room", 50 << 32 | 40, "rank 0: dispatch received 50 rows; num_worst_tokens=40"),
        ("full_expert", 4 << 32 | 300, "rank 0: low_latency_dispatch received 300 rows for local expert 3, which has room"),
    ):
        with make(low_latency=True) as buffer:
            page = buffer._backend.runtime.page
            for _ in range(3):
                page.report[word], page.has_events.value = value, 1
                buffer.check()
        signatures = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
        assert len(signatures) == 1
        assert signatures[0].startswith(wanted)
        caplog.clear()


def test_combines_compare_their_handles_and_kinds(fake: FakeGpu, make: Any) -> None:
    """Kernels compare one number. A difference breaks the Buffer, because rows were already sent."""
    buffer = make(low_latency=True)
    x, idx, weights = arguments(fake)
    sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
    y = Array(fake, "bfloat16", 8, 256, 256)
    signatures = []
    for reduce_early in (True, False):
        buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=reduce_early)
        signatures.append(fake.pop_launches()[-1].call_signature)
    assert signatures[0] != signatures[1]
    assert max(signatures) < 1 << 32, "the message has 32 bits for it"
    page = buffer._backend.runtime.page
    report = page.report[0]
    report["rank"], report["other"], report["serial"], report["call_signature"] = 0, 1, (7, 8), (signatures[0], signatures[0])
    page.ranks_differ.value = 1
    _report_timeout(page)
    for _ in range(2):
        with pytest.raises(
            EPInputError, match=r"handle \(number of its dispatch\).*rank 0: 7, rank 1: 8.*cannot be used any more"
        ):
            buffer.check()
    buffer.destroy()
    assert call_signature.unpack(signatures[1])[0] == call_signature.CALL_KINDS.index(
        "low_latency_combine with allow_multiple_reduction=False"
    )
    assert structs.PHASES["kPhaseLlCombineRows"][0] == 12


def test_kernels_of_two_buffers_do_not_overlap(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that start early hold SMs. Those of two Buffers could keep each other's kernels off the GPU."""
    launched = []

    def cu_launch(config: Any, function: int, *rest: Any) -> tuple:
        launched.append(config.numAttrs)
        return fake.launch(config, function, *rest)

    monkeypatch.setattr("deepep_rt.jit.launch.driver.cuLaunchKernelEx", cu_launch)

    def overlaps(buffer: Any) -> bool:
        launched.clear()
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        return launched == [1]

    first = make(low_latency=True)
    assert overlaps(first)
    plain = make()
    assert overlaps(first), "only low-latency kernels prevent overlap"
    second = make(low_latency=True)
    assert not overlaps(first)
    assert not overlaps(second)
    first.destroy()
    assert overlaps(second)
    for buffer in (plain, second):
        buffer.destroy()
