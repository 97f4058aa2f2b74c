"""Measure SM counts and shapes of dispatch and combine on the Buffer's own kernels, and choose; see `Buffer.autotune`.

All candidates are measured in rounds: each round has every candidate once, in another order, so that drift of clocks favours none. A loop
of calls is queued while the stream is held, so the host's launches take no part in its time. A first call brings the ranks together. The
slowest rank of each round counts, and the median of the rounds.

Each step that can fail on one rank ends with an exchange, so all ranks raise or none does. Ranks decide from the same gathered numbers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import _env
from ...arrays.dtypes import DTYPES, FP8_GROUP
from ...arrays.frameworks import VIEWS
from ...arrays.view import View
from ...comm.call_signature import pack
from ...comm.communicator import Communicator
from ...comm.consensus import agree_on_measurement, begin_measurement
from ...config import COMBINE_DTYPES
from ...cuda import driver
from ...errors import EPError, EPOutOfMemoryError, EPUnavailableError
from ...jit import build
from ...jit.launch import PreparedLaunch
from ...kernels.source import kernel_constants
from ...kernels.table import KERNELS
from ...kernels.tuning import has_tma, shapes_to_try
from ...tuned import CALLS, CopyShape, TuningResult, TuningRow, choose
from .. import saved_tunings
from ..base import Call, CombineInputs, DispatchInputs
from .runtime import CudaRuntime
from .throughput import RowMover, receive_window

_SEED = 29
_RANDOM_BYTES = 1 << 20


class TuningInputs:
    """Arrays of one rank, and launches of its kernels. Rows arrive in the region `landing`, so results of the program stay as they are.

    `resources` frees the arrays. Raise EPOutOfMemoryError if the GPU has no memory for them, or if the program holds so many results that
    the pool has no room.
    """

    def __init__(self, runtime: CudaRuntime, mover: RowMover, num_tokens: int, dtype: str, resources: ExitStack) -> None:
        config, self._stream = runtime.config, runtime.order.own_stream
        self._runtime, self._mover, self._resources = runtime, mover, resources
        # In the dispatch that makes the handle, this could fail on one rank only.
        mover.results.reserve_for_repeats(runtime.layout.max_result_bytes, self._stream)
        self._x = self._random((num_tokens, config.hidden), dtype)
        has_scales = DTYPES[dtype].itemsize == 1 and config.hidden % FP8_GROUP == 0
        self._scales = self._random((num_tokens, config.hidden // FP8_GROUP), "float32") if has_scales else None
        rng = np.random.default_rng([_SEED, runtime.rank])
        chosen = np.argpartition(rng.random((num_tokens, config.num_experts), np.float32), config.num_topk - 1, axis=1)
        self._idx = self._copied(np.ascontiguousarray(chosen[:, : config.num_topk], np.int64))
        self._parts: Any = None

    def route(self) -> None:
        """Make the routing with a dispatch. Collective."""
        order = self._runtime.order
        call: Call = order.begin(self._x, False, None, self._stream)
        inputs = DispatchInputs(self._x, self._idx, None, self._scales, None, None, 1)
        self._handle, _ = self._mover.send_rows(inputs, call)
        self._runtime.synchronize()

    def make_rows(self) -> None:
        """Make the rows of the combine, and the memory of all results. Raise EPOutOfMemoryError if the GPU has no memory for them."""
        config, layout, handle = self._runtime.config, self._runtime.layout, self._handle
        scale_bytes = self._scales.row_bytes if self._scales else 0
        self._parts = layout.result(handle.num_recv_rows, self._x.row_bytes, scale_bytes, 0, False)
        self._counts = self._mover.counts.acquire(self._stream)
        self._y = None
        if config.dtype in COMBINE_DTYPES:
            self._y = self._random((handle.num_recv_rows, config.hidden), config.dtype)
            parts = layout.combined(handle.num_tokens, self._y.row_bytes, False)
            self._sums = self._allocate(parts.num_bytes) + parts.offsets["x"]

    @property
    def calls(self) -> tuple[str, ...]:
        """The kernels that this Buffer can measure. A Buffer for rows that cannot be added up has no combine."""
        return ("dispatch",) if self._y is None else ("dispatch", "combine")

    def launch_of(self, call: str) -> PreparedLaunch:
        """Prepare the launch of a kernel, in the shape that the runtime now uses."""
        arrays: tuple[View | None, ...]
        if call == "dispatch":
            arrays = self._x, None, None, self._scales
            landing = self._runtime.regions.offsets["landing"]
            window = receive_window(landing, self._parts.offsets, self._handle.num_recv_rows)
            signature = DispatchInputs(self._x, None, None, self._scales, self._handle, None, 1).signature
            tables, counts = self._handle.routing.ptr, self._counts.ptr
            launcher, params = self._mover.dispatch_launch(pack(signature), arrays, tables, counts, window)
        else:
            assert self._y is not None
            inputs = CombineInputs(self._y, self._handle, None, ())
            launcher, params = self._mover.combine_launch(inputs, (self._y, None), self._sums, 0)
        return launcher.prepare(self._mover.num_sms, params)

    def _random(self, shape: tuple[int, int], dtype: str) -> View:
        """Make an array of random bytes: a copy of zeros would need less power, and would be faster."""
        num_bytes = shape[0] * shape[1] * DTYPES[dtype].itemsize
        ptr, filled = self._allocate(num_bytes), min(num_bytes, _RANDOM_BYTES)
        start = np.random.default_rng(_SEED).integers(0, 256, max(filled, 1), dtype=np.uint8)
        driver.copy_async(ptr, start.ctypes.data, filled, self._stream)
        while filled < num_bytes:
            size = min(filled, num_bytes - filled)
            driver.copy_async(ptr + filled, ptr, size, self._stream)
            filled += size
        driver.synchronize(self._stream)
        return self._view(ptr, shape, dtype)

    def _copied(self, values: np.ndarray) -> View:
        ptr = self._allocate(values.nbytes)
        driver.copy_async(ptr, values.ctypes.data, values.nbytes, self._stream)
        driver.synchronize(self._stream)
        return self._view(ptr, values.shape, values.dtype.name)

    def _view(self, ptr: int, shape: tuple[int, ...], dtype: str) -> View:
        return View(ptr, shape, dtype, self._runtime.device, None, VIEWS)

    def _allocate(self, num_bytes: int) -> int:
        ptr = driver.allocate(num_bytes)
        self._resources.callback(driver.free, ptr)
        return ptr


_log = logging.getLogger("deepep_rt")

NAME = "autotune"
NUM_SMS = (8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""The SM counts that are tried."""

