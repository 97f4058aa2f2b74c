"""The folder of the kernel cache may hold anything: what is not ours stays, what is not trusted is not run, what is odd is told."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import entry
from paths import HELPERS

from deepep_rt import EPCacheError
from deepep_rt.jit import cache
from deepep_rt.jit.cache import SUFFIX, CorruptEntry, KernelCache

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def store(tmp_path: Path) -> KernelCache:
    """A cache of one entry."""
    store = KernelCache(tmp_path / "cache")
    store.put(entry())
    return store


def file_of(store: KernelCache, key: str = KEY, arch: str = "sm_90") -> Path:
    return store.folder / arch / f"{key}{SUFFIX}"


def reason(store: KernelCache) -> str:
    (found,) = store.entries()
    assert isinstance(found, CorruptEntry)
    return found.reason


# --- an entry belongs to its key -----------------------------------------------------------------------------------------------------


def test_an_entry_under_the_name_of_another_is_none(store: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    """`route` for 4 ranks would be loaded as `route` for 8."""
    shutil.copy(file_of(store), file_of(store, OTHER))
    assert store.get("sm_90", OTHER) is None
    assert "it is the entry of another kernel" in caplog.text
    assert store.get("sm_90", KEY) == entry()
    assert [type(found).__name__ for found in store.entries()] == ["Entry", "CorruptEntry"]


def test_an_entry_of_another_architecture_is_none(store: KernelCache) -> None:
    (store.folder / "sm_80").mkdir()
    shutil.copy(file_of(store), file_of(store, arch="sm_80"))
    assert store.get("sm_80", KEY) is None


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
    store: KernelCache, caplog: pytest.LogCaptureFixture, kernel: str | None, versions: dict[str, str] | None, is_found: bool
) -> None:
    found = store.get("sm_90", KEY, kernel, versions)
    assert found == (entry() if is_found else None)
    assert ("it holds tiny built with" in caplog.text) == (not is_found)


# --- odd contents --------------------------------------------------------------------------------------------------------------------


def written(store: KernelCache, text: bytes, code: bytes = b"code", length: int | None = None) -> None:
    """Replace the entry by one with this description, and a checksum that is right."""
    data = file_of(store).read_bytes()
    body = (len(text) if length is None else length).to_bytes(8, "little") + text + code
    magic = data[: data.index(b"\n") + 1]
    file_of(store).write_bytes(magic + hashlib.sha256(body).digest() + body)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"[]", b"3", b"null", b"{}", b'{"kernel": "tiny"}'],
    ids=lambda text: repr(text[:20]),
)
def test_a_description_that_is_none_makes_an_entry_corrupt(store: KernelCache, text: bytes) -> None:
    written(store, text)
    assert store.get("sm_90", KEY) is None
    assert "its description" in reason(store)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel", 3),
        ("kernel", "\x1b[31mred"),
        ("kernel", ""),
        ("kernel", "[red]"),
        ("arch", ["sm_90"]),
        ("constants", [1]),
        ("constants", {"kA": "one"}),
        ("constants", {"\x1b": 1}),
        ("bytes", -1),
        ("bytes", True),
        ("registers", "ten"),
        ("spill_loads", 1.5),
        ("dynamic_shared_bytes", None),
        ("nvshmem", 1),
        ("compile_seconds", "long"),
        ("compile_seconds", float("inf")),
        ("created", "\x1b]0;title\x07"),
        ("created", "\u202eright to left"),
        ("versions", None),
        ("versions", {"nvrtc": 12}),
        ("versions", {"nvrtc": "12\x9b31m"}),
        ("more", 1),
    ],
)
def test_a_description_with_a_wrong_field_makes_an_entry_corrupt(store: KernelCache, name: str, value: Any) -> None:
    written(store, json.dumps({**entry().info, "key": KEY, name: value}).encode())
    assert store.get("sm_90", KEY) is None
    assert "its description" in reason(store)
    assert reason(store).isprintable()


@pytest.mark.parametrize("name", [*entry().info, "key"])
def test_every_field_is_needed(store: KernelCache, name: str) -> None:
    written(store, json.dumps({field: value for field, value in {**entry().info, "key": KEY}.items() if field != name}).encode())
    assert reason(store) == "its description has other fields"


def test_lengths_that_are_wrong(store: KernelCache) -> None:
    text = json.dumps({**entry().info, "key": KEY}).encode()
    written(store, text, code=b"longer than it says")
    assert reason(store) == "it is the entry of another kernel"
    for length in (0, 2**64 - 1, len(text) - 1):
        written(store, text, length=length)
        assert reason(store) == "its description is no JSON"
    written(store, text)
    assert store.get("sm_90", KEY) == entry()


def test_a_huge_file_is_not_read(store: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    size = file_of(store).stat().st_size
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", size)
    assert store.get("sm_90", KEY) == entry()
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", size - 1)
    assert reason(store) == f"it has more than {size - 1} bytes"


# --- what is no regular file ---------------------------------------------------------------------------------------------------------


def make_link(path: Path) -> None:
    path.symlink_to(shutil.copy(path.parent / f"{KEY}{SUFFIX}", path.parents[2] / "target"))


@pytest.mark.parametrize("make", [make_link, os.mkfifo, Path.mkdir], ids=["link", "FIFO", "folder"])
def test_only_regular_files_are_entries(store: KernelCache, make: Callable[[Path], None]) -> None:
    path = file_of(store, OTHER)
    make(path)
    ends = within(10, lambda: store.get("sm_90", OTHER))
    assert ends is None
    assert [found.key for found in store.entries() if isinstance(found, CorruptEntry)] == [OTHER]
    assert store.clear() == 1
    assert os.path.lexists(path)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call that must not wait for ever."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits"
    return found[0]


@pytest.mark.parametrize("make", [make_link, os.mkfifo], ids=["link", "FIFO"])
def test_an_odd_file_is_replaced_by_what_is_compiled(store: KernelCache, make: Callable[[Path], None]) -> None:
    make(file_of(store, OTHER))
    store.put(entry(OTHER))
    assert store.get("sm_90", OTHER) == entry(OTHER)
    assert not file_of(store, OTHER).is_symlink()


def test_a_lock_that_is_a_link_creates_nothing(store: KernelCache, tmp_path: Path) -> None:
    file_of(store).with_suffix(".lock").symlink_to(tmp_path / "made")
    with store.locked("sm_90", KEY, timeout_s=0.1) as got:
        assert not got
    assert not (tmp_path / "made").exists()


def test_a_lock_that_is_a_fifo_is_done_without(store: KernelCache) -> None:
    os.mkfifo(file_of(store).with_suffix(".lock"))

    def lock() -> bool:
        with store.locked("sm_90", KEY, timeout_s=0.1) as got:
            return got

    assert within(10, lock) is False


def test_the_folder_of_an_architecture_may_not_be_a_link(store: KernelCache) -> None:
    """The folder of the cache may: it is the user's own choice."""
    (store.folder / "sm_80").symlink_to(store.folder / "sm_90")
    assert store.get("sm_80", KEY) is None
    with pytest.raises(EPCacheError, match="no folder, or a link to one"):
        store.put(entry(arch="sm_80"))
    assert len(store.entries()) == 1
    linked = KernelCache(store.folder.parent / "linked")
    linked.folder.symlink_to(store.folder)
    assert linked.get("sm_90", KEY) == entry()
    (store.folder / "sm_80").unlink()
    (store.folder / "sm_80").write_text("no folder")
    assert linked.clear() == 1
    assert (store.folder / "sm_80").exists()


