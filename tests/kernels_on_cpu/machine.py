"""Several ranks with simulated GPUs in this process: `Buffer` runs as on CUDA, and its kernels run on the CPU.

    with Machine(num_ranks=2, seed=7) as machine:
        buffers = machine.buffers(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True)
        sent = [buffer.low_latency_dispatch(machine.put(rank, x), machine.put(rank, idx)) for rank, buffer in enumerate(buffers)]
        machine.run()

As on a GPU, calls only queue work. `run` runs the work of all streams and ranks together, in an order that the seed decides. The memory of
the GPUs is memory of this process, so a test can read results after `run`.

With `members=` in `buffers`, Buffers have slots, and only these ranks have one. `change_members` begins a generation.

With `ranks_per_node=` in `buffers`, ranks of other nodes have no address. A hostile network (network.cpp) carries what kernels put.
"""

from __future__ import annotations

import gc
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepep_rt import Buffer, EPError
from deepep_rt.comm.failure_notice import FailureNotice
from deepep_rt.kernels.structs import LostRanks

from . import relays
from .device_arrays import DeviceArray, array_at, callers_stream
from .fake_driver import FakeDriver
from .gpus import Deadlock, Gpus, KernelLaunch
from .host_program import HostProgram
from .slots import Rank, SlotBuffers

_MAX_IDLE_PAUSES = 100


