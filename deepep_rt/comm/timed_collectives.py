"""Wait for collectives with a time limit, and name the ranks that did not arrive."""

from __future__ import annotations

import functools
import math
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import EPPeerError, EPTimeoutError
from .communicator import CollectiveRequest, Request
from .meeting import Meeting

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_LISTED_RANKS = 8
_SPIN_S = 2e-3  # shorter waits poll without a pause
_MAX_PAUSE_S = 2e-3
_DUPLICATION_S = 0.5  # a rank that leaves waits for its duplicate: without it, it can tell the other ranks nothing


def host_identity() -> str:
    """Return a text that all processes of a host share, and no others.

    Host names alone do not suffice, because two hosts may have the same. The second part is new with each start of the system.
    """
    return f"{platform.node()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"


def wait_all(
    requests: Sequence[Request | CollectiveRequest], timeout_s: float, heard: Callable[[], EPPeerError | None] | None = None
) -> bool:
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

    # Each communicator has these methods.
    Get_rank: Callable[[], int]
    Get_size: Callable[[], int]
    allgather: Callable[[Any], list[Any]]
    begin_private_comm: Callable[[], tuple[Any, CollectiveRequest]]

    def ranks_on_host(self) -> list[int]:
        """Return the ranks on this host, ascending. Collective.

        The hosts tell it, not MPI: for `COMM_TYPE_SHARED`, Open MPI 4.1.6 puts each rank of the second host on a host of its own.
        """
        hosts = self.allgather(host_identity())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.Get_rank()]]

    @functools.cached_property
    def numbers(self) -> Sequence[int]:
        """The number of each rank in its Buffer, for messages and notices. It differs from the rank in a Buffer with slots."""
        return range(self.Get_size())

    def can_send(self) -> bool:
        """Return whether this thread may send messages now."""
        return True

    def meet(self, timeout_s: float, phase: str, hint: str) -> Any:
        """Wait until all ranks are here, and return a communicator for their next steps. Collective.

        No earlier step has used that communicator. So the ranks understand each other although some of them gave up an earlier step, or an
        exception took them out of it.

        Args:
            timeout_s: The limit, also for each step with the new communicator.
            phase: What the meeting is a part of, for the message.
            hint: What all ranks have to do there, for the message.

        Raises:
            EPTimeoutError: if a rank does not arrive; it names those ranks.
            EPPeerError: if an exception takes a rank out of the meeting.
            EPUnavailableError: if MPI has no room for another communicator.
        """
        private, request = self.begin_private_comm()
        outer, meeting = self.heard, private.meeting
        try:
            self.finish(request, phase, hint, timeout_s)
            meeting.begin()
            private.heard = lambda: (outer and outer()) or meeting.error(phase)
            private.finish(meeting, phase, hint, timeout_s)
            number = meeting.end()
        except (EPPeerError, EPTimeoutError):  # the other ranks know that peer, or wait as long
            meeting.close()
            raise
        except BaseException as error:
            if wait_all([request], _DUPLICATION_S):
                meeting.leave_after(error)
            raise
        finally:
            private.heard = outer if private is self else None
        made = private.open_channel(number)
        made.timeout_s, made.heard = timeout_s, lambda: (outer and outer()) or private.meeting.error(phase, number)
        return made

    @functools.cached_property
    def meeting(self) -> Meeting:
        """The meetings over this communicator."""
        return Meeting(weakref.proxy(self))  # no cycle: the owner of a store must end with it

    def finish(
        self, request: CollectiveRequest, phase: str, hint: str, timeout_s: float | None = None, waited_s: float = 0.0
    ) -> None:
        """Wait for a collective. `phase` and `hint` are as for `meet`. `waited_s` is how long this rank has waited in the phase before.

        Raises:
            EPTimeoutError: if a rank does not arrive; it names those ranks.
            EPPeerError: if `heard` returns it.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if not wait_all([request], limit_s, self.heard):
            raise self.timeout_error(request.missing_ranks(), phase, hint, waited_s + limit_s)

    def _finish_step(self, request: CollectiveRequest, phase: str) -> None:
        self.finish(request, phase, "all ranks to call it")

    def timeout_error(self, missing: Sequence[int], phase: str, hint: str, timeout_s: float) -> EPTimeoutError:
        """Make the error about ranks that did not arrive."""
        missing, mine = [self.numbers[rank] for rank in missing], self.numbers[self.Get_rank()]
        peers = f"{format_ranks(missing)}, which did not arrive" if missing else "all ranks. One arrived, but gave up or ended"
        return EPTimeoutError(
            f"timeout_s={timeout_s:g}; expected {hint}. Rank {mine} waited in {phase} for {peers}. "
            f"Check whether a rank ended or raised an exception. If it is only slow, raise timeout_s (DEEPEP_RT_TIMEOUT_S).",
            rank=mine,
            peer=missing[0] if missing else -1,
            phase=phase,
        )
