"""The lock of a cache entry: a lock file that one process holds while it compiles the kernel."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from .trusted_files import Folder, open_file, status_of

_log = logging.getLogger("deepep_rt")


def lock_file(folder: Folder, path: Path, timeout_s: float, deadline: float) -> int | None:
    """Open and lock a lock file. Return its descriptor, or None if it cannot be locked in time.

    Args:
        folder: The open folder of the file.
        path: Its path.
        timeout_s: The limit of the caller, for the warning.
        deadline: The time at which to stop waiting, on the monotonic clock.

    Raises:
        FileNotFoundError: if another process deleted the file meanwhile. The caller tries again.
        OSError: if the folder cannot be written.
    """
    number = _open(folder, path)
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
    raise FileNotFoundError(errno.ENOENT, "the lock file was deleted and created again", str(path))


def _open(folder: Folder, path: Path) -> int | None:
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


def _acquire(number: int, path: Path, timeout_s: float, deadline: float) -> bool:
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
