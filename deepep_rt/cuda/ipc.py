"""Ordinary memory of the CUDA driver that other processes open ("cudaIpc"). The driver chooses its address in each process."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from .driver import ok

_HANDLE_BYTES = 64


def allocate(num_bytes: int) -> int:
    """Allocate memory. Others see up to 2 MiB around it, unless its size is a multiple of that."""
    return int(ok(driver.cuMemAlloc(num_bytes)))


def free(address: int) -> None:
    """Free memory. All other processes must have closed it."""
    driver.cuMemFree(address)


def export(address: int) -> bytes:
    """Return the bytes by which other processes open memory."""
    handle = ok(driver.cuIpcGetMemHandle(address))
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def open_from(data: bytes) -> int:
    """Open memory of another process. Raise EPUnavailableError if this GPU cannot reach it."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)  # bindings of CUDA 12 have no field for it
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(ok(driver.cuIpcOpenMemHandle(handle, int(flags))))


def close(address: int) -> None:
    """Close memory of another process. No work of this GPU may use it any more."""
    driver.cuIpcCloseMemHandle(address)
