"""The files of the kernel cache: their names, atomic writes, and deletion of files that this library made."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from .cache_entry import FAMILY, KEY
from .trusted_files import Folder, open_file

SUFFIX = ".kernel"
LOCK_SUFFIX = ".lock"

_NAMES = re.compile(
    rf"(?P<entry>{KEY.pattern}\{SUFFIX})|(?P<lock>{KEY.pattern}\{LOCK_SUFFIX})|\.(?P<key>{KEY.pattern}\.)?\w{{8}}\.tmp", re.ASCII
)
_ATTEMPTS = 100  # an attempt fails only if `clear` deletes the file at the same moment
_T = TypeVar("_T")


def is_entry(name: str) -> bool:
    """Return whether a file name is that of an entry."""
    return bool((match := _NAMES.fullmatch(name)) and match["entry"])


def retry(call: Callable[[], _T]) -> _T:
    """Repeat a call that fails because another process deletes files or folders of the cache at the same time."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError, FileExistsError):  # mkdir raises FileExistsError if the folder disappears meanwhile
            return call()
    return call()


def write_entry(folder: Folder, key: str, data: bytes) -> None:
    """Create or replace an entry. A reader sees the complete old entry or the complete new one."""
    name = f".{key}.{secrets.token_hex(4)}.tmp"
    number = open_file(name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(number, "wb") as file:
            _is_locked_elsewhere(number)  # takes the lock, so that `clear` keeps the file
            file.write(data)
            file.flush()
            os.fsync(number)
            os.fchmod(number, 0o644)  # other users of a shared cache read it
            os.replace(name, f"{key}{SUFFIX}", src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder.number)
        raise


def delete(folder: Folder, name: str) -> bool:
    """Delete a file if this library made it and no process uses it. Return whether it was deleted."""
    match = _NAMES.fullmatch(name)
    if not match:
        return False
    try:
        number = open_file(name, folder, os.O_RDONLY)
    except OSError:  # not a regular file, already deleted, or not readable: this library may not have made it
        return False
    try:
        start = os.read(number, len(FAMILY))
        is_own = start == FAMILY or (not start and (match["lock"] or match["key"]))
        if not is_own or (not match["entry"] and _is_locked_elsewhere(number)):
            return False
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder.number)
    finally:
        os.close(number)
    return True


def _is_locked_elsewhere(number: int) -> bool:
    """Return whether another process holds the lock of an open file. Otherwise take the lock, if the file system has locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False
