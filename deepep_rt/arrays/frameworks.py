"""Conversion between Views and the arrays of NumPy, CuPy, PyTorch and JAX, and handles of their streams and events.

No library is imported that the caller did not import. Results are Views over this library's memory. `View.to_framework()` returns them in
the caller's framework. The memory of a result lives as long as the caller's array, through `View.owner`. The driver crashes if a handle
outlives its stream or event.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .._checks import argument_error, is_int_in_range
from ..errors import EPError, EPInputError
from .dtypes import DTYPES
from .view import FORM_ALIGNMENT, HOST, AddressOf, Framework, View, not_contiguous

PER_THREAD = 2
"""CUDA's handle of the per-thread default stream, which CuPy can be configured to use."""

_MAX_HANDLE = (1 << 64) - 1  # handles are addresses


class StreamHandle(int):
    """A stream's handle that keeps the stream alive. Libraries destroy a stream with its last reference."""

    owner: Any

    @classmethod
    def of(cls, handle: int, owner: Any) -> StreamHandle:
        made = cls(handle)
        made.owner = owner
        return made


def of_stream(stream: Any) -> int:
    """Return the integer handle of a stream: of an integer, or of an object of PyTorch, CuPy or cuda.core."""
    if type(stream) is StreamHandle:
        return stream
    handle = _handle_of(stream, "cuda_stream", "event")
    if handle is None:
        raise argument_error(stream, "stream", "a stream of an array library, or its integer handle", "Pass one, or None.")
    return handle if isinstance(stream, int) else StreamHandle.of(handle, stream)


def of_event(event: Any) -> int:
    """Return the integer handle of an event of any library or of this one; 0 if it stands for no CUDA event."""
    handle = _handle_of(event, "cuda_event", "stream")
    if handle is None:
        raise argument_error(event, "previous_event", "an event of an array library, or its integer handle", "Pass one, or None.")
    return handle


def _handle_of(value: Any, attribute: str, other_kind: str) -> int | None:
    """Return the integer handle of an object; None for arrays, objects of the other kind, and objects without a handle.

    `attribute` is that of PyTorch's objects. Libraries use one attribute name for the handles of both kinds, so class names with
    `other_kind` in them are refused.
    """
    if is_int_in_range(value, 0, _MAX_HANDLE):
        return int(value)
    try:
        return _handle_of_object(value, attribute, other_kind)
    except Exception:  # an attribute with this name may hold anything
        return None


def _handle_of_object(value: Any, attribute: str, other_kind: str) -> int | None:
    class_names = [base.__name__.lower() for base in type(value).__mro__]
    if hasattr(value, "__dlpack__") or (any(other_kind in name for name in class_names) and not hasattr(value, attribute)):
        return None
    for name in (attribute, "ptr", "handle"):
        if hasattr(value, name):
            held = getattr(value, name)
            break
    else:
        if not any(name in ("custream", "cudastream_t", "cuevent", "cudaevent_t") for name in class_names):  # of cuda.bindings
            return None
        held = value
    handle = int(held or 0)
    return handle if 0 <= handle <= _MAX_HANDLE else None


class NumpyFramework(Framework):
    name = "numpy"

    def view(self, array: Any, name: str, stream: int | None) -> View:
        if not array.flags.c_contiguous:
            raise not_contiguous(name)
        return View(array.__array_interface__["data"][0], array.shape, _numpy_name(array.dtype, name), HOST, array, self)

    def wrap(self, view: View) -> Any:
        import numpy as np

        return np.asarray(view).view(np.dtype(view.dtype)).reshape(view.shape)

    def is_writable(self, array: Any) -> bool:
        return array.flags.writeable


class CupyFramework(Framework):
    name = "cupy"

    def __init__(self) -> None:
        self._cupy = sys.modules["cupy"]
        self._current_stream = self._cupy.cuda.get_current_stream
        self._last: StreamHandle | None = None  # kept while calls stay on one stream: making one takes time

    def view(self, array: Any, name: str, stream: int | None) -> View:
        if not array.flags.c_contiguous:
            raise not_contiguous(name)
        memory = array.data
        return View(memory.ptr, array.shape, _numpy_name(array.dtype, name), memory.device_id, array, self)

    def form(self, array: Any) -> AddressOf | None:
        kind, dtype, shape, device = type(array), array.dtype, array.shape, array.data.device_id

        def address_of(other: Any) -> int | None:
            if type(other) is kind and other.dtype is dtype and other.shape == shape and other.flags.c_contiguous:
                memory = other.data
                address: int = memory.ptr
                if address and not address % FORM_ALIGNMENT and memory.device_id == device:
                    return address
            return None

        return address_of

    def wrap(self, view: View) -> Any:
        import numpy as np

        cupy = self._cupy
        memory = cupy.cuda.UnownedMemory(view.ptr, max(view.nbytes, 1), view.owner, view.device)
        return cupy.ndarray(view.shape, np.dtype(view.dtype), cupy.cuda.MemoryPointer(memory, 0))

    def current_stream(self, device: int) -> int | None:
        stream, last = self._current_stream(device), self._last
        if last is None or last.owner is not stream:
            last = self._last = StreamHandle.of(stream.ptr, stream)
        return last


