"""Memory of a stream-ordered pool is freed after the work of all its streams, and never in a capture."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from stream_driver import FakeDriver

from deepep_rt import EPOutOfMemoryError
from deepep_rt.cuda import driver
from deepep_rt.cuda.stream_tracking import StreamPool


@pytest.fixture
def pool(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> StreamPool:
    """A pool whose memory has different addresses. `fake.freed` lists the streams on which it is freed."""
    addresses, held = itertools.count(4096, 64), set()

    def allocate(num_bytes: int, stream: int) -> int:
        held.add(address := next(addresses))
        return address

    def free(ptr: int, stream: int) -> None:
        held.remove(ptr)
        fake.freed.append(stream)

    monkeypatch.setattr(driver, "allocate_async", allocate)
    monkeypatch.setattr(driver, "free_async", free)
    return StreamPool()


def test_memory_released_in_a_capture_is_freed_later(fake: FakeDriver, pool: StreamPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph must not free memory that it did not allocate. The next allocation frees it."""
    monkeypatch.setattr(driver, "trim_memory_pool", lambda: fake.freed.append(0))
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
    pool.trim()
    assert fake.freed[3:] == [0]
    del memory  # a result that outlives its Buffer
    fake.capturing.clear()
    StreamPool().allocate(64, 6)
    assert fake.freed[4:] == [5, 6]


@pytest.mark.parametrize("captured", [1, 9], ids=["the reader's stream", "its own stream"])
def test_a_capture_loses_no_reader(fake: FakeDriver, pool: StreamPool, captured: int) -> None:
    memory = pool.allocate(64, 9, 1)
    fake.work(1)
    fake.capturing.add(captured)
    del memory
    assert (fake.freed, fake.waits) == ([], [])
    fake.capturing.clear()
    held = pool.allocate(64, 9)
    assert (fake.freed, fake.waits) == ([], []), "the reader is not done"
    fake.ended.add(1)
    more = pool.allocate(64, 9)
    assert (fake.freed, fake.waits) == ([9], [])
    del held, more


def test_dropped_memory_does_not_delay_the_stream_of_the_calls(fake: FakeDriver, pool: StreamPool) -> None:
    """It is freed when its readers are done. Only with many readers behind does the stream wait, for the one that came first."""
    for reader in (1, 2):
        memory = pool.allocate(64, 9, reader)
        fake.work(reader)
        del memory
        fake.work(reader)
    held = pool.allocate(64, 9, 3)
    assert (fake.freed, fake.waits) == ([], [])
    fake.ended.add(2)
    memory = pool.allocate(64, 9, 4)
    assert (fake.freed, fake.waits) == ([9], [])
    del held, memory
    held = pool.allocate(64, 9)
    assert (fake.freed, fake.waits) == ([9, 9], [(9, 1, 1)]), "not for later work of the reader"
    del held


def test_all_memory_is_freed_before_an_allocation_fails(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(num_bytes: int, stream: int) -> int:
        if len(fake.freed) < fake.num_allocations:
            raise EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")
        fake.num_allocations += 1
        return 4096

    monkeypatch.setattr(driver, "allocate_async", allocate)
    monkeypatch.setattr(driver, "free_async", lambda ptr, stream: fake.freed.append(stream))
    pool = StreamPool()
    memory = pool.allocate(64, 9, 1)
    with pytest.raises(EPOutOfMemoryError):
        pool.allocate(64, 9)
    del memory
    assert fake.freed == []
    pool.allocate(64, 9)
    assert (fake.freed[0], fake.waits) == (9, [(9, 1, 0)])
