"""Exchange messages between the ranks of the host backend, with a time limit on every wait.

Low-latency calls exclude masked ranks. A silent rank is masked in the middle of a call and may be unmasked later. Its messages can
therefore arrive after this rank has stopped waiting for them. Four rules keep such a message out of later calls:

- A header carries the number of its low-latency call. All ranks have made the same number of calls when one is unmasked, so a smaller
  number marks an outdated header, which the receiver discards. Headers have one size and arrive in the order in which they were sent.
- Rows have any size, so a rank cannot receive them to find out whether they are outdated. Each header names the tag under which its
  sender expects rows. After a rank has masked a peer or raised an error, its next header names another tag.
- A posted receive must not take a later message, so it is cancelled. If it is too late to cancel it, it has already taken its own message.
- A send is not cancelled, because the peer may be reading. Its request and its memory are kept until it is done.

While a rank waits for a silent peer, it sends heartbeats where time-outs mask. Without them, two ranks that lost a third one at different
points of a call would mask each other too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...comm.communicator import MEETING_TAG, Communicator
from ...comm.failure_notice import FAILURE_NOTICE_TAG, CallProgress, FailureNotice
from ...config import Config
from ...errors import EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from ...kernels.structs import PHASES
from ..purposes import Purposes, missing_backward, not_run
from .statistics import HostStatistics

_HEADER_TAG, _HEARTBEAT_TAG, _FIRST_ROWS_TAG = 1, 2, FAILURE_NOTICE_TAG + 1
_NUM_ROWS_TAGS = MEETING_TAG - _FIRST_ROWS_TAG
_HEARTBEATS_PER_TIMEOUT = 8
_THROUGHPUT = 0  # stands in a header of a throughput call; low-latency calls count from 1
_logger = logging.getLogger("deepep_rt")


class MessageChannel:
    """Exchange messages with all ranks. A time-out that does not mask, or an interrupted call, breaks the channel.

    Args:
        comm: A communicator that carries no other messages.
        check_destroyed: Raises if the Buffer was destroyed. Every wait calls it.
        statistics: Gets the waits of calls. None: they are not counted.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        check_destroyed: Callable[[], None] = lambda: None,
        statistics: HostStatistics | None = None,
        progress: CallProgress | None = None,
        purposes: Purposes | None = None,
    ) -> None:
        self.statistics, self.purposes = statistics, purposes or Purposes()
        self._comm, self._timeout_s, self._check_destroyed = comm, config.timeout_s, check_destroyed
        self._masks_silent, self._node_of = config.on_timeout == "mask", config.node_of
        self.rank, self._num_ranks = comm.numbers[comm.Get_rank()], config.num_ranks
        self._config = config
        self._set_members(comm)
        self._call_idx = 0
        self._failure: EPTimeoutError | None = None
        self._masked: set[int] = set()
        self._num_abandoned = [0] * self._num_ranks  # how often this rank has stopped waiting for rows of each peer
        self._send_tags = [_FIRST_ROWS_TAG] * self._num_ranks  # under which each peer expects our rows, as its last header says
        self._low_latency_calls = 0
        self._in_low_latency = False
        self._unfinished: list[_Transfer] = []
        self._progress = progress or CallProgress()
        self.failure_notice = FailureNotice(comm, self._progress)

    def _set_members(self, comm: Communicator) -> None:
        self._comm = comm
        self._ranks = {number: rank for rank, number in enumerate(comm.numbers)}
        """The rank in `comm` of each member."""

    def choices_of_members(self, topk_idx: np.ndarray) -> np.ndarray:
        """Return expert numbers with -1 for those of slots that have no process."""
        if len(self._ranks) == self._num_ranks:
            return topk_idx
        return np.where(np.isin(topk_idx // self._config.num_local_experts, list(self._ranks)), topk_idx, -1)

    def begin_generation(self, comm: Communicator, notice: FailureNotice) -> None:
        """Begin anew, with other members. `notice` is theirs."""
        self.failure_notice.close()
        self.close()
        self._set_members(comm)
        self.failure_notice, self._failure, self._unfinished = notice, None, []
        self._masked, self._call_idx, self._low_latency_calls = set(), 0, 0
        self._num_abandoned = [0] * self._num_ranks
        self._send_tags = [_FIRST_ROWS_TAG] * self._num_ranks

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """The ranks that this one knows to be lost: their processes have ended, or a wait for them has timed out."""
        return self.failure_notice.lost_with(self._failure, self.masked)

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
        excluded = self._masked if self._in_low_latency else ()
        return [peer for peer in self._ranks if peer != self.rank and peer not in excluded]

    @property
    def low_latency_calls(self) -> int:
        """The number of low-latency calls that have begun. It is the same on all ranks but masked ones that do not call."""
        return self._low_latency_calls

    def check(self) -> None:
        """Raise if an earlier call timed out."""
        if (first := self._failure) is not None:
            text = f"this Buffer is broken because an earlier call failed. Make a new Buffer. The earlier error: {first}"
            rank, peer, phase = first.rank, first.peer, first.phase
            raise EPTimeoutError(text, rank=rank, peer=peer, phase=phase, call_idx=first.call_idx, node=first.node)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Send and receive the messages of one call.

        An exception in the middle of a throughput call breaks the Buffer: the peers would match this rank's next call with this one.
        """
        self._call_idx += 1
        try:
            yield
        except (EPInputError, EPOutOfMemoryError):  # all ranks raise it
            self._progress.num_made += 1
            self._progress.name = ""
            raise
        except BaseException as error:
            if isinstance(error, EPUnavailableError) and (peer := self.failure_notice.first_to_leave()) is not None:
                # A store ends with the rank that holds it, perhaps before its last data was read.
                self._failure = self.failure_notice.error(peer, "messages over a store", self._call_idx, self._node_of(peer))
                raise self._failure from error
            if self._failure is None and not self._in_low_latency:  # headers of low-latency calls carry numbers
                self._break(f"{type(error).__name__} interrupted call {self._call_idx} of rank {self.rank}")
                if not isinstance(error, MemoryError):  # `abort_call` follows
                    self.failure_notice.notify(error)
            raise

    @contextmanager
    def low_latency_call(self) -> Iterator[None]:
        """Send and receive the messages of one low-latency call, which excludes masked ranks."""
        self._low_latency_calls += 1
        self._in_low_latency = True
        try:
            yield
        except BaseException:
            for peer in range(self._num_ranks):
                self._num_abandoned[peer] += 1  # a peer may see no reason to raise, and send its rows
            raise
        finally:
            self._in_low_latency = False

    def abort_call(self, error: Exception) -> None:
        """Tell the other ranks why this rank cannot end its call, and refuse its later calls: the peers get no rows of this one."""
        self.failure_notice.notify(error)
        self._break(str(error))

    def close(self) -> None:
        """Keep the memory of messages that MPI has not finished. It reads and writes them after the Buffer is gone."""
        self._unfinished = [transfer for transfer in self._unfinished if not transfer.is_done()]
        if self._unfinished:
            self._comm.retain(self._unfinished)

    def mask(self, rank: int) -> None:
        """Exclude a rank from low-latency calls."""
        if rank not in self._masked:
            self._masked.add(rank)
            self._num_abandoned[rank] += 1  # this rank no longer receives rows that are still on their way

    def unmask(self, rank: int) -> None:
        """Include a rank in low-latency calls again."""
        self._masked.discard(rank)

    def exchange_headers(self, headers: np.ndarray, phase: str) -> tuple[np.ndarray, list[int]]:
        """Send `headers[peer]` to each peer, and receive the header of each peer for this rank.

        Return `[num_ranks, ...]`, with zeros for ranks that do not take part, and the ranks that do, ascending. Raise EPInputError if
        another rank is ahead in its low-latency calls.
        """
        number = self._low_latency_calls if self._in_low_latency else _THROUGHPUT
        sent = np.zeros((self._num_ranks, 2 + headers.shape[1]), np.int64)  # the call's number and a tag precede each header
        sent[:, 0], sent[:, 1], sent[:, 2:] = number, [self._receive_tag(peer) for peer in range(self._num_ranks)], headers
        received = np.zeros_like(sent)
        sends = [self._send([sent[peer]], peer, _HEADER_TAG) for peer in self.peers]
        waiting = self.peers
        while waiting:
            receives = [self._receive([received[peer]], peer, _HEADER_TAG) for peer in waiting]
            self._wait([*sends, *receives], phase)
            sends = []
            waiting = [peer for peer in waiting if peer in self.peers and self._is_outdated(int(received[peer, 0]))]
        present = sorted([self.rank, *self.peers])  # silent ranks are masked by now, and their headers do not count
        received[self.rank] = sent[self.rank]
        is_present = np.isin(np.arange(self._num_ranks), present)
        received = np.where(is_present[:, None], received, 0)  # a copy: MPI may still write to the first array
        for peer in present:
            self._send_tags[peer] = int(received[peer, 1])
        self._compare_numbers(number, received[:, 0])
        return received[:, 2:], present

    def exchange_rows(
        self, outgoing: Sequence[Sequence[np.ndarray]], incoming: Sequence[Sequence[np.ndarray]], phase: str
    ) -> set[int]:
        """Send the arrays `outgoing[peer]` to each peer as one message, and fill `incoming[peer]` with its message.

        Return the silent peers, which are masked now. The contents of their arrays are undefined, also later.
        """
        transfers = []
        for peer in self.peers:
            if any(part.nbytes for part in incoming[peer]):
                transfers.append(self._receive(incoming[peer], peer, self._receive_tag(peer)))
        for peer in self.peers:
            if any(part.nbytes for part in outgoing[peer]):
                transfers.append(self._send(outgoing[peer], peer, self._send_tags[peer]))
        return self._wait(transfers, phase)

    def _receive_tag(self, peer: int) -> int:
        """The tag under which this rank expects rows of a peer."""
        return _FIRST_ROWS_TAG + self._num_abandoned[peer] % _NUM_ROWS_TAGS

    def _is_outdated(self, number: int) -> bool:
        """Whether a header with this number belongs to a low-latency call that has ended, or was masked, here."""
        if number == _THROUGHPUT:
            return False
        if self._in_low_latency:
            return number < self._low_latency_calls
        # In a throughput call, a low-latency call that this rank did not make is an error, unless the peer had masked this rank.
        return self._masks_silent or number <= self._low_latency_calls

    def _compare_numbers(self, number: int, received: np.ndarray) -> None:
        """Count the calls that this rank missed, so that it makes its next call together with the others."""
        last = int(received.argmax())
        self._low_latency_calls = max(self._low_latency_calls, int(received[last]))
        if number != _THROUGHPUT and received[last] > number:
            raise EPInputError(
                f"low-latency call {number} of this rank meets call {received[last]} of rank {last}; expected the same number of calls "
                f"on all ranks. Unmask a rank only after all ranks have made the same number of low-latency calls"
            )

    def _send(self, parts: Sequence[np.ndarray], peer: int, tag: int) -> _Transfer:
        return _Transfer(peer, self._comm.send_parts(parts, self._ranks[peer], tag), False, parts)

    def _receive(self, parts: Sequence[np.ndarray], peer: int, tag: int) -> _Transfer:
        return _Transfer(peer, self._comm.receive_parts(parts, self._ranks[peer], tag), True, parts)

    def _wait(self, transfers: list[_Transfer], phase: str) -> set[int]:
        """Wait until all transfers are done. Return the peers, masked now, whose messages this rank no longer waits for."""
        try:
            return self._poll(transfers, PHASES[phase][1])
        except BaseException:
            self._comm.retain(transfers)  # MPI may still read or write there after the Buffer is gone
            raise

    def _poll(self, transfers: list[_Transfer], phase: str) -> set[int]:
        masks_silent = self._masks_silent and self._in_low_latency
        start = time.monotonic()
        self.failure_notice.start_listening()
        alive_at = dict.fromkeys((transfer.peer for transfer in transfers), start)
        heartbeat_at = start + self._timeout_s / _HEARTBEATS_PER_TIMEOUT
        lost: set[int] = set()
        pause = 0.0
        timer = None if self.statistics is None else self.statistics.step([t for t in transfers if t.is_receive])
        # Each transfer is tested, because MPI makes progress only on requests that are tested.
        while sum(transfer.is_done() for transfer in transfers) < len(transfers):
            self._check_destroyed()
            now = time.monotonic()
            if timer is not None:
                timer.look()
            if masks_silent and now > heartbeat_at:
                heartbeat_at = now + self._timeout_s / _HEARTBEATS_PER_TIMEOUT
                self._send_heartbeats()
                alive_at.update(dict.fromkeys(self._receive_heartbeats(), now))
            if not masks_silent:
                self._raise_if_failed(transfers, phase)
            gone = self._gone() if masks_silent else ()
            if masks_silent and any(self.failure_notice.has_gone_on(t.peer) and not t.is_done() for t in transfers):
                self._fail(transfers, self.failure_notice.error(self.failure_notice.lost[0], phase, self._call_idx))
            if now > start + self._timeout_s or gone:
                silent = [
                    t for t in transfers if (now > alive_at[t.peer] + self._timeout_s or t.peer in gone) and not t.is_done()
                ]
                if silent and not masks_silent:
                    self._fail(silent, self.failure_notice.explain(self._timeout(silent, phase)))
                lost.update(transfer.peer for transfer in silent if transfer.is_receive)
                self._mask_silent(silent, phase, gone)
                transfers = [transfer for transfer in transfers if transfer not in silent]
            time.sleep(pause)  # ranks often share cores: polling without a pause would slow down the peer
            # MPI moves large messages in pieces, and each may wait for a pause. So pauses are long only if the peer is late by much more.
            pause = min(pause + 2e-6, max(2e-5, min((now - start) / 100, 1e-3)))
        if timer is not None:
            timer.end()
        return lost

    def _send_heartbeats(self) -> None:
        self._unfinished = [transfer for transfer in self._unfinished if not transfer.is_done()]
        for peer in self.peers:
            self._unfinished.append(_Transfer(peer, self._comm.isend(None, self._ranks[peer], _HEARTBEAT_TAG), False, ()))

    def _receive_heartbeats(self) -> Iterator[int]:
        """Yield the ranks that have sent heartbeats. An old heartbeat only delays a time-out a little."""
        for peer, source in self._ranks.items():
            while peer != self.rank and self._comm.iprobe(source, _HEARTBEAT_TAG):
                self._comm.recv(source=source, tag=_HEARTBEAT_TAG)
                yield peer

    def _raise_if_failed(self, transfers: list[_Transfer], phase: str) -> None:
        """Raise if this rank waits for a peer that has left the Buffer after an exception."""
        if failed := self.failure_notice.failed_peers():
            waiting = [transfer for transfer in transfers if transfer.peer in failed and not transfer.is_done()]
            lost = [peer for peer in failed if peer in self.failure_notice.lost]
            if waiting or (lost and self._config.has_slots):  # others may have given up the call, too
                peer = waiting[0].peer if waiting else lost[0]
                phase += not_run(peer, self.purposes.current)
                self._fail(waiting, self.failure_notice.error(peer, phase, self._call_idx, self._node_of(peer)))

    def _gone(self) -> list[int]:
        """Return the ranks whose processes have ended, and whose last messages have arrived."""
        lost = self.failure_notice.lost
        return [peer for peer in self.failure_notice.failed_peers() if peer in lost] if lost else []

    def _mask_silent(self, silent: list[_Transfer], phase: str, gone: Sequence[int]) -> None:
        for transfer in silent:
            if transfer.is_receive:
                transfer.request.Cancel()
            if not transfer.is_done():
                self._unfinished.append(transfer)
        for peer in sorted({transfer.peer for transfer in silent}):
            self.mask(peer)
            waited = (
                f"the process of rank {peer} has ended" if peer in gone else f"it waited {self._timeout_s:g} s for rank {peer}"
            )
            _logger.warning(
                "rank %d excludes rank %d from low-latency calls from now on, because %s: %s did not come (call %d of this rank); "
                "see Buffer.unmask_rank",
                *(self.rank, peer, waited, phase, self._call_idx),
            )

    def _break(self, reason: str) -> None:
        """Refuse later calls for a reason that lies on this rank."""
        self._failure = EPTimeoutError(reason, rank=self.rank, peer=self.rank, phase="", call_idx=self._call_idx)

    def _fail(self, silent: list[_Transfer], error: EPTimeoutError) -> None:
        for transfer in silent:
            if transfer.is_receive:
                transfer.request.Cancel()
        self._failure = error
        raise error

    def _timeout(self, silent: list[_Transfer], phase: str) -> EPTimeoutError:
        first = silent[0].peer
        others, node = sorted({transfer.peer for transfer in silent} - {first}), self._node_of(first)
        where = "" if node is None else f" on node {node}"
        return EPTimeoutError(
            f"rank {self.rank} waited {self._timeout_s:g} s for rank {first}{where}: {phase} did not come "
            f"(call {self._call_idx} of this rank{f'; ranks {others} were silent too' if others else ''})"
            f"{missing_backward(first, self.purposes.current)}"
            f"Check that all ranks make the same calls in the same order and that rank {first} is alive. "
            f"If it is only slow, raise timeout_s (DEEPEP_RT_TIMEOUT_S)",
            rank=self.rank,
            peer=first,
            phase=phase,
            call_idx=self._call_idx,
            node=node,
        )


@dataclass(eq=False)
class _Transfer:
    """A message that is being sent or received."""

    peer: int
    request: Any  # of mpi4py, or of `comm/store.py`
    is_receive: bool
    parts: Sequence[np.ndarray]  # the memory that MPI reads or writes

    def is_done(self) -> bool:
        return not self.request or self.request.Test()
