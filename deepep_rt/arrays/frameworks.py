"""NumPy, CuPy, PyTorch and JAX: their arrays in, and theirs out again, without importing one that the caller did not.

Results are Views over the library's own memory; `View.to_framework()` hands them out in the caller's framework. The memory of a result
lives as long as the array that the caller holds (`View.owner`).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .._checks import argument_error
from ..errors import EPError, EPInputError
from .dtypes import DTYPES
from .stream_handles import StreamHandle
from .view import HOST, Framework, View, not_contiguous


class _Numpy(Framework):
    name = "numpy"

    def view(self, array: Any, what: str, stream: int | None) -> View:
        if not array.flags.c_contiguous:
            raise not_contiguous(what)
        return View(array.__array_interface__["data"][0], array.shape, _numpy_name(array.dtype, what), HOST, array, self)

    def wrap(self, view: View) -> Any:
        import numpy as np

        return np.asarray(view).view(np.dtype(view.dtype)).reshape(view.shape)

    def is_writable(self, array: Any) -> bool:
        return array.flags.writeable


class _Cupy(Framework):
    name = "cupy"

    def __init__(self) -> None:
        self._cupy = sys.modules["cupy"]
        self._current_stream = self._cupy.cuda.get_current_stream
        self._last: StreamHandle | None = None  # made once for calls that all work on one stream

    def view(self, array: Any, what: str, stream: int | None) -> View:
        if not array.flags.c_contiguous:
            raise not_contiguous(what)
        memory = array.data
        return View(memory.ptr, array.shape, _numpy_name(array.dtype, what), memory.device_id, array, self)

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


_CUT = (
    "{} requires a gradient, and no gradient flows through the methods of a Buffer; train with deepep_rt.torch.dispatch and combine, or "
    "call them under torch.no_grad()"
)


class _Torch(Framework):
    name = "torch"

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        self._from_dlpack = torch.from_dlpack
        self._current_stream: Callable[[int], int | None] = lambda device: None  # a PyTorch without CUDA has none
        if torch.backends.cuda.is_built():
            # Where PyTorch offers the handle alone: a Stream object takes longer than all the rest of looking at an argument.
            self._current_stream = getattr(
                torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
            )
        self._is_grad_enabled = torch.is_grad_enabled
        self._names = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
        self._types = {name: dtype for dtype, name in self._names.items()}

    def view(self, array: Any, what: str, stream: int | None) -> View:
        try:
            is_contiguous, ptr, shape = array.is_contiguous(), array.data_ptr(), array.shape
        except EPError:  # of a tensor of ours that only says what it is not
            raise
        except RuntimeError as error:  # sparse and nested tensors refuse one of these; to ask for the layout would take longer
            raise not_dense(array, what) from error
        if not is_contiguous:
            raise not_contiguous(what)
        name = self._names.get(array.dtype) or _known(str(array.dtype), what)
        if array.requires_grad and self._is_grad_enabled():
            warnings.warn(_CUT.format(what), stacklevel=5)  # where a call of a Buffer stands
        if not ptr:  # as of empty ones
            if array.is_nested:
                raise not_dense(array, what)
            if array.is_meta or array.numel():
                kind = "meta" if array.is_meta else "fake"
                raise EPInputError(f"{what} is a {kind} tensor, which has no numbers; pass one that has")
        return View(ptr, shape, name, array.get_device(), array, self)  # -1 for host memory, as HOST

    def wrap(self, view: View) -> Any:
        if view.dtype.startswith("float8"):  # torch's DLPack does not speak FP8 in every version
            return self._from_dlpack(view.capsule("uint8")).view(self._types[view.dtype])
        return self._from_dlpack(view.capsule())

    def current_stream(self, device: int) -> int | None:
        return self._current_stream(device)


class _Jax(Framework):
    name = "jax"

    def view(self, array: Any, what: str, stream: int | None) -> View:
        if not hasattr(array, "__dlpack_device__"):
            raise EPInputError(f"{what} is traced by JAX: in compiled functions, use deepep_rt.jax.dispatch and combine")
        if hasattr(array, "is_deleted") and array.is_deleted():  # what XLA shows to callbacks has no such method
            raise argument_error(array, what, "an array that JAX has not deleted", "Pass one that was not donated to a function.")
        return super().view(array, what, stream)

    def is_writable(self, array: Any) -> bool:
        return False

    def wrap(self, view: View) -> Any:
        import jax

        return jax.dlpack.from_dlpack(view)


class _Seen(Framework):
    """What was looked at already."""

    def view(self, array: View, what: str, stream: int | None) -> View:
        return array


_MAKERS: dict[str, Callable[[], Framework]] = {
    "numpy": _Numpy,
    "cupy": _Cupy,
    "torch": _Torch,
    "jax": _Jax,
    "jaxlib": _Jax,
}
_MASKED = ("MaskedArray", "MaskedTensor")  # of NumPy and of PyTorch
_MOST_SAID = 200  # characters of another library's message
_frameworks: dict[type, Framework] = {View: _Seen()}  # array class -> its framework
_singletons: dict[type[Framework], Framework] = {}


def framework_of(array: Any, what: str) -> Framework:
    """The framework of an array, found from its class; nothing is imported to find it.

    Raises:
        EPInputError: if `array` is no array, neither of a known framework nor through DLPack.
    """
    kind = type(array)
    if found := _frameworks.get(kind):
        return found
    if isinstance(array, type):  # it has all the names that its arrays have
        raise argument_error(array, what, "an array", "Pass an array of this class.")
    check_unmasked(array, what)
    for base in kind.__mro__:  # a subclass of torch.Tensor lives in somebody else's module
        if maker := _MAKERS.get(base.__module__.partition(".")[0]):
            break
    else:
        maker = Framework
    if maker is not _Jax and not _has_dlpack(array):  # JAX's own are traced, or else arrays
        raise argument_error(array, what, "a NumPy, CuPy, PyTorch, JAX or DLPack array", "Pass one of them.")
    made = maker()
    _frameworks[kind] = framework = _singletons.setdefault(type(made), made)
    return framework


def _has_dlpack(array: Any) -> bool:
    try:
        return hasattr(array, "__dlpack__")
    except Exception:  # of a class that answers every question with an error
        return False


def check_unmasked(array: Any, what: str) -> None:
    """Raise EPInputError about an array with a mask: calls would not see it."""
    if any(base.__name__ in _MASKED for base in type(array).__mro__):
        raise argument_error(array, what, "an array without a mask", "Pass its data, with masked entries filled in.")


def not_shown(array: Any, what: str, error: Exception) -> EPError:
    """What to raise about an array that its library does not show: deleted, on several devices, read-only, of a strange type."""
    said = re.sub(" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}".strip().partition("\n")[0][:_MOST_SAID])
    expected = f"an array whose memory its library shows ({said})"
    return argument_error(array, what, expected, "Pass a copy of it, in one piece, on one device, of a usual dtype.")


def not_dense(tensor: Any, what: str) -> EPInputError:
    """What to raise about a tensor of PyTorch that has no rows one behind the other."""
    kind, dense = f"{tensor.layout} tensor", ".to_dense()"
    if tensor.is_nested:
        kind, dense = "nested tensor", ".to_padded_tensor(0)"
    elif kind.startswith("torch.strided"):
        return EPInputError(
            f"{what} is a tensor whose memory PyTorch does not show, as inside of torch.func.vmap; call from outside of it"
        )
    return EPInputError(f"{what} is a {kind}, whose rows do not lie one behind the other; pass a dense one, which {dense} makes")


_numpy_names: dict[Any, str] = {}  # NumPy's dtype -> its name, which NumPy puts together anew each time it is asked


def _numpy_name(dtype: Any, what: str) -> str:
    name = _numpy_names.get(dtype)
    if name is None:
        if not dtype.isnative:
            raise EPInputError(f"{what}: dtype {dtype.str} has the byte order of other machines; pass x.astype({dtype.name!r})")
        name = _numpy_names[dtype] = _known(dtype.name, what)
    return name


def _known(name: str, what: str) -> str:
    if name not in DTYPES:
        raise EPInputError(f"{what}: dtype {name} is not supported; expected one of {', '.join(DTYPES)}")
    return name
