"""Small files with measurements, kept next to the compiled kernels: one for each key, which is what the measurement depends on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import _env
from .._documents import Check, UnusableFile, check_document, is_in, parse
from ..errors import EPConfigError
from ..jit.trusted_files import Folder, objection, open_folder, open_inner, read_file, replace_file

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
        fields: The members of a file, with a check of each value.
        version: The version of the files. Others are ignored.
    """

    folder: str
    what: str
    key_name: str
    fields: Mapping[str, Check]
    version: int = 1

    def load(self, key: Key, make: Callable[[dict[str, Any]], _Found]) -> _Found | None:
        """Return what `make` makes of the file of a key; None without one. A file that is damaged, or that another user may have
        written, is ignored, with a message in the log.

        Args:
            key: The key.
            make: Gets the file's members. It raises any exception for members that do not fit together.
        """
        name, wanted = self._name(key), json.loads(json.dumps(dict(key)))

        def make_of_key(document: dict[str, Any]) -> _Found:
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
            with open_folder(_env.cache_dir(), make=True) as base, open_inner(self.folder, base, make=True) as folder:
                replace_file(name, folder, data, mode=0o644)  # other users of a shared cache read it
        except (OSError, EPConfigError) as error:
            _log.info("%s cannot be saved: %s", self.what, error)
            return None
        return _env.cache_dir() / self.folder / name

    def all(self) -> list[dict[str, Any]]:
        """Return the members of all files of this version, by name. Files that cannot be read or trusted are left out."""
        found = []
        for name in self._names():
            with suppress(OSError, UnusableFile):
                found.append(self._read(name, dict))
        return found

    def clear(self) -> int:
        """Delete all files. Return their number.

        Raises:
            OSError: if a file cannot be deleted.
        """
        number = 0
        for name in self._names():
            with self._opened() as folder, suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.number)
                number += 1
        return number

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError), self._opened() as folder:
            return sorted(filter(_NAME.fullmatch, os.listdir(folder.number)))
        return []

    def _read(self, name: str, make: Callable[[dict[str, Any]], _Found]) -> _Found:
        """Return what `make` makes of a file of this version.

        Raises:
            UnusableFile: if the file must not be used.
            OSError: if there is none, or a folder cannot be opened.
        """
        with open_folder(_env.cache_dir()) as base, open_inner(self.folder, base) as folder:

            def objection_to(status: os.stat_result) -> str | None:
                return base.objection or folder.objection or objection(status, folder.is_enclosed)

            data = read_file(name, folder, _MAX_BYTES, objection_to)

        def make_checked(document: dict[str, Any]) -> _Found:
            check_document(document, {"format": is_in(self.version, self.version), **self.fields})
            return make(document)

        return parse(data, make_checked)

    @contextmanager
    def _opened(self) -> Iterator[Folder]:
        with open_folder(_env.cache_dir()) as base, open_inner(self.folder, base) as folder:
            yield folder

    @staticmethod
    def _name(key: Key) -> str:
        return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + ".json"
