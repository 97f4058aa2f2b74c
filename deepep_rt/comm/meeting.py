"""Meetings of all ranks, after which they use a channel that no earlier step has used."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import EPPeerError, EPUnavailableError
from . import process_end
from .communicator import MEETING_TAG, Communicator


class _Leave(NamedTuple):
    """What a rank says when an exception takes it out of a meeting: the number that it had sent, and which attempt that was."""

    number: int
    ended: int
    attempt: int
    reason: str


class Meeting:
    """A number on which all ranks agree, as a request: the next channel.

    Each rank sends a number that is larger than all that it knows. When it has heard from all ranks, it confirms the largest one. A meeting
    ends when all ranks have confirmed the same number. So no rank continues alone: a rank that gave up has not confirmed the number of a
    late rank. If it begins again, its number is larger, and the others confirm that one. A rank also tells the number of the last meeting
    that ended there. All ranks have confirmed that number, so the meeting ends on a slow rank too, although the others have begun another.

    A rank that an exception takes out of a meeting says so. The others raise in that meeting, or in a step with the communicator that they
    got from it. Ranks count their attempts since the last meeting that ended, so an attempt does not hear of the end of an earlier one. If
    the rank has begun again before a late rank comes, they meet.

    Args:
        comm: The ranks. No other module sends messages with `MEETING_TAG` over it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._heard = {peer: (0, False) for peer in range(comm.Get_size()) if peer != comm.Get_rank()}
        """By peer, the last number that it sent, and whether it has confirmed it."""
        self._ended_there = dict.fromkeys(self._heard, 0)  # as `_ended`, by peer
        self._sent = 0, False
        self._ended = 0  # the number of the last meeting that ended here
        self._attempt = 0  # of the meetings begun since
        self._left: dict[int, _Leave] = {}  # by peer
        self._requests: list[Any] = []
        self._poll_at, self._is_open = 0.0, False

    def begin(self) -> None:
        """Tell the other ranks that this one is here."""
        self._attempt, self._is_open = self._attempt + 1, True
        process_end.watch(self)
        self._receive()
        self._send(self._comm.free_channel(1 + max(self._largest(), self._comm.last_channel)), False)

    def Test(self) -> bool:
        """Return whether all ranks have confirmed a number."""
        self._receive()
        if self._sent in ((number, True) for number in self._ended_there.values()):
            return True
        if not self._absent() and self._sent != (self._largest(), True):
            self._send(self._comm.free_channel(self._largest()), True)
        return self._sent[1] and all(heard == self._sent for heard in self._heard.values())

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not arrived, or the ranks that left before they confirmed."""
        return self._absent() or [peer for peer, heard in self._heard.items() if heard != self._sent]

    def end(self) -> int:
        """End the meeting, and return its number."""
        self.close()
        self._ended, self._attempt = self._sent[0], 0
        return self._ended

    def error(self, phase: str, channel: int | None = None) -> EPPeerError | None:
        """Return the error of a wait, if a peer has left. `phase` is what the rank waits in.

        The wait follows the meeting that ended with the number `channel`. Default: it is that for the meeting.
        """
        if (now := time.monotonic()) >= self._poll_at:
            self._poll_at = now + process_end.POLL_PERIOD_S
            self._receive()
        for peer, left in self._left.items():
            if channel is None:
                has_begun_again = self._heard[peer][0] > left.number
                is_missed = left.ended == self._ended and left.attempt >= self._attempt and not has_begun_again
            else:
                is_missed = left.number == channel > left.ended
            if is_missed:
                if channel is None:  # the next attempt is another one
                    del self._left[peer]
                rank, peer = self._comm.numbers[self._comm.Get_rank()], self._comm.numbers[peer]
                text = f"rank {peer} left {phase}, and rank {rank} waited for it: {left.reason}. Fix that on rank {peer}"
                return EPPeerError(text, reason=left.reason, rank=rank, peer=peer, phase=phase)
        return None

    def leave_after(self, error: BaseException) -> None:
        """Tell all peers that an exception takes this rank out of the meeting, or away before it. Wait a moment for them."""
        if not self._is_open:
            self.begin()
        process_end.leave_after(error, self)

    def leave(self, kind: str, reason: str) -> None:
        """Tell all peers that this rank leaves the meeting after an exception, a signal or the end of its program; see `Leaver`."""
        self.close()
        if self._comm.can_send():
            with suppress(EPUnavailableError, RuntimeError):  # the store has ended, or MPI has failed
                self._requests = self._send(*self._sent, reason[: process_end.MAX_TEXT].rstrip(". "))

    def is_delivered(self) -> bool:
        """Return whether all peers have read that this rank leaves."""
        with suppress(EPUnavailableError, RuntimeError):
            return all(request.Test() for request in self._requests)
        return True

    def close(self) -> None:
        """Say nothing more about this meeting."""
        self._is_open = False
        process_end.unwatch(self)

    def _absent(self) -> list[int]:
        return [peer for peer, (number, _) in self._heard.items() if number <= self._ended]

    def _largest(self) -> int:
        return max(self._sent[0], *(number for number, _ in self._heard.values()), 0)

    def _send(self, number: int, is_confirmed: bool, left: str = "") -> list[Any]:
        self._sent, message = (number, is_confirmed), [number, is_confirmed, self._ended, self._attempt, left]
        return [self._comm.isend(message, peer, MEETING_TAG) for peer in self._heard]

    def _receive(self) -> None:
        for peer in self._heard:
            while self._comm.iprobe(peer, MEETING_TAG):
                number, is_confirmed, self._ended_there[peer], attempt, left = self._comm.recv(source=peer, tag=MEETING_TAG)
                self._heard[peer] = number, is_confirmed
                if left:
                    self._left[peer] = _Leave(number, self._ended_there[peer], attempt, left)
