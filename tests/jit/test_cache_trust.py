"""The kernel cache loads files only of this user and root, unless the user trusts other owners."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from entries import KEY, OTHER, entry, file_of, reason

from deepep_rt import EPCacheError
from deepep_rt.jit.cache import KernelCache


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    cache = KernelCache(tmp_path / "cache")
    cache.put(entry())
    return cache


@pytest.fixture
def set_owner(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a path appear to belong to another user."""
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
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
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
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
    trusted_files = pytest.importorskip("deepep_rt.jit.trusted_files")
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