_COMPILE_SHARE = 0.6  # of the time limit
_MOST_THREADS, _MOST_COMPILE_S = 8, 900.0
_LOOP_MS, _FEWEST_CALLS, _MOST_CALLS = 2.0, 3, 30  # of a loop of calls
_FIRST_ROUNDS, _MOST_ROUNDS = 2, 9
_HOPELESS = 1.1  # after the first rounds, candidates slower than this times the fastest with as many SMs are left out
_OPEN, _CLOSED = 1, 0


@dataclass
class _Trial:
    """A candidate, with its launch and its times in milliseconds."""

    call: str
    num_sms: int
    shape: CopyShape | None
    launch: PreparedLaunch
    times: list[float]

    @property
    def row(self) -> TuningRow:
        return TuningRow(self.call, self.num_sms, self.shape, 1e3 * statistics.median(self.times))


def autotune(
    runtime: CudaRuntime,
    mover: RowMover,
    archs: Sequence[str],
    key: Mapping[str, Any],
    num_tokens: int,
    dtype: str,
    limit_s: float,
    saves: bool,
) -> TuningResult:
    """Measure, choose, and save the choice; see `Buffer.autotune`. The runtime keeps the shapes that it had.

    `key` is everything that the choice depends on. After `limit_s`, no more candidates are measured.
    """
    mover.check_support()
    start, config = time.monotonic(), runtime.config
    given = {"num_tokens": num_tokens, "dtype": list(DTYPES).index(dtype), "limit_ms": int(1e3 * limit_s), "save": saves}
    comm = agree_on_measurement(runtime.comm, config.timeout_s, NAME, has_memory=True, **given)
    runtime.synchronize()
    before = runtime.shapes
    with ExitStack() as resources:
        resources.callback(runtime.use_shapes, before)
        _all_do(comm, _check_gpus)
        inputs = _all_do(comm, lambda: TuningInputs(runtime, mover, num_tokens, dtype, resources))
        inputs.route()
        _all_do(comm, inputs.make_rows)
        tried = _shapes(runtime, inputs.calls, archs)
        shapes = _compiled(runtime, comm, tried, start + _COMPILE_SHARE * limit_s)
        trials = _all_do(comm, lambda: _trials(runtime, inputs, shapes))
        with _gate() as gate:
            _measure(runtime, comm, trials, gate, start + limit_s)
    rows = tuple(trial.row for trial in trials)
    result = TuningResult(choose(rows), rows, num_tokens, dtype, time.monotonic() - start)
    file = saved_tunings.save(key, result) if saves and comm.Get_rank() == 0 else None
    seconds, name = comm.bcast((result.seconds, str(file) if file else None))
    comm.release()
    if saves and name is None and comm.Get_rank() == 0:
        _log.warning("the choice of autotune cannot be saved in the folder of the kernel cache; later Buffers do not use it")
    return dataclasses.replace(result, seconds=seconds, file=name)


