"""`SharedCounts`: host memory in which the ranks of a host tell each other their numbers of tokens."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..comm.communicator import Communicator
from ..config import MAX_EXPERTS
from ..errors import EPTimeoutError, EPUnavailableError

_PREFIX = "deepep_rt-"  # of the file's name
_MAX_WORDS = 2 + MAX_EXPERTS  # of a rank: its numbers of tokens and rows, and a count for each expert


class SharedCounts:
    """Memory that all ranks of a host map. Each rank writes its numbers for the others. The constructor is collective.

    A word holds a number and the number of its call, so a reader sees whether the word belongs to the current call. Even and odd calls use
    separate words. A rank that writes for call n + 2 has seen that all ranks started call n + 1, so they have read the words of call n.

    Args:
        comm: The ranks, all on one host.
        timeout_s: How long `read` waits for a rank.

    Raises:
        EPUnavailableError: On every rank, if they cannot map the same memory.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._call = comm.Get_rank(), timeout_s, 1
        shape = (2, comm.Get_size(), _MAX_WORDS)
        num_bytes = 8 * int(np.prod(shape))
        memory, problem = None, None
        with ExitStack() as at_end:  # also if a rank does not come, or a signal handler raises
            path = None
            try:
                path = _make_file(num_bytes, at_end) if self._rank == 0 else None
            except OSError as error:
                problem = f"rank {self._rank}: {error}"
            path = comm.bcast(path)
            try:
                if path is not None:
                    with _open_file(path, num_bytes) as opened:
                        memory = mmap.mmap(opened.fileno(), num_bytes)
            except OSError as error:
                problem = f"rank {self._rank}: {error}"
            problems = [found for found in comm.allgather(problem) if found]
        if problems or memory is None:
            raise EPUnavailableError(
                f"the ranks of this host cannot share memory ({problems[0]}); expected one /dev/shm or temporary folder for all. "
                f"Start them in one container."
            )
        self._words = np.frombuffer(memory, np.int64).reshape(shape)

    def post(self, numbers: Sequence[int]) -> None:
        """Write this rank's numbers for the current call, each from 0 to 2**31 - 1.

        The rank may write again until all ranks have started the call.
        """
        self._words[self._call % 2, self._rank, : len(numbers)] = np.asarray(numbers, np.int64) | self._call << 32

    def read(self, count: int) -> np.ndarray:
        """Return the first `count` numbers of all ranks, `[num_ranks, count]` int64, and end the current call.

        Raises:
            EPTimeoutError: If a rank did not write its numbers.
        """
        words = self._words[self._call % 2, :, :count]
        deadline = time.monotonic() + self._timeout_s
        while not ((found := words.copy()) >> 32 == self._call).all():
            if time.monotonic() > deadline:
                late = int((found >> 32 != self._call).any(axis=1).argmax())
                raise EPTimeoutError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for the number of tokens of rank {late}. "
                    f"Call dispatch in the same way on all ranks, with topk_idx or without.",
                    rank=self._rank,
                    peer=late,
                    phase="the number of tokens",
                )
        self._call += 1
        return found & 0xFFFFFFFF

    def close(self, in_touch: bool) -> None:
        """Do nothing: the memory goes with the last process that maps it."""


def _make_file(num_bytes: int, at_end: ExitStack) -> str:
    """Make a new file, which `at_end` removes. It lies in memory if /dev/shm is writable."""
    number, path = tempfile.mkstemp(prefix=_PREFIX, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    at_end.callback(os.unlink, path)
    at_end.callback(os.close, number)
    os.ftruncate(number, num_bytes)
    return path


def _open_file(path: str, num_bytes: int) -> BinaryIO:
    """Open the file that rank 0 made. Refuse any other path, because others may write to the store that brought it."""
    file = Path(path)
    if not file.name.startswith(_PREFIX) or file.is_symlink() or file.stat().st_size != num_bytes:
        raise OSError(f"path={path!r}; expected a file of {num_bytes} bytes that rank 0 made")
    return file.open("r+b")
