"""The disk cache: what is written comes back, what is damaged is noticed, and one of many compiles."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from entries import entry

from deepep_rt import EPCacheError, EPConfigError
from deepep_rt.jit import cache, cache_lock
from deepep_rt.jit.cache import SUFFIX, CorruptEntry, KernelCache

ENTRY = entry(code=bytes(range(256)) * 5)
KEY, OTHER = "ab" * 32, "cd" * 32


def _file(folder: Path) -> Path:
    (path,) = folder.glob(f"*/*{SUFFIX}")
    return path


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    store = KernelCache(tmp_path / "new" / "folder")
    assert store.entries() == []
    assert store.get("sm_90", ENTRY.key) is None
    store.put(ENTRY)
    assert store.get("sm_90", ENTRY.key) == ENTRY
    assert store.get("sm_80", ENTRY.key) is None
    assert store.entries() == [ENTRY]
    assert _file(store.folder).parent.name == "sm_90"


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "chosen"))
    assert KernelCache().folder == tmp_path / "chosen"
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for base, folder in ((str(tmp_path / "base"), tmp_path / "base"), ("", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert KernelCache().folder == folder / "deepep_rt"


def test_a_folder_in_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(EPConfigError, match=r"DEEPEP_RT_CACHE_DIR='~nosuchuser/x'; expected .* no home folder"):
        KernelCache()
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container, for a user that it does not know
    for name in ("DEEPEP_RT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EPConfigError, match=r"DEEPEP_RT_CACHE_DIR=''; expected .* no home folder"):
        KernelCache()


def test_nothing_is_left_of_a_write_but_the_entry(tmp_path: Path) -> None:
    KernelCache(tmp_path).put(ENTRY)
    KernelCache(tmp_path).put(ENTRY)
    assert [path.name for path in (tmp_path / "sm_90").iterdir()] == [ENTRY.key + SUFFIX]


def test_a_failed_write_keeps_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KernelCache(tmp_path)
    store.put(ENTRY)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EPCacheError, match="No space left"):
        store.put(entry(code=b"other"))
    assert store.get("sm_90", ENTRY.key) == ENTRY
    assert len(list((tmp_path / "sm_90").iterdir())) == 1


def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops in between leaves the old entry, and none of half the size."""
    sizes: list[int] = []
    named: list[bool] = []

    def fsync(number: int) -> None:
        sizes.append(os.fstat(number).st_size)
        named.append((tmp_path / "sm_90" / f"{KEY}{SUFFIX}").exists())

    monkeypatch.setattr(os, "fsync", fsync)
    KernelCache(tmp_path).put(ENTRY)
    assert (sizes, named) == ([_file(tmp_path).stat().st_size], [False])


DAMAGE = {
    "a flipped bit in the code": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a flipped bit in the metadata": lambda data: data.replace(b"tiny", b"tinz"),
    "half of it": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "only the beginning": lambda data: data[:25],
    "nothing": lambda data: b"",
    "something else": lambda data: b"\x7fELF" + data,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    store = KernelCache(tmp_path)
    store.put(ENTRY)
    path = _file(tmp_path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        assert store.get("sm_90", ENTRY.key) is None
    assert str(path) in caplog.text
    assert "corrupt" in caplog.text
    (listed,) = store.entries()
    assert isinstance(listed, CorruptEntry)
    assert (listed.key, listed.arch) == (ENTRY.key, "sm_90")
    store.put(ENTRY)
    assert store.get("sm_90", ENTRY.key) == ENTRY


def _lock(store: KernelCache) -> None:
    with store.locked("sm_90", ENTRY.key):
        pass


@pytest.mark.parametrize("action", [lambda store: store.put(ENTRY), _lock], ids=["put", "lock"])
def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path, action: Callable[[KernelCache], None]) -> None:
    (tmp_path / "file").write_text("not a folder")  # also a user who may write everything cannot write below it
    store = KernelCache(tmp_path / "file" / "cache")
    assert store.get("sm_90", ENTRY.key) is None
    with pytest.raises(EPCacheError) as caught:
        action(store)
    assert str(store.folder) in str(caught.value)
    assert "DEEPEP_RT_CACHE_DIR" in str(caught.value)


@pytest.mark.parametrize("action", [KernelCache.entries, KernelCache.clear], ids=["entries", "clear"])
@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_a_folder_that_is_none_is_not_taken_for_empty(tmp_path: Path, name: str, action: Callable[[KernelCache], object]) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EPCacheError, match=r"file.* cannot be read: .*Not a directory.*DEEPEP_RT_CACHE_DIR"):
        action(KernelCache(tmp_path / name))
    assert (tmp_path / "file").read_text() == "not a folder"


