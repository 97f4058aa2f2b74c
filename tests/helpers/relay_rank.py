"""A rank with a relay and without a GPU: Python writes the ring as a kernel would."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np

from deepep_rt.comm.convert import communicator_of
from deepep_rt.doctor.relay_rates import HostPuts
from deepep_rt.kernels import structs

DESCRIPTOR = structs.Descriptor.dtype({})
FIRST = 4096
"""The offset at which the mirrored memory begins."""
TRANSPORT = os.environ.get("RELAY_TRANSPORT", "mpi")
"""What carries the puts of relays."""


class RelayRank(HostPuts):
    """The host memory of one rank, and its relay. `settings`: more arguments of `HostPuts`."""

    def __init__(self, comm: Any, num_bytes: int, depth: int = 64, **settings: Any) -> None:
        given = {"timeout_s": 20.0, "node_size": 1, "transport": TRANSPORT, **settings}
        super().__init__(communicator_of(comm), num_bytes, depth, FIRST, **given)

    def wait_until_sent(self, limit_s: float = 20.0) -> None:
        """Wait until the bytes of the last put, which is awaited, may change."""
        entry, end = self.ring[(self.num_puts - 1) % len(self.ring)], time.monotonic() + limit_s
        while entry["sent"] != entry["sequence"]:
            self.relay.check()
            assert time.monotonic() < end
            time.sleep(5e-5)


class Exchange:
    """Puts of random sizes from every rank to every other one, with credits, as kernels make them.

    A rank has `slots` places at every receiver. It fills a place again after the receiver has checked the bytes and put a credit back.

    Args:
        comm: The ranks.
        num_puts: How many puts go from each rank to each other rank.
        max_bytes: The size of a place, a multiple of 8.
        slots: Places for each pair of ranks.
        awaits: Whether some puts wait until their bytes may change.
        node_size: Ranks of a node. Puts go to other nodes only.
        settings: Arguments of `RelayRank`.
    """

    def __init__(
        self,
        comm: Any,
        num_puts: int,
        max_bytes: int,
        slots: int = 4,
        awaits: bool = True,
        node_size: int = 1,
        **settings: Any,
    ) -> None:
        self.comm, self.mine, self.num_ranks = comm, comm.Get_rank(), comm.Get_size()
        self.peers = [rank for rank in range(self.num_ranks) if rank // node_size != self.mine // node_size]
        self.num_puts, self.max_bytes, self.slots, self.awaits = num_puts, max_bytes, slots, awaits
        places = self.num_ranks * slots
        self._words_bytes, self._slots_bytes = places * 8, places * max_bytes
        self.rank = RelayRank(comm, 2 * (self._words_bytes + self._slots_bytes), node_size=node_size, **settings)
        self._sent, self._received = dict.fromkeys(self.peers, 0), dict.fromkeys(self.peers, 0)

    def size_of(self, source: int, dest: int, number: int) -> int:
        """Return the bytes of a put: often none or few, sometimes as many as fit."""
        rng = random.Random(f"{source} {dest} {number}")
        return min(rng.choice([0, rng.randrange(64), rng.randrange(9000), rng.randrange(self.max_bytes + 1)]), self.max_bytes)

    def content(self, source: int, dest: int, number: int) -> np.ndarray:
        return np.random.default_rng([source, dest, number]).integers(1, 256, self.size_of(source, dest, number), np.uint8)

    def place(self, rank: int, number: int) -> int:
        return rank * self.slots + number % self.slots

    def step(self) -> bool:
        """Make the puts that have room, check those that have arrived, and return whether there was any."""
        moved = False
        for peer in self.peers:
            moved |= self._send(peer)
            moved |= self._receive(peer)
        return moved

    @property
    def is_over(self) -> bool:
        """Whether this rank has sent and received everything, and has all its credits back."""
        answered = all(
            int(self.rank.words[self.num_ranks * self.slots + self.place(peer, number)]) == number // self.slots + 1
            for peer in self.peers
            for number in range(max(0, self.num_puts - self.slots), self.num_puts)
        )
        return answered and min([*self._sent.values(), *self._received.values()]) == self.num_puts

    def run(self, limit_s: float = 60.0) -> None:
        """Exchange everything."""
        end = time.monotonic() + limit_s
        while not self.is_over:
            if not self.step():
                self.rank.relay.check()
                assert time.monotonic() < end, f"sent {self._sent}, received {self._received}"
                time.sleep(5e-5)

    def _send(self, peer: int) -> bool:
        number = self._sent[peer]
        at, turn = self.place(peer, number), number // self.slots
        credit = self.rank.words[self.num_ranks * self.slots + at]
        if number == self.num_puts or credit < turn or not self.rank.has_room:
            return False
        content = self.content(self.mine, peer, number)
        start = 2 * self._words_bytes + at * self.max_bytes
        self.rank.memory[start : start + content.size] = content
        to = 2 * self._words_bytes + self._slots_bytes + self.place(self.mine, number) * self.max_bytes
        is_awaited = self.awaits and number % 8 == 0
        self.rank.put(peer, to, start, content.size, 8 * self.place(self.mine, number), turn + 1, is_awaited)
        if is_awaited:
            self.rank.wait_until_sent()
            self.rank.memory[start : start + content.size] = 0
        self._sent[peer] = number + 1
        return True

    def _receive(self, peer: int) -> bool:
        number = self._received[peer]
        at, turn = self.place(peer, number), number // self.slots
        if number == self.num_puts or self.rank.words[at] < turn + 1 or not self.rank.has_room:
            return False
        assert self.rank.words[at] == turn + 1
        content, start = self.content(peer, self.mine, number), 2 * self._words_bytes + self._slots_bytes + at * self.max_bytes
        here = self.rank.memory[start : start + self.max_bytes]
        assert np.array_equal(here[: content.size], content), f"put {number} of rank {peer}, {content.size} bytes"
        assert not here[content.size :].any(), "bytes after the put"
        here[:] = 0
        self.rank.put(peer, 0, 0, 0, self._words_bytes + 8 * self.place(self.mine, number), turn + 1)
        self._received[peer] = number + 1
        return True
