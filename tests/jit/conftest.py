"""Fixtures of the tests of the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    import tiny_kernel

    folder = tmp_path / "sources"
    folder.mkdir()
    tiny_kernel.write_sources(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
