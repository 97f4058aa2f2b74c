"""One store on disk, which any number of processes share: compiled kernels, and measurements next to them.

One file holds an entry, under its key. Writes are atomic, and reads check the content. An entry is used only if no other user can have
written it (`trusted_files`).

- `KernelCache`: code that is run. A folder that others may write is an error, damage is a warning, and one process compiles a kernel
  while the others wait for its lock.
- `SavedFiles`: measurements. Whatever is wrong with a file or its folder, the file is ignored.

cuda.core's FileStreamProgramCache is not used. It cannot list its keys, stores no metadata and no checksum, and has no lock that lets
other processes wait for the one that compiles.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .. import _env
from .._documents import (
    MAX_COUNT,
    Check,
    UnusableFile,
    check_document,
    is_count,
    is_count_or_none,
    is_dict_of,
    is_flag,
    is_in,
    is_seconds,
    is_text,
    parse,
    wrong_fields,
)
from ..errors import EPCacheError, EPConfigError
from .trusted_files import (
    Folder,
    is_locked_elsewhere,
    objection,
    open_file,
    open_folder,
    open_inner,
    read_file,
    replace_file,
    status_of,
)

# Linking NVSHMEM for CUDA 12 takes 109 to 124 s for sm_100: nvJitLink compiles its whole library. Slower machines take longer.
LOCK_TIMEOUT_S = 600.0
"""The time for which a process waits while another one compiles the same kernel. Then it compiles too."""

MAX_ENTRY_BYTES = 1 << 28
"""The largest file that is read as an entry. Kernels linked with NVSHMEM have 3 MB."""

SUFFIX = ".kernel"
ARCH = re.compile(r"(sm|compute)_\d{2,3}[a-z]?", re.ASCII)
KEY = re.compile(r"[0-9a-f]{64}")
FAMILY = b"deepep_rt kernel "
"""The start of the files of kernels, of every version."""

MAGIC = FAMILY + b"2\n"
DIGEST_BYTES = 32

Key = Mapping[str, Any]
"""Everything that a measurement depends on, as values that JSON can hold."""

_log = logging.getLogger("deepep_rt")
_warned: set[tuple[Path, str]] = set()

_LOCK_SUFFIX = ".lock"
_SAVED_SUFFIX = ".json"
_MAX_SAVED_BYTES = 1 << 20
_ATTEMPTS = 100  # an attempt fails only if `clear` deletes the file at the same moment

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class FileKind:
    """The files of one kind of entry."""

    suffix: str  # of the names of entries. A name begins with the key
    start: bytes = b""  # the first bytes of every version of the files. Empty: any

    @functools.cached_property
    def _names(self) -> re.Pattern[str]:
        key = KEY.pattern
        return re.compile(
            rf"(?P<entry>{key}\{self.suffix})|(?P<lock>{key}\{_LOCK_SUFFIX})|\.(?P<key>{key}\.)?\w{{8}}\.tmp", re.ASCII
        )

    def is_entry(self, name: str) -> bool:
        """Return whether a file name is that of an entry."""
        return bool((match := self._names.fullmatch(name)) and match["entry"])

    def delete(self, folder: Folder, name: str) -> bool:
        """Delete a file if this library made it and no process uses it. Return whether it was deleted."""
        match = self._names.fullmatch(name)
        if not match:
            return False
        try:
            number = open_file(name, folder, os.O_RDONLY)
        except OSError:  # not a regular file, already deleted, or not readable: this library may not have made it
            return False
        try:
            start, named = os.read(number, len(self.start)), match.lastgroup  # None: a draft of an earlier version, without a key
            is_own = (start == self.start and bool(start or named)) or (not start and named in ("lock", "key"))
            if not is_own or (named != "entry" and is_locked_elsewhere(number)):
                return False
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.number)
        finally:
            os.close(number)
        return True


KERNEL_FILES, SAVED_FILES = FileKind(SUFFIX, FAMILY), FileKind(_SAVED_SUFFIX)


@contextmanager
def _opened(
    base: Path, name: str, check: Callable[[Path, str | None], None] = lambda path, reason: None, *, make: bool = False
) -> Iterator[Folder]:
    """Open a folder of the store. `check` gets each path and the objection to it, and raises if it must not be used."""
    with open_folder(base, make=make) as outer:
        check(base, outer.objection)
        with open_inner(name, outer, make=make) as folder:
            check(base / name, folder.objection)
            yield folder


def _retry(call: Callable[[], _Result]) -> _Result:
    """Repeat a call that fails because another process deletes files or folders of the store at the same time."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError, FileExistsError):  # mkdir raises FileExistsError if the folder disappears meanwhile
            return call()
    return call()


