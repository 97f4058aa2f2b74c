"""Report the network interfaces of a host and their addresses, and what the host's name resolves to. Send nothing."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from pathlib import Path
from typing import Any

_LOCAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "kube", "tun", "tap", "dummy")
"""Beginnings of the names of interfaces that do not lead to other hosts."""


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)

_IS_UP = 0x1


def interfaces(root: Path = Path("/")) -> list[dict[str, Any]]:
    """List the addresses of interfaces that may lead to other hosts and are up.

    Each has `name` (of the interface), `address` (with its prefix, such as 10.0.0.3/24) and `speed_mbit` (None: unknown).
    """
    found = []
    for name, address in sorted(_addresses()):
        if not name.startswith(_LOCAL):
            found.append({"name": name, "address": address, "speed_mbit": _speed(root / "sys/class/net" / name / "speed")})
    return found


def _addresses() -> set[tuple[str, str]]:
    """Ask the C library for the addresses of all interfaces that are up, without those of the link itself."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        return set()
    found, entry = set(), first
    while entry:
        each, entry = entry.contents, entry.contents.next
        if (
            each.flags & _IS_UP
            and each.address
            and each.netmask
            and each.address.contents.family in (socket.AF_INET, socket.AF_INET6)
        ):
            is_v4 = each.address.contents.family == socket.AF_INET
            # A port or flow number stands before the address: 2 bytes of IPv4, 6 of IPv6.
            begin, end = (2, 6) if is_v4 else (6, 22)
            raw, mask = (bytes(each_part.contents.data[begin:end]) for each_part in (each.address, each.netmask))
            address = ipaddress.ip_address(raw)
            if not (address.is_link_local or address.is_loopback):
                found.add((each.name.decode(errors="replace"), f"{address}/{int.from_bytes(mask, 'big').bit_count()}"))
    libc.freeifaddrs(first)
    return found


def _speed(path: Path) -> int | None:
    """Read the speed of an interface in Mb/s. The kernel says -1, or nothing, for virtual ones."""
    try:
        speed = int(path.read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def own_addresses(host: str) -> list[str]:
    """Return the addresses that a host's own name resolves to. Empty: it resolves to nothing."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []
