"""`turns`: one thread at a time is in a call of a Buffer, and in the Buffer's context."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from deepep_rt import EPDestroyedError, EPInputError
from deepep_rt.backends.call_lock import Turns


class Context:
    """Counts who is in it."""

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


def can_enter(turns: Turns) -> bool:
    try:
        with turns:
            return True
    except EPInputError:
        return False


def test_a_call_is_in_the_context_and_alone() -> None:
    context = Context()
    turns = Turns(context)
    with suppress(KeyError), turns:
        assert context.depth == 1
        assert not in_another_thread(lambda: can_enter(turns))
        raise KeyError
    assert context.depth == 0
    assert in_another_thread(lambda: can_enter(turns))


def test_a_context_that_cannot_be_entered_shuts_nobody_out() -> None:
    context = Context()
    turns = Turns(context)
    context.fails = True
    with pytest.raises(RuntimeError, match="no context"), turns:
        pass
    context.fails = False
    assert in_another_thread(lambda: can_enter(turns))


@pytest.mark.parametrize("does_wait", [False, True])
def test_the_end_waits_for_a_call(does_wait: bool) -> None:
    context, begun, ended = Context(), threading.Event(), []
    turns = Turns(context)

    def call() -> None:
        with suppress(EPDestroyedError), turns:
            begun.set()
            if does_wait:
                while True:
                    turns.check()
            ended.append(time.sleep(0.1))

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    turns.refuse("it ends")
    turns.end(lambda error: ended.append((context.depth, error)))
    if does_wait:
        [(depth, error)] = ended
        assert (depth, type(error)) == (1, EPDestroyedError), "the call was thrown out of its middle"
    else:
        assert ended == [None, (1, None)]
    assert context.depth == 0
    thread.join()
    with pytest.raises(EPDestroyedError, match="it ends"), turns:
        pass


def test_a_call_in_the_middle_of_a_call_is_refused() -> None:
    turns = Turns(Context())
    with turns:
        with pytest.raises(EPInputError, match="this thread is in the middle of a call"), turns:
            pass
        assert not in_another_thread(lambda: can_enter(turns))
    assert can_enter(turns)
    assert in_another_thread(lambda: can_enter(turns))


@pytest.mark.parametrize("error", [None, KeyError("thrown")])
def test_an_end_in_the_middle_of_a_call(error: Exception | None) -> None:
    """The call runs what ends the Buffer, and does not return as if nothing had happened."""
    context, ended = Context(), []
    turns = Turns(context)

    def call() -> None:
        turns.refuse("it ends")
        turns.refuse("another reason")
        turns.end(lambda thrown: ended.append((context.depth, thrown)))
        assert not ended
        with pytest.raises(EPDestroyedError, match="it ends"):
            turns.check()
        with pytest.raises(EPDestroyedError, match="it ends"), turns:
            pass
        if error:
            raise error

    with pytest.raises(type(error) if error else EPDestroyedError), turns:
        call()
    assert ended == [(1, error)]
    assert context.depth == 0
    with pytest.raises(EPDestroyedError), turns:
        pass


def test_calls_that_are_refused_from_another_thread_say_why() -> None:
    """Also in a process that was forked off while another thread was in a call: its lock stays as it was."""
    turns = Turns(Context())
    with suppress(EPDestroyedError), turns:
        turns.refuse("forked")

        def why() -> str:
            with pytest.raises(EPDestroyedError) as caught, turns:
                pass
            return str(caught.value)

        assert in_another_thread(why) == "forked"
