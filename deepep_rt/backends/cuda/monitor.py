"""The host's side of calls on the GPU: reports of kernels, notices of other ranks, and the errors they raise."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ...comm import call_signature
from ...comm.communicator import Communicator
from ...comm.failure_notice import CallProgress, FailureNotice
from ...config import Config
from ...cuda import driver
from ...errors import EPError, EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from ...kernels import structs
from ...kernels.layout import Layout
from ..inputs import old_routing
from ..overflow import OverflowLog, too_many_rows
from ..purposes import Purposes, missing_backward

_LOW_HALF = 0xFFFFFFFF
_BROKEN = "The buffer cannot be used any more"


class StatusPage:
    """A Buffer's status page: pinned host memory where kernels report time-outs, wrong arguments, and the counts of a routing.

    `purpose_of_wait` returns the purpose of the call in which a kernel waits, from a phase and an epoch.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        purposes: Purposes | None = None,
        purpose_of_wait: Callable[[int, int], str] = lambda phase, epoch: "",
    ) -> None:
        self._purposes, self._purpose_of_wait = purposes or Purposes(), purpose_of_wait
        self._layout, self._config, self._overflow = layout, layout.config, OverflowLog(rank)
        self._map = layout.status_page
        self.memory_grows = False
        """Whether a dispatch over several nodes that finds no room has asked the GPU for more."""
        self.waits_for_tiles = False
        """Whether combines of this Buffer have waited for words of tiles."""
        self.ptr = driver.allocate_pinned(self._map.num_bytes)
        ctypes.memset(self.ptr, 0, self._map.num_bytes)
        self.report = self._struct("report", structs.Report)
        self.mailbox = self._struct("mailbox", structs.Mailbox)
        masked: Any = (ctypes.c_uint32 * self._config.num_ranks).from_address(self.ptr + self._map.offsets["masked"])
        self.masked = np.frombuffer(masked, np.uint32)
        """`[num_ranks]`: 1 for the ranks that low-latency calls exclude, after the calls that this GPU has finished."""
        self.lost = ctypes.c_uint32.from_address(self.ptr + self._map.offsets["lost"])
        self.timed_out = self._flag("report", self.report, "flag")
        self.bad_input = self._flag("report", self.report, "bad_flag")
        self.ranks_differ = self._flag("report", self.report, "differs")
        self.has_events = self._flag("report", self.report, "has_events")
        self.counted = self._flag("mailbox", self.mailbox, "flag")
        self.started = self._flag("mailbox", self.mailbox, "started")

    def free(self) -> None:
        """Free the memory. Events may still call the checks; they find nothing."""
        self.lost = ctypes.c_uint32(0)
        self.timed_out = self.bad_input = self.ranks_differ = self.has_events = ctypes.c_uint32(0)
        driver.free_pinned(self.ptr)

    def clear(self) -> None:
        """Forget all reports, as in the beginning."""
        ctypes.memset(self.ptr, 0, self._map.num_bytes)

    def expect_counts(self) -> None:
        """Clear the mailbox before the launch of a routing that reports counts."""
        self.counted.value = self.started.value = 0

    def has_started(self) -> bool:
        """Whether the GPU has started that routing."""
        return bool(self.started.value)

    def counts(self) -> tuple[int, list[int]] | None:
        """Rows that arrive, in all and for each local expert; None until the routing has reported them."""
        if not self.counted.value:
            return None
        return int(self.mailbox["num_recv"][0]), self.mailbox["num_recv_per_expert"][0].tolist()

    def check_peers(self) -> None:
        """Raise what breaks the Buffer.

        Raises:
            EPTimeoutError: if a wait on the device ran out of time.
            EPInputError: if the arguments of low-latency calls differ between ranks, or a graph was replayed between the halves of a call.
        """
        if self.ranks_differ.value and self._is_low_latency():
            raise self._mismatch(_BROKEN)
        if self.timed_out.value:
            raise self._open_hook() if self.report[0]["phase"] == structs.LL_OPEN_HOOK else self._timeout()

    def check_inputs(self) -> None:
        """Raise what kernels found wrong in arguments, once. Log, once, that rows did not fit.

        Raises:
            EPInputError: if arguments differ between ranks, a token chose an expert that does not exist, or a combine got other choices
                than its dispatch.
        """
        if self.ranks_differ.value:
            self.check_peers()
            self.ranks_differ.value = 0
            raise self._mismatch("No rows were sent")
        if self.bad_input.value:
            self.bad_input.value = 0
            token, expert = int(self.report["bad_token"][0]), int(self.report["bad_expert"][0])
            raise EPInputError(
                f"topk_idx[{token}] holds expert {expert}; expected -1 or 0 to {self._config.num_experts - 1}. It was skipped"
            )
        if self.has_events.value:
            self.has_events.value = 0
            if rows := self._pop("no_room"):
                self._overflow.warn_of_rows(rows >> 32, rows & _LOW_HALF)
            if rows := self._pop("full_expert"):
                self._overflow.warn_of_expert((rows >> 32) - 1, rows & _LOW_HALF)
            if generations := self._pop("old_routing"):
                raise old_routing((generations >> 32) - 1, generations & _LOW_HALF)
            if rows := self._pop("too_many"):
                self.has_events.value = 1  # the page may hold another event, of a low-latency call
                raise too_many_rows((rows >> 32) - 1, rows & _LOW_HALF, self._config.num_max_recv_tokens, grows=self.memory_grows)
            if choice := self._pop("other_choice"):
                raise self._other_choice(choice)

    def _pop(self, name: str) -> int:
        """Read a word of the report, and clear it."""
        word = int(self.report[0][name])
        self.report[0][name] = 0
        return word

    def _other_choice(self, word: int) -> EPInputError:
        token, choice = divmod(word >> 32 & 0x7FFFFFFF, self._config.num_topk)
        now, then = (word >> 16 & 0xFFFF) - 1, (word & 0xFFFF) - 1
        given = "an expert that does not exist" if now == self._config.num_experts else now
        return EPInputError(
            f"low_latency_combine: topk_idx[{token}, {choice}]={given}; expected {then}, as low_latency_dispatch got it, or -1 for all of "
            f"the token's experts on that rank. The sum counts what the dispatch got. Pass the same topk_idx to both calls"
        )

    def _is_low_latency(self) -> bool:
        return call_signature.is_low_latency(call_signature.unpack(int(self.report[0]["call_signature"][0])))

    def _mismatch(self, consequence: str) -> EPInputError:
        report = self.report[0]
        ranks = (int(report["rank"]), int(report["other"]))
        signatures = {
            rank: (*call_signature.unpack(int(number)), serial)
            for rank, number, serial in zip(ranks, report["call_signature"], report["serial"], strict=True)
        }
        newest = self._purposes.newest and f"{self._purposes.newest}, or of a later call"  # the host may be some calls ahead
        text = call_signature.describe_mismatch(dict(sorted(signatures.items())))
        return EPInputError(f"{text}{missing_backward(ranks[1], newest)}{consequence}")

    def _open_hook(self) -> EPInputError:
        return EPInputError(
            f"a CUDA graph with a whole low-latency call was replayed while a hook of such a call was open; expected no open hook, because "
            f"the hook would receive the rows of the replay. Call hooks before a replay. {_BROKEN}"
        )

    def _timeout(self) -> EPTimeoutError:
        report = self.report[0]
        rank, peer, number = int(report["rank"]), int(report["peer"]), int(report["phase"])
        rows, outputs = (structs.PHASES[name][0] for name in ("kPhaseCombineRows", "kPhaseExpertOutputs"))
        if self.waits_for_tiles and number in (rows, outputs):
            number = outputs if rank == peer else rows  # own sums wait for words, and a wait for words ends if a rank is lost
        expected, seen, phase = int(report["expected"]), int(report["seen"]), structs.phase_name(number)
        call_idx = expected
        if number in structs.ROOM_PHASES:  # the kernel waits for the call that used the same ring slot before
            call_idx += self._config.low_latency_ring_depth
        node = self._config.node_of(peer)
        where = "" if node is None else f" on node {node}"
        if number == outputs:
            awaited = f"{phase}; expected a product that writes all tiles and sets their words. Check that it runs"
        else:
            awaited = (
                f"{phase}, call {call_idx} of its kind (rank {peer} was at {seen}); expected rank {peer} to be alive and to make the same "
                f"calls{missing_backward(peer, self._purpose_of_wait(number, expected))}Check that it does"
            )
        return EPTimeoutError(
            f"rank {rank} waited {self._config.timeout_s:g} s for rank {peer}{where}: {awaited}, or raise timeout_s (DEEPEP_RT_TIMEOUT_S) "
            f"if it is only slow. {_BROKEN}",
            rank=rank,
            peer=peer,
            phase=phase,
            expected=expected,
            seen=seen,
            call_idx=call_idx,
            node=node,
        )

    def _struct(self, region: str, struct: structs.CStruct) -> Any:
        dtype = struct.dtype(self._layout.constants)
        memory: Any = (ctypes.c_char * dtype.itemsize).from_address(self.ptr + self._map.offsets[region])
        return np.frombuffer(memory, dtype)

    def _flag(self, region: str, struct: Any, member: str) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.ptr + self._map.offsets[region] + structs.offset(struct.dtype, member))


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

    Later calls raise an error with `phase`. The object has its Monitor in `_monitor`.
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

    `state` is the address of the kernels' State. While the host waits, `check_ended` raises if the Buffer was destroyed, and
    `check_network` if the network failed. After a time-out, the log gets what the network has carried from `network_progress`. Empty:
    nothing to say.
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
        self._config, self._page, self._rank = config, page, comm.numbers[comm.Get_rank()]
        self.failure_notice = FailureNotice(comm, progress)
        self._abort_flag = state + structs.offset(structs.State.dtype({}), "abort")
        self._error: EPError | None = None

    def begin_generation(self, notice: FailureNotice) -> None:
        """Begin anew, with other members. `notice` is theirs."""
        self.failure_notice.close()
        self.failure_notice, self._error = notice, None

    def lost_ranks(self, masked: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that this one knows to be lost: their processes have ended, or a wait for them has timed out."""
        with suppress(EPError):
            self.check_peers()
        return self.failure_notice.lost_with(self._error, masked)

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
        """At the end of a call, raise what kernels found wrong in its arguments or in those of an earlier call. This call was made.

        After a time-out, kernels find the handle of a dispatch that has not ended. Then the time-out counts.
        """
        try:
            self._page.check_inputs()
        except (EPInputError, EPOutOfMemoryError) as error:
            self.check_peers()
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
        except EPUnavailableError as lost:  # the ranks' store has ended; with slots, only changes of the members need it
            error = None if self._config.has_slots else lost
        except EPTimeoutError as lost:
            error = lost
        if error is not None:
            self._error = error
            self.abort_waits()
            raise error

    def abort_waits(self) -> None:
        """Let kernels of this rank stop waiting for other ranks, in all calls from now on."""
        driver.write_int32_now(self._abort_flag, 1)

    def await_counts(self) -> tuple[int, list[int]]:
        """Wait on the host for the counts of a routing: rows that arrive, in all and for each local expert. No other call of the library
        waits on the host.

        Raise EPTimeoutError if a peer is silent, or the kernel reports nothing in time.
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

        Otherwise other ranks would match the halves of later calls with this one. Later calls raise an error with the message
        `interrupted` and with `phase`.
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
    """A limit for the run time of a kernel. It counts from the kernel's start: until then the GPU may be busy with other work."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.seconds, self._rank, self._begin = seconds, rank, time.monotonic()
        self._next_gpu_check, self._next_warning = self._begin + _GPU_CHECK_PERIOD_S, self._begin + _WARNING_PERIOD_S
        self._deadline: float | None = None

    def is_over(self, has_started: bool) -> bool:
        """Return whether the time is over. Call it often. Raise EPUnavailableError if the GPU has failed, so that the kernel will not
        start.
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
