"""Virtual memory of the CUDA driver: physical memory, ranges of addresses, and mappings between them. Handles are plain integers.

Physical memory lives until its last mapping and handle are gone, also those of other processes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from ..errors import EPUnavailableError
from .driver import ok

_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_USUAL_GRANULARITY = 2 << 20


def granularity(device: int) -> int:
    """Return the number of bytes of which sizes and addresses should be multiples. GPUs without virtual memory have the usual one."""
    recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    try:
        return int(ok(driver.cuMemGetAllocationGranularity(_properties(device), recommended)))
    except EPUnavailableError:
        return _USUAL_GRANULARITY


def device_bytes(device: int) -> int:
    """Return the bytes of memory that a GPU has."""
    return int(ok(driver.cuDeviceTotalMem(device)))


def create(num_bytes: int, device: int, is_fabric: bool = False) -> int:
    """Create physical memory on a GPU, and return its handle. Raise EPOutOfMemoryError if there is too little.

    `is_fabric`: its exports are handles of a fabric of GPUs. The driver refuses that to processes without access to the fabric.
    """
    return int(ok(driver.cuMemCreate(num_bytes, _properties(device, _FABRIC if is_fabric else _DESCRIPTOR), 0)))


def export(memory: int, is_fabric: bool = False) -> int | bytes:
    """Return a file descriptor of physical memory, which the caller closes, or the bytes of its handle of a fabric."""
    if is_fabric:
        return bytes(ok(driver.cuMemExportToShareableHandle(memory, _FABRIC, 0)).data)
    return int(ok(driver.cuMemExportToShareableHandle(memory, _DESCRIPTOR, 0)))


def import_from(handle: int | bytes) -> int:
    """Return a handle of the physical memory that another process has exported."""
    if isinstance(handle, bytes):
        held = ctypes.create_string_buffer(handle, len(handle))
        return int(ok(driver.cuMemImportFromShareableHandle(ctypes.addressof(held), _FABRIC)))
    return int(ok(driver.cuMemImportFromShareableHandle(handle, _DESCRIPTOR)))


def release(memory: int) -> None:
    """Give up a handle. Mappings stay. As everything here that gives up something, it raises nothing: a lost context has lost it too."""
    driver.cuMemRelease(memory)


def reserve(num_bytes: int, alignment: int) -> int:
    """Reserve a range of addresses without memory."""
    return int(ok(driver.cuMemAddressReserve(num_bytes, alignment, 0, 0)))


def free_range(address: int, num_bytes: int) -> None:
    """Give up a range of addresses, where nothing is mapped."""
    driver.cuMemAddressFree(address, num_bytes)


def map_at(address: int, num_bytes: int, memory: int, device: int) -> None:
    """Map physical memory at an address, for reads and writes of one GPU. Raise EPUnavailableError if that GPU cannot reach it."""
    ok(driver.cuMemMap(address, num_bytes, 0, memory, 0))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    try:
        ok(driver.cuMemSetAccess(address, num_bytes, [access], 1))
    except BaseException:
        driver.cuMemUnmap(address, num_bytes)
        raise


def unmap(address: int, num_bytes: int) -> None:
    """Remove a mapping. No work of the GPU may use it any more."""
    driver.cuMemUnmap(address, num_bytes)


def _properties(device: int, handle_type: Any = _DESCRIPTOR) -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.requestedHandleTypes = handle_type
    return made
