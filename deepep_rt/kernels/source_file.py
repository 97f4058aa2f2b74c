"""A file of CUDA source, read once in a process.

Each kernel's key holds the texts of its source and headers. Kernels share most headers, so a Buffer would read each header many times.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_SETTLED_NS = 2_000_000_000
"""The age from which a file counts as settled. Within the resolution of a file system's clock, a second change would not show."""


@dataclass(frozen=True)
class SourceFile:
    """A file of CUDA source.

    Attributes:
        text: Its content.
        words: Each identifier, keyword and number in it.
        includes: The headers that it names in quotes, relative to the folder of the sources.
    """

    text: str
    words: frozenset[str]
    includes: tuple[str, ...]


_known: dict[str, tuple[tuple[int, ...], SourceFile]] = {}
"""Stamp and content of each settled file, by path."""


def read_source(path: str) -> SourceFile:
    """Read a file, or return what it held when it was read before. A changed file is read again.

    Raises:
        OSError: if it cannot be read.
    """
    status = os.stat(path)
    stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
    known = _known.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    text = Path(path).read_text()
    found = SourceFile(text, words_of(text), tuple(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)))
    if time.time_ns() - max(stamp[:2]) > _SETTLED_NS:
        _known[path] = stamp, found
    return found


def words_of(text: str) -> frozenset[str]:
    """Return each identifier, keyword and number in a text."""
    return frozenset(re.findall(r"\w+", text))
