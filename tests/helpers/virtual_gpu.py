"""CUDA's virtual memory without a GPU, for real processes: physical memory is a memory file, a range of addresses is one without access.

References count as the driver's do: memory lives as long as any process has a descriptor or a mapping of it. `install` lets the library use
it. Arguments go through the classes of the real bindings.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from deepep_rt.cuda import driver, virtual_memory

UNIT = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED, _FIXED, _NORESERVE = ctypes.c_void_p(-1).value, 0x10, 0x4000
_OK, _INVALID = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_INVALID_VALUE
_NO_MEMORY, _NO_PATH = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, cuda.CUresult.CUDA_ERROR_INVALID_DEVICE


class VirtualGpu:
    """The calls of `cuda.bindings.driver` that `virtual_memory` makes. `num_bytes` is the memory of the GPU.

    `has_path` says whether it reaches other GPUs. `fail` names calls that fail from now on.
    """

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self.num_bytes, self.has_path, self.fail = num_bytes, True, set[str]()
        self._handles: dict[int, tuple[int, int, bool]] = {}  # descriptor, bytes, whether this process has created it
        self._ranges: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, bool]] = {}
        self._next = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda, name)  # types and enumerations

    @property
    def left(self) -> tuple[int, int, int]:
        """Handles, ranges and mappings that were not given up."""
        return len(self._handles), len(self._ranges), len(self._mapped)

    def cuDeviceGetAttribute(self, kind: Any, device: int) -> tuple:
        return _OK, 1

    def cuMemGetAllocationGranularity(self, properties: Any, flag: Any) -> tuple:
        assert isinstance(properties, cuda.CUmemAllocationProp)
        if "granularity" in self.fail:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return _OK, UNIT

    def cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> tuple:
        assert num_bytes % UNIT == 0, num_bytes
        assert properties.location.type == cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        if sum(size for size, own in self._mapped.values() if own) + num_bytes > self.num_bytes:
            return _NO_MEMORY, None
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, num_bytes)
        return _OK, self._handle(descriptor, num_bytes, True)

    def _handle(self, descriptor: int, num_bytes: int, own: bool) -> int:
        self._next += 1
        self._handles[self._next] = descriptor, num_bytes, own
        return self._next

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple:
        if "export" in self.fail:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        return _OK, os.dup(self._handles[handle][0])

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> tuple:
        if "import" in self.fail:
            return _INVALID, None
        return _OK, self._handle(os.dup(descriptor), os.fstat(descriptor).st_size, False)

    def cuMemRelease(self, handle: int) -> tuple:
        os.close(self._handles.pop(handle)[0])
        return (_OK,)

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, address: int, flags: int) -> tuple:
        if "reserve" in self.fail:
            return _NO_MEMORY, None
        found = _libc.mmap(None, num_bytes + alignment, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        assert found != _FAILED
        start = -(-found // alignment) * alignment
        _libc.munmap(found, start - found)
        _libc.munmap(start + num_bytes, found + alignment - start)
        self._ranges[start] = num_bytes
        return _OK, start

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple:
        assert not any(address <= at < address + num_bytes for at in self._mapped), "something is mapped there"
        assert self._ranges.pop(address) == num_bytes
        _libc.munmap(address, num_bytes)
        return (_OK,)

    def cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> tuple:
        descriptor, held, own = self._handles[handle]
        assert held == num_bytes, "a mapping is of the whole memory"
        assert address not in self._mapped
        assert any(at <= address and address + num_bytes <= at + size for at, size in self._ranges.items())
        assert _libc.mmap(address, num_bytes, 0, mmap.MAP_SHARED | _FIXED, descriptor, 0) != _FAILED
        self._mapped[address] = num_bytes, own
        return (_OK,)

    def cuMemSetAccess(self, address: int, num_bytes: int, access: list[Any], count: int) -> tuple:
        held, own = self._mapped[address]
        assert (held, count, len(access)) == (num_bytes, 1, 1)
        if not own and not self.has_path:
            return (_NO_PATH,)
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.PROT_READ | mmap.PROT_WRITE)
        return (_OK,)

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple:
        assert self._mapped.pop(address)[0] == num_bytes
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        assert _libc.mmap(address, num_bytes, 0, nothing, -1, 0) != _FAILED
        return (_OK,)


def install() -> VirtualGpu:
    """Let this process use such a GPU."""
    gpu: Any = VirtualGpu()
    virtual_memory.driver = gpu
    driver.current_device = lambda: 0
    return gpu


def words(address: int, num_bytes: int) -> np.ndarray:
    """Return memory as uint32."""
    return np.frombuffer((ctypes.c_uint32 * (num_bytes // 4)).from_address(address), np.uint32)
