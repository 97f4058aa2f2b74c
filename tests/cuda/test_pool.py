"""`pool`: blocks and slots come back in stream order, whichever streams used them. The driver is a list of what it was asked to do."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from cuda.bindings import driver as cuda

from deepep_rt import EPUnavailableError
from deepep_rt.arrays.view import Framework, View
from deepep_rt.cuda import driver, pool
from deepep_rt.cuda import stream_tracking as users
from deepep_rt.cuda.pool import Pool, Slots
from deepep_rt.cuda.stream_memory import StreamPool


class FakeDriver:
    """Events are numbered; a wait is (stream, the stream whose work it waits for, how much of that work)."""

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.capturing: set[int] = set()
        self.captures: dict[int, int] = {}  # stream -> number of its capture, if it is not 5
        self.ended: set[int] = set()  # streams whose work is done
        self.destroyed: set[int] = set()
        self.num_events = 0
        self.freed: list[int] = []

    def work(self, stream: int) -> None:
        self.queued[stream] = self.queued.get(stream, 0) + 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    class Event:
        def __init__(self, stream: int) -> None:
            if stream in fake.destroyed:
                raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_INVALID_HANDLE")
            fake.num_events += 1
            self.handle = (stream, fake.queued.get(stream, 0))

        def done(self) -> bool:
            return self.handle[0] in fake.ended

    class Context:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(driver, "CudaEvent", Event)
    monkeypatch.setattr(driver, "CurrentContext", Context)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream in fake.capturing)
    monkeypatch.setattr(driver, "capture_id", lambda stream: fake.captures.get(stream, 5) if stream in fake.capturing else None)
    monkeypatch.setattr(driver, "wait_event", lambda stream, handle: fake.waits.append((stream, *handle)))
    monkeypatch.setattr(
        driver, "wait_stream", lambda stream, other: fake.waits.append((stream, other, fake.queued.get(other, 0)))
    )
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: 1000 + num_bytes)
    return fake


def test_blocks_are_cut_trimmed_and_merged(fake: FakeDriver) -> None:
    pool = Pool(4096, 10 * 256)
    first, second = pool.allocate(300, 1), pool.allocate(1, 1)
    assert (first.ptr, first.num_bytes, second.offset) == (4096, 512, 512)
    assert pool.free_bytes == 7 * 256
    first.trim(10)
    assert pool.free_bytes == 8 * 256
    assert pool.allocate(8 * 256, 1) is None, "free, but not in one piece"
    del first, second
    assert pool.free_bytes == 10 * 256
    assert pool.allocate(10 * 256, 1).offset == 0


def test_large_blocks_begin_at_cells(fake: FakeDriver) -> None:
    """Two of the largest fit, however they are trimmed and in whatever order they come and go; small ones fill what is left."""
    pool = Pool(0, 20 * 256, cell=10 * 256)
    held = None
    for trimmed in (7, 9, 4, 10, 8, 6, 9):
        block = pool.allocate(10 * 256, 1)
        block.trim(trimmed * 256)
        held = block  # the one before dies now
    assert held.offset in (0, 10 * 256)
    del held, block
    first, second = pool.allocate(6 * 256, 1), pool.allocate(6 * 256, 1)
    assert {first.offset, second.offset} == {0, 10 * 256}
    assert pool.allocate(5 * 256, 1) is None
    small = [pool.allocate(4 * 256, 1) for _ in range(2)]
    assert [block.offset for block in small] == [6 * 256, 16 * 256]
    del first, small, second
    assert pool.free_bytes == 20 * 256
    assert pool.allocate(20 * 256, 1) is not None, "more than a cell"


def test_equal_blocks_in_a_row_take_turns_at_their_places(fake: FakeDriver) -> None:
    pool = Pool(0, 8 * 256)
    held, places = pool.allocate(256, 1), []
    for _ in range(4):
        held = pool.allocate(256, 1)  # the one before dies now
        places.append(held.offset)
    assert places == [256, 0, 256, 0]
    assert pool.free_bytes == 7 * 256
    del held
    assert pool.allocate(512, 1).offset == 0, "another size"


@pytest.mark.parametrize(("cell", "blocks"), [(0, 1), (4 * 256, 3)])
def test_equal_blocks_in_a_row_are_found_without_a_search(fake: FakeDriver, cell: int, blocks: int) -> None:
    """At any place; a large one at a cell alone."""
    pool = Pool(0, 8 * 256, cell)
    first = pool.allocate(blocks * 256, 7)
    held = pool.allocate(blocks * 256, 7)
    place = held.offset
    pool._merge = pool._find = lambda *_: pytest.fail("it searched")
    for _ in range(3):
        del held
        held = pool.allocate(blocks * 256, 7)
        assert held.offset == place != 0
    del first


def test_the_reader_of_a_block_that_is_found_without_a_search(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 9)
    del held
    held = pool.allocate(1024, 9, 1)
    fake.work(1)
    del held
    assert pool.allocate(1024, 9)
    assert fake.waits == [(9, 1, 1)]


def test_a_block_over_several_others_waits_for_all_their_streams(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = [pool.allocate(256, stream) for stream in (1, 2, 3, 4)]
    while held:
        del held[0]
    both = pool.allocate(512, 9)
    assert {wait[:2] for wait in fake.waits} == {(9, 1), (9, 2)}
    fake.waits.clear()
    rest = pool.allocate(512, 9)
    assert {wait[:2] for wait in fake.waits} == {(9, 3), (9, 4)}
    del both, rest


def test_a_part_that_is_left_keeps_its_past(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = [pool.allocate(512, stream) for stream in (1, 2)]
    held.clear()
    held = [pool.allocate(768, 9)]
    fake.waits.clear()
    held.append(pool.allocate(256, 9))
    assert {wait[:2] for wait in fake.waits} == {(9, 2)}


def test_a_full_pool_that_other_streams_have_used(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = [pool.allocate(512, 1), pool.allocate(512, 2)]
    del held[0]
    assert pool.allocate(1024, 9) is None
    assert pool.allocate(512, 9) is not None


def test_one_stream_asks_the_driver_nothing(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_capturing", "capture_id", "CudaEvent"):
        monkeypatch.setattr(driver, name, lambda *_: pytest.fail("the driver was asked"))
    pool, held = Pool(0, 4096, cell=2048), []
    for size in (256, 2048, 512, 256, 1024, 2048):
        held = [pool.allocate(size, 7), *held[:1]]
    held = [pool.allocate(256, 7) for _ in range(3)]
    held.clear()
    assert pool.allocate(512, 7).offset == 0, "each of the three has been used, by the same stream"


@pytest.mark.parametrize(("size", "offset"), [(512, 256), (513, 1024)])
def test_which_blocks_are_large(fake: FakeDriver, size: int, offset: int) -> None:
    """More than half of a cell."""
    pool = Pool(0, 2048, cell=1024)
    small = pool.allocate(256, 7)
    assert (small.offset, pool.allocate(size, 7).offset) == (0, offset)


def test_the_place_right_before_a_busy_one(fake: FakeDriver) -> None:
    pool = Pool(0, 2048)
    first, second = pool.allocate(512, 9), pool.allocate(512, 9, 1)
    del second
    del first
    assert (pool.allocate(512, 9).offset, fake.waits) == (0, [])


def test_places_of_streams_that_may_still_add_work(fake: FakeDriver) -> None:
    """There is no event to ask: they count as busy, the one that was left first least."""
    pool = Pool(0, 512)
    held = [pool.allocate(256, 7), pool.allocate(256, 7)]
    del held[1]
    del held[0]
    held = [pool.allocate(256, 9), pool.allocate(256, 9)]
    assert [block.offset for block in held] == [256, 0]


def test_a_large_block_goes_back_to_a_cell(fake: FakeDriver) -> None:
    pool = Pool(0, 8 * 256, cell=4 * 256)
    small, first, second = (pool.allocate(blocks * 256, 1) for blocks in (1, 3, 3))
    assert (small.offset, first.offset, second.offset) == (0, 4 * 256, 256), "no cell was free for the second"
    del small
    assert pool.free_bytes == 2 * 256
    del second
    assert pool.allocate(3 * 256, 1).offset == 0


def test_one_stream_needs_no_events(fake: FakeDriver) -> None:
    pool, slots = Pool(0, 1024), Slots(64, 1)
    for _ in range(5):
        held = pool.allocate(1024, 7), slots.take(7, 7)
        fake.work(7)
        del held
    assert (fake.num_events, fake.waits) == (0, [])


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_the_next_user_waits_for_readers_on_other_streams(fake: FakeDriver, kind: str) -> None:
    pool, slots = Pool(0, 1024), Slots(64, 1)

    def take(*streams: int | None):
        return pool.allocate(1024, *streams) if kind == "pool" else slots.take(*streams)

    held = take(1, 1)
    fake.work(1)
    del held  # a reader is still queued on stream 1
    held = take(2, None)
    assert fake.waits == [(2, 1, 1)]
    fake.work(2)
    del held
    take(3)
    assert fake.waits[1:] == [(3, 2, 1)], "stream 2 stands for stream 1 too"


def test_what_is_queued_after_the_death_is_not_waited_for(fake: FakeDriver) -> None:
    """A communication stream must not be tied to later work of its caller's stream."""
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 9, 1)
    fake.work(1)
    del held
    fake.work(1)  # long, and unrelated
    pool.allocate(1024, 9, 1)
    assert fake.waits == [(9, 1, 1)]


