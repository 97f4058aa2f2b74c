"""The DLPack structures in ctypes: how a View leaves for, and an unknown array arrives from, another library."""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA, CUDA_MANAGED = 1, 2, 13
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor, followed by room for its shape."""

    _fields_ = [
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extent", ctypes.c_int64 * 4),
    ]


_api = ctypes.pythonapi
_new = _api.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))

_exported: dict[int, tuple[_Managed, Any]] = {}  # what a consumer still holds: address -> (structure, owner)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    """The consumer is done with an array."""
    _exported.pop(address, None)


# The capsule is passed as a bare pointer: its reference count is already 0 here, and a py_object would revive it.
@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """A capsule died; if nobody consumed it, its array dies with it."""
    if _is_valid(capsule, _NAME):
        _exported.pop(_pointer(capsule, _NAME), None)


_delete_address = ctypes.cast(_delete, ctypes.c_void_p).value
_drop_address = ctypes.cast(_drop, ctypes.c_void_p).value
for _callback in (_delete, _drop):  # arrays of other libraries may outlive this module at interpreter exit
    _api.Py_IncRef(ctypes.py_object(_callback))


def capsule(ptr: int, shape: tuple[int, ...], code: int, bits: int, device: tuple[int, int], owner: Any) -> Any:
    """A DLPack capsule over row-major memory; `owner` is kept alive until the consumer drops the array."""
    managed = _Managed()
    tensor = managed.tensor
    tensor.data = ptr
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = code, bits, 1
    address = ctypes.addressof(managed)
    tensor.shape = address + _Managed.extent.offset
    managed.extent[: len(shape)] = shape
    managed.deleter = _delete_address
    _exported[address] = (managed, owner)
    return _new(address, _NAME, _drop_address)


def parse(capsule: Any) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, tuple[int, int]]:
    """Pointer, shape, strides (in elements, or None), type code, bits and device of a producer's capsule, which stays unused.

    The memory is valid as long as the caller keeps the capsule.
    """
    tensor = _Managed.from_address(_pointer(id(capsule), _NAME)).tensor
    shape = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)) if tensor.ndim else ()
    strides = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.strides)) if tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    return pointer, shape, strides, tensor.code, tensor.bits * tensor.lanes, (tensor.device_type, tensor.device_id)
