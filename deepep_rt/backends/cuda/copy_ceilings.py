"""Measure the bandwidth between the GPUs of a node in several ways: rows that a kernel pushes, and copies of the driver."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...comm.consensus import agree_on_measurement, begin_measurement
from ...cuda import driver
from .runtime import CudaRuntime

_NUM_MEASUREMENTS = 3


def copy_ceilings(runtime: CudaRuntime, num_sms: int, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
    """Return the bytes a second that each rank sends while all ranks send to all others, by method; see `Buffer.copy_ceilings`.

    Args:
        runtime: The Buffer's memory and kernels.
        num_sms: SMs of the first method.
        row_bytes: Bytes of a row.
        num_rows: Rows for each peer, if the memory has room for them.
        iterations: Pushes in one timing.
    """
    timeout_s, num_ranks = runtime.config.timeout_s, runtime.config.num_ranks
    met = agree_on_measurement(runtime.comm, timeout_s, row_bytes=row_bytes, num_rows=num_rows, iterations=iterations)
    capacity = min(runtime.regions.sizes["landing"], runtime.regions.sizes["pool"]) // (num_ranks * row_bytes)
    num_rows = max(1, min(num_rows, capacity))

    def rate(push: Callable[[int], None]) -> float:
        """Time `push`, which queues its work on a stream."""
        times_ms = [_one_time_ms(runtime, push, iterations) for _ in range(_NUM_MEASUREMENTS)]
        slowest_ms = max(met.allgather(statistics.median(times_ms)))
        return num_rows * max(num_ranks - 1, 1) * row_bytes / slowest_ms * 1e3

    every_sm = driver.num_sms(runtime.device)
    with _driver_copies(runtime, num_rows * row_bytes, iterations) as push_by_driver:
        rates = {
            "kernel": rate(_kernel(runtime, num_sms, row_bytes, num_rows, iterations)),
            "kernel on all SMs": rate(_kernel(runtime, every_sm, row_bytes, num_rows, iterations)),
            "copy engines": rate(push_by_driver),
        }
    met.release()
    return rates


def _one_time_ms(runtime: CudaRuntime, push: Callable[[int], None], iterations: int) -> float:
    stream = runtime.order.own_stream
    runtime.synchronize()
    begin_measurement(runtime.comm, runtime.config.timeout_s)
    begin = driver.CudaEvent(stream, timing=True)
    push(stream)
    return driver.elapsed_ms(begin, driver.CudaEvent(stream, timing=True)) / iterations


def _kernel(runtime: CudaRuntime, num_sms: int, row_bytes: int, num_rows: int, iterations: int) -> Callable[[int], None]:
    """Return a function that queues the pushes of the kernel."""
    launch = runtime.launcher("copy_bandwidth")
    values = {
        "num_rows": num_rows,
        "src": runtime.address_of_region("pool"),
        "recv_x_offset": runtime.regions.offsets["landing"],
        "row_bytes": row_bytes,
    }

    def push(stream: int) -> None:
        for _ in range(iterations):
            launch(stream, num_sms, values)

    return push


@contextmanager
def _driver_copies(runtime: CudaRuntime, num_bytes: int, iterations: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that queues copies to all peers, on a stream for each peer. A single rank copies within its memory.

    Copies have the same sources and targets as the rows of the kernel. The driver gives copies between GPUs to copy engines.
    """
    num_ranks, rank = runtime.config.num_ranks, runtime.rank
    source, landing = runtime.address_of_region("pool"), runtime.regions.offsets["landing"]
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)] or [rank]  # not all ranks to the same peer first
    copies = [
        (runtime.memory.peers[peer] + landing + rank * num_bytes, source + peer * num_bytes, driver.acquire_stream())
        for peer in others
    ]

    def push(stream: int) -> None:
        for *_, lane in copies:
            driver.wait_stream(lane, stream)
        for _ in range(iterations):
            for to, start, lane in copies:
                driver.copy_async(to, start, num_bytes, lane)
        for *_, lane in copies:
            driver.wait_stream(stream, lane)

    yield push
    for *_, lane in copies:  # after an error their work may still run, so no other call may get them
        driver.release_stream(lane)
