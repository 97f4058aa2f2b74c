"""Wait for collectives with a time limit, and name the ranks that did not arrive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import EPPeerError, EPTimeoutError
from .communicator import Request
from .host import host_identity

_MAX_LISTED_RANKS = 8
_ANNOUNCE_S = 1.0  # a rank that waits longer tells the others that it has arrived
_SPIN_S = 2e-3  # shorter waits poll without a pause
_MAX_PAUSE_S = 2e-3


def wait_all(requests: Sequence[Request], timeout_s: float, heard: Callable[[], EPPeerError | None] | None = None) -> bool:
    """Wait for requests up to a time limit, and return whether all are complete. Raise what `heard` returns."""
    start, pause = time.monotonic(), 1e-4
    while not all(request.Test() for request in requests):
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        if waited_s > _SPIN_S:
            if heard is not None and (error := heard()) is not None:
                raise error
            time.sleep(pause)
            pause = min(1.2 * pause, _MAX_PAUSE_S)
    return True


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message."""
    more = f" and {len(ranks) - _MAX_LISTED_RANKS} more" if len(ranks) > _MAX_LISTED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_LISTED_RANKS]))}{more}"


class TimedCollectives:
    """The part that both kinds of communicator share."""

    timeout_s = math.inf
    heard: Callable[[], EPPeerError | None] | None = None

    # Each communicator has these methods. Defining them here would hide those of MPI.Intracomm.
    Get_rank: Callable[[], int]
    retain: Callable[..., None]
    allgather: Callable[[Any], list[Any]]

    def ranks_on_host(self) -> list[int]:
        """Return the ranks on this host, ascending. Collective.

        The hosts tell it, not MPI: for `COMM_TYPE_SHARED`, Open MPI 4.1.6 puts each rank of the second host on a host of its own.
        """
        hosts = self.allgather(host_identity())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.Get_rank()]]

    def can_send(self) -> bool:
        """Return whether this thread may send messages now."""
        return True

    def _announce_arrival(self) -> None:
        """Tell the other ranks that this rank waits."""

    def _missing_ranks(self, request: Any) -> list[int]:
        """Return the ranks that have not joined the collective of a request, as far as this rank knows."""
        raise NotImplementedError

    def finish(
        self, request: Request, held: Any, phase: str, hint: str, timeout_s: float | None = None, waited_s: float = 0.0
    ) -> None:
        """Wait for a collective.

        Args:
            request: This rank's request.
            held: What the request uses.
            phase: What the collective is a part of, for the message.
            hint: What all ranks have to do there, for the message.
            timeout_s: The limit. Default: that of the communicator.
            waited_s: How long this rank has waited in the phase before.

        Raises:
            EPTimeoutError: if a rank does not arrive; it names those ranks.
            EPPeerError: if `heard` returns it.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        announce_s = min(_ANNOUNCE_S, limit_s / 4)
        try:
            if wait_all([request], announce_s, self.heard):
                return
            self._announce_arrival()
            if wait_all([request], limit_s - announce_s, self.heard):
                return
        except EPPeerError:
            self.retain(request, held)
            raise
        # The announcement of the last rank may still be on its way.
        end = time.monotonic() + announce_s
        while (missing := self._missing_ranks(request)) and time.monotonic() < end:
            if wait_all([request], announce_s / 10):
                return
        self.retain(request, held)
        raise self.timeout_error(missing, phase, hint, waited_s + limit_s)

    def _finish_step(self, request: Request, held: Any, phase: str) -> None:
        self.finish(request, held, phase, "all ranks to call it")

    def timeout_error(self, missing: Sequence[int], phase: str, hint: str, timeout_s: float) -> EPTimeoutError:
        """Make the error about ranks that did not arrive."""
        peers = f"{format_ranks(missing)}, which did not arrive" if missing else "all ranks. One arrived, but gave up or ended"
        return EPTimeoutError(
            f"timeout_s={timeout_s:g}; expected {hint}. Rank {self.Get_rank()} waited in {phase} for {peers}. "
            f"Check whether a rank ended or raised an exception. If it is only slow, raise timeout_s (DEEPEP_RT_TIMEOUT_S).",
            rank=self.Get_rank(),
            peer=missing[0] if missing else -1,
            phase=phase,
        )
