"""The identity of a host, by which ranks find out which of them share it."""

from __future__ import annotations

import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return a text that all processes of a host share, and no others.

    Host names alone do not suffice, because two hosts may have the same. The second part is new with each start of the system.
    """
    return f"{platform.node()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"
