"""Arrays without a library: a `View` is a pointer with a shape, a dtype and a device.

A `Framework` converts a library's arrays to Views, and Views to its arrays. The one here serves every library that supports DLPack.
`frameworks` has others for the known libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import EPInputError, EPUnavailableError
from . import dlpack
from .dtypes import BY_CODE, DTYPES

HOST = -1
"""Device number of ordinary host memory."""


class StreamDependency(Protocol):
    """Work of a stream that a consumer has to wait for."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def make_wait(self, consumer: int) -> None:
        """Make the stream `consumer` wait for the work."""


@dataclass(slots=True, repr=False)  # not frozen: each call makes several, and freezing triples the time
class View:
    """A row-major array: address, shape, dtype name, device (GPU ordinal or `HOST`), and the owner of the memory."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str
    device: int
    owner: Any
    framework: Framework
    dependency: StreamDependency | None = field(
        default=None, compare=False
    )  # the work that fills it, if consumers must wait for it

    def __repr__(self) -> str:
        where = "host memory" if self.device == HOST else f"GPU {self.device}"
        return f"View({self.dtype} {list(self.shape)} in {where})"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one entry of the first dimension."""
        shape, itemsize = self.shape, DTYPES[self.dtype].itemsize
        if len(shape) == 2:  # each call asks, and a slice of a shape takes as long as all the rest
            return itemsize * shape[1]
        return itemsize * math.prod(shape[1:])

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.shape[0] if self.shape else self.itemsize

    def to_framework(self) -> Any:
        """Return the array in the caller's framework, without a copy."""
        self.note_use()
        return self.framework.wrap(self)

    def note_use(self) -> None:
        """Note that the caller's current stream uses the memory."""
        if hasattr(self.owner, "add_framework"):
            self.owner.add_framework(self.framework, self.device)

    def capsule(self, dtype: str | None = None) -> Any:
        """Return a DLPack capsule. `dtype` replaces the dtype by one of the same size, for consumers that lack the original."""
        kind = DTYPES[dtype or self.dtype]
        return dlpack.capsule(self.ptr, self.shape, kind.code, kind.bits, self.__dlpack_device__(), self.owner)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        consumer = 0 if stream in (None, 1) else stream  # DLPack: 1 is the legacy default stream, -1 asks for no order
        if self.dependency is not None and consumer not in (-1, self.dependency.stream):
            self.dependency.make_wait(consumer)
            if hasattr(self.owner, "add_stream"):
                self.owner.add_stream(consumer)
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self.device == HOST else (dlpack.CUDA, self.device)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, for host memory. It shows bytes, because NumPy lacks some dtypes; the caller sets the dtype."""
        if self.device != HOST:
            raise AttributeError("__array_interface__: this array is in GPU memory")
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False)}


AddressOf = Callable[[Any], int | None]
"""Returns the address of an array of one form, a multiple of `FORM_ALIGNMENT`. None for every other array, and for one without elements.

It may raise anything that the array's library raises.
"""

FORM_ALIGNMENT = 16
"""Arrays with a form start at a multiple of it, so that no kernel refuses them."""


class Framework:
    """Conversion between one library's arrays and Views. This base class uses DLPack, for libraries without a class of their own."""

    name = "dlpack"

    def view(self, array: Any, name: str, stream: int | None) -> View:
        """Return a row-major array, the argument `name` of a call, as a View without a copy.

        `stream` will read the array. JAX and plain DLPack make it wait for the work that fills the array. Raise EPInputError if the dtype
        or the device is not supported, or the array is not contiguous.
        """
        device_type, device_id = array.__dlpack_device__()
        on_gpu = device_type in (dlpack.CUDA, dlpack.CUDA_MANAGED)
        if not on_gpu and device_type not in (dlpack.CPU, dlpack.CUDA_HOST):
            raise EPInputError(
                f"{name}: DLPack device type {int(device_type)}; expected host memory or a CUDA GPU's. Copy the array there first."
            )
        capsule = array.__dlpack__(stream=_dlpack_stream(stream)) if on_gpu else array.__dlpack__()
        ptr, shape, strides, code, bits, _ = dlpack.parse(capsule)
        kind = BY_CODE.get((code, bits))
        if kind is None:
            raise EPInputError(
                f"{name}: DLPack type code {code} with {bits} bits; expected one of {', '.join(DTYPES)}. Pass a uint8 view."
            )
        if strides is not None and not _row_major(shape, strides):
            raise not_contiguous(name)
        return View(ptr, shape, kind.name, device_id if on_gpu else HOST, (array, capsule), self)

    def form(self, array: Any) -> AddressOf | None:
        """Return a function that recognises arrays whose Views differ from this array's at most in their address and their owner. It keeps
        no array. None: `view` has to look at each array, or the library does not tell its current stream.
        """
        return None

    def wrap(self, view: View) -> Any:
        """Return a View as an array of the library."""
        return view

    def current_stream(self, device: int) -> int | None:
        """Return the caller's current stream; None if the library does not provide it."""
        return None

    def is_writable(self, array: Any) -> bool:
        """Return whether an array may be written to. True if the library does not provide this."""
        return True


def host_bytes(view: View) -> Any:
    """Return the memory of a host View as a flat NumPy array of bytes, without a copy."""
    import numpy as np

    if view.device != HOST:
        raise EPUnavailableError(
            f"device={view.device}; expected an array in host memory, but this one is in GPU memory. Copy it first."
        )
    return np.asarray(view) if view.nbytes else np.empty(0, np.uint8)


def _dlpack_stream(stream: int | None) -> int | None:
    return 1 if stream == 0 else stream


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True  # an array without elements has no meaningful strides; NumPy sets them to 0
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def not_contiguous(name: str) -> EPInputError:
    """Make the error for an array with gaps."""
    return EPInputError(f"{name}: rows must be contiguous (row-major without gaps). Call .contiguous() or make a copy first.")
