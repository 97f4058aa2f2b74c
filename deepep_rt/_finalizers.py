"""Finalizers that call CUDA, and the threads that must not.

Python's garbage collector runs in any thread, also in that of a relay. A call of CUDA could wait there for a kernel that waits for the
relay: while another thread copies behind that kernel, CUDA lets no thread make or destroy an event.

So in such a thread the collector destroys nothing, also no events and tensors of PyTorch: the next call of a Buffer collects them again.
Python still runs `__del__` methods and callbacks of `weakref` there. Those of this library leave their work to the next call of a Buffer.
Those of other libraries do not.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

_log = logging.getLogger("deepep_rt")

waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
"""The work that finalizers have left, oldest first."""

_threads: set[int] = set()  # that must not call CUDA


class _KeepGarbage:
    """A callback of Python's collector: in a thread that must not call CUDA, garbage is found and kept, and not destroyed."""

    def __init__(self) -> None:
        self._flags = self._num_garbage = 0  # of `gc`, before a collection

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if get_ident() not in _threads:
            return
        if phase == "start":
            self._flags, self._num_garbage = gc.get_debug(), len(gc.garbage)
            gc.set_debug(self._flags | gc.DEBUG_SAVEALL)  # the collector puts objects into `gc.garbage`, and destroys none
            return
        gc.set_debug(self._flags)
        if self._flags & gc.DEBUG_SAVEALL:  # the program wants to see its garbage
            return
        if found := gc.garbage[self._num_garbage :]:
            del gc.garbage[self._num_garbage :]
            waiting.append((_collect_again, (found, info["generation"])))


_keep_garbage, _registration = _KeepGarbage(), Lock()


def _collect_again(found: list[Any], generation: int) -> None:
    """Destroy what a collection has kept. It has moved to the next older generation."""
    found.clear()
    gc.collect(min(generation + 1, 2))


@contextmanager
def no_cuda_in_this_thread() -> Iterator[None]:
    """While the block runs, finalizers in this thread leave their work to other threads, and so does the garbage collector."""
    with _registration:  # called twice, it would take its own flag for the program's
        if _keep_garbage not in gc.callbacks:
            gc.callbacks.append(_keep_garbage)  # for good: it does nothing in other threads
    _threads.add(get_ident())
    try:
        yield
    finally:
        _threads.discard(get_ident())


def may_call_cuda() -> bool:
    """Return whether a finalizer in this thread may call CUDA."""
    return get_ident() not in _threads


def finalize(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function that calls CUDA, at the end of a finalizer. It runs later, in another thread, if this thread must not call CUDA."""
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
