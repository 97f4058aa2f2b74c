"""The functions that Buffers call. NVSHMEM runs already over all ranks, and its memory lies nowhere."""

from __future__ import annotations

from types import SimpleNamespace

from mpi4py import MPI

Init_status = SimpleNamespace(STATUS_IS_INITIALIZED=2)


def init_status() -> int:
    return Init_status.STATUS_IS_INITIALIZED


def my_pe() -> int:
    return MPI.COMM_WORLD.rank


def n_pes() -> int:
    return MPI.COMM_WORLD.size


def malloc(num_bytes: int) -> int:
    return 1 << 40


def ptr(address: int, pe: int) -> int:
    return address + (pe << 36)


def free(address: int) -> None: ...
