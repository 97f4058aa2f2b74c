"""Several ranks with simulated GPUs in this process: `Buffer` runs as on CUDA, and its kernels run on the CPU.

    with Machine(num_ranks=2, seed=7) as machine:
        buffers = machine.buffers(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True)
        sent = [buffer.low_latency_dispatch(machine.put(rank, x), machine.put(rank, idx)) for rank, buffer in enumerate(buffers)]
        machine.run()

As on a GPU, calls only queue work. `run` runs the work of all streams and ranks together, in an order that the seed decides. The memory of
the GPUs is memory of this process, so a test can read results after `run`.

With `ranks_per_node=` in `buffers`, ranks of other nodes have no address. A hostile network (network.cpp) carries what kernels put.
"""

from __future__ import annotations

import gc
import random
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeCommunicator

from deepep_rt import Buffer, EPError

from . import relays
from .device_arrays import DeviceArray, array_at
from .fake_driver import FakeDriver
from .gpus import Deadlock, Gpus
from .host_program import HostProgram

_MAX_IDLE_PAUSES = 100


class _Rank(FakeCommunicator):
    """The communicator of one rank. All ranks send the same values."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        super().__init__(num_ranks)
        self._rank = rank

    def Get_rank(self) -> int:
        return self._rank


class Machine(AbstractContextManager):
    """The ranks and their GPUs.

    Args:
        num_ranks: Ranks, each with a GPU.
        seed: Decides the order in which threads run.
        arch: The architecture that kernels are compiled for, "sm_80" or "sm_90"; or that of each rank.
        num_sms: Blocks that run on a GPU at a time; None: no limit.
        cuda_src: The folder of the kernels; None: that of the package.
        weak_memory: Delay stores in the memory of other GPUs, in any order that releases and fences allow.
        transport: The transport between nodes, "nvshmem" or "mpi".
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
        self._driver = FakeDriver(
            self._gpus, [arch] * num_ranks if isinstance(arch, str) else arch, cuda_src, weak_memory, self._pause
        )
        self._driver.transport, self._driver.can_sleep = transport, can_sleep
        self._num_idle_pauses = 0  # of the host, since work was queued
        self._buffers: list[Buffer] = []
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
            self._buffers.clear()
            gc.collect()
        self._patches.undo()
        self._gpus.close()

    @property
    def launched(self) -> list[str]:
        """The names of the kernels that have started."""
        return self._gpus.launched

    @property
    def overlapped(self) -> set[tuple[str, str]]:
        """The names of kernels, and of those that started before them had ended."""
        return self._gpus.overlapped

    def buffers(self, **sizes: Any) -> list[Buffer]:
        """Make a Buffer for each rank."""
        self._driver.symmetric = []
        made = []
        for rank in range(self.num_ranks):
            self._driver.current_rank = rank
            made.append(Buffer(_Rank(self.num_ranks, rank), **{"timeout_s": 1.0, "check_inputs": False, **sizes}))
            self._gpus.clock_step_ns = made[-1].config.timeout_s * 1e9 / 8
        if not self._buffers:  # the only Buffer of each rank; the library sees the Buffers of all ranks in one process
            for buffer in made:
                buffer._backend.runtime.allow_overlap(True)
        self._buffers += made
        assert made[0].config.transport == self._driver.transport or not made[0].config.has_network
        if made[0].config.has_relay:
            relays.connect(self._gpus, next(self._driver.numbers), made, self.first_put)
        return made

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

    def run(self) -> None:
        """Run all work that is queued.

        Raises:
            Deadlock: if kernels wait for ever.
            InvalidKernel: if a kernel broke a rule of CUDA.
        """
        while self._gpus.advance(1 << 20):
            pass

    def each_rank(self, program: Callable[[int], Any]) -> list[Any]:
        """Run `program(rank)` for all ranks. While one waits on the host for its GPU, the other ranks and the GPUs go on."""
        programs = [HostProgram(rank, program) for rank in range(self.num_ranks)]
        try:
            while not all(one.has_ended for one in programs):
                for one in programs:
                    self._driver.current_rank = one.rank
                    one.resume()
                self._gpus.advance(2 ** self._random.randrange(12))
            self.run()
        finally:
            for one in programs:
                one.end()
        return [one.result() for one in programs]

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
