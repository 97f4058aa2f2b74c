"""The part of the CUDA driver that this library needs: checked calls, devices, streams, events and memory. Handles are plain integers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cuda.bindings import driver

from .._finalizers import finalize
from ..errors import EPOutOfMemoryError, EPUnavailableError
from . import start

# Members of enumerations, looked up once: the lookup takes longer than the comparison.
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_CAPTURED_ELSEWHERE = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_NOT_CAPTURED = _SUCCESS, driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_device_uuid = getattr(
    driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid
)  # CUDA 13 has only the newer version, under the plain name


def ok(result: tuple) -> Any:
    """Return the value or the values of a driver call, or None if it has none.

    Raise EPOutOfMemoryError if the GPU is out of memory, and EPUnavailableError with the CUDA error's name for every other failure.
    """
    if result[0] != _SUCCESS:
        is_memory = result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        raise (EPOutOfMemoryError if is_memory else EPUnavailableError)(f"the CUDA driver reports {result[0].name}")
    return result[1] if len(result) == 2 else result[1:] or None


def use_device(local_rank: int) -> int:
    """Return the GPU of the current context. Without a context, make that of GPU number `local_rank` current and return this GPU."""
    start.wait()
    ok(driver.cuInit(0))
    if int(ok(driver.cuCtxGetCurrent())):
        return current_device()
    ordinal = local_rank % num_devices()
    make_current(ordinal)
    return ordinal


def make_current(ordinal: int) -> None:
    """Make a GPU's primary context current."""
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(ordinal))))))


def has_started() -> bool:
    """Return whether CUDA runs in this process. Once it runs, the set of visible GPUs is fixed."""
    return driver.cuCtxGetCurrent()[0] != driver.CUresult.CUDA_ERROR_NOT_INITIALIZED


class _CallerContexts(threading.local):
    def __init__(self) -> None:
        self.contexts: list[int] = []


class CurrentContext:
    """Remember the current context. In a `with` block this context is current again, and the caller's returns afterwards.

    Other libraries change the current context silently, as JAX does when it starts. Every thread has its own, and JAX calls from threads.
    """

    def __init__(self) -> None:
        self._own = int(ok(driver.cuCtxGetCurrent()))
        self._callers = _CallerContexts()

    def __enter__(self) -> None:
        result = driver.cuCtxGetCurrent()
        current = int(result[1] if result[0] == _SUCCESS else ok(result))  # each call of a Buffer comes here
        self._callers.contexts.append(current)
        if current != self._own:
            ok(driver.cuCtxSetCurrent(self._own))

    def __exit__(self, *_: object) -> None:
        caller = self._callers.contexts.pop()
        if caller != self._own:
            ok(driver.cuCtxSetCurrent(caller))


def num_devices() -> int:
    """Return the number of GPUs that this process sees."""
    return int(ok(driver.cuDeviceGetCount()))


def device_uuid(ordinal: int) -> str:
    return bytes(ok(_device_uuid(ok(driver.cuDeviceGet(ordinal)))).bytes).hex()


def device_name(ordinal: int) -> str:
    """Return the name of a GPU, such as "NVIDIA H100 80GB HBM3"."""
    return ok(driver.cuDeviceGetName(128, ok(driver.cuDeviceGet(ordinal)))).split(b"\0")[0].decode(errors="replace")


def current_device() -> int:
    """Return the number of the current context's GPU."""
    return int(ok(driver.cuCtxGetDevice()))


def num_sms(ordinal: int) -> int:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return ok(driver.cuDeviceGetAttribute(attribute, ok(driver.cuDeviceGet(ordinal))))


def free_bytes() -> int:
    return ok(driver.cuMemGetInfo())[0]


class CudaEvent:
    """A CUDA event that is destroyed with its last reference."""

    def __init__(self, stream: int, timing: bool = False) -> None:
        flags = driver.CUevent_flags
        self._event = ok(driver.cuEventCreate(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING))
        self.handle = int(self._event)
        self.record(stream)

    def record(self, stream: int) -> None:
        ok(driver.cuEventRecord(self._event, stream))  # an integer would be converted to an object in each call

    def synchronize(self) -> None:
        ok(driver.cuEventSynchronize(self.handle))

    def done(self) -> bool:
        return driver.cuEventQuery(self.handle)[0] != driver.CUresult.CUDA_ERROR_NOT_READY  # waiting reports a failure

    def __del__(self, _finalize: Any = finalize, _destroy: Any = driver.cuEventDestroy) -> None:
        if hasattr(self, "handle"):
            _finalize(_destroy, self.handle)


def wait_event(stream: int, event: int) -> None:
    ok(driver.cuStreamWaitEvent(stream, event, 0))


def wait_stream(stream: int, other: int) -> None:
    """Make `stream` wait for the work that `other` holds now."""
    event = CudaEvent(other)  # has to live until the wait is queued
    wait_event(stream, event.handle)


def wait_value(stream: int, ptr: int, value: int) -> None:
    """Make `stream` wait until the uint32 at `ptr` is `value`. Nothing bounds the wait."""
    ok(driver.cuStreamWaitValue32(stream, ptr, value, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ))


class StreamWork:
    """The work of a stream as a `StreamDependency`. Any thread may use it, and any context may be current then."""

    __slots__ = ("_context", "stream")

    def __init__(self, stream: int, context: CurrentContext) -> None:
        self.stream, self._context = stream, context

    def make_wait(self, consumer: int) -> None:
        """Make another stream wait for the work that the stream holds now."""
        with self._context:
            wait_stream(consumer, self.stream)


