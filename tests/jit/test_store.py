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
from deepep_rt.jit.store import SUFFIX, CorruptEntry, KernelCache, SavedFiles, pack

ENTRY = entry(code=bytes(range(256)) * 5)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    cache = KernelCache(tmp_path / "cache")
    cache.put(entry())
    return cache


# --- damage ------------------------------------------------------------------------------------------------------------------


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Make damage that changes the content of a file."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _described(info: dict[str, Any] | bytes, code: bytes = b"code", length: int | None = None) -> Callable[[Path], object]:
    """Make damage that gives an entry this description, with a valid checksum."""
    text = info if isinstance(info, bytes) else json.dumps(info).encode()
    body = (len(text) if length is None else length).to_bytes(8, "little") + text + code
    return _changed(lambda data: data[: data.index(b"\n") + 1] + hashlib.sha256(body).digest() + body)


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Make damage that puts something else in place of a file."""
    return lambda path: (path.rename(path.parents[2] / "target"), make(path))


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call that must end within a time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the call does not end"
    return found[0]


INFO = {**entry().info, "key": KEY}
NO_JSON, OTHER_FIELDS, WRONG = (
    "its description is no JSON object",
    "its description has other fields",
    "its description ",
)
OTHER_KERNEL, NO_FILE = "it is the entry of another kernel", "it cannot be read: it is no regular file"
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
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in the code": (_changed(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "wrong checksum"),
    "a flipped bit in the metadata": (_changed(lambda data: data.replace(b"tiny", b"tinz")), "wrong checksum"),
    "half of it": (_changed(lambda data: data[: len(data) // 2]), "wrong checksum"),
    "one byte less": (_changed(lambda data: data[:-1]), "wrong checksum"),
    "one byte more": (_changed(lambda data: data + b"\0"), "wrong checksum"),
    "only the beginning": (_changed(lambda data: data[:25]), "wrong checksum"),
    "nothing": (_changed(lambda data: b""), "no entry of this version"),
    "something else": (_changed(lambda data: b"\x7fELF" + data), "no entry of this version"),
    "an earlier version": (_changed(lambda data: b"deepep_rt kernel 1\n" + bytes(100)), "no entry of this version"),
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
    "more code than described": (_described(INFO, code=b"longer than the metadata says"), OTHER_KERNEL),
    "a description of 0 bytes": (_described(INFO, length=0), NO_JSON),
    "a description of 2**64 - 1 bytes": (_described(INFO, length=2**64 - 1), NO_JSON),
    "a description that is one byte shorter": (_described(INFO, length=len(json.dumps(INFO)) - 1), NO_JSON),
    "of another key, such as `route` for other ranks": (_changed(lambda data: pack(entry(OTHER))), OTHER_KERNEL),
    "of another architecture": (_changed(lambda data: pack(entry(arch="sm_80"))), OTHER_KERNEL),
    "for all to write": (lambda path: path.chmod(0o646), "every user may write it"),
    "a link": (_replaced(lambda path: path.symlink_to(path.parents[2] / "target")), NO_FILE),
    "a FIFO": (_replaced(os.mkfifo), NO_FILE),
    "a folder": (_replaced(Path.mkdir), NO_FILE),
}
"""What happens to a file, and the beginning of the reason why a reader refuses it."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_refused_and_replaced(cache: KernelCache, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    change, expected = DAMAGE[damage]
    path = file_of(cache)
    cache.put(entry(OTHER))
    change(path)
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        assert within(10, lambda: cache.get("sm_90", KEY)) is None
    assert f"{path} is corrupt ({expected}" in caplog.text
    good, listed = cache.entries()
    assert good == entry(OTHER)
    assert isinstance(listed, CorruptEntry)
    assert (listed.key, listed.arch) == (KEY, "sm_90")
    assert listed.reason.startswith(expected)
    assert listed.reason.isprintable()
    if damage != "a folder":
        cache.put(entry())
        assert cache.get("sm_90", KEY) == entry()
        assert not path.is_symlink()
        change(path)
    is_ours = stat.S_ISREG(path.lstat().st_mode) and path.read_bytes().startswith(b"deepep_rt kernel ")
    assert cache.clear() == 1 + is_ours, "a file that starts in another way may be of another program"
    assert os.path.lexists(path) != is_ours


def test_a_description_with_a_valid_checksum_is_read(cache: KernelCache) -> None:
    """The changes of the table fail for their own reason."""
    _described(INFO)(file_of(cache))
    assert cache.get("sm_90", KEY) == entry()


