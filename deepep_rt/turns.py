"""Calls of a Buffer come one after the other: on all ranks in the same order, and so from one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .errors import EPInputError


class Turns:
    """Entered for the time of a call. Threads that come while another one is in a call are refused: which of them is first would be chance,
    and different on other ranks.

    Args:
        context: Entered with it.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._lock, self._context = threading.RLock(), context
        # Looked up once: this is a part of what each call costs.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._enter, self._leave = context.__enter__, context.__exit__

    def __enter__(self) -> None:
        if not self._acquire(False):
            raise EPInputError(
                "another thread is in the middle of a call of this Buffer; let threads take turns, in the same order on all ranks, or make "
                "a Buffer for each"
            )
        try:
            self._enter()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._leave(*error)
        finally:
            self._release()

    @contextmanager
    def last(self) -> Iterator[None]:
        """The end: waits until nobody is in a call."""
        with self._lock, self._context:
            yield