_NO_GRADIENT = (
    "{} requires a gradient, but the methods of a Buffer pass no gradients. Train with deepep_rt.torch.dispatch and combine, or call "
    "the methods under torch.no_grad()."
)


class TorchFramework(Framework):
    name = "torch"

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self._from_dlpack = torch.from_dlpack
        self._current_stream: Callable[[int], int | None] = lambda device: None  # without CUDA there are no streams
        if torch.backends.cuda.is_built():
            # Get only the handle if PyTorch offers it: making a Stream object takes longer than the rest of `view`.
            self._current_stream = getattr(
                torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
            )
        self._is_grad_enabled = torch.is_grad_enabled
        self._names = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
        self._types = {name: dtype for dtype, name in self._names.items()}

    def view(self, array: Any, name: str, stream: int | None) -> View:
        try:
            is_contiguous, ptr, shape = array.is_contiguous(), array.data_ptr(), array.shape
        except EPError:  # a placeholder tensor of this library raises its own error
            raise
        except RuntimeError as error:  # sparse and nested tensors raise; checking the layout first would take longer
            raise not_dense(array, name) from error
        if not is_contiguous:
            raise not_contiguous(name)
        dtype = self._names.get(array.dtype) or _supported(str(array.dtype), name)
        if array.requires_grad and self._is_grad_enabled():
            warnings.warn(_NO_GRADIENT.format(name), stacklevel=5)  # the caller's line with the Buffer's method
        if not ptr:  # an empty tensor, or one without memory
            if array.is_nested:
                raise not_dense(array, name)
            if array.is_meta or array.numel():
                raise without_memory(array, name)
        return View(ptr, shape, dtype, array.get_device(), array, self)  # PyTorch's number for host memory is -1, as HOST

    def form(self, array: Any) -> AddressOf | None:
        kind, dtype, shape, device = type(array), array.dtype, array.shape, array.get_device()

        def address_of(other: Any) -> int | None:
            # Without a gradient, whose warning `view` gives. The function has no object: attributes of one take longer than its variables.
            if (
                type(other) is kind
                and other.dtype is dtype
                and other.shape == shape
                and other.is_contiguous()
                and other.get_device() == device
                and not other.requires_grad
            ):
                address: int = other.data_ptr()
                if address and not address % FORM_ALIGNMENT:
                    return address
            return None

        return address_of

    def wrap(self, view: View) -> Any:
        if view.dtype.startswith("float8"):  # the DLPack of some PyTorch versions lacks FP8
            return self._from_dlpack(view.capsule("uint8")).view(self._types[view.dtype])
        return self._from_dlpack(view.capsule())

    def current_stream(self, device: int) -> int | None:
        return self._current_stream(device)


class JaxFramework(Framework):
    name = "jax"

    def view(self, array: Any, name: str, stream: int | None) -> View:
        if not hasattr(array, "__dlpack_device__"):
            raise EPInputError(
                f"{name} is traced by JAX; expected an array with values. Use deepep_rt.jax.dispatch and combine in compiled functions."
            )
        if hasattr(array, "is_deleted") and array.is_deleted():  # arrays in XLA's callbacks lack this method
            raise argument_error(array, name, "an array that JAX has not deleted", "Pass one that was not donated to a function.")
        return super().view(array, name, stream)

    def is_writable(self, array: Any) -> bool:
        return False

    def wrap(self, view: View) -> Any:
        import jax

        return jax.dlpack.from_dlpack(view)


class ViewFramework(Framework):
    """The framework of Views themselves, which need no conversion."""

    def view(self, array: View, name: str, stream: int | None) -> View:
        return array


