"""A source is read once in a process, as long as it stays the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepep_rt.kernels import source
from deepep_rt.kernels.source import read_source

_LONG_AGO_NS = 1_600_000_000_000_000_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "_known", {})
    path = tmp_path / "tiny.cu"
    _write(path, '#include "common/wait.cuh"\n  # include "a.cuh"\n#include <b>\nint kFactor = 7;')
    return path


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read.append(path) or read_text(path))
    return read


def test_what_a_file_holds(path: Path) -> None:
    found = read_source(str(path))
    assert found.text == path.read_text()
    assert found.includes == ("common/wait.cuh", "a.cuh")
    assert {"kFactor", "int", "7", "include"} <= found.words
    assert "kFact" not in found.words


def test_a_settled_file_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SETTLED_NS", -(10**12))  # ctime cannot be set
    read = _count_reads(monkeypatch)
    assert read_source(str(path)) is read_source(str(path))
    assert read == [path]
    _write(path, "int kFactor = 8;")
    assert read_source(str(path)).text == "int kFactor = 8;"
    assert read == [path, path]


def test_a_change_that_no_clock_shows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes within a tick of the file system's clock leave the same stamp. So a new file is read each time."""
    status = os.stat(path)
    monkeypatch.setattr(source, "os", SimpleNamespace(stat=lambda _: status))
    assert "7" in read_source(str(path)).words
    _write(path, path.read_text().replace("7", "8"))
    assert "8" in read_source(str(path)).words


def test_a_missing_file(path: Path) -> None:
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_source(str(path))
