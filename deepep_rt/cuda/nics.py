"""The RDMA NICs of this host, from files of the kernel, and whether NVSHMEM can send through them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_AMAZON_NICS = "efa", "rdmap"  # starts of their names


def list_nics(root: Path = Path("/")) -> list[dict[str, Any]]:
    """List the RDMA NICs: name, type, ports, and whether this user may use them. `root` is the folder that holds `sys` and `dev`."""
    return [_nic(folder, root) for folder in sorted((root / "sys/class/infiniband").glob("*"))]


def _nic(folder: Path, root: Path) -> dict[str, Any]:
    ports = []
    for port in sorted((folder / "ports").glob("*")):
        state = read_text(port / "state").rpartition(":")[2].strip()
        ports.append(
            {"port": port.name, "state": state, "rate": read_text(port / "rate"), "link": read_text(port / "link_layer")}
        )
    verbs = [path.name for path in (folder / "device/infiniband_verbs").glob("uverbs*")]
    usable = all(os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in verbs)
    return {"name": folder.name, "type": read_text(folder / "hca_type"), "ports": ports, "usable": bool(verbs) and usable}


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel, or an empty text if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def is_up(nic: Mapping[str, Any]) -> bool:
    """Return whether this user may use a NIC, and a port of it is active."""
    return nic["usable"] and any(port["state"] == "ACTIVE" for port in nic["ports"])


def line_rate(nics: Sequence[Mapping[str, Any]]) -> float:
    """Return the bytes a second of the fastest active port of `list_nics`, or 0 if the kernel tells of none."""
    ports = [port for nic in nics if is_up(nic) for port in nic["ports"] if port["state"] == "ACTIVE"]
    found = [re.match(r"([\d.]+) Gb/sec", port["rate"]) for port in ports]
    return max((float(match[1]) * 1e9 / 8 for match in found if match), default=0.0)


def nvshmem_objection(nics: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason why NVSHMEM's default transport has no NIC among these of `list_nics`, or an empty text if it has one."""
    names = ", ".join(nic["name"] for nic in nics)
    if not nics:
        return "no RDMA NIC"
    if not any(nic["usable"] for nic in nics):
        return f"NICs that this user may not open in /dev/infiniband ({names})"
    if not any(map(is_up, nics)):
        return f"NICs without an active port ({names})"
    if all(nic["name"].startswith(_AMAZON_NICS) for nic in nics if is_up(nic)):
        return f"EFA NICs only ({names}), which NVSHMEM needs nvshmem_remote_transport='libfabric' for"
    return ""
