"""The disk cache returns what was written, detects damage, and locks entries."""

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
from entries import KEY, OTHER, entry

from deepep_rt import EPCacheError, EPConfigError
from deepep_rt.jit import cache as cache_module
from deepep_rt.jit import cache_lock
from deepep_rt.jit.cache import SUFFIX, CorruptEntry, KernelCache

ENTRY = entry(code=bytes(range(256)) * 5)


def _file(folder: Path) -> Path:
    (path,) = folder.glob(f"*/*{SUFFIX}")
    return path


def test_get_returns_what_put_wrote(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new" / "folder")
    assert cache.entries() == []
    assert cache.get("sm_90", ENTRY.key) is None
    cache.put(ENTRY)
    assert cache.get("sm_90", ENTRY.key) == ENTRY
    assert cache.get("sm_80", ENTRY.key) is None
    assert cache.entries() == [ENTRY]
    assert _file(cache.folder).parent.name == "sm_90"


def test_the_environment_sets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "chosen"))
    assert KernelCache().folder == tmp_path / "chosen"
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = tmp_path / "home" / ".cache"
    for base, folder in (
        (str(tmp_path / "base"), tmp_path / "base"),
        ("", home),
        ("base", home),
        ("./base", home),
        ("~/base", home),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert KernelCache().folder == folder / "deepep_rt"


@pytest.mark.parametrize("home", ["", "home", "."])
def test_an_empty_or_relative_home_counts_as_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """Otherwise each folder in which a program starts gets a cache."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    accounts = {os.getuid(): SimpleNamespace(pw_dir=str(tmp_path))}
    monkeypatch.setattr(pwd, "getpwuid", accounts.__getitem__)
    for chosen, folder in (("", tmp_path / ".cache" / "deepep_rt"), ("~/x/y", tmp_path / "x" / "y"), ("~", tmp_path)):
        monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", chosen)
        assert KernelCache().folder == folder
    accounts[os.getuid()].pw_dir = ""
    with pytest.raises(EPConfigError, match="no home folder"):
        KernelCache()


def test_a_missing_home_folder_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(EPConfigError, match=r"DEEPEP_RT_CACHE_DIR='~nosuchuser/x'; expected .* no home folder"):
        KernelCache()
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container without an account for the user
    for name in ("DEEPEP_RT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EPConfigError, match=r"DEEPEP_RT_CACHE_DIR=''; expected .* no home folder"):
        KernelCache()


def test_a_write_leaves_only_the_entry(tmp_path: Path) -> None:
    KernelCache(tmp_path).put(ENTRY)
    KernelCache(tmp_path).put(ENTRY)
    assert [path.name for path in (tmp_path / "sm_90").iterdir()] == [ENTRY.key + SUFFIX]


def test_a_failed_write_keeps_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    cache.put(ENTRY)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EPCacheError, match="No space left"):
        cache.put(entry(code=b"other"))
    assert cache.get("sm_90", ENTRY.key) == ENTRY
    assert len(list((tmp_path / "sm_90").iterdir())) == 1


def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops in between leaves the old entry, not a part of the new one."""
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
def test_damage_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    cache = KernelCache(tmp_path)
    cache.put(ENTRY)
    path = _file(tmp_path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        assert cache.get("sm_90", ENTRY.key) is None
    assert str(path) in caplog.text
    assert "corrupt" in caplog.text
    (listed,) = cache.entries()
    assert isinstance(listed, CorruptEntry)
    assert (listed.key, listed.arch) == (ENTRY.key, "sm_90")
    cache.put(ENTRY)
    assert cache.get("sm_90", ENTRY.key) == ENTRY


def _lock(cache: KernelCache) -> None:
    with cache.locked("sm_90", ENTRY.key):
        pass


@pytest.mark.parametrize("action", [lambda cache: cache.put(ENTRY), _lock], ids=["put", "lock"])
def test_a_folder_that_cannot_be_written_raises(tmp_path: Path, action: Callable[[KernelCache], None]) -> None:
    (tmp_path / "file").write_text("not a folder")  # even root cannot write below a file
    cache = KernelCache(tmp_path / "file" / "cache")
    assert cache.get("sm_90", ENTRY.key) is None
    with pytest.raises(EPCacheError) as caught:
        action(cache)
    assert str(cache.folder) in str(caught.value)
    assert "DEEPEP_RT_CACHE_DIR" in str(caught.value)


@pytest.mark.parametrize("action", [KernelCache.entries, KernelCache.clear], ids=["entries", "clear"])
@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_a_file_in_place_of_the_folder_raises(tmp_path: Path, name: str, action: Callable[[KernelCache], object]) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EPCacheError, match=r"file.* cannot be read: .*Not a directory.*DEEPEP_RT_CACHE_DIR"):
        action(KernelCache(tmp_path / name))
    assert (tmp_path / "file").read_text() == "not a folder"


def test_clear_deletes_everything_and_counts_entries(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.clear() == 0
    cache.put(ENTRY)
    cache.put(entry(OTHER, "sm_80", kernel="other"))
    with cache.locked("sm_80", OTHER):
        pass
    (tmp_path / "sm_80" / f".{OTHER}.0123abcd.tmp").write_bytes(b"")  # left by a process that died
    assert cache.clear() == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert cache.entries() == []


def test_two_processes_may_clear_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real = KernelCache(tmp_path), os.unlink
    cache.put(ENTRY)

    def late(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        real(*arguments, **options)

    monkeypatch.setattr(os, "unlink", late)
    cache.clear()
    assert not list(tmp_path.glob("*/*"))


def test_one_process_holds_a_lock_and_waiting_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(tmp_path)
    with cache.locked("sm_90", KEY) as first:
        assert first
        with cache.locked("sm_90", OTHER) as other:
            assert other, "each key has its own lock"
        with cache.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second, "another process holds it"
    assert "compiling without waiting" in caplog.text
    with cache.locked("sm_90", KEY, timeout_s=0.05) as again:
        assert again


def test_waiting_lasts_longer_than_the_slowest_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linking NVSHMEM takes 124 s for sm_100 on a fast machine."""
    cache, now, holder = KernelCache(tmp_path), 0.0, ExitStack()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 300:
            holder.close()

    for module in (cache_module, cache_lock):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert holder.enter_context(cache.locked("sm_100", KEY))
    with cache.locked("sm_100", KEY) as got:
        assert got
    assert 300 < now < 301


@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EIO", "ESTALE"])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(getattr(errno, error), "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with KernelCache(tmp_path).locked("sm_90", KEY, timeout_s=60) as got:
        assert not got


def test_a_lock_file_of_another_user_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real = KernelCache(tmp_path), os.open

    def refuse(path: Path, *arguments: int, **options: int) -> int:
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EPCacheError, match="Permission denied"), cache.locked("sm_90", ENTRY.key):
        pytest.fail("the error must come before anything is compiled")
    (tmp_path / "sm_90" / f"{ENTRY.key}.lock").write_text("")
    with cache.locked("sm_90", ENTRY.key) as got:
        assert not got
        cache.put(ENTRY)
    assert cache.get("sm_90", ENTRY.key) == ENTRY


@pytest.mark.parametrize("step", ["fchmod", "replace"])
def test_put_succeeds_while_the_cache_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    cache, real, cleared = KernelCache(tmp_path), getattr(os, step), []

    def late(*arguments: object, **options: object) -> None:
        if not cleared:
            cleared.append(cache.clear())
            for path in tmp_path.glob("*/.*.tmp"):  # as on a file system without locks
                path.unlink()
        real(*arguments, **options)

    monkeypatch.setattr(os, step, late)
    cache.put(ENTRY)
    assert cleared
    assert cache.get("sm_90", ENTRY.key) == ENTRY
    assert len(list((tmp_path / "sm_90").iterdir())) == 1