def _write(open_: Callable[[], AbstractContextManager[Folder]], name: str, data: bytes) -> None:
    """Create or replace an entry in the folder that `open_` opens. A reader sees the complete old entry or the complete new one."""

    def write() -> None:
        with open_() as folder:
            replace_file(name, folder, data, 0o644, lasting=True)  # other users of a shared cache read it

    _retry(write)


@dataclass(frozen=True)
class Entry:
    """A compiled kernel and its metadata."""

    key: str  # 64 hexadecimal digits: a hash of everything that determines the code
    arch: str  # target, such as "sm_90"
    code: bytes  # a cubin, or PTX
    info: dict[str, Any] = field(default_factory=dict)  # see `CompiledKernel.info`. `FIELDS` lists its members


@dataclass(frozen=True)
class CorruptEntry:
    """A file that differs from the one that was written. The next request compiles the kernel again. `reason` is printable."""

    key: str
    arch: str
    reason: str


FIELDS: Mapping[str, Check] = {
    "kernel": lambda value: is_text(value) and value.isidentifier(),
    "arch": is_text,
    "constants": is_dict_of(is_in(-MAX_COUNT, MAX_COUNT)),
    "bytes": is_count,
    "registers": is_count_or_none,
    "static_shared_bytes": is_count_or_none,
    "stack_bytes": is_count_or_none,
    "spill_stores": is_count_or_none,
    "spill_loads": is_count_or_none,
    "dynamic_shared_bytes": is_count,
    "nvshmem": is_flag,
    "compile_seconds": is_seconds,
    "created": is_text,
    "versions": is_dict_of(is_text),
}
"""The members of `Entry.info`, and a check of each value."""


def pack(entry: Entry) -> bytes:
    """Return the file content of an entry: magic, checksum, length of the JSON object, the object (`info` and the key), the code."""
    text = json.dumps({**entry.info, "key": entry.key}, sort_keys=True).encode()
    body = len(text).to_bytes(8, "little") + text + entry.code
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, arch: str, key: str) -> Entry | CorruptEntry:
    """Read the file content of an entry, and compare it with the name of its file."""
    start = len(MAGIC) + DIGEST_BYTES
    if not data.startswith(MAGIC):
        return CorruptEntry(key, arch, "no entry of this version")
    if hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        return CorruptEntry(key, arch, "wrong checksum")
    split = start + 8 + int.from_bytes(data[start : start + 8], "little")
    try:
        info = parse(data[start + 8 : split], dict)
    except UnusableFile:
        return CorruptEntry(key, arch, "its description is no JSON object")
    if info.keys() != {*FIELDS, "key"}:
        return CorruptEntry(key, arch, "its description has other fields")
    if wrong := wrong_fields(info, FIELDS):
        return CorruptEntry(key, arch, f"its description is wrong in {', '.join(wrong)}")
    code = data[split:]
    found, expected = (info.pop("key"), info["arch"], info["bytes"]), (key, arch, len(code))
    if found != expected:
        return CorruptEntry(key, arch, "it is the entry of another kernel")
    return Entry(key, arch, code, info)


