"""The disk cache of compiled kernels: one file an entry, written atomically, checked when read, one folder for each architecture.

cuda.core's FileStreamProgramCache is not used: it hides the keys (no listing), holds bare code (no metadata, no checksum) and has no
lock that lets one of several processes compile while the others wait.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from .. import _env
from ..errors import EPCacheError
from .cache_entry import ARCH, FAMILY, KEY, CorruptEntry, Entry, pack, unpack
from .trusted_files import Folder, objection, open_file, open_folder, open_inner, status_of

__all__ = ["LOCK_TIMEOUT_S", "SUFFIX", "CorruptEntry", "Entry", "KernelCache"]

_log = logging.getLogger("deepep_rt")

SUFFIX = ".kernel"
# Linking NVSHMEM for CUDA 12 takes 109 to 124 s for sm_100: nvJitLink compiles all of its library. Slower machines take longer.
LOCK_TIMEOUT_S = 600.0
"""How long a process waits for another one that compiles the same kernel, before it compiles too."""

_MOST_BYTES = 1 << 28  # of an entry; linked with NVSHMEM they have 3 MB
_TRIES = 100  # `clear` can delete what is being written; a try fails only if it does so at the same moment
_OURS = re.compile(
    rf"(?P<entry>{KEY.pattern}\{SUFFIX})|(?P<lock>{KEY.pattern}\.lock)|\.(?P<key>{KEY.pattern}\.)?\w{{8}}\.tmp", re.ASCII
)
_warned: set[tuple[Path, str]] = set()
_T = TypeVar("_T")


class KernelCache:
    """A folder of compiled kernels that any number of processes share.

    Only files of this user or of root are loaded, and only if no other user may write them; `DEEPEP_RT_TRUST_CACHE=1` allows the others.

    Args:
        folder: Where; default `DEEPEP_RT_CACHE_DIR`. It is made when the first entry is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _env.cache_dir()

    def get(self, arch: str, key: str, kernel: str | None = None, versions: Mapping[str, str] | None = None) -> Entry | None:
        """Look an entry up. One that is corrupt, or not the wanted one, is logged and counts as none.

        Args:
            arch: Target, such as "sm_90".
            key: 64 hexadecimal digits.
            kernel: Name of the kernel that it has to hold; None: any.
            versions: Versions that it has to be built with; the entry may name more.

        Raises:
            EPCacheError: if the folder belongs to another user, or other users may write it.
        """
        try:
            with self._opened(arch) as folder:
                found = self._read(folder, arch, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            found = CorruptEntry(key, arch, f"cannot be read: {error.strerror}")
        if isinstance(found, Entry):
            info = found.info
            if kernel in (None, info["kernel"]) and (versions or {}).items() <= info["versions"].items():
                return found
            found = CorruptEntry(key, arch, f"it holds {info['kernel']} built with {info['versions']}")
        _log.warning("kernel cache: %s is corrupt (%s); it is compiled again", self._path(arch, key), found.reason)
        return None

    def put(self, entry: Entry) -> None:
        """Write an entry; a reader sees the old one, or all of the new one.

        Raises:
            EPCacheError: if the folder cannot be written, belongs to another user, or other users may write it.
        """
        data = pack(entry)

        def write() -> None:
            with self._opened(entry.arch, make=True) as folder:
                _write(folder, entry.key, data)

        with self._explained():
            _repeated(write)

    @contextmanager
    def locked(self, arch: str, key: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold an entry's lock, so that one process compiles and the others find the result; gives whether the lock was got.

        It is not got where there are no locks (a file system without them, a file that another user left), and after `timeout_s` (its
        holder may be stuck, or died on another machine): compiling twice is only slow.

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
                os.close(number)  # gives the lock back; the file stays, as others may wait for its lock

    def entries(self) -> list[Entry | CorruptEntry]:
        """Everything that is stored, in the order of architecture, kernel and key.

        Raises:
            EPCacheError: if the folder is there and cannot be read, is none, belongs to another user, or other users may write it.
        """
        found = []
        for folder, arch, names in self._folders(self._check):
            for name in names:
                if _is_entry(name):
                    key = name.removesuffix(SUFFIX)
                    try:
                        found.append(self._read(folder, arch, key))
                    except FileNotFoundError:  # another process cleared the cache meanwhile
                        continue
                    except OSError as error:
                        found.append(CorruptEntry(key, arch, f"cannot be read: {error.strerror}"))
        return sorted(found, key=_order)

    def clear(self) -> int:
        """Delete all entries and what else this class makes, and give the number of entries. What processes use now stays.

        A file is deleted if it is in the folder of an architecture, has a name of ours, is a regular file, and begins as ours do.

        Raises:
            EPCacheError: if the folder cannot be read or written, or is none.
        """
        number = 0
        for folder, _, names in self._folders(lambda path, reason: None):
            for name in names:
                with self._explained():
                    number += _delete(folder, name) and _is_entry(name)
        return number

    def _folders(self, check: Callable[[Path, str | None], None]) -> Iterator[tuple[Folder, str, list[str]]]:
        """Open the folder of each architecture in turn, with the names in it; none if there is no cache yet."""
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
        """Refuse a folder that there is an objection to, or warn about it, once."""
        if reason and not _is_allowed(path, reason):
            raise EPCacheError(
                f"kernel cache {path}: {reason}; expected a folder that only this user or root may write, because its code is run. Set "
                f"DEEPEP_RT_CACHE_DIR to another folder, or take the permission away (chmod -R go-w), or set DEEPEP_RT_TRUST_CACHE=1"
            )

    def _read(self, folder: Folder, arch: str, key: str) -> Entry | CorruptEntry:
        number = open_file(f"{key}{SUFFIX}", folder, os.O_RDONLY)
        with os.fdopen(number, "rb") as file:
            reason = objection(status_of(number), folder.is_enclosed)
            if reason and not _is_allowed(self._path(arch, key), reason):
                return CorruptEntry(key, arch, reason)
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            return CorruptEntry(key, arch, f"it has more than {_MOST_BYTES} bytes")
        return unpack(data, arch, key)

    def _lock(self, arch: str, key: str, timeout_s: float) -> int | None:
        """Open and lock a lock file; None: there is no lock to be had."""
        path, deadline = self._path(arch, key).with_suffix(".lock"), time.monotonic() + timeout_s

        def lock() -> int | None:
            with self._opened(arch, make=True) as folder:
                number = _open_lock(folder, path)
                if number is None:
                    return None
                try:
                    if not _acquire(number, path, timeout_s, deadline):
                        os.close(number)
                        return None
                    if os.path.samestat(os.stat(path.name, dir_fd=folder.number, follow_symlinks=False), status_of(number)):
                        return number
                except BaseException:
                    os.close(number)
                    raise
                os.close(number)
                raise FileNotFoundError(errno.ENOENT, "it was deleted and made anew", str(path))

        return _repeated(lock)

    def _path(self, arch: str, key: str) -> Path:
        return self.folder / arch / f"{key}{SUFFIX}"

    @contextmanager
    def _explained(self, done: str = "written") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EPCacheError(
                f"the kernel cache {self.folder} cannot be {done}: {error}. "
                f"Set DEEPEP_RT_CACHE_DIR to a folder that this user can read and write"
            ) from error


def _order(entry: Entry | CorruptEntry) -> tuple[str, str, str]:
    return entry.arch, entry.info["kernel"] if isinstance(entry, Entry) else "~", entry.key


def _is_entry(name: str) -> bool:
    return bool((found := _OURS.fullmatch(name)) and found["entry"])


def _is_allowed(path: Path, reason: str) -> bool:
    """Whether the user trusts what other users own or may write; if so, warn, once for each path."""
    if not _env.trust_cache():
        return False
    if (path, reason) not in _warned:
        _warned.add((path, reason))
        _log.warning("kernel cache: %s: %s; its code is run all the same, because DEEPEP_RT_TRUST_CACHE is set", path, reason)
    return True


def _repeated(call: Callable[[], _T]) -> _T:
    """Call again what failed because another process cleared or deleted the cache meanwhile."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError, FileExistsError):  # the latter: mkdir found the folder, and did not find it any more
            return call()
    return call()


def _write(folder: Folder, key: str, data: bytes) -> None:
    """Make or replace an entry; a reader sees all of the old one or all of the new one."""
    name = f".{key}.{secrets.token_hex(4)}.tmp"
    number = open_file(name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(number, "wb") as file:
            _is_in_use(number)  # now it is, and `clear` leaves it alone
            file.write(data)
            file.flush()
            os.fsync(number)
            os.fchmod(number, 0o644)  # other users of a shared cache read it
            os.replace(name, f"{key}{SUFFIX}", src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder.number)
        raise


def _delete(folder: Folder, name: str) -> bool:
    """Delete a file if this module made it and no process uses it, and tell whether it did."""
    found = _OURS.fullmatch(name)
    if not found:
        return False
    try:
        number = open_file(name, folder, os.O_RDONLY)
    except OSError:  # no regular file, gone, or not for this user to read: so it is not known to be ours
        return False
    try:
        start = os.read(number, len(FAMILY))
        is_ours = start == FAMILY or (not start and (found["lock"] or found["key"]))
        if not is_ours or (not found["entry"] and _is_in_use(number)):
            return False
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder.number)
    finally:
        os.close(number)
    return True


def _is_in_use(number: int) -> bool:
    """Whether another process holds the lock of an open file; if not, this one does now, where there are locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def _open_lock(folder: Folder, path: Path) -> int | None:
    try:
        return open_file(path.name, folder, os.O_RDWR | os.O_CREAT)
    except PermissionError:
        try:
            os.stat(path.name, dir_fd=folder.number, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            return None
        raise  # the folder cannot be written: no entry can, either
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.debug("kernel cache: %s is no regular file; compiling without a lock", path)
        return None


def _acquire(number: int, path: Path, timeout_s: float, deadline: float) -> bool:
    """Poll for a file lock: a blocking flock could hang for ever on a lock that a dead machine holds over NFS."""
    pause = 0.005
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                _log.debug("kernel cache: %s cannot be locked (%s); compiling all the same", path, error)
                return False
        if time.monotonic() > deadline:
            _log.warning("kernel cache: %s was held for %.0f s; compiling without waiting for its holder", path, timeout_s)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
