"""Replaces the CUDA driver, NVSHMEM and the compiler of `deepep_rt` by simulated GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from deepep_rt import EPOutOfMemoryError, NetworkOptions
from deepep_rt.arrays import frameworks
from deepep_rt.backends import agreement, factory, members, path_choice
from deepep_rt.backends.cuda import backend as cuda_backend
from deepep_rt.backends.cuda import monitor, network_memory, runtime
from deepep_rt.comm import convert, failure_notice
from deepep_rt.config import Config
from deepep_rt.cuda import driver, start, stream_tracking, topology, transport
from deepep_rt.cuda import slots as slot_pools
from deepep_rt.cuda.stream_tracking import StreamMemory
from deepep_rt.cuda.transport import MemoryRequest
from deepep_rt.jit import compiler as jit_compiler
from deepep_rt.jit import launch
from deepep_rt.network import Choice

from . import compiler
from .device_arrays import DeviceArray, DeviceArrays, callers_stream
from .gpus import Gpus, KernelLaunch, Stream
from .slots import Members, Pages, SlotBuffers


def _path_of(config: Config) -> Choice:
    return Choice("hierarchical" if config.path == "auto" else config.path, "for a test")


class _LastingMemory(StreamMemory):
    """Memory that lives as long as the machine. A result may live longer, and must not call a driver that is gone."""

    def __del__(self) -> None: ...


def _while_open(fake: FakeDriver, kind: Any) -> Any:
    """Make a kind of slots whose memory is not released after the end of the machine."""

    class Slot(kind):
        __slots__ = ()

        def __del__(self) -> None:
            if fake.is_open:
                super().__del__()

    return Slot


class FakeDriver:
    """A driver for the GPUs of all ranks.

    Args:
        gpus: One for each rank.
        archs: The architecture that the kernels of each rank are compiled for.
        cuda_src: The folder of the kernels; None: that of the package.
        pause: Lets other work go on while the host waits.
    """

    def __init__(self, gpus: Gpus, archs: Sequence[str], cuda_src: Path | None, pause: Callable[[], None]) -> None:
        self.gpus, self.num_ranks, self.pause = gpus, len(archs), pause
        self.is_open = True  # until the machine ends
        self.current_rank = 0  # the rank whose Buffer is made or called
        self.symmetric: list[int] = []  # addresses of the symmetric memory of the Buffers that are being made
        self.network: list[int] = []  # and of offset 0 of their network memory
        self.transport = "nvshmem"  # between nodes
        self.reaches_network = False  # GPUs address the network memory of other nodes, as over NVLink
        self.can_sleep = False  # the memory of the Buffers that are being made
        self.slots: SlotBuffers | None = None  # that are being made
        self.pages: list[Pages] = []  # of all Buffers with slots
        self.recorded: list[tuple[int, Any]] | None = None  # streams, and launches or functions that queue other work again
        self.records_all_work = False
        self.numbers = itertools.count(1000)  # of streams and events
        self.events: dict[int, tuple[Stream, int]] = {}
        self._archs, self._cuda_src = archs, cuda_src
        self._functions: list[Any] = [None]
        for rank in range(self.num_ranks):
            gpus.streams[callers_stream(rank)] = Stream(rank)

    def stream(self, number: int) -> Stream:
        return self.gpus.streams[number or callers_stream(self.current_rank)]

    def wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.pause()

    def install(self, patches: pytest.MonkeyPatch) -> None:
        """Replace everything that needs a GPU."""
        patch = patches.setattr
        for name, function in self._driver_functions().items():
            patch(driver, name, function)
        names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
        launcher = SimpleNamespace(**{n: getattr(cuda, n) for n in names}, cuLaunchKernelEx=self._launch, CUfunction=int)
        patch(launch, "driver", launcher)
        patch(monitor, "os", SimpleNamespace(sched_yield=self.pause))
        clock = SimpleNamespace(sleep=lambda seconds: self.pause(), monotonic=lambda: self.gpus.clock_s)
        for module in (
            monitor,
            runtime,
            cuda_backend,
            failure_notice,
        ):  # limits count the time of the simulated GPUs, so that a busy machine changes nothing
            patch(module, "time", clock)
        patch(runtime, "LocalHeap", functools.partial(_LocalHeap, gpus=self.gpus))
        patch(launch, "load", self._load)
        patch(jit_compiler, "target_arch", lambda: self._archs[self.current_rank])
        patch(jit_compiler, "gpu_context", lambda: id(self))
        patch(launch, "_local_launcher", functools.cache(launch._local_launcher.__wrapped__))
        patch(cuda_backend, "_dropped", [])  # Buffers of other machines have no GPU any more
        patch(cuda_backend, "choose_device", lambda comm, *_: comm.numbers[comm.Get_rank()])
        patch(start, "begin_driver", lambda: None)
        patch(start, "begin_context", lambda local_rank: None)
        patch(members, "Members", Members)
        patch(stream_tracking, "StreamMemory", _LastingMemory)
        patch(slot_pools, "Slot", _while_open(self, slot_pools.Slot))
        allocator = SimpleNamespace(
            allocate=self._allocate,
            check_available=lambda: None,
            check_sharing=lambda numbers: None,
            is_shared=lambda comm: False,
        )
        patch(cuda_backend, "allocator_of", lambda config, setting: allocator)
        patch(convert, "communicator_of", lambda comm: comm)
        patch(factory, "agree", lambda *_: "cuda")
        patch(cuda_backend, "agree_on_path", lambda comm, config, *_: path_choice.AgreedPath(_path_of(config)))
        patch(
            network_memory,
            "start_relay",
            lambda *_, **__: SimpleNamespace(check=lambda: None, close=lambda: True, wake=lambda: None, progress=""),
        )
        patch(agreement, "announce", lambda *_: None)
        patch(topology, "placed", lambda comm, config: config)
        patch(transport, "agree_on_transport", lambda comm, network: Choice(self.transport, "for a test"))
        patches.setitem(frameworks.FRAMEWORK_OF_CLASS, DeviceArray, DeviceArrays())

    def _driver_functions(self) -> dict[str, Any]:
        """The functions and classes of `cuda.driver`, for these GPUs."""
        gpus = self.gpus
        return {
            "acquire_stream": self.new_stream,
            "release_stream": lambda stream: None,
            "free_bytes": lambda: 1 << 50,
            "num_sms": lambda ordinal: 132,
            "current_device": lambda: 0,
            "relaxed_capture_mode": contextlib.nullcontext,
            "device_name": lambda ordinal: "Simulated GPU",
            "is_capturing": lambda stream: False,
            "capture_id": lambda stream: None,
            "wait_event": self._wait_event,
            "wait_stream": self._wait_stream,
            "synchronize": self._synchronize,
            "synchronize_all": lambda: None,
            "end_of_work": functools.partial(_EndOfWork, self),
            "write_int32_now": lambda ptr, value: ctypes.memmove(ptr, ctypes.byref(ctypes.c_int32(value)), 4),
            "fill": lambda ptr, byte, num_bytes: ctypes.memset(ptr, byte, num_bytes),
            "copy_async": self._copy,
            "fill_words": self._fill_words,
            "allocate": gpus.allocate,
            "allocate_async": lambda num_bytes, stream: gpus.allocate(num_bytes),
            "trim_memory_pool": lambda: None,
            "allocate_pinned": gpus.allocate,
            "free": gpus.free,
            "free_async": lambda ptr, stream: self.stream(stream).append(lambda: gpus.free(ptr) or True),
            "free_pinned": lambda ptr: None,  # puts in flight may still arrive there, so it lives as long as the machine
            "CudaEvent": functools.partial(_Event, self),
            "CurrentContext": functools.partial(_Context, self),
        }

    def new_stream(self) -> int:
        """Make a stream on the GPU of the current rank."""
        number = next(self.numbers)
        self.gpus.streams[number] = Stream(self.current_rank)
        return number

    def _allocate(self, comm: Any, request: MemoryRequest) -> Any:
        return _SymmetricMemory(self, comm, request) if request.num_slots is None else _SlotMemory(self, comm, request)

    def _record(self, stream: int, work: Any) -> None:
        if self.recorded is not None and (self.records_all_work or isinstance(work, KernelLaunch)):
            self.recorded.append((stream or callers_stream(self.current_rank), work))

    def _wait_event(self, stream: int, event: int) -> None:
        waiting = self.stream(stream)

        def queue() -> None:
            other, position = self.events[event]
            waiting.append(lambda: other.num_done >= position)

        queue()
        self._record(stream, queue)

    def _wait_stream(self, stream: int, other: int) -> None:
        waiting, source = self.stream(stream), self.stream(other)

        def queue() -> None:
            position = source.num_queued
            waiting.append(lambda: source.num_done >= position)

        queue()
        self._record(stream, queue)

    def _copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self.stream(stream).append(lambda: bool(ctypes.memmove(to, source, num_bytes)))

    def _fill_words(self, ptr: int, word: int, count: int, stream: int) -> None:
        words, filling = word.to_bytes(4, "little") * count, self.stream(stream)

        def queue() -> None:
            filling.append(lambda: bool(ctypes.memmove(ptr, words, len(words))))

        queue()
        self._record(stream, queue)

    def _synchronize(self, number: int) -> None:
        stream = self.stream(number)
        self.wait(lambda: not stream.queue)

    def _load(self, kernel: Any, constants: Mapping[str, int], arch: str) -> launch.LoadedKernel:
        shared_bytes = constants[kernel.shared] if kernel.shared else 0
        address = functools.cache(lambda: compiler.load(kernel, constants, self._cuda_src))
        self._functions.append((kernel, kernel.struct.dtype(constants).itemsize, address))
        return launch.LoadedKernel(len(self._functions) - 1, constants[kernel.threads], shared_bytes)

    def _launch(self, config: Any, function: int, arguments: int, _: int) -> tuple:
        kernel, num_bytes, address = self._functions[function]
        params = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value or 0, num_bytes)
        shape = config.gridDimX, config.blockDimX, config.sharedMemBytes
        work = KernelLaunch(kernel.name, address(), params, *shape, may_overlap=config.numAttrs > 0)
        self.stream(int(config.hStream)).append(work)
        self._record(int(config.hStream), work)
        return (cuda.CUresult.CUDA_SUCCESS,)


class _Event:
    def __init__(self, fake: FakeDriver, stream: int, timing: bool = False) -> None:
        self._fake, self.handle = fake, next(fake.numbers)
        self.record(stream)

    def record(self, stream: int) -> None:
        recorded, handle, fake = self._fake.stream(stream), self.handle, self._fake

        def note() -> None:
            fake.events[handle] = recorded, recorded.num_queued

        note()
        fake._record(stream, note)

    def done(self) -> bool:
        stream, position = self._fake.events[self.handle]
        return stream.num_done >= position

    def synchronize(self) -> None:
        self._fake.wait(self.done)


class _EndOfWork:
    """The end of all work that is queued on the GPU of the current rank."""

    def __init__(self, fake: FakeDriver) -> None:
        self._ends = [(one, one.num_queued) for one in fake.gpus.streams.values() if one.gpu == fake.current_rank]

    def done(self) -> bool:
        return all(stream.num_done >= position for stream, position in self._ends)


class _Context:
    """Makes the GPU of a rank current."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake, self._rank = fake, fake.current_rank

    def __enter__(self) -> None:
        self._fake.current_rank = self._rank

    def __exit__(self, *_: object) -> None: ...


