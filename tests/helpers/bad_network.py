"""A network that does what a real one may do at worst: it delays, reorders, splits, holds back and drops puts, and stalls a rank.

with bad_network(BadNetwork(seed=3)):
buffer = Buffer(...)  # its relay goes through this network
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from deepep_rt.comm.communicator import Communicator
from deepep_rt.comm.relay import Relay, traffic_of
from deepep_rt.comm.relay_puts import Put
from deepep_rt.comm.relay_traffic import RelayTraffic


@dataclass
class BadNetwork:
    """What the network does. Shares are probabilities for each put, but `stalls` for each turn of the relay."""

    seed: int = 0
    delays: float = 0.5
    max_delay_s: float = 2e-3
    splits: float = 0.3
    max_pieces: int = 4
    stalls: float = 0.0
    stall_s: float = 0.02
    drops: Callable[[int, Put], bool] = field(default=lambda number, put: False)
    """Whether to drop a put of this rank for ever; gets its number, counted from 0."""


@functools.cache
def bad_traffic(base: Any) -> Any:
    """Return a class that sends as `base` does, through a bad network."""

    class BadTraffic(base):  # type: ignore[misc]
        """Each put waits at the sender, then its bytes arrive in pieces in any order, and its word after them."""

        def __init__(self, network: BadNetwork, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._network, self._random = network, random.Random(f"{network.seed} {self._rank}")
            self._late: list[tuple[float, bool, Callable[[], None]]] = []  # when, whether it is a put of this rank, what to do
            self._arrived: dict[int, bytearray] = {}
            self._num_seen = 0
            self._numbers, self._completed = itertools.count(), -1
            self.dropped: list[Put] = []
            self.done: Counter[str] = Counter()
            """What the network has done to puts of this rank and to puts for it."""

        def turn(self) -> bool:
            if self._random.random() < self._network.stalls:
                self.done["stalls"] += 1
                time.sleep(self._network.stall_s)
            now = time.monotonic()
            due = [late for late in self._late if late[0] <= now]
            self._late = [late for late in self._late if late[0] > now]
            self._random.shuffle(due)
            for _, _, act in due:
                act()
            return super().turn() or bool(due)

        def send(self, put: Put) -> None:
            number, self._num_seen = self._num_seen, self._num_seen + 1
            if self._network.drops(number, put):
                self.dropped.append(put)
                self.done["lost"] += 1
            else:
                self._later("late at the sender", lambda: super(BadTraffic, self).send(put), is_mine=True)

        def target(self, put: Put) -> memoryview:
            """Keep the bytes apart. They reach their place after a delay."""
            super().target(put)
            self._arrived[id(put)] = bytearray(put.num_bytes)
            return memoryview(self._arrived[id(put)])

        def complete(self, put: Put) -> None:
            content = memoryview(self._arrived.pop(id(put), bytearray()))
            cuts = {0, len(content)}
            if content and self._random.random() < self._network.splits:
                cuts |= {self._random.randrange(len(content)) for _ in range(self._network.max_pieces - 1)}
                self.done["split"] += len(cuts) > 2
            ends = sorted(cuts)
            pieces = list(itertools.pairwise(ends))
            self._random.shuffle(pieces)
            number = next(self._numbers)  # in the order in which MPI brought them

            def finish() -> None:
                self.done["puts"] += 1
                self.done["overtaken"] += number < self._completed
                self._completed = max(number, self._completed)
                super(BadTraffic, self).complete(put)

            def next_piece() -> None:
                if pieces:
                    start, end = pieces.pop()
                    self._mirror.part(put.to + start, end - start)[:] = content[start:end]
                if pieces:
                    self._later("late at the receiver", next_piece)
                else:
                    self._later("late at the receiver", finish)

            next_piece()

        def _later(self, what: str, act: Callable[[], None], is_mine: bool = False) -> None:
            if self._random.random() < self._network.delays:
                self.done[what] += 1
                self._late.append((time.monotonic() + self._random.uniform(0, self._network.max_delay_s), is_mine, act))
            else:
                act()

        @property
        def all_sent(self) -> bool:
            return super().all_sent and not any(is_mine for _, is_mine, _ in self._late)

        @property
        def all_received(self) -> bool:
            return super().all_received and all(is_mine for _, is_mine, _ in self._late)

    return BadTraffic


@contextmanager
def bad_network(network: BadNetwork) -> Iterator[None]:
    """Let the relays that the block makes go through a bad network."""

    def make_traffic(relay: Relay, comm: Communicator) -> RelayTraffic:
        return bad_traffic(traffic_of(relay._transport))(network, comm, relay._ring, relay._mirror, relay._peers)

    with mock.patch.object(Relay, "make_traffic", make_traffic):
        yield
