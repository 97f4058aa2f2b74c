"""Fixtures of the tests of the CUDA runtime."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that records its calls."""
    pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    import stream_driver

    return stream_driver.install(monkeypatch)
