"""Allocations whose streams are captured in CUDA graphs: captures wait only for their own streams. A fake driver records its calls."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from cuda.bindings import driver as cuda
from stream_driver import FakeDriver, Library, array_of

from deepep_rt import EPUnavailableError
from deepep_rt.cuda import driver
from deepep_rt.cuda.pool import Pool, Slots


@pytest.mark.parametrize("count", [3, 100])
def test_pending_work_is_kept_once_across_captures(fake: FakeDriver, count: int) -> None:
    """The next user waits for both streams once, although captures acquired the allocation several times."""
    slots = Slots(64, 1)
    held = slots.acquire(9)
    del held
    fake.work(1)
    for _ in range(count):
        fake.capturing.add(1)
        held = slots.acquire(1)
        fake.capturing.clear()
        del held
    assert [stream for stream, _ in slots._free[0][1]] == [9, 1]
    slots.acquire(3)
    assert sorted(fake.waits) == [(3, 1, 1), (3, 9, 0)]


def test_an_array_that_is_dropped_while_its_reader_is_captured(fake: FakeDriver) -> None:
    """An event in the capture does not cover earlier work. The next user after the capture waits for that stream."""
    slots, library = Slots(64, 1), Library()
    library.work_on(9)
    held = array_of(slots.acquire(9), library)
    library.work_on(1)
    fake.capturing.add(1)
    del held
    held = slots.acquire(9)
    assert (len(slots._memory), fake.waits) == (1, [])
    fake.capturing.clear()
    fake.work(1)
    library.work_on(9)
    del held
    slots.acquire(9)
    assert fake.waits == [(9, 1, 1)]


def test_streams_of_one_capture_are_ordered_within_it(fake: FakeDriver) -> None:
    """Replays keep this order. A capture cannot wait for an eager stream or for a stream of another capture."""
    slots, library = Slots(64, 1), Library()
    fake.capturing.update({9, 1, 2})
    fake.captures[2] = 6
    library.work_on(9)
    allocation = slots.acquire(9)
    for stream in (2, 3):
        allocation.add_stream(stream)
    held = array_of(allocation, library)
    del allocation
    library.work_on(1)
    fake.work(1)  # reads it
    del held
    held = slots.acquire(9)
    assert fake.waits == [(9, 1, 1)]
    fake.capturing.clear()
    fake.waits.clear()
    library.work_on(9)
    del held
    slots.acquire(9)
    assert {wait[:2] for wait in fake.waits} == {(9, 1), (9, 2), (9, 3)}, "eager work waits for all of them"


@pytest.mark.parametrize("unknown", [9, 1])
def test_a_capture_without_a_number(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, unknown: int) -> None:
    """The default stream has none while a stream that waits for it is captured."""

    def capture_id(stream: int) -> int:
        if stream == unknown:
            raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
        return 5

    monkeypatch.setattr(driver, "capture_id", capture_id)
    slots = Slots(64, 1)
    held = slots.acquire(9, 1)
    held.add_stream(2)
    fake.capturing.update({9, 1, 2})
    del held
    slots.acquire(9)
    assert fake.waits == ([(9, 2, 0)] if unknown == 1 else [])


def test_captures_query_no_event(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a query would make the driver end the capture."""
    pool = Pool(0, 2048, cell=1024)
    held = pool.allocate(1024, 9, 1)
    del held
    monkeypatch.setattr(driver.CudaEvent, "done", lambda event: pytest.fail("an event was queried"))
    fake.capturing.add(9)
    assert pool.allocate(1024, 9, 1) is not None


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_pending_work_of_a_captured_stream_is_kept_for_later(fake: FakeDriver, kind: str) -> None:
    """A capture cannot wait for eager work, so the next user waits."""
    pool, slots = Pool(0, 1024), Slots(64, 1)

    def take(stream: int):
        return pool.allocate(1024, stream) if kind == "pool" else slots.acquire(stream)

    held = take(1)
    fake.work(1)
    fake.capturing.add(1)
    del held
    held = take(2)
    assert fake.waits == []
    fake.capturing.clear()
    del held
    take(3)
    assert {wait[:2] for wait in fake.waits} == {(3, 1), (3, 2)}


def test_no_events_pass_between_captured_and_eager_streams(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 1)
    del held
    fake.capturing.add(2)
    held = pool.allocate(1024, 2, 1)  # a captured stream waits for no eager event
    del held  # and other streams wait for no captured event
    assert fake.waits == []
    fake.capturing.clear()
    pool.allocate(1024, 3)
    assert {wait[:2] for wait in fake.waits} == {(3, 1), (3, 2)}, "stream 2 held work before its capture"


def test_the_user_before_a_capture_is_not_lost(fake: FakeDriver) -> None:
    """This also holds after a long run of one stream alone."""
    slots = Slots(64, 1)
    held = slots.acquire(9)
    del held
    fake.capturing.add(1)
    early = slots.acquire(1)
    fake.capturing.clear()
    for _ in range(100):
        held = slots.acquire(1)
        del held
    del early
    assert fake.waits == []
    both = slots.acquire(1), slots.acquire(1)
    assert (1, 9, 0) in fake.waits
    del both


def test_the_default_stream_counts_as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver returns an error while a stream that waits for the default stream is captured. Work on it would end the capture."""
    answers = iter([(cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None), (cuda.CUresult.CUDA_ERROR_INVALID_HANDLE, None)])
    monkeypatch.setattr(driver.driver, "cuStreamIsCapturing", lambda stream: next(answers))
    assert driver.is_capturing(0)
    with pytest.raises(EPUnavailableError, match="INVALID_HANDLE"):
        driver.is_capturing(0)
