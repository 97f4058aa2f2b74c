"""Files with the statistics of each Buffer of a job, for `python -m deepep_rt statistics`: one for each rank, written once a second.

One thread of a process writes the files of its Buffers. It takes no call lock: it reads numbers that only grow, and a call that came
meanwhile would be refused. On GPUs it copies a few kilobytes on a stream of its own, which waits for no other stream and is safe during
captures of CUDA graphs.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import platform
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import _env
from ._documents import (
    Check,
    UnusableFile,
    check_document,
    has_fields,
    is_count,
    is_flag,
    is_in,
    is_list_of,
    is_seconds,
    is_text,
    parse,
)
from .backends.base import Backend
from .jit.trusted_files import Folder, objection_unless_same_owner, open_folder, read_file, replace_file
from .statistics import CALL_KINDS, NUMBERS, CallStatistics, PoolUse, Statistics

_log = logging.getLogger("deepep_rt")
_FORMAT = 1
_PERIOD_S, _INTERVAL_S, _EXIT_TIMEOUT_S = 1.0, 5.0, 2.0
_MAX_BYTES = 1 << 24  # 1,024 ranks have 200 KB
_IS_NUM_RANKS = is_in(1, 1 << 16)
_FIELDS: dict[str, Check] = {
    "format": is_in(_FORMAT, _FORMAT),
    "buffer": is_text,
    "num_ranks": _IS_NUM_RANKS,
    "host": is_text,
    "pid": is_count,
    "written_at": is_seconds,
    "has_ended": is_flag,
}


@dataclass(frozen=True)
class Snapshot:
    """The file of one rank."""

    buffer: str  # its name, equal on all ranks
    num_ranks: int
    host: str
    pid: int
    written_at: float  # in seconds since 1970
    has_ended: bool  # whether the Buffer was destroyed
    now: Statistics  # the numbers at the time of `written_at`
    earlier: Statistics  # those of a few seconds before


def read(folder: Path) -> tuple[list[Snapshot], list[tuple[str, str]]]:
    """Read the files of a folder, to which any user may have written. Raise OSError if the folder cannot be read.

    Return the files, and the names of those that are no such files, each with the reason.
    """
    found, unknown = [], []
    with open_folder(folder) as opened:
        for name in sorted(name for name in os.listdir(opened.number) if name.endswith(".json") and not name.startswith(".")):
            try:
                found.append(parse(read_file(name, opened, _MAX_BYTES, partial(_objection, opened)), _snapshot))
            except FileNotFoundError:  # removed meanwhile
                continue
            except UnusableFile as error:
                unknown.append((name, str(error)))
    return found, unknown


def _objection(folder: Folder, status: os.stat_result) -> str | None:
    return objection_unless_same_owner(status, folder)


def _snapshot(content: dict[str, Any]) -> Snapshot:
    if not _IS_NUM_RANKS(ranks := content["num_ranks"]):
        raise ValueError(f"num_ranks={ranks}")
    numbers = has_fields(_fields_of_numbers(ranks))
    check_document(content, {**_FIELDS, "now": numbers, "earlier": numbers})
    del content["format"]
    now, earlier = (_statistics(content.pop(name)) for name in ("now", "earlier"))
    return Snapshot(**content, now=now, earlier=earlier)


def _fields_of_numbers(num_ranks: int) -> dict[str, Check]:
    """Return the members of `Statistics.to_dict`, with a check of each value."""
    of_calls = has_fields({**dict.fromkeys(NUMBERS, is_count), "wait_s": is_list_of(is_seconds, num_ranks)})
    return {
        "rank": is_in(0, num_ranks - 1),
        "seconds": is_seconds,
        "rows_by_expert": is_list_of(is_count),
        "pool": has_fields(dict.fromkeys((field.name for field in dataclasses.fields(PoolUse)), is_count)),
        **dict.fromkeys(CALL_KINDS, of_calls),
    }


def _statistics(content: Mapping[str, Any]) -> Statistics:
    """Undo `Statistics.to_dict`."""
    calls = {kind: CallStatistics(**{**content[kind], "wait_s": tuple(content[kind]["wait_s"])}) for kind in CALL_KINDS}
    rows, pool = tuple(content["rows_by_expert"]), PoolUse(**content["pool"])
    return Statistics(rank=content["rank"], seconds=content["seconds"], rows_by_expert=rows, pool=pool, **calls)


class StatisticsFile:
    """The file of this rank for one Buffer. It does not hold the backend."""

    def __init__(self, folder: Path, backend: Backend, rank: int, num_ranks: int) -> None:
        self._backend, self._rank, self._made_at = weakref.ref(backend), rank, time.monotonic()
        self._lock, self._has_ended, self._has_failed = threading.RLock(), False, False
        self._recent: deque[Statistics] = deque()  # of the last _INTERVAL_S, oldest first
        self._common = {
            "format": _FORMAT,
            "buffer": backend.shared_name,
            "num_ranks": num_ranks,
            "host": platform.node(),
            "pid": os.getpid(),
        }
        self._path = folder / f"{re.sub(r'[^-.0-9A-Za-z]', '_', backend.shared_name)}-rank{rank}.json"

    @property
    def is_open(self) -> bool:
        """Whether the program still holds the Buffer, and has not destroyed it."""
        return not self._has_ended and self._backend() is not None

    def write(self, has_ended: bool = False) -> None:
        """Write the file anew. A reader sees the old or the new one. `has_ended`: for the last time."""
        with self._lock:
            backend = self._backend()
            if self._has_ended or backend is None:
                return
            self._has_ended = has_ended
            try:
                self._write(backend.counters(during_capture=True).of_rank(self._rank, time.monotonic() - self._made_at))
            except Exception as error:  # the program goes on without this file
                if not self._has_failed:
                    _log.warning("rank %d: %s cannot be written: %s", self._rank, self._path, error)
                self._has_failed = True

    def _write(self, now: Statistics) -> None:
        self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1].seconds <= now.seconds - _INTERVAL_S:
            self._recent.popleft()
        changing = {"written_at": time.time(), "has_ended": self._has_ended, "now": now.to_dict()}
        content = {**self._common, **changing, "earlier": self._recent[0].to_dict()}
        with open_folder(self._path.parent, make=True) as folder:
            replace_file(self._path.name, folder, json.dumps(content).encode())


class _Writer:
    """The thread that writes the files of this process. It runs while there are Buffers with files."""

    def __init__(self) -> None:
        self._files: weakref.WeakKeyDictionary[Any, StatisticsFile] = weakref.WeakKeyDictionary()  # by Buffer
        self._lock, self._stop = threading.RLock(), threading.Event()  # a signal handler may destroy a Buffer
        self._thread: threading.Thread | None = None

    def add(self, buffer: Any, file: StatisticsFile) -> None:
        file.write()
        with self._lock:
            self._files[buffer] = file
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deepep_rt statistics", daemon=True)
                self._thread.start()

    def end(self, buffer: Any) -> None:
        with self._lock:
            file = self._files.pop(buffer, None)
        if file is not None:
            file.write(has_ended=True)

    def stop(self) -> None:
        """Stop before Python ends: a thread that calls CUDA then could crash the process."""
        self._stop.set()
        if (thread := self._thread) is not None:
            thread.join(_EXIT_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            with self._lock:
                files = [file for file in self._files.values() if file.is_open]
                if not files:
                    self._thread = None
                    return
            for file in files:
                file.write()


_writer = _Writer()
atexit.register(lambda: _writer.stop())


def _forget_after_fork() -> None:
    """The thread and the files stay with the parent process."""
    global _writer
    _writer = _Writer()


os.register_at_fork(after_in_child=_forget_after_fork)


def follow(buffer: Any, backend: Backend, rank: int) -> None:
    """Write the statistics of a new Buffer once a second, if `DEEPEP_RT_STATISTICS` names a folder."""
    folder = _env.statistics_folder()
    if folder is not None:
        _writer.add(buffer, StatisticsFile(folder, backend, rank, backend.info.config.num_ranks))


def end(buffer: Any) -> None:
    """Write the statistics of a Buffer for the last time, after it was destroyed."""
    with suppress(Exception):  # the caller may be in the middle of another error
        _writer.end(buffer)
