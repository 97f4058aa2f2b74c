"""The choice of the transport between the nodes of a Buffer: NVSHMEM, or a relay over NIXL or MPI. All provide symmetric memory.

Symmetric memory is a region of equal size on every rank, which the GPUs of the other ranks read and write. Two Protocols name what the
CUDA backend needs of a library that provides such memory. `nvshmem`, `heap`, `networked_heap` and `relay_memory` implement them, and
`provider` chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .. import _env
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..comm.nixl_traffic import nixl_objection
from ..comm.timed_collectives import host_identity
from ..errors import EPPeerError, EPUnavailableError
from ..network import Choice, NetworkOptions
from .nics import list_nics, nvshmem_objection

_log = logging.getLogger("deepep_rt")

_MPI_REMEDY = "start the program with mpirun, pass an mpi4py communicator, and let mpi4py start MPI with MPI_THREAD_MULTIPLE"
_NIXL_REMEDY = "Install nixl-cu12, or nixl-cu13 with CUDA 13, on every host"
_warned: set[str] = set()


class RankFacts(NamedTuple):
    """What a rank finds on its host."""

    host: str  # its identity, which begins with its name
    no_nic: str  # the reason why NVSHMEM cannot send through a NIC; empty if it can
    no_mpi: str  # the reason why a relay cannot send over the communicator; empty if it can
    no_nixl: str  # the reason why a relay cannot send with NIXL; empty if it can
    wish: str = ""  # the setting by which the user chose a transport of NVSHMEM; empty if there is none


def choose_transport(transport: str, facts: Sequence[RankFacts]) -> Choice:
    """Choose "nvshmem", "nixl", "mpi" or "wire", with the reason. All ranks get the same result from the same facts.

    Between the GPUs of one host, NVSHMEM needs no NIC. Raise EPUnavailableError if the requested transport, or with "auto" any transport,
    cannot work.
    """
    is_one_host, wish = len({fact.host for fact in facts}) == 1, _first(facts, "wish")
    no_nic = "" if is_one_host or wish else _first(facts, "no_nic")
    no_nixl, no_mpi = _first(facts, "no_nixl"), _first(facts, "no_mpi")
    if transport == "nvshmem":
        if no_nic:
            raise EPUnavailableError(
                f"transport='nvshmem', but {no_nic}; expected a NIC that NVSHMEM can use on every host. Pass transport='nixl' or "
                f"transport='mpi', or name NVSHMEM's own transport with nvshmem_remote_transport."
            )
        return Choice("nvshmem", "transport='nvshmem' was passed")
    if transport == "nixl":
        if no_nixl:
            raise EPUnavailableError(f"transport='nixl', but {no_nixl}; expected NIXL for the relay. {_NIXL_REMEDY}.")
        return Choice("nixl", "transport='nixl' was passed")
    if transport == "mpi":
        if no_mpi:
            raise EPUnavailableError(
                f"transport='mpi', but {no_mpi}; expected MPI for the relay. Pass transport='nixl', or {_MPI_REMEDY}."
            )
        return Choice("mpi", "transport='mpi' was passed")
    if transport == "wire":
        if not is_one_host:
            raise EPUnavailableError(
                "transport='wire' is for tests and benches in one host, and the ranks are on several; expected all ranks on one host. Pass "
                "another transport."
            )
        return Choice("wire", "transport='wire' was passed")
    if not no_nic:
        found = "all ranks are on one host" if is_one_host else "every host has a NIC that NVSHMEM can use"
        return Choice("nvshmem", wish or found)
    if not no_nixl:
        return Choice("nixl", no_nic)
    if not no_mpi:
        return Choice("mpi", f"{no_nic}, and {no_nixl}")
    raise EPUnavailableError(
        f"transport='auto', but no transport can work: {no_nic}, {no_nixl}, and {no_mpi}; expected a NIC for NVSHMEM on every host, NIXL, "
        f"or MPI. {_NIXL_REMEDY}, or {_MPI_REMEDY}."
    )


def _first(facts: Sequence[RankFacts], name: str) -> str:
    """Return the first text of this name that is not empty, with its rank and host; otherwise an empty text."""
    found = ((rank, fact.host.partition(" ")[0], getattr(fact, name)) for rank, fact in enumerate(facts))
    return next((f"rank {rank} on {host} has {text}" for rank, host, text in found if text), "")


def find_facts(comm: Communicator, network: NetworkOptions) -> RankFacts:
    """Return what this rank finds."""
    remote = _env.nvshmem_transport() or network.nvshmem_remote_transport or ""
    return facts_of(host_identity(), remote, list_nics(), comm.relay_objection, nixl_objection())


def facts_of(host: str, remote: str, nics: Sequence[Mapping[str, Any]], no_mpi: str, no_nixl: str) -> RankFacts:
    """Make the facts of a rank from its `list_nics`. `remote` is the transport of NVSHMEM that the user chose, or an empty text."""
    setting = f"NVSHMEM_REMOTE_TRANSPORT={remote}"
    wish, no_nic = (setting, "") if remote not in ("", "none") else ("", setting if remote else nvshmem_objection(nics))
    return RankFacts(host, no_nic, no_mpi, no_nixl, wish)


def agree_on_transport(comm: Communicator, network: NetworkOptions | None) -> Choice:
    """Choose the transport of a Buffer with several nodes. Collective. Raise EPUnavailableError on every rank, if no transport can work."""
    network = network or NetworkOptions()
    facts = [RankFacts(*found) for found in comm.allgather(tuple(find_facts(comm, network)))]
    choice = choose_transport(network.transport, facts)
    if choice.name != "nvshmem" and network.transport == "auto" and comm.Get_rank() == 0 and choice.reason not in _warned:
        _warned.add(choice.reason)
        _log.warning("%s carries the rows between nodes, and not NVSHMEM, because %s", choice.name.upper(), choice.reason)
    return choice


@dataclass(frozen=True)
class MemoryRequest:
    """A region of symmetric memory that a Buffer asks for. All ranks ask for the same.

    Args:
        num_bytes: Size on each rank.
        timeout_s: The limit for ranks outside of the Buffer that have to allocate too.
        ranks_per_node: Consecutive ranks that must reach each other directly; default: all ranks of the Buffer.
        network: Options for the network, for the first Buffer of a process.
        near_bytes: The first part of the region, which ranks of a node address; default: all of it.
        network_start: The offset from which on a network carries the region; None: nowhere. Both parts have some bytes in common.
        num_slots: With slots, their number. A region has addresses for each; the numbers of `comm` are the slots that have a process.
    """

    num_bytes: int
    timeout_s: float
    ranks_per_node: int | None = None
    network: NetworkOptions | None = None
    near_bytes: int | None = None
    network_start: int | None = None
    num_slots: int | None = None


class VirtualMemory(Protocol):
    """The part of a region that can sleep, wake, grow and shrink at its addresses; see `heap.HeapMemory`."""

    @property
    def is_mapped(self) -> bool:
        """Whether it has memory: it does not sleep."""

    @property
    def can_grow(self) -> bool:
        """Whether it can grow."""

    def grow(self, num_bytes: int, timeout_s: float, heard: Callable[[], EPPeerError | None]) -> tuple[int, int]:
        """Add memory of this rank behind it. Return its offset in the region, and its bytes."""

    def shrink(self, offset: int, timeout_s: float) -> None:
        """Give such memory up."""

    def sleep(self) -> None:
        """Give up the memory of all ranks."""

    def wake(self, comm: Communicator, timeout_s: float) -> None:
        """Take fresh memory at the same addresses. Collective."""

    def replace(self, comm: Communicator, timeout_s: float) -> None:
        """Take fresh memory at the same addresses, with other members. Collective over them. What others still write to stays theirs."""

    def free(self) -> None:
        """Free it for good, without the other ranks. A second call does nothing."""


class SymmetricMemory(Protocol):
    """One region of symmetric memory, as one rank of a Buffer sees it."""

    @property
    def ptr(self) -> int:
        """Address of this rank's own region."""

    @property
    def peers(self) -> Sequence[int]:
        """Address of each rank's region, for this rank's GPU: `ptr` for its own; 0 if the GPU cannot reach the rank directly."""

    @property
    def network_ids(self) -> Sequence[int]:
        """Number of each rank in the library's functions for networks, which kernels call for ranks out of direct reach."""

    @property
    def is_local(self) -> bool:
        """Whether a rank may free its region while other ranks still use theirs, and write to this one."""

    @property
    def heap(self) -> VirtualMemory | None:
        """The part of the region that can sleep, wake, grow and shrink at its addresses; None if there is none."""

    @property
    def network_base(self) -> int:
        """Address of offset 0 of the region, for offsets from `MemoryRequest.network_start` on."""

    @property
    def network_peers(self) -> Sequence[int]:
        """The same address in the region of each rank, for this rank's GPU; 0 if the GPU cannot reach it. Empty without a network."""

    @property
    def way(self) -> str:
        """Who provides the region, or how ranks pass it to each other; see `provider.describe_ways`."""

    @property
    def consensus(self) -> Consensus | None:
        """Agreement with ranks outside of the Buffer that allocated the region too; None if there are none."""

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks that allocated the region free it now. Collective.

        `is_ok` says whether the ranks of the Buffer agreed to free it. After `timeout_s` a silent rank counts as lost.
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

    def allocate(self, comm: Communicator, request: MemoryRequest) -> SymmetricMemory:
        """Allocate a region over `comm`, the ranks of the Buffer. Collective."""
