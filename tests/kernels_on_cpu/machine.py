"""GPUs of several ranks in this process: `Buffer` runs as on CUDA, and its kernels run on the CPU.

    with Machine(num_ranks=2, seed=7) as machine:
        buffers = machine.buffers(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True)
        sent = [buffer.low_latency_dispatch(machine.put(rank, x), machine.put(rank, idx)) for rank, buffer in enumerate(buffers)]
        machine.run()

As on a GPU, calls only queue work; `run` runs what is queued on the streams of all ranks together, in an order that the seed decides.
Memory of the GPUs is memory of this process, so results can be read after `run`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from fake_gpu import FakeCommunicator as OneRank

from deepep_rt import Buffer, EPError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays.view import Framework, View
from deepep_rt.backends import agreement, factory
from deepep_rt.backends.cuda import backend as cuda_backend
from deepep_rt.backends.cuda import monitor, runtime
from deepep_rt.comm import convert
from deepep_rt.cuda import driver, stream_memory
from deepep_rt.cuda import nvshmem as symmetric
from deepep_rt.cuda import topology as placement
from deepep_rt.cuda.stream_memory import StreamMemory
from deepep_rt.jit import current_gpu, launch, loader

from . import compiler


class Stuck(AssertionError):
    """Kernels wait for what will not come."""


class Wrong(AssertionError):
    """A kernel broke a rule of CUDA."""


class DeviceArray:
    """An argument of a call: an array in the memory of a rank's GPU."""

    def __init__(self, rank: int, ptr: int, shape: tuple[int, ...], dtype: str) -> None:
        self.rank, self.ptr, self.shape, self.dtype = rank, ptr, shape, dtype


class _Library(Framework):
    name = "arrays of GPUs on the CPU"

    def view(self, array: DeviceArray, what: str, stream: int | None) -> View:
        return View(array.ptr, array.shape, array.dtype, array.rank, array, self)

    def wrap(self, view: View) -> np.ndarray:
        return _look(view.ptr, view.shape, view.dtype, view.owner)

    def current_stream(self, device: int) -> int:
        return _callers_stream(device)


class _Kept(StreamMemory):
    """Memory that goes with the machine: a result may outlive that, and must not ask a driver which is not there."""

    def __del__(self) -> None: ...


def _look(ptr: int, shape: tuple[int, ...], dtype: str, owner: Any = None) -> np.ndarray:
    """An array of memory of a GPU, without a copy; it keeps `owner`."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * max(num_bytes, 1)).from_address(ptr)
    memory.owner = owner
    return np.frombuffer(memory, np.uint8, num_bytes).view(np.dtype(dtype)).reshape(shape)


def _callers_stream(rank: int) -> int:
    return 100 + rank


class _Stream:
    def __init__(self, gpu: int) -> None:
        self.gpu, self.queue, self.num_done, self.num_queued = gpu, deque[Any](), 0, 0

    def add(self, work: Any) -> None:
        self.queue.append(work)
        self.num_queued += 1


class _Launch:
    """A kernel's launch; `grid` is its number once it runs."""

    def __init__(self, name: str, function: int, params: bytes, blocks: int, threads: int, shared_bytes: int) -> None:
        self.name, self.function, self.params = name, function, params
        self.blocks, self.threads, self.shared_bytes, self.grid = blocks, threads, shared_bytes, 0