_MAKERS: dict[str, Callable[[], Framework]] = {
    "numpy": NumpyFramework,
    "cupy": CupyFramework,
    "torch": TorchFramework,
    "jax": JaxFramework,
    "jaxlib": JaxFramework,
}
_MASKED = ("MaskedArray", "MaskedTensor")  # of NumPy and of PyTorch
_MAX_MESSAGE_CHARS = 200  # of another library's message
VIEWS = ViewFramework()
"""The framework of Views."""

FRAMEWORK_OF_CLASS: dict[type, Framework] = {View: VIEWS}
"""The framework of each array class that was seen so far."""

_singletons: dict[type[Framework], Framework] = {}


def framework_of(array: Any, name: str) -> Framework:
    """Return the framework of an array from its class, without an import. Raise EPInputError for other classes without DLPack."""
    kind = type(array)
    if found := FRAMEWORK_OF_CLASS.get(kind):
        return found
    if isinstance(array, type):  # an array class has the attributes of its arrays
        raise argument_error(array, name, "an array", "Pass an array of this class.")
    check_unmasked(array, name)
    for base in kind.__mro__:  # a subclass of torch.Tensor may be defined in any module
        if maker := _MAKERS.get(base.__module__.partition(".")[0]):
            break
    else:
        maker = Framework
    if maker is not JaxFramework and not _has_dlpack(array):  # traced arrays of JAX have no DLPack
        raise argument_error(array, name, "a NumPy, CuPy, PyTorch, JAX or DLPack array", "Pass one of them.")
    made = maker()
    FRAMEWORK_OF_CLASS[kind] = framework = _singletons.setdefault(type(made), made)
    return framework


def _has_dlpack(array: Any) -> bool:
    try:
        return hasattr(array, "__dlpack__")
    except Exception:  # a class may raise anything for an unknown attribute
        return False


def check_unmasked(array: Any, name: str) -> None:
    """Raise EPInputError for an array with a mask, because calls would ignore the mask."""
    if any(base.__name__ in _MASKED for base in type(array).__mro__):
        raise argument_error(array, name, "an array without a mask", "Pass its data, with masked entries filled in.")


def unreadable(array: Any, name: str, error: Exception) -> EPError:
    """Make the error for an array whose library raised `error`: it is deleted, on several devices, read-only, or of a rare dtype."""
    message = re.sub(" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}".strip().partition("\n")[0][:_MAX_MESSAGE_CHARS])
    expected = f"an array whose memory its library shows ({message})"
    return argument_error(array, name, expected, "Pass a copy of it, in one piece, on one device, of a usual dtype.")


def check_dense(tensor: Any, name: str) -> None:
    """Raise EPInputError for a tensor of PyTorch that is sparse or nested, or that never has values.

    PyTorch makes no call of an operator for such a tensor, and the other ranks would wait. `torch.compile` traces the check.
    """
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        raise not_dense(tensor, name)
    if tensor.is_meta:
        raise without_memory(tensor, name)


def without_memory(tensor: Any, name: str) -> EPInputError:
    """Make the error for a tensor of PyTorch without memory."""
    kind = "meta" if tensor.is_meta else "fake"
    return EPInputError(f"{name} is a {kind} tensor; expected a tensor with values. Pass one that has memory.")


def not_dense(tensor: Any, name: str) -> EPInputError:
    """Make the error for a PyTorch tensor whose rows are not contiguous in memory."""
    kind, dense = f"{tensor.layout} tensor", ".to_dense()"
    if tensor.is_nested:
        kind, dense = "nested tensor", ".to_padded_tensor(0)"
    elif kind.startswith("torch.strided"):
        return EPInputError(
            f"{name} is a tensor whose memory PyTorch does not show; expected a plain tensor. Call from outside of torch.func.vmap."
        )
    return EPInputError(f"{name} is a {kind}; expected a dense tensor with contiguous rows. Convert it with {dense}.")


_numpy_names: dict[Any, str] = {}  # the name of each NumPy dtype: NumPy builds the name again for each request


def _numpy_name(dtype: Any, name: str) -> str:
    found = _numpy_names.get(dtype)
    if found is None:
        if not dtype.isnative:
            raise EPInputError(f"{name}: dtype {dtype.str}; expected this machine's byte order. Pass x.astype({dtype.name!r}).")
        found = _numpy_names[dtype] = _supported(dtype.name, name)
    return found


def _supported(dtype: str, name: str) -> str:
    if dtype not in DTYPES:
        raise EPInputError(f"{name}: dtype {dtype}; expected one of {', '.join(DTYPES)}. Convert the array.")
    return dtype
