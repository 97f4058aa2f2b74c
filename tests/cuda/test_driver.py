"""CUDA contexts, streams and memory pools of the driver module, with a fake driver."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as cuda

from deepep_rt.cuda import driver

OWN, OTHER = 5, 6


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Replace the driver by one that keeps a current context for each thread."""
    current = threading.local()
    success = cuda.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(
        driver,
        "driver",
        SimpleNamespace(
            CUresult=cuda.CUresult,
            cuCtxGetCurrent=lambda: (success, getattr(current, "context", 0)),
            cuCtxSetCurrent=lambda context: (setattr(current, "context", context), (success,))[1],
        ),
    )
    current.context = OWN
    return current


def test_the_context_of_the_caller_returns(current: threading.local) -> None:
    own = driver.CurrentContext()
    for context in (OWN, OTHER):
        current.context = context
        with own:
            assert current.context == OWN
            with own:
                assert current.context == OWN
            assert current.context == OWN
        assert current.context == context


def test_each_thread_keeps_its_context(current: threading.local) -> None:
    """JAX makes calls in its own threads while other threads read results."""
    own = driver.CurrentContext()
    inside, outside = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)
    found = []

    def call() -> None:
        with own:  # this thread had no context
            inside.wait()
            outside.wait()
        found.append(getattr(current, "context", 0))

    thread = threading.Thread(target=call)
    current.context = OTHER
    thread.start()
    inside.wait()
    with own:
        outside.wait()
        thread.join()
    assert (current.context, found) == (OTHER, [0])


def test_released_streams_are_reused(current: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs make many Buffers in a row. A stream belongs to a context."""
    made = iter(range(100, 200))
    monkeypatch.setattr(driver, "new_stream", lambda: next(made))
    monkeypatch.setattr(driver, "_idle_streams", {})
    first, second = driver.acquire_stream(), driver.acquire_stream()
    assert first != second
    driver.release_stream(first)
    current.context = OTHER
    other = driver.acquire_stream()
    assert other not in (first, second)
    driver.release_stream(other)
    current.context = OWN
    assert driver.acquire_stream() == first
    assert driver.acquire_stream() not in (first, second, other)


def test_large_allocations_have_few_sizes_and_a_pool_of_their_own(
    current: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that differ a little in size use the same memory again, and small allocations take none of it."""
    asked: list[tuple] = []
    driver.driver.cuMemAllocFromPoolAsync = lambda *given: asked.append(given) or (cuda.CUresult.CUDA_SUCCESS, 4096)
    driver.driver.cuMemPoolTrimTo = lambda *given: asked.append(given) or (cuda.CUresult.CUDA_SUCCESS,)
    made = iter(["small", "large"])
    monkeypatch.setattr(driver, "_new_memory_pool", lambda: next(made))
    monkeypatch.setattr(driver, "_memory_pools", {})
    for num_bytes in ((32 << 20) - 1, 577_000_000, 578_000_000, 32 << 20, (32 << 20) + 1, 1 << 30):
        driver.allocate_async(num_bytes, 7)
    sizes = [(num_bytes, pool) for num_bytes, pool, _ in asked]
    step = 32 << 20  # from 512 MiB to 1 GiB
    assert sizes[:3] == [((32 << 20) - 1, "small"), (18 * step, "large"), (18 * step, "large")]
    assert sizes[3:] == [(32 << 20, "large"), (34 << 20, "large"), (1 << 30, "large")]
    del asked[:]
    driver.trim_memory_pool()
    assert asked == [("small", 0), ("large", 0)]


def test_each_context_has_one_memory_pool(current: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []
    success, made = cuda.CUresult.CUDA_SUCCESS, iter(["pool", "another"])
    driver.driver.cuMemAllocFromPoolAsync = lambda *given: asked.append(given) or (success, 4096)
    driver.driver.cuMemPoolTrimTo = lambda *given: asked.append(given) or (success,)
    monkeypatch.setattr(driver, "_new_memory_pool", lambda: next(made))
    monkeypatch.setattr(driver, "_memory_pools", {})
    driver.trim_memory_pool()
    assert asked == [], "there is no pool yet"
    assert driver.allocate_async(0, 7) == 4096
    driver.allocate_async(64, 8)
    current.context = OTHER
    driver.allocate_async(64, 9)
    driver.trim_memory_pool()
    assert asked == [(1, "pool", 7), (64, "pool", 8), (64, "another", 9), ("another", 0)]
