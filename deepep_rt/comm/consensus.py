"""Steps that all ranks take together: they succeed on all ranks or on none, or begin with a meeting of all ranks.

Parts of making a Buffer and freeing symmetric memory succeed on all ranks or on none. Measurements begin with a meeting.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import numpy as np

from ..config import MAX_TIMEOUT_S
from ..errors import EPError, EPInputError, EPOutOfMemoryError, EPPeerError, EPTimeoutError, EPUnavailableError
from .communicator import MEETING_TAG, Communicator, Request
from .failure_notice import FailureNotice
from .timed_collectives import format_ranks, wait_all

_T = TypeVar("_T")

_REMINDER_S = 30.0  # time between the warnings of a rank that waits
_COMPILING_S = 900.0  # limit of a step: one rank may compile all kernels in it
_CAUSE_S = 1.0  # for the notice of a rank that failed
_STEP = "make their part of a Buffer"

COPY_CEILING = "copy_ceiling"
"""The usual measurement."""

_ALL_CALL = "all ranks to call it"


class Consensus:
    """Learn whether a step succeeded on all ranks.

    A rank that failed tells its peers, and does not wait for them. The others wait until each rank has reported.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.Dup()  # a rank that fails may report at any time
        self._round = 0
        self._last_wait = "", 0.0
        self._peer_error: EPPeerError | None = None
        self.silent_ranks: list[int] = []
        """The ranks that did not report to the last `all_ok` in time."""

    def all_ok(self, ok: bool, action: str, timeout_s: float) -> bool:
        """Report whether this rank is ok, and return whether all ranks are. After `timeout_s` a silent rank counts as lost.

        `action` is what all ranks do here, for the warning while this rank waits.
        """
        self._last_wait, self.silent_ranks, self._peer_error = (action, timeout_s), [], None
        try:  # A late rank finds the first reports of ranks that gave up, but they do not send a second one.
            return all(self._exchange(ok, action, timeout_s) for _ in range(2))
        except EPUnavailableError:  # the process that held the store has ended
            return False
        except EPPeerError as error:
            self.silent_ranks, self._peer_error = [error.peer], error
            return False

    def listen(self, notice: FailureNotice) -> None:
        """Wait no longer for a rank that has left the Buffer of this notice."""
        self._comm.heard = functools.partial(notice.heard, "a step of all ranks")

    def timeout_error(self) -> EPTimeoutError:
        """Make the error about the ranks that were silent in the last `all_ok`."""
        if self._peer_error is not None:
            return self._peer_error
        action, timeout_s = self._last_wait
        return self._comm.timeout_error(self.silent_ranks, f"the step to {action}", f"all ranks to {action}", timeout_s)

    def _exchange(self, ok: bool, action: str, timeout_s: float) -> bool:
        """Send the report of this rank and, if it is ok, receive those of its peers.

        These are messages between pairs of ranks, because a collective would need a rank that has left to forward reports.
        """
        self._round += 1
        peers = [peer for peer in range(self._comm.Get_size()) if peer != self._comm.Get_rank()]
        report, reports = np.array([ok]), np.zeros(len(peers), bool)
        tag = self._round % MEETING_TAG
        requests = [self._comm.Isend(report, peer, tag) for peer in peers]
        if not ok:
            self._comm.retain(requests, report)
            return False
        requests += [self._comm.Irecv(reports[i : i + 1], peer, tag) for i, peer in enumerate(peers)]
        start = time.monotonic()
        numbers = [self._comm.numbers[peer] for peer in peers]
        heard = functools.partial(self._heard_of_silent_rank, dict(zip(numbers, requests[len(peers) :], strict=True)))
        while not wait_all(requests, min(_REMINDER_S, start + timeout_s - time.monotonic()), heard):
            waited_s = time.monotonic() - start
            self.silent_ranks = sorted({peer for peer, request in zip(2 * peers, requests, strict=True) if not request.Test()})
            if waited_s > timeout_s:
                self._comm.retain(requests, report, reports)
                return False
            warnings.warn(  # not the log, which shows nothing by default: this may be why the program hangs
                f"rank {self._comm.numbers[self._comm.Get_rank()]} has waited {waited_s:.0f} of {timeout_s:g} s for "
                f"{format_ranks([self._comm.numbers[rank] for rank in self.silent_ranks])} "
                f"to {action}. Check that these ranks are alive and reached this call",
                stacklevel=2,
            )
        self.silent_ranks = []
        return bool(reports.all())

    def _heard_of_silent_rank(self, receives: Mapping[int, Request]) -> EPPeerError | None:
        """Return the notice of a rank that sends no report. A report comes before the notice of its rank."""
        error = self._comm.heard() if self._comm.heard is not None else None
        return error if error is not None and not receives[error.peer].Test() else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the block as a step that may fail on some ranks. A rank that fails raises its own exception.

        The others raise EPUnavailableError where another rank failed, and EPTimeoutError where another rank is silent.
        """
        ok = False
        try:
            yield
            ok = True
        finally:
            limit_s = min(max(self._comm.timeout_s, _COMPILING_S), MAX_TIMEOUT_S)
            all_ok = self.all_ok(ok, _STEP, limit_s)
        if self.silent_ranks:
            raise self.timeout_error()
        if not all_ok:
            raise EPUnavailableError(
                f"another rank failed to make its part of this Buffer; expected all ranks to succeed. {self._cause()}."
            )

    def _cause(self) -> str:
        """Return what the rank that failed says about it, in a moment."""
        end = time.monotonic() + _CAUSE_S
        while self._comm.heard is not None and time.monotonic() < end:
            if (error := self._comm.heard()) is not None:
                return f"Fix the exception of rank {error.peer}: {error.reason}"
            time.sleep(1e-3)
        return "See the exception of that rank"

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


def agreed(comm: Communicator, step: Callable[[], _T], ranks: Sequence[int] | None = None) -> _T:
    """Make a step on all ranks, and return its result.

    If it fails on one rank, every rank raises the error of the first such rank: EPOutOfMemoryError or EPUnavailableError, with one text.
    `ranks` are the numbers of the ranks in messages. Default: those of `comm`.
    """
    result, error = None, None
    try:
        result = step()
    except EPError as found:
        error = found
    told = comm.allgather(None if error is None else (isinstance(error, EPOutOfMemoryError), str(error)))
    for rank, failure in enumerate(told):
        if failure is not None:
            is_memory, text = failure
            named = f"rank {(ranks or comm.numbers)[rank]}: {text}"
            raise (EPOutOfMemoryError if is_memory else EPUnavailableError)(named) from error
    return cast("_T", result)


def begin_step(comm: Communicator, notice: FailureNotice, timeout_s: float, step: str) -> Communicator:
    """Meet for a step of all ranks that is no call. Return a communicator for it; `release` it at the end.

    `step` is the name of the method. A rank that makes a call instead hears of it, and so do the others.

    Raises:
        EPTimeoutError: if a rank does not arrive.
        EPPeerError: if a rank makes a call instead, or has left.
    """
    notice.go_elsewhere(step, f"it called {step}(), and waits for all ranks to call it")
    met = comm.meet(timeout_s, step, _ALL_CALL)
    notice.come_back()
    return met


def timed_allgather(comm: Communicator, values: Sequence[int], timeout_s: float, phase: str, hint: str) -> list[list[int]]:
    """Gather numbers of all ranks, after a meeting: see `TimedCollectives.meet` for the arguments and errors."""
    met = comm.meet(timeout_s, phase, hint)
    gathered = met.allgather(list(values))
    met.release()
    return gathered


def agree_on_measurement(
    comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING, *, has_memory: bool = True, **arguments: int
) -> Communicator:
    """Compare the arguments of a measurement on all ranks. `measurement` is its name for messages.

    Return a communicator for the steps of this measurement. `release` it at the end.

    Raises:
        EPInputError: on every rank, if the arguments differ.
        EPOutOfMemoryError: on every rank, if one rank has no memory for it.
        EPTimeoutError: if a rank does not arrive.
    """
    met = comm.meet(timeout_s, measurement, _ALL_CALL)
    gathered = met.allgather([has_memory, *arguments.values()])
    if any(values[1:] != gathered[0][1:] for values in gathered):
        listed = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in zip(arguments, values[1:], strict=True))
            for rank, values in enumerate(gathered)
        )
        raise EPInputError(f"{listed}; expected the same on all ranks. Pass the same arguments to {measurement} everywhere.")
    if without := [rank for rank, values in enumerate(gathered) if not values[0]]:
        raise EPOutOfMemoryError(
            f"{measurement} has no memory for the rows on {format_ranks(without)}; expected room on all ranks. Pass a smaller num_rows."
        )
    return met


def begin_measurement(comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING) -> None:
    """Wait until all ranks have arrived, and leave at almost the same time."""
    met = comm.meet(timeout_s, measurement, _ALL_CALL)
    met.Barrier()
    met.release()
