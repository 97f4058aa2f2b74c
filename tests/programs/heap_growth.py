"""Symmetric memory that grows and shrinks on one rank, while its peers do something else: see `virtual_gpu`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import virtual_gpu
from limits import seconds
from mpi4py import MPI
from spmd import idle_barrier, main, raises
from virtual_gpu import UNIT, words

from deepep_rt import EPOutOfMemoryError
from deepep_rt.comm import convert
from deepep_rt.cuda import heap
from deepep_rt.cuda.transport import MemoryRequest

GPU = virtual_gpu.install()
LIMIT_S, _NAP_S = 20.0, seconds(0.5)


def _allocate(comm: MPI.Intracomm, num_bytes: int = 2 * UNIT) -> heap.HeapMemory:
    return heap.HeapMemory(convert.communicator_of(comm), MemoryRequest(num_bytes, LIMIT_S))


def _open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:gpu")


def _exchange(comm: MPI.Intracomm, memory: heap.HeapMemory, segments: dict[int, int]) -> None:
    """Let each rank write to the segments of the next one, and check what came from the rank before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    of_all = comm.allgather(segments)
    peer = (rank + 1) % size
    for offset, num_bytes in of_all[peer].items():
        words(memory.peers[peer] + offset, num_bytes)[:] = 100 * rank + offset // UNIT
    idle_barrier(comm)
    for offset, num_bytes in segments.items():
        assert (words(memory.ptr + offset, num_bytes) == 100 * ((rank - 1) % size) + offset // UNIT).all()
    idle_barrier(comm)


def check_ranks_grow_and_shrink(comm: MPI.Intracomm) -> None:
    """Each by itself, several times. The addresses and contents of what there was stay."""
    before, rng = _open(), np.random.default_rng(comm.Get_rank())
    memory, segments = _allocate(comm), dict[int, int]()
    places = memory.ptr, list(memory.peers)
    words(memory.ptr, 2 * UNIT)[:] = 5
    idle_barrier(comm)
    for _ in range(6):
        for _ in range(rng.integers(0, 4)):
            offset, size = memory.grow(int(rng.integers(1, 4 * UNIT)), LIMIT_S)
            assert size % UNIT == 0
            assert all(offset + size <= begin or begin + held <= offset for begin, held in segments.items())
            segments[offset] = size
        for offset in list(segments):
            if rng.random() < 0.4:
                memory.shrink(offset, LIMIT_S)
                del segments[offset]
        _exchange(comm, memory, segments)
    assert (words(memory.ptr, 2 * UNIT) == 5).all()
    assert (memory.ptr, memory.peers) == places
    idle_barrier(comm)
    memory.free()
    assert (_open(), GPU.left) == (before, (0, 0, 0))


def check_a_rank_grows_while_its_peers_sleep(comm: MPI.Intracomm) -> None:
    """In a long call that releases Python's lock. They need not call anything."""
    memory = _allocate(comm)
    idle_barrier(comm)
    if comm.Get_rank() == 0:
        start = time.monotonic()
        offset, _ = memory.grow(UNIT, LIMIT_S)
        assert time.monotonic() - start < 0.6 * _NAP_S
        memory.shrink(offset, LIMIT_S)
    else:
        time.sleep(_NAP_S)
    idle_barrier(comm)
    memory.free()


def check_segments_sleep_and_wake(comm: MPI.Intracomm) -> None:
    memory, before = _allocate(comm), GPU.left[2]
    segments = dict(memory.grow((comm.Get_rank() + 1) * UNIT, LIMIT_S) for _ in range(1 + comm.Get_rank() % 2))
    idle_barrier(comm)
    held = GPU.left[2]
    for cycle in range(3):
        _exchange(comm, memory, segments)
        memory.sleep()
        idle_barrier(comm)
        assert GPU.left[2] == 0
        last = comm.Get_rank() == comm.Get_size() - 1
        if cycle == 1 and last:
            GPU.num_bytes = 2 * UNIT  # for the region, and not for the segments
        if cycle == 1:
            with raises(EPOutOfMemoryError, f"rank {comm.Get_size() - 1}: "):
                memory.wake(convert.communicator_of(comm), LIMIT_S)
            GPU.num_bytes = 1 << 30
            idle_barrier(comm)
            assert GPU.left[2] == 0
        memory.wake(convert.communicator_of(comm), LIMIT_S)
        idle_barrier(comm)
        assert GPU.left[2] == held > before
    _exchange(comm, memory, segments)
    memory.free()
    assert GPU.left == (0, 0, 0)


def check_too_little_memory(comm: MPI.Intracomm) -> None:
    """On this GPU, in the address room, or because a peer cannot map it. Then nothing stays mapped anywhere, and it grows again."""
    rank, size = comm.Get_rank(), comm.Get_size()
    memory = _allocate(comm)
    idle_barrier(comm)
    held, open_before = GPU.left, _open()
    GPU.num_bytes = 3 * UNIT
    with raises(EPOutOfMemoryError, "no 0.00 GB of memory"):
        memory.grow(2 * UNIT, LIMIT_S)
    GPU.num_bytes = 1 << 30
    with raises(EPOutOfMemoryError, "do not fit the address room"):
        memory.grow(1 << 40, LIMIT_S)
    idle_barrier(comm)
    if size > 1:
        if rank == size - 1:
            GPU.fail = {"import"}
        idle_barrier(comm)
        if rank == 0:
            with raises(EPOutOfMemoryError, "cannot grow by", f"rank {size - 1}: ", "CUDA_ERROR_INVALID_VALUE"):
                memory.grow(UNIT, LIMIT_S)
        idle_barrier(comm)
        GPU.fail = set()
        time.sleep(0.1)  # peers unmap without an answer
    assert (GPU.left, _open()) == (held, open_before)
    idle_barrier(comm)
    memory.shrink(memory.grow(UNIT, LIMIT_S)[0], LIMIT_S)
    idle_barrier(comm)
    if rank == size - 1:
        memory.free()
    idle_barrier(comm)
    if rank == 0 and size > 1:
        with raises(EPOutOfMemoryError, f"rank {size - 1} receives no messages"):
            memory.grow(UNIT, LIMIT_S)
    idle_barrier(comm)
    if rank < size - 1:
        memory.free()
    assert GPU.left == (0, 0, 0)


def check_few_addresses(comm: MPI.Intracomm) -> None:
    """A rank whose process may reserve few of them has memory that does not grow, and its peers cannot grow there either."""
    last = comm.Get_rank() == comm.Get_size() - 1
    if last:
        GPU.most_addresses = 100 * UNIT
    memory = _allocate(comm)
    GPU.most_addresses = 1 << 60
    idle_barrier(comm)
    _exchange(comm, memory, {0: 2 * UNIT})
    if last or comm.Get_size() > 1:
        with raises(EPOutOfMemoryError, "address room" if last else f"rank {comm.Get_size() - 1}: "):
            memory.grow(UNIT, LIMIT_S)
    idle_barrier(comm)
    memory.free()
    assert GPU.left == (0, 0, 0)


if __name__ == "__main__":
    main(__name__)