def is_capturing(stream: int) -> bool:
    """Return whether a stream is part of a graph capture. The default stream counts while a stream that waits for it is captured."""
    status = driver.cuStreamIsCapturing(stream)
    if status == _NOT_CAPTURED:
        return False
    if status[0] != _CAPTURED_ELSEWHERE:
        ok(status)
    return True


def capture_id(stream: int) -> int | None:
    """Return the number of the graph capture that the stream is part of, or None."""
    if driver.cuStreamIsCapturing(stream) == _NOT_CAPTURED:  # as in most calls
        return None
    return int(ok(driver.cuStreamGetCaptureInfo(stream))[1]) if is_capturing(stream) else None


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Allow driver calls that a graph cannot hold while a stream is captured."""
    before = ok(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        ok(driver.cuThreadExchangeStreamCaptureMode(before))


def synchronize(stream: int) -> None:
    ok(driver.cuStreamSynchronize(stream))


def synchronize_all() -> None:
    """Wait for all streams of the current context. Does nothing if a capture forbids it."""
    driver.cuCtxSynchronize()


def end_of_work() -> CudaEvent:
    """Return an event after all work that the current context holds now, of every stream, also of other libraries.

    Drivers before CUDA 12.5 cannot tell it. There the event is after the work of the default stream, which waits for most streams.
    """
    event, context = CudaEvent(0), ok(driver.cuCtxGetCurrent())
    with suppress(RuntimeError):  # CUDA's bindings raise it if the driver lacks a function
        driver.cuCtxRecordEvent(context, event.handle)
    return event


def new_stream() -> int:
    return int(ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


_idle_streams: dict[int, list[int]] = {}  # by context


def acquire_stream() -> int:
    """Return a stream for the caller alone, until `release_stream`. No stream is destroyed: results may outlive their Buffer."""
    idle = _idle_streams.setdefault(int(ok(driver.cuCtxGetCurrent())), [])
    return idle.pop() if idle else new_stream()


def release_stream(stream: int) -> None:
    """Make a stream available again. Its work must be done."""
    _idle_streams[int(ok(driver.cuCtxGetCurrent()))].append(stream)


def elapsed_ms(begin: CudaEvent, end: CudaEvent) -> float:
    ok(driver.cuEventSynchronize(end.handle))
    return ok(driver.cuEventElapsedTime(begin.handle, end.handle))


def allocate(num_bytes: int) -> int:
    """Allocate device memory. In a graph capture this works too, and the memory is not part of the graph."""
    with relaxed_capture_mode():
        return int(ok(driver.cuMemAlloc(max(num_bytes, 1))))


def free(ptr: int) -> None:
    driver.cuMemFree(ptr)


def fill(ptr: int, byte: int, num_bytes: int) -> None:
    ok(driver.cuMemsetD8(ptr, byte, num_bytes))


def allocate_pinned(num_bytes: int) -> int:
    """Allocate host memory that kernels can write, at the same address on host and device. It is not cleared."""
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    return int(ok(driver.cuMemHostAlloc(num_bytes, flags)))


def free_pinned(ptr: int) -> None:
    driver.cuMemFreeHost(ptr)


def fill_words(ptr: int, word: int, count: int, stream: int) -> None:
    """Write a 32-bit word to device memory, `count` times, in the order of the stream."""
    if count:
        ok(driver.cuMemsetD32Async(ptr, word, count, stream))


def copy_async(to: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy in any direction between host and device memory."""
    if num_bytes:
        ok(driver.cuMemcpyAsync(to, source, num_bytes, stream))


def write_int32_now(ptr: int, value: int) -> None:
    """Write an int32 to device memory without waiting for the work of other streams."""
    stream, number = new_stream(), ctypes.c_int32(value)
    ok(driver.cuMemcpyHtoDAsync(ptr, ctypes.addressof(number), 4, stream))
    synchronize(stream)
    ok(driver.cuStreamDestroy(stream))


_LARGE_BYTES, _SIZES_PER_DOUBLING = 32 << 20, 16

_memory_pools: dict[tuple[int, bool], Any] = {}  # by context, and whether for large allocations


def allocate_async(num_bytes: int, stream: int) -> int:
    """Allocate from this library's stream-ordered pools on the current context's GPU. The pools keep freed memory.

    Large allocations have a pool of their own, and rounded sizes, at most 32 MiB larger. Results of new routings differ a little in size,
    so each of them finds the memory of an earlier one, of which no small allocation has taken a part. Otherwise the driver maps memory
    anew, for about a millisecond.

    The driver reclaims this memory when the process finds no other. The pools are never destroyed: results outlive Buffers, and the driver
    was seen to crash when it destroyed a pool with memory in use.
    """
    is_large = num_bytes >= _LARGE_BYTES
    if is_large:
        step = min((1 << (num_bytes - 1).bit_length() - 1) // _SIZES_PER_DOUBLING, _LARGE_BYTES)
        num_bytes = -(-num_bytes // step) * step
    key = int(ok(driver.cuCtxGetCurrent())), is_large
    pool = _memory_pools.get(key) or _memory_pools.setdefault(key, _new_memory_pool())
    return int(ok(driver.cuMemAllocFromPoolAsync(max(num_bytes, 1), pool, stream)))


def _new_memory_pool() -> Any:
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = current_device()
    pool = ok(driver.cuMemPoolCreate(properties))
    threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(driver.cuMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(2**64 - 1)))
    return pool


def trim_memory_pool() -> None:
    """Return the free memory in the pools of the current context to the driver."""
    current = int(ok(driver.cuCtxGetCurrent()))
    for (context, _), pool in list(_memory_pools.items()):  # another thread may add one
        if context == current:
            driver.cuMemPoolTrimTo(pool, 0)


def free_async(ptr: int, stream: int) -> None:
    driver.cuMemFreeAsync(ptr, stream)
