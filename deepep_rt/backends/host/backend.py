"""The host backend: dispatch and combine in NumPy and MPI, for machines without a GPU and as the reference of the GPU tests.

A call has two rounds of messages, and each rank sends one message to each peer in a round. First the ranks exchange headers (`headers`):
the kind of call, its types, the numbers of rows, and problems with the input. So all ranks raise, or all ranks go on, before a row moves.
Then the rows travel straight into the results (`throughput`, `low_latency`). Every wait has a limit (`messages`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays.host_memory import fp8_rows
from ...arrays.view import HOST, Framework, View
from ...comm.communicator import Communicator
from ...comm.consensus import COPY_CEILING, agree_on_measurement, begin_step
from ...comm.failure_notice import FailureNotice
from ...config import Config
from ...description import BufferDescription
from ...errors import EPError, EPOutOfMemoryError, EPUnavailableError
from ...results import CombineResult, DispatchResult, Event, LowLatencyCombineResult, LowLatencyDispatchResult, generations
from ...statistics import Counters
from ...tuned import TuningResult
from ..agreement import announce
from ..base import (
    BufferInfo,
    Call,
    CombineInputs,
    DispatchInputs,
    LowLatencyCombineInputs,
    LowLatencyDispatchInputs,
    LowLatencyPreparation,
    ThroughputPreparation,
)
from ..call_lock import CallLock
from ..hooks import Hooks, OrdinaryLowLatency, OrdinaryThroughput, check_can_sleep
from ..overflow import OverflowLog
from ..purposes import Purposes
from .expert_rows import ExpertRows
from .handle_tables import HostHandleTables
from .headers import CallAgreement
from .low_latency import LowLatency
from .messages import MessageChannel
from .statistics import HostStatistics
from .throughput import Throughput

_MAX_MEASURED_BYTES = 1 << 26  # that a rank sends in one step of a measurement


class HostBackend:
    """Exchange tokens by messages between processes, in host memory.

    The backend duplicates `comm`, so its messages stay apart from the caller's.
    """

    name, shared_name = "host", ""

    def __init__(self, comm: Communicator, config: Config, serial: int, description: BufferDescription) -> None:
        self.description = description
        self._comm: Communicator | None = comm.Dup()
        self._comm.timeout_s = config.timeout_s
        self._config = config
        self.info = BufferInfo(serial, config, HOST)
        self.tables = HostHandleTables(self.info)
        self.context = contextlib.nullcontext()  # there is no device to make current
        self.call_lock = CallLock(self.context)
        self.num_sms = config.num_sms  # has no effect here; GPUs use it
        self._statistics = HostStatistics(config) if config.statistics else None
        self.purposes = Purposes()
        watched = self.call_lock.check, self._statistics, self.call_lock.progress, self.purposes
        self._channel = MessageChannel(self._comm, config, *watched)
        self.call_lock.notice = notice = self._channel.failure_notice
        self._comm.heard = functools.partial(notice.heard, "a step of all ranks")
        self._hooks = Hooks(config.num_slots, self.call_lock)
        overflow = OverflowLog(self._channel.rank)
        self._throughput = Throughput(self.info, self._channel, CallAgreement(config, self._channel), overflow)
        self._expert_rows = ExpertRows(config, self._throughput, overflow)
        self._low_latency = LowLatency(self.info, self._throughput, overflow, self._hooks, self.tables)
        announce(self._comm, "host backend", comm.transport_name, 0)

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Start a call. There are no streams here, and all earlier work has finished."""
        self._channel.check()
        return Call(0, None, async_finish, previous_event)

    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """Send rows to the ranks of their experts; see `Buffer.dispatch`."""
        with self._call("dispatch"):
            if inputs.use_fp8:
                x, scales = fp8_rows(inputs.x, inputs.round_scale, inputs.use_ue8m0)
                inputs = replace(inputs, x=x, scales=scales)
            handle, views = (self._expert_rows if inputs.layout == "expert" else self._throughput).dispatch(inputs)
        return DispatchResult(handle=handle, event=Event(), make_views=lambda: views)

    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """Add up rows at the ranks of their tokens; see `Buffer.combine`."""
        with self._call("combine"):
            views = (self._expert_rows if inputs.handle.layout == "expert" else self._throughput).combine(inputs)
        return CombineResult(event=Event(), make_views=lambda: views)

    def prepare_throughput(self, preparation: ThroughputPreparation) -> OrdinaryThroughput:
        """Prepare calls; see `Buffer.prepare_throughput`. They take as long as ordinary ones."""
        return OrdinaryThroughput(self, preparation)

    def low_latency_dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """Send tokens to their experts; see `Buffer.low_latency_dispatch`."""
        with self._call("low_latency_dispatch"):
            return self._low_latency.dispatch(inputs, with_hook)

    def low_latency_combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """Send the experts' rows back to the ranks of their tokens; see `Buffer.low_latency_combine`."""
        with self._call("low_latency_combine"):
            return self._low_latency.combine(inputs, with_hook)

    def call_form(self, inputs: Any, call: Call) -> None:
        """Return None: all calls are ordinary ones."""

    def prepare_low_latency(self, preparation: LowLatencyPreparation) -> OrdinaryLowLatency:
        """Prepare calls; see `Buffer.prepare_low_latency`. They take as long as ordinary ones."""
        return OrdinaryLowLatency(self, preparation, self._hooks)

    def low_latency_combine_view(self, framework: Framework, capacity: int) -> View:
        """The memory of `Buffer.get_low_latency_combine_buffer`, as a View of this framework."""
        return self._low_latency.combine_view(framework, capacity)

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from low-latency calls, or include it again."""
        self._hooks.check_none_open("masking or unmasking a rank")
        if masked:
            self._channel.mask(rank)
        else:
            self._channel.unmask(rank)

    def masked_ranks(self) -> list[int]:
        """The ranks that low-latency calls exclude, ascending."""
        return self._channel.masked

    def sleep(self, keeps_results: bool) -> None:
        """Meet the other ranks; see `Buffer.sleep`. There is no memory of a GPU to give back, and results stay."""
        check_can_sleep(self._hooks, self._channel.masked)
        self._meet("sleep")

    def wake(self) -> None:
        """Meet the other ranks; see `Buffer.wake`."""
        self._meet("wake")

    def lose(self, rank: int, reason: str) -> None:
        """Note that the process of a rank has ended. Waits for it end."""
        self._channel.failure_notice.lose(rank, reason)

    def lost_ranks(self) -> tuple[int, ...]:
        """Return the ranks that this one knows to be lost, ascending."""
        return self._channel.lost_ranks

    def leave_members(self) -> None:
        """Forget open calls. There is no memory of a GPU to give back."""
        self._hooks.drop_all()

    def change_members(self, comm: Communicator, notice: FailureNotice, generation: int, aborts: bool) -> None:
        """Begin a generation with other members; see `Buffer.shrink`."""
        self._hooks.drop_all()
        comm.Barrier()
        self._channel.begin_generation(comm, notice)
        self._throughput.agreement.begin_generation()
        self._comm, self.call_lock.notice = comm, notice
        comm.heard = functools.partial(notice.heard, "a step of all ranks")
        generations[0] += 1
        self.info.since = generations[0]

    def trim(self) -> int:
        """There is no memory of a GPU to give back; see `Buffer.trim`."""
        self._channel.check()
        return 0

    def drop(self) -> bool:
        """Return True: host memory comes free with its last reference."""
        return True

    def _meet(self, step: str) -> None:
        assert self._comm is not None
        self._channel.check()
        begin_step(self._comm, self._channel.failure_notice, self._config.timeout_s, step).release()

    def check(self) -> None:
        """Raise what a call would raise; see `Buffer.check`."""
        self._channel.check()

    def synchronize(self) -> None:
        """Raise what a call would raise: all work has finished."""
        self._channel.check()

    def counters(self, during_capture: bool = False) -> Counters:
        """Return what `Buffer.statistics` tells."""
        assert self._statistics is not None
        return self._statistics.counters()

    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """Measure the bytes a second that messages carry from this rank to the others; see `Buffer.copy_ceilings`."""
        assert self._comm is not None
        num_ranks, arguments = self._config.num_ranks, dict(row_bytes=row_bytes, num_rows=num_rows, iterations=iterations)
        num_rows = max(1, min(num_rows, _MAX_MEASURED_BYTES // (num_ranks * row_bytes)))
        outgoing = incoming = None
        with contextlib.suppress(MemoryError):
            outgoing, incoming = (np.ones((num_ranks, num_rows * row_bytes), np.uint8) for _ in range(2))
        met = agree_on_measurement(self._comm, self._config.timeout_s, COPY_CEILING, has_memory=incoming is not None, **arguments)
        assert outgoing is not None
        assert incoming is not None
        met.Alltoall(outgoing, incoming)
        start = time.perf_counter()
        for _ in range(iterations):
            met.Alltoall(outgoing, incoming)
        slowest_s = max(met.allgather((time.perf_counter() - start) / iterations))
        met.release()
        return {"messages": num_rows * max(num_ranks - 1, 1) * row_bytes / slowest_s}

    def autotune(self, num_tokens: int, dtype: str, limit_s: float, saves: bool) -> TuningResult:
        """Refuse: messages of processes have nothing to tune."""
        raise EPUnavailableError(
            "autotune on backend='host'; expected GPUs, whose kernels have settings to tune. Call it only where buffer.backend is 'cuda'"
        )

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy host memory at once."""
        ctypes.memmove(out.ptr, source, out.nbytes)

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        """Free the communicator. With an error, tell the other ranks why this rank leaves."""
        comm, self._comm = self._comm, None
        if comm is not None and error is not None:
            self._channel.failure_notice.notify(error)
        self._channel.close()
        # Freeing is collective, and lost peers would not take part.
        if comm is not None and in_touch and not self._channel.is_broken and not self._channel.masked:
            comm.Free()
        elif comm is not None:
            comm.abandon()

    @contextlib.contextmanager
    def _call(self, kind: str) -> Iterator[None]:
        """Count a call. If host memory does not suffice for it, tell the other ranks, so that they stop waiting."""
        try:
            with contextlib.nullcontext() if self._statistics is None else self._statistics.call(kind):
                yield
        except EPError:
            raise
        except MemoryError as error:
            failure = EPOutOfMemoryError(
                f"rank {self._channel.rank}: host memory does not suffice for this call ({error}); expected room for its results. Make a "
                f"new Buffer, and give the call fewer tokens."
            )
            self._channel.abort_call(failure)
            raise failure from error
