"""Finalizers that call CUDA, and the threads that must not.

Python's garbage collector runs in any thread, also in that of a relay. A call of CUDA could wait there for a kernel that waits for the
relay. So a finalizer of this library in such a thread leaves its work to the next call of a Buffer. Finalizers of other libraries do not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

_log = logging.getLogger("deepep_rt")

waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
"""The work that finalizers have left, oldest first."""

_threads: set[int] = set()  # that must not call CUDA


@contextmanager
def no_cuda_in_this_thread() -> Iterator[None]:
    """While the block runs, finalizers in this thread leave their work to other threads."""
    _threads.add(get_ident())
    try:
        yield
    finally:
        _threads.discard(get_ident())


def finalize(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function that calls CUDA. A finalizer does this at its end.

    Args:
        function: It may run later, in another thread, if this thread must not call CUDA.
        arguments: Its arguments.
    """
    if _threads and get_ident() in _threads:
        waiting.append((function, arguments))
    else:
        function(*arguments)


def run_waiting() -> None:
    """Do the work that finalizers have left. As in a finalizer, an exception is logged and not raised."""
    while True:
        try:
            function, arguments = waiting.popleft()
        except IndexError:  # the last one, or another thread was faster
            return
        try:
            function(*arguments)
        except Exception:
            _log.exception("a finalizer has failed")
