"""What ranks do together or not at all, and how long they wait for each other."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from .communicator import Communicator
from .errors import EPTimeoutError, EPUnavailableError

_ARRIVING, _ARRIVED = 1, 2


def meet(comm: Communicator, value: int, timeout_s: float, phase: str, hint: str) -> list[int]:
    """Gather a number from all ranks, but do not wait longer than `timeout_s` for one that does not come.

    A rank that comes too late finds the words of those who have given up, and must not go on alone. So all say again that they have heard
    all, until all say so at once.

    Raises:
        EPTimeoutError: if not all came.
    """
    said, values = _ARRIVING, np.zeros((comm.Get_size(), 2), np.int64)
    while True:
        request = comm.Iallgather(np.array([said, value], np.int64), values)
        _await(comm, [request], values, timeout_s, phase, hint)
        if (values[:, 0] == _ARRIVED).all():
            return values[:, 1].tolist()
        said = _ARRIVED


def meet_to_measure(comm: Communicator, timeout_s: float) -> None:
    """`meet`, for a measurement that all ranks begin at the same time."""
    meet(comm, 0, timeout_s, "copy_ceiling", "all ranks have to call it")
    comm.Barrier()  # all are here, so it is short; and more exact


def _await(comm: Communicator, requests: Sequence[Any], held: Any, timeout_s: float, phase: str, hint: str) -> None:
    """Wait for requests, which use what is `held`, or raise EPTimeoutError."""
    if not _are_done(requests, timeout_s):
        comm.keep(requests, held)
        raise EPTimeoutError(
            f"rank {comm.Get_rank()} waited {timeout_s:g} s in {phase}, and not all {comm.Get_size()} ranks came: {hint}. "
            f"Raise timeout_s (DEEPEP_RT_TIMEOUT_S) if they are only slow",
            rank=comm.Get_rank(),
            peer=-1,
            phase=phase,
        )


def _are_done(requests: Sequence[Any], timeout_s: float) -> bool:
    """Whether requests are done, now or soon."""
    deadline, pause = time.monotonic() + timeout_s, 1e-4
    while not all(request.Test() for request in requests):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.2 * pause, 2e-3)
    return True


_REMINDER_S = 30.0  # who waits without a limit says so this often


def own(comm: Communicator, timeout_s: float, phase: str, hint: str) -> Communicator:
    """A communicator of ours over the same ranks: who gives up waiting leaves half of a collective behind, and on the caller's, that would
    be taken for one of the caller's.
    """
    own, request = comm.begin_own()
    _await(comm, [request], own, timeout_s, phase, hint)
    return own


class AllOrNone:
    """What all ranks do together, or none: the parts of making a Buffer, and freeing symmetric memory.

    A rank that cannot - an error threw it out, or it leaves others out - says so and goes its way, and is not asked again. The others wait
    until all have come or said so.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.Dup()  # of its own: who goes early says so in the middle of anything
        self._round = 0

    def holds(self, sound: bool, what: str, timeout_s: float | None = None) -> bool:
        """Whether all ranks are here and sound, as this one is or is not.

        Args:
            sound: Whether this one is.
            what: What they are here to do, for the warning where one keeps the others waiting.
            timeout_s: After how long a silent rank is taken for lost, where that is so; otherwise it is waited for.
        """
        # A rank that comes too late finds everybody's word all the same; nobody answers it the second time.
        times = 1 if timeout_s is None else 2
        try:
            return all(self._hear_all(sound, what, timeout_s or math.inf) for _ in range(times))
        except EPUnavailableError:  # the process that held the store has ended
            return False

    def _hear_all(self, sound: bool, what: str, timeout_s: float) -> bool:
        """Tell every rank, and hear of all whether they are sound too. Who is not hears nobody.

        Small messages from rank to rank: a collective would need whoever has gone to pass on what the others say.
        """
        self._round += 1
        peers = [peer for peer in range(self._comm.Get_size()) if peer != self._comm.Get_rank()]
        word, words = np.array([sound]), np.zeros(len(peers), bool)
        requests = [self._comm.Isend(word, peer, self._round) for peer in peers]
        if not sound:
            self._comm.keep(requests, word)
            return False
        requests += [self._comm.Irecv(words[i : i + 1], peer, self._round) for i, peer in enumerate(peers)]
        start = time.monotonic()
        while not _are_done(requests, min(_REMINDER_S, start + timeout_s - time.monotonic())):
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                self._comm.keep(requests, word, words)
                return False
            silent = [peer for peer, request in zip(peers, requests[len(peers) :], strict=True) if not request.Test()]
            warnings.warn(  # no log line, which nobody might see: this may be why the program stands still
                f"rank {self._comm.Get_rank()} waits for ranks {silent} to {what}, {waited_s:.0f} s by now. Did they come here, or die?",
                stacklevel=2,
            )
        return bool(words.all())

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of making something, in which ranks may fail one by one. Who does raises its error, and the others are not left waiting.

        Raises:
            EPUnavailableError: where another rank failed.
        """
        made = False
        try:
            yield
            made = True
        finally:
            all_made = self.holds(made, "make their part of a Buffer")
        if not all_made:
            raise EPUnavailableError("another rank could not make its part of this Buffer; what it raised tells why")

    def free(self) -> None:
        self._comm.Free()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # it is the caller's code; the others must hear of the error all the same
        return f"(its __str__ raises {type(broken).__name__})"


LAST_WORDS_TAG = 3
_LISTENING_PERIOD_S = 0.02
_GRACE_S = 0.2  # for what a rank sent before it left
_LAST_WORDS_S = 1.0


class LastWords:
    """What a rank that an error throws out of its Buffer tells the others: they need not wait for it until the time is up.

    Args:
        comm: The ranks. Nobody else sends messages with `LAST_WORDS_TAG` over it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._peers = [peer for peer in range(comm.Get_size()) if peer != comm.Get_rank()]
        self._heard: dict[int, tuple[float, str]] = {}  # by rank: when, and what
        self._listen_at = 0.0

    def say(self, error: BaseException) -> None:
        """Tell all others why this rank leaves; nobody has to listen. A store may end with this process: who listens gets a moment."""
        text = f"{type(error).__name__}: {_text_of(error)}"[:500]
        with suppress(EPUnavailableError):  # without the store there is no telling
            requests = [self._comm.isend(text, peer, LAST_WORDS_TAG) for peer in self._peers]
            if not _are_done(requests, _LAST_WORDS_S):
                self._comm.keep(requests, text)

    def start_listening(self) -> None:
        """A wait begins. Listening costs messages: a short wait has none of it."""
        self._listen_at = time.monotonic() + _LISTENING_PERIOD_S

    def gone(self) -> list[int]:
        """The ranks from which nothing comes any more. To be asked often by who waits."""
        if (now := time.monotonic()) >= self._listen_at:
            self._listen_at = now + _LISTENING_PERIOD_S
            for peer in self._peers:
                while self._comm.iprobe(peer, LAST_WORDS_TAG):
                    self._heard[peer] = now, self._comm.recv(source=peer, tag=LAST_WORDS_TAG)
        return [rank for rank, (when, _) in self._heard.items() if now > when + _GRACE_S]

    def error(self, peer: int, phase: str, call_idx: int = 0) -> EPTimeoutError:
        """For who waits for a rank that has left."""
        rank = self._comm.Get_rank()
        return EPTimeoutError(
            f"rank {rank} waits for rank {peer} in vain ({phase}): an error threw it out of its Buffer. There: {self._heard[peer][1]}",
            rank=rank,
            peer=peer,
            phase=phase,
            call_idx=call_idx,
        )