def _check_gpus() -> None:
    if _env.share_gpus():
        raise EPUnavailableError(
            "DEEPEP_RT_SHARE_GPUS=1; expected a GPU for each rank, because ranks that take turns on a GPU tell nothing of its speed. Unset "
            "the variable, or leave autotune out"
        )


def _all_do(comm: Communicator, step: Callable[[], Any]) -> Any:
    """Make a step that may fail on some ranks. If it does, raise on all of them."""
    result, failure = None, None
    try:
        result = step()
    except EPError as error:
        failure = error
    mine = failure and (isinstance(failure, EPOutOfMemoryError), str(failure))
    for rank, problem in enumerate(comm.allgather(mine)):
        if problem is not None:
            is_memory, text = problem
            raise (EPOutOfMemoryError if is_memory else EPUnavailableError)(f"{NAME}: rank {rank}: {text}") from failure
    return result


def _shapes(runtime: CudaRuntime, calls: Sequence[str], archs: Sequence[str]) -> dict[str, list[CopyShape]]:
    """Return the shapes to try. Kernels over nodes have none, and ranks with different GPUs would choose different ones."""
    if runtime.config.has_network or len(set(archs)) > 1:
        return {call: [] for call in calls}
    return {call: shapes_to_try(call, runtime.config, has_tma(runtime.arch)) for call in calls}


def _compiled(
    runtime: CudaRuntime, comm: Communicator, tried: Mapping[str, list[CopyShape]], deadline: float
) -> dict[str, list[CopyShape]]:
    """Compile kernels of all shapes, and return the shapes whose kernels are in the cache of all ranks at the deadline.

    Each rank starts with another kernel. They share a cache folder as a rule, so each compiles its part and finds the others'.
    """
    jobs = [(call, shape) for call, shapes in tried.items() for shape in shapes]
    num_ranks = runtime.config.num_ranks
    first = runtime.rank * len(jobs) // num_ranks
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // num_ranks))
    done: list[int] = []
    if jobs:
        with ThreadPoolExecutor(threads) as pool:
            order = [*range(first, len(jobs)), *range(first)]
            futures: dict[Future[None], int] = {pool.submit(_compile, runtime, *jobs[i]): i for i in order}
            wait(futures, max(0.0, deadline - time.monotonic()))
            pool.shutdown(wait=True, cancel_futures=True)
        done = [i for future, i in futures.items() if not future.cancelled() and future.exception() is None]
    begin_measurement(comm, max(runtime.config.timeout_s, _MOST_COMPILE_S), NAME)  # one rank may compile for longer
    everywhere = set.intersection(*(set(theirs) for theirs in comm.allgather(done)))
    return {call: [shape for i, (its_call, shape) in enumerate(jobs) if its_call == call and i in everywhere] for call in tried}


def _compile(runtime: CudaRuntime, call: str, shape: CopyShape) -> None:
    kernel = KERNELS[call]
    dtype = runtime.config.dtype if kernel.per_dtype else None
    build.build(kernel, kernel_constants(runtime.layout, runtime.arch, kernel, dtype, shape), runtime.arch)