class Machine(AbstractContextManager):
    """The ranks and their GPUs.

    Args:
        num_ranks: Ranks, each with a GPU.
        seed: Decides the order in which threads run.
        arch: The architecture that kernels are compiled for, "sm_80" or "sm_90"; or that of each rank.
        num_sms: Blocks that run on a GPU at a time; None: no limit.
        cuda_src: The folder of the kernels; None: that of the package.
        weak_memory: Delay stores in the memory of other GPUs, in any order that releases and fences allow.
        transport: The transport between nodes: "nvshmem", "mpi", "wire", or "nvlink" for NVSHMEM where GPUs reach each other.
        can_sleep: Whether Buffers can sleep. Their memory has undefined contents then.
    """

    def __init__(
        self,
        num_ranks: int,
        seed: int = 0,
        arch: str | Sequence[str] = "sm_90",
        *,
        num_sms: int | None = None,
        cuda_src: Path | None = None,
        weak_memory: bool = False,
        transport: str = "nvshmem",
        can_sleep: bool = False,
    ) -> None:
        self.num_ranks = num_ranks
        self.first_put = 0
        """The number of the first put of later Buffers with a relay."""
        self._random = random.Random(seed)
        self._gpus = Gpus(num_ranks, seed, num_sms, weak_memory)
        self._driver = FakeDriver(self._gpus, [arch] * num_ranks if isinstance(arch, str) else arch, cuda_src, self._pause)
        self._driver.reaches_network = transport in ("nvlink", "wire")
        self._driver.transport = "nvshmem" if transport == "nvlink" else transport
        self._driver.can_sleep = can_sleep
        self._num_idle_pauses = 0  # of the host, since work was queued
        self._buffers: list[Buffer] = []
        self._stopped, self._timeout_s = set[int](), 1.0
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Machine:
        self._driver.install(self._patches)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            for buffer in self._buffers:
                with suppress(EPError):  # after a call that failed
                    buffer.destroy()
        else:  # objects of the failed calls must be freed while the fake driver is there, and the error must not need the GPUs' memory
            error.args = tuple(str(part) if isinstance(part, np.ndarray) else part for part in error.args)
            traceback.clear_frames(trace)
            self._gpus.drop_work()
            for buffer in self._buffers:
                buffer._backend = None  # the test that has failed may hold the Buffer longer than there are GPUs
            self._buffers.clear()
            gc.collect()
        self._driver.is_open = False
        self._patches.undo()
        self._gpus.close()
        for pages in self._driver.pages:
            pages.free()

    @property
    def launched(self) -> list[str]:
        """The names of the kernels that have started."""
        return self._gpus.launched

    @property
    def overlapped(self) -> set[tuple[str, str]]:
        """The names of kernels, and of those that started before them had ended."""
        return self._gpus.overlapped

    def buffers(self, *, members: Sequence[int] | None = None, **sizes: Any) -> Any:
        """Make a Buffer for each rank. With `members`, make Buffers with slots for these ranks, and leave the others absent."""
        self._driver.symmetric = []
        if members is not None:
            slots = SlotBuffers(self.num_ranks, sizes)
            for slot in members:
                slots[slot] = self._member(slots, slot, members)
            return self._with_overlap(slots)
        made = [self._buffer(Rank(range(self.num_ranks), rank), **sizes) for rank in range(self.num_ranks)]
        self._with_overlap(made)
        assert made[0].config.transport == self._driver.transport or not made[0].config.has_network
        if made[0].config.has_relay:
            relays.connect(self._gpus, next(self._driver.numbers), made, self.first_put)
        return made

    def _buffer(self, comm: Rank, **sizes: Any) -> Buffer:
        self._driver.current_rank = comm.numbers[comm.Get_rank()]
        made = Buffer(comm, **{"timeout_s": 1.0, "check_inputs": False, **sizes})
        self._timeout_s, self.timeout_steps = made.config.timeout_s, 8
        runtime = made._backend.runtime
        if made.config.has_slots:
            self._gpus.keeps_time(runtime.state + runtime.layout.local.offsets["lost"], LostRanks.size({}))
        return made

    def _member(self, slots: SlotBuffers, slot: int, members: Sequence[int]) -> Buffer:
        self._driver.slots = slots
        return self._buffer(Rank(members, slot), max_ranks=self.num_ranks, **slots.sizes)

    def _with_overlap(self, made: Any) -> Any:
        """Let kernels overlap, if these are the only Buffers: the library sees the Buffers of all ranks in one process."""
        for buffer in made if not self._buffers else ():
            if buffer is not None:
                buffer._backend.runtime.allow_overlap(True)
        self._buffers += [buffer for buffer in made if buffer is not None]
        return made

    def change_members(
        self, slots: SlotBuffers, members: Sequence[int], *, aborts: bool = True, leaving: Sequence[int] = ()
    ) -> None:
        """Begin a generation with other members, as `Buffer.shrink` does, or with `aborts=False` as `Buffer.admit`.

        Ranks that are left out still have the memory of before. Those in `leaving` give theirs back, and come back with the same Buffer if
        they are members again. Other new members make a Buffer.
        """
        assert slots.pages is not None
        old, slots.generation = slots.members, slots.generation + 1
        for slot in leaving:
            self._driver.current_rank = slot
            slots.resting[slot] = slots[slot]
            slots[slot]._backend.leave_members()
        for slot in members:
            if slot in slots.resting:
                slots[slot] = slots.resting.pop(slot)
            elif slot not in old:
                slots.pages.renew([slot])  # it joins alone
                slots[slot] = self._member(slots, slot, [slot])
                slots[slot]._backend.runtime.allow_overlap(True)
                self._buffers.append(slots[slot])
        slots.pages.renew(members)
        for slot in members:
            self._driver.current_rank = slot
            buffer, comm = slots[slot], Rank(members, slot)
            progress = buffer._call_lock.progress
            progress.num_made, progress.name = 0, ""
            with buffer._call_lock.changing_members(wakes=True):
                buffer._backend.change_members(comm, FailureNotice(comm, progress), slots.generation, aborts)
            buffer._members.change(comm, slots.generation)
        for slot in set(old) - set(members):
            slots[slot] = None

    def stop(self, rank: int, *, kernels: bool = True) -> None:
        """Let the process of a rank end: its kernels stop wherever they are, and its host makes no more calls. Without `kernels`, the
        work that is queued goes on.
        """
        self._stopped.add(rank)
        if kernels:
            self._gpus.stop(rank)

    def start(self, rank: int) -> None:
        """Let a rank that has ended have a new process."""
        self.stop(rank)
        self._stopped.discard(rank)

    @property
    def timeout_steps(self) -> int:
        """The steps of the clock until a wait times out."""
        return round(self._timeout_s * 1e9 / self._gpus.clock_step_ns)

    @timeout_steps.setter
    def timeout_steps(self, number: int) -> None:
        self._gpus.clock_step_ns = self._timeout_s * 1e9 / number

    @property
    def clock_s(self) -> float:
        """The time of the simulated GPUs, which passes only while all threads wait."""
        return self._gpus.clock_s

    def watch(self, ptr: int) -> None:
        """Count the loads of kernels from an address from now on."""
        self._gpus.watch(ptr)

    @property
    def watched_loads(self) -> int:
        """The loads from the address that `watch` has named."""
        return self._gpus.watched_loads

    @contextmanager
    def recorded(self, *, all_work: bool = False) -> Iterator[list[tuple[int, Any]]]:
        """Record the launches in this block, which run too, as a captured graph has them. `all_work`: also what fills words, events, and
        waits of streams.
        """
        self._driver.recorded, self._driver.records_all_work = (launches := []), all_work
        try:
            yield launches
        finally:
            self._driver.recorded = None

    def rank_of(self, launch: tuple[int, Any]) -> int:
        """Return the rank that has made a recorded launch."""
        return self._driver.stream(launch[0]).gpu

    def replay(self, launches: list[tuple[int, Any]]) -> None:
        """Queue recorded launches with the same Params, and the other recorded work."""
        for stream, work in launches:
            if isinstance(work, KernelLaunch):
                self._driver.stream(stream).append(replace(work, grid=0))
            else:
                work()

    def cut(self, source: int | None = None, target: int | None = None, *, in_flight: bool = True) -> None:
        """Lose all that `source` sends to `target` over the network from now on; None: all ranks. `in_flight`: also what is under way."""
        self._gpus.cut(source, target, in_flight=in_flight)

    @property
    def put_bytes(self) -> int:
        """The bytes that all ranks have put over the network so far."""
        return self._gpus.put_bytes

    def put(self, rank: int, values: np.ndarray | None) -> Any:
        """Copy an array to the memory of a rank's GPU."""
        if values is None:
            return None
        ptr = self._gpus.allocate(values.nbytes)  # lives as long as the machine, because queued work may read it
        array_at(ptr, values.shape, values.dtype.name)[...] = values
        return DeviceArray(rank, ptr, values.shape, values.dtype.name)

    def new_stream(self, rank: int) -> int:
        """Make a stream on a rank's GPU."""
        self._driver.current_rank = rank
        return self._driver.new_stream()

    def queue(self, rank: int, work: Callable[[], bool], stream: int | None = None) -> None:
        """Queue work on a stream; default: the caller's stream of a rank. The function is called until it returns that the work is done."""
        self._driver.stream(callers_stream(rank) if stream is None else stream).append(work)

    def is_working(self, rank: int, kernel: str = "") -> bool:
        """Return whether a kernel of a rank runs, or comes next on one of its streams: this one, or any."""
        heads = (one.queue[0] for one in self._gpus.streams.values() if one.gpu == rank and one.queue)
        return any(isinstance(head, KernelLaunch) and kernel in ("", head.name) for head in heads)

    def run(self, most_turns: int = 1 << 20) -> None:
        """Run all work that is queued. Work of `queue` is called after at most `most_turns` turns of the scheduler.

        Raises:
            Deadlock: if kernels wait for ever.
            InvalidKernel: if a kernel broke a rule of CUDA.
        """
        while self._gpus.advance(self._random.randrange(most_turns) + 1 if most_turns < 1 << 20 else most_turns):
            pass

    def advance(self, num_turns: int) -> None:
        """Run queued work for some turns of the scheduler."""
        self._gpus.advance(num_turns)

    def each_rank(
        self,
        program: Callable[[int], Any],
        ranks: Sequence[int] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run `program(rank)` for all ranks, or some. While one waits on the host for its GPU, the other ranks and the GPUs go on.

        `meanwhile` is called again and again, and may stop a rank, whose result is None then. With it, GPUs may still work at the end.
        """
        programs = [HostProgram(rank, program) for rank in (range(self.num_ranks) if ranks is None else ranks)]
        try:
            while not all(one.has_ended for one in programs):
                for one in programs:
                    self._driver.current_rank = one.rank
                    if one.rank in self._stopped:
                        one.end()
                    else:
                        one.resume()
                if meanwhile is not None:
                    meanwhile()
                self._gpus.advance(2 ** self._random.randrange(12))
            if meanwhile is None:
                self.run()
        finally:
            for one in programs:
                one.end()
        return [None if one.rank in self._stopped else one.result() for one in programs]

    def _pause(self) -> None:
        """Let other ranks and the GPUs go on while the host waits."""
        current = threading.current_thread()
        if isinstance(current, HostProgram):
            current.pause()
        elif self._gpus.advance(256):
            self._num_idle_pauses = 0
        else:
            self._num_idle_pauses += 1
            if self._num_idle_pauses > _MAX_IDLE_PAUSES:
                raise Deadlock("the host waits, and no work is queued; make calls that wait for other ranks in each_rank")
