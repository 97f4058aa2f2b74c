"""`turns`: one thread at a time is in a call of a Buffer, and in the Buffer's context."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from deepep_rt import EPInputError
from deepep_rt.turns import Turns


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


def test_the_end_waits_for_a_call() -> None:
    context, begun, ended = Context(), threading.Event(), []
    turns = Turns(context)

    def call() -> None:
        with turns:
            begun.set()
            time.sleep(0.1)
            ended.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    with turns.last():
        assert ended
        assert context.depth == 1
    assert context.depth == 0
    thread.join()
