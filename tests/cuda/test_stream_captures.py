"""Allocations whose streams are captured in CUDA graphs: captures wait only for their own streams. A fake driver records its calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from cuda.bindings import driver as cuda
from stream_driver import FakeDriver, Library, array_of, only_slots

from deepep_rt import EPUnavailableError
from deepep_rt.cuda import captured_graph, driver
from deepep_rt.cuda.captured_graph import CapturedGraph
from deepep_rt.cuda.pool import Pool
from deepep_rt.cuda.slots import Slots


@pytest.mark.parametrize("count", [3, 100])
def test_pending_work_is_kept_once_across_captures(fake: FakeDriver, count: int) -> None:
    """The next user waits for both streams once, although captures acquired the allocation several times."""
    slots = only_slots(fake, 1)
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
    slots, library = only_slots(fake, 1), Library()
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
    slots, library = only_slots(fake, 1), Library()
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
    slots = only_slots(fake, 1)
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
    pool, slots = Pool(0, 1024), only_slots(fake, 1)

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
    fake.is_out_of_memory = True
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


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_memory_of_a_graph_serves_captures_only(fake: FakeDriver, kind: str) -> None:
    """A replay writes to it at any time, also after the program has dropped the results of the capture."""
    pool, slots = Pool(0, 2048), Slots(64, 2)

    def take(graph: CapturedGraph | None = None) -> Any:
        return pool.allocate(1024, 1, None, graph) if kind == "pool" else slots.acquire(1, None, graph)

    def place(allocation: Any) -> int:
        return int(allocation.ptr)

    eager = take()
    elsewhere = place(eager)
    fake.capturing.add(1)
    first = CapturedGraph(5)
    held = take(first)
    captured = place(held)
    assert captured != elsewhere
    del held
    held = take(first)
    assert place(held) == captured, "later calls of the capture get it again"
    fake.capturing.clear()
    del held, eager
    for _ in range(3):
        eager = take()
        assert place(eager) == elsewhere
        del eager
    fake.captures[1] = 6
    fake.capturing.add(1)
    second = CapturedGraph(6)
    held = take(second)
    assert place(held) == captured, "so do other captures"
    fake.capturing.clear()
    eager = take()
    del held
    more = take()  # a slot more
    assert more is None or place(more) != captured, "no other call, whether results of captures live or not"
    assert place(eager) == elsewhere
    fake.capturing.add(1)
    held = take(second)
    assert place(held) == captured


def test_a_capture_takes_the_slot_that_it_used_last(fake: FakeDriver) -> None:
    """It is the first that delays it: the stream waits for no other."""
    slots, graph = Slots(64, 0), CapturedGraph(5)
    fake.capturing.add(1)
    first, last = slots.acquire(1, None, graph), slots.acquire(1, None, graph)
    expected = last.ptr
    del first, last
    assert slots.acquire(1, None, graph).ptr == expected


def test_a_capture_on_another_stream_takes_the_oldest_slot(fake: FakeDriver) -> None:
    """It waits for all that used the slot."""
    slots, graph = Slots(64, 0), CapturedGraph(5)
    fake.capturing.update({1, 2, 3})
    first, last = slots.acquire(1, 2, graph), slots.acquire(1, 2, graph)
    expected = first.ptr
    del first, last
    assert slots.acquire(3, None, graph).ptr == expected
    assert {(waiting, other) for waiting, other, _ in fake.waits} == {(3, 1), (3, 2)}


def test_slots_for_captures_do_not_count_as_held(fake: FakeDriver) -> None:
    slots, graph = Slots(64, 0), CapturedGraph(5)
    fake.capturing.add(1)
    held = [slots.acquire(1, None, graph) for _ in range(3)]
    fake.capturing.clear()
    eager = slots.acquire(1)
    fake.work(2)
    eager.add_stream(2)
    del eager
    for count in (5, 5):  # one and, while it is busy, another one
        eager = slots.acquire(1)
        eager.add_stream(2)
        del eager
        assert len(slots._memory) == count
    del held


def test_a_graph_tells_that_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gets a function of the C library and its argument, which do not need Python."""
    asked: list[Any] = []
    ok = cuda.CUresult.CUDA_SUCCESS

    def create(argument: int, destroy: Any, count: int, flags: Any) -> tuple:
        asked.append((argument, int(destroy), count))
        return ok, "object"

    monkeypatch.setattr(driver.driver, "cuUserObjectCreate", create)
    monkeypatch.setattr(driver.driver, "cuStreamGetCaptureInfo", lambda stream: (ok, "active", 7, "graph", [], 0))
    monkeypatch.setattr(driver.driver, "cuGraphRetainUserObject", lambda *how: asked.append(how[:3]) or (ok,))
    first, second = captured_graph.GraphEnd(1), captured_graph.GraphEnd(1)
    assert asked[1] == asked[3] == ("graph", "object", 1)
    assert not first.has_come()
    for (argument, destroy, _), end in ((asked[2], second), (asked[0], first)):
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy)(argument)
        assert [end.has_come() for _ in range(2)] == [True, True]
    third = captured_graph.GraphEnd(1)
    assert asked[4][0] in {asked[0][0], asked[2][0]}, "a semaphore serves again"
    assert not third.has_come()


def test_a_graph_that_takes_no_object(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The capture goes on, and memory stays."""
    monkeypatch.setattr(driver.driver, "cuUserObjectCreate", lambda *_: (cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None))
    assert not captured_graph.GraphEnd(1).has_come()
    assert "stays with the Buffer, because the CUDA driver reports CUDA_ERROR_NOT_SUPPORTED" in caplog.text
