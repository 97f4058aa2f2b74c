"""A fake GPU: it records requests and computes nothing. All Python code of the CUDA backend runs on it, on any machine."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from deepep_rt import Buffer, EPOutOfMemoryError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.arrays.view import FORM_ALIGNMENT, AddressOf, Framework, View
from deepep_rt.backends import agreement, factory
from deepep_rt.backends.cuda import backend as cuda_backend
from deepep_rt.backends.cuda import network_memory
from deepep_rt.comm import convert
from deepep_rt.comm.timed_collectives import TimedCollectives
from deepep_rt.config import Config
from deepep_rt.cuda import captured_graph, driver, nvshmem, start, stream_tracking
from deepep_rt.cuda import topology as placement
from deepep_rt.cuda.relay_memory import RelayAllocator
from deepep_rt.jit import compiler, launch

BASE = 1 << 40  # of symmetric memory
OWN_STREAM, CALLERS_STREAM = 3, 11


class Array:
    """An array of a library that works on CALLERS_STREAM."""

    def __init__(self, fake: FakeGpu, dtype: str, *shape: int, offset: int = 0) -> None:
        self.dtype, self.shape = dtype, shape
        self.ptr = fake.allocate(int(np.prod(shape)) * DTYPES[dtype].itemsize) + offset


class _Library(Framework):
    name = "fake"

    def view(self, array: Array, what: str, stream: int | None) -> View:
        return View(array.ptr, array.shape, array.dtype, 0, array, self)

    def form(self, array: Array) -> AddressOf:
        form = type(array), array.shape, array.dtype

        def address_of(other: Array) -> int | None:
            return other.ptr if (type(other), other.shape, other.dtype) == form and other.ptr % FORM_ALIGNMENT == 0 else None

        return address_of

    def wrap(self, view: View) -> View:
        return view

    def current_stream(self, device: int) -> int:
        return CALLERS_STREAM


class FakeGpu:
    """Records launches, copies and other requests. `on_launch` may act as a kernel."""

    def __init__(self) -> None:
        self.launched: list[SimpleNamespace] = []  # kernel, stream, blocks and the members of its Params
        self.copies: list[tuple[int, int, int]] = []  # to, from, number of bytes
        self.waits: list[tuple[int, Any]] = []
        self.fills: list[tuple[int, int, int]] = []  # address, byte, number of bytes
        self.freed: list[int] = []
        self.requests: list[str] = []  # all requests to the driver, by name
        self.depth = 0  # of nested contexts
        self.outside_context: list[str] = []  # requests in a context that another library may have made current
        self.constants: dict[int, Any] = {}
        self.has_memory = True  # for more slots
        self.has_graphs = True  # whether captured graphs can be replayed
        self.num_graph_ends = 0  # graphs that shall tell their end
        self.on_launch: Any = lambda call: None
        self.allocator: Any = None  # what provides symmetric memory
        self._addresses = itertools.count(1 << 30, 1 << 32)
        self._pinned: list[Any] = []

    def note(self, name: str) -> None:
        self.requests.append(name)
        if not self.depth and name in ("record", "wait_event", "wait_stream"):
            self.outside_context.append(name)

    def allocate(self, num_bytes: int) -> int:
        return next(self._addresses)

    def allocate_pinned(self, num_bytes: int) -> int:
        self._pinned.append(ctypes.create_string_buffer(num_bytes))
        return ctypes.addressof(self._pinned[-1])

    def load(self, kernel: Any, constants: Any, arch: str) -> launch.LoadedKernel:
        handle = len(self.constants) + 1
        self.constants[handle] = kernel, constants
        return launch.LoadedKernel(handle, constants[kernel.threads], 0)

    def launch(self, config: Any, function: int, arguments: int, _: int) -> tuple:
        kernel, constants = self.constants[function]
        dtype = kernel.struct.dtype(constants)
        where = ctypes.c_void_p.from_address(arguments).value
        params = np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(where), dtype)[0]
        values = {name: params[name].tolist() for name in dtype.names}
        call = SimpleNamespace(kernel=kernel.name, stream=int(config.hStream), blocks=config.gridDimX, **values)
        self.requests.append("launch")
        self.launched.append(call)
        self.on_launch(call)
        return (cuda.CUresult.CUDA_SUCCESS,)

    def pop_launches(self) -> list[SimpleNamespace]:
        """Return the launches since the last call of this method."""
        launched, self.launched = self.launched, []
        return launched


class FakeCommunicator(TimedCollectives):
    """The ranks of a Buffer. All do what this one does."""

    relay_objection = ""
    sent_notice, incoming_notice = "", ""  # the failure notices of this rank, and of rank 2
    sent_kind, incoming_kind = "", "exception"
    incoming_num_made, incoming_doing = 0, ""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self._num_ranks

    def sub_comm(self, ranks: Sequence[int]) -> FakeCommunicator:
        return FakeCommunicator(len(ranks))

    def meet(self, timeout_s: float, phase: str, hint: str) -> FakeCommunicator:
        return self

    def release(self) -> None:
        pass

    def Dup(self) -> FakeCommunicator:
        return copy.copy(self)

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self._num_ranks

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value

    def Iallgather(self, mine: Any, all_ranks: Any) -> Any:
        all_ranks[:] = mine
        return SimpleNamespace(Test=lambda: True)

    def Isend(self, what: Any, peer: int, tag: int) -> Any:
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, word: Any, peer: int, tag: int) -> Any:
        word[:] = True
        return SimpleNamespace(Test=lambda: True)

    def isend(self, notice: list[Any], peer: int, tag: int) -> Any:
        self.sent_kind, self.sent_notice = notice[0], notice[-1]
        return SimpleNamespace(Test=lambda: True)

    def iprobe(self, source: int, tag: int) -> bool:
        return source == 2 and bool(self.incoming_notice)

    def recv(self, source: int, tag: int) -> list[Any]:
        notice, self.incoming_notice = self.incoming_notice, ""
        return [self.incoming_kind, self.incoming_num_made, self.incoming_doing, notice]

    def retain(self, *held: Any) -> None: ...
    def Barrier(self) -> None: ...
    def Free(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()

    class Event:
        handle = 5

        def __init__(self, stream: int, timing: bool = False) -> None:
            self.record(stream)

        def record(self, stream: int) -> None:
            fake.note("record")

        def synchronize(self) -> None: ...
        def done(self) -> bool:
            return True

    class Context:
        def __enter__(self) -> None:
            fake.requests.append("context")
            fake.depth += 1

        def __exit__(self, *_: object) -> None:
            fake.depth -= 1

    def allocate(num_bytes: int) -> int:
        if not fake.has_memory:
            raise EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")
        return fake.allocate(num_bytes)

    replaced = {
        "acquire_stream": lambda: OWN_STREAM,
        "release_stream": lambda stream: None,
        "free_bytes": lambda: 1 << 50,
        "num_sms": lambda ordinal: 132,
        "device_name": lambda ordinal: "Fake GPU",
        "is_capturing": lambda stream: False,
        "capture_id": lambda stream: None,
        "relaxed_capture_mode": contextlib.nullcontext,
        "wait_event": lambda stream, event: fake.waits.append((stream, event)),
        "wait_stream": lambda stream, other: fake.waits.append((stream, ("all of", other))),
        "synchronize": lambda stream: None,
        "end_of_work": lambda: Event(0),
        "write_int32_now": lambda ptr, value: None,
        "fill": lambda ptr, byte, num_bytes: fake.fills.append((ptr, byte, num_bytes)),
        "copy_async": lambda to, source, num_bytes, stream: fake.copies.append((to, source, num_bytes)),
        "allocate": allocate,
        "allocate_async": lambda num_bytes, stream: fake.allocate(num_bytes),
        "trim_memory_pool": lambda: None,
        "allocate_pinned": fake.allocate_pinned,
        "free": fake.freed.append,
        "free_async": lambda ptr, stream: fake.freed.append(ptr),
        "free_pinned": fake.freed.append,
    }

    def recorded(name: str, answer: Any) -> Any:
        def ask(*arguments: Any) -> Any:
            fake.note(name)
            return answer(*arguments)

        return ask

    for name, answer in replaced.items():
        monkeypatch.setattr(driver, name, recorded(name, answer))

    class GraphEnd:
        def __init__(self, stream: int) -> None:
            fake.num_graph_ends += 1

        def has_come(self) -> bool:
            return not fake.has_graphs

    monkeypatch.setattr(driver, "CudaEvent", Event)
    monkeypatch.setattr(captured_graph, "GraphEnd", GraphEnd)
    monkeypatch.setattr(driver, "CurrentContext", Context)
    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    monkeypatch.setattr(
        launch, "driver", SimpleNamespace(**{n: getattr(cuda, n) for n in names}, cuLaunchKernelEx=fake.launch, CUfunction=int)
    )
    monkeypatch.setattr(launch, "load", fake.load)
    monkeypatch.setattr(compiler, "target_arch", lambda: "sm_90")
    monkeypatch.setattr(compiler, "gpu_context", lambda: id(fake))
    monkeypatch.setattr(launch, "_local_launcher", functools.cache(launch._local_launcher.__wrapped__))
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_backend, "choose_device", lambda *_: 0)
    monkeypatch.setattr(start, "begin_driver", lambda: None)
    monkeypatch.setattr(start, "begin_context", lambda local_rank: None)
    monkeypatch.setitem(frameworks.FRAMEWORK_OF_CLASS, Array, _Library())
    yield fake
    stream_tracking._deferred.clear()
    assert not fake.outside_context


def _allocator_of(fake: FakeGpu, config: Config) -> Any:
    """Return what provides symmetric memory, whatever the setting. The driver's memory is that of the fake GPU already."""
    return RelayAllocator(1) if config.has_relay and config.node_size == 1 else fake.allocator


