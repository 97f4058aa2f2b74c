"""What ranks do together or not at all, and how long they wait for each other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..config import MAX_TIMEOUT_S
from ..errors import EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from .communicator import Communicator
from .timed_collectives import format_ranks, wait_all

_ARRIVING, _ARRIVED = 1, 2
_NUM_WORDS = 8  # always: what one rank says in a meeting that it gave up may be met by what another one says in the next


def timed_allgather(comm: Communicator, values: Sequence[int], timeout_s: float, phase: str, hint: str) -> list[list[int]]:
    """Gather some numbers of each rank, but do not wait longer than `timeout_s` for a rank that does not come.

    A rank that comes too late finds the words of those who have given up, and must not go on alone. So all say again that they have heard
    all, until all say so at once.

    Returns:
        The numbers of each rank, as many as this one gives: up to 7.

    Raises:
        EPTimeoutError: if not all came; it names those that did not.
    """
    said, heard = _ARRIVING, np.zeros((comm.Get_size(), _NUM_WORDS), np.int64)
    while True:
        mine = np.zeros(_NUM_WORDS, np.int64)
        mine[: 1 + len(values)] = said, *values
        comm.finish(comm.Iallgather(mine, heard), (mine, heard), phase, hint, timeout_s)
        if (heard[:, 0] == _ARRIVED).all():
            return heard[:, 1 : 1 + len(values)].tolist()
        said = _ARRIVED


_MEASURE = "copy_ceiling", "all ranks to call it"


def agree_on_measurement(comm: Communicator, timeout_s: float, *, has_memory: bool = True, **given: int) -> None:
    """Compare the arguments of a measurement that all ranks begin.

    Raises:
        EPInputError: on every rank, if they differ.
        EPOutOfMemoryError: on every rank, if one has no memory for it.
        EPTimeoutError: if a rank does not come.
    """
    said = timed_allgather(comm, (has_memory, *given.values()), timeout_s, *_MEASURE)
    if any(theirs[1:] != said[0][1:] for theirs in said):
        rows = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in zip(given, theirs[1:], strict=True))
            for rank, theirs in enumerate(said)
        )
        raise EPInputError(f"copy_ceiling: {rows}; expected the same on all ranks. Call it with the same arguments everywhere")
    if without := [rank for rank, theirs in enumerate(said) if not theirs[0]]:
        raise EPOutOfMemoryError(
            f"copy_ceiling: no memory for the rows on {format_ranks(without)}; expected room. Give a smaller num_rows"
        )


def begin_measurement(comm: Communicator, timeout_s: float) -> None:
    """Wait until all ranks begin, as exactly as messages can tell."""
    timed_allgather(comm, (), timeout_s, *_MEASURE)
    comm.Barrier()


def private_comm(comm: Communicator, timeout_s: float, phase: str, hint: str) -> Communicator:
    """A communicator of ours over the same ranks: who gives up waiting leaves half of a collective behind, and on the caller's, that would
    be taken for one of the caller's.
    """
    own, request = comm.begin_private_comm()
    comm.finish(request, own, phase, hint, timeout_s)
    own.timeout_s = timeout_s
    return own


_REMINDER_S = 30.0  # a rank that waits longer says so this often


_COMPILING_S = 900.0  # for a part of making a Buffer: one rank may compile all kernels
_MAKE = "make their part of a Buffer"


class Consensus:
    """What all ranks do together, or none: the parts of making a Buffer, and freeing symmetric memory.

    A rank that cannot - an error threw it out, or it leaves others out - says so and goes its way, and is not asked again. The others wait
    until all have come or said so.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.Dup()  # of its own: who goes early says so in the middle of anything
        self._round = 0
        self.silent_ranks: list[int] = []
        """The ranks from which the last `holds` heard nothing in time."""

    def all_ok(self, sound: bool, what: str, timeout_s: float) -> bool:
        """Whether all ranks are here and sound, as this one is or is not.

        Args:
            sound: Whether this one is.
            what: What they are here to do, for the warning where one keeps the others waiting.
            timeout_s: After how long a silent rank is taken for lost.
        """
        self._waited_for, self.silent_ranks = (what, timeout_s), []
        try:  # A rank that comes too late finds everybody's word all the same; nobody answers it the second time.
            return all(self._hear_all(sound, what, timeout_s) for _ in range(2))
        except EPUnavailableError:  # the process that held the store has ended
            return False

    def timeout_error(self) -> EPTimeoutError:
        """The error for the ranks that were silent in the last `holds`."""
        what, timeout_s = self._waited_for
        return self._comm.timeout_error(self.silent_ranks, f"waiting for all ranks to {what}", f"all ranks to {what}", timeout_s)

    def _hear_all(self, sound: bool, what: str, timeout_s: float) -> bool:
        """Tell every rank, and hear of all whether they are sound too. Who is not hears nobody.

        Small messages from rank to rank: a collective would need whoever has gone to pass on what the others say.
        """
        self._round += 1
        peers = [peer for peer in range(self._comm.Get_size()) if peer != self._comm.Get_rank()]
        word, words = np.array([sound]), np.zeros(len(peers), bool)
        requests = [self._comm.Isend(word, peer, self._round) for peer in peers]
        if not sound:
            self._comm.retain(requests, word)
            return False
        requests += [self._comm.Irecv(words[i : i + 1], peer, self._round) for i, peer in enumerate(peers)]
        start = time.monotonic()
        while not wait_all(requests, min(_REMINDER_S, start + timeout_s - time.monotonic())):
            waited_s = time.monotonic() - start
            self.silent_ranks = sorted({peer for peer, request in zip(2 * peers, requests, strict=True) if not request.Test()})
            if waited_s > timeout_s:
                self._comm.retain(requests, word, words)
                return False
            warnings.warn(  # no log line, which nobody might see: this may be why the program stands still
                f"rank {self._comm.Get_rank()} has waited {waited_s:.0f} of {timeout_s:g} s for {format_ranks(self.silent_ranks)} "
                f"to {what}. Check that they are alive, and come to this call",
                stacklevel=2,
            )
        self.silent_ranks = []
        return bool(words.all())

    @contextmanager
    def step(self) -> Iterator[None]:
        """A part of making something, in which ranks may fail one by one. Who does raises its error, and the others are not left waiting.

        Raises:
            EPUnavailableError: where another rank failed.
            EPTimeoutError: where another rank is silent.
        """
        made = False
        try:
            yield
            made = True
        finally:
            limit_s = min(max(self._comm.timeout_s, _COMPILING_S), MAX_TIMEOUT_S)
            all_made = self.all_ok(made, _MAKE, limit_s)
        if self.silent_ranks:
            raise self.timeout_error()
        if not all_made:
            raise EPUnavailableError("another rank could not make its part of this Buffer; what it raised tells why")

    def free(self) -> None:
        self._comm.Free()
