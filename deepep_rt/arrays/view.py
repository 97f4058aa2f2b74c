"""Arrays without a library: a `View` is a pointer with a shape, a dtype and a device.

What a library's arrays look like as Views, and Views as its arrays, is said by a `Framework`: here for every library that speaks DLPack,
in `frameworks` for those that are known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import EPInputError, EPUnavailableError
from . import dlpack
from .dtypes import BY_CODE, DTYPES

HOST = -1
"""Device number of ordinary host memory."""


class Work(Protocol):
    """What a stream will have done."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def let_wait(self, consumer: int) -> None:
        """Make another stream wait for it."""


@dataclass(slots=True, repr=False)  # not frozen: several are made in each call, and that would triple the time
class View:
    """A row-major array: address, shape, dtype name, device (GPU ordinal or `HOST`), and whatever keeps the memory alive."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str
    device: int
    owner: Any
    framework: Framework
    work: Work | None = field(default=None, compare=False)  # what produces it, where the consumer has to be told

    def __repr__(self) -> str:
        where = "host memory" if self.device == HOST else f"GPU {self.device}"
        return f"View({self.dtype} {list(self.shape)} in {where})"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.shape[0] if self.shape else self.itemsize

    def to_framework(self) -> Any:
        """The array in the caller's framework, without a copy."""
        if hasattr(self.owner, "used_by"):
            self.owner.used_by(self.framework, self.device)
        return self.framework.wrap(self)

    def capsule(self, dtype: str | None = None) -> Any:
        """A DLPack capsule, optionally under another dtype of the same size, for consumers that lack this one."""
        kind = DTYPES[dtype or self.dtype]
        return dlpack.capsule(self.ptr, self.shape, kind.code, kind.bits, self.__dlpack_device__(), self.owner)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        consumer = 0 if stream in (None, 1) else stream  # so DLPack writes the legacy default stream, and -1 for none
        if self.work is not None and consumer not in (-1, self.work.stream):
            self.work.let_wait(consumer)
            if hasattr(self.owner, "used_on"):
                self.owner.used_on(consumer)
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self.device == HOST else (dlpack.CUDA, self.device)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's door (host memory only); exotic types go through as bytes and are viewed by the caller."""
        if self.device != HOST:
            raise AttributeError("__array_interface__: this array is in GPU memory")
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False)}


class Framework:
    """How one array library shows its arrays and takes ours. This base class speaks plain DLPack, for every other library."""

    name = "dlpack"

    def view(self, array: Any, what: str, stream: int | None) -> View:
        """Look at an argument of a call, without a copy.

        Args:
            array: A row-major array.
            what: The argument's name, for error messages.
            stream: The CUDA stream that will read it, for libraries that have to be told (JAX, plain DLPack): it waits for what fills it.

        Raises:
            EPInputError: if it is of an unsupported dtype or device, or not contiguous.
        """
        device_type, device_id = array.__dlpack_device__()
        on_gpu = device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED)
        if not on_gpu and device_type not in (dlpack.CPU, dlpack.CUDA_HOST):
            raise EPInputError(
                f"{what}: its memory is of DLPack's device type {int(device_type)}; expected host memory or a CUDA GPU's"
            )
        capsule = array.__dlpack__(stream=_dlpack_stream(stream)) if on_gpu else array.__dlpack__()
        ptr, shape, strides, code, bits, _ = dlpack.parse(capsule)
        kind = BY_CODE.get((code, bits))
        if kind is None:
            raise EPInputError(f"{what}: DLPack type code {code} with {bits} bits is not supported; pass a uint8 view of it")
        if strides is not None and not _row_major(shape, strides):
            raise not_contiguous(what)
        return View(ptr, shape, kind.name, device_id if on_gpu else HOST, (array, capsule), self)

    def wrap(self, view: View) -> Any:
        """Hand out one of our arrays."""
        return view

    def current_stream(self, device: int) -> int | None:
        """The stream that the caller works on now; None where the library does not tell."""
        return None

    def is_writable(self, array: Any) -> bool:
        """Whether it may be written to, as far as the library tells."""
        return True


def host_bytes(view: View) -> Any:
    """The memory of a host View as a flat NumPy array of bytes (no copy)."""
    import numpy as np

    if view.device != HOST:
        raise EPUnavailableError("host_bytes: this array is in GPU memory")
    return np.asarray(view) if view.nbytes else np.empty(0, np.uint8)


def _dlpack_stream(stream: int | None) -> int | None:
    return 1 if stream == 0 else stream


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True  # strides of nothing; NumPy makes them 0
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def not_contiguous(what: str) -> EPInputError:
    return EPInputError(f"{what}: rows must be contiguous (row-major without gaps); call .contiguous() or make a copy first")
