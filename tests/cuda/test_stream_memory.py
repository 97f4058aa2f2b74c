"""Memory of a stream-ordered pool is freed after the work of all its streams, and never in a capture."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from stream_driver import FakeDriver

from deepep_rt.cuda import driver
from deepep_rt.cuda.stream_memory import StreamPool


def test_memory_released_in_a_capture_is_freed_later(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph must not free memory that it did not allocate. The next allocation frees it."""
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
def test_a_capture_loses_no_reader(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, captured: int) -> None:
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
