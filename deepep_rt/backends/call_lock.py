"""Calls of a Buffer come one after the other: on all ranks in the same order, and so from one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import EPDestroyedError, EPInputError


class Turns:
    """Entered for the time of a call. Calls that come in the middle of another one are refused, from any thread: their order would be
    chance, and different on other ranks.

    Args:
        context: Entered with it.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._lock, self.context = threading.RLock(), context
        # Looked up once: this is a part of what each call costs.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._enter, self._leave = context.__enter__, context.__exit__
        self._in_call = False
        self._ended = ""  # why calls are refused for good
        self._finish: Callable[[BaseException | None], None] | None = None  # left to the call that runs
        self._cut_short: EPDestroyedError | None = None

    def __enter__(self) -> None:
        if not self._acquire(False):
            self.check()
            raise EPInputError(
                "another thread is in the middle of a call of this Buffer; let threads take turns, in the same order on all ranks, or make "
                "a Buffer for each"
            )
        if self._in_call:
            self._release()
            self.check()
            raise EPInputError(
                "this thread is in the middle of a call of this Buffer, and calls it again from a signal handler or from a method of an "
                "argument, such as __dlpack__; expected one call at a time. Make the call after the first one has returned"
            )
        self._in_call = True  # before the check: a signal handler that ends the Buffer from here on leaves the rest to this call
        try:
            self.check()
            self._enter()
        except BaseException:
            self._end_call(None)  # nothing was sent yet
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._leave(kind, error, trace)
        finally:
            if isinstance(error, EPDestroyedError):
                self._cut_short = error
            self._end_call(error)

    def _end_call(self, error: BaseException | None) -> None:
        finish, self._finish = self._finish, None
        self._in_call = False
        try:
            if finish is not None:
                with self.context:
                    finish(error)
        finally:
            self._release()
        if finish is not None and error is None:
            self.check()  # what the call returned was of a Buffer that is gone

    def check(self) -> None:
        """Raise EPDestroyedError if the Buffer has ended. To be asked by a call that waits, too."""
        if self._ended:
            raise EPDestroyedError(self._ended)

    def refuse(self, why: str) -> None:
        """Refuse all calls from now on, with the first reason that is given."""
        self._ended = self._ended or why

    def end(self, finish: Callable[[BaseException | None], None]) -> None:
        """Run `finish` once no call runs; `refuse` comes first.

        A call of another thread is waited for; if it waits itself, it notices. A call of this thread, which a signal handler has
        interrupted, runs `finish` when it ends. `finish` gets the exception that threw such a call out of its middle.
        """
        with self._lock:
            if self._in_call:
                self._finish = finish
                return
            with self.context:
                finish(self._cut_short)
