"""Handles of streams and events, of any library: integers, whose use crashes the driver once what they stand for is gone."""

from __future__ import annotations

from typing import Any

from .errors import EPInputError

PER_THREAD = 2
"""CUDA's handle of a default stream that each thread has for itself (CuPy, if asked, works on it)."""


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
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            return StreamHandle.of(int(getattr(stream, name)), stream)
    return _integer(stream, "stream")


def of_event(event: Any) -> int:
    """The integer behind an event of any library, or behind our own."""
    for name in ("cuda_event", "ptr", "handle"):
        if hasattr(event, name):
            return int(getattr(event, name) or 0)
    return _integer(event, "previous_event")


def _integer(value: Any, what: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise EPInputError(
            f"{what} is a {type(value).__name__}; expected one of an array library, or its integer handle"
        ) from None
