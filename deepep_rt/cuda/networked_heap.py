"""Symmetric memory in two parts: CUDA's virtual memory for the ranks of a host, and NVSHMEM's for what crosses its network.

The first part grows, sleeps and is freed by each rank alone. The second part never changes. NVSHMEM sends from it and to it only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..comm.communicator import Communicator
from ..comm.consensus import Consensus, agreed
from ..errors import EPUnavailableError
from . import heap, nvshmem
from .transport import MemoryRequest

check_available, check_sharing, is_shared = nvshmem.check_available, nvshmem.check_sharing, nvshmem.is_shared


class NetworkedHeap:
    """A region of such memory on each rank; see `transport.SymmetricMemory`. Ranks of other hosts have the address 0.

    Raises:
        EPOutOfMemoryError: on every rank, if a GPU has too little memory.
        EPUnavailableError: on every rank, if NVSHMEM is missing, if ranks of a host cannot share memory at fixed addresses, or have no
            direct path to each other.
        EPTimeoutError: if a rank does not come.
    """

    is_local = False  # NVSHMEM frees its part on all ranks together

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        assert request.network_start is not None
        here, first = [], request.network_start

        def allocate() -> None:
            near = heap.allocate(comm, dataclasses.replace(request, num_bytes=request.near_bytes or request.num_bytes))
            if near.heap is None:
                if near.all_free(True, request.timeout_s):
                    near.free()
                raise EPUnavailableError("the ranks of a host share memory by way=ipc (cudaIpc), whose addresses cannot be kept")
            here.append(near)

        try:
            agreed(comm, allocate)
            far = dataclasses.replace(request, num_bytes=request.num_bytes - first, ranks_per_node=1)
            self._far = nvshmem.allocate(comm, far)
        except BaseException:
            for near in here:
                near.free()
            raise
        self.heap: heap.HeapMemory = here[0]
        self.ptr, self.peers, self.way = self.heap.ptr, self.heap.peers, self.heap.way
        self.network_base = self._far.ptr - first
        self._first = first
        self.network_ids: Sequence[int] = self._far.network_ids

    @property
    def network_peers(self) -> Sequence[int]:
        """Address of offset 0 of the second part, for each rank that this GPU reaches; otherwise 0."""
        return [ptr and ptr - self._first for ptr in self._far.network_peers]

    @property
    def consensus(self) -> Consensus | None:
        """Agreement with other ranks of NVSHMEM's runtime."""
        return self._far.consensus

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks of NVSHMEM's runtime free the region now."""
        return self._far.all_free(is_ok, timeout_s)

    def free(self) -> None:
        """Free both parts. Collective over NVSHMEM's runtime."""
        self.heap.free()
        self._far.free()


allocate = NetworkedHeap
