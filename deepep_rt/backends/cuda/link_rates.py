"""Measure the links between the GPUs of a Buffer: rates and latencies for the choice of a path over several nodes, and copy ceilings.

Copy ceilings are the rates in a node by several methods: rows that a kernel pushes, and copies of the driver.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ...comm.communicator import Communicator
from ...comm.consensus import Consensus, agree_on_measurement, begin_measurement
from ...config import Config
from ...cuda import driver
from ...cuda.transport import SymmetricMemory
from ...description import LinkRates
from ...kernels.layout import Layout
from ..base import BufferInfo
from ..call_lock import CallLock
from ..path_choice import config_of_measurement
from .runtime import CudaRuntime

NEAR_BYTES, FAR_BYTES, NEAR_WORDS, FAR_WORDS = range(4)
"""What the kernel `link_rates` moves."""

_NUM_MEASUREMENTS = 3
_NUM_STEPS = 64  # of words
_NEAR_BYTES = 1 << 20
_FAR_BYTES = 1 << 26  # of all flows of a rank
_WORD_BYTES = 16
_NUM_SERIAL = 0  # no call of a user knows this Buffer


def measure_links(
    comm: Communicator,
    config: Config,
    *,
    device: int,
    arch: str,
    context: driver.CurrentContext,
    allocate: Callable[[Layout], SymmetricMemory],
) -> LinkRates:
    """Measure the links while all ranks send at the same time; see `path_choice.Measure`.

    The ranks make memory and a relay for the measurement alone, because the form of a Buffer depends on its result. `allocate` returns
    symmetric memory for a layout on all ranks, or on none. Raise EPTimeoutError if a rank is silent.
    """
    config = config_of_measurement(config)
    layout, consensus = Layout(config), Consensus(comm)
    memory = allocate(layout)
    resources, is_sound = ExitStack(), True
    resources.callback(memory.free)
    try:
        with consensus.step():
            info = BufferInfo(_NUM_SERIAL, config, device)
            runtime = CudaRuntime(info, layout, comm, memory, arch, context, CallLock(context), resources)
            runtime.launcher("link_rates")
            driver.synchronize(0)
        is_sound = False  # from now on, peers write to this memory
        rates = _with_relay(runtime)
        is_sound = True
    finally:
        # After a failure, a peer may still write, or may never come to free its memory.
        all_ok = consensus.all_ok(is_sound, "end the measurement of links", config.timeout_s)
        if memory.all_free(all_ok, config.timeout_s):
            resources.close()
            consensus.free()
    return rates


def _with_relay(runtime: CudaRuntime) -> LinkRates:
    assert runtime.network is not None
    try:
        runtime.network.start_relay()
        return measured_rates(runtime)
    finally:
        runtime.network.close()


def measured_rates(runtime: CudaRuntime) -> LinkRates:
    """Measure the links of a Buffer's memory. Collective. Return the same rates on all ranks."""
    nodes = runtime.layout.nodes
    assert nodes is not None
    steps = min(_NUM_STEPS, nodes.num_exposed_chunks)
    return LinkRates(
        near_bytes_per_s=near_bandwidth(runtime, _NEAR_BYTES, 8),
        near_latency_s=launch_seconds(runtime, NEAR_WORDS, steps, 0, 1) / steps,
        far_bytes_per_s=far_bandwidth(runtime, _FAR_BYTES, runtime.config.num_sms),
        far_latency_s=far_latency(runtime),
    )


def near_bandwidth(runtime: CudaRuntime, num_bytes: int, repetitions: int) -> float:
    """Return the bytes a second that each rank writes to the other ranks of its node, while all ranks do."""
    others = runtime.config.node_size - 1
    sizes = runtime.regions.sizes
    num_bytes = min(num_bytes, sizes["landing"] // runtime.config.node_size, sizes["pool"]) // 16 * 16
    seconds = launch_seconds(runtime, NEAR_BYTES, repetitions, num_bytes, runtime.config.num_sms)
    return repetitions * max(others, 1) * num_bytes / seconds


def far_bandwidth(runtime: CudaRuntime, num_bytes: int, num_sms: int) -> float:
    """Return the bytes a second that each rank puts to other nodes, while all ranks do. Nothing is copied at the two ends."""
    nodes = runtime.layout.nodes
    assert nodes is not None
    num_chunks = max(1, num_bytes // (nodes.num_flows * nodes.slot_bytes))
    seconds = launch_seconds(runtime, FAR_BYTES, num_chunks, nodes.slot_bytes, num_sms)
    return num_chunks * nodes.num_flows * nodes.slot_bytes / seconds


def far_latency(runtime: CudaRuntime) -> float:
    """Return the seconds that a word takes to another node."""
    return launch_seconds(runtime, FAR_WORDS, _NUM_STEPS, _WORD_BYTES, 1) / _NUM_STEPS


def launch_seconds(runtime: CudaRuntime, kind: int, num_chunks: int, num_bytes: int, num_sms: int) -> float:
    """Return the median time of a launch of `link_rates` on the slowest rank. The first launch does not count."""
    stream, comm, timeout_s = runtime.order.own_stream, runtime.comm, runtime.config.timeout_s
    launch = runtime.launcher("link_rates")
    values = {
        "kind": kind,
        "num_chunks": num_chunks,
        "num_bytes": num_bytes,
        "src": runtime.address_of_region("pool"),
        "recv_offset": runtime.regions.offsets["landing"],
    }
    times: list[float] = []
    for _ in range(1 + _NUM_MEASUREMENTS):
        runtime.synchronize()  # the kernel and a call on another stream may not run at the same time
        begin_measurement(comm, timeout_s)
        begin = driver.CudaEvent(stream, timing=True)
        launch(stream, num_sms, values)
        end = driver.CudaEvent(stream, timing=True)
        driver.synchronize(stream)
        runtime.monitor.check()
        times.append(driver.elapsed_ms(begin, end) / 1e3)
    return _slowest(comm, statistics.median(times[1:]))


def _slowest(comm: Communicator, seconds: float) -> float:
    every: Sequence[float] = comm.allgather(seconds)
    return max(every)


_NUM_MEASUREMENTS = 3


def copy_ceilings(runtime: CudaRuntime, num_sms: int, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
    """Return the bytes a second that each rank sends while all ranks send to all others, by method; see `Buffer.copy_ceilings`.

    The first method uses `num_sms`. Each peer gets `num_rows` rows, if the memory has room for them. One timing has `iterations` pushes.
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
