"""The wire: a transport between declared nodes of one host, for tests and benches without a NIC. The kernel `wire` carries what others put.

Its memory is CUDA's virtual memory, which all ranks of the host address. It does not sleep, because words of the network lie in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..network import NetworkOptions
from . import heap
from .transport import MemoryRequest

check_available, check_sharing, is_shared = heap.check_available, heap.check_sharing, heap.is_shared


class WireMemory:
    """A region of such memory on each rank; see `transport.SymmetricMemory`.

    Raises:
        EPOutOfMemoryError: on every rank, if a GPU has too little memory.
        EPUnavailableError: on every rank, if ranks cannot share memory, or have no direct path to each other.
        EPTimeoutError: if a rank does not come.
    """

    consensus: Consensus | None = None
    is_local, heap = True, None

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        self._memory = heap.allocate(comm, request)
        self.ptr = self.network_base = self._memory.ptr
        self.peers = self.network_peers = self._memory.peers
        self.network_ids: Sequence[int] = range(comm.Get_size())
        self.way = self._memory.way
        self.options = request.network or NetworkOptions(transport="wire")
        """The bandwidth and the latency of the wire."""
        assert all(self.peers), "all ranks are on this host (agree_on_transport)"

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks free the region now."""
        return self._memory.all_free(is_ok, timeout_s)

    def free(self) -> None:
        """Free the region."""
        self._memory.free()


allocate = WireMemory
