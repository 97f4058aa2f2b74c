"""Messages of ranks that leave a Buffer after an exception, so that their peers need not wait for the time limit."""

from __future__ import annotations

import time
from contextlib import suppress

from ..errors import EPTimeoutError, EPUnavailableError
from .communicator import Communicator
from .timed_collectives import wait_all

FAILURE_NOTICE_TAG = 3
_POLL_PERIOD_S = 0.02
_GRACE_S = 0.2  # data that a rank sent before its notice may arrive after it
_DELIVERY_S = 1.0
_MAX_TEXT = 500


class FailureNotice:
    """Tell the peers why this rank leaves, and learn which peers have left.

    Args:
        comm: The ranks. No other module sends messages with `FAILURE_NOTICE_TAG` over it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._peers = [peer for peer in range(comm.Get_size()) if peer != comm.Get_rank()]
        self._received: dict[int, tuple[float, str]] = {}  # by rank: time of arrival and text
        self._poll_at = 0.0

    def notify(self, error: BaseException) -> None:
        """Tell all peers why this rank leaves. A store may end with this process, so wait a moment for them to read."""
        text = f"{type(error).__name__}: {_text_of(error)}"[:_MAX_TEXT]
        with suppress(EPUnavailableError):  # without the store, no message can be sent
            requests = [self._comm.isend(text, peer, FAILURE_NOTICE_TAG) for peer in self._peers]
            if not wait_all(requests, _DELIVERY_S):
                self._comm.retain(requests, text)

    def start_listening(self) -> None:
        """Begin a wait. Polling costs messages, so a short wait does not poll."""
        self._poll_at = time.monotonic() + _POLL_PERIOD_S

    def failed_peers(self) -> list[int]:
        """Return the ranks that have left and whose last data has arrived. Call it often while waiting.

        Raises:
            EPUnavailableError: If the store of the ranks has ended, and no rank has said that it leaves.
        """
        if (now := time.monotonic()) >= self._poll_at:
            self._poll_at = now + _POLL_PERIOD_S
            try:
                self._receive(now)
            except EPUnavailableError:
                if not self._received:  # otherwise it ended with a rank that has left
                    raise
        return [rank for rank, (arrived_at, _) in self._received.items() if now > arrived_at + _GRACE_S]

    def _receive(self, now: float) -> None:
        for peer in self._peers:
            while self._comm.iprobe(peer, FAILURE_NOTICE_TAG):
                self._received[peer] = now, self._comm.recv(source=peer, tag=FAILURE_NOTICE_TAG)

    def first_to_leave(self) -> int | None:
        """Return the rank whose notice arrived first, also if its last data may still arrive."""
        return next(iter(self._received), None)

    def error(self, peer: int, phase: str, call_idx: int = 0, node: int | None = None) -> EPTimeoutError:
        """Make the error of a wait for a rank that has left."""
        rank, where = self._comm.Get_rank(), "" if node is None else f" on node {node}"
        return EPTimeoutError(
            f"rank {peer}{where} left the Buffer after an exception, and rank {rank} waited for it ({phase}). "
            f"Fix the exception of rank {peer}: {self._received[peer][1]}",
            rank=rank,
            peer=peer,
            phase=phase,
            call_idx=call_idx,
            node=node,
        )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # `__str__` is the caller's code, and the notice must go out all the same
        return f"(its __str__ raises {type(broken).__name__})"