_ROOM = 1 << 20  # for growth


def _lose(ptr: int, num_bytes: int) -> None:
    """Let memory have undefined contents: small numbers, which flags of later calls may be."""
    words = np.frombuffer((ctypes.c_char * num_bytes).from_address(ptr), np.uint8)[: num_bytes // 4 * 4].view(np.uint32)
    words[:] = np.random.default_rng(num_bytes).integers(0, 16, words.size)


class _LocalHeap:
    """Memory of one rank that loses its contents while it sleeps. It lives as long as the machine."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._parts, self.free, self.is_mapped = gpus, list[tuple[int, int]](), lambda: None, True

    def allocate(self, num_bytes: int) -> int:
        ptr = self._gpus.allocate(num_bytes)
        self._parts.append((ptr, num_bytes))
        return ptr

    def sleep(self) -> None:
        for part in self._parts:
            _lose(*part)
        self.is_mapped = False

    def wake(self) -> None:
        self.is_mapped = True


def _allocate(fake: FakeDriver, num_bytes: int) -> list[int]:
    """Allocate memory of one size on all ranks, which a network connects."""
    found = [fake.gpus.allocate(num_bytes) for _ in range(fake.num_ranks)]
    allocation = next(fake.numbers)
    for rank, ptr in enumerate(found):
        fake.gpus.share(allocation, rank, ptr, num_bytes)
    return found


class _SymmetricMemory:
    """Symmetric memory of the Buffers of all ranks, which the first rank allocates."""

    consensus = None
    way = "nvshmem"

    def __init__(self, fake: FakeDriver, comm: Any, request: MemoryRequest) -> None:
        self.is_local, self.heap = fake.can_sleep, self if fake.can_sleep else None
        self.segments: dict[int, int] = {}
        self.can_grow = fake.can_sleep
        is_apart = fake.can_sleep and request.network_start is not None  # network memory, which does not sleep
        self._num_bytes = (request.near_bytes or request.num_bytes) if is_apart else request.num_bytes
        if not fake.symmetric:
            fake.symmetric = _allocate(fake, self._num_bytes + (_ROOM if fake.can_sleep else 0))
            fake.network = fake.symmetric
            if is_apart:
                assert request.network_start is not None
                far = _allocate(fake, request.num_bytes - request.network_start)
                fake.network = [ptr - request.network_start for ptr in far]
        rank, node_size = comm.Get_rank(), request.ranks_per_node or fake.num_ranks
        # No kernel can address memory of another node.
        self.peers = tuple(ptr if peer // node_size == rank // node_size else 0 for peer, ptr in enumerate(fake.symmetric))
        self.addresses = self.peers
        self.ptr, self.network_base = fake.symmetric[rank], fake.network[rank]
        self.network_peers = fake.network if fake.reaches_network else [0] * fake.num_ranks
        self.options = request.network or NetworkOptions()
        self.network_ids = [fake.gpus.network_id(peer) for peer in range(fake.num_ranks)]

    def all_free(self, sound: bool, timeout_s: float | None) -> bool:
        return sound

    def sleep(self) -> None:
        _lose(self.ptr, self._num_bytes + _ROOM)

    def wake(self, comm: Any, timeout_s: float) -> None: ...

    def grow(self, num_bytes: int, timeout_s: float, heard: Any) -> tuple[int, int]:
        offset = max([self._num_bytes, *(begin + size for begin, size in self.segments.items())])
        if offset + num_bytes > self._num_bytes + _ROOM:
            raise EPOutOfMemoryError("no room")
        self.segments[offset] = num_bytes
        return offset, num_bytes

    def shrink(self, offset: int, timeout_s: float) -> None:
        _lose(self.ptr + offset, self.segments.pop(offset))

    def free(self) -> None: ...  # peers may still write there, so it lives as long as the machine


class _SlotMemory(_SymmetricMemory):
    """Symmetric memory of one rank of a Buffer with slots."""

    def __init__(self, fake: FakeDriver, comm: Any, request: MemoryRequest) -> None:
        assert fake.slots is not None
        assert request.num_slots is not None
        self._gpus, self._slot, slots = fake.gpus, comm.numbers[comm.Get_rank()], fake.slots
        self.is_local, self.heap, self.segments, self.can_grow = True, self, {}, True
        self._num_bytes = request.num_bytes
        if slots.pages is None:
            slots.pages = Pages(fake.gpus, request.num_slots, request.num_bytes + _ROOM)
            slots.pages.renew(comm.numbers)
            fake.pages.append(slots.pages)
        self._pages = slots.pages
        self.peers = self.addresses = tuple(self._pages.addresses(self._slot))
        self.ptr = self.network_base = self.peers[self._slot]
        self.network_peers = ()
        self.network_ids = [fake.gpus.network_id(slot) for slot in range(request.num_slots)]
        self.wake(comm, 0.0)

    def sleep(self) -> None:
        self._pages.map(self._slot, ())
        self.is_mapped = False

    def wake(self, comm: Any, timeout_s: float) -> None:
        self._pages.map(self._slot, comm.numbers)
        self.is_mapped = True

    def replace(self, comm: Any, timeout_s: float) -> None:
        assert not self._gpus.is_busy(self._slot), "work of a GPU still uses its memory"
        self.sleep()
        self.wake(comm, timeout_s)
