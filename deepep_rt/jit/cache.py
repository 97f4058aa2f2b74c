"""The disk cache of compiled kernels: one file per entry, one folder per architecture. Writes are atomic and reads check the content.

cuda.core's FileStreamProgramCache is not used. It cannot list its keys, stores no metadata and no checksum, and has no lock that lets
other processes wait for the one that compiles.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import _env
from .._documents import UnusableFile
from ..errors import EPCacheError
from .cache_entry import ARCH, CorruptEntry, Entry, pack, unpack
from .cache_files import LOCK_SUFFIX, SUFFIX, delete, is_entry, retry, write_entry
from .cache_lock import lock_file
from .trusted_files import Folder, objection, open_folder, open_inner, read_file

__all__ = ["LOCK_TIMEOUT_S", "MAX_ENTRY_BYTES", "SUFFIX", "CorruptEntry", "Entry", "KernelCache"]

_log = logging.getLogger("deepep_rt")

# Linking NVSHMEM for CUDA 12 takes 109 to 124 s for sm_100: nvJitLink compiles its whole library. Slower machines take longer.
LOCK_TIMEOUT_S = 600.0
"""The time for which a process waits while another one compiles the same kernel. Then it compiles too."""

MAX_ENTRY_BYTES = 1 << 28
"""The largest file that is read as an entry. Kernels linked with NVSHMEM have 3 MB."""

_warned: set[tuple[Path, str]] = set()


class KernelCache:
    """A folder of compiled kernels, which any number of processes share.

    A file is loaded only if this user or root owns it and no other user may write it. `DEEPEP_RT_TRUST_CACHE=1` allows other files.

    Args:
        folder: Its path; default `DEEPEP_RT_CACHE_DIR`. The first write creates it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _env.cache_dir()

    def get(self, arch: str, key: str, kernel: str | None = None, versions: Mapping[str, str] | None = None) -> Entry | None:
        """Look up an entry. Return None, with a warning, if the entry is corrupt or not the wanted one.

        Args:
            arch: Target, such as "sm_90".
            key: 64 hexadecimal digits.
            kernel: Name of the kernel that the entry must hold; None: any.
            versions: Versions that the entry must be built with; it may name more.

        Raises:
            EPCacheError: if the folder belongs to another user, or other users may write it.
        """
        try:
            with self._opened(arch) as folder:
                found = self._read(folder, arch, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            found = CorruptEntry(key, arch, f"it cannot be read: {error.strerror}")
        if isinstance(found, Entry):
            info = found.info
            if kernel in (None, info["kernel"]) and (versions or {}).items() <= info["versions"].items():
                return found
            found = CorruptEntry(key, arch, f"it holds {info['kernel']} built with {info['versions']}")
        _log.warning("kernel cache: %s is corrupt (%s); it is compiled again", self._path(arch, key), found.reason)
        return None

    def put(self, entry: Entry) -> None:
        """Write an entry. A reader sees the complete old entry or the complete new one.

        Raises:
            EPCacheError: if the folder cannot be written, belongs to another user, or other users may write it.
        """
        data = pack(entry)

        def write() -> None:
            with self._opened(entry.arch, make=True) as folder:
                write_entry(folder, entry.key, data)

        with self._explained():
            retry(write)

    @contextmanager
    def locked(self, arch: str, key: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold an entry's lock, so that one process compiles and the others wait for the result. Yield whether the lock is held.

        It is not held if the file system has no locks, if another user owns the lock file, or after `timeout_s`: the holder may be stuck,
        or may have died on another machine. Compiling twice only costs time.

        Raises:
            EPCacheError: if the folder cannot be written, belongs to another user, or other users may write it.
        """
        number = None
        with self._explained():
            number = self._lock(arch, key, LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
        try:
            yield number is not None
        finally:
            if number is not None:
                os.close(number)  # releases the lock; the file stays, because other processes may wait for its lock

    def entries(self) -> list[Entry | CorruptEntry]:
        """Return all entries, ordered by architecture, kernel and key.

        Raises:
            EPCacheError: if the folder exists but cannot be read, is no folder, belongs to another user, or other users may write it.
        """
        found = []
        for folder, arch, names in self._folders(self._check):
            for name in filter(is_entry, names):
                key = name.removesuffix(SUFFIX)
                with suppress(FileNotFoundError):  # another process cleared the cache meanwhile
                    found.append(self._read(folder, arch, key))
        return sorted(found, key=_sort_key)

    def clear(self) -> int:
        """Delete all entries and the other files of this class. Return the number of entries. Files in use stay.

        A file is deleted if it lies in the folder of an architecture, has a name of this class, is regular, and starts as its files do.

        Raises:
            EPCacheError: if the folder cannot be read or written, or is no folder.
        """
        number = 0
        for folder, _, names in self._folders(lambda path, reason: None):
            for name in names:
                with self._explained():
                    number += delete(folder, name) and is_entry(name)
        return number

    def _folders(self, check: Callable[[Path, str | None], None]) -> Iterator[tuple[Folder, str, list[str]]]:
        """Open the folder of each architecture in turn. Yield it with its file names; yield nothing if there is no cache yet."""
        with self._explained("read"), suppress(FileNotFoundError), open_folder(self.folder) as base:
            check(self.folder, base.objection)
            for arch in sorted(filter(ARCH.fullmatch, os.listdir(base.number))):
                with suppress(FileNotFoundError, NotADirectoryError), open_inner(arch, base) as folder:
                    check(self.folder / arch, folder.objection)
                    yield folder, arch, os.listdir(folder.number)

    @contextmanager
    def _opened(self, arch: str, *, make: bool = False) -> Iterator[Folder]:
        """Open the folder of an architecture, if it can be trusted."""
        if not ARCH.fullmatch(arch):
            raise NotADirectoryError(errno.ENOTDIR, "no architecture has this name", arch)
        with open_folder(self.folder, make=make) as base:
            self._check(self.folder, base.objection)
            with open_inner(arch, base, make=make) as folder:
                self._check(self.folder / arch, folder.objection)
                yield folder

    def _check(self, path: Path, reason: str | None) -> None:
        """Raise if a folder must not be trusted. Warn once if the user allows it."""
        if reason and not _is_allowed(path, reason):
            raise EPCacheError(
                f"kernel cache {path}: {reason}; expected a folder that only this user or root may write, because its code is run. Set "
                f"DEEPEP_RT_CACHE_DIR to another folder, or take the permission away (chmod -R go-w), or set DEEPEP_RT_TRUST_CACHE=1"
            )

    def _read(self, folder: Folder, arch: str, key: str) -> Entry | CorruptEntry:
        def objection_to(status: os.stat_result) -> str | None:
            reason = objection(status, folder.is_enclosed)
            return None if reason is None or _is_allowed(self._path(arch, key), reason) else reason

        try:
            return unpack(read_file(f"{key}{SUFFIX}", folder, MAX_ENTRY_BYTES, objection_to), arch, key)
        except UnusableFile as error:
            return CorruptEntry(key, arch, str(error))

    def _lock(self, arch: str, key: str, timeout_s: float) -> int | None:
        path, deadline = self._path(arch, key).with_suffix(LOCK_SUFFIX), time.monotonic() + timeout_s

        def lock() -> int | None:
            with self._opened(arch, make=True) as folder:
                return lock_file(folder, path, timeout_s, deadline)

        return retry(lock)

    def _path(self, arch: str, key: str) -> Path:
        return self.folder / arch / f"{key}{SUFFIX}"

    @contextmanager
    def _explained(self, action: str = "written") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EPCacheError(
                f"kernel cache {self.folder} cannot be {action}: {error}. "
                f"Set DEEPEP_RT_CACHE_DIR to a folder that this user can read and write."
            ) from error


def _sort_key(entry: Entry | CorruptEntry) -> tuple[str, str, str]:
    return entry.arch, entry.info["kernel"] if isinstance(entry, Entry) else "~", entry.key


def _is_allowed(path: Path, reason: str) -> bool:
    """Return whether the user trusts files that other users own or may write. Warn once for each path."""
    if not _env.trust_cache():
        return False
    if (path, reason) not in _warned:
        _warned.add((path, reason))
        _log.warning("kernel cache: %s: %s; its code is run because DEEPEP_RT_TRUST_CACHE is set", path, reason)
    return True