def test_get_returns_what_put_wrote(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new" / "folder")
    assert (cache.entries(), cache.clear(), cache.get("sm_90", KEY)) == ([], 0, None)
    for _ in range(2):
        cache.put(ENTRY)
        assert cache.get("sm_90", KEY) == ENTRY
    assert cache.get("sm_80", KEY) is None
    assert cache.entries() == [ENTRY]
    assert list((cache.folder / "sm_90").iterdir()) == [file_of(cache)]
    cache.put(entry(OTHER, "sm_80", kernel="other"))
    assert [found.arch for found in cache.entries()] == ["sm_80", "sm_90"]
    assert cache.clear() == 2


@pytest.mark.parametrize(
    ("chosen", "base", "home", "account", "folder"),
    [
        ("/chosen", "/base", "/home", "/account", "/chosen"),
        ("", "/base", "/home", "/account", "/base/deepep_rt"),
        *(("", base, "/home", "/account", "/home/.cache/deepep_rt") for base in ("", "base", "./base", "~/base")),
        # An empty or relative HOME counts as unset. Otherwise each folder in which a program starts gets a cache.
        *(
            (chosen, None, home, "/account" if folder else "", folder)
            for chosen, folder in (("", "/account/.cache/deepep_rt"), ("~/x/y", "/account/x/y"), ("~", "/account"), ("~", None))
            for home in ("", "home", ".")
        ),
        ("~nosuchuser/x", None, "/home", "/account", None),
        (None, None, None, None, None),  # as in a container without an account for the user
    ],
)
def test_the_environment_sets_the_folder(
    monkeypatch: pytest.MonkeyPatch,
    chosen: str | None,
    base: str | None,
    home: str | None,
    account: str | None,
    folder: str | None,
) -> None:
    accounts = {} if account is None else {os.getuid(): SimpleNamespace(pw_dir=account)}
    monkeypatch.setattr(pwd, "getpwuid", accounts.__getitem__)
    for name, value in (("DEEPEP_RT_CACHE_DIR", chosen), ("XDG_CACHE_HOME", base), ("HOME", home)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if folder is not None:
        assert KernelCache().folder == Path(folder)
        return
    with pytest.raises(EPConfigError, match=rf"DEEPEP_RT_CACHE_DIR='{chosen or ''}'; expected .* no home folder"):
        KernelCache()


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


def _lock(cache: KernelCache) -> bool:
    with cache.locked("sm_90", KEY, timeout_s=60) as got:
        return got


ACTIONS = {"put": lambda cache: cache.put(ENTRY), "lock": _lock, "entries": KernelCache.entries, "clear": KernelCache.clear}


@pytest.mark.parametrize("name", ["file", "file/cache"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_file_in_place_of_the_folder_raises(tmp_path: Path, name: str, action: str) -> None:
    (tmp_path / "file").write_text("not a folder")  # even root cannot write below a file
    cache = KernelCache(tmp_path / name)
    assert cache.get("sm_90", KEY) is None
    message = "read: .*Not a directory" if action in ("entries", "clear") else "written: "
    with pytest.raises(EPCacheError, match=rf"{cache.folder} cannot be {message}.*DEEPEP_RT_CACHE_DIR"):
        ACTIONS[action](cache)
    assert (tmp_path / "file").read_text() == "not a folder"


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


def test_an_entry_that_cannot_be_read(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store, "read_file", fail)
    assert cache.get("sm_90", KEY) is None
    assert "is corrupt (it cannot be read: Input/output error)" in caplog.text


@pytest.mark.parametrize("obstacle", ["ENOLCK", "ENOSYS", "EIO", "ESTALE", "link", "FIFO"])
def test_an_entry_that_cannot_be_locked(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    lock = file_of(cache).with_suffix(".lock")

    def unsupported(*_: object) -> None:
        raise OSError(getattr(errno, obstacle), "No locks available")

    if obstacle == "link":
        lock.symlink_to("made")
    elif obstacle == "FIFO":
        os.mkfifo(lock)
    else:
        monkeypatch.setattr(fcntl, "flock", unsupported)
    with caplog.at_level(logging.DEBUG, logger="deepep_rt"):
        assert within(10, lambda: _lock(cache)) is False
    assert f"{lock} {'is not a regular file' if obstacle in ('link', 'FIFO') else 'cannot be locked'}" in caplog.text
    assert not (lock.parent / "made").exists()


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


# --- links, files of other programs, and locks ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("part", "mode", "owner", "message"),
    [
        (".", 0o755, 1234, "user 1234 owns it"),
        ("sm_90", 0o755, 1234, "user 1234 owns it"),
        (".", 0o777, 1234, "user 1234 owns it"),
        ("sm_90", 0o777, 1000, "every user may write it"),
        ("sm_90", 0o707, 1000, "every user may write it"),
        ("sm_90", 0o775, 1000, "group 54321 may write it"),
    ],
)
def test_a_folder_that_others_own_or_may_write_raises(
    cache: KernelCache,
    set_owner: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    mode: int,
    owner: int,
    message: str,
) -> None:
    """Every access raises, unless DEEPEP_RT_TRUST_CACHE turns the error into a warning."""
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda group: False)
    monkeypatch.setattr(trusted_files, "_group_name", lambda group: "54321")
    (cache.folder / part).chmod(mode)
    set_owner(cache.folder / part, owner)
    for action in (lambda: cache.get("sm_90", KEY), lambda: cache.put(entry(OTHER)), cache.entries, lambda: _lock(cache)):
        with pytest.raises(EPCacheError, match=rf"{message}.*DEEPEP_RT_CACHE_DIR.*DEEPEP_RT_TRUST_CACHE=1"):
            action()
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        for _ in range(2):
            assert cache.get("sm_90", KEY) == entry()
    assert caplog.text.count(f"{message}; its code is run because DEEPEP_RT_TRUST_CACHE is set") == 1
    monkeypatch.delenv("DEEPEP_RT_TRUST_CACHE")
    assert cache.clear() == 1, "deleting runs no code, so clear needs no trust"


def test_an_entry_of_another_user_is_corrupt(
    cache: KernelCache, set_owner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_owner(file_of(cache), 1234)
    assert cache.get("sm_90", KEY) is None
    assert reason(cache) == "user 1234 owns it"
    cache.put(entry())
    set_owner(file_of(cache), 1000)
    assert cache.get("sm_90", KEY) == entry(), "put replaces the file"
    set_owner(file_of(cache), 1234)
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    assert cache.get("sm_90", KEY) == entry()
    assert f"{file_of(cache)}: user 1234 owns it; its code is run" in caplog.text


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


def test_a_measurement_that_cannot_be_saved_is_no_error(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved.write_text("a file")
    with caplog.at_level(logging.INFO, logger="deepep_rt"):
        assert SAVED.save(MACHINE, {"number": 3}) is None
    assert "saved numbers cannot be saved: " in caplog.text
    assert (load(), SAVED.all(), SAVED.clear()) == (None, [], 0)
