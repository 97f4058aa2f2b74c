"""Blocks of a pool and slots: offsets, reuse and release. A fake driver records its calls."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from stream_driver import FakeDriver

from deepep_rt import EPOutOfMemoryError
from deepep_rt.cuda import driver, stream_tracking
from deepep_rt.cuda import slots as slots_module
from deepep_rt.cuda.pool import Pool
from deepep_rt.cuda.slots import Slots
from deepep_rt.cuda.stream_tracking import PendingWork


def test_blocks_are_allocated_trimmed_and_merged(fake: FakeDriver) -> None:
    pool = Pool(4096, 10 * 256)
    first, second = pool.allocate(300, 1), pool.allocate(1, 1)
    assert (first.ptr, first.num_bytes, second.offset) == (4096, 512, 512)
    assert pool.free_bytes == 7 * 256
    first.trim(10)
    assert pool.free_bytes == 8 * 256
    assert pool.allocate(8 * 256, 1) is None, "the free memory is not contiguous"
    del first, second
    assert pool.free_bytes == 10 * 256
    assert pool.allocate(10 * 256, 1).offset == 0


def test_used_bytes_change_nothing(fake: FakeDriver) -> None:
    """Another thread may read them at any time, so reading must not merge released blocks."""
    pool = Pool(0, 10 * 256)
    block = pool.allocate(3 * 256, 1)
    assert pool.used_bytes == 3 * 256
    block.trim(256)
    assert pool.used_bytes == 256, "the tail is released, although no call has merged it yet"
    released = len(pool._released)
    assert pool.used_bytes == 256
    assert len(pool._released) == released
    del block
    assert pool.used_bytes == 0


def test_large_blocks_start_at_cells(fake: FakeDriver) -> None:
    """Two blocks of the largest size always fit, in every order of trimming and release. Small blocks fill the rest."""
    pool = Pool(0, 20 * 256, cell=10 * 256)
    held = None
    for trimmed in (7, 9, 4, 10, 8, 6, 9):
        block = pool.allocate(10 * 256, 1)
        block.trim(trimmed * 256)
        held = block  # the block before dies now
    assert held.offset in (0, 10 * 256)
    del held, block
    first, second = pool.allocate(6 * 256, 1), pool.allocate(6 * 256, 1)
    assert {first.offset, second.offset} == {0, 10 * 256}
    assert pool.allocate(5 * 256, 1) is None
    small = [pool.allocate(4 * 256, 1) for _ in range(2)]
    assert [block.offset for block in small] == [6 * 256, 16 * 256]
    del first, small, second
    assert pool.free_bytes == 20 * 256
    assert pool.allocate(20 * 256, 1) is not None, "larger than a cell"


def test_equal_blocks_in_a_row_alternate_between_two_offsets(fake: FakeDriver) -> None:
    pool = Pool(0, 8 * 256)
    held, places = pool.allocate(256, 1), []
    for _ in range(4):
        held = pool.allocate(256, 1)  # the block before dies now
        places.append(held.offset)
    assert places == [256, 0, 256, 0]
    assert pool.free_bytes == 7 * 256
    del held
    assert pool.allocate(512, 1).offset == 0, "another size"


@pytest.mark.parametrize(("cell", "blocks"), [(0, 1), (4 * 256, 3)])
def test_equal_blocks_in_a_row_need_no_search(fake: FakeDriver, cell: int, blocks: int) -> None:
    """A small block may be anywhere. A large block must start at a cell."""
    pool = Pool(0, 8 * 256, cell)
    first = pool.allocate(blocks * 256, 7)
    held = pool.allocate(blocks * 256, 7)
    place = held.offset
    pool._merge_released = pool._find = lambda *_: pytest.fail("the pool searched")
    for _ in range(3):
        del held
        held = pool.allocate(blocks * 256, 7)
        assert held.offset == place != 0
    del first


def test_a_block_found_without_a_search_has_a_reader(fake: FakeDriver) -> None:
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


def test_all_memory_of_a_single_stream_gets_an_event_when_another_stream_comes(fake: FakeDriver) -> None:
    """Such memory has no events before. An event for each later allocation would make it wait for what the stream got meanwhile."""
    pool = Pool(0, 768)
    held = [pool.allocate(256, 1) for _ in range(3)]
    held.clear()
    fake.work(1)
    held = [pool.allocate(256, 9)]
    fake.work(1)
    held += [pool.allocate(256, 9), pool.allocate(256, 8)]
    assert fake.waits == [(9, 1, 1), (9, 1, 1), (8, 1, 1)]


def test_an_allocation_waits_for_no_work_that_came_after_memory_was_dropped(fake: FakeDriver) -> None:
    """A stream drops memory in each step and gets work. Another stream keeps its memory, so nothing of it dies. After its first
    allocation, the pool knows that there are two streams.
    """
    pool, kept = Pool(0, 6 * 256), []
    for _ in range(stream_tracking._SINGLE_STREAM_RUN + 1):
        pool.allocate(6 * 256, 1)  # and dropped
    for step in range(5):
        pool.allocate((6 - step) * 256, 1)  # all that is free
        fake.work(1)
        fake.waits.clear()
        kept.append(pool.allocate(256, 9))
        assert fake.waits == [(9, 1, max(step, 1))]


def test_a_capture_leaves_memory_of_a_single_stream_as_it_is(fake: FakeDriver) -> None:
    """An event of another stream must not be recorded during a capture. The next user waits for that stream."""
    pool = Pool(0, 512)
    held = [pool.allocate(256, 1) for _ in range(2)]
    held.clear()
    num_events = fake.num_events
    fake.capturing.add(9)
    held = [pool.allocate(256, 9)]
    assert fake.num_events == num_events
    fake.capturing.clear()
    fake.work(1)
    held.append(pool.allocate(256, 9))
    assert fake.waits == [(9, 1, 1)]


def test_the_rest_of_a_released_block_keeps_its_pending_work(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = [pool.allocate(512, stream) for stream in (1, 2)]
    held.clear()
    held = [pool.allocate(768, 9)]
    fake.waits.clear()
    held.append(pool.allocate(256, 9))
    assert {wait[:2] for wait in fake.waits} == {(9, 2)}


def test_a_full_pool_of_other_streams(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = [pool.allocate(512, 1), pool.allocate(512, 2)]
    del held[0]
    assert pool.allocate(1024, 9) is None
    assert pool.allocate(512, 9) is not None


@pytest.mark.parametrize(("size", "offset"), [(512, 256), (513, 1024)])
def test_large_blocks_need_more_than_half_a_cell(fake: FakeDriver, size: int, offset: int) -> None:
    pool = Pool(0, 2048, cell=1024)
    small = pool.allocate(256, 7)
    assert (small.offset, pool.allocate(size, 7).offset) == (0, offset)


def test_the_offset_right_before_a_busy_extent(fake: FakeDriver) -> None:
    pool = Pool(0, 2048)
    first, second = pool.allocate(512, 9), pool.allocate(512, 9, 1)
    del second
    del first
    assert (pool.allocate(512, 9).offset, fake.waits) == (0, [])


def test_extents_of_streams_without_an_event_count_as_busy(fake: FakeDriver) -> None:
    """The pool then prefers the extent whose user left first."""
    pool = Pool(0, 512)
    held = [pool.allocate(256, 7), pool.allocate(256, 7)]
    del held[1]
    del held[0]
    held = [pool.allocate(256, 9), pool.allocate(256, 9)]
    assert [block.offset for block in held] == [256, 0]


def test_a_large_block_returns_to_a_cell(fake: FakeDriver) -> None:
    pool = Pool(0, 8 * 256, cell=4 * 256)
    small, first, second = (pool.allocate(blocks * 256, 1) for blocks in (1, 3, 3))
    assert (small.offset, first.offset, second.offset) == (0, 4 * 256, 256), "no cell was free for the second block"
    del small
    assert pool.free_bytes == 2 * 256
    del second
    assert pool.allocate(3 * 256, 1).offset == 0


@pytest.mark.parametrize("size", [512, 2048])
def test_blocks_avoid_busy_extents(fake: FakeDriver, size: int) -> None:
    """Small blocks do so too. Without busy extents, blocks go to the front, so that cells stay whole."""
    pool = Pool(0, 4096, cell=2048)
    held = pool.allocate(size, 9, 1)
    fake.work(1)
    del held
    held = pool.allocate(size, 9, 1)
    assert (held.offset, fake.waits) == (size, [])
    fake.ended.add(1)
    del held
    held = pool.allocate(size, 9, 1)
    assert (held.offset, fake.waits) == (0, []), "finished work is neither avoided nor waited for"


def test_the_last_offset_is_a_candidate(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(512, 9, 1)
    fake.work(1)
    del held
    assert (pool.allocate(512, 9, 1).offset, fake.waits) == (512, [])


def test_a_trimmed_tail_has_the_pending_work_of_its_block(fake: FakeDriver) -> None:
    pool = Pool(0, 1024)
    held = pool.allocate(1024, 1)
    fake.work(1)
    del held
    held = pool.allocate(1024, 2)
    fake.work(2)
    held.trim(256)
    fake.waits.clear()
    tail = pool.allocate(768, 3)
    assert fake.waits == [(3, 2, 1)], "the event on stream 2 covers stream 1 too"
    assert tail.offset == 256


def no_memory(num_bytes: int) -> int:
    raise EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize("kind", ["pool", "slots"])
def test_finalizers_release_memory_during_an_allocation(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Memory that a finalizer releases is neither lost nor handed out without waiting for its work."""
    pool, slots = Pool(0, 2048), Slots(64, 0)

    def take(*streams: int):
        return pool.allocate(1024, *streams) if kind == "pool" else slots.acquire(*streams)

    places = iter(range(100))
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: next(places))
    held, late = [take(1)], [take(9, 4)]

    def wait(stream: int, handle: tuple) -> None:
        fake.waits.append((stream, *handle))
        late.clear()

    monkeypatch.setattr(driver, "wait_event", wait)
    held.clear()
    monkeypatch.setattr(driver, "allocate", no_memory)
    first = take(2)
    assert not late
    assert {wait[:2] for wait in fake.waits} == {(2, 1)}
    second = take(2)
    assert {wait[:2] for wait in fake.waits} == {(2, 1), (2, 9), (2, 4)}
    assert first.ptr != second.ptr
    del first, second
    assert pool.free_bytes == 2048


