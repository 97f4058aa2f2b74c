"""Buffers with slots on simulated GPUs, without a store: their members, and memory that comes and goes.

As on a GPU, each rank has addresses for all slots. A generation has fresh pages, which its members map there. A rank that was left out
still has the pages of before, and the addresses of absent slots are in no memory.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_gpu import FakeCommunicator

from deepep_rt import Buffer

from .gpus import Gpus

_PAGE, _ALIGNMENT = 4096, 256
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_SHARED, _RESERVED = mmap.MAP_SHARED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address: int | None, num_bytes: int, protection: int, flags: int, file: int = -1) -> int:
    found = _libc.mmap(address, num_bytes, protection, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return found


class Rank(FakeCommunicator):
    """The communicator of one member. All members send the same values."""

    def __init__(self, members: Sequence[int], slot: int) -> None:
        super().__init__(len(members))
        self.numbers, self._rank = tuple(members), tuple(members).index(slot)

    def Get_rank(self) -> int:
        return self._rank


class Members:
    """Stands for `deepep_rt.backends.members.Members`. The machine changes the members."""

    has_left = False

    def __init__(self, comm: Any) -> None:
        self._comm, self.generation = comm, 0

    @classmethod
    def begin(cls, comm: Any, *_: Any) -> Members:
        return cls(comm)

    def communicator(self) -> Any:
        return self._comm

    def start(self, backend: Any, joining: Any) -> None: ...

    def close(self) -> None: ...

    def end(self) -> None: ...

    @property
    def slots(self) -> tuple[int, ...]:
        return self._comm.numbers

    def change(self, comm: Any, generation: int) -> None:
        self._comm, self.generation = comm, generation


class Pages:
    """The memory of all slots in a generation, and the addresses at which each rank maps it."""

    def __init__(self, gpus: Gpus, num_slots: int, num_bytes: int) -> None:
        self._gpus, self.num_slots = gpus, num_slots
        self.num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._mapped_bytes = -(-self.num_bytes // _PAGE) * _PAGE
        self._stride = self._mapped_bytes + _PAGE  # accesses past the end of a slot fail
        self._range_bytes = _PAGE + num_slots * self._stride
        self._ranges: dict[int, int] = {}  # of each rank
        self._files: dict[int, int] = {}  # of each member
        self._seeds = itertools.count()

    def renew(self, members: Sequence[int]) -> None:
        """Make fresh memory for the members. Its contents are small numbers, which flags of later calls may be."""
        self._close_files()
        for slot in members:
            self._files[slot] = file = os.memfd_create(f"slot {slot}")
            words = np.random.default_rng([next(self._seeds), slot]).integers(0, 16, self._mapped_bytes // 4, np.uint32)
            os.write(file, words.tobytes())

    def addresses(self, rank: int) -> list[int]:
        """Return the addresses of all slots on a rank. The memory of a slot ends at the end of a page."""
        if rank not in self._ranges:
            self._ranges[rank] = _map(None, self._range_bytes, _NO_ACCESS, _RESERVED)
            for slot, address in enumerate(self.addresses(rank)):
                self._gpus.own(slot, address, self.num_bytes)
        return [self._start(rank, slot) + self._mapped_bytes - self.num_bytes for slot in range(self.num_slots)]

    def map(self, rank: int, members: Sequence[int]) -> None:
        """Map the memory of the members on a rank, and nothing at the addresses of other slots."""
        self.addresses(rank)
        for slot in range(self.num_slots):
            if slot in members:
                _map(self._start(rank, slot), self._mapped_bytes, _READ_WRITE, _SHARED | _FIXED, self._files[slot])
            else:
                _map(self._start(rank, slot), self._mapped_bytes, _NO_ACCESS, _RESERVED | _FIXED)

    def cut(self, rank: int, slot: int) -> None:
        """Lose all that a rank stores in the memory of a slot, until it maps that again."""
        _map(self._start(rank, slot), self._mapped_bytes, _READ_WRITE, _RESERVED | _FIXED)

    def _start(self, rank: int, slot: int) -> int:
        return self._ranges[rank] + _PAGE + slot * self._stride

    def free(self) -> None:
        self._close_files()
        for start in self._ranges.values():
            _libc.munmap(start, self._range_bytes)
        self._ranges.clear()

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class SlotBuffers(list):
    """The Buffers of all slots; None: the slot is absent."""

    def __init__(self, num_slots: int, sizes: dict[str, Any]) -> None:
        super().__init__([None] * num_slots)
        self.sizes, self.generation = sizes, 0
        self.resting: dict[int, Buffer] = {}
        self.pages: Pages | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return members_of(self)


def members_of(buffers: Sequence[Buffer | None]) -> tuple[int, ...]:
    """Return the ranks that have a Buffer."""
    return tuple(rank for rank, buffer in enumerate(buffers) if buffer is not None)


def config_of(buffers: Sequence[Buffer | None]) -> Any:
    """Return the sizes of the Buffers."""
    return next(buffer.config for buffer in buffers if buffer is not None)
