"""Small files with measurements, kept next to the compiled kernels: one for each key, which is what the measurement depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import _env
from ..errors import EPConfigError
from ..jit.trusted_files import Folder, objection, open_file, open_folder, open_inner, status_of

_log = logging.getLogger("deepep_rt")

_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_Found = TypeVar("_Found")
Key = Mapping[str, Any]
"""Everything that a measurement depends on, as values that JSON can hold."""


@dataclass(frozen=True)
class SavedFiles:
    """The files of one kind of measurement.

    Args:
        folder: Their folder in the folder of the kernel cache.
        what: The name of the measurements, for the log.
        key_name: The member of a file with its key.
        version: The version of the files. Others are ignored.
    """

    folder: str
    what: str
    key_name: str
    version: int = 1

    def load(self, key: Key, parse: Callable[[dict[str, Any]], _Found]) -> _Found | None:
        """Return what `parse` makes of the file of a key; None without one. A file that is damaged, or that another user may have
        written, is ignored, with a message in the log.

        Args:
            key: The key.
            parse: Gets the file's members. For a file that it cannot read it raises ValueError, KeyError, TypeError or AttributeError.
        """
        name = self._name(key)
        try:
            reason, text = self._read(name)
        except (FileNotFoundError, NotADirectoryError, EPConfigError):  # there is none, or no folder for it
            return None
        except OSError as error:
            reason, text = f"it cannot be read: {error.strerror}", b""
        if reason is None:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                document = json.loads(text)
                if (document["format"], document[self.key_name]) == (self.version, json.loads(json.dumps(dict(key)))):
                    return parse(document)
        path = _env.cache_dir() / self.folder / name
        _log.warning("%s: %s is ignored: %s", self.what, path, reason or "it is not one that this version wrote")
        return None

    def save(self, key: Key, content: Mapping[str, Any]) -> Path | None:
        """Write the file of a key, whole or not at all. Return its path; None, with a message in the log, if that fails."""
        name = self._name(key)
        data = json.dumps({"format": self.version, self.key_name: dict(key), **content}, indent=1, sort_keys=True).encode()
        try:
            with open_folder(_env.cache_dir(), make=True) as base, open_inner(self.folder, base, make=True) as folder:
                _replace(folder, name, data)
        except (OSError, EPConfigError) as error:
            _log.info("%s cannot be saved: %s", self.what, error)
            return None
        return _env.cache_dir() / self.folder / name

    def all(self) -> list[dict[str, Any]]:
        """Return the members of all files of this version, by name. Files that cannot be read or trusted are left out."""
        found = []
        for name in self._names():
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                reason, text = self._read(name)
                document = json.loads(text)
                if reason is None and document["format"] == self.version and isinstance(document[self.key_name], dict):
                    found.append(document)
        return found

    def clear(self) -> int:
        """Delete all files. Return their number.

        Raises:
            OSError: if a file cannot be deleted.
        """
        number = 0
        for name in self._names():
            with open_folder(_env.cache_dir()) as base, open_inner(self.folder, base) as folder, suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.number)
                number += 1
        return number

    def _names(self) -> list[str]:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            open_folder(_env.cache_dir()) as base,
            open_inner(self.folder, base) as inner,
        ):
            return sorted(filter(_NAME.fullmatch, os.listdir(inner.number)))
        return []

    def _read(self, name: str) -> tuple[str | None, bytes]:
        """Return the reason why a file must not be trusted, or None, and its content."""
        with open_folder(_env.cache_dir()) as base, open_inner(self.folder, base) as folder:
            number = open_file(name, folder, os.O_RDONLY)
            with os.fdopen(number, "rb") as file:
                reason = base.objection or folder.objection or objection(status_of(number), folder.is_enclosed)
                return reason, file.read(_MAX_BYTES + 1)

    @staticmethod
    def _name(key: Key) -> str:
        return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + ".json"


def _replace(folder: Folder, name: str, data: bytes) -> None:
    """Write a file whole. A reader sees the old content or the new one."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    number = open_file(temporary, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            os.fchmod(number, 0o644)
            os.replace(temporary, name, src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder.number)
        raise
