"""Rates of the ranks of a Buffer over an interval, and which of them are slow. All functions are functions of snapshots alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._statistics_files import Snapshot
from ..statistics import CALL_KINDS, Statistics

LEAST_SHARE = 0.05
"""The part of the time that others have to wait for a rank, more than it waits for them, before it counts as slow."""

_LEAST_S = 1e-3  # of an interval with rates

STALE_S = 10.0
"""A file that was not written for so long belongs to a process that has ended or hangs."""


@dataclass(frozen=True)
class RankRates:
    """What one rank did over an interval."""

    rank: int
    host: str
    state: str  # "runs", "destroyed", or "silent": its file is not written any more
    age_s: float  # seconds since its file was written
    seconds: float  # length of the interval
    calls_per_s: dict[str, float]  # by kind
    sent_bytes_per_s: float  # of rows
    received_bytes_per_s: float  # of rows
    wait_shares: tuple[float, ...]  # the part of the interval that it waited for each rank, 0 to 1
    last: Statistics  # its numbers at the end of the interval


@dataclass(frozen=True)
class Verdict:
    """The slow ranks of a Buffer, the slowest first, each with the part of the time that the others waited for it."""

    slow: tuple[tuple[int, float], ...]
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if not self.slow:
            return f"no rank stands out in the last {self.seconds:.0f} s"
        return "; ".join(
            f"rank {rank} is slow: other ranks waited {share:.0%} of the last {self.seconds:.0f} s for it"
            for rank, share in self.slow
        )


def by_buffer(snapshots: Sequence[Snapshot]) -> dict[tuple[str, int], list[Snapshot]]:
    """Sort snapshots by name and number of ranks of the Buffer, and those of a Buffer by rank."""
    found: dict[tuple[str, int], list[Snapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda one: (one.buffer, one.num_ranks, one.now.rank)):
        found.setdefault((snapshot.buffer, snapshot.num_ranks), []).append(snapshot)
    return found


def rates_of(snapshot: Snapshot, time_now: float) -> RankRates:
    """Compute the rates between the two sets of numbers of a snapshot. `time_now`: in seconds since 1970."""
    now, earlier, age_s = snapshot.now, snapshot.earlier, max(time_now - snapshot.written_at, 0.0)
    difference_s = now.seconds - earlier.seconds
    seconds = difference_s if difference_s >= _LEAST_S else 0.0

    def rate(kind: str, name: str) -> float:
        difference = getattr(getattr(now, kind), name) - getattr(getattr(earlier, kind), name)
        return difference / seconds if seconds else 0.0

    waits = [0.0] * snapshot.num_ranks
    for kind in CALL_KINDS:
        pairs = zip(getattr(now, kind).wait_s, getattr(earlier, kind).wait_s, strict=True)
        for rank, (last, first) in enumerate(pairs):
            waits[rank] += last - first
    # A wait counts when it ends, so it may have begun before the interval.
    shares = tuple(min(wait / seconds, 1.0) if seconds else 0.0 for wait in waits)
    return RankRates(
        rank=now.rank,
        host=snapshot.host,
        state="destroyed" if snapshot.has_ended else "silent" if age_s > STALE_S else "runs",
        age_s=age_s,
        seconds=seconds,
        calls_per_s={kind: rate(kind, "calls") for kind in CALL_KINDS},
        sent_bytes_per_s=sum(rate(kind, "bytes_sent") for kind in CALL_KINDS),
        received_bytes_per_s=sum(rate(kind, "bytes_received") for kind in CALL_KINDS),
        wait_shares=shares,
        last=now,
    )


def judge(rates: Sequence[RankRates], num_ranks: int) -> Verdict:
    """Find the slow ranks of a Buffer. `rates` are of the ranks that have files.

    A rank that waits for a slow one is late for the others, who then wait for both. So a rank is slow only by the time that others wait for
    it more than it waits for them.
    """
    running = {one.rank: one for one in rates if one.state == "runs"}
    seconds = max((one.seconds for one in running.values() or rates), default=0.0)
    silent = [str(one.rank) for one in rates if one.state == "silent"]
    if silent:
        text = f"ranks that write no file any more: {', '.join(silent)}. Their processes have ended or hang"
        return Verdict((), seconds, text)
    if not running:
        return Verdict((), seconds, "the Buffer was destroyed")
    if missing := [str(rank) for rank in range(num_ranks) if rank not in {one.rank for one in rates}]:
        return Verdict((), seconds, f"ranks without a file: {', '.join(missing)}. Let all ranks write to this folder")
    if len(running) < 2:
        return Verdict((), seconds)
    slow = []
    for rank, own in running.items():
        others = [one for one in running.values() if one.rank != rank]
        share = sum(one.wait_shares[rank] for one in others) / len(others)
        more = share - sum(own.wait_shares[one.rank] for one in others) / len(others)
        if more >= LEAST_SHARE:
            slow.append((rank, share, more))
    most = max((more for _, _, more in slow), default=0.0)
    # If one rank is very slow, the others differ by chance.
    named = sorted(((rank, share) for rank, share, more in slow if more >= most / 2), key=lambda one: -one[1])
    return Verdict(tuple(named), seconds)


def document(buffer: str, rates: Sequence[RankRates], verdict: Verdict) -> dict[str, Any]:
    """Return everything of a Buffer for --json."""
    ranks = [
        {
            "rank": one.rank,
            "host": one.host,
            "state": one.state,
            "age_s": round(one.age_s, 3),
            "seconds": one.seconds,
            "calls_per_s": one.calls_per_s,
            "sent_bytes_per_s": one.sent_bytes_per_s,
            "received_bytes_per_s": one.received_bytes_per_s,
            "wait_shares": one.wait_shares,
            "statistics": one.last.to_dict(),
        }
        for one in rates
    ]
    slow = [{"rank": rank, "share": share} for rank, share in verdict.slow]
    return {"buffer": buffer, "seconds": verdict.seconds, "verdict": str(verdict), "slow": slow, "ranks": ranks}
