"""Try whether processes can share virtual memory of a GPU: create it, pass its descriptor over a socket, import and map it.

It calls the driver's C library, as `gpus` does. Attributes of the driver do not decide: some report what the system then refuses.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p
from typing import Any

_PINNED = _DESCRIPTOR = _DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_..., CU_MEM_HANDLE_TYPE_POSIX_FILE_..., CU_MEM_LOCATION_TYPE_...
_READ_AND_WRITE = 3

Cuda = Callable[..., None]
"""Calls a function of the driver by its name, and raises an exception where it fails."""


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location", c_int),
        ("windows", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location_type", c_int), ("location", c_int), ("flags", c_int)]


def why_not_shared(cuda: Cuda, device: int) -> str:
    """Return why memory of a GPU cannot be shared, or an empty text. `device` is its handle. Nothing stays allocated."""
    try:
        with _context(cuda, device), ExitStack() as kept:
            _share(cuda, device, kept)
    except OSError as error:
        return f"a descriptor cannot be passed over a socket: {error}"
    except Exception as error:  # a function may be missing in an old driver, or fail
        return str(error)
    return ""


@contextlib.contextmanager
def _context(cuda: Cuda, device: int) -> Iterator[None]:
    context = c_void_p()
    cuda("cuDevicePrimaryCtxRetain", byref(context), device)
    try:
        cuda("cuCtxSetCurrent", context)
        yield
    finally:
        cuda("cuDevicePrimaryCtxRelease_v2", device)


def _share(cuda: Cuda, device: int, kept: ExitStack) -> None:
    asked = _Properties(_PINNED, _DESCRIPTOR, _DEVICE, device)
    unit, own, exported, imported, address = c_size_t(), c_ulonglong(), c_int(), c_ulonglong(), c_ulonglong()
    cuda("cuMemGetAllocationGranularity", byref(unit), byref(asked), 0)
    cuda("cuMemCreate", byref(own), unit, byref(asked), c_ulonglong(0))
    kept.callback(cuda, "cuMemRelease", own)
    cuda("cuMemExportToShareableHandle", byref(exported), own, _DESCRIPTOR, c_ulonglong(0))
    kept.callback(os.close, exported.value)
    passed = _pass(exported.value)
    kept.callback(os.close, passed)
    cuda("cuMemImportFromShareableHandle", byref(imported), c_void_p(passed), _DESCRIPTOR)
    kept.callback(cuda, "cuMemRelease", imported)
    cuda("cuMemAddressReserve", byref(address), unit, c_size_t(0), c_ulonglong(0), c_ulonglong(0))
    kept.callback(cuda, "cuMemAddressFree", address, unit)
    cuda("cuMemMap", address, unit, c_size_t(0), imported, c_ulonglong(0))
    kept.callback(cuda, "cuMemUnmap", address, unit)
    access = _Access(_DEVICE, device, _READ_AND_WRITE)
    cuda("cuMemSetAccess", address, unit, byref(access), c_size_t(1))


def _pass(descriptor: int) -> int:
    """Send a descriptor over a socket as ranks do, here to this process. Return the one that arrives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as own:
        own.bind(name := f"\0deepep_rt-doctor-{secrets.token_hex(8)}")
        rights: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        own.sendmsg([b"1"], rights, 0, name)
        _, received, _, _ = own.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
        found = array.array("i")
        for _, _, data in received:
            found.frombytes(data)
        if len(found) != 1:
            raise OSError("it did not arrive")
        return found[0]
