"""CallLock: one thread at a time is in a call of a Buffer, and in the context of the Buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from deepep_rt import EPDestroyedError, EPInputError
from deepep_rt.backends.call_lock import CallLock


class Context:
    """Count how often it is entered."""

    depth, fails = 0, False

    def __enter__(self) -> None:
        if self.fails:
            raise RuntimeError("no context")
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def in_another_thread(do: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(do()))
    thread.start()
    thread.join()
    return results[0]


def can_enter(lock: CallLock) -> bool:
    try:
        with lock:
            return True
    except EPInputError:
        return False


def test_a_call_holds_the_lock_and_the_context() -> None:
    context = Context()
    lock = CallLock(context)
    with suppress(KeyError), lock:
        assert context.depth == 1
        assert not in_another_thread(lambda: can_enter(lock))
        raise KeyError
    assert context.depth == 0
    assert in_another_thread(lambda: can_enter(lock))


def test_a_context_that_fails_releases_the_lock() -> None:
    context = Context()
    lock = CallLock(context)
    context.fails = True
    with pytest.raises(RuntimeError, match="no context"), lock:
        pass
    context.fails = False
    assert in_another_thread(lambda: can_enter(lock))


@pytest.mark.parametrize("does_wait", [False, True])
def test_drain_waits_for_a_call(does_wait: bool) -> None:
    context, begun, ended = Context(), threading.Event(), []
    lock = CallLock(context)

    def call() -> None:
        with suppress(EPDestroyedError), lock:
            begun.set()
            if does_wait:
                while True:
                    lock.check()
            ended.append(time.sleep(0.1))

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    lock.refuse("it ends")
    lock.drain(lambda error: ended.append((context.depth, error)))
    if does_wait:
        [(depth, error)] = ended
        assert (depth, type(error)) == (1, EPDestroyedError), "the call has raised"
    else:
        assert ended == [None, (1, None)]
    assert context.depth == 0
    thread.join()
    with pytest.raises(EPDestroyedError, match="it ends"), lock:
        pass


def test_a_call_in_the_middle_of_a_call_is_refused() -> None:
    lock = CallLock(Context())
    with lock:
        with pytest.raises(EPInputError, match="this thread is in the middle of a call"), lock:
            pass
        assert not in_another_thread(lambda: can_enter(lock))
    assert can_enter(lock)
    assert in_another_thread(lambda: can_enter(lock))


@pytest.mark.parametrize("error", [None, KeyError("thrown")])
def test_drain_in_the_middle_of_a_call(error: Exception | None) -> None:
    """The call runs `finish` at its end, and raises."""
    context, ended = Context(), []
    lock = CallLock(context)

    def call() -> None:
        lock.refuse("it ends")
        lock.refuse("another reason")
        lock.drain(lambda thrown: ended.append((context.depth, thrown)))
        assert not ended
        with pytest.raises(EPDestroyedError, match="it ends"):
            lock.check()
        with pytest.raises(EPDestroyedError, match="it ends"), lock:
            pass
        if error:
            raise error

    with pytest.raises(type(error) if error else EPDestroyedError), lock:
        call()
    assert ended == [(1, error)]
    assert context.depth == 0
    with pytest.raises(EPDestroyedError), lock:
        pass


def test_a_refusal_in_another_thread_gives_the_reason() -> None:
    """A process forked during a call of another thread keeps the lock taken."""
    lock = CallLock(Context())
    with suppress(EPDestroyedError), lock:
        lock.refuse("forked")

        def why() -> str:
            with pytest.raises(EPDestroyedError) as caught, lock:
                pass
            return str(caught.value)

        assert in_another_thread(why) == "forked"


def test_a_signal_at_the_very_end_of_a_call_ends_the_buffer() -> None:
    """A handler that destroys the Buffer runs right before the call counts as ended."""

    class Interrupted(CallLock):
        is_armed = False

        @property
        def _in_call(self) -> bool:
            return self.__dict__["_in_call"]

        @_in_call.setter
        def _in_call(self, value: bool) -> None:
            if self.is_armed and not value:
                self.is_armed = False
                self.refuse("destroyed")
                self.drain(ended.append)
            self.__dict__["_in_call"] = value

    ended: list[Any] = []
    lock = Interrupted(Context())
    with pytest.raises(EPDestroyedError, match="destroyed"), lock:
        lock.is_armed = True
    assert ended == [None]
