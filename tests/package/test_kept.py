"""The folder in which tests keep what they compiled."""

from __future__ import annotations

import os
import time
from pathlib import Path

import kept
import pytest


def test_the_oldest_files_are_deleted_first(tmp_path: Path) -> None:
    for age in range(4):
        (tmp_path / f"{age}.so").write_bytes(bytes(10))
        os.utime(tmp_path / f"{age}.so", (time.time() - age,) * 2)
    kept.delete_oldest(tmp_path, max_bytes=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.so", "1.so"]


def test_folders_of_killed_compilers_are_deleted(tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / f"{kept.UNFINISHED}{name}").mkdir()
        (tmp_path / f"{kept.UNFINISHED}{name}" / "kernel.o").touch()
    os.utime(tmp_path / f"{kept.UNFINISHED}old", (0, 0))
    kept.delete_oldest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{kept.UNFINISHED}new"]


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries from it run in the process of the tests."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "cache"))
    find = kept.folder.__wrapped__
    assert find() == tmp_path / "cache_tests"
    assert find().is_dir()
    (tmp_path / "cache_tests").chmod(0o777)
    assert tmp_path not in find().parents
