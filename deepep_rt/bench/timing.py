"""Clocks, and the one way in which the benchmarks measure a call."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..buffer import Buffer

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BOUNDARY = {
    "cuda": "CUDA events around a loop of calls after an MPI barrier, mean of a loop; slowest rank of each repeat; median of the repeats",
    "host": "wall clock around a loop of calls after an MPI barrier, mean of a loop; slowest rank of each repeat; median of the repeats",
}


class CudaClock:
    """Time on the GPU, from the current stream's point of view."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def loop(self, call: Callable[[int], Any], num_calls: int) -> float:
        """Seconds of one call, mean over a loop; `call` gets its number."""
        start, end = self._cuda.Event(), self._cuda.Event()
        start.record()
        for i in range(num_calls):
            call(i)
        end.record()
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / 1e3 / num_calls


class WallClock:
    """Time on the host, where a call returns when it is done."""

    def loop(self, call: Callable[[int], Any], num_calls: int) -> float:
        """As in `CudaClock`."""
        start = time.perf_counter()
        for i in range(num_calls):
            call(i)
        return (time.perf_counter() - start) / num_calls


def clock(on_gpu: bool) -> CudaClock | WallClock:
    """The clock of a backend."""
    return CudaClock() if on_gpu else WallClock()


def own_stream() -> Any:
    """A stream to work on: `with` it, it is CuPy's current one."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@contextlib.contextmanager
def queued(stream: int) -> Iterator[None]:
    """What the block queues on a stream starts when the block ends: the host's launches take no part of the times between its events."""
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
    """Seconds of the host in one call."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(
    buffer: Buffer, comm: Intracomm, clock: CudaClock | WallClock, call: Callable[[int], Any], args: argparse.Namespace
) -> float:
    """Seconds of one call on the slowest rank; `call` gets the number of the call, to choose among its inputs."""
    for i in range(args.warmup):
        call(i)
    buffer.synchronize()
    mine = np.zeros(args.repeats)
    for repeat in range(args.repeats):
        comm.Barrier()
        mine[repeat] = clock.loop(call, args.calls)
        buffer.synchronize()
    slowest = np.empty_like(mine)
    comm.Allreduce(mine, slowest, MPI.MAX)
    return float(np.median(slowest))


def measure_host(buffer: Buffer, comm: Intracomm, call: Callable[[int], Any], args: argparse.Namespace) -> float:
    """Seconds that the host spends in one call, which it does not wait for: median of the calls, slowest rank."""
    comm.Barrier()
    spent = []
    for i in range(args.calls):
        spent.append(host_seconds(call, i))
    buffer.synchronize()
    return comm.allreduce(statistics.median(spent), MPI.MAX)
