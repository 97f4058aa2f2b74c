"""What a Buffer counts while it runs: `Buffer.statistics` returns it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

CALL_KINDS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
"""The kinds of calls, in the order of their numbers in local memory of a GPU."""

NUMBERS = ("calls", "rows_sent", "rows_received", "bytes_sent", "bytes_received")
"""The numbers of a kind of calls, besides its waits."""


@dataclass(frozen=True)
class CallStatistics:
    """The calls of one kind so far, on one rank.

    Args:
        calls: Calls that have finished here. Replays of CUDA graphs count.
        rows_sent: Rows that this rank sent. A row is a token for one rank; with `reduce="topk"`, a row for one choice. Rows for this rank
            itself count.
        rows_received: Rows that arrived at this rank, from this rank itself too.
        bytes_sent: Bytes of the rows sent, as they travel and with their scales. Expert numbers and weights do not count.
        bytes_received: Bytes of the rows received.
        wait_s: `[num_ranks]` seconds that this rank waited for each rank. A call waits in a few steps, such as for counts and for rows. In
            each step, the longest wait of a thread for a rank counts. This rank itself has 0.

    Example:
        >>> combine = buffer.statistics().combine
        >>> max(range(len(combine.wait_s)), key=combine.wait_s.__getitem__)  # the rank that this one waited for the longest
        3
    """

    calls: int
    rows_sent: int
    rows_received: int
    bytes_sent: int
    bytes_received: int
    wait_s: tuple[float, ...]


@dataclass(frozen=True)
class PoolUse:
    """The memory for results of dispatch. All numbers are 0 on the host backend, which has no pool.

    Args:
        bytes_in_use: Bytes of results that the program holds.
        most_bytes_in_use: The most so far, right after a dispatch had reserved its memory.
        capacity_bytes: Bytes of the pool.
        results_copied: Results that were copied to separate memory because the pool was full (`on_exhausted="copy"`).

    Example:
        >>> pool = buffer.statistics().pool
        >>> print(f"{pool.most_bytes_in_use / pool.capacity_bytes:.0%} of the pool")
    """

    bytes_in_use: int = 0
    most_bytes_in_use: int = 0
    capacity_bytes: int = 0
    results_copied: int = 0


@dataclass(frozen=True)
class Statistics:
    """What `Buffer.statistics` returns: numbers of one rank, since its Buffer was made. They only grow, but for `pool`.

    Args:
        rank: The rank in the Buffer's communicator.
        seconds: Seconds since the Buffer was made.
        dispatch: Calls of `dispatch`.
        combine: Calls of `combine`.
        low_latency_dispatch: Calls of `low_latency_dispatch`.
        low_latency_combine: Calls of `low_latency_combine`.
        rows_by_expert: `[num_local_experts]` choices of each expert of this rank, by tokens of all ranks, in dispatches of both kinds. A
            dispatch with a handle repeats a routing, and does not count here.
        pool: Use of the memory for results.

    Example:
        >>> before = buffer.statistics()
        >>> train(steps=100)
        >>> after = buffer.statistics()
        >>> (after.dispatch.bytes_sent - before.dispatch.bytes_sent) / (after.seconds - before.seconds)  # bytes a second
        >>> json.dumps(after.to_dict())
    """

    rank: int
    seconds: float
    dispatch: CallStatistics
    combine: CallStatistics
    low_latency_dispatch: CallStatistics
    low_latency_combine: CallStatistics
    rows_by_expert: tuple[int, ...]
    pool: PoolUse

    def to_dict(self) -> dict[str, Any]:
        """Return the same as dictionaries, lists and numbers, for `json.dumps`.

        Returns:
            A dictionary with the names of the attributes.

        Example:
            >>> buffer.statistics().to_dict()["dispatch"]["calls"]
            12
        """
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Counters:
    """What a backend counts: everything but the rank and the clock."""

    calls: tuple[CallStatistics, ...]  # in the order of CALL_KINDS
    rows_by_expert: tuple[int, ...]
    pool: PoolUse

    def of_rank(self, rank: int, seconds: float) -> Statistics:
        """Return the statistics of a rank."""
        return Statistics(
            rank=rank,
            seconds=seconds,
            rows_by_expert=self.rows_by_expert,
            pool=self.pool,
            **dict(zip(CALL_KINDS, self.calls, strict=True)),
        )