@pytest.mark.parametrize("arch", ["..", "../other", "hopper", ""])
def test_other_names_are_no_architectures(store: KernelCache, arch: str) -> None:
    shutil.copytree(store.folder / "sm_90", store.folder / "hopper")
    assert store.get(arch, KEY) is None
    with pytest.raises(EPCacheError, match="no architecture has this name"):
        store.put(entry(arch=arch))
    assert len(store.entries()) == 1


# --- clear -----------------------------------------------------------------------------------------------------------------------------


def test_clear_leaves_what_is_not_ours(store: KernelCache) -> None:
    """It once removed a uv.lock."""
    inside = store.folder / "sm_90"
    ours = file_of(store).read_bytes()
    others = {
        store.folder / "uv.lock": b"",
        store.folder / f"{OTHER}{SUFFIX}": ours,
        store.folder / "project" / "uv.lock": b"",
        store.folder / "project" / f"{OTHER}{SUFFIX}": ours,
        store.folder / "project" / f".{OTHER}.0123abcd.tmp": ours,
        inside / "uv.lock": b"",
        inside / "Cargo.lock": b"text",
        inside / f"{KEY}.lock.old": b"",
        inside / f"{OTHER}.lock": b"a lock of ours is empty",
        inside / f"{OTHER}{SUFFIX}": b"another program's",
        inside / f"{'ef' * 32}{SUFFIX}": b"",
        inside / f"{KEY[1:]}{SUFFIX}": ours,
        inside / f"{KEY.upper()}{SUFFIX}": ours,
        inside / "linux.kernel": ours,
        inside / ".some.tmp": b"",
        inside / ".abcdefgh.tmp": b"",
        inside / f".{OTHER}.0123abcd.tmp": b"another program's",
    }
    for path, data in others.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (inside / f".{KEY}.0123abcd.tmp").write_bytes(ours[:30])
    (inside / f".{KEY}.3210dcba.tmp").write_bytes(b"")
    (inside / ".abcdefg_.tmp").write_bytes(ours)
    with store.locked("sm_90", KEY):
        pass
    assert store.clear() == 1
    assert {path for path in store.folder.rglob("*") if path.is_file()} == set(others)


