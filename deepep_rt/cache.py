"""The disk cache of compiled kernels: one file an entry, written atomically, checked when read, one folder for each architecture.

cuda.core's FileStreamProgramCache is not used: it hides the keys (no listing), holds bare code (no metadata, no checksum) and has no
lock that lets one of several processes compile while the others wait.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _env
from .errors import EPCacheError

_log = logging.getLogger("deepep_rt")

SUFFIX = ".kernel"
# Linking NVSHMEM for CUDA 12 takes 109 to 124 s for sm_100: nvJitLink compiles all of its library. Slower machines take longer.
LOCK_TIMEOUT_S = 600.0
"""How long a process waits for another one that compiles the same kernel, before it compiles too."""

_MAGIC = b"deepep_rt kernel 1\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Entry:
    """A compiled kernel and what is known about it."""

    key: str
    arch: str
    code: bytes
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CorruptEntry:
    """A file that is not what was once written; it is rebuilt when it is asked for."""

    key: str
    arch: str
    reason: str


class Store:
    """A folder of compiled kernels that any number of processes share.

    Args:
        folder: Where; default `DEEPEP_RT_CACHE_DIR`. It is made when the first entry is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _env.cache_dir()

    def get(self, arch: str, key: str) -> Entry | None:
        """The entry, or None if there is none; a corrupt one is logged and counts as none."""
        found = _read(self._path(arch, key))
        if isinstance(found, CorruptEntry):
            _log.warning("kernel cache: %s is corrupt (%s); it is compiled again", self._path(arch, key), found.reason)
            return None
        return found

    def put(self, entry: Entry) -> None:
        """Write an entry; a reader sees the old one, or all of the new one.

        Raises:
            EPCacheError: if the folder cannot be written.
        """
        info = json.dumps(entry.info, sort_keys=True).encode()
        body = len(info).to_bytes(8, "little") + info + entry.code
        path = self._path(entry.arch, entry.key)
        data = _MAGIC + hashlib.sha256(body).digest() + body
        with self._explained():
            try:
                _write(path, data)
            except FileNotFoundError:  # somebody cleared the cache meanwhile
                _write(path, data)

    @contextmanager
    def locked(self, arch: str, key: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold an entry's lock, so that one process compiles and the others find the result; gives whether the lock was got.

        It is not got where there are no locks (a file system without them, a file that another user left), and after `timeout_s` (its
        holder may be stuck, or died on another machine): compiling twice is only slow.

        Raises:
            EPCacheError: if the folder cannot be written.
        """
        path = self._path(arch, key).with_suffix(".lock")
        with self._explained():
            number = _open_lock(path)
        if number is None:
            yield False
            return
        try:
            yield _acquire(number, path, LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
        finally:
            os.close(number)  # gives the lock back; the file stays: two processes could get in while it is deleted

    def entries(self) -> list[Entry | CorruptEntry]:
        """Everything that is stored, in the order of architecture, kernel and key.

        Raises:
            EPCacheError: if the folder is there and cannot be read, or is none.
        """
        found = [_read(path) for path in sorted(self._files())]
        return sorted((entry for entry in found if entry is not None), key=_order)

    def clear(self) -> int:
        """Delete everything, and give the number of entries.

        Raises:
            EPCacheError: if the folder cannot be read or written, or is none.
        """
        entries = self._files()
        with self._explained():
            for path in (*entries, *self.folder.glob("*/*.lock"), *self.folder.glob("*/.*.tmp")):
                path.unlink(missing_ok=True)
        return len(entries)

    def _files(self) -> list[Path]:
        with self._explained("read"), suppress(FileNotFoundError):
            os.listdir(self.folder)  # glob finds nothing, without a word, in a file and in a folder that may not be read
        return list(self.folder.glob(f"*/*{SUFFIX}"))

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


def _read(path: Path) -> Entry | CorruptEntry | None:
    key, arch = path.name.removesuffix(SUFFIX), path.parent.name
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return CorruptEntry(key, arch, f"cannot be read: {error}")
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC):
        return CorruptEntry(key, arch, "no entry of this version")
    if hashlib.sha256(data[start:]).digest() != data[len(_MAGIC) : start]:
        return CorruptEntry(key, arch, "wrong checksum")
    split = start + 8 + int.from_bytes(data[start : start + 8], "little")
    return Entry(key, arch, data[split:], json.loads(data[start + 8 : split]))


def _write(path: Path, data: bytes) -> None:
    """Make or replace a file; whoever reads it sees all of the old one or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would shut out the other users of a shared cache
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _open_lock(path: Path) -> int | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        if not path.exists():
            raise  # the folder cannot be written: no entry can, either
        return None


def _acquire(number: int, path: Path, timeout_s: float) -> bool:
    """Poll for a file lock: a blocking flock could hang for ever on a lock that a dead machine holds over NFS."""
    deadline, pause = time.monotonic() + timeout_s, 0.005
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