def _trials(runtime: CudaRuntime, inputs: TuningInputs, shapes: Mapping[str, list[CopyShape]]) -> list[_Trial]:
    """Load the kernels, and make all candidates."""
    most = driver.num_sms(runtime.device)
    found = []
    for call in inputs.calls:
        for shape in (None, *shapes[call]):
            runtime.use_shapes({call: shape} if shape else {})
            for num_sms in [number for number in NUM_SMS if number <= most] or [most]:
                found.append(_Trial(call, num_sms, shape, inputs.launch_of(call), []))
                found[-1].launch.num_blocks = num_sms
    return found


def _measure(runtime: CudaRuntime, comm: Communicator, trials: list[_Trial], gate: ctypes.c_uint32, deadline: float) -> None:
    """Fill the times of the trials."""
    num_calls = {}
    _launch_once(runtime, trials)
    for call in CALLS:
        usual = [trial for trial in trials if trial.call == call]
        if usual:
            _loop_ms(runtime, usual[0], gate, _FEWEST_CALLS)
            slowest = max(comm.allgather(_loop_ms(runtime, usual[0], gate, _FEWEST_CALLS)))
            num_calls[call] = max(_FEWEST_CALLS, min(_MOST_CALLS, round(_LOOP_MS / max(slowest, 1e-3))))
    live = list(trials)
    for number in range(_MOST_ROUNDS):
        ordered = live[number % len(live) :] + live[: number % len(live)]
        if number % 2:
            ordered.reverse()
        mine = [_loop_ms(runtime, trial, gate, num_calls[trial.call]) for trial in ordered]
        gathered = comm.allgather((mine, time.monotonic() > deadline))
        for trial, times in zip(ordered, zip(*(times for times, _ in gathered), strict=True), strict=True):
            trial.times.append(max(times))
        if any(is_late for _, is_late in gathered):
            return
        if number + 1 == _FIRST_ROUNDS:
            live = _promising(live)


def _launch_once(runtime: CudaRuntime, trials: Sequence[_Trial]) -> None:
    """Launch each kernel once. The driver may load a kernel at its first launch, and then waits for streams, which may not be held."""
    for trial in {(trial.call, trial.shape): trial for trial in trials}.values():
        begin_measurement(runtime.comm, runtime.config.timeout_s, NAME)
        if runtime.network is not None:
            runtime.network.wake()
        trial.launch(runtime.order.own_stream)
        driver.synchronize(runtime.order.own_stream)
        runtime.monitor.check()


def _promising(trials: Sequence[_Trial]) -> list[_Trial]:
    """Leave out candidates that are much slower than others with as many SMs. The usual shape stays."""
    least: dict[tuple[str, int], float] = {}
    for trial in trials:
        place, us = (trial.call, trial.num_sms), trial.row.us
        least[place] = min(us, least.get(place, us))
    return [trial for trial in trials if trial.shape is None or trial.row.us <= _HOPELESS * least[trial.call, trial.num_sms]]


def _loop_ms(runtime: CudaRuntime, trial: _Trial, gate: ctypes.c_uint32, num_calls: int) -> float:
    """Return the milliseconds of a call on this rank, in a loop of calls."""
    begin_measurement(runtime.comm, runtime.config.timeout_s, NAME)
    stream, launch, network = runtime.order.own_stream, trial.launch, runtime.network
    gate.value = _CLOSED
    try:
        driver.wait_value(stream, ctypes.addressof(gate), _OPEN)
        if network is not None:
            network.wake()
        launch(stream)  # brings the ranks together
        begin = driver.CudaEvent(stream, timing=True)
        for _ in range(num_calls):
            launch(stream)
        end = driver.CudaEvent(stream, timing=True)
    finally:
        gate.value = _OPEN
    elapsed_ms = driver.elapsed_ms(begin, end)
    driver.synchronize(stream)
    runtime.monitor.check()
    return elapsed_ms / num_calls


@contextmanager
def _gate() -> Iterator[ctypes.c_uint32]:
    """Yield a word in pinned memory that holds the stream of a loop."""
    address = driver.allocate_pinned(ctypes.sizeof(ctypes.c_uint32))
    try:
        yield ctypes.c_uint32.from_address(address)
    finally:
        driver.free_pinned(address)
