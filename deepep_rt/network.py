"""Settings of the network between nodes: the transport, and what NVSHMEM's own transports read from the environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._checks import argument_error, choice, flag, whole_number
from .errors import EPConfigError

TRANSPORTS = ("auto", "nvshmem", "nixl", "mpi", "wire")
"""Values of `NetworkOptions.transport`."""

REMOTE_TRANSPORTS = ("ibrc", "ibdevx", "gpunetio", "ucx", "libfabric", "none")
"""Values of NVSHMEM_REMOTE_TRANSPORT in NVSHMEM 3.8. Version 3.7 added gpunetio."""

_PORT = re.compile(r"(?![^:]*[,^])[!-9;-~]+:[0-9]{1,3}")
_INTERFACE = re.compile(r"[!-~]+")  # other characters cannot be in the environment, or are in no name
_PER_HOST = ("nics", "bootstrap_interface")  # names of devices, which may differ between hosts


class Choice(NamedTuple):
    """A choice that the library made, and the reason in words."""

    name: str
    reason: str


@dataclass(frozen=True)
class NetworkOptions:
    """Settings of the network between the nodes of a Buffer on GPUs.

    All options but `transport` and those of the wire are NVSHMEM's. They take effect when NVSHMEM starts, with the first Buffer of the
    process. If such an option is None, NVSHMEM uses its default. If the user has set the environment variable of an option, the variable
    wins. The user can set any other `NVSHMEM_*` variable too. `docs/several-nodes.md` tells when to change which option.

    Args:
        transport: "nvshmem": the GPU sends with NVSHMEM, which needs a NIC, or all ranks on one host. "nixl": a thread of the host sends
            with NIXL, over RDMA or TCP; it needs no MPI. "mpi": a thread of the host sends with MPI, over any network. "auto": NVSHMEM if
            every host has a NIC that it can use, or if all ranks are on one host; otherwise NIXL if all ranks have it; otherwise MPI.
            "wire": for tests and benches with all ranks on one host. A kernel on 8 SMs moves rows between declared nodes as slowly as a
            NIC would. "auto" never chooses it.
        nvshmem_remote_transport: NVSHMEM's transport over the network: "ibrc" (its default), "ibdevx", "gpunetio", "ucx", "libfabric" or
            "none". Default with all ranks on one host: "none". Sets `NVSHMEM_REMOTE_TRANSPORT`.
        ibgda: Let the GPU write to a ConnectX NIC (InfiniBand or RoCE) without the CPU. The host still sends over
            `nvshmem_remote_transport`. NVSHMEM's default: no. Sets `NVSHMEM_IB_ENABLE_IBGDA`.
        service_level: InfiniBand service level, or RoCE priority, 0 to 15. NVSHMEM's default: 0. Sets `NVSHMEM_IB_SL`.
        connections_per_peer: RC queue pairs that IBGDA opens to each peer and distributes over thread blocks. With 0, it uses DC queue
            pairs. NVSHMEM's default: 2. Sets `NVSHMEM_IBGDA_NUM_RC_PER_PE`.
        queue_depth: Entries of a queue pair, 128 to 32768, rounded up to a power of two. A sender waits while the queue is full. NVSHMEM's
            default: 1024. Sets `NVSHMEM_QP_DEPTH`.
        nics: NIC port of each rank of a host, in rank order, as "name:port". If there are fewer ports than ranks, they are assigned in
            turn. Default: the NIC next to the GPU. Sets `NVSHMEM_HCA_PE_MAPPING` and `NVSHMEM_ENABLE_NIC_PE_MAPPING`.
        bootstrap_interface: Network interface over which the ranks exchange addresses when NVSHMEM starts. It carries no data. Sets
            `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME`.
        wire_bandwidth: GB/s that each rank can send over the wire, a whole number from 1 to 1000.
        wire_latency: Microseconds that a message takes besides its bytes, a whole number from 0 to 1000. Single messages take up
            to an eighth more or less.

    Raises:
        EPConfigError: if a value is out of range.

    Example:
        >>> NetworkOptions(ibgda=True, service_level=3).environment()
        {'NVSHMEM_IB_ENABLE_IBGDA': '1', 'NVSHMEM_IB_SL': '3'}
    """

    transport: str = "auto"
    nvshmem_remote_transport: str | None = None
    ibgda: bool | None = None
    service_level: int | None = None
    connections_per_peer: int | None = None
    queue_depth: int | None = None
    nics: Sequence[str] | None = None
    bootstrap_interface: str | None = None
    wire_bandwidth: int = 50
    wire_latency: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.transport, str) and self.transport in REMOTE_TRANSPORTS:  # its values in earlier versions
            remedy = f"Pass nvshmem_remote_transport={self.transport!r} to choose NVSHMEM's own transport."
            raise argument_error(self.transport, "transport", " or ".join(map(repr, TRANSPORTS)), remedy, EPConfigError)
        choice(self.transport, "transport", TRANSPORTS, error=EPConfigError)
        if self.nvshmem_remote_transport is not None:
            choice(self.nvshmem_remote_transport, "nvshmem_remote_transport", REMOTE_TRANSPORTS, error=EPConfigError)
        if self.ibgda is not None:
            self._set("ibgda", flag(self.ibgda, "ibgda", error=EPConfigError))
        for name, least, most in (
            ("service_level", 0, 15),  # four bits of a packet's header
            ("connections_per_peer", 0, 1 << 10),  # NVSHMEM has no limit, but each one uses memory of the GPU and of the NIC
            ("queue_depth", 128, 1 << 15),  # NVSHMEMI_IBGDA_MIN_QP_DEPTH, NVSHMEMI_IBGDA_MAX_QP_DEPTH
        ):
            if (value := getattr(self, name)) is not None:
                self._set(name, whole_number(value, name, least, most, error=EPConfigError))
        for name, least in (("wire_bandwidth", 1), ("wire_latency", 0)):
            self._set(name, whole_number(getattr(self, name), name, least, 1000, error=EPConfigError))
        is_list = isinstance(self.nics, Sequence) and not isinstance(self.nics, str)
        if self.nics is not None and not (is_list and self.nics and all(map(_is_port, self.nics))):
            expected = "names with a port, such as ['mlx5_0:1', 'mlx5_1:1']"
            raise argument_error(self.nics, "nics", expected, "Pass a list of them, or None.", EPConfigError)
        interface = self.bootstrap_interface
        if interface is not None and not (isinstance(interface, str) and _INTERFACE.fullmatch(interface)):
            raise argument_error(interface, "bootstrap_interface", "a name such as 'eth0'", "Pass one, or None.", EPConfigError)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def environment(self) -> dict[str, str]:
        """Return the options that are set, as environment variables of NVSHMEM.

        Returns:
            Values by name of the variable, without those of options that are None.

        Example:
            >>> NetworkOptions(nvshmem_remote_transport="none").environment()
            {'NVSHMEM_REMOTE_TRANSPORT': 'none'}
        """
        values: dict[str, Any] = {
            "NVSHMEM_REMOTE_TRANSPORT": self.nvshmem_remote_transport,
            "NVSHMEM_IB_ENABLE_IBGDA": None if self.ibgda is None else int(self.ibgda),
            "NVSHMEM_IB_SL": self.service_level,
            "NVSHMEM_IBGDA_NUM_RC_PER_PE": self.connections_per_peer,
            "NVSHMEM_QP_DEPTH": self.queue_depth,
            "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": self.bootstrap_interface,
        }
        if self.nics is not None:
            values["NVSHMEM_ENABLE_NIC_PE_MAPPING"] = 1  # without it, NVSHMEM ignores the list
            values["NVSHMEM_HCA_PE_MAPPING"] = ",".join(f"{nic}:1" for nic in self.nics)  # name:port:ranks
        return {name: str(value) for name, value in values.items() if value is not None}

    def common(self) -> dict[str, Any]:
        """Return the options that all ranks must agree on, because both ends of a connection need the same settings.

        Returns:
            Values by name of the option, without `nics` and `bootstrap_interface`.

        Example:
            >>> NetworkOptions(service_level=3).common()["service_level"]
            3
        """
        return {name: value for name, value in vars(self).items() if name not in _PER_HOST}


def _is_port(nic: object) -> bool:
    return isinstance(nic, str) and _PORT.fullmatch(nic) is not None