def test_a_slot_is_released_during_the_search_for_another(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, places = Slots(64, 0), iter(range(100))
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: next(places))
    own, late = slots.acquire(1), [slots.acquire(9)]
    place = own.ptr
    del own

    def is_only_on(pending: PendingWork, *streams: int) -> bool:
        late.clear()
        return stream_tracking.is_only_on(pending, *streams)

    monkeypatch.setattr(slots_module, "is_only_on", is_only_on)
    first = slots.acquire(1)
    assert (first.ptr, fake.waits) == (place, [])
    fake.ended.add(9)
    second = slots.acquire(1)
    assert (second.ptr, fake.waits) == (1 - place, []), "the one that was released meanwhile"


def test_destroy_frees_all_slots(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes slots in use. All slots have the requested size."""
    sizes: list[int] = []
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: sizes.append(num_bytes) or len(sizes))
    monkeypatch.setattr(driver, "free", fake.freed.append)
    slots = Slots(64, 2)
    held = [slots.acquire(1) for _ in range(3)]
    del held[0]
    slots.destroy()
    assert (fake.freed, sizes) == ([1, 2, 3], [64, 64, 64])


def test_slots_grow_and_are_reused(fake: FakeDriver) -> None:
    slots = Slots(64, 1)
    held = [slots.acquire(1) for _ in range(3)]
    del held[1:]
    assert slots.acquire(1) is not None
    assert len(slots._memory) == 3


@pytest.mark.parametrize("cell", [0, 7 * 256])
def test_blocks_never_overlap(fake: FakeDriver, cell: int) -> None:
    """Allocate, trim and drop blocks at random. At the end the free memory is one extent again."""
    draw = random.Random(3)
    pool, held = Pool(0, 40 * 256, cell), []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        elif block := pool.allocate(draw.randrange(1, 8 * 256), 1):
            if draw.random() < 0.5:
                block.trim(draw.randrange(1, block.num_bytes + 1))
            held.append(block)
        assert all(begin < end for begin, end in [*pool._free, *(extent for extent, _ in pool._used)]), "an extent is empty"
        taken = sorted((block.offset, block.offset + block.num_bytes) for block in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert sum(end - start for start, end in taken) + pool.free_bytes == 40 * 256
        block = None
    held.clear()
    assert pool.allocate(40 * 256, 1) is not None


@pytest.mark.parametrize("cell", [0, 7 * 256])
def test_memory_is_added_and_removed(fake: FakeDriver, cell: int) -> None:
    """At random, between allocations. No block lies in memory that was removed, and what is in use is what blocks hold."""
    draw = random.Random(5)
    pool, held, added = Pool(1 << 20, 8 * 256, cell), [], {}
    for _ in range(2000):
        if (choice := draw.random()) < 0.3:
            begin = draw.randrange(8, 60) * 256
            end = begin + draw.randrange(1, 9) * 256
            if all(end <= first or last <= begin for first, last in added.items()):
                pool.add(begin, end)
                added[begin] = end
        elif choice < 0.5 and added:
            begin = draw.choice([*added])
            is_free = not any(block.offset < added[begin] and begin < block.offset + block.num_bytes for block in held)
            assert pool.remove(begin, added[begin]) == is_free
            if is_free:
                del added[begin]
        elif choice < 0.7 and held:
            held.pop(draw.randrange(len(held)))
        elif block := pool.allocate(draw.randrange(1, 6 * 256), draw.choice([1, 2])):
            held.append(block)
        block = None
        total = 8 * 256 + sum(end - begin for begin, end in added.items())
        in_use = sum(block.num_bytes for block in held)
        assert (pool.num_bytes, pool.used_bytes, pool.free_bytes) == (total, in_use, total - in_use)
        assert sum(num_bytes for _, num_bytes in pool.in_use()) == in_use
        for block in held:
            assert any(begin <= block.ptr < begin + size for begin, size in pool.in_use())
            units = range(block.offset, block.offset + block.num_bytes, 256)
            assert all(unit < 8 * 256 or any(begin <= unit < end for begin, end in added.items()) for unit in units)
    block = None
    held.clear()
    for begin, end in added.items():
        assert pool.remove(begin, end)
    assert pool.allocate(8 * 256, 1) is not None
