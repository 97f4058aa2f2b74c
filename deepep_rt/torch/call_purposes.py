"""Numbers of calls, by which errors name the backward pass in which a rank waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..buffer import Buffer, backend_of
from .handles import backward_pass


@contextmanager
def numbered(buffer: Buffer, kind: str) -> Iterator[int]:
    """Enter to make a call, and yield its number."""
    purposes = backend_of(buffer).purposes
    number = purposes.next_number(kind)
    recomputed = f"{kind} call {number}, which a checkpoint computes again"
    with purposes.during(recomputed if backward_pass() >= 0 else ""):
        yield number


@contextmanager
def backward_of(buffer: Buffer, kind: str, *numbers: int) -> Iterator[None]:
    """Enter to make the call that is the backward pass of a call with one of these numbers."""
    with backend_of(buffer).purposes.during(f"the backward of {kind} call {' or '.join(map(str, numbers))}"):
        yield