class KernelCache:
    """A folder of compiled kernels, which any number of processes share; default `DEEPEP_RT_CACHE_DIR`. The first write creates it.

    A file is loaded only if this user or root owns it and no other user may write it. `DEEPEP_RT_TRUST_CACHE=1` allows other files.

    All methods but `clear` raise EPCacheError if the folder belongs to another user, or other users may write it. All but `get` raise it if
    the folder cannot be read or written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _env.cache_dir()

    def get(self, arch: str, key: str, kernel: str | None = None, versions: Mapping[str, str] | None = None) -> Entry | None:
        """Look up an entry. Return None, with a warning, if the entry is corrupt or not the wanted one.

        The wanted one holds `kernel` and was built with `versions`, which need not be all of its versions. Without them, any entry will do.
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
        """Write an entry. A reader sees the complete old entry or the complete new one."""
        with self._explained():
            _write(lambda: self._opened(entry.arch, make=True), f"{entry.key}{SUFFIX}", pack(entry))

    @contextmanager
    def locked(self, arch: str, key: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold an entry's lock, so that one process compiles and the others wait for the result. Yield whether the lock is held.

        It is not held if the file system has no locks, if another user owns the lock file, or after `timeout_s`: the holder may be stuck,
        or may have died on another machine. Compiling twice only costs time.
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
        """Return all entries, ordered by architecture, kernel and key."""
        found = []
        for folder, arch, names in self._folders(self._check):
            for name in filter(KERNEL_FILES.is_entry, names):
                key = name.removesuffix(SUFFIX)
                with suppress(FileNotFoundError):  # another process cleared the cache meanwhile
                    found.append(self._read(folder, arch, key))
        return sorted(found, key=_sort_key)

    def clear(self) -> int:
        """Delete all entries and the other files of this class. Return the number of entries. Files in use stay.

        A file is deleted if it lies in the folder of an architecture, has a name of this class, is regular, and starts as its files do.
        """
        number = 0
        for folder, _, names in self._folders(lambda path, reason: None):
            for name in names:
                with self._explained():
                    number += KERNEL_FILES.delete(folder, name) and KERNEL_FILES.is_entry(name)
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
        with _opened(self.folder, arch, self._check, make=make) as folder:
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
        path, deadline = self._path(arch, key).with_suffix(_LOCK_SUFFIX), time.monotonic() + timeout_s

        def lock() -> int | None:
            with self._opened(arch, make=True) as folder:
                return _lock_file(folder, path, timeout_s, deadline)

        return _retry(lock)

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


def _lock_file(folder: Folder, path: Path, timeout_s: float, deadline: float) -> int | None:
    """Open and lock a lock file. Return its descriptor, or None if it cannot be locked before `deadline`, a monotonic time.

    Raises:
        FileNotFoundError: if another process deleted the file meanwhile. The caller tries again.
        OSError: if the folder cannot be written.
    """
    number = _open_lock(folder, path)
    if number is None:
        return None
    try:
        if not _acquire_lock(number, path, timeout_s, deadline):
            os.close(number)
            return None
        if os.path.samestat(os.stat(path.name, dir_fd=folder.number, follow_symlinks=False), status_of(number)):
            return number
    except BaseException:
        os.close(number)
        raise
    os.close(number)
    raise FileNotFoundError(errno.ENOENT, "the lock file was deleted and created again", str(path))


def _open_lock(folder: Folder, path: Path) -> int | None:
    try:
        return open_file(path.name, folder, os.O_RDWR | os.O_CREAT)
    except PermissionError:
        try:
            os.stat(path.name, dir_fd=folder.number, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            return None  # another user's file
        raise  # the folder cannot be written, so an entry cannot be written either
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.debug("kernel cache: %s is not a regular file; compiling without a lock", path)
        return None


def _acquire_lock(number: int, path: Path, timeout_s: float, deadline: float) -> bool:
    """Poll for a file lock. A blocking flock could wait forever for a lock that a dead machine holds over NFS."""
    pause = 0.005
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                _log.debug("kernel cache: %s cannot be locked (%s); compiling without a lock", path, error)
                return False
        if time.monotonic() > deadline:
            _log.warning("kernel cache: %s was held for %.0f s; compiling without waiting for its holder", path, timeout_s)
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


@dataclass(frozen=True)
class SavedFiles:
    """The files of one kind of measurement.

    Args:
        folder: Their folder in the folder of the kernel cache.
        what: The name of the measurements, for the log.
        key_name: The member of a file with its key.
        fields: The members of a file, with a check of each value.
        version: The version of the files. Others are ignored.
    """

    folder: str
    what: str
    key_name: str
    fields: Mapping[str, Check]
    version: int = 1

    def load(self, key: Key, make: Callable[[dict[str, Any]], _Result]) -> _Result | None:
        """Return what `make` makes of the file of a key; None without one. `make` may raise any exception for members that do not fit.

        A file that is damaged, or that another user may have written, is ignored, with a message in the log.
        """
        name, wanted = self._name(key), json.loads(json.dumps(dict(key)))

        def make_of_key(document: dict[str, Any]) -> _Result:
            if document[self.key_name] != wanted:
                raise ValueError("the file of another key")
            return make(document)

        try:
            return self._read(name, make_of_key)
        except (FileNotFoundError, NotADirectoryError, EPConfigError):  # there is none, or no folder for it
            return None
        except UnusableFile as error:
            reason = str(error)
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        _log.warning("%s: %s is ignored: %s", self.what, _env.cache_dir() / self.folder / name, reason)
        return None

    def save(self, key: Key, content: Mapping[str, Any]) -> Path | None:
        """Write the file of a key, whole or not at all. Return its path; None, with a message in the log, if that fails."""
        name = self._name(key)
        data = json.dumps({"format": self.version, self.key_name: dict(key), **content}, indent=1, sort_keys=True).encode()
        try:
            _write(lambda: _opened(_env.cache_dir(), self.folder, make=True), name, data)
        except (OSError, EPConfigError) as error:
            _log.info("%s cannot be saved: %s", self.what, error)
            return None
        return _env.cache_dir() / self.folder / name

    def all(self) -> list[dict[str, Any]]:
        """Return the members of all files of this version, by name. Files that cannot be read or trusted are left out."""
        names, found = [], []
        with suppress(FileNotFoundError, NotADirectoryError), _opened(_env.cache_dir(), self.folder) as folder:
            names = sorted(filter(SAVED_FILES.is_entry, os.listdir(folder.number)))
        for name in names:
            with suppress(OSError, UnusableFile):
                found.append(self._read(name, dict))
        return found

    def clear(self) -> int:
        """Delete all files of measurements, and what a process that died has left of them. Return the number of measurements.

        Raise OSError if a file cannot be deleted.
        """
        number = 0
        with suppress(FileNotFoundError, NotADirectoryError), _opened(_env.cache_dir(), self.folder) as folder:
            for name in os.listdir(folder.number):
                number += SAVED_FILES.delete(folder, name) and SAVED_FILES.is_entry(name)
        return number

    def _read(self, name: str, make: Callable[[dict[str, Any]], _Result]) -> _Result:
        """Return what `make` makes of a file of this version.

        Raise UnusableFile if the file must not be used, and OSError if there is none, or a folder cannot be opened.
        """
        reasons: list[str | None] = []
        with _opened(_env.cache_dir(), self.folder, lambda path, reason: reasons.append(reason)) as folder:

            def objection_to(status: os.stat_result) -> str | None:
                return next(filter(None, reasons), None) or objection(status, folder.is_enclosed)

            data = read_file(name, folder, _MAX_SAVED_BYTES, objection_to)

        def make_checked(document: dict[str, Any]) -> _Result:
            check_document(document, {"format": is_in(self.version, self.version), **self.fields})
            return make(document)

        return parse(data, make_checked)

    @staticmethod
    def _name(key: Key) -> str:
        return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + _SAVED_SUFFIX
