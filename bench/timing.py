"""Clocks, and the one way in which this benchmark measures a call."""

import statistics
import time

import numpy as np
from mpi4py import MPI

BOUNDARY = {
    "cuda": "CUDA events around a loop of calls after an MPI barrier, mean of a loop; slowest rank of each repeat; median of the repeats",
    "host": "wall clock around a loop of calls after an MPI barrier, mean of a loop; slowest rank of each repeat; median of the repeats",
}


class CudaClock:
    """Time on the GPU, from the current stream's point of view."""

    def __init__(self):
        import cupy

        self._cuda = cupy.cuda

    def loop(self, call, num_calls):
        start, end = self._cuda.Event(), self._cuda.Event()
        start.record()
        for i in range(num_calls):
            call(i)
        end.record()
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / 1e3 / num_calls


class WallClock:
    """Time on the host, where a call returns when it is done."""

    def loop(self, call, num_calls):
        start = time.perf_counter()
        for i in range(num_calls):
            call(i)
        return (time.perf_counter() - start) / num_calls


def own_stream():
    """A stream to work on: `with` it, it is CuPy's current one."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def host_seconds(call, *arguments):
    """Seconds of the host in one call."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(buffer, comm, clock, call, args):
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


def measure_host(buffer, comm, call, args):
    """Seconds that the host spends in one call, which it does not wait for: median of the calls, slowest rank."""
    comm.Barrier()
    spent = []
    for i in range(args.calls):
        spent.append(host_seconds(call, i))
    buffer.synchronize()
    return comm.allreduce(statistics.median(spent), MPI.MAX)
