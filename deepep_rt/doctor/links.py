"""List the kinds of links between ranks, with the rates to expect of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkKind:
    """A kind of link. Rates are of one direction, in GB/s (1e9 bytes)."""

    name: str  # in options and tables
    gb_s: float  # line rate
    share: float  # the part of the line rate that large messages should reach
    us: float  # microseconds of a small message one way, which a healthy link stays below
    about: str  # the link, in words

    @property
    def expected_gb_s(self) -> float:
        """The rate that large messages should reach."""
        return self.gb_s * self.share


_ALL = (
    # GPU to GPU
    LinkKind("nvlink4", 450.0, 0.73, 3, "18 links of NVLink 4 (H100, H200); 339 GB/s measured between 8 H200s"),
    LinkKind("nvlink3", 300.0, 0.73, 3, "12 links of NVLink 3 (A100)"),
    LinkKind("nvlink5", 900.0, 0.73, 3, "18 links of NVLink 5 (B200)"),
    LinkKind("pcie4", 31.5, 0.75, 5, "PCIe 4.0, 16 lanes"),
    LinkKind("pcie5", 63.0, 0.75, 5, "PCIe 5.0, 16 lanes"),
    # host to host, a NIC
    LinkKind("ib-hdr", 25.0, 0.9, 4, "InfiniBand HDR, 200 Gb/s"),
    LinkKind("ib-ndr", 50.0, 0.9, 4, "InfiniBand NDR, 400 Gb/s"),
    LinkKind("ib-xdr", 100.0, 0.9, 4, "InfiniBand XDR, 800 Gb/s"),
    LinkKind("roce-100", 12.5, 0.88, 6, "RoCE, 100 Gb/s"),
    LinkKind("roce-200", 25.0, 0.88, 6, "RoCE, 200 Gb/s"),
    LinkKind("roce-400", 50.0, 0.88, 6, "RoCE, 400 Gb/s"),
    LinkKind("efa-100", 12.5, 0.8, 30, "AWS EFA, 100 Gb/s a NIC (p4d has 4)"),
    LinkKind("efa-200", 25.0, 0.8, 30, "AWS EFA, 200 Gb/s a NIC (p5e has 16)"),
    LinkKind("slingshot", 25.0, 0.85, 5, "HPE Slingshot 11, 200 Gb/s"),
    LinkKind("tcp-1", 0.125, 0.9, 100, "Ethernet, 1 Gb/s, TCP"),
    LinkKind("tcp-10", 1.25, 0.85, 60, "Ethernet, 10 Gb/s, TCP"),
    LinkKind("tcp-25", 3.125, 0.7, 60, "Ethernet, 25 Gb/s, TCP"),
    LinkKind("tcp-100", 12.5, 0.25, 60, "Ethernet, 100 Gb/s, TCP: one connection keeps a processor busy at 2 to 6 GB/s"),
    # processes of one host
    LinkKind("host-memory", 10.0, 0.2, 5, "shared memory between processes of a host, through MPI"),
)

LINK_KINDS = {kind.name: kind for kind in _ALL}

NIC_KINDS = {name: kind for name, kind in LINK_KINDS.items() if name.startswith(("ib-", "roce-", "efa-", "slingshot", "tcp-"))}
"""The kinds that connect hosts."""


def nic_kind(nic: str, link_layer: str, rate_gbit: float) -> LinkKind | None:
    """Find the kind of an RDMA NIC's port: the one with the nearest line rate, or None if the rate is unknown.

    `nic` is the name of the device, such as mlx5_0 or rdmap0s6. `link_layer` is "InfiniBand" or "Ethernet", as the kernel says. EFA says
    neither.

    Example:
        >>> nic_kind("mlx5_0", "InfiniBand", 400).name
        'ib-ndr'
    """
    family = {"InfiniBand": "ib-", "Ethernet": "roce-"}.get(link_layer, "efa-" if link_layer else "")
    if nic.startswith(("efa", "rdmap")):
        family = "efa-"
    if nic.startswith(("cxi", "hsn")):
        return LINK_KINDS["slingshot"]
    return _nearest(family, rate_gbit)


def tcp_kind(rate_gbit: float) -> LinkKind | None:
    """Find the kind of an Ethernet interface by its rate in Gb/s. None: the rate is unknown."""
    return _nearest("tcp-", rate_gbit)


def _nearest(family: str, rate_gbit: float) -> LinkKind | None:
    kinds = [kind for kind in _ALL if family and kind.name.startswith(family)]
    if not kinds or rate_gbit <= 0:
        return None
    return min(kinds, key=lambda kind: max(kind.gb_s * 8 / rate_gbit, rate_gbit / kind.gb_s / 8))
