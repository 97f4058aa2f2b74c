"""Measure what a relay carries between two ranks, from host memory. Python writes the ring, as kernels do.

Kernels do not need Python's lock. So during a measurement only the relays' threads run: they write the ring when something arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..comm.communicator import Communicator
from ..comm.relay import Relay, traffic_of
from ..comm.relay_puts import Put
from ..comm.relay_traffic import RelayTraffic
from ..kernels import structs

CHUNK_BYTES = 256 << 10
"""Bytes of a large put, as calls over a relay have."""

_DESCRIPTOR = structs.Descriptor.dtype({})
_PING, _ACK, _END, _NUM_WORDS = 0, 1, 2, 4
_SLOTS = 8  # places for large puts; one answer follows so many of them
_AHEAD = 3  # answers that a sender does not wait for
_BATCHES, _PER_BATCH = 6, 20
_LEAST_S = 0.1  # of one measured rate
_LATENCY, _THERE, _BACK = range(3)  # what is measured, in this order


class HostPuts:
    """The host memory of one rank, its ring and its relay.

    Args:
        comm: The ranks.
        num_bytes: The size of the memory.
        depth: The entries of the ring, a power of two.
        first: The offset at which the memory begins, as a Buffer has one.
        first_put: The number of the first put.
        relay: The class of the relay.
        settings: More arguments of the relay.
    """

    def __init__(
        self,
        comm: Communicator,
        num_bytes: int,
        depth: int = 64,
        first: int = 0,
        first_put: int = 0,
        relay: Callable[..., Relay] = Relay,
        **settings: object,
    ) -> None:
        self.memory, self.ring = np.zeros(num_bytes, np.uint8), np.zeros(depth, _DESCRIPTOR)
        self.words = self.memory.view(np.uint64)
        self.num_puts, self._first = first_put, first
        for put in range(max(0, first_put - depth), first_put):
            self.ring[put % depth]["sequence"] = (put + 1) % 2**32  # as the puts before left it
        places = self.memory.ctypes.data, num_bytes, first, self.ring.ctypes.data
        self.relay = relay(comm, *places, depth, _DESCRIPTOR, first_put=first_put, **settings)

    @property
    def has_room(self) -> bool:
        """Whether the relay has read the put that has the next entry of the ring."""
        return self.num_puts - self.relay.num_taken < len(self.ring)

    def put(self, rank: int, to: int, start: int, num_bytes: int, word: int, value: int, is_awaited: bool = False) -> None:
        """Put bytes of this rank's memory, as a kernel does. `to`, `start` and `word` count from the start of the memory."""
        assert self.has_room
        entry = self.ring[self.num_puts % len(self.ring)]
        entry["from"], entry["to"], entry["word"] = self._first + start, self._first + to, self._first + word
        entry["value"], entry["num_bytes"], entry["rank"], entry["is_awaited"] = value, num_bytes, rank, is_awaited
        if is_awaited:
            entry["sent"] = self.num_puts % 2**32  # the sequence before: an older value could be equal
        self.num_puts += 1
        entry["sequence"] = self.num_puts % 2**32


class _AnsweringRelay(Relay):
    """A relay whose thread calls `arrived` for each put that has arrived."""

    def __init__(self, *given: Any, arrived: Callable[[Put], None], **settings: Any) -> None:
        self._arrived = arrived
        super().__init__(*given, **settings)

    def make_traffic(self, comm: Communicator) -> RelayTraffic:
        """Make the part that sends and receives."""
        arrived, kind = self._arrived, traffic_of(self._transport)

        class Traffic(kind):  # type: ignore[misc, valid-type]
            def complete(self, put: Put) -> None:
                super().complete(put)
                arrived(put)

        traffic: RelayTraffic = Traffic(comm, self._ring, self._mirror, self._peers)
        return traffic


class _Measurement(HostPuts):
    """What one of two ranks measures. The main thread sleeps until `over` of a part is set."""

    def __init__(self, comm: Communicator, transport: str, timeout_s: float) -> None:
        self._mine, self._lock = comm.Get_rank(), threading.Lock()
        self._over = [threading.Event() for _ in (_LATENCY, _THERE, _BACK)]
        self._start, self._pings, self._batches = 0.0, 0, list[float]()
        self._batches_sent = self._acks = self._num_arrived = 0
        self._gb_s, self._part = 0.0, _LATENCY
        settings: Any = dict(transport=transport, timeout_s=timeout_s, node_size=1, relay=_AnsweringRelay, arrived=self._arrived)
        super().__init__(comm, 8 * _NUM_WORDS + 2 * _SLOTS * CHUNK_BYTES, **settings)
        comm.allgather(None)  # both ranks can answer

    def measure(self) -> dict[str, float]:
        """Measure all parts. A rank has the time of a word if it is rank 0, and the rate of what it sends."""
        for part in (_LATENCY, _THERE, _BACK):
            if self._mine == (part == _BACK):
                with self._lock:  # an answer may come at once
                    self._begin(part)
                self.relay.wake()
            while not self._over[part].wait(0.05):
                self.relay.check()
        us = 1e6 * min(self._batches[1:], default=0.0)  # the first batch connects the ranks
        return {"us": us, "gb_s": self._gb_s, "back_gb_s": self._gb_s}

    def _begin(self, part: int) -> None:
        self._part, self._start = part, time.perf_counter()
        if part == _LATENCY:
            self._send_word(_PING)
            return
        for _ in range(_AHEAD):
            self._send_batch()

    def _arrived(self, put: Put) -> None:
        """Called by the relay's thread."""
        with self._lock:
            if put.num_bytes:
                self._num_arrived += 1
                if self._num_arrived % _SLOTS == 0:
                    self._send_word(_ACK)
            elif put.word == 8 * _END:
                self._over[put.value].set()
            elif put.word == 8 * _ACK:
                self._go_on_sending()
            elif self._mine:
                self._send_word(_PING)
            else:
                self._go_on_asking()

    def _go_on_asking(self) -> None:
        self._pings += 1
        if self._pings % _PER_BATCH == 0:
            now = time.perf_counter()
            self._batches.append((now - self._start) / _PER_BATCH / 2)
            self._start = now
        if len(self._batches) < _BATCHES:
            self._send_word(_PING)
        else:
            self._end()

    def _go_on_sending(self) -> None:
        self._acks += 1
        seconds = time.perf_counter() - self._start
        if seconds < _LEAST_S:
            self._send_batch()
        elif self._acks == self._batches_sent:
            self._gb_s = self._acks * _SLOTS * CHUNK_BYTES / seconds / 1e9
            self._end()

    def _send_batch(self) -> None:
        for slot in range(_SLOTS):
            at = 8 * _NUM_WORDS + slot * CHUNK_BYTES
            self.put(1 - self._mine, at + _SLOTS * CHUNK_BYTES, at, CHUNK_BYTES, 8 * (_NUM_WORDS - 1), 0)
        self._batches_sent += 1

    def _send_word(self, word: int, value: int = 0) -> None:
        self.put(1 - self._mine, 0, 0, 0, 8 * word, value)

    def _end(self) -> None:
        self._send_word(_END, self._part)
        self._over[self._part].set()


def relay_rates(comm: Communicator, transport: str, timeout_s: float) -> dict[str, float]:
    """Measure between the two ranks of `comm`. Collective.

    Returns:
        On both ranks: `us`, a word one way, of the best batch; and `gb_s` and `back_gb_s`, large puts from rank 0 to rank 1 and back.

    Raises:
        EPUnavailableError: if the transport cannot work.
        EPTimeoutError: if the other rank's relay is silent.
    """
    puts = _Measurement(comm, transport, timeout_s)
    found = puts.measure()
    puts.relay.close()
    measured = comm.allgather(found)
    return {name: measured[name == "back_gb_s"][name] for name in found}
