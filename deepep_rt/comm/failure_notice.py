"""Notices of ranks that leave a Buffer or refuse a call, so that their peers need not wait for the time limit.

A rank leaves by an exception, by the end of its program, or because the program dropped the Buffer. Its peers raise as soon as they wait
for it. A rank that refuses a call may repeat it, so its peers go on waiting. They raise when it makes another call instead, and their
time-outs quote the refusal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import EPPeerError, EPPeerLostError, EPTimeoutError, EPUnavailableError
from . import process_end
from .communicator import Communicator
from .process_end import END, EXCEPTION, SIGNAL, describe

FAILURE_NOTICE_TAG = 3
_GRACE_S = 0.2  # data that a rank sent before its notice may arrive after it
_END_GRACE_S = 1.0  # if its program ended as it should, this rank's GPU may still work on calls that both have made
_LOST = "lost"
_LEAVES = EXCEPTION, SIGNAL, END, _LOST
_WITHOUT_IT = "In a Buffer with slots, shrink() goes on without it; otherwise make a new Buffer without it"
_REFUSED, _ELSEWHERE, _REPEATED = "refused", "elsewhere", "repeated"


@dataclass
class CallProgress:
    """The call that a rank makes, and the number of calls that it has made. All ranks of a Buffer make the same calls."""

    name: str = ""  # empty between calls
    num_made: int = 0


@dataclass
class _Notice:
    """What a peer has said."""

    kind: str  # one of the constants above
    num_made: int  # the calls that the peer had made
    doing: str  # instead of a call, if that is known
    text: str  # why
    arrived_at: float


class FailureNotice:
    """Tell the peers why this rank leaves or refuses a call, and learn this from them.

    No other module sends messages with `FAILURE_NOTICE_TAG` over `comm`. `progress` has the calls of this rank.
    """

    def __init__(self, comm: Communicator, progress: CallProgress | None = None) -> None:
        self._comm, self._progress = comm, progress or CallProgress()
        self._peers = [peer for peer in range(comm.Get_size()) if peer != comm.Get_rank()]
        self._numbers, self._rank = comm.numbers, comm.numbers[comm.Get_rank()]
        self._left: dict[int, _Notice] = {}  # by the number of the rank, in the order of arrival
        self._aside: dict[int, _Notice] = {}  # the last refusal of each rank, or what it does instead
        self._ended: dict[int, str] = {}  # ranks that are lost, and why. What they have said before counts, so it is read first
        self._telling: set[int] = set()
        self._poll_at = 0.0
        self._lock, self._has_left = threading.RLock(), False
        self._refused = "", ""  # the call that this rank has refused and not made since, and why
        self._requests: list[Any] = []
        process_end.watch(self)

    # --- what this rank says -----------------------------------------------------------------------------------------------------

    def notify(self, error: BaseException) -> None:
        """Tell all peers that this rank leaves after an exception. A store may end with this process, so wait a moment for them."""
        process_end.leave_after(error, self)

    def leave(self, kind: str, reason: str) -> None:
        """Tell all peers that this rank leaves, unless it has done so before. This waits for nothing.

        `kind` is EXCEPTION, SIGNAL or END. `reason` is for the errors of the peers.
        """
        with self._lock:
            if self._has_left:
                return
            self.close()
        call, text = self._refused
        if call and text not in reason:
            reason = f"{reason}. Before that, it refused {call}: {text}"
        self._send(kind, reason)

    def close(self) -> None:
        """Say nothing more: the Buffer has ended."""
        self._has_left = True
        process_end.unwatch(self)

    def drain(self) -> None:
        """Read what has arrived, before the Buffer ends: another one may get its tags."""
        with suppress(EPUnavailableError):
            self._receive(time.monotonic())

    def end(self) -> None:
        """Say nothing more, and give the tags of the communicator back. All ranks do this."""
        self.close()
        self.drain()
        self._comm.release()

    def is_delivered(self) -> bool:
        """Return whether all peers have read the last notice, or have left too."""
        with suppress(RuntimeError):  # without the store, no rank reads it
            if not all(request.Test() for request in self._requests):
                self._receive(time.monotonic())
                requests = zip(self._peers, self._requests, strict=True)
                return all(self._numbers[peer] in self._left or request.Test() for peer, request in requests)
        return True

    def refuse(self, error: BaseException, call: str = "") -> None:
        """Note that this rank has refused a call before it sent anything. `call` is its name; by default, it is the current one."""
        if not self._has_left and not self.has_refused:  # one message for any number of refusals
            self._refused = call or self._progress.name, describe(error)
            self._send(_REFUSED, f"{self._refused[0]}: {self._refused[1]}")

    @property
    def has_refused(self) -> bool:
        """Whether this rank has refused a call, and made none since."""
        return bool(self._refused[0])

    def make_call(self) -> None:
        """After a refusal, tell the peers whether the current call is the one that this rank has refused."""
        call, text = self._refused
        if call == self._progress.name:
            self.repeat()
        else:
            self._refused = "", ""
            self._send(_ELSEWHERE, f"it refused {call} ({text}), and made {self._progress.name} instead", self._progress.name)

    def go_elsewhere(self, doing: str, text: str) -> None:
        """Note that this rank does something else, which all ranks have to do before the next call. `come_back` ends that.

        Peers read `text` if they make a call of this Buffer instead.
        """
        if not self._has_left:
            self._send(_ELSEWHERE, text, doing)

    def come_back(self) -> None:
        """End what `go_elsewhere` has noted. It counts as a call: ranks that have done it too miss no other rank."""
        self._progress.num_made += 1

    def repeat(self) -> None:
        """Note that this rank has made the call that it had refused."""
        self._refused = "", ""
        if not self._has_left:
            self._send(_REPEATED, "")

    def _send(self, kind: str, text: str, doing: str = "") -> None:
        if not self._comm.can_send():
            return
        notice = [kind, self._progress.num_made, doing, text[: process_end.MAX_TEXT].rstrip(". ")]  # a part of a sentence
        with suppress(RuntimeError):  # without the store, or after an error of MPI, no message can be sent
            sent = [self._comm.isend(notice, peer, FAILURE_NOTICE_TAG) for peer in self._peers]
            if unread := [request for request in self._requests if not request.Test()]:
                self._comm.retain(unread)
            self._requests = sent

    # --- what peers say ----------------------------------------------------------------------------------------------------------

    def start_listening(self) -> None:
        """Begin a wait. Polling costs messages, so a short wait does not poll."""
        self._poll_at = time.monotonic() + process_end.POLL_PERIOD_S
        if self.has_refused and self._progress.name:
            self.make_call()

    def failed_peers(self) -> list[int]:
        """Return the ranks that will not take part in this call, and whose last data has arrived. Call it often while waiting.

        Raise EPUnavailableError if the store of the ranks has ended, and no rank has said that it leaves.
        """
        if (now := time.monotonic()) >= self._poll_at:
            self._poll_at = now + process_end.POLL_PERIOD_S
            try:
                self._receive(now)
            except EPUnavailableError:
                if not self._left:  # otherwise it ended with a rank that has left
                    raise
        return [
            rank
            for notices in (self._left, self._aside)
            for rank, notice in list(notices.items())  # another thread may add one
            if now > notice.arrived_at + (_END_GRACE_S if notice.kind == END else _GRACE_S) and self._is_missed(notice)
        ]

    def heard(self, phase: str) -> EPPeerError | None:
        """Return the error of a wait for all ranks, if one of them has left. After this rank has left, it hears nothing more."""
        failed = [] if self._has_left else self.failed_peers()
        return self.error(failed[0], phase) if failed else None

    def _is_missed(self, notice: _Notice) -> bool:
        """Return whether the peer takes no part in the current call."""
        if notice.kind in _LEAVES:
            return True
        mine = self._progress
        return notice.kind == _ELSEWHERE and notice.num_made == mine.num_made and mine.name not in ("", notice.doing)

    def _receive(self, now: float) -> None:
        with self._lock:
            try:
                self._read(now)
            finally:
                for rank, text in list(self._ended.items()):
                    self._left.setdefault(rank, _Notice(_LOST, 0, "", text, now))
                    del self._ended[rank]

    def _read(self, now: float) -> None:
        for peer in self._peers:
            while self._comm.iprobe(peer, FAILURE_NOTICE_TAG):
                kind, num_made, doing, text = self._comm.recv(source=peer, tag=FAILURE_NOTICE_TAG)
                if kind == _LOST:
                    self._telling.add(self._numbers[peer])
                    for rank in map(int, text.split(",")):
                        if rank != self._rank:
                            self.lose(rank, f"rank {self._numbers[peer]} goes on without it")
                    continue
                number, heard = self._numbers[peer], self._left if kind in _LEAVES else self._aside
                heard[number] = _Notice(kind, num_made, doing, text, now)
                if kind == _REPEATED:
                    del heard[number]

    def lose(self, number: int, text: str) -> None:
        """Note that the process of a rank has ended, or is given up. Any thread may call this, and it does not wait. `text`: for errors."""
        self._ended.setdefault(number, text)

    def give_up(self, ranks: Sequence[int]) -> None:
        """Tell the peers that this rank goes on without some ranks, so that they do not wait for its part of calls with them."""
        self._send(_LOST, ",".join(map(str, ranks)))

    def lost_with(self, error: BaseException | None, masked: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that are lost, ascending. Among them are masked ranks and the peer of a time-out, unless they were only silent
        because they have gone on without others: they have told whom.
        """
        self.drain()
        silent = {*masked, error.peer if isinstance(error, EPTimeoutError) else -1} - {-1, self._rank}
        return tuple(sorted({*self.lost, *(silent - self._telling)}))

    def has_gone_on(self, rank: int) -> bool:
        """Whether a rank has told that it goes on without others: it makes no more calls before all members have agreed on that."""
        return rank in self._telling

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks whose processes have ended, ascending."""
        with self._lock:
            left = {number for number, notice in self._left.items() if notice.kind == _LOST}
            return tuple(sorted(left | (self._ended.keys() - self._left.keys())))

    def first_to_leave(self) -> int | None:
        """Return the rank whose notice arrived first, also if its last data may still arrive."""
        return next(iter(self._left), None)

    def refusals(self) -> str:
        """Return what peers have refused or do instead, as sentences for an error. Empty: nothing."""
        self.drain()
        return "".join(f". {sentence}" for peer in self._aside if (sentence := self._sentence(peer)))

    def _sentence(self, peer: int) -> str:
        """Return what a peer has said, as the end of an error about it. Empty: nothing that explains its silence."""
        if (left := self._left.get(peer)) is not None:
            if left.kind == _LOST:
                return f"Rank {peer} is lost: {left.text}. {_WITHOUT_IT}"
            return f"Rank {peer} has left the Buffer: {left.text}"
        aside = self._aside.get(peer)
        if aside is None or (aside.kind == _ELSEWHERE and not self._is_missed(aside)):
            return ""
        if aside.kind == _ELSEWHERE:
            return f"Rank {peer} does not take part: {aside.text}"
        return f"Rank {peer} has refused a call and not repeated it: {aside.text}"

    def explain(self, timeout: EPTimeoutError) -> EPTimeoutError:
        """Return the error of a time-out, with what the silent peer has said."""
        self.drain()
        if not (sentence := self._sentence(timeout.peer)):
            return timeout
        kind, more = self._kind(timeout.peer)
        made = kind(
            f"{timeout}. {sentence}",
            **more,
            reason=(self._left.get(timeout.peer) or self._aside[timeout.peer]).text,
            rank=timeout.rank,
            peer=timeout.peer,
            phase=timeout.phase,
        )
        made.expected, made.seen, made.call_idx, made.node = timeout.expected, timeout.seen, timeout.call_idx, timeout.node
        return made

    def _kind(self, peer: int) -> tuple[type[EPPeerError], dict[str, Any]]:
        """Return the class of errors about a rank, and its own arguments."""
        return (EPPeerLostError, {"ranks": self.lost}) if peer in self.lost else (EPPeerError, {})

    def error(self, peer: int, phase: str, call_idx: int = 0, node: int | None = None) -> EPPeerError:
        """Make the error of a wait for a rank that takes no part. If that rank has not left, this one leaves."""
        notice = self._left.get(peer) or self._aside[peer]
        rank, where = self._rank, "" if node is None else f" on node {node}"
        who, waited = f"rank {peer}{where}", f"rank {rank} waited for it ({phase})"
        if notice.kind == EXCEPTION:
            text = f"{who} left the Buffer after an exception, and {waited}. Fix the exception of rank {peer}: {notice.text}"
        elif notice.kind == _LOST:
            text = f"{who} is lost, and {waited}: {notice.text}. {_WITHOUT_IT}"
        elif notice.kind == SIGNAL:
            text = f"{who} left the Buffer, and {waited}: {notice.text}. Find out what sent the signal"
        elif notice.kind == END:
            text = f"{who} left the Buffer, and {waited}: {notice.text}. Let all ranks make the same calls, in `with Buffer(...)`"
        else:
            text = f"{who} does not make this call ({self._progress.name}), and {waited}: {notice.text}. Make the same calls on all ranks"
        kind, more = self._kind(peer)
        made = kind(text, **more, reason=notice.text, rank=rank, peer=peer, phase=phase, call_idx=call_idx, node=node)
        if notice.kind == _ELSEWHERE:
            self.leave(EXCEPTION, describe(made))
        return made


@contextmanager
def making(comm: Communicator, own: Communicator, phase: str) -> Iterator[list[FailureNotice]]:
    """Run the block on all ranks. If a rank raises in it, waits of the others on `own` and its duplicates raise at once.

    Args:
        comm: The ranks. Their meetings in the block listen too.
        own: What `comm.meet` returned for this making.
        phase: What the block does, for the message.

    Yields:
        A list for the notice of what the block has made. Ranks may have left the block when another one is interrupted at its end.

    Raises:
        EPPeerError: if another rank raises in the block, or its program ends there.
    """
    notice, outer, before = FailureNotice(own), own.heard, comm.heard
    own.heard = comm.heard = lambda: notice.heard(phase) or (outer and outer())
    made: list[FailureNotice] = []
    try:
        yield made
        own.Barrier()  # a rank may have failed after its last collective
    except BaseException as error:
        if not isinstance(error, EPPeerError):  # all ranks have the notice of that peer
            process_end.leave_after(error, notice, *made)
        raise
    finally:
        notice.close()
        own.heard, comm.heard = outer, before
