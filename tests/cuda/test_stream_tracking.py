"""The next user of an allocation waits for the work of all its streams, and for no other work. A fake driver records its calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from stream_driver import FakeDriver, Library, array_of, only_slots

from deepep_rt.arrays.view import Framework
from deepep_rt.cuda import driver, stream_tracking
from deepep_rt.cuda.pool import Pool
from deepep_rt.cuda.slots import Slots
from deepep_rt.cuda.stream_tracking import StreamPool

Take = Callable[..., Any]


@pytest.fixture(params=["pool", "slots", "stream pool"])
def take(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Take:
    """Return a function that acquires the same memory again each time after it was dropped."""
    monkeypatch.setattr(driver, "allocate_async", lambda num_bytes, stream: 4096)
    monkeypatch.setattr(driver, "free_async", lambda ptr, stream: fake.freed.append(stream))

    def take_all(*how: Any) -> Any:
        stream_tracking._free_deferred(0)  # as if there were no memory left
        return stream_pool.allocate(*how)

    block_pool, slots, stream_pool = Pool(0, 1024), only_slots(fake, 1), StreamPool()
    takes = {
        "pool": block_pool.allocate,
        "slots": lambda _, *streams: slots.acquire(*streams),
        "stream pool": take_all,
    }
    return lambda *streams: takes[request.param](1024, *streams)


def test_a_single_stream_calls_no_driver_function(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_capturing", "capture_id", "CudaEvent"):
        monkeypatch.setattr(driver, name, lambda *_: pytest.fail("a driver function was called"))
    pool, held = Pool(0, 4096, cell=2048), []
    for size in (256, 2048, 512, 256, 1024, 2048):
        held = [pool.allocate(size, 7), *held[:1]]
    held = [pool.allocate(256, 7) for _ in range(3)]
    held.clear()
    assert pool.allocate(512, 7).offset == 0, "the same stream used all three"


def test_a_single_stream_needs_no_events(fake: FakeDriver) -> None:
    pool, slots = Pool(0, 1024), only_slots(fake, 1)
    for _ in range(5):
        held = pool.allocate(1024, 7), slots.acquire(7, 7)
        fake.work(7)
        del held
    assert (fake.num_events, fake.waits) == (0, [])


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_the_next_user_waits_for_readers_on_other_streams(fake: FakeDriver, kind: str) -> None:
    pool, slots = Pool(0, 1024), only_slots(fake, 1)

    def take(*streams: int | None):
        return pool.allocate(1024, *streams) if kind == "pool" else slots.acquire(*streams)

    held = take(1, 1)
    fake.work(1)
    del held  # a reader is still queued on stream 1
    held = take(2, None)
    assert fake.waits == [(2, 1, 1)]
    fake.work(2)
    del held
    take(3)
    assert fake.waits[1:] == [(3, 2, 1)], "the event on stream 2 covers stream 1 too"


def test_the_next_user_does_not_wait_for_later_work(fake: FakeDriver) -> None:
    """A communication stream must not wait for later work of the caller's stream."""
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 9, 1)
    fake.work(1)
    del held
    fake.work(1)  # long and unrelated work
    pool.allocate(1024, 9, 1)
    assert fake.waits == [(9, 1, 1)]


def test_later_work_does_not_count_when_each_allocation_has_one_stream(fake: FakeDriver) -> None:
    slots = only_slots(fake, 2)
    held = [slots.acquire(1), slots.acquire(2)]
    for stream in (1, 2):
        fake.work(stream)
        del held[0]
    for stream in (1, 2):
        fake.work(stream)
    held = [slots.acquire(3), slots.acquire(3)]
    assert sorted(fake.waits) == [(3, 1, 2), (3, 2, 1)], "the first stream was the only one when its allocation died"


def test_allocations_of_the_same_two_streams_in_a_row(fake: FakeDriver) -> None:
    """A wait for one of the two streams never replaces the wait for the other."""
    slots = only_slots(fake, 1)
    for _ in range(100):
        held = slots.acquire(7, 9)
        fake.waits.clear()
        fake.work(9)
        fake.work(7)
        del held
    fake.work(9)
    slots.acquire(8)
    assert fake.waits == [(8, 7, 100), (8, 9, 100)]


