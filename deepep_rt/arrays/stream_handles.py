"""Integer handles of streams and events, of any library. The driver crashes if a handle outlives its stream or event."""

from __future__ import annotations

from typing import Any

from .._checks import argument_error, is_int_in_range

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

    Args:
        value: A number, or an object of a library.
        attribute: The attribute of PyTorch's objects.
        other_kind: A word in the class names of the other kind. Libraries use one attribute name for the handles of both kinds.
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
