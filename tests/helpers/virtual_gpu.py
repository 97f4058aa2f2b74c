"""CUDA's virtual memory without a GPU, for real processes: physical memory is a memory file, a range of addresses is one without access.

References count as the driver's do: memory lives as long as any process has a descriptor or a mapping of it. `install` lets the library use
it. Arguments go through the classes of the real bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from deepep_rt.cuda import driver, ipc, virtual_memory

UNIT = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED, _FIXED, _NORESERVE = ctypes.c_void_p(-1).value, 0x10, 0x4000
_OK, _INVALID = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_INVALID_VALUE
_NOT_PERMITTED = cuda.CUresult.CUDA_ERROR_NOT_PERMITTED
_DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_NO_MEMORY, _NO_PATH = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, cuda.CUresult.CUDA_ERROR_INVALID_DEVICE


class VirtualGpu:
    """The calls of `cuda.bindings.driver` that `virtual_memory` makes. `num_bytes` is the memory of the GPU.

    `has_path` says whether it reaches other GPUs, and `has_fabric` whether the process may use a fabric: the attribute always says yes.
    `fail` names calls that fail from now on.
    """

    def __init__(self, num_bytes: int = 1 << 30) -> None:
        self.num_bytes, self.has_path, self.has_fabric, self.fail = num_bytes, True, False, set[str]()
        self.most_addresses = 1 << 60  # of one reservation
        self._handles: dict[int, tuple[int, int, bool]] = {}  # descriptor, bytes, whether this process has created it
        self._kinds: dict[int, Any] = {}  # of the handles that other processes can import
        self._shared: dict[int, int] = {}  # ordinary memory: address and descriptor
        self._ranges: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, bool]] = {}
        self._next = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda, name)  # types and enumerations

    @property
    def left(self) -> tuple[int, int, int]:
        """Handles, ranges and mappings that were not given up."""
        return len(self._handles), len(self._ranges), len(self._mapped)

    def cuDeviceTotalMem(self, device: int) -> tuple:
        return _OK, self.num_bytes

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
        if properties.requestedHandleTypes == _FABRIC and not self.has_fabric:
            return _NOT_PERMITTED, None
        if "create" in self.fail:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        if sum(size for size, own in self._mapped.values() if own) + num_bytes > self.num_bytes:
            return _NO_MEMORY, None
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, num_bytes)
        made = self._handle(descriptor, num_bytes, True)
        self._kinds[made] = properties.requestedHandleTypes
        return _OK, made

    def _handle(self, descriptor: int, num_bytes: int, own: bool) -> int:
        self._next += 1
        self._handles[self._next] = descriptor, num_bytes, own
        return self._next

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple:
        if "export" in self.fail:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        assert self._kinds[handle] == kind, "memory is exported as it was created for"
        if kind == _DESCRIPTOR:
            return _OK, os.dup(self._handles[handle][0])
        handle_of_fabric = cuda.CUmemFabricHandle()
        handle_of_fabric.data = _place_of(self._handles[handle][0])
        return _OK, handle_of_fabric

    def cuMemImportFromShareableHandle(self, handle: int, kind: Any) -> tuple:
        if "import" in self.fail:
            return _INVALID, None
        descriptor = os.dup(handle) if kind == _DESCRIPTOR else _open_place(ctypes.string_at(handle, 64))
        return _OK, self._handle(descriptor, os.fstat(descriptor).st_size, False)

    def cuMemAlloc(self, num_bytes: int) -> tuple:
        if sum(size for size, own in self._mapped.values() if own) + num_bytes > self.num_bytes:
            return _NO_MEMORY, None
        descriptor = os.memfd_create("gpu")
        os.ftruncate(descriptor, num_bytes)
        return _OK, self._open(descriptor, True)

    def cuMemFree(self, address: int) -> tuple:
        self._close(address)
        return (_OK,)

    def cuIpcGetMemHandle(self, address: int) -> tuple:
        if "ipc" in self.fail:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), _place_of(self._shared[address]), 64)
        return _OK, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple:
        assert flags == int(cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        if "open" in self.fail or not self.has_path:
            return cuda.CUresult.CUDA_ERROR_MAP_FAILED, None
        return _OK, self._open(_open_place(ctypes.string_at(handle.getPtr(), 64)), False)

    def cuIpcCloseMemHandle(self, address: int) -> tuple:
        self._close(address)
        return (_OK,)

    def _open(self, descriptor: int, own: bool) -> int:
        num_bytes = os.fstat(descriptor).st_size
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        assert address != _FAILED
        self._shared[address], self._mapped[address] = descriptor, (num_bytes, own)
        return address

    def _close(self, address: int) -> None:
        os.close(self._shared.pop(address))
        _libc.munmap(address, self._mapped.pop(address)[0])

    def cuMemRelease(self, handle: int) -> tuple:
        os.close(self._handles.pop(handle)[0])
        return (_OK,)

    def cuMemAddressReserve(self, num_bytes: int, alignment: int, address: int, flags: int) -> tuple:
        if "reserve" in self.fail or num_bytes > self.most_addresses:
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


def _place_of(descriptor: int) -> bytes:
    """Return 64 bytes by which other processes find a memory file while this process has it open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(64, b"\0")


def _open_place(place: bytes) -> int:
    return os.open(place.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)


def install() -> VirtualGpu:
    """Let this process use such a GPU."""
    gpu: Any = VirtualGpu()
    virtual_memory.driver = ipc.driver = gpu
    driver.current_device = lambda: 0
    driver.CurrentContext = driver.relaxed_capture_mode = contextlib.nullcontext  # type: ignore[assignment,misc]
    return gpu


def words(address: int, num_bytes: int) -> np.ndarray:
    """Return memory as uint32."""
    return np.frombuffer((ctypes.c_uint32 * (num_bytes // 4)).from_address(address), np.uint32)
