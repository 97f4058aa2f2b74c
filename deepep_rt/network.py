"""Settings of the network between hosts. NVSHMEM's transports carry what crosses it, and take their settings from the environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._checks import argument_error, choice, flag, whole_number
from .errors import EPConfigError

TRANSPORTS = ("ibrc", "ibdevx", "gpunetio", "ucx", "libfabric", "none")
"""What NVSHMEM_REMOTE_TRANSPORT may be (NVSHMEM 3.8; gpunetio came with 3.7)."""

_PER_HOST = ("nics", "bootstrap_interface")  # names that may differ between hosts


@dataclass(frozen=True)
class NetworkOptions:
    """How NVSHMEM reaches the ranks on other hosts. They take effect when NVSHMEM starts: with the first Buffer of the process.

    What is None stays as NVSHMEM has it. An environment variable of the user's own wins over the option that stands for it, and any other
    `NVSHMEM_*` variable can be set that way. `docs/several-nodes.md` says when to change what.

    Args:
        transport: What NVSHMEM sends over a network with: "ibrc" (its default), "ibdevx", "gpunetio", "ucx", "libfabric" or "none".
            Default with all ranks on one host: "none". Sets `NVSHMEM_REMOTE_TRANSPORT`.
        ibgda: Let the GPU itself write to a ConnectX NIC (InfiniBand or RoCE), past the CPU; `transport` stays in use for what the host
            sends. NVSHMEM's default: no. Sets `NVSHMEM_IB_ENABLE_IBGDA`.
        service_level: InfiniBand service level, or RoCE priority, 0 to 15; NVSHMEM's default: 0. Sets `NVSHMEM_IB_SL`.
        connections_per_peer: Connections (RC queue pairs) to each peer that IBGDA opens and spreads thread blocks over; 0: none, it
            uses DC queue pairs. NVSHMEM's default: 2. Sets `NVSHMEM_IBGDA_NUM_RC_PER_PE`.
        queue_depth: Entries of a queue pair, 128 to 32768, rounded up to a power of two; a sender that finds it full waits. NVSHMEM's
            default: 1024. Sets `NVSHMEM_QP_DEPTH`.
        nics: NIC port of each rank of a host, in rank order, as "name:port" (with fewer of them, ranks take turns). Default: the NIC next
            to the GPU. Sets `NVSHMEM_HCA_PE_MAPPING` and `NVSHMEM_ENABLE_NIC_PE_MAPPING`.
        bootstrap_interface: Network interface through which the ranks find each other when NVSHMEM starts; not for data. Sets
            `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME`.

    Raises:
        EPConfigError: if a value is out of range.

    Example:
        >>> NetworkOptions(ibgda=True, service_level=3).environment()
        {'NVSHMEM_IB_ENABLE_IBGDA': '1', 'NVSHMEM_IB_SL': '3'}
    """

    transport: str | None = None
    ibgda: bool | None = None
    service_level: int | None = None
    connections_per_peer: int | None = None
    queue_depth: int | None = None
    nics: Sequence[str] | None = None
    bootstrap_interface: str | None = None

    def __post_init__(self) -> None:
        if self.transport is not None:
            choice(self.transport, "transport", TRANSPORTS, error=EPConfigError)
        if self.ibgda is not None:
            self._set("ibgda", flag(self.ibgda, "ibgda", error=EPConfigError))
        for name, least, most in (
            ("service_level", 0, 15),  # four bits of a packet's header
            ("connections_per_peer", 0, 1 << 10),  # NVSHMEM sets no limit; each one takes memory of the GPU and of the NIC
            ("queue_depth", 128, 1 << 15),  # NVSHMEMI_IBGDA_MIN_QP_DEPTH, NVSHMEMI_IBGDA_MAX_QP_DEPTH
        ):
            if (value := getattr(self, name)) is not None:
                self._set(name, whole_number(value, name, least, most, error=EPConfigError))
        is_list = isinstance(self.nics, Sequence) and not isinstance(self.nics, str)
        if self.nics is not None and not (is_list and self.nics and all(map(_is_port, self.nics))):
            expected = "names with a port, such as ['mlx5_0:1', 'mlx5_1:1']"
            raise argument_error(self.nics, "nics", expected, "Pass a list of them, or None.", EPConfigError)
        interface = self.bootstrap_interface
        if interface is not None and not (isinstance(interface, str) and interface):
            raise argument_error(interface, "bootstrap_interface", "a name such as 'eth0'", "Pass one, or None.", EPConfigError)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # it is frozen

    def environment(self) -> dict[str, str]:
        """The options that are set, as the variables that NVSHMEM reads.

        Returns:
            Values by name of the variable; what is None is not there.

        Example:
            >>> NetworkOptions(transport="none").environment()
            {'NVSHMEM_REMOTE_TRANSPORT': 'none'}
        """
        values: dict[str, Any] = {
            "NVSHMEM_REMOTE_TRANSPORT": self.transport,
            "NVSHMEM_IB_ENABLE_IBGDA": None if self.ibgda is None else int(self.ibgda),
            "NVSHMEM_IB_SL": self.service_level,
            "NVSHMEM_IBGDA_NUM_RC_PER_PE": self.connections_per_peer,
            "NVSHMEM_QP_DEPTH": self.queue_depth,
            "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": self.bootstrap_interface,
        }
        if self.nics is not None:
            values["NVSHMEM_ENABLE_NIC_PE_MAPPING"] = 1  # without it the list is not looked at
            values["NVSHMEM_HCA_PE_MAPPING"] = ",".join(f"{nic}:1" for nic in self.nics)  # name:port:ranks
        return {name: str(value) for name, value in values.items() if value is not None}

    def common(self) -> dict[str, Any]:
        """The options that all ranks have to agree on: both ends of a connection are made alike.

        Returns:
            Values by name of the option, without `nics` and `bootstrap_interface`.

        Example:
            >>> NetworkOptions(service_level=3).common()["service_level"]
            3
        """
        return {name: value for name, value in vars(self).items() if name not in _PER_HOST}


def _is_port(nic: object) -> bool:
    return isinstance(nic, str) and re.fullmatch(r"[^\s,:^]+:[0-9]+", nic) is not None
