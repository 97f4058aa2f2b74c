"""Folders that outlive a run of the tests: libraries that were compiled for the CPU, and compiled kernels."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from deepep_rt import _env
from deepep_rt.jit.trusted_files import objection, open_folder, status_of

MAX_BYTES = 1 << 30
_MAX_AGE_OF_UNFINISHED_S = 86400.0


@functools.cache
def folder() -> Path:
    """Return the folder next to the kernel cache of this user. If that one cannot be used, return one of this process.

    conftest.py calls this first, because tests set `DEEPEP_RT_CACHE_DIR`.
    """
    cache = _env.cache_dir()
    path = cache.with_name(cache.name + "_tests")
    with suppress(OSError), open_folder(path, make=True) as opened:
        is_trusted = objection(status_of(opened.number), opened.is_enclosed) is None  # its libraries run in this process
        if is_trusted and os.access(path, os.W_OK):
            return path
    path = Path(tempfile.mkdtemp(prefix="deepep_rt_tests_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def kernels() -> Path:
    """Return the folder of a kernel cache. Its keys hold all that decides the code, so that no test gets kernels of other sources."""
    return folder() / "kernels"


def delete_oldest(kept: Path, max_bytes: int = MAX_BYTES) -> None:
    """Delete the files that were not used for the longest time, until the others have at most `max_bytes`. Compilers make them again.

    Other processes may use the folder meanwhile. A process that has opened a file keeps it.
    """
    found = []
    for path in kept.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            found.append((status.st_mtime, status.st_size, path))
    num_bytes = sum(size for _, size, _ in found)
    for used, size, path in sorted(found):
        if path.is_dir() and path.name.startswith(UNFINISHED) and used < time.time() - _MAX_AGE_OF_UNFINISHED_S:
            shutil.rmtree(path, ignore_errors=True)  # a run that was killed left it
        elif num_bytes > max_bytes and path.is_file():
            path.unlink(missing_ok=True)
            num_bytes -= size


UNFINISHED = "unfinished-"
"""Begin the names of folders in which compilers work."""
