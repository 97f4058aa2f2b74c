"""A message of a rank that an exception throws out of its Buffer, so that its peers need not wait for it."""

from __future__ import annotations

import time
from contextlib import suppress

from ..errors import EPTimeoutError, EPUnavailableError
from .communicator import Communicator
from .timed_collectives import wait_all


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # it is the caller's code; the others must hear of the error all the same
        return f"(its __str__ raises {type(broken).__name__})"


FAILURE_NOTICE_TAG = 3
_LISTENING_PERIOD_S = 0.02
_GRACE_S = 0.2  # for what a rank sent before it left
_DELIVERY_S = 1.0


class FailureNotice:
    """What a rank that an error throws out of its Buffer tells the others: they need not wait for it until the time is up.

    Args:
        comm: The ranks. Nobody else sends messages with `FAILURE_NOTICE_TAG` over it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._peers = [peer for peer in range(comm.Get_size()) if peer != comm.Get_rank()]
        self._heard: dict[int, tuple[float, str]] = {}  # by rank: when, and what
        self._listen_at = 0.0

    def notify(self, error: BaseException) -> None:
        """Tell all others why this rank leaves; nobody has to listen. A store may end with this process: who listens gets a moment."""
        text = f"{type(error).__name__}: {_text_of(error)}"[:500]
        with suppress(EPUnavailableError):  # without the store there is no telling
            requests = [self._comm.isend(text, peer, FAILURE_NOTICE_TAG) for peer in self._peers]
            if not wait_all(requests, _DELIVERY_S):
                self._comm.retain(requests, text)

    def start_listening(self) -> None:
        """A wait begins. Listening costs messages: a short wait has none of it."""
        self._listen_at = time.monotonic() + _LISTENING_PERIOD_S

    def failed_peers(self) -> list[int]:
        """The ranks from which nothing comes any more. To be asked often by who waits."""
        if (now := time.monotonic()) >= self._listen_at:
            self._listen_at = now + _LISTENING_PERIOD_S
            for peer in self._peers:
                while self._comm.iprobe(peer, FAILURE_NOTICE_TAG):
                    self._heard[peer] = now, self._comm.recv(source=peer, tag=FAILURE_NOTICE_TAG)
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
