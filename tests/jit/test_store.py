"""The store on disk: kernels and measurements are returned as they were written, or refused. Damage, locks, clearing and owners."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from entries import KEY, OTHER, entry, file_of, reason
from paths import HELPERS

from deepep_rt import EPCacheError, EPConfigError
from deepep_rt.jit import store, trusted_files
from deepep_rt.jit.store import SUFFIX, CorruptEntry, KernelCache, SavedFiles

ENTRY = entry(code=bytes(range(256)) * 5)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    cache = KernelCache(tmp_path / "cache")
    cache.put(entry())
    return cache


# --- damage ------------------------------------------------------------------------------------------------------------------


def _described(info: dict[str, Any] | bytes, code: bytes = b"code", length: int | None = None) -> Callable[[bytes], bytes]:
    """Make a change that gives an entry this description, with a valid checksum."""
    text = info if isinstance(info, bytes) else json.dumps(info).encode()

    def change(data: bytes) -> bytes:
        body = (len(text) if length is None else length).to_bytes(8, "little") + text + code
        return data[: data.index(b"\n") + 1] + hashlib.sha256(body).digest() + body

    return change


INFO = {**entry().info, "key": KEY}
NO_JSON, OTHER_FIELDS, WRONG = "its description is no JSON object", "its description has other fields", "its description "
WRONG_VALUES = {
    "kernel": (3, "\x1b[31mred", "", "[red]"),
    "arch": (["sm_90"],),
    "constants": ([1], {"kA": "one"}, {"\x1b": 1}),
    "bytes": (-1, True, 10**400),
    "registers": ("ten",),
    "spill_loads": (1.5,),
    "dynamic_shared_bytes": (None,),
    "nvshmem": (1,),
    "compile_seconds": ("long", float("inf"), 10**400),
    "created": ("\x1b]0;title\x07", "\u202eright to left"),
    "versions": (None, {"nvrtc": 12}, {"nvrtc": "12\x9b31m"}),
}
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a flipped bit in the code": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "wrong checksum"),
    "a flipped bit in the metadata": (lambda data: data.replace(b"tiny", b"tinz"), "wrong checksum"),
    "half of it": (lambda data: data[: len(data) // 2], "wrong checksum"),
    "one byte less": (lambda data: data[:-1], "wrong checksum"),
    "one byte more": (lambda data: data + b"\0", "wrong checksum"),
    "only the beginning": (lambda data: data[:25], "wrong checksum"),
    "nothing": (lambda data: b"", "no entry of this version"),
    "something else": (lambda data: b"\x7fELF" + data, "no entry of this version"),
    "an earlier version": (lambda data: b"deepep_rt kernel 1\n" + bytes(100), "no entry of this version"),
    **{
        f"the description {text[:20]!r}": (_described(text), NO_JSON)
        for text in (b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"[]", b"3", b"null")
    },
    **{
        f"{name}={value!r:.20}": (_described({**INFO, name: value}), WRONG)
        for name, values in WRONG_VALUES.items()
        for value in values
    },
    **{
        f"no {name}": (_described({field: value for field, value in INFO.items() if field != name}), OTHER_FIELDS)
        for name in INFO
    },
    "no field": (_described(b"{}"), OTHER_FIELDS),
    "one field more": (_described({**INFO, "more": 1}), OTHER_FIELDS),
    "more code than described": (_described(INFO, code=b"longer than the metadata says"), "it is the entry of another kernel"),
    "a description of 0 bytes": (_described(INFO, length=0), NO_JSON),
    "a description of 2**64 - 1 bytes": (_described(INFO, length=2**64 - 1), NO_JSON),
    "a description that is one byte shorter": (_described(INFO, length=len(json.dumps(INFO)) - 1), NO_JSON),
}
"""What happens to a file, and the beginning of the reason why a reader refuses it."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_refused_and_replaced(cache: KernelCache, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    change, expected = DAMAGE[damage]
    path = file_of(cache)
    path.write_bytes(change(path.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        assert cache.get("sm_90", KEY) is None
    assert f"{path} is corrupt ({expected}" in caplog.text
    (listed,) = cache.entries()
    assert isinstance(listed, CorruptEntry)
    assert (listed.key, listed.arch) == (KEY, "sm_90")
    assert listed.reason.startswith(expected)
    assert listed.reason.isprintable()
    cache.put(entry())
    assert cache.get("sm_90", KEY) == entry()
    path.write_bytes(change(path.read_bytes()))
    is_ours = path.read_bytes().startswith(b"deepep_rt kernel ")
    assert cache.clear() == is_ours, "a file that starts in another way may be of another program"


def test_a_description_with_a_valid_checksum_is_read(cache: KernelCache) -> None:
    """The changes of the table fail for their own reason."""
    file_of(cache).write_bytes(_described(INFO)(file_of(cache).read_bytes()))
    assert cache.get("sm_90", KEY) == entry()


def test_get_returns_what_put_wrote(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new" / "folder")
    assert cache.entries() == []
    assert cache.get("sm_90", ENTRY.key) is None
    cache.put(ENTRY)
    assert cache.get("sm_90", ENTRY.key) == ENTRY
    assert cache.get("sm_80", ENTRY.key) is None
    assert cache.entries() == [ENTRY]
    assert file_of(cache).exists()


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
    assert (sizes, named) == ([file_of(KernelCache(tmp_path)).stat().st_size], [False])


@pytest.mark.parametrize(
    "action", [lambda cache: cache.put(ENTRY), lambda cache: cache.locked("sm_90", KEY).__enter__()], ids=["put", "lock"]
)
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

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
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


def test_an_entry_under_another_key_is_corrupt(cache: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise `route` for 4 ranks could be loaded as `route` for 8."""
    shutil.copy(file_of(cache), file_of(cache, OTHER))
    assert cache.get("sm_90", OTHER) is None
    assert "it is the entry of another kernel" in caplog.text
    assert cache.get("sm_90", KEY) == entry()
    assert [type(found).__name__ for found in cache.entries()] == ["Entry", "CorruptEntry"]


def test_an_entry_of_another_architecture_is_corrupt(cache: KernelCache) -> None:
    (cache.folder / "sm_80").mkdir()
    shutil.copy(file_of(cache), file_of(cache, arch="sm_80"))
    assert cache.get("sm_80", KEY) is None


@pytest.mark.parametrize(
    ("kernel", "versions", "is_found"),
    [
        (None, None, True),
        ("tiny", {"nvrtc": "12.9.86"}, True),
        ("tiny", {"nvrtc": "12.9.86", "deepep_rt": "1.0"}, True),
        ("route", {"nvrtc": "12.9.86"}, False),
        ("tiny", {"nvrtc": "12.9.41"}, False),
        ("tiny", {"nvrtc": "12.9.86", "nvshmem": "3.4.5"}, False),
    ],
)
def test_kernel_and_versions_are_compared(
    cache: KernelCache, caplog: pytest.LogCaptureFixture, kernel: str | None, versions: dict[str, str] | None, is_found: bool
) -> None:
    found = cache.get("sm_90", KEY, kernel, versions)
    assert found == (entry() if is_found else None)
    assert ("it holds tiny built with" in caplog.text) == (not is_found)


def test_a_file_above_the_limit_is_corrupt(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    size = file_of(cache).stat().st_size
    monkeypatch.setattr(store, "MAX_ENTRY_BYTES", size)
    assert cache.get("sm_90", KEY) == entry()
    monkeypatch.setattr(store, "MAX_ENTRY_BYTES", size - 1)
    assert reason(cache) == f"it has more than {size - 1} bytes"


# --- files of other kinds, links and locks ------------------------------------------------------------------------------------


def make_link(path: Path) -> None:
    path.symlink_to(shutil.copy(path.parent / f"{KEY}{SUFFIX}", path.parents[2] / "target"))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call that must end within a time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the call does not end"
    return found[0]


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from deepep_rt.jit.store import KernelCache
from entries import entry
cache, end, done = KernelCache(Path(sys.argv[1])), time.monotonic() + 2, 0
while time.monotonic() < end:
    key = f"{done % 4:064x}"
    with cache.locked("sm_90", key):
        if cache.get("sm_90", key) is None:
            cache.put(entry(key))
    done += 1
assert done
"""


@pytest.mark.parametrize("make", [make_link, os.mkfifo, Path.mkdir], ids=["link", "FIFO", "folder"])
def test_only_regular_files_are_entries(cache: KernelCache, make: Callable[[Path], None]) -> None:
    path = file_of(cache, OTHER)
    make(path)
    found = within(10, lambda: cache.get("sm_90", OTHER))
    assert found is None
    assert [found.key for found in cache.entries() if isinstance(found, CorruptEntry)] == [OTHER]
    assert cache.clear() == 1
    assert os.path.lexists(path)


@pytest.mark.parametrize("make", [make_link, os.mkfifo], ids=["link", "FIFO"])
def test_put_replaces_a_link_or_a_fifo(cache: KernelCache, make: Callable[[Path], None]) -> None:
    make(file_of(cache, OTHER))
    cache.put(entry(OTHER))
    assert cache.get("sm_90", OTHER) == entry(OTHER)
    assert not file_of(cache, OTHER).is_symlink()


def test_a_lock_does_not_follow_a_link(cache: KernelCache, tmp_path: Path) -> None:
    file_of(cache).with_suffix(".lock").symlink_to(tmp_path / "made")
    with cache.locked("sm_90", KEY, timeout_s=0.1) as got:
        assert not got
    assert not (tmp_path / "made").exists()


def test_a_fifo_is_not_locked(cache: KernelCache) -> None:
    os.mkfifo(file_of(cache).with_suffix(".lock"))

    def lock() -> bool:
        with cache.locked("sm_90", KEY, timeout_s=0.1) as got:
            return got

    assert within(10, lock) is False


def test_the_folder_of_an_architecture_may_not_be_a_link(cache: KernelCache) -> None:
    """The cache folder itself may be a link, which the user chose."""
    (cache.folder / "sm_80").symlink_to(cache.folder / "sm_90")
    assert cache.get("sm_80", KEY) is None
    with pytest.raises(EPCacheError, match="no folder, or a link to one"):
        cache.put(entry(arch="sm_80"))
    assert len(cache.entries()) == 1
    linked = KernelCache(cache.folder.parent / "linked")
    linked.folder.symlink_to(cache.folder)
    assert linked.get("sm_90", KEY) == entry()
    (cache.folder / "sm_80").unlink()
    (cache.folder / "sm_80").write_text("no folder")
    assert linked.clear() == 1
    assert (cache.folder / "sm_80").exists()


@pytest.mark.parametrize("arch", ["..", "../other", "hopper", ""])
def test_other_names_are_no_architectures(cache: KernelCache, arch: str) -> None:
    shutil.copytree(cache.folder / "sm_90", cache.folder / "hopper")
    assert cache.get(arch, KEY) is None
    with pytest.raises(EPCacheError, match="no architecture has this name"):
        cache.put(entry(arch=arch))
    assert len(cache.entries()) == 1


def test_clear_keeps_files_of_other_programs(cache: KernelCache) -> None:
    """An earlier version deleted a uv.lock."""
    inside = cache.folder / "sm_90"
    ours = file_of(cache).read_bytes()
    others = {
        cache.folder / "uv.lock": b"",
        cache.folder / f"{OTHER}{SUFFIX}": ours,
        cache.folder / "project" / "uv.lock": b"",
        cache.folder / "project" / f"{OTHER}{SUFFIX}": ours,
        cache.folder / "project" / f".{OTHER}.0123abcd.tmp": ours,
        inside / "uv.lock": b"",
        inside / "Cargo.lock": b"text",
        inside / f"{KEY}.lock.old": b"",
        inside / f"{OTHER}.lock": b"locks of this library are empty",
        inside / f"{OTHER}{SUFFIX}": b"of another program",
        inside / f"{'ef' * 32}{SUFFIX}": b"",
        inside / f"{KEY[1:]}{SUFFIX}": ours,
        inside / f"{KEY.upper()}{SUFFIX}": ours,
        inside / "linux.kernel": ours,
        inside / ".some.tmp": b"",
        inside / ".abcdefgh.tmp": b"",
        inside / f".{OTHER}.0123abcd.tmp": b"of another program",
    }
    for path, data in others.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (inside / f".{KEY}.0123abcd.tmp").write_bytes(ours[:30])
    (inside / f".{KEY}.3210dcba.tmp").write_bytes(b"")
    (inside / ".abcdefg_.tmp").write_bytes(ours)
    with cache.locked("sm_90", KEY):
        pass
    assert cache.clear() == 1
    assert {path for path in cache.folder.rglob("*") if path.is_file()} == set(others)


def test_clear_keeps_locks_in_use(cache: KernelCache) -> None:
    with cache.locked("sm_90", KEY) as got:
        assert got
        assert cache.clear() == 1
        assert file_of(cache).with_suffix(".lock").exists()
        with cache.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second
    assert cache.clear() == 0
    assert list((cache.folder / "sm_90").iterdir()) == []


@pytest.mark.parametrize("is_created_again", [False, True])
def test_a_process_that_waits_for_a_deleted_lock_gets_the_new_one(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, is_created_again: bool
) -> None:
    """Otherwise two processes would hold the lock of one entry: one of the deleted file, one of the new file."""
    lock, real = file_of(cache).with_suffix(".lock"), fcntl.flock
    deleted = []

    def flock(number: int, how: int) -> None:
        if not deleted:
            deleted.append(lock.unlink())
            if is_created_again:
                lock.touch()
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.locked("sm_90", KEY) as first:
        assert first
        with cache.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second


def test_all_descriptors_are_closed(cache: KernelCache) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file_of(cache, OTHER).symlink_to("nowhere")
    os.mkfifo(file_of(cache, "ef" * 32))
    for _ in range(3):
        cache.get("sm_90", KEY), cache.get("sm_90", OTHER), cache.get("sm_90", "ef" * 32), cache.get("sm_80", KEY)
        with cache.locked("sm_90", KEY), cache.locked("sm_90", KEY, timeout_s=0):
            cache.put(entry())
        cache.entries(), cache.clear()
    assert set(os.listdir("/proc/self/fd")) == before


def test_builders_do_not_fail_while_the_cache_is_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    words = [sys.executable, "-W", "error", "-c", BUILDER, str(folder), "", str(HELPERS)]
    builders = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    removed = at_last_removal = 0
    while any(builder.poll() is None for builder in builders):
        removed += KernelCache(folder).clear()
        KernelCache(folder).entries()
        if removed % 3 == 0 and removed != at_last_removal:  # once: builders may not win against a loop of removals
            shutil.rmtree(folder, ignore_errors=True)
            at_last_removal = removed
    assert [builder.communicate()[1] for builder in builders] == [""] * 3
    assert removed > 0


# --- owners and permissions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def set_owner(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a path appear to belong to another user."""
    real, owners = os.fstat, {}

    def status_of(number: int) -> os.stat_result:
        status = real(number)
        owner = owners.get((status.st_dev, status.st_ino), status.st_uid)
        return os.stat_result([*status[:4], owner, *status[5:]])

    def give(path: Path, user: int) -> None:
        status = path.stat()
        owners[status.st_dev, status.st_ino] = user

    monkeypatch.setattr(trusted_files, "status_of", status_of)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for path in (cache.folder, cache.folder / "sm_90", file_of(cache)):
        give(path, 1000)
    return give


def check_refused(cache: KernelCache, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Check that every access raises, and that DEEPEP_RT_TRUST_CACHE turns the error into a warning."""
    lock = cache.locked("sm_90", KEY)
    for action in (lambda: cache.get("sm_90", KEY), lambda: cache.put(entry(OTHER)), cache.entries, lock.__enter__):
        with pytest.raises(EPCacheError, match=message) as caught:
            action()
        assert "DEEPEP_RT_CACHE_DIR" in str(caught.value)
        assert "DEEPEP_RT_TRUST_CACHE=1" in str(caught.value)
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        for _ in range(2):
            assert cache.get("sm_90", KEY) == entry()
    assert caplog.text.count("because DEEPEP_RT_TRUST_CACHE is set") == 1
    monkeypatch.delenv("DEEPEP_RT_TRUST_CACHE")
    assert cache.clear() == 1, "deleting runs no code, so clear needs no trust"


@pytest.mark.parametrize("part", [".", "sm_90"])
def test_a_folder_of_another_user_raises(
    cache: KernelCache,
    set_owner: Callable[..., None],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_owner(cache.folder / part, 1234)
    check_refused(cache, "user 1234 owns it", monkeypatch, caplog)


def test_a_world_writable_folder_of_another_user_raises(
    cache: KernelCache, set_owner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder.chmod(0o777)
    set_owner(cache.folder, 1234)
    check_refused(cache, "user 1234 owns it", monkeypatch, caplog)


@pytest.mark.parametrize(
    ("mode", "message"), [(0o777, "every user may write it"), (0o707, "every user"), (0o775, "group 54321 may")]
)
def test_a_folder_that_other_users_may_write_raises(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int, message: str
) -> None:
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda group: False)
    monkeypatch.setattr(trusted_files, "_group_name", lambda group: "54321")
    (cache.folder / "sm_90").chmod(mode)
    check_refused(cache, message, monkeypatch, caplog)


def test_an_entry_that_other_users_own_or_may_write_is_corrupt(
    cache: KernelCache, set_owner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_of(cache).chmod(0o646)
    assert cache.get("sm_90", KEY) is None
    assert reason(cache) == "every user may write it"
    file_of(cache).chmod(0o644)
    assert cache.get("sm_90", KEY) == entry()
    set_owner(file_of(cache), 1234)
    assert cache.get("sm_90", KEY) is None
    assert reason(cache) == "user 1234 owns it"
    cache.put(entry())
    set_owner(file_of(cache), 1000)
    assert cache.get("sm_90", KEY) == entry(), "put replaces the file"
    set_owner(file_of(cache), 1234)
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    assert cache.get("sm_90", KEY) == entry()


def test_a_shared_cache_of_root_works(cache: KernelCache, set_owner: Callable[..., None]) -> None:
    for path in (cache.folder, cache.folder / "sm_90", file_of(cache)):
        set_owner(path, 0)
    cache.folder.chmod(0o555)
    assert cache.get("sm_90", KEY) == entry()
    assert cache.entries() == [entry()]
    cache.folder.chmod(0o755)


def test_a_world_writable_folder_of_this_user_works(cache: KernelCache) -> None:
    """`/tmp` is such a folder, and an empty volume of a container. Other users own the files that they add there."""
    shutil.rmtree(cache.folder)
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    cache.put(entry())
    assert cache.get("sm_90", KEY) == entry()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_only_the_owner_may_write_new_files(tmp_path: Path, umask: int) -> None:
    cache, before = KernelCache(tmp_path / "new" / "cache"), os.umask(umask)
    try:
        cache.put(entry())
        with cache.locked("sm_90", KEY):
            pass
    finally:
        os.umask(before)
    assert cache.get("sm_90", KEY) == entry()
    modes = {path: path.stat().st_mode & 0o777 for path in (cache.folder, cache.folder / "sm_90", file_of(cache))}
    assert all(not mode & 0o022 for mode in modes.values())
    assert modes[file_of(cache)] == 0o644, "other users of a shared cache read it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_trusts_other_owners_only_in_enclosed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = trusted_files._folders_above  # pytest's folders are in /tmp, which other users may write
    monkeypatch.setattr(trusted_files, "_folders_above", lambda path: [at for at in above(path) if at.is_relative_to(tmp_path)])
    (tmp_path / "shared").mkdir()
    volume, planted = KernelCache(tmp_path / "volume"), KernelCache(tmp_path / "shared" / "planted")
    for cache in (volume, planted):
        cache.put(entry())
        for path in (cache.folder, cache.folder / "sm_90", file_of(cache)):
            os.chown(path, 12345, 12345)
    (tmp_path / "shared").chmod(0o1777)
    assert volume.get("sm_90", KEY) == entry()
    with pytest.raises(EPCacheError, match="user 12345 owns it"):
        planted.get("sm_90", KEY)
    volume.folder.chmod(0o777)
    with pytest.raises(EPCacheError, match="sm_90: user 12345 owns it"):
        volume.get("sm_90", KEY)


# --- measurements ------------------------------------------------------------------------------------------------------------

SAVED = SavedFiles(
    "numbers", "saved numbers", "machine", {"machine": lambda value: True, "number": lambda value: type(value) is int}
)
MACHINE = {"name": "a"}
FOREIGN = {"format": 1, "machine": {"name": "b"}, "number": 3}
SAVED_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: path.write_text(""), "it is not one that this version wrote"),
    "half of it": (lambda path: path.write_bytes(path.read_bytes()[:20]), "it is not one that this version wrote"),
    "deeply nested": (lambda path: path.write_text("[" * 100_000), "it is not one that this version wrote"),
    "of another key": (lambda path: path.write_text(json.dumps(FOREIGN)), "it is not one that this version wrote"),
    "too large": (lambda path: path.write_bytes(bytes(1 + (1 << 20))), "it has more than 1048576 bytes"),
    "for all to write": (lambda path: path.chmod(0o666), "every user may write it"),
    "in a folder for all to write": (lambda path: path.parent.chmod(0o777), "every user may write it"),
    "a link": (lambda path: path.symlink_to(path.rename(path.with_suffix(".old"))), "it cannot be read: it is no regular file"),
    "a FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "it cannot be read: it is no regular file"),
}
"""What happens to a file, and the reason why a reader ignores it."""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the measurements, which does not exist yet."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    return tmp_path / "numbers"


def load() -> int | None:
    return SAVED.load(MACHINE, lambda document: document["number"])


@pytest.mark.parametrize("damage", SAVED_DAMAGE)
def test_a_damaged_measurement_is_ignored(saved: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    change, expected = SAVED_DAMAGE[damage]
    path = SAVED.save(MACHINE, {"number": 3})
    assert path is not None
    assert load() == 3
    change(path)
    assert load() is None
    assert f"saved numbers: {path} is ignored: {expected}" in caplog.text
    assert [document["machine"] for document in SAVED.all()] == ([{"name": "b"}] if damage == "of another key" else [])
    assert SAVED.clear() == stat.S_ISREG(path.lstat().st_mode if path.is_symlink() or path.exists() else stat.S_IFREG)


def test_measurements_are_found_listed_and_cleared(saved: Path) -> None:
    assert (load(), SAVED.all(), SAVED.clear()) == (None, [], 0)
    for number, name in ((3, "a"), (4, "b"), (5, "a")):
        SAVED.save({"name": name}, {"number": number})
    assert load() == 5
    assert sorted(document["number"] for document in SAVED.all()) == [4, 5]
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {0o644}, "other users of a shared cache read it"
    for name in ("mine.txt", ".abcdefgh.tmp"):
        (saved / name).write_text("kept")
    (saved / f".{KEY}.0123abcd.tmp").write_text("left by a process that died")
    assert SAVED.clear() == 2
    assert sorted(path.name for path in saved.iterdir()) == [".abcdefgh.tmp", "mine.txt"]


def test_a_measurement_that_cannot_be_saved_is_no_error(saved: Path) -> None:
    saved.write_text("a file")
    assert SAVED.save(MACHINE, {"number": 3}) is None
    assert (load(), SAVED.all(), SAVED.clear()) == (None, [], 0)
