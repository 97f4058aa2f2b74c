"""Symmetric memory: a region of equal size on every rank, which the GPUs of the other ranks read and write.

These Protocols name what the CUDA backend needs of a library that provides such memory. `nvshmem` implements them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..network import NetworkOptions


class SymmetricMemory(Protocol):
    """One region of symmetric memory, as one rank of a Buffer sees it."""

    @property
    def ptr(self) -> int:
        """Address of this rank's own region."""

    @property
    def peers(self) -> Sequence[int]:
        """Address of each rank's region, for this rank's GPU; 0 if the GPU cannot reach the rank directly."""

    @property
    def network_ids(self) -> Sequence[int]:
        """Number of each rank in the library's functions for networks, which kernels call for ranks out of direct reach."""

    @property
    def consensus(self) -> Consensus | None:
        """Agreement with ranks outside of the Buffer that allocated the region too; None if there are none."""

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks that allocated the region free it now. Collective.

        Args:
            is_ok: Whether the ranks of the Buffer agreed to free it.
            timeout_s: The time after which a silent rank counts as lost.
        """

    def free(self) -> None:
        """Free the region. Collective over all ranks that allocated it."""


class SymmetricAllocator(Protocol):
    """A library that provides symmetric memory."""

    def check_available(self) -> None:
        """Raise EPUnavailableError if this process cannot use the library."""

    def check_sharing(self, ranks_per_gpu: Sequence[int]) -> None:
        """Raise EPConfigError if the library cannot start with so many ranks on each GPU."""

    def is_shared(self, comm: Communicator) -> bool:
        """Return whether ranks outside of `comm` have to allocate at the same time. Collective; the answers of ranks may differ."""

    def allocate(
        self,
        comm: Communicator,
        num_bytes: int,
        timeout_s: float,
        ranks_per_node: int | None = None,
        network: NetworkOptions | None = None,
    ) -> SymmetricMemory:
        """Allocate a region. Collective.

        Args:
            comm: The ranks of the Buffer.
            num_bytes: Size on each rank.
            timeout_s: The limit for ranks outside of `comm` that have to allocate too.
            ranks_per_node: Consecutive ranks that must reach each other directly; default: all of `comm`.
            network: Options for the network, for the first Buffer of a process.
        """
