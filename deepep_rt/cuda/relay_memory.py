"""Symmetric memory of Buffers with a relay: over the ranks of one host only, because the relay carries what goes to other nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..comm.timed_collectives import format_ranks
from ..errors import EPError, EPTimeoutError
from . import nvshmem
from .transport import MemoryRequest, SymmetricMemory


class RelayAllocator:
    """Allocate such memory; see `transport.SymmetricAllocator`.

    Args:
        node_size: Ranks of a node. With 1, no rank reads or writes the memory of another one, so the driver's memory suffices.
    """

    def __init__(self, node_size: int) -> None:
        self._needs_nvshmem = node_size > 1

    def check_available(self) -> None:
        """Raise EPUnavailableError if this process needs NVSHMEM and cannot use it."""
        if self._needs_nvshmem:
            nvshmem.check_available()

    def check_sharing(self, ranks_per_gpu: Sequence[int]) -> None:
        """Raise EPConfigError if NVSHMEM is needed and cannot start with so many ranks on each GPU."""
        if self._needs_nvshmem:
            nvshmem.check_sharing(ranks_per_gpu)

    def is_shared(self, comm: Communicator) -> bool:
        """Return whether ranks outside of `comm` have to allocate on this host at the same time. Collective."""
        group = comm.sub_comm(comm.ranks_on_host())
        try:
            return self._needs_nvshmem and nvshmem.is_shared(group)
        finally:
            group.Free()

    def allocate(self, comm: Communicator, request: MemoryRequest) -> SymmetricMemory:
        """Allocate a region on each rank. Collective. The network's options are NVSHMEM's between hosts, and have no effect.

        Raises:
            EPUnavailableError: if NVSHMEM is needed and missing, if ranks of a node have no direct path to each other, or if another rank
                failed.
            EPOutOfMemoryError: if this host has too little memory.
            EPTimeoutError: if a rank does not come.
        """
        if not self._needs_nvshmem:
            return DriverMemory(comm, request)
        return HostMemory(comm, request)


class DriverMemory:
    """Memory of the driver that no other rank addresses; see `transport.SymmetricMemory`."""

    consensus: Consensus | None = None
    is_local, heap = True, None
    way = "driver"

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        from . import driver  # programs on the host backend may lack CUDA's bindings

        self._free = driver.free
        self.ptr = self.network_base = driver.allocate(request.num_bytes)
        self.peers: Sequence[int] = [self.ptr if peer == comm.Get_rank() else 0 for peer in range(comm.Get_size())]
        self.network_ids: Sequence[int] = range(comm.Get_size())
        self.network_peers: Sequence[int] = [0] * comm.Get_size()

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return `is_ok`: no rank outside of the Buffer is concerned."""
        return is_ok

    def free(self) -> None:
        """Free the region."""
        self._free(self.ptr)


@contextmanager
def _named(ranks: Sequence[int]) -> Iterator[None]:
    """Say in errors of the block which ranks of the Buffer the group of a host holds. NVSHMEM numbers them from 0."""
    try:
        yield
    except EPTimeoutError as error:
        peer = ranks[error.peer] if error.peer >= 0 else -1
        raise EPTimeoutError(_numbered(ranks, error), rank=ranks[error.rank], peer=peer, phase=error.phase) from error
    except EPError as error:
        raise type(error)(_numbered(ranks, error)) from error


def _numbered(ranks: Sequence[int], error: EPError) -> str:
    return str(error) if ranks[0] == 0 else f"among {format_ranks(ranks)}, numbered from 0 here: {error}"


class HostMemory:
    """NVSHMEM's memory over the ranks of this host; see `transport.SymmetricMemory`. Ranks of other hosts have the address 0."""

    is_local, heap = False, None
    way = "nvshmem"

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        here = comm.ranks_on_host()
        group = comm.sub_comm(here)
        try:
            with _named(here):
                self._memory = nvshmem.allocate(group, dataclasses.replace(request, network=None))
        except EPError:
            group.abandon()
            raise
        group.Free()
        self.ptr = self.network_base = self._memory.ptr
        self.consensus = self._memory.consensus
        address_of = dict(zip(here, self._memory.peers, strict=True))
        self.peers: Sequence[int] = [address_of.get(peer, 0) for peer in range(comm.Get_size())]
        self.network_ids: Sequence[int] = range(comm.Get_size())  # the relay sends to ranks
        self.network_peers: Sequence[int] = [0] * comm.Get_size()

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks of NVSHMEM's runtime free the region now."""
        return self._memory.all_free(is_ok, timeout_s)

    def free(self) -> None:
        """Free the region. Collective over NVSHMEM's runtime."""
        self._memory.free()
