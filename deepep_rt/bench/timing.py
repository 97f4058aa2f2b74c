"""Measure a call with the clock of the GPU or of the host."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from ..buffer import Buffer

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BOUNDARY = {
    "cuda": "CUDA events around a loop of calls behind another one, queued in advance unless the host waits in them, mean of a loop; "
    "slowest rank of each repeat; median of the repeats",
    "host": "wall clock around a loop of calls after an MPI barrier, mean of a loop; slowest rank of each repeat; median of the repeats",
}


class Repeats(Protocol):
    """The numbers of calls, loops and calls before the first loop."""

    calls: int
    repeats: int
    warmup: int


class CudaClock:
    """Time on the GPU, between events of the current stream."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def loop(self, call: Callable[[int], Any], num_calls: int, starts_with: Intracomm | None = None) -> float:
        """Make calls in a loop. Return the mean seconds of one. `call` receives its number.

        One more call comes before the loop. It brings the ranks together, and keeps the GPU busy until the host has launched the first call
        of the loop. Otherwise the time would include what the host does before that launch.

        `starts_with` are ranks whose GPUs begin together, once every host has queued its loop. The hosts then take no part in the time, and
        `call` must not wait for the GPU.
        """
        start, end = self._cuda.Event(), self._cuda.Event()
        with queued(self._cuda.get_current_stream().ptr) if starts_with else contextlib.nullcontext():
            call(num_calls)
            start.record()
            for i in range(num_calls):
                call(i)
            end.record()
            if starts_with:
                starts_with.Barrier()
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / 1e3 / num_calls


class WallClock:
    """Time on the host, for calls that return when they are complete."""

    def loop(self, call: Callable[[int], Any], num_calls: int, starts_with: Intracomm | None = None) -> float:
        """Measure as in `CudaClock`. Calls are complete when they return, so nothing is queued, and no call comes before the loop."""
        start = time.perf_counter()
        for i in range(num_calls):
            call(i)
        return (time.perf_counter() - start) / num_calls


def clock(on_gpu: bool) -> CudaClock | WallClock:
    """Return the clock of a backend."""
    return CudaClock() if on_gpu else WallClock()


def bench_stream(on_gpu: bool) -> Any:
    """Make a context manager for the measurements: a stream that graphs can be captured on, unlike the default one."""
    if not on_gpu:
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@contextlib.contextmanager
def queued(stream: int) -> Iterator[None]:
    """Hold a stream until the block ends, so that the times between its events do not include the host's launches."""
    from ..cuda import driver

    address = driver.allocate_pinned(4)
    is_open = ctypes.c_uint32.from_address(address)
    is_open.value = 0
    try:
        driver.wait_value(stream, address, 1)
        yield
    finally:
        is_open.value = 1
        driver.synchronize(stream)
        driver.free_pinned(address)


def host_seconds(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds of the host in one call."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(
    buffer: Buffer,
    comm: Intracomm,
    clock: CudaClock | WallClock,
    call: Callable[[int], Any],
    settings: Repeats,
    *,
    in_advance: bool,
) -> float:
    """Return the seconds of one call on the slowest rank. `call` receives its number, which selects its inputs.

    `in_advance` is for calls in which the host does not wait (`CudaClock.loop`).
    """
    for i in range(settings.warmup):
        call(i)
    buffer.synchronize()
    mine = np.zeros(settings.repeats)
    for repeat in range(settings.repeats):
        comm.Barrier()
        mine[repeat] = clock.loop(call, settings.calls, comm if in_advance else None)
        buffer.synchronize()
    slowest = np.empty_like(mine)
    comm.Allreduce(mine, slowest, MPI.MAX)
    return float(np.median(slowest))


def measure_host(buffer: Buffer, comm: Intracomm, call: Callable[[int], Any], settings: Repeats) -> float:
    """Return the seconds that the host spends in a call without waiting for its end: median of the calls, slowest rank."""
    comm.Barrier()
    spent = []
    for i in range(settings.calls):
        spent.append(host_seconds(call, i))
    buffer.synchronize()
    return comm.allreduce(statistics.median(spent), MPI.MAX)
