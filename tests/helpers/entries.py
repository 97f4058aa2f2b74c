"""Entries of the kernel cache, made without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepep_rt.jit.store import SUFFIX, CorruptEntry, Entry, KernelCache

KEY, OTHER = "ab" * 32, "cd" * 32


def entry(key: str = "ab" * 32, arch: str = "sm_90", code: bytes = b"code", **more: Any) -> Entry:
    """Make an entry with all the information of a compiled one; `more` replaces some of it."""
    figures = dict.fromkeys(("registers", "static_shared_bytes", "stack_bytes", "spill_stores", "spill_loads"), 10)
    info = {
        "kernel": "tiny",
        "arch": arch,
        "constants": {"kA": 1},
        "bytes": len(code),
        **figures,
        "dynamic_shared_bytes": 0,
        "nvshmem": False,
        "compile_seconds": 0.5,
        "created": "2026-11-23T12:00:00+00:00",
        "versions": {"deepep_rt": "1.0", "nvrtc": "12.9.86"},
    }
    return Entry(key, arch, code, {**info, **more})


def file_of(cache: KernelCache, key: str = KEY, arch: str = "sm_90") -> Path:
    """Return the path of an entry."""
    return cache.folder / arch / f"{key}{SUFFIX}"


def reason(cache: KernelCache) -> str:
    """Return why the only entry of a cache is corrupt."""
    (found,) = cache.entries()
    assert isinstance(found, CorruptEntry)
    return found.reason