def test_nor_where_each_piece_has_one_stream(fake: FakeDriver) -> None:
    slots = Slots(64, 2)
    held = [slots.take(1), slots.take(2)]
    for stream in (1, 2):
        fake.work(stream)
        del held[0]
    for stream in (1, 2):
        fake.work(stream)
    held = [slots.take(3), slots.take(3)]
    assert sorted(fake.waits) == [(3, 1, 2), (3, 2, 1)], "the first stream was alone when its piece came back"


def test_pieces_of_the_same_two_streams_in_a_row(fake: FakeDriver) -> None:
    """However many there are, none of the two stands for the other."""
    slots = Slots(64, 1)
    for _ in range(100):
        held = slots.take(7, 9)
        fake.waits.clear()
        fake.work(9)
        fake.work(7)
        del held
    fake.work(9)
    slots.take(8)
    assert fake.waits == [(8, 7, 100), (8, 9, 100)]


@pytest.mark.parametrize("count", [3, 100])
def test_a_piece_with_a_past_of_a_stream_that_is_alone(fake: FakeDriver, count: int) -> None:
    """Both are left to the next user; and each once, however often the piece is taken within captures."""
    slots = Slots(64, 1)
    held = slots.take(9)
    del held
    fake.work(1)
    for _ in range(count):
        fake.capturing.add(1)
        held = slots.take(1)
        fake.capturing.clear()
        del held
    assert [stream for stream, _ in slots._free[0][1]] == [9, 1]
    slots.take(3)
    assert sorted(fake.waits) == [(3, 1, 1), (3, 9, 0)]


