"""Calls of a Buffer run one after the other, in the same order on all ranks, and so in one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .._finalizers import run_waiting, waiting
from ..comm.failure_notice import CallProgress, FailureNotice
from ..errors import (
    EPAsleepError,
    EPDestroyedError,
    EPEvictedError,
    EPInputError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
)

_BETWEEN = "a change of the members of this Buffer has failed; expected one that succeeds. Call shrink() again, or destroy()"


class CallLock:
    """Hold this lock during a call; a second call meanwhile is refused, from any thread.

    The order of two calls that overlap is chance, and differs between ranks. So the second one raises instead of waiting. `context`, such
    as the Buffer's CUDA context, is entered and left with the lock.
    """

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._lock, self.context = threading.RLock(), context
        # Bound once: each call pays for a lookup.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._enter, self._leave = context.__enter__, context.__exit__
        self._in_call = False
        self.progress = CallProgress()
        """The call that holds the lock. A call sets its name; what all ranks need not make, such as a hook, has none."""
        self.notice: FailureNotice | None = None  # tells the other ranks of calls that this rank refuses
        self._reason = ""  # why every later call is refused
        self.is_asleep = False
        """Whether the Buffer sleeps, which is the reason then."""
        self._is_between = False  # a change of the members has failed, which is the reason then
        self._finish: Callable[[BaseException | None], None] | None = None  # for the running call to execute at its end
        self._interruption: EPDestroyedError | None = None

    def __enter__(self) -> None:
        if not self._acquire(False):
            self.check()
            raise EPInputError(
                "another thread is in the middle of a call of this Buffer; expected one call at a time. Let threads call it one after the "
                "other, in the same order on all ranks, or make a Buffer for each"
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
            if self._reason:
                self.check()
            self._enter()
            if waiting:
                run_waiting()
        except BaseException:
            self._end_call(None)  # nothing was sent yet
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if self.progress.name:
                self._end_progress(error)
            self._leave(kind, error, trace)
        finally:
            if isinstance(error, EPDestroyedError):
                self._interruption = error
            self._end_call(error)

    def _end_progress(self, error: BaseException | None) -> None:
        progress, notice = self.progress, self.notice
        if error is None or getattr(error, "call_made", False):
            if notice is not None and notice.has_refused:
                notice.make_call()
            progress.num_made += 1
        elif notice is not None and not isinstance(error, EPTimeoutError | EPDestroyedError):
            notice.refuse(error)
        progress.name = ""

    def _end_call(self, error: BaseException | None) -> None:
        self._in_call = False  # first: from here on, a signal handler that ends the Buffer finishes it itself
        if self._finish is None:
            self._release()
            return
        finish, self._finish = self._finish, None
        try:
            with self.context:
                finish(error)
        finally:
            self._release()
        if error is None:
            self.check()  # the result belongs to a Buffer that is gone

    def check(self) -> None:
        """Raise EPDestroyedError if the Buffer has ended, and EPAsleepError if it sleeps. A call that waits checks this too."""
        if self._reason:
            raise (EPAsleepError if self.is_asleep else EPDestroyedError)(self._reason)

    def check_exists(self) -> None:
        """Raise EPDestroyedError if the Buffer has ended."""
        if not self.is_asleep and not self._is_between:
            self.check()

    def refuse(self, reason: str) -> None:
        """Refuse all calls from now on: the Buffer has ended. The first reason stays."""
        if self.is_asleep or not self._reason:
            self._reason, self.is_asleep = reason, False

    def fall_asleep(self) -> None:
        """Refuse all calls until `waking`. The caller holds the lock."""
        if not self._reason:
            self._reason = "this Buffer sleeps; expected a Buffer that is awake. Call wake() on all ranks before the next call"
            self.is_asleep = True

    @contextmanager
    def waking(self) -> Iterator[None]:
        """Hold the lock of a Buffer that sleeps. After an exception in the block it still sleeps."""
        with self._lock:  # no other thread may call in between
            self.check_exists()
            if not self.is_asleep:
                raise EPInputError("wake() of a Buffer that is awake; expected sleep() before it. Call both on all ranks")
            self._reason, self.is_asleep = "", False
            try:
                with self:
                    yield
            except BaseException:
                self.fall_asleep()
                raise

    @contextmanager
    def changing_members(self, wakes: bool = False) -> Iterator[None]:
        """Hold the lock while the members of a Buffer change. After an exception in the block, only another change is allowed.

        `wakes`: whether the change wakes a Buffer that sleeps. Otherwise such a Buffer refuses it.
        """
        with self._lock:
            self.check_exists()
            if self.is_asleep and not wakes:
                self.check()
            slept = self.is_asleep
            if slept or self._is_between:
                self._reason = ""
            self.is_asleep = self._is_between = False
            try:
                with self:
                    yield
            except (EPEvictedError, EPTimeoutError, EPUnavailableError, EPOutOfMemoryError):
                self._reason, self._is_between = _BETWEEN, True
                raise
            except BaseException:
                if slept:
                    self.fall_asleep()
                raise

    def drain(self, finish: Callable[[BaseException | None], None]) -> None:
        """Run `finish` as soon as no call runs. Call `refuse` first.

        This waits for a call of another thread, and such a call notices the refusal if it waits itself. If a signal handler has
        interrupted a call of this thread, that call runs `finish` at its end. `finish` gets the exception that ended such a call.
        """
        with self._lock:
            if self._in_call:
                self._finish = finish
                return
            with self.context:
                finish(self._interruption)
