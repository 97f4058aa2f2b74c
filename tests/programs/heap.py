"""Symmetric memory of CUDA's virtual memory, between real processes without a GPU: see `virtual_gpu`."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import virtual_gpu
from mpi4py import MPI
from spmd import idle_barrier, main, raises

from deepep_rt import EPOutOfMemoryError, EPUnavailableError
from deepep_rt.comm import convert, descriptors
from deepep_rt.comm.communicator import Communicator
from deepep_rt.cuda import heap, nvshmem, provider
from deepep_rt.cuda.transport import MemoryRequest

GPU = virtual_gpu.install()
LIMIT_S = 20.0


def _communicator(comm: MPI.Intracomm) -> Communicator:
    return convert.communicator_of(comm)


def _allocate(comm: MPI.Intracomm, num_bytes: int) -> heap.HeapMemory:
    return heap.HeapMemory(_communicator(comm), MemoryRequest(num_bytes, LIMIT_S))


def _open() -> tuple[int, int]:
    """Count the open descriptors, and the mappings of memory of GPUs."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:gpu")


def _use(comm: MPI.Intracomm, memory: heap.HeapMemory, num_bytes: int) -> None:
    """Let each rank write to the region of the next one, and check what came from the rank before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    assert memory.ptr == memory.peers[rank]
    virtual_gpu.words(memory.peers[(rank + 1) % size], num_bytes)[:] = 1000 * size + rank
    idle_barrier(comm)
    before = 1000 * size + (rank - 1) % size
    assert (virtual_gpu.words(memory.ptr, num_bytes) == before).all()
    assert (virtual_gpu.words(memory.peers[(rank - 1) % size], num_bytes) == 1000 * size + (rank - 2) % size).all()
    idle_barrier(comm)


def check_ranks_write_to_each_other(comm: MPI.Intracomm) -> None:
    for num_bytes in (4, virtual_gpu.UNIT, 5 * virtual_gpu.UNIT + 4):
        memory = _allocate(comm, num_bytes)
        _use(comm, memory, num_bytes)
        memory.free()
    assert GPU.left == (0, 0, 0)


def check_every_way(comm: MPI.Intracomm) -> None:
    before = _open()
    mine, theirs = os.pipe()
    folder = comm.bcast(tempfile.mkdtemp() if comm.Get_rank() == 0 else None)
    os.environ["DEEPEP_RT_SOCKET_DIR"] = folder
    for way in descriptors.WAYS:
        found = descriptors.exchange(_communicator(comm), theirs, way, LIMIT_S)
        assert found[comm.Get_rank()] == -1
        for peer, descriptor in enumerate(found):
            if descriptor >= 0:
                os.write(descriptor, bytes([comm.Get_rank()]))
                assert os.get_inheritable(descriptor) is False, (way, peer)
        descriptors.close_all(found)
        idle_barrier(comm)
        others = bytes(rank for rank in range(comm.Get_size()) if rank != comm.Get_rank())
        assert bytes(sorted(os.read(mine, 100) if others else b"")) == others, way
    os.close(mine)
    os.close(theirs)
    del os.environ["DEEPEP_RT_SOCKET_DIR"]
    if comm.Get_rank() == 0:
        os.rmdir(folder)
    assert _open() == before


def check_groups_of_any_shape(comm: MPI.Intracomm) -> None:
    """Several groups at once: of different sizes, with some ranks in common, and with ranks in another order."""
    rank, size = comm.Get_rank(), comm.Get_size()
    held = []
    for parts in ([1] * (size - 1), [size - 1], [size // 2], []):
        color = sum(rank >= sum(parts[: i + 1]) for i in range(len(parts)))
        group = comm.Split(color, -rank)
        num_bytes = (color + 1) * 3 * virtual_gpu.UNIT
        held.append((group, _allocate(group, num_bytes), num_bytes))
    for group, memory, num_bytes in held:
        _use(group, memory, num_bytes)
    for group, memory, _ in held[::2]:
        memory.free()
        group.Free()
    for group, memory, num_bytes in held[1::2]:
        _use(group, memory, num_bytes)
        memory.free()
        group.Free()


def check_a_peer_may_write_on(comm: MPI.Intracomm) -> None:
    """A rank frees its region alone. A peer that still writes there reaches only the old memory."""
    rank, num_bytes = comm.Get_rank(), 4 * virtual_gpu.UNIT
    memory = _allocate(comm, num_bytes)
    idle_barrier(comm)
    if rank == 0:
        memory.free()
        assert GPU.left == (0, 0, 0)
    idle_barrier(comm)
    fresh = _allocate(comm, num_bytes)
    virtual_gpu.words(fresh.ptr, num_bytes)[:] = 7
    idle_barrier(comm)
    if rank:
        virtual_gpu.words(memory.peers[0], num_bytes)[:] = rank
        memory.free()
    idle_barrier(comm)
    assert (virtual_gpu.words(fresh.ptr, num_bytes) == 7).all()
    idle_barrier(comm)
    fresh.free()


def check_memory_sleeps_and_wakes_at_its_addresses(comm: MPI.Intracomm) -> None:
    before = _open()
    memory, num_bytes = _allocate(comm, 2 * virtual_gpu.UNIT), 2 * virtual_gpu.UNIT
    places = memory.ptr, list(memory.peers)
    for cycle in range(5):
        _use(comm, memory, num_bytes)
        memory.sleep()
        assert _open()[1] == before[1]
        if cycle == 3 and comm.Get_rank() == comm.Get_size() - 1:
            GPU.fail = {"export", "ipc"}
        if cycle == 3:
            with raises(EPUnavailableError, "CUDA_ERROR_NOT_SUPPORTED"):
                memory.wake(_communicator(comm), LIMIT_S)
            GPU.fail = set()
            assert _open()[1] == before[1]
        memory.wake(_communicator(comm), LIMIT_S)
        assert (memory.ptr, memory.peers) == places
    _use(comm, memory, num_bytes)
    memory.sleep()
    memory.free()
    assert (_open(), GPU.left) == (before, (0, 0, 0))


def check_nothing_stays(comm: MPI.Intracomm) -> None:
    _allocate(comm, 64).free()
    before = _open()
    for _ in range(20):
        _allocate(comm, 3 * virtual_gpu.UNIT).free()
    assert _open() == before
    assert GPU.left == (0, 0, 0)


def check_a_failure_of_one_rank_is_that_of_all(comm: MPI.Intracomm) -> None:
    """At each step. Nothing stays mapped, no descriptor stays open, and the next region is right."""
    last = comm.Get_rank() == comm.Get_size() - 1
    _allocate(comm, 64).free()
    before = _open()
    cases: list[tuple[str, type[Exception], str]] = [
        ("memory", EPOutOfMemoryError, "no 0.00 GB of memory for a Buffer"),
        ("export", EPUnavailableError, "CUDA_ERROR_NOT_SUPPORTED"),
        ("reserve", EPOutOfMemoryError, "CUDA_ERROR_OUT_OF_MEMORY"),
    ]
    if comm.Get_size() > 1:
        cases += [("path", EPUnavailableError, f"no direct path from the GPU of rank {comm.Get_size() - 1} to that of rank 0")]
        cases += [("import", EPUnavailableError, "CUDA_ERROR_INVALID_VALUE")]
    for step, kind, words in cases:
        if last:
            GPU.fail, GPU.has_path, GPU.num_bytes = {step, "ipc"}, step != "path", 0 if step == "memory" else 1 << 30
        with raises(kind, words):
            _allocate(comm, 64)
        GPU.fail, GPU.has_path, GPU.num_bytes = set(), True, 1 << 30
        assert (_open(), GPU.left) == (before, (0, 0, 0)), step
    memory = _allocate(comm, 64)
    _use(comm, memory, 64)
    memory.free()


def check_nvshmem_comes_where_one_rank_cannot_share(comm: MPI.Intracomm) -> None:
    """All ranks take it together. Nothing of the attempt stays, and without NVSHMEM all ranks have both reasons."""
    last = comm.Get_rank() == comm.Get_size() - 1
    allocator = provider.AutoAllocator(heap, nvshmem)
    memory = allocator.allocate(_communicator(comm), MemoryRequest(64, LIMIT_S))
    assert isinstance(memory, heap.HeapMemory)
    _use(comm, memory, 64)
    memory.free()
    before, usual = _open(), (nvshmem.allocate, nvshmem.check_available)
    try:
        nvshmem.allocate, nvshmem.check_available = (lambda comm, request: "NVSHMEM's"), lambda: None  # type: ignore[assignment,misc,return-value]
        GPU.fail = {"granularity", "export", "ipc"} if last else set()
        found: Any = provider.AutoAllocator(heap, nvshmem).allocate(_communicator(comm), MemoryRequest(64, LIMIT_S))
        assert found == "NVSHMEM's"
        if last:
            nvshmem.check_available = _is_missing
        with raises(EPUnavailableError, "CUDA_ERROR_NOT_SUPPORTED", f"NVSHMEM: rank {comm.Get_size() - 1}: it is not installed"):
            provider.AutoAllocator(heap, nvshmem).allocate(_communicator(comm), MemoryRequest(64, LIMIT_S))
    finally:
        GPU.fail = set()
        nvshmem.allocate, nvshmem.check_available = usual  # type: ignore[misc]
    assert (_open(), GPU.left) == (before, (0, 0, 0))


def _is_missing() -> None:
    raise EPUnavailableError("it is not installed")


class _NoRoom(socket.socket):
    """A socket that sends no descriptors: the user has too many on their way."""

    def sendmsg(self, body: Any, ancillary: Any = (), *more: Any) -> int:
        if ancillary:
            raise OSError(errno.ETOOMANYREFS, "too many")
        return super().sendmsg(body, ancillary, *more)


def check_a_rank_that_cannot_send(comm: MPI.Intracomm) -> None:
    """All ranks hear of it at once, and take the next way. If that is closed too, the error names both."""
    if comm.Get_size() == 1:
        return
    last, start = comm.Get_size() - 1, time.monotonic()
    before = _open()
    usual, copy = socket.socket, descriptors._copy_out
    if comm.Get_rank() == last:
        descriptors.socket.socket = _NoRoom  # type: ignore[misc]
    try:
        with raises(EPUnavailableError, f"rank {last} cannot send to rank 0: ETOOMANYREFS"):
            descriptors.exchange(_communicator(comm), 0, "sockets", LIMIT_S)
        memory = _allocate(comm, 64)
        _use(comm, memory, 64)
        memory.free()
        GPU.fail = {"ipc"}
        if comm.Get_rank() == 0:
            descriptors._copy_out = _refuse
        with raises(EPUnavailableError, "ETOOMANYREFS", "rank 0 may not copy descriptors of rank 1: EPERM"):
            _allocate(comm, 64)
    finally:
        descriptors.socket.socket, descriptors._copy_out = usual, copy  # type: ignore[misc]
        GPU.fail = set()
    assert time.monotonic() - start < LIMIT_S
    assert (_open(), GPU.left) == (before, (0, 0, 0))


def _refuse(*_: Any) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def check_messages_of_strangers_are_dropped(comm: MPI.Intracomm) -> None:
    """Any process of the host can send to the sockets: their names stand in /proc/net/unix."""
    _allocate(comm, 64).free()
    before, ended = _open(), threading.Event()

    def send() -> None:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.setblocking(False)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own.fileno()]))]
        while not ended.is_set():
            for line in Path("/proc/net/unix").read_text().splitlines():
                name = line.split()[-1]
                if name.startswith("@deepep_rt-"):
                    for body in (b"", b"x 0", b"\xff" * 300, b"0" * 32 + b" 1", b"0" * 32 + b" 99999999999"):
                        for ancillary in ([], rights, [*rights, *rights]):
                            with contextlib.suppress(OSError):
                                own.sendmsg([body], ancillary, 0, f"\0{name[1:]}")
            time.sleep(1e-3)
        own.close()

    stranger = threading.Thread(target=send)
    stranger.start()
    try:
        for _ in range(5):
            memory = _allocate(comm, 64)
            _use(comm, memory, 64)
            memory.free()
    finally:
        ended.set()
        stranger.join()
    assert _open() == before


if __name__ == "__main__":
    main(__name__)
