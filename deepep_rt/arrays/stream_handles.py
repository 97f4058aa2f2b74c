"""Handles of streams and events, of any library: integers, whose use crashes the driver once what they stand for is gone."""

from __future__ import annotations

from typing import Any

from .._checks import argument_error, is_int_in_range

PER_THREAD = 2
"""CUDA's handle of a default stream that each thread has for itself (CuPy, if asked, works on it)."""

_MOST = (1 << 64) - 1  # handles are addresses


class StreamHandle(int):
    """A stream's handle that keeps the stream: libraries destroy streams that nobody holds, and their handles must not be used then."""

    owner: Any

    @classmethod
    def of(cls, handle: int, owner: Any) -> StreamHandle:
        made = cls(handle)
        made.owner = owner
        return made


def of_stream(stream: Any) -> int:
    """The integer behind a stream of any library: an integer, or an object of PyTorch, CuPy or cuda.core."""
    if type(stream) is StreamHandle:
        return stream
    handle = _handle(stream, "cuda_stream", "event")
    if handle is None:
        raise argument_error(stream, "stream", "a stream of an array library, or its integer handle", "Pass one, or None.")
    return handle if isinstance(stream, int) else StreamHandle.of(handle, stream)


def of_event(event: Any) -> int:
    """The integer behind an event of any library, or behind our own; 0 where it stands for no CUDA event."""
    handle = _handle(event, "cuda_event", "stream")
    if handle is None:
        raise argument_error(event, "previous_event", "an event of an array library, or its integer handle", "Pass one, or None.")
    return handle


def _handle(value: Any, own_name: str, other_kind: str) -> int | None:
    """The integer behind an object; None for an array, a thing of the other kind, or what has no handle.

    Args:
        value: A number, or an object of a library.
        own_name: The attribute that PyTorch's objects have.
        other_kind: A word in the class names of the other kind. Libraries call the handles of both by the same name.
    """
    if is_int_in_range(value, 0, _MOST):
        return int(value)
    try:
        return _held(value, own_name, other_kind)
    except Exception:  # of attributes that are called so, and are none
        return None


def _held(value: Any, own_name: str, other_kind: str) -> int | None:
    """The integer that an object holds; None for an array, a thing of the other kind, or what holds none."""
    kinds = [base.__name__.lower() for base in type(value).__mro__]
    if hasattr(value, "__dlpack__") or (any(other_kind in kind for kind in kinds) and not hasattr(value, own_name)):
        return None
    for name in (own_name, "ptr", "handle"):
        if hasattr(value, name):
            held = getattr(value, name)
            break
    else:
        if not any(kind in ("custream", "cudastream_t", "cuevent", "cudaevent_t") for kind in kinds):  # of cuda.bindings
            return None
        held = value
    handle = int(held or 0)
    return handle if 0 <= handle <= _MOST else None
