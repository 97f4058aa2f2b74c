"""Files in the folder of the kernel cache: links, FIFOs, files of other programs, and files that another process deletes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import KEY, OTHER, entry, file_of, reason
from paths import HELPERS

from deepep_rt import EPCacheError
from deepep_rt.jit.cache import SUFFIX, CorruptEntry, KernelCache


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    cache = KernelCache(tmp_path / "cache")
    cache.put(entry())
    return cache


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
from deepep_rt.jit.cache import KernelCache
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


def test_clear_deletes_entries_of_earlier_versions(cache: KernelCache) -> None:
    file_of(cache).write_bytes(b"deepep_rt kernel 1\n" + bytes(100))
    assert cache.get("sm_90", KEY) is None
    assert reason(cache) == "no entry of this version"
    assert cache.clear() == 1
    assert cache.entries() == []


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
