"""Files in folders that other users may write: read only regular files, follow no links, check owners, permissions and sizes.

A file is opened inside an open folder, and the open file is checked. A path that changes meanwhile has no effect.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .._documents import UnusableFile

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a FIFO must not wait
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Folder:
    """An open folder."""

    number: int  # its file descriptor
    objection: str | None  # the reason why its contents must not be trusted; None if they may be trusted
    is_enclosed: bool  # whether only the owners may write it and the folders above it. Other users cannot have added files


@contextmanager
def open_folder(path: Path, *, make: bool = False) -> Iterator[Folder]:
    """Open a folder by its path, and follow links in the path. `make` creates it, and the folders above it, if necessary.

    Other users may write it, as `/tmp` or an empty volume of a container. They own the files that they add, and these are refused.

    Raise OSError if it cannot be opened or created, or is no folder.
    """
    if make:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    number = os.open(path, _FOLDER)
    try:
        status = status_of(number)
        is_enclosed = not any(parent.stat().st_mode & _OTHERS_WRITE for parent in _folders_above(path))
        yield Folder(number, _owner_objection(status, is_enclosed), is_enclosed and not status.st_mode & _OTHERS_WRITE)
    finally:
        os.close(number)


@contextmanager
def open_inner(name: str, parent: Folder, *, make: bool = False) -> Iterator[Folder]:
    """Open a folder inside an open one. Arguments and errors are those of `open_folder`. A link is an error too."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent.number)
    try:
        number = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent.number)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder, or a link to one", name) from None
        raise
    try:
        status = status_of(number)
        is_enclosed = parent.is_enclosed and not status.st_mode & _OTHERS_WRITE
        yield Folder(number, objection(status, parent.is_enclosed), is_enclosed)
    finally:
        os.close(number)


def _folders_above(path: Path) -> Sequence[Path]:
    return path.resolve().parents


def open_file(name: str, folder: Folder, flags: int, mode: int = 0o600) -> int:
    """Open a regular file inside an open folder. Return its descriptor.

    Raise OSError if it cannot be opened, or is not a regular file, but a link or a FIFO, for example.
    """
    try:
        number = os.open(name, flags | _FILE, mode, dir_fd=folder.number)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket, or a FIFO that no process reads
            raise OSError(errno.EINVAL, "it is no regular file", name) from None
        raise
    if not stat.S_ISREG(status_of(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", name)
    return number


def read_file(name: str, folder: Folder, most_bytes: int, objection_to: Callable[[os.stat_result], str | None]) -> bytes:
    """Return the content of a regular file in an open folder.

    `objection_to` gets the status of the open file. It returns the reason why the content must not be used, or None.

    Raises:
        FileNotFoundError: if there is no such file.
        UnusableFile: if the file cannot be read, is no regular file, is too large, or must not be used.
    """
    try:
        with os.fdopen(open_file(name, folder, os.O_RDONLY), "rb") as file:
            if reason := objection_to(status_of(file.fileno())):
                raise UnusableFile(reason)
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFile(f"it cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise UnusableFile(f"it has more than {most_bytes} bytes")
    return data


def replace_file(name: str, folder: Folder, data: bytes, mode: int | None = None, *, lasting: bool = False) -> None:
    """Write a file whole. A reader sees the old content or the new one. Raise OSError if it cannot be written. The old file then stays.

    Without `mode`, the permissions are those of the process for new files, but other users may not write it. `lasting` writes it to the
    disk before it gets its name. A machine that stops in between leaves the old file.
    """
    draft = f".{name.partition('.')[0][:64]}.{secrets.token_hex(4)}.tmp"
    number = open_file(draft, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(number, "wb") as file:
            if lasting:
                is_locked_elsewhere(number)  # takes the lock, so that clearing the store keeps the file
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(number)
            if mode is not None:
                os.fchmod(number, mode)
            os.replace(draft, name, src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder.number)
        raise


def is_locked_elsewhere(number: int) -> bool:
    """Return whether another process holds the lock of an open file. Otherwise take the lock, if the file system has locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def status_of(number: int) -> os.stat_result:
    """Return the status of an open file."""
    return os.fstat(number)


def objection(status: os.stat_result, is_enclosed: bool) -> str | None:
    """Return the reason why an open file or folder must not be trusted, or None. `status` is from `status_of`.

    `is_enclosed` is that of its folder.
    """
    if reason := _owner_objection(status, is_enclosed):
        return reason
    if status.st_mode & stat.S_IWOTH:
        return "every user may write it"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"group {_group_name(status.st_gid)} may write it"
    return None


def _owner_objection(status: os.stat_result, is_enclosed: bool) -> str | None:
    """Trust this user and root. In enclosed folders, root also trusts every other owner: only root can have put such files there.

    A container shows files of the host's users under other numbers: a mounted cache belongs to user 1000, or an image of root to 65534.
    """
    user = os.geteuid()
    if status.st_uid in (user, 0) or (is_enclosed and (user == 0 or status.st_uid == _number_of_unmapped_root())):
        return None
    return f"user {_user_name(status.st_uid)} owns it"


@functools.cache
def _number_of_unmapped_root() -> int | None:
    """Return the number under which a user namespace shows root's files; None if root is mapped into it."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if any(line.split()[1] == "0" for line in lines):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError, IndexError):
        return None


def _is_own_group(group: int) -> bool:
    """Return whether a group contains this user alone. Many systems create such a group for each user."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def objection_unless_same_owner(status: os.stat_result, folder: Folder) -> str | None:
    """Return the reason why the numbers in a file must not be shown, or None. The owner of the folder is trusted too.

    So a user can look at the folder of another user's job, but not at what third users have added to it.
    """
    if status.st_uid == status_of(folder.number).st_uid and not status.st_mode & stat.S_IWOTH:
        return None
    return objection(status, folder.is_enclosed)


def _user_name(number: int) -> str:
    try:
        return f"{number} ({pwd.getpwuid(number).pw_name})"
    except KeyError:
        return str(number)


def _group_name(number: int) -> str:
    try:
        return f"{number} ({grp.getgrgid(number).gr_name})"
    except KeyError:
        return str(number)