class _Program(threading.Thread):
    """What one rank does. Of all programs one runs at a time, and only within `go_on`: so a seed repeats what happened."""

    def __init__(self, machine: Machine, rank: int, program: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self._machine, self._rank, self._program = machine, rank, program
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._must_end = False
        self.start()

    def run(self) -> None:
        self._may_run.acquire()
        try:
            self._answer = self._program(self._rank)
        except BaseException as error:
            self._error = error
        self._has_stopped.release()

    def go_on(self) -> None:
        """Until it pauses, or ends."""
        if self.is_alive():
            self._machine._making = self._rank
            self._may_run.release()
            self._has_stopped.acquire()

    def pause(self) -> None:
        self._has_stopped.release()
        self._may_run.acquire()
        if self._must_end:
            raise SystemExit

    def end(self) -> None:
        """Whatever it waits for."""
        self._must_end = True
        self._may_run.release()
        self.join()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class _Rank(OneRank):
    """One rank's view of ranks that all say the same."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__(num_ranks)
        self._rank = rank

    def Get_rank(self) -> int:
        return self._rank


class Machine(AbstractContextManager):
    """The GPUs.

    Args:
        num_ranks: Ranks, each with a GPU.
        seed: Decides the order in which threads run.
        arch: What the kernels are compiled for, "sm_80" or "sm_90".
        num_sms: Blocks that run on a GPU at a time; None: all that there are.
        cuda_src: Another folder of kernels.
        weak_memory: Stores in the memory of other GPUs get there later, in any order that releases and fences allow.
    """

    def __init__(
        self,
        num_ranks: int,
        seed: int = 0,
        arch: str = "sm_90",
        *,
        num_sms: int | None = None,
        cuda_src: Any = None,
        weak_memory: bool = False,
    ) -> None:
        self.num_ranks, self.arch, self._cuda_src, self._weak_memory = num_ranks, arch, cuda_src, weak_memory
        self.launched: list[str] = []  # names of kernels that have been started
        self._lib = compiler.runtime()
        self._lib.gpu_error.restype = self._lib.gpu_describe.restype = ctypes.c_char_p
        self._lib.gpu_allocate.restype = ctypes.c_void_p
        self.seed(seed)
        for gpu in range(num_ranks) if num_sms is not None else ():
            self._lib.gpu_set_sms(gpu, num_sms)
        self._num_waits = self._num_idle_pauses = 0  # since a kernel has ended; and since one was queued
        self.time_step_ns = 1e9  # how far the clock goes on when all wait for time
        self._making = 0  # the rank whose Buffer is made or called
        self._buffers: list[Buffer] = []
        self._memory: set[int] = set()
        self._streams: dict[int, _Stream] = {_callers_stream(rank): _Stream(rank) for rank in range(num_ranks)}
        self._events: dict[int, tuple[_Stream, int]] = {}
        self._functions: list[Any] = [None]
        self._numbers = itertools.count(1000)
        self._symmetric: list[int] = []  # addresses of the Buffers that are being made
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Machine:
        self._replace_driver()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            for buffer in self._buffers:
                with suppress(EPError):  # where a call has failed
                    buffer.destroy()
        else:  # what the failed calls hold has to go while the driver is replaced
            traceback.clear_frames(trace)
            self._buffers.clear()
            gc.collect()
        self._patches.undo()
        self._lib.gpu_reset(ctypes.c_uint64(0), 0, 0)
        for ptr in list(self._memory):
            self._free(ptr)

    def seed(self, seed: int) -> None:
        """Begin another order. Nothing may be running."""
        self._lib.gpu_reset(ctypes.c_uint64(seed), self.num_ranks, self._weak_memory)
        self._random = random.Random(seed)

    def buffers(self, **sizes: Any) -> list[Buffer]:
        """A Buffer for each rank."""
        self._symmetric = []
        made = []
        for rank in range(self.num_ranks):
            self._making = rank
            made.append(Buffer(_Rank(self.num_ranks, rank), **{"timeout_s": 1.0, "check_inputs": False, **sizes}))
            self.time_step_ns = made[-1].config.timeout_s * 1e9 / 8
        self._buffers += made
        return made

    def put(self, rank: int, values: np.ndarray | None) -> Any:
        """An array in the memory of a rank's GPU."""
        if values is None:
            return None
        ptr = self.allocate(values.nbytes)  # kept, as a stream-ordered allocator keeps memory until work is done
        _look(ptr, values.shape, values.dtype.name)[...] = values
        return DeviceArray(rank, ptr, values.shape, values.dtype.name)

    # --- running -----------------------------------------------------------------------------------------------------------------

    def run(self, done: Callable[[], bool] = lambda: False) -> None:
        """Run what is queued, until all of it is done, or `done()`.

        Raises:
            Stuck: if kernels wait for ever.
            Wrong: if a kernel broke a rule of CUDA.
        """
        while not done() and self._advance(1 << 20):
            pass

    def each_rank(self, program: Callable[[int], Any]) -> list[Any]:
        """Run `program(rank)` for all ranks. Where one waits on the host for its GPU, the others go on, and the GPUs."""
        programs = [_Program(self, rank, program) for rank in range(self.num_ranks)]
        try:
            while any(made.is_alive() for made in programs):
                for made in programs:
                    made.go_on()
                self._advance(2 ** self._random.randrange(12))
            self.run()
        finally:
            for made in programs:
                made.end()
        return [made.answer() for made in programs]

    def pause(self) -> None:
        """Let others go on, where a host waits."""
        current = threading.current_thread()
        if isinstance(current, _Program):
            current.pause()
        elif self._advance(256):
            self._num_idle_pauses = 0
        else:
            self._num_idle_pauses += 1
            if self._num_idle_pauses > 100:
                raise Stuck(
                    "the host waits, and nothing is queued; make calls in each_rank if they wait for those of other ranks"
                )

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self.pause()

    def _advance(self, num_turns: int) -> bool:
        """Run the GPUs for a while. False: nothing is queued."""
        self._start_what_can_start()
        if not any(stream.queue for stream in self._streams.values()):
            return False
        state = self._lib.gpu_advance(ctypes.c_long(num_turns))
        if state == 1:
            self._finish(self._lib.gpu_finished())
            self._num_waits = 0
        elif state == 2:
            self._num_waits += 1
            if self._num_waits > 200:
                raise Stuck(f"kernels wait for ever\n{self._lib.gpu_describe().decode()}")
            self._lib.gpu_pass_time(ctypes.c_uint64(int(self.time_step_ns)))
        elif state == 3:
            raise Wrong(self._lib.gpu_error().decode())
        return True

    def _start_what_can_start(self) -> None:
        again = True
        while again:
            again = False
            for stream in self._streams.values():
                while stream.queue and self._can_pass(stream, stream.queue[0]):
                    stream.queue.popleft()
                    stream.num_done += 1
                    again = True

    def _can_pass(self, stream: _Stream, work: Any) -> bool:
        """Whether the stream goes on to what comes next. Copies are done here, and kernels started."""
        if not isinstance(work, _Launch):
            return work()
        if not work.grid:
            self.launched.append(work.name)
            work.grid = self._lib.gpu_start(
                stream.gpu, work.name.encode(), ctypes.c_void_p(work.function), work.params, ctypes.c_size_t(len(work.params)),
                work.blocks, work.threads, ctypes.c_size_t(work.shared_bytes),
            )  # fmt: skip
        return False

    def _finish(self, grid: int) -> None:
        for stream in self._streams.values():
            if stream.queue and isinstance(stream.queue[0], _Launch) and stream.queue[0].grid == grid:
                stream.queue.popleft()
                stream.num_done += 1

    # --- the driver --------------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Memory of a GPU, aligned to 256 bytes and full of garbage. What lies around it cannot be used."""
        ptr = self._lib.gpu_allocate(ctypes.c_size_t(max(num_bytes, 1)))
        self._memory.add(ptr)
        return ptr

    def _free(self, ptr: int) -> None:
        if ptr in self._memory:
            self._memory.remove(ptr)
            self._lib.gpu_free(ctypes.c_void_p(ptr))

    def _acquire_stream(self) -> int:
        number = next(self._numbers)
        self._streams[number] = _Stream(self._making)
        return number

    def _stream(self, number: int) -> _Stream:
        return self._streams[number or _callers_stream(self._making)]

    def _wait_event(self, stream: int, event: int) -> None:
        other, position = self._events[event]
        self._stream(stream).add(lambda: other.num_done >= position)

    def _wait_stream(self, stream: int, other: int) -> None:
        source, position = self._stream(other), self._stream(other).num_queued
        self._stream(stream).add(lambda: source.num_done >= position)

    def _copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._stream(stream).add(lambda: bool(ctypes.memmove(to, source, num_bytes)))

    def _synchronize(self, number: int) -> None:
        stream = self._stream(number)
        self._wait(lambda: not stream.queue)

    def _load(self, kernel: Any, constants: Any, arch: str) -> loader.LoadedKernel:
        shared_bytes = constants[kernel.shared] if kernel.shared else 0
        address = functools.cache(lambda: compiler.load(kernel, constants, self._cuda_src, every_access=self._weak_memory))
        self._functions.append((kernel, kernel.struct.dtype(constants).itemsize, address))
        return loader.LoadedKernel(len(self._functions) - 1, constants[kernel.threads], shared_bytes)

    def _launch(self, config: Any, function: int, arguments: int, _: int) -> tuple:
        kernel, num_bytes, address = self._functions[function]
        params = ctypes.string_at(ctypes.c_void_p.from_address(arguments).value or 0, num_bytes)
        work = _Launch(kernel.name, address(), params, config.gridDimX, config.blockDimX, config.sharedMemBytes)
        self._stream(int(config.hStream)).add(work)
        return (cuda.CUresult.CUDA_SUCCESS,)

    def _replace_driver(self) -> None:
        machine = self

        class Event:
            def __init__(self, stream: int, timing: bool = False) -> None:
                self.handle = next(machine._numbers)
                self.record(stream)

            def record(self, stream: int) -> None:
                held = machine._stream(stream)
                machine._events[self.handle] = held, held.num_queued

            def done(self) -> bool:
                stream, position = machine._events[self.handle]
                return stream.num_done >= position

            def synchronize(self) -> None:
                machine._wait(self.done)

        class Context:
            def __init__(self) -> None:
                self._rank = machine._making

            def __enter__(self) -> None:
                machine._making = self._rank

            def __exit__(self, *_: object) -> None: ...

        class Memory:
            is_of_several_buffers, consensus = False, None

            def __init__(self, comm: _Rank, num_bytes: int, *_: object) -> None:
                if not machine._symmetric:
                    machine._symmetric = [machine.allocate(num_bytes) for _ in range(machine.num_ranks)]
                    for rank, ptr in enumerate(machine._symmetric):
                        machine._lib.gpu_share(rank, ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))
                self.peers = self.addresses = tuple(machine._symmetric)
                self.ptr, self.pes = self.peers[comm.Get_rank()], range(machine.num_ranks)

            def all_free(self, sound: bool, timeout_s: float | None) -> bool:
                return sound

            def free(self) -> None: ...  # peers may still write there; it goes with the machine

        replaced = {
            "acquire_stream": self._acquire_stream,
            "release_stream": lambda stream: None,
            "free_bytes": lambda: 1 << 50,
            "num_sms": lambda ordinal: 132,
            "is_capturing": lambda stream: False,
            "capture_id": lambda stream: None,
            "wait_event": self._wait_event,
            "wait_stream": self._wait_stream,
            "synchronize": self._synchronize,
            "fill": lambda ptr, byte, num_bytes: ctypes.memset(ptr, byte, num_bytes),
            "copy_async": self._copy,
            "allocate": self.allocate,
            "allocate_async": lambda num_bytes, stream: self.allocate(num_bytes),
            "trim_memory_pool": lambda: None,
            "allocate_pinned": self.allocate,
            "free": self._free,
            "free_async": lambda ptr, stream: self._stream(stream).add(lambda: self._free(ptr) or True),
            "free_pinned": self._free,
            "CudaEvent": Event,
            "CurrentContext": Context,
        }
        names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
        launcher = SimpleNamespace(**{n: getattr(cuda, n) for n in names}, cuLaunchKernelEx=self._launch, CUfunction=int)
        patch = self._patches.setattr
        for name, answer in replaced.items():
            patch(driver, name, answer)
        patch(launch, "driver", launcher)
        patch(monitor, "os", SimpleNamespace(sched_yield=self.pause))
        patch(runtime, "time", SimpleNamespace(sleep=lambda seconds: self.pause(), monotonic=time.monotonic))
        patch(loader, "load", self._load)
        patch(current_gpu, "target_arch", lambda: self.arch)
        patch(cuda_backend, "choose_device", lambda comm, _: comm.Get_rank())
        patch(stream_memory, "StreamMemory", _Kept)
        patch(symmetric, "SymmetricMemory", Memory)
        patch(symmetric, "load", lambda: None)
        patch(convert, "communicator_of", lambda comm: comm)
        patch(factory, "agree", lambda *_: "cuda")
        patch(agreement, "announce", lambda *_: None)
        patch(placement, "placed", lambda comm, config: config)
        self._patches.setitem(frameworks.FRAMEWORK_OF_CLASS, DeviceArray, _Library())
