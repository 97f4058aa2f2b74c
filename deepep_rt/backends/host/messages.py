"""Bounded exchanges of messages between the ranks of the host backend, with or without those that are masked.

Low-latency calls leave masked ranks out, and a rank is masked in the middle of a call if it is silent. So messages may arrive when
nobody waits for them any more, and the rank may be unmasked later. Such a message is never taken for one of a later call:

- A notice carries the number of its low-latency call. All ranks have made the same number of calls when one is unmasked, so a notice
  with a smaller number is an old one, and is thrown away: notices have one size and arrive in the order in which they were sent.
- Rows have any size, and so must not be received to find out. They travel under a tag that their receiver names in its notice of the
  same call, and it names another one once it has masked the sender, or raised instead of receiving: nobody listens to the tags before.
- A receive that was posted cannot take a later message: it is cancelled, and where that comes too late it has its (old) message.
- A send is not cancelled, since the peer may be reading. It, and memory that MPI may still look at, are kept until they are done with.

A rank that waits for a silent one is not silent itself: where time-outs mask, it gives the others signs of life. Or else two ranks
that lost a third at different points of a call (its last message reached one of them) would take each other for lost too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...comm.communicator import Communicator
from ...comm.failure_notice import FAILURE_NOTICE_TAG, FailureNotice
from ...errors import EPInputError, EPTimeoutError
from ...kernels.structs import PHASES

_NOTICE_TAG, _SIGN_TAG, _FIRST_ROWS_TAG = 1, 2, FAILURE_NOTICE_TAG + 1
_NUM_ROWS_TAGS = 32767 - _FIRST_ROWS_TAG  # every MPI has so many, and one more, which `comm/mpi.py` uses
_SIGNS_PER_TIMEOUT = 8
_THROUGHPUT = 0  # what a notice carries instead of the number of a low-latency call; those count from 1
_logger = logging.getLogger("deepep_rt")


class Mail:
    """Bounded exchanges of messages between all ranks. After a time-out that masks nobody, or a call that was interrupted, it is broken.

    Args:
        comm: Nobody else sends messages over it.
        timeout_s: How long a peer may be silent.
        masks_silent: Whether a low-latency call masks silent peers instead of raising.
        check_ended: Raises if the Buffer was destroyed; asked while a call waits.
    """

    def __init__(
        self, comm: Communicator, timeout_s: float, masks_silent: bool, check_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._comm, self._timeout_s, self._masks_silent, self._check_ended = comm, timeout_s, masks_silent, check_ended
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._call_idx = 0
        self._failure: EPTimeoutError | None = None
        self._masked: set[int] = set()
        self._rows_given_up = [0] * self._num_ranks  # how often rows of each peer may have come too late
        self._rows_tags = [_FIRST_ROWS_TAG] * self._num_ranks  # where each peer listens for our rows; its last notice said so
        self._low_latency_calls = 0
        self._in_low_latency = False
        self._unfinished: list[_Post] = []
        self.failure_notice = FailureNotice(comm)

    @property
    def is_broken(self) -> bool:
        return self._failure is not None

    @property
    def masked(self) -> list[int]:
        """The masked ranks, ascending."""
        return sorted(self._masked)

    @property
    def peers(self) -> list[int]:
        """The other ranks that take part in the current call, ascending."""
        left_out = self._masked if self._in_low_latency else ()
        return [peer for peer in range(self._num_ranks) if peer != self._rank and peer not in left_out]

    @property
    def low_latency_calls(self) -> int:
        """Low-latency calls that have begun. The same on all ranks, except on masked ones that do not call."""
        return self._low_latency_calls

    def check(self) -> None:
        """Raise if an earlier call timed out."""
        if (first := self._failure) is not None:
            text = f"this Buffer is broken since an earlier call did not end; make a new one. The earlier error: {first}"
            raise EPTimeoutError(text, rank=first.rank, peer=first.peer, phase=first.phase, call_idx=first.call_idx)

    @contextmanager
    def call(self) -> Iterator[None]:
        """What is exchanged meanwhile belongs to one call.

        If something throws this rank out of the middle of it, the Buffer is broken: its next call would be taken for this one.
        """
        self._call_idx += 1
        try:
            yield
        except EPInputError:  # all ranks agree on it, or nothing was sent yet
            raise
        except BaseException as error:
            if self._failure is None and not self._in_low_latency:  # low-latency calls tell their numbers
                what = f"rank {self._rank} was thrown out of call {self._call_idx} by {type(error).__name__}"
                self._failure = EPTimeoutError(what, rank=self._rank, peer=self._rank, phase="", call_idx=self._call_idx)
            raise

    def leave(self, error: Exception) -> None:
        """Tell the others why this rank cannot end its call, and refuse its later ones: theirs of this call have no answer."""
        self.failure_notice.notify(error)
        self._failure = EPTimeoutError(str(error), rank=self._rank, peer=self._rank, phase="", call_idx=self._call_idx)

    def release(self) -> None:
        """Nothing is exchanged any more. MPI goes on with what was started: what that reads and writes must outlive this."""
        self._unfinished = [post for post in self._unfinished if not post.is_done()]
        if self._unfinished:
            self._comm.retain(self._unfinished)

    @contextmanager
    def low_latency_call(self) -> Iterator[None]:
        """What is exchanged meanwhile belongs to one low-latency call: masked ranks are left out."""
        self._low_latency_calls += 1
        self._in_low_latency = True
        try:
            yield
        except BaseException:
            for peer in range(self._num_ranks):
                self._rows_given_up[peer] += 1  # a peer may see no reason to raise, and send its rows
            raise
        finally:
            self._in_low_latency = False

    def mask(self, rank: int) -> None:
        """Leave a rank out of low-latency calls."""
        if rank not in self._masked:
            self._masked.add(rank)
            self._rows_given_up[rank] += 1  # rows that are still on their way here find nobody from now on

    def unmask(self, rank: int) -> None:
        self._masked.discard(rank)

    def swap(self, notices: np.ndarray, phase: str) -> tuple[np.ndarray, list[int]]:
        """Swap notices: send `notices[peer]`, and get what each peer says to this rank.

        Returns:
            What each rank said, `[num_ranks, ...]`, and the ranks that take part, ascending. The rows of others are zero.

        Raises:
            EPInputError: if another rank is further in its low-latency calls.
        """
        number = self._low_latency_calls if self._in_low_latency else _THROUGHPUT
        said = np.zeros((self._num_ranks, 2 + notices.shape[1]), np.int64)  # call and tag before each notice
        said[:, 0], said[:, 1], said[:, 2:] = number, [self._listening_tag(peer) for peer in range(self._num_ranks)], notices
        heard = np.zeros_like(said)
        sends = [self._send([said[peer]], peer, _NOTICE_TAG) for peer in self.peers]
        waiting = self.peers
        while waiting:
            receives = [self._receive([heard[peer]], peer, _NOTICE_TAG) for peer in waiting]
            self._wait([*sends, *receives], phase)
            sends = []
            waiting = [peer for peer in waiting if peer in self.peers and self._is_old(int(heard[peer, 0]))]
        present = sorted([self._rank, *self.peers])  # whoever did not answer is masked now, and has no say
        heard[self._rank] = said[self._rank]
        heard = np.where(np.isin(np.arange(self._num_ranks), present)[:, None], heard, 0)  # MPI may still write to the old one
        for peer in present:
            self._rows_tags[peer] = int(heard[peer, 1])
        self._compare_numbers(number, heard[:, 0])
        return heard[:, 2:], present

    def exchange(
        self, outgoing: Sequence[Sequence[np.ndarray]], incoming: Sequence[Sequence[np.ndarray]], phase: str
    ) -> set[int]:
        """Send the arrays `outgoing[peer]` to each peer as one message, and fill `incoming[peer]` with its message.

        Returns:
            The peers whose message did not come, and which are masked now. What their arrays hold is undefined, also later.
        """
        posts = []
        for peer in self.peers:
            if any(part.nbytes for part in incoming[peer]):
                posts.append(self._receive(incoming[peer], peer, self._listening_tag(peer)))
        for peer in self.peers:
            if any(part.nbytes for part in outgoing[peer]):
                posts.append(self._send(outgoing[peer], peer, self._rows_tags[peer]))
        return self._wait(posts, phase)

    def _listening_tag(self, peer: int) -> int:
        """Where this rank listens for rows of a peer."""
        return _FIRST_ROWS_TAG + self._rows_given_up[peer] % _NUM_ROWS_TAGS

    def _is_old(self, number: int) -> bool:
        """Whether a notice with this number of a low-latency call is of a call that is over (or was masked) here."""
        if number == _THROUGHPUT:
            return False
        if self._in_low_latency:
            return number < self._low_latency_calls
        # In a throughput call: a call that this rank did not make is a mistake, unless it was masked there meanwhile.
        return self._masks_silent or number <= self._low_latency_calls

    def _compare_numbers(self, number: int, heard: np.ndarray) -> None:
        """Note how far the others are; this rank counts calls that it missed too, to be in step with them again."""
        last = int(heard.argmax())
        self._low_latency_calls = max(self._low_latency_calls, int(heard[last]))
        if number != _THROUGHPUT and heard[last] > number:
            raise EPInputError(
                f"rank {last} makes low-latency call {heard[last]} of this Buffer, but this rank makes call {number}; "
                f"all ranks must have made the same number of calls when one is unmasked"
            )

    def _send(self, parts: Sequence[np.ndarray], peer: int, tag: int) -> _Post:
        return _Post(peer, self._comm.send_parts(parts, peer, tag), False, parts)

    def _receive(self, parts: Sequence[np.ndarray], peer: int, tag: int) -> _Post:
        return _Post(peer, self._comm.receive_parts(parts, peer, tag), True, parts)

    def _wait(self, posts: list[_Post], phase: str) -> set[int]:
        """Wait until everything is done.

        Returns:
            The peers that this rank has stopped waiting for, as far as something was to come from them. They are masked now.
        """
        try:
            return self._poll(posts, PHASES[phase][1])
        except BaseException:
            self._comm.retain(posts)  # MPI may still read or write there, whatever becomes of the Buffer
            raise

    def _poll(self, posts: list[_Post], phase: str) -> set[int]:
        masks_silent = self._masks_silent and self._in_low_latency
        start = time.monotonic()
        self.failure_notice.start_listening()
        alive_at = dict.fromkeys((post.peer for post in posts), start)
        sign_at = start + self._timeout_s / _SIGNS_PER_TIMEOUT
        lost: set[int] = set()
        pause = 0.0
        while sum(post.is_done() for post in posts) < len(posts):  # all are asked: MPI goes on with what it is asked about
            self._check_ended()
            now = time.monotonic()
            if masks_silent and now > sign_at:
                sign_at = now + self._timeout_s / _SIGNS_PER_TIMEOUT
                self._give_sign()
                alive_at.update(dict.fromkeys(self._take_signs(), now))
            if not masks_silent and (gone := self.failure_notice.failed_peers()):
                silent = [post for post in posts if post.peer in gone and not post.is_done()]
                if silent:
                    self._fail(silent, self.failure_notice.error(silent[0].peer, phase, self._call_idx))
            if now > start + self._timeout_s:
                silent = [post for post in posts if now > alive_at[post.peer] + self._timeout_s and not post.is_done()]
                if silent and not masks_silent:
                    self._fail(silent, self._timeout(silent, phase))
                lost.update(post.peer for post in silent if post.is_receive)
                self._mask_silent(silent, phase)
                posts = [post for post in posts if post not in silent]
            time.sleep(pause)  # ranks often share cores: polling without a pause would slow down the one that is waited for
            # MPI moves large messages in pieces, and each may wait for a pause: a long one only for a peer that is late by much more.
            pause = min(pause + 2e-6, max(2e-5, min((now - start) / 100, 1e-3)))
        return lost

    def _give_sign(self) -> None:
        self._unfinished = [post for post in self._unfinished if not post.is_done()]
        for peer in self.peers:
            self._unfinished.append(_Post(peer, self._comm.isend(None, peer, _SIGN_TAG), False, ()))

    def _take_signs(self) -> Iterable[int]:
        """Ranks that gave signs of life. An old one does no harm: it is as if the rank were silent a moment later."""
        for peer in range(self._num_ranks):
            while peer != self._rank and self._comm.iprobe(peer, _SIGN_TAG):
                self._comm.recv(source=peer, tag=_SIGN_TAG)
                yield peer

    def _mask_silent(self, silent: list[_Post], phase: str) -> None:
        for post in silent:
            if post.is_receive:
                post.request.Cancel()
            if not post.is_done():
                self._unfinished.append(post)
        for peer in sorted({post.peer for post in silent}):
            self.mask(peer)
            _logger.warning(
                "rank %d waited %g s for rank %d: %s did not come (call %d of this rank). Low-latency calls leave rank %d out from "
                "now on; see Buffer.unmask_rank",
                *(self._rank, self._timeout_s, peer, phase, self._call_idx, peer),
            )

    def _fail(self, silent: list[_Post], error: EPTimeoutError) -> None:
        for post in silent:
            if post.is_receive:
                post.request.Cancel()
        self._failure = error
        raise error

    def _timeout(self, silent: list[_Post], phase: str) -> EPTimeoutError:
        first = silent[0].peer
        others = sorted({post.peer for post in silent} - {first})
        return EPTimeoutError(
            f"rank {self._rank} waited {self._timeout_s:g} s for rank {first}: {phase} did not come "
            f"(call {self._call_idx} of this rank{f'; ranks {others} were silent too' if others else ''}). "
            f"Check that all ranks make the same calls in the same order and that rank {first} is alive; "
            f"if it is only slow, raise timeout_s (DEEPEP_RT_TIMEOUT_S)",
            rank=self._rank,
            peer=first,
            phase=phase,
            call_idx=self._call_idx,
        )


@dataclass(eq=False)
class _Post:
    """A message on its way."""

    peer: int
    request: Any  # of mpi4py, or of `comm/store.py`
    is_receive: bool
    parts: Sequence[np.ndarray]  # what MPI reads or writes

    def is_done(self) -> bool:
        return not self.request or self.request.Test()
