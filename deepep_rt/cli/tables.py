"""Make the tables of compiled kernels."""

from __future__ import annotations

from typing import Any

from rich.table import Table

WIDTH_OF_LOGS = 220
"""Columns that the table of the cache needs."""


_RIGHT = (
    *("registers", "shared", "stack", "spills", "bytes", "seconds", "calls/s", "sent GB/s", "received GB/s", "pool"),
    *("16-byte loads", "at once", "16-byte stores", "bulk loads", "bulk stores", "1 or 2 bytes", "instructions"),
)


def usage(info: dict[str, Any]) -> tuple[str, str, str, str]:
    """Format registers, shared memory (static + dynamic), stack and spills."""
    static, dynamic = info.get("static_shared_bytes"), info.get("dynamic_shared_bytes")
    shared = "-" if dynamic is None else f"{number(static)} + {dynamic:,}"
    stores, loads = info.get("spill_stores"), info.get("spill_loads")
    return (
        number(info.get("registers")),
        shared,
        number(info.get("stack_bytes")),
        "-" if stores is None or loads is None else f"{stores + loads:,}",
    )


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def title(kernel: str, *forms: str | None) -> str:
    """Name a kernel and what it is compiled for, such as its dtype."""
    named = ", ".join(filter(None, forms))
    return f"{kernel} ({named})" if named else kernel


def plural(number: int) -> str:
    return "kernel" if number == 1 else "kernels"


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in _RIGHT
        table.add_column(column, justify="right" if right else "left", no_wrap=column not in ("built with", "compiled for"))
    return table