def test_clear_counts_and_removes_everything(tmp_path: Path) -> None:
    store = KernelCache(tmp_path)
    assert store.clear() == 0
    store.put(ENTRY)
    store.put(entry(OTHER, "sm_80", kernel="other"))
    with store.locked("sm_80", OTHER):
        pass
    (tmp_path / "sm_80" / f".{OTHER}.0123abcd.tmp").write_bytes(b"")  # a process died here
    assert store.clear() == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.entries() == []


def test_two_may_clear_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = KernelCache(tmp_path), os.unlink
    store.put(ENTRY)

    def late(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        real(*arguments, **options)

    monkeypatch.setattr(os, "unlink", late)
    store.clear()
    assert not list(tmp_path.glob("*/*"))


def test_a_lock_is_for_one_at_a_time_and_waiting_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KernelCache(tmp_path)
    with store.locked("sm_90", KEY) as first:
        assert first
        with store.locked("sm_90", OTHER) as other:
            assert other, "each key has its own lock"
        with store.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second, "somebody holds it: do without"
    assert "compiling without waiting" in caplog.text
    with store.locked("sm_90", KEY, timeout_s=0.05) as again:
        assert again


def test_waiting_outlasts_the_slowest_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linking NVSHMEM takes 124 s for sm_100, on a fast machine."""
    store, now, holder = KernelCache(tmp_path), 0.0, ExitStack()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 300:
            holder.close()

    for module in (cache, cache_lock):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert holder.enter_context(store.locked("sm_100", KEY))
    with store.locked("sm_100", KEY) as got:
        assert got
    assert 300 < now < 301


@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EIO", "ESTALE"])
def test_what_cannot_be_locked_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(getattr(errno, error), "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with KernelCache(tmp_path).locked("sm_90", KEY, timeout_s=60) as got:
        assert not got


def test_a_lock_that_another_user_left_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = KernelCache(tmp_path), os.open

    def refuse(path: Path, *arguments: int, **options: int) -> int:
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EPCacheError, match="Permission denied"), store.locked("sm_90", ENTRY.key):
        pytest.fail("the folder cannot be written, and that is said before anything is compiled")
    (tmp_path / "sm_90" / f"{ENTRY.key}.lock").write_text("")
    with store.locked("sm_90", ENTRY.key) as got:
        assert not got
        store.put(ENTRY)
    assert store.get("sm_90", ENTRY.key) == ENTRY


@pytest.mark.parametrize("step", ["fchmod", "replace"])
def test_an_entry_survives_that_the_cache_is_cleared_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store, real, cleared = KernelCache(tmp_path), getattr(os, step), []

    def late(*arguments: object, **options: object) -> None:
        if not cleared:
            cleared.append(store.clear())
            for path in tmp_path.glob("*/.*.tmp"):  # as where there are no locks
                path.unlink()
        real(*arguments, **options)

    monkeypatch.setattr(os, step, late)
    store.put(ENTRY)
    assert cleared
    assert store.get("sm_90", ENTRY.key) == ENTRY
    assert len(list((tmp_path / "sm_90").iterdir())) == 1
