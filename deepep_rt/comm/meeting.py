"""Meetings of all ranks, after which they use a channel that no earlier step has used."""

from __future__ import annotations

from .communicator import MEETING_TAG, Communicator


class Meeting:
    """A number on which all ranks agree, as a request: the next channel.

    Each rank sends a number that is larger than all that it knows. When it has heard from all ranks, it confirms the largest one. A meeting
    ends when all ranks have confirmed the same number. So no rank continues alone: a rank that gave up has not confirmed the number of a
    late rank. If it begins again, its number is larger, and the others confirm that one. A rank also tells the number of the last meeting
    that ended there. All ranks have confirmed that number, so the meeting ends on a slow rank too, although the others have begun another.

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

    def begin(self) -> None:
        """Tell the other ranks that this one is here."""
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
        """Return the number after the meeting."""
        self._ended = self._sent[0]
        return self._ended

    def _absent(self) -> list[int]:
        return [peer for peer, (number, _) in self._heard.items() if number <= self._ended]

    def _largest(self) -> int:
        return max(self._sent[0], *(number for number, _ in self._heard.values()), 0)

    def _send(self, number: int, is_confirmed: bool) -> None:
        self._sent = number, is_confirmed
        for peer in self._heard:
            self._comm.isend([number, is_confirmed, self._ended], peer, MEETING_TAG)

    def _receive(self) -> None:
        for peer in self._heard:
            while self._comm.iprobe(peer, MEETING_TAG):
                number, is_confirmed, self._ended_there[peer] = self._comm.recv(source=peer, tag=MEETING_TAG)
                self._heard[peer] = number, is_confirmed
