"""Count the calls of the host backend, as kernels do on GPUs, and measure the links between its ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from ...comm.communicator import Communicator
from ...comm.timed_collectives import wait_all
from ...config import Config
from ...description import LinkRates
from ...statistics import CALL_KINDS, NUMBERS, CallStatistics, Counters, PoolUse

_TAG = 5  # of messages that measure links
_SMALL, _LARGE = 8, 1 << 20  # bytes of a message
_ROUNDS = {_SMALL: 9, _LARGE: 3}
_PHASE = "the measurement of links"


class Awaited(Protocol):
    """A message that this rank waits for."""

    peer: int

    def is_done(self) -> bool:
        """Whether it has arrived."""


class HostStatistics:
    """The numbers of one Buffer."""

    def __init__(self, config: Config) -> None:
        kinds = len(CALL_KINDS)
        self._kind: int | None = None  # of the running call
        self._numbers = np.zeros((kinds, len(NUMBERS)), np.int64)
        self._wait_s = np.zeros((kinds, config.num_ranks))
        self._rows_by_expert = np.zeros(config.num_local_experts, np.int64)

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Count a call that ends without an error, and what it waits for and moves."""
        self._kind = CALL_KINDS.index(kind)
        try:
            yield
            self._numbers[self._kind, 0] += 1
        finally:
            self._kind = None

    def step(self, messages: Sequence[Awaited]) -> StepTimer | None:
        """Return the timer of a step of the running call, or None if no call runs. The step waits for `messages`."""
        return None if self._kind is None else StepTimer(messages, self._wait_s[self._kind])

    def add_rows(self, num_sent: int, num_received: int, row_bytes: int) -> None:
        """Add the rows of the running call."""
        if self._kind is not None:
            self._numbers[self._kind, 1:] += num_sent, num_received, num_sent * row_bytes, num_received * row_bytes

    def add_dispatched_rows(self, num_sent: int, num_received: int, row_bytes: int) -> None:
        """The same for the rows of a dispatch. A combine that sends its weights by a dispatch does not count them."""
        if self._kind is not None and CALL_KINDS[self._kind].endswith("dispatch"):
            self.add_rows(num_sent, num_received, row_bytes)

    def add_choices(self, by_expert: np.ndarray) -> None:
        """Add the rows of each local expert, `[num_local_experts]`."""
        self._rows_by_expert += by_expert

    def counters(self) -> Counters:
        """Return all numbers so far."""
        calls = tuple(
            CallStatistics(**dict(zip(NUMBERS, numbers, strict=True)), wait_s=tuple(waits))
            for numbers, waits in zip(self._numbers.tolist(), self._wait_s.tolist(), strict=True)
        )
        return Counters(calls, tuple(self._rows_by_expert.tolist()), PoolUse())


class StepTimer:
    """Measure how long this rank waits for each peer in one step, from the first poll without success.

    The longest wait for each peer is added to `wait_s`, `[num_ranks]`.
    """

    def __init__(self, messages: Sequence[Awaited], wait_s: np.ndarray) -> None:
        self._awaited, self._wait_s = list(messages), wait_s
        self._begin: float | None = None
        self._longest_s: dict[int, float] = {}

    def look(self) -> None:
        """Note which messages have arrived. Call it after each poll without success."""
        now = time.perf_counter()
        self._begin = self._begin or now
        for message in [message for message in self._awaited if message.is_done()]:
            self._awaited.remove(message)
            self._longest_s[message.peer] = now - self._begin

    def end(self) -> None:
        """Add the waits of the step. Messages that have not arrived by now belong to ranks that are masked."""
        if self._begin is None:
            return
        self.look()
        lost = {message.peer: time.perf_counter() - self._begin for message in self._awaited}
        for peer, seconds in {**self._longest_s, **lost}.items():
            self._wait_s[peer] += seconds


def measure_links(comm: Communicator, config: Config) -> LinkRates:
    """Measure the links while all ranks send at the same time; see `path_choice.Measure`. Nodes have several ranks.

    Each rank sends to the next rank of its node, and then to the rank of its number on the next node.
    """
    rank, node, size = comm.Get_rank(), config.node_size, comm.Get_size()
    first = rank - rank % node
    near = first + (rank - first + 1) % node, first + (rank - first - 1) % node
    far = (rank + node) % size, (rank - node) % size
    times = [_seconds(comm, *peers, num_bytes) for peers in (near, far) for num_bytes in (_SMALL, _LARGE)]
    near_small, near_large, far_small, far_large = np.max(comm.allgather(times), axis=0).tolist()
    return LinkRates(_LARGE / near_large, near_small, _LARGE / far_large, far_small)


def _seconds(comm: Communicator, dest: int, source: int, num_bytes: int) -> float:
    """Return the shortest time in which this rank sends a message and receives one. Other work of the machine only makes it longer."""
    outgoing, incoming = np.zeros((2, num_bytes), np.uint8)
    times = []
    for _ in range(1 + _ROUNDS[num_bytes]):  # the first one also makes connections
        start = time.perf_counter()
        requests = [comm.Irecv(incoming, source, _TAG), comm.Isend(outgoing, dest, _TAG)]
        if not wait_all(requests, comm.timeout_s):
            comm.retain(requests, outgoing, incoming)
            raise comm.timeout_error([source], _PHASE, "all ranks to make the Buffer", comm.timeout_s)
        times.append(time.perf_counter() - start)
    return min(times[1:])
