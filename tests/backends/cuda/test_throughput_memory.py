"""Memory of results in the throughput calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, arguments, fake, make, region, routed

from deepep_rt import EPOutOfMemoryError
from deepep_rt.cuda import driver

__all__ = ["fake", "make"]


def test_a_dispatch_waits_only_for_readers_of_its_own_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: one dispatch runs while the experts of the other batch read their rows on the caller's stream."""
    with make(num_slots=2) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        send: dict[str, Any] = dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=1234))
        first = buffer.dispatch(x, idx, weights, **send)
        first.event.wait()
        assert first.recv_x.shape == (30, 256)
        del first
        fake.waits.clear()
        second = buffer.dispatch(x, idx, weights, **send)
        assert fake.waits == [(OWN_STREAM, 1234)]
        third = buffer.dispatch(x, idx, weights, **send)
        assert fake.waits[1:] == [(OWN_STREAM, 1234), (OWN_STREAM, 5)], "the memory of the first"
        assert second.recv_x.ptr != third.recv_x.ptr


def test_dropped_results_wait_for_their_readers(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on the caller's stream may still read them: sums in the Buffer's memory and in other memory, and copied rows. Other memory is
    freed when it is done.
    """
    with make(num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake, 64)
        y, send = Array(fake, "bfloat16", 256, 256), dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=1234))
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256, **send)
        inside, outside = (buffer.combine(y, sent.handle, **send) for _ in range(2))
        copied = buffer.dispatch(x, handle=sent.handle, **send)
        assert [result.x.ptr in region(buffer, "sums") for result in (inside, outside)] == [True, False]
        assert len(fake.copies) == 1
        for result in ("outside", "copied"):
            fake.waits.clear()
            if result == "outside":
                del outside
            else:
                del copied
            assert fake.waits == [], result
            assert fake.freed == []
        with busy.context() as done:
            done.setattr(driver.CudaEvent, "done", lambda event: True)
            buffer.dispatch(x, handle=sent.handle, **send)
        assert len(fake.freed) == 2
        fake.waits.clear()
        del inside
        inside = buffer.combine(y, sent.handle, **send)
        assert inside.x.ptr in region(buffer, "sums")
        assert fake.waits == [(OWN_STREAM, 1234), (OWN_STREAM, 5)]


def test_a_full_pool_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot allocate. Sums also use the pool of rows, and a call without room is refused."""
    with make(num_slots=1) as buffer, monkeypatch.context() as capturing:
        x, idx, weights = arguments(fake, 64)
        y, sent = Array(fake, "bfloat16", 256, 256), buffer.dispatch(x, idx, weights, num_worst_tokens=256)
        handle = sent.handle
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        first = buffer.combine(y, handle)
        assert first.x.ptr in region(buffer, "sums")
        fake.pop_launches()
        for call in (lambda: buffer.combine(y, handle), lambda: buffer.dispatch(x, handle=handle)):
            with pytest.raises(EPOutOfMemoryError, match=r"a captured CUDA graph cannot allocate.*num_slots"):
                call()
        assert fake.pop_launches() == []
        del sent
        second = buffer.combine(y, handle)
        assert second.x.ptr in region(buffer, "pool")


def test_a_full_pool(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(num_slots=1) as buffer:
        fake.on_launch = routed(buffer, 256, [256] + [0] * 7)
        x, idx, weights = arguments(fake, 64)
        held = [buffer.dispatch(x, idx, weights) for _ in range(2)]
        assert held[0].recv_x.ptr in region(buffer, "pool")
        ((to, source, num_bytes),) = fake.copies
        assert source == region(buffer, "landing").start
        assert to <= held[1].recv_x.ptr < to + num_bytes
        assert num_bytes >= 256 * 512

        def none_left(*_: Any) -> int:
            raise EPOutOfMemoryError("none left")

        held.append(buffer.combine(Array(fake, "bfloat16", 256, 256), held[0].handle))
        monkeypatch.setattr(driver, "allocate_async", none_left)
        with pytest.raises(EPOutOfMemoryError) as after_launch:
            buffer.dispatch(x, idx, weights)
        with pytest.raises(EPOutOfMemoryError) as before_launch:
            buffer.combine(Array(fake, "bfloat16", 256, 256), held[0].handle)
        assert after_launch.value.call_made, "the other ranks go on"
        assert not before_launch.value.call_made
    del held, after_launch, before_launch  # their tracebacks hold memory of the fake GPU
    gc.collect()


@pytest.mark.parametrize("share", [1.0, 0.9, 0.66, 0.5])
def test_successive_layers_fit_the_pool(fake: FakeGpu, make: Any, share: float) -> None:
    """Each layer runs while the caller holds the result before. All results fit, for any share of the worst case."""
    with make() as buffer:
        num_rows = int(share * 256)
        fake.on_launch = routed(buffer, num_rows, [1] * 8)
        x, idx, weights = arguments(fake, 64)
        sums = None
        for _ in range(20):
            sent = buffer.dispatch(x, idx, weights)
            bias = sums
            sums = buffer.combine(Array(fake, "bfloat16", num_rows, 256), sent.handle)
            assert sums.x.ptr in region(buffer, "sums")
        del bias
        assert not fake.copies


def test_sums_leave_room_for_rows(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The caller may hold any number of sums: only results of dispatch fill the pool of dispatch."""
    with make() as buffer, caplog.at_level("INFO", logger="deepep_rt"):
        x, idx, weights = arguments(fake, 64)
        y = Array(fake, "bfloat16", 256, 256)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256)
        sums = [buffer.combine(y, sent.handle) for _ in range(20)]
        assert [total.x.ptr in region(buffer, "sums") for total in sums] == [True] * 2 + [False] * 18
        again = buffer.dispatch(x, handle=sent.handle)
        assert again.recv_x.ptr in region(buffer, "pool")
        assert not fake.copies
        assert not caplog.messages
        third, fourth = (buffer.dispatch(x, handle=sent.handle) for _ in range(2))
        assert len(fake.copies) == 2
        assert len(caplog.messages) == 1
        assert "num_slots" in caplog.text
        del third, fourth


def test_a_copied_result(fake: FakeGpu, make: Any) -> None:
    """If the pool is full, rows are copied from the shared region. The next call uses that region, and waits for the copy."""
    with make(num_slots=1) as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=256)]
        fake.requests.clear()
        held.append(buffer.dispatch(x, idx, weights, num_worst_tokens=256, async_finish=True))
        assert "record" in fake.requests[fake.requests.index("copy_async") :]
        fake.waits.clear()
        buffer.combine(Array(fake, "bfloat16", 256, 256), held[1].handle)
        assert (CALLERS_STREAM, 5) in fake.waits


def test_results_are_trimmed_to_what_arrived(fake: FakeGpu, make: Any) -> None:
    with make(num_slots=1) as buffer:
        fake.on_launch = routed(buffer, 20, [20] + [0] * 7)
        x, idx, _ = arguments(fake, 64)
        sent = buffer.dispatch(x, idx)
        held = [buffer.dispatch(x, handle=sent.handle) for _ in range(5)]
        assert all(result.recv_x.ptr in region(buffer, "pool") for result in held)
        assert not fake.copies
