"""DLPack capsules in ctypes: make one of a View for another library, and read the one of an unknown library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    """DLTensor, the first member of a DLManagedTensor."""

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


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_Placeholder = ctypes.c_uint8 * 1


def capsule(ptr: int, shape: tuple[int, ...], code: int, bits: int, device: tuple[int, int], owner: Any) -> Any:
    """Make a DLPack capsule over row-major memory. It keeps `owner` alive until the consumer drops the array.

    The capsule is NumPy's for a placeholder array, with another address and type, because NumPy's deleter is written in C. A deleter in
    Python would lose a pending exception when a consumer drops the array, as `torch.utils.checkpoint` does.
    """
    placeholder: Any = _Placeholder()
    placeholder.owner = owner
    made = np.ndarray(shape, np.uint8, placeholder, strides=(0,) * len(shape)).__dlpack__()
    tensor = _Tensor.from_address(_pointer(id(made), _NAME))
    tensor.data = ptr
    tensor.device_type, tensor.device_id = device
    tensor.code, tensor.bits = code, bits
    tensor.strides = None
    return made


def address(capsule: Any) -> int:
    """Return only the pointer. This is faster than `parse`, for callers that know shape and type."""
    tensor = _Tensor.from_address(_pointer(id(capsule), _NAME))
    return (tensor.data or 0) + tensor.byte_offset


def parse(capsule: Any) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int, int, tuple[int, int]]:
    """Return pointer, shape, strides (in elements, or None), type code, bits and device of a producer's capsule.

    The capsule is not consumed. The memory is valid as long as the caller keeps the capsule.
    """
    tensor = _Tensor.from_address(_pointer(id(capsule), _NAME))
    shape = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)) if tensor.ndim else ()
    strides = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.strides)) if tensor.strides else None
    kind = tensor.code, tensor.bits * tensor.lanes, (tensor.device_type, tensor.device_id)
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, *kind
