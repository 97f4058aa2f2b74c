"""Collective steps that end in time, and name the ranks that did not come. Both kinds of communicator have them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EPTimeoutError

_MOST_NAMED = 8  # ranks, in a message
_ANNOUNCE_S = 1.0  # a rank that waits longer tells the others that it has come
_SPIN_S = 2e-3  # a step that is this short is waited for without a pause
_LONGEST_PAUSE_S = 2e-3


def wait_all(requests: Sequence[Any], timeout_s: float) -> bool:
    """Whether requests are done, now or soon."""
    start, pause = time.monotonic(), 1e-4
    while not all(request.Test() for request in requests):
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        if waited_s > _SPIN_S:
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)
    return True


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks, as a message names them."""
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"


class TimedCollectives:
    """What both kinds of communicator share. `timeout_s` limits their collectives; a duplicate keeps it."""

    timeout_s = math.inf

    if TYPE_CHECKING:

        def Get_rank(self) -> int: ...
        def retain(self, *held: Any) -> None: ...

    def _announce_arrival(self) -> None:
        """Tell the others that this rank waits."""

    def _missing_ranks(self, request: Any) -> list[int]:
        """The ranks that have not come to the step of a request, as far as this rank knows."""
        raise NotImplementedError

    def finish(
        self, request: Any, held: Any, phase: str, hint: str, timeout_s: float | None = None, waited_s: float = 0.0
    ) -> None:
        """Wait for a request that all ranks take part in.

        Args:
            request: What this rank has started.
            held: What the request uses.
            phase: What it is a part of, for the message.
            hint: What all ranks have to do there.
            timeout_s: The limit; default: that of the communicator.
            waited_s: For how long this rank has waited in the phase before.

        Raises:
            EPTimeoutError: if not all ranks come; it names those that did not.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        announce_s = min(_ANNOUNCE_S, limit_s / 4)
        if wait_all([request], announce_s):
            return
        self._announce_arrival()
        if wait_all([request], limit_s - announce_s):
            return
        # A rank that came last may not have told yet.
        end = time.monotonic() + announce_s
        while (absent := self._missing_ranks(request)) and time.monotonic() < end:
            if wait_all([request], announce_s / 10):
                return
        self.retain(request, held)
        raise self.timeout_error(absent, phase, hint, waited_s + limit_s)

    def timeout_error(self, absent: Sequence[int], phase: str, hint: str, timeout_s: float) -> EPTimeoutError:
        """The error of a wait for ranks that did not come."""
        whom = (
            f"{format_ranks(absent)}, which did not come"
            if absent
            else "all ranks; they came, and one of them gave up or ended since"
        )
        return EPTimeoutError(
            f"timeout_s={timeout_s:g}: rank {self.Get_rank()} waited that long in {phase} for {whom}; expected {hint}. See whether such a "
            f"rank ended or raised, or raise timeout_s (DEEPEP_RT_TIMEOUT_S) if it is only slow",
            rank=self.Get_rank(),
            peer=absent[0] if absent else -1,
            phase=phase,
        )
