"""The simulated GPUs: their memory and streams, and the scheduler of `runtime.cpp`, which runs kernels."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import compiler

_MAX_WAITS = 200  # steps of the clock without the end of a kernel


class Deadlock(AssertionError):
    """Kernels, or the host, wait for ever."""


class InvalidKernel(AssertionError):
    """A kernel broke a rule of CUDA."""


@dataclass(eq=False)
class KernelLaunch:
    """A launch of a kernel."""

    name: str
    function: int  # the address of the code of one thread
    params: bytes
    num_blocks: int
    num_threads: int
    shared_bytes: int
    may_overlap: bool  # it may start while the kernel before it in its stream still ends
    grid: int = 0  # its number once it runs


class Stream:
    """Work of a GPU that runs in order: launches, and functions that return whether they are done."""

    def __init__(self, gpu: int) -> None:
        self.gpu, self.queue, self.num_done, self.num_queued = gpu, deque[Any](), 0, 0

    def append(self, work: KernelLaunch | Callable[[], bool]) -> None:
        self.queue.append(work)
        self.num_queued += 1

    def pop(self) -> None:
        self.queue.popleft()
        self.num_done += 1


class Gpus:
    """The GPUs of all ranks.

    Args:
        num_gpus: Their number.
        seed: Decides the order in which threads run.
        num_sms: Blocks that run on a GPU at a time; None: no limit.
        weak_memory: Delay stores in the memory of other GPUs, in any order that releases and fences allow.
    """

    def __init__(self, num_gpus: int, seed: int, num_sms: int | None, weak_memory: bool) -> None:
        self._lib = compiler.runtime()
        self._lib.gpu_error.restype = self._lib.gpu_describe.restype = ctypes.c_char_p
        self._lib.gpu_allocate.restype = ctypes.c_void_p
        self._lib.gpu_put_bytes.restype = self._lib.gpu_watched.restype = ctypes.c_uint64
        self._lib.gpu_reset(ctypes.c_uint64(seed), num_gpus, weak_memory)
        for gpu in range(num_gpus) if num_sms is not None else ():
            self._lib.gpu_set_sms(gpu, num_sms)
        self.streams: dict[int, Stream] = {}
        self.launched: list[str] = []  # names of kernels that have started
        self.overlapped: set[tuple[str, str]] = set()
        """Names of kernels, and of those that started before them had ended."""
        self.clock_step_ns = 1e9  # advances the clock when all threads wait
        self.clock_s = 0.0
        self._num_waits = 0  # since a kernel has ended
        self._memory: set[int] = set()

    def close(self) -> None:
        """Stop all kernels, and free all memory."""
        self._lib.gpu_reset(ctypes.c_uint64(0), 0, 0)
        for ptr in list(self._memory):
            self.free(ptr)

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory, aligned to 256 bytes and full of garbage. Accesses around it fail."""
        ptr = self._lib.gpu_allocate(ctypes.c_size_t(max(num_bytes, 1)))
        self._memory.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        if ptr in self._memory:
            self._memory.remove(ptr)
            self._lib.gpu_free(ctypes.c_void_p(ptr))

    def share(self, allocation: int, gpu: int, ptr: int, num_bytes: int) -> None:
        """Tell the scheduler that memory of a GPU is symmetric memory, to which other GPUs store, and the network puts.

        Args:
            allocation: A number that the memories of all ranks have in common.
            gpu: The GPU.
            ptr: Its memory.
            num_bytes: The size.
        """
        self._lib.gpu_share(gpu, ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))
        self._lib.gpu_symmetric(allocation, gpu, ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))

    def own(self, gpu: int, ptr: int, num_bytes: int) -> None:
        """Tell the scheduler that memory belongs to a GPU. Others may reach it at other addresses too."""
        self._lib.gpu_share(gpu, ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))

    def keeps_time(self, ptr: int, num_bytes: int) -> None:
        """Tell the scheduler that waiting kernels keep time with these words: atomics, and stores of the same value, change nothing."""
        self._lib.gpu_keeps_time(ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))

    def watch(self, ptr: int) -> None:
        """Count the loads of kernels from an address from now on."""
        self._lib.gpu_watch(ctypes.c_void_p(ptr))

    @property
    def watched_loads(self) -> int:
        """The loads from the address that `watch` has named."""
        return self._lib.gpu_watched()

    def is_busy(self, gpu: int) -> bool:
        """Return whether work is queued on a GPU."""
        return any(stream.queue for stream in self.streams.values() if stream.gpu == gpu)

    def stop(self, gpu: int) -> None:
        """Stop the kernels of a GPU wherever they are, and drop the work that is queued."""
        self._lib.gpu_stop(gpu)
        for stream in self.streams.values():
            if stream.gpu == gpu:
                while stream.queue:
                    stream.pop()

    def drop_work(self) -> None:
        """Drop all work that is queued, and what it holds."""
        for stream in self.streams.values():
            stream.queue.clear()

    def network_id(self, gpu: int) -> int:
        """Return NVSHMEM's number of a rank."""
        return self._lib.gpu_first_pe() + gpu

    def relay(
        self,
        allocation: int,
        rank: int,
        memory: tuple[int, int],
        begins_at: int,
        ring: tuple[int, int],
        entry_bytes: int,
        first_put: int,
    ) -> None:
        """Carry what a rank's kernels put by descriptors.

        Args:
            allocation: A number that the memories of all ranks have in common.
            rank: The rank.
            memory: Address and bytes of its network memory, in pinned memory.
            begins_at: The offset in symmetric memory to which it corresponds.
            ring: Address and entries of its ring.
            entry_bytes: The bytes of an entry.
            first_put: The number of the first put.
        """
        for ptr, num_bytes in (memory, (ring[0], ring[1] * entry_bytes)):
            self._lib.gpu_share(-1, ctypes.c_void_p(ptr), ctypes.c_size_t(num_bytes))
        self._lib.gpu_relay(
            allocation, rank, ctypes.c_void_p(memory[0]), ctypes.c_size_t(memory[1]), ctypes.c_uint64(begins_at),
            ctypes.c_void_p(ring[0]), ring[1], ctypes.c_uint32(first_put),
        )  # fmt: skip

    def cut(self, source: int | None, target: int | None, *, in_flight: bool) -> None:
        """Lose all puts from a rank to a rank from now on; None: all ranks. `in_flight`: also those that have not yet arrived."""
        self._lib.gpu_cut(*(-1 if rank is None else rank for rank in (source, target)), in_flight)

    @property
    def put_bytes(self) -> int:
        """The bytes that all ranks have put so far."""
        return self._lib.gpu_put_bytes()

    def advance(self, num_steps: int) -> bool:
        """Run for some steps of the scheduler. Return False if no work is queued.

        Raises:
            Deadlock: if kernels wait for ever.
            InvalidKernel: if a kernel broke a rule of CUDA.
        """
        self._start_ready_work()
        if not any(stream.queue for stream in self.streams.values()):
            return False
        state = self._lib.gpu_advance(ctypes.c_long(num_steps))
        if state == 1:
            self._end_kernel(self._lib.gpu_finished())
            self._num_waits = 0
        elif state == 2:
            self._num_waits += 1
            if self._num_waits > _MAX_WAITS:
                raise Deadlock(f"kernels wait for ever\n{self._lib.gpu_describe().decode()}")
            self._lib.gpu_pass_time(ctypes.c_uint64(int(self.clock_step_ns)))
            self.clock_s += self.clock_step_ns * 1e-9
        elif state == 3:
            raise InvalidKernel(self._lib.gpu_error().decode())
        return True

    def _start_ready_work(self) -> None:
        has_changed = True
        while has_changed:
            has_changed = False
            for stream in self.streams.values():
                while stream.queue and self._start(stream, stream.queue[0]):
                    stream.pop()
                    has_changed = True
                has_changed |= self._start_overlapping(stream)

    def _start_overlapping(self, stream: Stream) -> bool:
        """Start launches that need not wait for the end of the kernel before them. Return whether one has started."""
        for before, work in itertools.pairwise(list(stream.queue)):
            if not isinstance(before, KernelLaunch) or not isinstance(work, KernelLaunch) or not before.grid:
                return False
            if not work.grid:
                if not work.may_overlap or not self._lib.gpu_allows_successor(before.grid):
                    return False
                self._start(stream, work, before.grid)
                self.overlapped.add((before.name, work.name))
                return True
        return False

    def _start(self, stream: Stream, work: Any, predecessor: int = 0) -> bool:
        """Start work of a stream. Return whether it is done already. `predecessor`: the grid before it, if that still runs."""
        if not isinstance(work, KernelLaunch):
            return work()
        if not work.grid:
            self.launched.append(work.name)
            work.grid = self._lib.gpu_start(
                stream.gpu, work.name.encode(), ctypes.c_void_p(work.function), work.params, ctypes.c_size_t(len(work.params)),
                work.num_blocks, work.num_threads, ctypes.c_size_t(work.shared_bytes),
                predecessor,
            )  # fmt: skip
        return False

    def _end_kernel(self, grid: int) -> None:
        for stream in self.streams.values():
            if stream.queue and isinstance(stream.queue[0], KernelLaunch) and stream.queue[0].grid == grid:
                stream.pop()