def test_clear_deletes_entries_of_earlier_versions(store: KernelCache) -> None:
    file_of(store).write_bytes(b"deepep_rt kernel 1\n" + bytes(100))
    assert store.get("sm_90", KEY) is None
    assert reason(store) == "no entry of this version"
    assert store.clear() == 1
    assert store.entries() == []


def test_clear_leaves_what_is_in_use(store: KernelCache) -> None:
    with store.locked("sm_90", KEY) as got:
        assert got
        assert store.clear() == 1
        assert file_of(store).with_suffix(".lock").exists()
        with store.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second
    assert store.clear() == 0
    assert list((store.folder / "sm_90").iterdir()) == []


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_process_that_waits_for_a_deleted_lock_gets_the_new_one(
    store: KernelCache, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    """Otherwise two would hold the lock of one entry: one of the file that is gone, one of the file that is there."""
    lock, real = file_of(store).with_suffix(".lock"), fcntl.flock
    deleted = []

    def flock(number: int, how: int) -> None:
        if not deleted:
            deleted.append(lock.unlink())
            if is_made_anew:
                lock.touch()
        real(number, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.locked("sm_90", KEY) as first:
        assert first
        with store.locked("sm_90", KEY, timeout_s=0.05) as second:
            assert not second


def test_no_descriptor_is_left_open(store: KernelCache) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file_of(store, OTHER).symlink_to("nowhere")
    os.mkfifo(file_of(store, "ef" * 32))
    for _ in range(3):
        store.get("sm_90", KEY), store.get("sm_90", OTHER), store.get("sm_90", "ef" * 32), store.get("sm_80", KEY)
        with store.locked("sm_90", KEY), store.locked("sm_90", KEY, timeout_s=0):
            store.put(entry())
        store.entries(), store.clear()
    assert set(os.listdir("/proc/self/fd")) == before


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from deepep_rt.jit.cache import KernelCache
from entries import entry
store, end, done = KernelCache(Path(sys.argv[1])), time.monotonic() + 2, 0
while time.monotonic() < end:
    key = f"{done % 4:064x}"
    with store.locked("sm_90", key):
        if store.get("sm_90", key) is None:
            store.put(entry(key))
    done += 1
assert done
"""


def test_builders_do_not_fail_while_the_cache_is_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    words = [sys.executable, "-W", "error", "-c", BUILDER, str(folder), "", str(HELPERS)]
    builders = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    removed = 0
    while any(builder.poll() is None for builder in builders):
        removed += KernelCache(folder).clear()
        KernelCache(folder).entries()
        if removed % 3 == 0:
            shutil.rmtree(folder, ignore_errors=True)
    assert [builder.communicate()[1] for builder in builders] == [""] * 3
    assert removed > 0


# --- other users -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def owned_by(store: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a path of the cache belong to another user, as far as this process can see."""
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
    real, owners = os.fstat, {}

    def status_of(number: int) -> os.stat_result:
        status = real(number)
        owner = owners.get((status.st_dev, status.st_ino), status.st_uid)
        return os.stat_result([*status[:4], owner, *status[5:]])

    def give(path: Path, user: int) -> None:
        status = path.stat()
        owners[status.st_dev, status.st_ino] = user

    for module in (trusted_files, cache):
        monkeypatch.setattr(module, "status_of", status_of)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for path in (store.folder, store.folder / "sm_90", file_of(store)):
        give(path, 1000)
    return give


def check_refused(store: KernelCache, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is an error everywhere, and a warning where the user says so."""
    lock = store.locked("sm_90", KEY)
    for action in (lambda: store.get("sm_90", KEY), lambda: store.put(entry(OTHER)), store.entries, lock.__enter__):
        with pytest.raises(EPCacheError, match=message) as caught:
            action()
        assert "DEEPEP_RT_CACHE_DIR" in str(caught.value)
        assert "DEEPEP_RT_TRUST_CACHE=1" in str(caught.value)
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    with caplog.at_level(logging.WARNING, logger="deepep_rt"):
        for _ in range(2):
            assert store.get("sm_90", KEY) == entry()
    assert caplog.text.count("because DEEPEP_RT_TRUST_CACHE is set") == 1
    monkeypatch.delenv("DEEPEP_RT_TRUST_CACHE")
    assert store.clear() == 1, "deleting runs no code"


@pytest.mark.parametrize("part", [".", "sm_90"])
def test_a_folder_of_another_user_is_refused(
    store: KernelCache,
    owned_by: Callable[..., None],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owned_by(store.folder / part, 1234)
    check_refused(store, "user 1234 owns it", monkeypatch, caplog)


def test_an_open_folder_of_another_user_is_refused(
    store: KernelCache, owned_by: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.folder.chmod(0o777)
    owned_by(store.folder, 1234)
    check_refused(store, "user 1234 owns it", monkeypatch, caplog)


@pytest.mark.parametrize(
    ("mode", "message"), [(0o777, "every user may write it"), (0o707, "every user"), (0o775, "group 54321 may")]
)
def test_a_folder_that_others_may_write_is_refused(
    store: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int, message: str
) -> None:
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda group: False)
    monkeypatch.setattr(trusted_files, "_group_name", lambda group: "54321")
    (store.folder / "sm_90").chmod(mode)
    check_refused(store, message, monkeypatch, caplog)


def test_an_entry_that_others_own_or_may_write_is_compiled_again(
    store: KernelCache, owned_by: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_of(store).chmod(0o646)
    assert store.get("sm_90", KEY) is None
    assert reason(store) == "every user may write it"
    file_of(store).chmod(0o644)
    assert store.get("sm_90", KEY) == entry()
    owned_by(file_of(store), 1234)
    assert store.get("sm_90", KEY) is None
    assert reason(store) == "user 1234 owns it"
    store.put(entry())
    owned_by(file_of(store), 1000)
    assert store.get("sm_90", KEY) == entry(), "and replaced"
    owned_by(file_of(store), 1234)
    monkeypatch.setenv("DEEPEP_RT_TRUST_CACHE", "1")
    assert store.get("sm_90", KEY) == entry()


def test_a_shared_cache_of_root_works(store: KernelCache, owned_by: Callable[..., None]) -> None:
    for path in (store.folder, store.folder / "sm_90", file_of(store)):
        owned_by(path, 0)
    store.folder.chmod(0o555)
    assert store.get("sm_90", KEY) == entry()
    assert store.entries() == [entry()]
    store.folder.chmod(0o755)


def test_an_open_folder_of_this_user_or_root_works(store: KernelCache) -> None:
    """An empty volume of a container is one, and `/tmp`. What others put there belongs to them."""
    shutil.rmtree(store.folder)
    store.folder.mkdir()
    store.folder.chmod(0o777)
    store.put(entry())
    assert store.get("sm_90", KEY) == entry()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_this_process_makes_is_for_it_alone_to_write(tmp_path: Path, umask: int) -> None:
    store, before = KernelCache(tmp_path / "new" / "cache"), os.umask(umask)
    try:
        store.put(entry())
        with store.locked("sm_90", KEY):
            pass
    finally:
        os.umask(before)
    assert store.get("sm_90", KEY) == entry()
    modes = {path: path.stat().st_mode & 0o777 for path in (store.folder, store.folder / "sm_90", file_of(store))}
    assert all(not mode & 0o022 for mode in modes.values())
    assert modes[file_of(store)] == 0o644, "other users of a shared cache read it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_uses_a_volume_of_another_user_but_not_what_anybody_could_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
    above = trusted_files._folders_above  # pytest's folders lie in /tmp, which others may write
    monkeypatch.setattr(trusted_files, "_folders_above", lambda path: [at for at in above(path) if at.is_relative_to(tmp_path)])
    (tmp_path / "shared").mkdir()
    volume, planted = KernelCache(tmp_path / "volume"), KernelCache(tmp_path / "shared" / "planted")
    for store in (volume, planted):
        store.put(entry())
        for path in (store.folder, store.folder / "sm_90", file_of(store)):
            os.chown(path, 12345, 12345)
    (tmp_path / "shared").chmod(0o1777)
    assert volume.get("sm_90", KEY) == entry()
    with pytest.raises(EPCacheError, match="user 12345 owns it"):
        planted.get("sm_90", KEY)
    volume.folder.chmod(0o777)
    with pytest.raises(EPCacheError, match="sm_90: user 12345 owns it"):
        volume.get("sm_90", KEY)