class FixedMemory:
    """Symmetric memory of four ranks at addresses that never change. Nothing is allocated."""

    ptr, network_base, network_ids = BASE, BASE, range(4)
    peers = tuple(BASE + (rank << 36) for rank in range(4))
    network_peers = (0,) * 4
    consensus, way = None, "nvshmem"
    is_local, heap = False, None

    def __init__(self, *_: object) -> None: ...

    def all_free(self, sound: bool, timeout_s: float) -> bool:
        return sound

    def free(self) -> None: ...


@pytest.fixture
def make(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a Buffer of rank 0 of 4."""

    class Memory(FixedMemory):
        def free(self) -> None:
            fake.freed.append(self.ptr)

    fake.allocator = SimpleNamespace(
        allocate=Memory, check_available=lambda: None, check_sharing=lambda numbers: None, is_shared=nvshmem.is_shared
    )
    monkeypatch.setattr(cuda_backend, "allocator_of", lambda config, setting: _allocator_of(fake, config))
    monkeypatch.setattr(convert, "communicator_of", lambda comm: comm)
    monkeypatch.setattr(factory, "agree", lambda *_: "cuda")
    monkeypatch.setattr(placement, "placed", lambda communicator, config: config)
    monkeypatch.setattr(agreement, "announce", lambda *_: None)
    monkeypatch.setattr(cuda_backend, "MEASURE", None)
    monkeypatch.setattr(
        network_memory,
        "start_relay",
        lambda *_, **__: SimpleNamespace(check=lambda: None, close=lambda: True, wake=lambda: None, progress=""),
    )

    def make(**sizes: Any) -> Buffer:
        defaults = dict(num_max_tokens_per_rank=64, hidden=256, num_topk=4, num_experts=32, timeout_s=1.0, check_inputs=False)
        buffer = Buffer(FakeCommunicator(4), **{**defaults, **sizes})
        fake.outside_context.clear()  # the constructor works in the context that is current
        return buffer

    return make


def arguments(fake: FakeGpu, tokens: int = 10, hidden: int = 256) -> tuple[Array, Array, Array]:
    return Array(fake, "bfloat16", tokens, hidden), Array(fake, "int64", tokens, 4), Array(fake, "float32", tokens, 4)


def routed(buffer: Buffer, num_rows: int, counts: list[int]) -> Any:
    """Return an `on_launch` that acts as the routing kernel: it reports counts to the host."""

    def act(call: SimpleNamespace) -> None:
        if call.kernel in ("route", "route_nodes") and call.to_host:
            page = buffer._backend.runtime.page
            page.mailbox["num_recv"], page.mailbox["num_recv_per_expert"] = num_rows, counts
            page.counted.value = 1

    return act


def region(buffer: Buffer, name: str) -> range:
    """Addresses of a region of symmetric memory."""
    found = buffer._backend.runtime.regions
    return range(BASE + found.offsets[name], BASE + found.offsets[name] + found.sizes[name])


def like(view: Any) -> tuple:
    return view.dtype, tuple(view.shape)
