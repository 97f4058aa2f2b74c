"""Measure what a relay carries between two ranks, from host memory. Python writes the ring, as kernels do."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..comm.communicator import Communicator
from ..comm.relay import Relay
from ..kernels import structs

CHUNK_BYTES = 1 << 20
"""Bytes of a large put."""

_DESCRIPTOR = structs.Descriptor.dtype({})
_SLOTS = 8  # for large puts of each direction
# The words: those of the slots, those of their credits, and three more.
_CREDITS, _PING, _END, _HERE = _SLOTS, 2 * _SLOTS, 2 * _SLOTS + 1, 2 * _SLOTS + 2
_DATA = 8 * 32  # bytes before the slots that send
_BATCHES, _PER_BATCH = 5, 20
_LEAST_S = 0.1  # of one measured rate


class HostPuts:
    """The host memory of one rank, its ring and its relay.

    Args:
        comm: The ranks.
        num_bytes: The size of the memory.
        depth: The entries of the ring, a power of two.
        first: The offset at which the memory begins, as a Buffer has one.
        first_put: The number of the first put.
        settings: More arguments of the relay.
    """

    def __init__(
        self, comm: Communicator, num_bytes: int, depth: int = 64, first: int = 0, first_put: int = 0, **settings: object
    ) -> None:
        self.memory, self.ring = np.zeros(num_bytes, np.uint8), np.zeros(depth, _DESCRIPTOR)
        self.words = self.memory.view(np.uint64)
        self.num_puts, self._first = first_put, first
        for put in range(max(0, first_put - depth), first_put):
            self.ring[put % depth]["sequence"] = (put + 1) % 2**32  # as the puts before left it
        places = self.memory.ctypes.data, num_bytes, first, self.ring.ctypes.data
        self.relay = Relay(comm, *places, depth, _DESCRIPTOR, first_put=first_put, **settings)  # type: ignore[arg-type]

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

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until something is true. Raise EPTimeoutError or EPUnavailableError if a relay fails."""
        while not is_over():
            self.relay.check()
            time.sleep(0)  # the relay's thread needs Python's lock


def relay_rates(comm: Communicator, transport: str, timeout_s: float) -> dict[str, float]:
    """Measure between the two ranks of `comm`. Collective.

    Returns:
        On both ranks: `us`, a word one way, of the best batch; and `gb_s` and `back_gb_s`, large puts from rank 0 to rank 1 and back.

    Raises:
        EPUnavailableError: if the transport cannot work.
        EPTimeoutError: if the other rank's relay is silent.
    """
    puts = HostPuts(comm, _DATA + 2 * _SLOTS * CHUNK_BYTES, transport=transport, timeout_s=timeout_s, node_size=1)
    mine = comm.Get_rank()
    found = {"us": 1e6 * _latency_s(puts, mine), "gb_s": _gb_s(puts, mine, 0), "back_gb_s": _gb_s(puts, mine, 1)}
    puts.relay.close()
    measured = comm.allgather(found)
    return {name: measured[name == "back_gb_s"][name] for name in found}


def _latency_s(puts: HostPuts, mine: int) -> float:
    """Return half of the time of a round trip."""
    batches, value = [], 0
    for _ in range(_BATCHES + 1):  # the first one connects the ranks
        start = time.perf_counter()
        for _ in range(_PER_BATCH):
            value += 1
            for sender in (0, 1):
                if mine == sender:
                    puts.put(1 - mine, 0, 0, 0, 8 * _PING, value)
                    puts.relay.wake()
                else:
                    puts.wait(lambda: int(puts.words[_PING]) >= value)  # noqa: B023
        batches.append((time.perf_counter() - start) / _PER_BATCH / 2)
    return min(batches[1:])


def _gb_s(puts: HostPuts, mine: int, sender: int) -> float:
    """Return the rate of large puts in one direction, on the rank that sends. Slot i has the word i, and the word of its credit."""
    arrived, credits = puts.words[:_SLOTS], puts.words[_CREDITS : _CREDITS + _SLOTS]
    arrived[:] = credits[:] = puts.words[_END] = 0
    puts.put(1 - mine, 0, 0, 0, 8 * _HERE, 1 + sender)
    puts.wait(lambda: int(puts.words[_HERE]) > sender)
    number, start = 0, time.perf_counter()
    if mine == sender:
        while number < 4 * _SLOTS or time.perf_counter() - start < _LEAST_S:
            puts.wait(lambda: int(credits[number % _SLOTS]) >= number // _SLOTS)  # noqa: B023
            at = _DATA + number % _SLOTS * CHUNK_BYTES
            puts.put(1 - mine, at + _SLOTS * CHUNK_BYTES, at, CHUNK_BYTES, 8 * (number % _SLOTS), number // _SLOTS + 1)
            number += 1
        for slot in range(_SLOTS):
            puts.wait(lambda: int(credits[slot]) >= (number - slot + _SLOTS - 1) // _SLOTS)  # noqa: B023
        seconds = time.perf_counter() - start
        puts.put(1 - mine, 0, 0, 0, 8 * _END, 1)
        return number * CHUNK_BYTES / seconds / 1e9
    while not puts.words[_END]:
        if int(arrived[number % _SLOTS]) > number // _SLOTS:
            puts.put(1 - mine, 0, 0, 0, 8 * (_CREDITS + number % _SLOTS), number // _SLOTS + 1)
            number += 1
        else:
            puts.wait(lambda: True)
    return 0.0
