"""The host's side of calls on the GPU: reports of kernels, notices of other ranks, and the errors they raise."""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...comm.communicator import Communicator
from ...comm.failure_notice import CallProgress, FailureNotice
from ...config import Config
from ...cuda import driver
from ...errors import EPError, EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from ...kernels import structs
from .status_page import StatusPage

_log = logging.getLogger("deepep_rt")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_GRACE_S = 5.0
"""The device reports a silent peer itself. If a started kernel reports nothing, the host gives up this much later."""

_GPU_CHECK_PERIOD_S, _WARNING_PERIOD_S = 1.0, 30.0  # while a kernel has not started


def whole_call(phase: str) -> Callable[[Callable[Concatenate[Any, _P], _R]], Callable[Concatenate[Any, _P], _R]]:
    """Decorate a method that makes a call: an exception of the program in the middle of it, such as Ctrl-C, breaks the Buffer.

    The other ranks may have this rank's part of the call. If the program repeated the call, they would match the repetition with their next
    call. Errors of this library say themselves whether the call was made.

    Args:
        phase: The phase of the error that later calls raise. The object has its Monitor in `_monitor`.
    """

    def decorate(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
        @functools.wraps(method)
        def guarded(self: Any, /, *arguments: _P.args, **named: _P.kwargs) -> _R:
            try:
                return method(self, *arguments, **named)
            except EPError:
                raise
            except BaseException as error:
                self._monitor.break_after(error, phase)
                raise

        return guarded

    return decorate


class Monitor:
    """Watches the calls of one Buffer: kernels report on the status page, and ranks that fail send a message.

    Args:
        comm: The ranks.
        config: The Buffer's sizes.
        page: Its status page.
        state: Address of the kernels' State.
        check_ended: Raises if the Buffer was destroyed. It runs while the host waits.
        progress: The call that runs.
        check_network: Raises if the network failed. It runs while the host waits.
        network_progress: Says what the network has carried, for the log after a time-out. Empty: nothing to say.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        page: StatusPage,
        state: int,
        check_ended: Callable[[], None] = lambda: None,
        progress: CallProgress | None = None,
        check_network: Callable[[], None] | None = None,
        network_progress: Callable[[], str] = lambda: "",
    ) -> None:
        self._check_ended, self._check_network, self._network_progress = check_ended, check_network, network_progress
        self._config, self._page, self._rank = config, page, comm.Get_rank()
        self.failure_notice = FailureNotice(comm, progress)
        self._abort_flag = state + structs.offset(structs.State.dtype({}), "abort")
        self._error: EPError | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the Buffer cannot make calls any more."""
        return self._error is not None

    def check(self) -> None:
        """Raise what kernels have reported."""
        self.check_peers()
        self.check_inputs()

    def check_peers(self) -> None:
        """Raise the error that broke the Buffer, in this and every later call."""
        if self._error is not None:
            raise self._error
        try:
            self._page.check_peers()
        except EPTimeoutError as timeout:
            if progress := self._network_progress():
                _log.warning("rank %d: a wait of a kernel has timed out; %s", self._rank, progress)
            self._error = self._network_error()
            if self._error is None:
                self._error = self.failure_notice.explain(timeout)
            if self._error is timeout:
                raise
            raise self._error from timeout  # kernels know only which data did not come; the network, or the peer, says why
        except EPError as error:  # the other ranks may wait for data that does not come
            self._error = error
            self.failure_notice.notify(error)
            raise

    def _network_error(self) -> EPError | None:
        """Return why the network between nodes has failed, or None."""
        try:
            if self._check_network is not None:
                self._check_network()
        except (EPUnavailableError, EPTimeoutError) as lost:
            return lost
        return None

    def check_inputs(self) -> None:
        """At the end of a call, raise what kernels found wrong in its arguments or in those of an earlier call. This call was made."""
        try:
            self._page.check_inputs()
        except (EPInputError, EPOutOfMemoryError) as error:
            error.call_made = True
            raise

    def begin_wait(self) -> None:
        """Note that the host begins to wait. A short wait does not look for messages."""
        self.failure_notice.start_listening()

    def check_failure_notices(self) -> None:
        """While the host waits, raise if another rank has failed. Kernels of this rank then stop waiting for it."""
        if self._config.on_timeout == "mask":
            return
        error: EPError | None = None
        try:
            if failed := self.failure_notice.failed_peers():
                error = self.failure_notice.error(failed[0], "a call on the GPU", node=self._config.node_of(failed[0]))
            else:
                error = self._network_error()
        except (EPUnavailableError, EPTimeoutError) as lost:  # the ranks' store has ended
            error = lost
        if error is not None:
            self._error = error
            driver.write_int32_now(self._abort_flag, 1)
            raise error

    def await_counts(self) -> tuple[int, list[int]]:
        """Wait on the host for the counts of a routing. No other call of the library waits on the host.

        Returns:
            Rows that arrive, in all and for each local expert.

        Raises:
            EPTimeoutError: if a peer is silent, or the kernel reports nothing in time.
        """
        limit = _StartedKernelLimit(self._rank, self._config.timeout_s + _GRACE_S)
        self.begin_wait()
        with self.call_half("a dispatch was interrupted while it waited for its counts", "kPhaseRoute"):
            # This loop does not check inputs: an error would leave these counts on the page, for the next call.
            while (counts := self._page.counts()) is None:
                self._check_ended()
                self.check_peers()
                self.check_failure_notices()
                os.sched_yield()  # releases Python's lock, which other threads would otherwise get once in 5 ms
                if limit.is_over(self._page.has_started()):
                    raise self._timeout_error(
                        "kPhaseRoute",
                        f"rank {self._rank}: the routing kernel has run for {limit.seconds:g} s, and reports neither counts nor a silent "
                        f"peer; expected one of them within timeout_s. The GPU is stuck, or other processes keep it busy",
                    )
        return counts

    def call_half(
        self, interrupted: str = "a low-latency call was interrupted between its halves", phase: str = "kPhaseLlRows"
    ) -> _CallHalf:
        """Enter around the launch of one half of a call. An exception inside (Ctrl-C) breaks the Buffer, and the other ranks hear of it.

        Otherwise other ranks would match the halves of later calls with this one.

        Args:
            interrupted: The message of the error that later calls raise.
            phase: Its phase.
        """
        return _CallHalf(self, interrupted, phase)

    def interrupt(self, error: BaseException, interrupted: str, phase: str) -> None:
        """Break the Buffer because an exception has ended a half of a call, and let the other ranks hear of it; see `call_half`."""
        if self._error is None:
            self._error = self._timeout_error(phase, interrupted)
            self.failure_notice.notify(error)

    def break_after(self, error: BaseException, phase: str) -> None:
        """Break the Buffer because an exception of the program has ended a call in the middle; see `whole_call`."""
        self._error = self._error or self._timeout_error(
            phase,
            f"{type(error).__name__} interrupted a call of rank {self._rank}, and the other ranks may have its part of the call; expected "
            f"the call to end. Make a new Buffer on all ranks",
        )

    def _timeout_error(self, phase: str, message: str) -> EPTimeoutError:
        return EPTimeoutError(message, rank=self._rank, peer=self._rank, phase=structs.PHASES[phase][1])


class _CallHalf:
    """See `Monitor.call_half`. A class: a generator would take longer to enter in each call."""

    __slots__ = ("_interrupted", "_monitor", "_phase")

    def __init__(self, monitor: Monitor, interrupted: str, phase: str) -> None:
        self._monitor, self._interrupted, self._phase = monitor, interrupted, phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._monitor.interrupt(error, self._interrupted, self._phase)


class _StartedKernelLimit:
    """A limit for the run time of a kernel. It counts from the kernel's start: until then the GPU may be busy with other work.

    Args:
        rank: This rank, for warnings.
        seconds: The limit.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        self.seconds, self._rank, self._begin = seconds, rank, time.monotonic()
        self._next_gpu_check, self._next_warning = self._begin + _GPU_CHECK_PERIOD_S, self._begin + _WARNING_PERIOD_S
        self._deadline: float | None = None

    def is_over(self, has_started: bool) -> bool:
        """Return whether the time is over. Call it often.

        Raises:
            EPUnavailableError: if the GPU has failed, so that the kernel will not start.
        """
        now = time.monotonic()
        if self._deadline is None and has_started:
            self._deadline = now + self.seconds
        if self._deadline is not None:
            return now > self._deadline
        if now > self._next_gpu_check:
            self._next_gpu_check = now + _GPU_CHECK_PERIOD_S
            driver.free_bytes()  # raises the error of earlier work; a capture allows this request
        if now > self._next_warning:
            self._next_warning = now + _WARNING_PERIOD_S
            warnings.warn(
                f"rank {self._rank}: the GPU has not started this dispatch after {now - self._begin:.0f} s; it is busy with earlier work, "
                f"or stuck",
                stacklevel=2,
            )
        return False