def test_events_are_for_as_long_as_there_are_several_streams(fake: FakeDriver) -> None:
    """One call on a side stream, as to warm up for a capture, does not make all later ones dearer."""
    slots = Slots(64, 1)
    for stream in (7, 8, *[7] * 100):
        held = slots.take(stream)
        del held
    before = fake.num_events
    for _ in range(100):
        held = slots.take(7)
        del held
    assert fake.num_events == before
    held = slots.take(8)
    del held
    assert fake.num_events > before


@pytest.mark.parametrize("kind", ["pool", "slots"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_stream_that_its_library_has_destroyed(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str, is_alone: bool
) -> None:
    """Its work may be under way all the same; and the memory is not lost."""
    waited = []
    monkeypatch.setattr(driver, "synchronize_all", lambda: waited.append(True))
    pool, slots = Pool(0, 1024), Slots(64, 1)
    held = pool.allocate(1024, 4) if kind == "pool" else slots.take(4)
    if not is_alone:
        held.used_on(9)
    fake.destroyed.add(4)
    del held
    assert len(waited) == (not is_alone)
    assert pool.allocate(1024, 9) if kind == "pool" else slots.take(9)
    assert len(waited) == 1
    assert len(slots._memory) == 1
    assert fake.waits == []


def test_readers_that_dlpack_told_of(fake: FakeDriver) -> None:
    slots = Slots(64, 1)
    held = slots.take(9)
    held.used_on(4)
    fake.work(4)
    del held
    slots.take(9)
    assert (9, 4, 1) in fake.waits


DEVICE = 3


class Library(Framework):
    """An array library; each thread has its own current stream."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.asked = 0

    def current_stream(self, device: int) -> int:
        assert device == DEVICE
        self.asked += 1
        return self.streams.get(threading.get_ident(), 0)

    def work_on(self, stream: int) -> None:
        self.streams[threading.get_ident()] = stream


Take = Callable[..., Any]


@pytest.fixture(params=["pool", "slots", "stream pool"])
def take(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Take:
    """Takes the only piece of memory that there is, after it was dropped."""
    monkeypatch.setattr(driver, "allocate_async", lambda num_bytes, stream: 4096)
    monkeypatch.setattr(driver, "free_async", lambda ptr, stream: fake.freed.append(stream))
    block_pool, slots, stream_pool = Pool(0, 1024), Slots(64, 1), StreamPool()
    takes = {"pool": block_pool.allocate, "slots": lambda _, *streams: slots.take(*streams), "stream pool": stream_pool.allocate}
    return lambda *streams: takes[request.param](1024, *streams)


def array_of(piece: Any, library: Framework) -> Any:
    """An array of the library, which holds the piece alone."""
    return View(4096, (1,), "int32", DEVICE, piece, library).to_framework()


def test_the_next_user_waits_for_the_stream_that_is_current_when_the_last_array_is_dropped(fake: FakeDriver, take: Take) -> None:
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


def test_the_next_user_waits_for_the_stream_on_which_an_array_was_made(fake: FakeDriver, take: Take) -> None:
    library = Library()
    piece = take(9, 9)
    library.work_on(1)
    held = array_of(piece, library)
    fake.work(1)
    library.work_on(9)
    del held, piece
    take(9, 9)
    assert [wait for wait in fake.waits if wait[1] == 1] == [(9, 1, 1)]


def test_the_thread_that_drops_the_last_array_has_a_stream_of_its_own(fake: FakeDriver, take: Take) -> None:
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


def test_arrays_that_live_and_die_on_one_stream_need_no_events(fake: FakeDriver, take: Take) -> None:
    library = Library()
    library.work_on(7)
    for _ in range(5):
        held = array_of(take(7, 7), library)
        fake.work(7)
        del held
    assert (fake.num_events, fake.waits, library.asked) == (0, [], 10)


def test_nothing_is_asked_about_a_piece_without_arrays_or_of_a_library_that_tells_no_stream(fake: FakeDriver, take: Take) -> None:
    del take
    slots, library = Slots(64, 1), Framework()
    held = array_of(slots.take(7), library)
    library.current_stream = lambda device: pytest.fail("it tells no stream")
    del held
    held = slots.take(7)
    del held
    assert fake.num_events == 0


def test_memory_is_not_lost_with_a_library_that_raises(fake: FakeDriver) -> None:
    slots, library = Slots(64, 1), Library()
    library.work_on(7)
    held = array_of(slots.take(7, 3), library)
    library.current_stream = lambda device: 1 // 0
    fake.work(3)
    del held
    slots.take(7)
    assert len(slots._memory) == 1
    assert fake.waits == [(7, 3, 1)]


def test_an_array_that_is_dropped_while_its_reader_is_captured(fake: FakeDriver) -> None:
    """An event of the capture would tell nothing; who takes the memory after the capture waits for that stream."""
    slots, library = Slots(64, 1), Library()
    library.work_on(9)
    held = array_of(slots.take(9), library)
    library.work_on(1)
    fake.capturing.add(1)
    del held
    held = slots.take(9)
    assert (len(slots._memory), fake.waits) == (1, [])
    fake.capturing.clear()
    fake.work(1)
    library.work_on(9)
    del held
    slots.take(9)
    assert fake.waits == [(9, 1, 1)]


def test_streams_of_one_capture_are_ordered_within_it(fake: FakeDriver) -> None:
    """Replays keep that order; an eager stream cannot be waited for there, nor can one of another capture."""
    slots, library = Slots(64, 1), Library()
    fake.capturing.update({9, 1, 2})
    fake.captures[2] = 6
    library.work_on(9)
    piece = slots.take(9)
    for stream in (2, 3):
        piece.used_on(stream)
    held = array_of(piece, library)
    del piece
    library.work_on(1)
    fake.work(1)  # reads it
    del held
    held = slots.take(9)
    assert fake.waits == [(9, 1, 1)]
    fake.capturing.clear()
    fake.waits.clear()
    library.work_on(9)
    del held
    slots.take(9)
    assert {wait[:2] for wait in fake.waits} == {(9, 1), (9, 2), (9, 3)}, "and eager work waits for all of them"


@pytest.mark.parametrize("unknown", [9, 1])
def test_a_capture_that_the_driver_tells_no_number_of(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, unknown: int) -> None:
    """As of the default stream, which is captured in a way while one that waits for it is."""

    def capture_id(stream: int) -> int:
        if stream == unknown:
            raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
        return 5

    monkeypatch.setattr(driver, "capture_id", capture_id)
    slots = Slots(64, 1)
    held = slots.take(9, 1)
    held.used_on(2)
    fake.capturing.update({9, 1, 2})
    del held
    slots.take(9)
    assert fake.waits == ([(9, 2, 0)] if unknown == 1 else [])


def test_a_thread_that_counts_at_the_same_time_makes_no_reader_forgotten(fake: FakeDriver) -> None:
    class Racing(users.Users):
        _in_a_row = property(lambda self: 1000, lambda self, value: None)  # another thread's number, always

    racing = Racing()
    racing.left_by((7,))
    fake.work(9)
    assert [(stream, event.handle) for stream, event in racing.left_by((7, 9))] == [(7, (7, 0)), (9, (9, 1))]


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_readers_of_one_piece_hold_up_no_other(fake: FakeDriver, kind: str) -> None:
    """Two micro-batches overlap only if a dispatch does not wait for the experts of the other one, which read another result."""
    pool, slots = Pool(0, 2048, cell=1024), Slots(64, 2)

    def take():
        return pool.allocate(1024, 9, 1) if kind == "pool" else slots.take(9, 1)

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
    assert len(fake.waits) == 4, "the one that has been free longest, and no more of the past than is its own"


@pytest.mark.parametrize("size", [512, 2048])
def test_blocks_go_where_nobody_is_busy(fake: FakeDriver, size: int) -> None:
    """Small ones too; and once nobody is, to the front, so that cells stay whole."""
    pool = Pool(0, 4096, cell=2048)
    held = pool.allocate(size, 9, 1)
    fake.work(1)
    del held
    held = pool.allocate(size, 9, 1)
    assert (held.offset, fake.waits) == (size, [])
    fake.ended.add(1)
    del held
    held = pool.allocate(size, 9, 1)
    assert (held.offset, fake.waits) == (0, []), "what has ended is neither avoided nor waited for"


def test_the_last_place_is_one_too(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(512, 9, 1)
    fake.work(1)
    del held
    assert (pool.allocate(512, 9, 1).offset, fake.waits) == (512, [])


def test_captures_ask_for_no_event(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would end the capture."""
    pool = Pool(0, 2048, cell=1024)
    held = pool.allocate(1024, 9, 1)
    del held
    monkeypatch.setattr(driver.CudaEvent, "done", lambda event: pytest.fail("an event was asked for"))
    fake.capturing.add(9)
    assert pool.allocate(1024, 9, 1) is not None


def test_a_trimmed_tail_has_the_past_of_its_block(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 1)
    fake.work(1)
    del held
    held = pool.allocate(1024, 2)
    fake.work(2)
    held.trim(256)
    fake.waits.clear()
    tail = pool.allocate(768, 3)
    assert fake.waits == [(3, 2, 1)], "stream 2 stands for stream 1 too"
    assert tail.offset == 256


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_a_stream_that_is_captured_is_waited_for_later(fake: FakeDriver, kind: str) -> None:
    """Its past cannot be waited for now: who is handed the memory next has to."""
    pool, slots = Pool(0, 1024), Slots(64, 1)

    def take(stream: int):
        return pool.allocate(1024, stream) if kind == "pool" else slots.take(stream)

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


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_what_comes_back_meanwhile(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Finalizers run in the middle of anything; what they bring back is neither lost nor handed out before its time."""
    pool, slots = Pool(0, 2048), Slots(64, 0)

    def take(*streams: int):
        return pool.allocate(1024, *streams) if kind == "pool" else slots.take(*streams)

    places = iter(range(100))
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: next(places))
    held, late = [take(1)], [take(9, 4)]

    def wait(stream: int, handle: tuple) -> None:
        fake.waits.append((stream, *handle))
        late.clear()

    monkeypatch.setattr(driver, "wait_event", wait)
    held.clear()
    first = take(2)
    assert not late
    assert {wait[:2] for wait in fake.waits} == {(2, 1)}
    second = take(2)
    assert {wait[:2] for wait in fake.waits} == {(2, 1), (2, 9), (2, 4)}
    assert first.ptr != second.ptr
    del first, second
    assert pool.free_bytes == 2048


def test_a_slot_that_comes_back_while_another_is_looked_at(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, places = Slots(64, 0), iter(range(100))
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: next(places))
    own, late = slots.take(1), [slots.take(9)]
    place = own.ptr
    del own

    def is_own(past: users.Past, stream: int) -> bool:
        late.clear()
        return users.is_own(past, stream)

    monkeypatch.setattr(pool, "is_own", is_own)
    first = slots.take(1)
    assert (first.ptr, fake.waits) == (place, [])
    second = slots.take(1)
    assert (second.ptr != place, fake.waits) == (True, [(1, 9, 0)])


def test_captures_are_left_alone(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 1)
    del held
    fake.capturing.add(2)
    held = pool.allocate(1024, 2, 1)  # no eager event in a captured stream
    del held  # and no captured event for others to wait for
    assert fake.waits == []
    fake.capturing.clear()
    pool.allocate(1024, 3)
    assert {wait[:2] for wait in fake.waits} == {(3, 1), (3, 2)}, (
        "what stream 2 held before its capture is still to be waited for"
    )


def test_who_used_a_piece_before_its_capture_is_not_forgotten(fake: FakeDriver) -> None:
    """Also where one stream alone has done everything for long."""
    slots = Slots(64, 1)
    held = slots.take(9)
    del held
    fake.capturing.add(1)
    early = slots.take(1)
    fake.capturing.clear()
    for _ in range(100):
        held = slots.take(1)
        del held
    del early
    assert fake.waits == []
    both = slots.take(1), slots.take(1)
    assert (1, 9, 0) in fake.waits
    del both


def test_memory_that_comes_back_while_its_stream_is_captured(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph does not free what it has not allocated; it is freed with the next that is asked for."""
    monkeypatch.setattr(driver, "allocate_async", lambda num_bytes, stream: 4096)
    monkeypatch.setattr(driver, "trim_memory_pool", lambda: fake.freed.append(0))
    monkeypatch.setattr(driver, "free_async", lambda ptr, stream: fake.freed.append(stream))
    pool = StreamPool()
    memory = pool.allocate(64, 5)
    fake.capturing.add(5)
    del memory
    assert fake.freed == []
    other = pool.allocate(64, 6)
    assert fake.freed == []
    del other
    assert fake.freed == [6]
    fake.capturing.clear()
    pool.allocate(64, 6)
    assert fake.freed == [6, 5, 6]
    fake.capturing.add(5)
    memory = pool.allocate(64, 5)
    pool.destroy()
    assert fake.freed[3:] == [0]
    del memory  # a result that outlives its Buffer
    fake.capturing.clear()
    StreamPool().allocate(64, 6)
    assert fake.freed[4:] == [5, 6]


@pytest.mark.parametrize("captured", [1, 9], ids=["the reader's stream", "its own stream"])
def test_a_capture_does_not_let_readers_be_forgotten(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, captured: int) -> None:
    monkeypatch.setattr(driver, "allocate_async", lambda num_bytes, stream: 4096)
    monkeypatch.setattr(driver, "free_async", lambda ptr, stream: fake.freed.append(stream))
    pool = StreamPool()
    memory = pool.allocate(64, 9, 1)
    fake.work(1)
    fake.capturing.add(captured)
    del memory
    assert (fake.freed, fake.waits) == ([], [])
    fake.capturing.clear()
    held = pool.allocate(64, 9)
    assert fake.freed == [9]
    assert (9, 1, 1) in fake.waits
    del held


def test_the_default_stream_while_one_that_waits_for_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses to say whether it is captured; work on it would end the capture."""
    answers = iter([(cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None), (cuda.CUresult.CUDA_ERROR_INVALID_HANDLE, None)])
    monkeypatch.setattr(driver.driver, "cuStreamIsCapturing", lambda stream: next(answers))
    assert driver.is_capturing(0)
    with pytest.raises(EPUnavailableError, match="INVALID_HANDLE"):
        driver.is_capturing(0)


def test_all_slots_are_freed_in_the_end(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are taken, too; and all are of the size that was asked for."""
    sizes: list[int] = []
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: sizes.append(num_bytes) or len(sizes))
    monkeypatch.setattr(driver, "free", fake.freed.append)
    slots = Slots(64, 2)
    held = [slots.take(1) for _ in range(3)]
    del held[0]
    slots.destroy()
    assert (fake.freed, sizes) == ([1, 2, 3], [64, 64, 64])


def test_slots_grow_and_come_back(fake: FakeDriver) -> None:
    slots = Slots(64, 1)
    held = [slots.take(1) for _ in range(3)]
    del held[1:]
    assert slots.take(1) is not None
    assert len(slots._memory) == 3


@pytest.mark.parametrize(
    "held",
    ["pool.Pool(0, 4096).allocate(1, 1, 2)", "pool.Slots(256, 0).take(1, 2)", "stream_memory.StreamPool().allocate(1, 1, 2)"],
)
def test_what_is_held_when_python_ends_dies_in_silence(held: str) -> None:
    code = f"""
import sys
from deepep_rt.cuda import driver, pool, stream_memory
driver.allocate = driver.allocate_async = lambda *_: 4096
driver.CurrentContext = lambda: None  # entering it raises
sys.modules["keeper"] = {held}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("cell", [0, 7 * 256])
def test_blocks_never_overlap(fake: FakeDriver, cell: int) -> None:
    """Whatever is taken, trimmed and dropped; and in the end all is one piece again."""
    draw = random.Random(3)
    pool, held = Pool(0, 40 * 256, cell), []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        elif block := pool.allocate(draw.randrange(1, 8 * 256), 1):
            if draw.random() < 0.5:
                block.trim(draw.randrange(1, block.num_bytes + 1))
            held.append(block)
        assert all(begin < end for begin, end in [*pool._free, *(extent for extent, _ in pool._used)]), (
            "nothing is kept of nothing"
        )
        taken = sorted((block.offset, block.offset + block.num_bytes) for block in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert sum(end - start for start, end in taken) + pool.free_bytes == 40 * 256
        block = None
    held.clear()
    assert pool.allocate(40 * 256, 1) is not None
