"""CUDA contexts: calls run in their Buffer's, whatever is current, and leave no trace."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as cuda

from deepep_rt.cuda import driver

OWN, OTHERS = 5, 6


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Every thread's current context, as CUDA keeps it."""
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


def test_the_callers_context_comes_back(current: threading.local) -> None:
    own = driver.CurrentContext()
    for context in (OWN, OTHERS):
        current.context = context
        with own:
            assert current.context == OWN
            with own:
                assert current.context == OWN
            assert current.context == OWN
        assert current.context == context


def test_threads_keep_theirs(current: threading.local) -> None:
    """JAX makes calls in threads of its own, while other threads look at results."""
    own = driver.CurrentContext()
    inside, outside = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)
    found = []

    def call() -> None:
        with own:  # this thread had none
            inside.wait()
            outside.wait()
        found.append(getattr(current, "context", 0))

    thread = threading.Thread(target=call)
    current.context = OTHERS
    thread.start()
    inside.wait()
    with own:
        outside.wait()
        thread.join()
    assert (current.context, found) == (OTHERS, [0])


def test_streams_are_used_again(current: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs make many Buffers one after the other; a stream belongs to a context."""
    made = iter(range(100, 200))
    monkeypatch.setattr(driver, "new_stream", lambda: next(made))
    monkeypatch.setattr(driver, "_idle_streams", {})
    first, second = driver.acquire_stream(), driver.acquire_stream()
    assert first != second
    driver.release_stream(first)
    current.context = OTHERS
    other = driver.acquire_stream()
    assert other not in (first, second)
    driver.release_stream(other)
    current.context = OWN
    assert driver.acquire_stream() == first
    assert driver.acquire_stream() not in (first, second, other)


def test_one_memory_pool_for_a_context(current: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []
    success, made = cuda.CUresult.CUDA_SUCCESS, iter(["pool", "another"])
    driver.driver.cuMemAllocFromPoolAsync = lambda *given: asked.append(given) or (success, 4096)
    driver.driver.cuMemPoolTrimTo = lambda *given: asked.append(given) or (success,)
    monkeypatch.setattr(driver, "_new_memory_pool", lambda: next(made))
    monkeypatch.setattr(driver, "_memory_pools", {})
    driver.trim_memory_pool()
    assert asked == [], "there is none yet"
    assert driver.allocate_async(0, 7) == 4096
    driver.allocate_async(64, 8)
    current.context = OTHERS
    driver.allocate_async(64, 9)
    driver.trim_memory_pool()
    assert asked == [(1, "pool", 7), (64, "pool", 8), (64, "another", 9), ("another", 0)]
