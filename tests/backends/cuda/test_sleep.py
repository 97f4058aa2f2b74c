"""`Buffer.sleep` and `wake` of the CUDA backend: what they refuse, and the order of their steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import FakeGpu, arguments, fake, make, routed

from deepep_rt import EPAsleepError, EPInputError, EPOutOfMemoryError, EPUnavailableError
from deepep_rt.backends.cuda import runtime
from deepep_rt.buffer import backend_of
from deepep_rt.cuda import driver

__all__ = ["fake", "make"]


@pytest.fixture
def steps(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give Buffers memory that sleeps. Return the steps of both memories, and requests of interest."""

    class LocalHeap:
        allocate, wake_error = staticmethod(fake.allocate), None
        is_mapped = True

        def sleep(self) -> None:
            fake.requests.append("local sleeps")

        def wake(self) -> None:
            if LocalHeap.wake_error:
                raise LocalHeap.wake_error
            fake.requests.append("local wakes")

        def free(self) -> None:
            fake.requests.append("local is freed")

    monkeypatch.setattr(runtime, "LocalHeap", LocalHeap)
    memory = fake.allocator.allocate
    monkeypatch.setattr(memory, "is_local", True)
    monkeypatch.setattr(memory, "heap", property(lambda self: self))
    monkeypatch.setattr(memory, "can_grow", False, raising=False)
    monkeypatch.setattr(memory, "sleep", lambda self: fake.requests.append("memory sleeps"), raising=False)
    monkeypatch.setattr(memory, "is_mapped", True, raising=False)
    monkeypatch.setattr(
        memory, "replace", lambda self, comm, timeout_s: fake.requests.append("memory is replaced"), raising=False
    )
    monkeypatch.setattr(memory, "wake", lambda self, comm, timeout_s: fake.requests.append("memory wakes"), raising=False)
    monkeypatch.setattr(driver, "synchronize_all", lambda: fake.requests.append("synchronize_all"))
    monkeypatch.setattr(memory, "local_heap", LocalHeap, raising=False)
    return fake.requests


def test_work_ends_before_memory_goes(steps: list[str], fake: FakeGpu, make: Any) -> None:
    """The tables of handles are kept, and results only if the program asks for it."""
    buffer = make(low_latency=True)
    fake.on_launch = routed(buffer, 20, [1] * 8)
    sent = buffer.dispatch(*arguments(fake))
    tables = {sent.handle.routing.ptr}
    for keeps in (False, True):
        steps.clear()
        fake.copies.clear()
        buffer.sleep(keep_results=keeps)
        saved = {source: source + num_bytes for _, source, num_bytes in fake.copies}
        assert tables <= saved.keys()
        assert any(begin <= sent.recv_x.ptr < end for begin, end in saved.items()) == keeps
        end = [steps.index(name) for name in ("end_of_work", "synchronize_all", "memory sleeps", "local sleeps")]
        assert end == sorted(end)
        assert "trim_memory_pool" in steps
        steps.clear()
        fake.copies.clear()
        buffer.wake()
        assert {to for to, _, _ in fake.copies} == saved.keys()
        end = [steps.index(name) for name in ("local wakes", "memory wakes", "fill", "copy_async")]
        assert end == sorted(end)
    steps.clear()
    buffer.destroy()
    assert "local is freed" in steps


def test_a_rank_that_leaves_keeps_its_results(steps: list[str], fake: FakeGpu, make: Any) -> None:
    """`shrink` for itself gives the memory back. Results and the tables of captured graphs come back with the next members."""
    buffer = make(low_latency=True)
    fake.on_launch = routed(buffer, 20, [1] * 8)
    sent = buffer.dispatch(*arguments(fake))
    backend, memory = backend_of(buffer), fake.allocator.allocate
    steps.clear()
    fake.copies.clear()
    backend.leave_members()
    saved = {source: source + num_bytes for _, source, num_bytes in fake.copies}
    assert sent.handle.routing.ptr in saved
    assert any(begin <= sent.recv_x.ptr < end for begin, end in saved.items())
    assert steps.index("end_of_work") < steps.index("copy_async") < steps.index("memory sleeps")
    memory.is_mapped, memory.local_heap.is_mapped = False, False
    steps.clear()
    fake.copies.clear()
    backend.change_members(backend.comm, backend.runtime.monitor.failure_notice, 2, aborts=False)
    assert steps.index("local wakes") < steps.index("memory is replaced")
    assert saved.keys() <= {to for to, _, _ in fake.copies}


def test_it_sleeps_on_without_memory(steps: list[str], fake: FakeGpu, make: Any) -> None:
    buffer = make()
    buffer.sleep()
    heap = fake.allocator.allocate.local_heap
    heap.wake_error = EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")
    steps.clear()
    with pytest.raises(EPOutOfMemoryError, match="rank 0: the CUDA driver reports"):
        buffer.wake()
    assert "memory wakes" not in steps
    with pytest.raises(EPAsleepError):
        buffer.synchronize()
    heap.wake_error = None
    buffer.wake()
    buffer.synchronize()


def test_what_cannot_sleep(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make()
    with pytest.raises(EPUnavailableError, match=r"this memory cannot sleep: NVSHMEM; .*DEEPEP_RT_SYMMETRIC_MEMORY=heap"):
        buffer.sleep()
    buffer.synchronize()


def test_when_a_buffer_cannot_sleep(steps: list[str], fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(low_latency=True)
    buffer.mask_rank(2)
    with pytest.raises(EPInputError, match=r"ranks \[2\] are masked.*Unmask them"):
        buffer.sleep()
    buffer.unmask_rank(2)
    fake.on_launch = routed(buffer, 20, [1] * 8)
    buffer.dispatch(*arguments(fake))
    with monkeypatch.context() as capturing:
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        with pytest.raises(EPInputError, match=r"sleep\(\) during the capture of a CUDA graph"):
            buffer.sleep()
    assert "memory sleeps" not in steps
    buffer.sleep()


def _collect(held: list[Any]) -> None:
    held.clear()
    gc.collect()


def test_a_dropped_buffer_frees_its_memory(steps: list[str], fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing can use it: at once, or when the next Buffer is made. No rank waits for another."""

    def drop(held: list[Any]) -> None:
        steps.clear()
        with pytest.warns(ResourceWarning, match="dropped without destroy"):
            _collect(held)

    drop([make()])
    assert "write_int32_now" not in steps, "kernels that run have rows to send"
    assert "local is freed" in steps
    buffer = make()
    fake.on_launch = routed(buffer, 20, [1] * 8)
    sent = buffer.dispatch(*arguments(fake))
    fake.on_launch = lambda call: None  # it holds the Buffer
    held = [buffer]
    del buffer
    drop(held)
    assert "local is freed" not in steps, "the caller holds a result"
    make().destroy()
    assert steps.count("local is freed") == 1, "that of the new Buffer"
    del sent
    steps.clear()
    make().destroy()
    assert steps.count("local is freed") == 2
    with monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        drop([make()])
        assert "local is freed" not in steps, "the GPU works"
    buffer = make()
    assert "local is freed" in steps
    buffer._backend.runtime.order.has_captured = True
    held = [buffer]
    del buffer
    drop(held)
    make().destroy()
    assert steps.count("local is freed") == 1, "a graph may be replayed"


def test_a_buffer_of_nvshmem_keeps_its_memory(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    held = [make()]
    with pytest.warns(ResourceWarning), caplog.at_level("WARNING", "deepep_rt"):
        _collect(held)
    assert "stays allocated until the process ends" in caplog.text
