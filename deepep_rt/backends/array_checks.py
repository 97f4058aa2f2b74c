"""Turn one array argument into a View, and check what all calls ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import frameworks
from ..arrays.view import HOST, View
from ..config import ROW_ALIGNMENT
from ..errors import EPError, EPInputError
from .calls import BufferInfo


def as_view(
    info: BufferInfo, array: Any, what: str, stream: int | None, shape: tuple[int, ...] | None = None, dtypes: Sequence[str] = ()
) -> View:
    """Return an argument as a View. If a shape is given, check it and the dtype."""
    try:
        # Each call comes here several times, and a known class needs no function.
        framework = frameworks.FRAMEWORK_OF_CLASS.get(type(array)) or frameworks.framework_of(array, what)
        view = framework.view(array, what, stream)
    except EPError:
        raise
    except Exception as error:  # what the array's library raises: of DLPack producers, it may be anything
        raise frameworks.unreadable(array, what, error) from error
    if view.device != info.device and view.device != HOST:
        here = "host memory (the host backend has no GPU)" if info.device == HOST else f"GPU {info.device}"
        raise EPInputError(f"{what} is on GPU {view.device}; expected {here}, where this Buffer works. Move the array")
    if view.ptr % 8 and view.device != HOST and view.ptr % view.itemsize:
        raise misaligned(view, what, view.itemsize)
    if shape is not None:
        if view.shape != shape:
            raise EPInputError(f"{what}.shape={list(view.shape)}; expected {list(shape)}. Pass an array of that shape")
        if view.dtype not in dtypes:
            raise EPInputError(f"{what}.dtype={view.dtype}; expected {' or '.join(dtypes)}. Convert it")
    return view


def check_tokens(info: BufferInfo, rows: View) -> None:
    """Raise EPInputError if there are more tokens than the Buffer takes."""
    if rows.shape[0] > info.config.num_max_tokens_per_rank:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected at most {info.config.num_max_tokens_per_rank} tokens (num_max_tokens_per_rank). "
            f"Split the batch, or make a larger Buffer"
        )


def check_writable(info: BufferInfo, view: View, array: Any, what: str) -> None:
    """Raise EPInputError if the call cannot write to an array."""
    if not view.framework.is_writable(array):
        raise EPInputError(f"{what} is read-only; expected an array that this call can write to (JAX has none). Pass another one")
    if view.device != info.device:
        raise EPInputError(f"{what} is in host memory; expected GPU {info.device}, which writes to it. Move the array")


def check_row(info: BufferInfo, view: View, what: str) -> None:
    """Raise EPInputError unless rows have a size and a start that kernels can copy."""
    row_bytes = view.row_bytes
    if row_bytes % ROW_ALIGNMENT:
        raise EPInputError(f"{what} has {row_bytes} bytes a row; expected a multiple of {ROW_ALIGNMENT}. Pad the rows")
    if row_bytes > info.config.row_bytes:
        raise EPInputError(
            f"{what}.dtype={view.dtype}; expected at most the width of {info.config.dtype}, this Buffer's dtype. Convert it, or make a "
            f"Buffer with dtype={view.dtype!r}"
        )
    check_start(view, what)


def check_start(view: View, what: str) -> None:
    """Raise EPInputError unless an array starts where kernels can read vectors."""
    if view.ptr % ROW_ALIGNMENT and view.device != HOST:
        raise misaligned(view, what, ROW_ALIGNMENT)


def misaligned(view: View, what: str, alignment: int) -> EPInputError:
    """Make the error for an array that starts at a wrong address."""
    return EPInputError(f"{what} starts at address {view.ptr:#x}; expected a multiple of {alignment} bytes. Pass a copy")
