"""While calls run on the GPU: what the host hears of them, waits for, and raises."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...comm.communicator import Communicator
from ...comm.failure_notice import FailureNotice
from ...config import Config
from ...cuda import driver
from ...errors import EPError, EPInputError, EPTimeoutError, EPUnavailableError
from ...kernels import structs
from .status_page import StatusPage

_GRACE_S = 5.0
"""The device reports a silent peer itself. The host gives up this much later: only where a kernel that has started reports nothing."""

_LOOK_S, _REMINDER_S = 1.0, 30.0  # how often a host whose kernel has not started looks for an error of the GPU, and warns


class Monitor:
    """Hears of the calls of one Buffer, from kernels by its page and from ranks that leave by a message.

    Args:
        comm: The ranks.
        config: The Buffer's sizes.
        page: Where kernels leave word.
        state: Address of the kernels' State.
        check_ended: Raises if the Buffer was destroyed; asked while the host waits.
    """

    def __init__(
        self, comm: Communicator, config: Config, page: StatusPage, state: int, check_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._check_ended = check_ended
        self._config, self._page, self._rank = config, page, comm.Get_rank()
        self._failure_notice = FailureNotice(comm)
        self._abort_at = state + structs.offset(structs.State.dtype({}), "abort")
        self._broken: EPError | None = None

    @property
    def is_broken(self) -> bool:
        """Whether no call can be made any more."""
        return self._broken is not None

    def check(self) -> None:
        """Raise what kernels have reported."""
        self.check_peers()
        self.check_inputs()

    def check_peers(self) -> None:
        """Raise what breaks the Buffer: time-outs, now and ever after."""
        if self._broken is not None:
            raise self._broken
        try:
            self._page.check_peers()
        except EPError as error:
            self._broken = error
            raise

    def check_inputs(self) -> None:
        """At the end of a call: raise what kernels found wrong in this one or an earlier one. The other ranks have made this call too."""
        try:
            self._page.check_inputs()
        except EPInputError as error:
            error.call_made = True
            raise

    def begin_wait(self) -> None:
        """The host begins to wait."""
        self._failure_notice.start_listening()

    def check_failure_notices(self) -> None:
        """While the host waits: raise if a rank has left, and end what waits for it on the GPU."""
        if self._config.on_timeout == "mask":
            return
        try:
            gone = self._failure_notice.failed_peers()
            error: EPError | None = self._failure_notice.error(gone[0], "a call on the GPU") if gone else None
        except EPUnavailableError as lost:  # with the process that held the ranks' store
            error = lost
        if error is not None:
            self._broken = error
            driver.write_int32_now(self._abort_at, 1)
            raise error

    def await_counts(self) -> tuple[int, list[int]]:
        """Wait on the host until the routing is known: the one synchronisation of the library."""
        counts, limit = None, _Limit(self._rank, self._config.timeout_s + _GRACE_S)
        self.begin_wait()
        try:
            # Bad input is no reason to stop: the next call must not take these counts for its own.
            while (counts := self._page.counts()) is None:
                self._check_ended()
                self.check_peers()
                self.check_failure_notices()
                os.sched_yield()  # with Python's lock: other threads would get it once in 5 ms
                if limit.is_over(self._page.has_started()):
                    raise self._timeout(
                        "kPhaseRoute",
                        f"rank {self._rank}: the routing kernel has run for {limit.seconds:g} s, and reports neither counts nor a silent "
                        f"peer; expected one of them within timeout_s. The GPU is stuck, or other processes keep it busy",
                    )
        finally:
            if counts is None and self._broken is None:
                self._broken = self._timeout("kPhaseRoute", "a dispatch was interrupted while it waited for its counts")
        return counts

    @contextmanager
    def call_half(self) -> Iterator[None]:
        """Around the launch of one half of a call: if something throws the host out of it (Ctrl-C), later halves would be taken for it."""
        try:
            yield
        except BaseException:
            self._broken = self._broken or self._timeout("kPhaseLlRows", "a low-latency call was interrupted between its halves")
            raise

    def notify(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves."""
        self._failure_notice.notify(error)

    def _timeout(self, phase: str, what: str) -> EPTimeoutError:
        return EPTimeoutError(what, rank=self._rank, peer=self._rank, phase=structs.PHASES[phase][1])


class _Limit:
    """How long the host waits for a kernel: so many seconds from when it starts. Until then the GPU has other work, of any length.

    Args:
        rank: This rank, for warnings.
        seconds: The limit.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        self.seconds, self._rank, self._begin = seconds, rank, time.monotonic()
        self._look_at, self._remind_at = self._begin + _LOOK_S, self._begin + _REMINDER_S
        self._deadline: float | None = None

    def is_over(self, has_started: bool) -> bool:
        """Whether it is; to be asked often.

        Raises:
            EPUnavailableError: if the GPU has failed, and the kernel will not start.
        """
        now = time.monotonic()
        if self._deadline is None and has_started:
            self._deadline = now + self.seconds
        if self._deadline is not None:
            return now > self._deadline
        if now > self._look_at:
            self._look_at = now + _LOOK_S
            driver.free_bytes()  # the driver gives back the error of earlier work, and no capture forbids to ask
        if now > self._remind_at:
            self._remind_at = now + _REMINDER_S
            warnings.warn(
                f"rank {self._rank}: the GPU has not come to this dispatch after {now - self._begin:.0f} s; it is busy with work that was "
                f"queued before, or stuck",
                stacklevel=2,
            )
        return False
