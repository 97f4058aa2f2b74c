"""CUDA contexts: calls run in their Buffer's, whatever is current, and leave no trace."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as cuda

from deepep_rt import driver

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