def test_events_are_recorded_only_while_there_are_several_streams(fake: FakeDriver) -> None:
    """One call on a side stream, such as a warm-up before a capture, does not make all later calls slower."""
    slots = only_slots(fake, 1)
    for stream in (7, 8, *[7] * 100):
        held = slots.acquire(stream)
        del held
    before = fake.num_events
    for _ in range(100):
        held = slots.acquire(7)
        del held
    assert fake.num_events == before
    held = slots.acquire(8)
    del held
    assert fake.num_events > before


@pytest.mark.parametrize("kind", ["pool", "slots"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_stream_that_its_library_destroyed(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str, is_alone: bool
) -> None:
    """Its work may still run, so the host waits. The memory is not lost."""
    waited = []
    monkeypatch.setattr(driver, "synchronize_all", lambda: waited.append(True))
    pool, slots = Pool(0, 1024), only_slots(fake, 1)
    held = pool.allocate(1024, 4) if kind == "pool" else slots.acquire(4)
    if not is_alone:
        held.add_stream(9)
    fake.destroyed.add(4)
    del held
    assert len(waited) == (not is_alone)
    assert pool.allocate(1024, 9) if kind == "pool" else slots.acquire(9)
    assert len(waited) == 1
    assert len(slots._memory) == 1
    assert fake.waits == []


def test_readers_that_dlpack_named(fake: FakeDriver) -> None:
    slots = only_slots(fake, 1)
    held = slots.acquire(9)
    held.add_stream(4)
    fake.work(4)
    del held
    slots.acquire(9)
    assert (9, 4, 1) in fake.waits


def test_the_next_user_waits_for_the_stream_current_at_the_last_drop(fake: FakeDriver, take: Take) -> None:
    """As of a dispatch on a communication stream whose rows the compute stream reads."""
    library = Library()
    library.work_on(9)
    held = array_of(take(9, 9), library)
    library.work_on(1)
    fake.work(1)  # reads it
    del held
    fake.work(1)  # reads something else
    take(9, 9)
    assert [wait for wait in fake.waits if wait[1] == 1] == [(9, 1, 1)]


def test_the_next_user_waits_for_the_stream_current_when_an_array_was_made(fake: FakeDriver, take: Take) -> None:
    library = Library()
    allocation = take(9, 9)
    library.work_on(1)
    held = array_of(allocation, library)
    fake.work(1)
    library.work_on(9)
    del held, allocation
    take(9, 9)
    assert [wait for wait in fake.waits if wait[1] == 1] == [(9, 1, 1)]


def test_the_thread_that_drops_the_last_array_has_another_stream(fake: FakeDriver, take: Take) -> None:
    library = Library()
    library.work_on(9)
    held = [array_of(take(9, 9), library)]

    def drop() -> None:
        library.work_on(4)
        fake.work(4)
        held.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    take(9, 9)
    assert [wait for wait in fake.waits if wait[1] == 4] == [(9, 4, 1)]


def test_arrays_of_one_stream_need_no_events(fake: FakeDriver, take: Take) -> None:
    library = Library()
    library.work_on(7)
    for _ in range(5):
        held = array_of(take(7, 7), library)
        fake.work(7)
        del held
    assert (fake.num_events, fake.waits, library.asked) == (0, [], 10)


def test_a_framework_without_streams_is_not_asked_at_the_drop(fake: FakeDriver, take: Take) -> None:
    del take
    slots, library = only_slots(fake, 1), Framework()
    held = array_of(slots.acquire(7), library)
    library.current_stream = lambda device: pytest.fail("the framework has no streams")
    del held
    held = slots.acquire(7)
    del held
    assert fake.num_events == 0


def test_memory_is_released_when_the_framework_raises(fake: FakeDriver) -> None:
    slots, library = only_slots(fake, 1), Library()
    library.work_on(7)
    held = array_of(slots.acquire(7, 3), library)
    library.current_stream = lambda device: 1 // 0
    fake.work(3)
    del held
    slots.acquire(7)
    assert len(slots._memory) == 1
    assert fake.waits == [(7, 3, 1)]


def test_a_concurrent_count_loses_no_reader(fake: FakeDriver) -> None:
    class Racing(stream_tracking.StreamTracker):
        _run_length = property(lambda self: 1000, lambda self, value: None)  # always the number of another thread

    racing = Racing()
    racing.record((7,))
    fake.work(9)
    assert [(stream, event.handle) for stream, event in racing.record((7, 9))] == [(7, (7, 0)), (9, (9, 1))]


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_readers_of_one_allocation_do_not_delay_another(fake: FakeDriver, kind: str) -> None:
    """Two micro-batches overlap only if a dispatch does not wait for the experts of the other micro-batch."""
    pool, slots = Pool(0, 2048, cell=1024), only_slots(fake, 2)

    def take():
        return pool.allocate(1024, 9, 1) if kind == "pool" else slots.acquire(9, 1)

    first, second = take(), take()
    del first
    fake.work(1)  # the experts of the second
    del second
    third = take()
    assert fake.waits == [(9, 1, 0)]
    fourth = take()
    assert fake.waits == [(9, 1, 0), (9, 1, 1)]
    del third
    again = take()
    assert len(fake.waits) == 3
    del again, fourth
    take()
    assert len(fake.waits) == 4, "only the pending work of the slot that has been free longest"


@pytest.mark.parametrize(
    "held",
    [
        "pool.Pool(0, 4096).allocate(1, 1, 2)",
        "slots.Slots(256, 0).acquire(1, 2)",
        "stream_tracking.StreamPool().allocate(1, 1, 2)",
    ],
)
def test_allocations_die_silently_when_python_ends(held: str) -> None:
    code = f"""
import sys
from deepep_rt.cuda import driver, pool, slots, stream_tracking
driver.allocate = driver.allocate_async = lambda *_: 4096
driver.CurrentContext = lambda: None  # entering it raises
sys.modules["keeper"] = {held}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slots_that_other_streams_are_busy_with(fake: FakeDriver) -> None:
    """A call takes another slot, or a new one: its stream does not wait. At most twice the slots that the program held at once."""
    slots = Slots(64, 0)
    for reader in (1, 2, 3):
        held = slots.acquire(9)
        held.add_stream(reader)
        fake.work(reader)
        del held
    assert (len(slots._memory), fake.waits) == (2, [(9, 1, 1)]), "the third waits for the reader of the first"
    fake.waits.clear()
    fake.ended.add(2)
    places = [slots.acquire(9).ptr for _ in range(3)]
    assert (places.count(places[0]), fake.waits) == (3, []), "the one whose readers are done"
    both = [slots.acquire(9), slots.acquire(9)]
    assert len(slots._memory) == 2
    del both


def test_a_stream_that_the_call_waits_for_anyway_is_not_busy(fake: FakeDriver) -> None:
    slots = Slots(64, 0)
    for _ in range(3):
        held = slots.acquire(9, 1, None, 1)
        fake.work(1)
        del held
    assert len(slots._memory) == 1
    assert fake.waits == [(9, 1, 1), (9, 1, 2)]


def test_two_buffers_with_calls_in_different_orders(fake: FakeDriver) -> None:
    """A rank calls the Buffer of stream 1 and then that of stream 2; another rank the other way round. The program holds one result in one
    variable. So each result is dropped while the stream of the other Buffer is current, after the call of this round there.

    No call may wait for a call of the same round. Otherwise the calls of the ranks wait for each other.
    """
    for order in ((1, 2), (2, 1)):
        library, buffers = Library(), {stream: Slots(64, 0) for stream in (1, 2)}
        fake.queued.clear()
        result: Any = None
        for number in range(1, 20):
            for stream in order:
                fake.waits.clear()
                library.work_on(stream)
                slot = buffers[stream].acquire(stream, stream)
                fake.work(stream)
                result = array_of(slot, library)  # drops the result of the other Buffer
                del slot
                assert all(count < number for _, _, count in fake.waits), f"call {number} on {stream} waits for {fake.waits}"
        assert all(len(slots._memory) == 2 for slots in buffers.values())
        del result
