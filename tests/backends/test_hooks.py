"""`hooks`: in which order receiving halves run, and what becomes of those that the caller has lost."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from deepep_rt import EPInputError
from deepep_rt.backends.hooks import Hook, HookOrder, Hooks, Reception, check_received


class Turns:
    """Counts how deep it was entered."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Calls:
    """Calls of one kind; `received` lists the numbers of those that received."""

    def __init__(self, limit: int = 3) -> None:
        self.turns, self.capture, self.received = Turns(), None, []
        self.order = HookOrder(limit, "low_latency_dispatch", self.turns)

    def make(self, number: int) -> Hook:
        def receive() -> None:
            assert self.turns.depth or number < 0
            self.received.append(number)

        return self.order.hook(receive, lambda: self.capture)

    def lose(self, number: int) -> None:
        """A call whose hook is lost; receiving need not be in a turn."""
        self.make(-number)


def test_a_hook_receives_once_and_in_a_turn() -> None:
    calls = Calls()
    hook = calls.make(1)
    assert not hook.reception.is_done
    hook()
    assert (calls.received, calls.turns.depth, hook.reception.is_done) == ([1], 0, True)
    with pytest.raises(EPInputError, match="this hook of low_latency_dispatch was called already; each is called once"):
        hook()
    assert (calls.received, calls.turns.depth) == ([1], 0)


def test_hooks_are_called_in_the_order_of_their_calls() -> None:
    calls = Calls()
    first, second = calls.make(1), calls.make(2)
    with pytest.raises(EPInputError, match="an earlier hook of low_latency_dispatch is open; call hooks in the order"):
        second()
    assert not second.reception.is_done
    first()
    second()
    assert calls.received == [1, 2]


def test_a_call_that_receives_at_once_waits_for_open_hooks() -> None:
    calls = Calls()
    calls.order.start(False)
    hook = calls.make(1)
    with pytest.raises(
        EPInputError, match="low_latency_dispatch without return_recv_hook, but 1 hooks are open; call them first"
    ):
        calls.order.start(False)
    calls.order.start(True)
    hook()
    calls.order.start(False)


def test_only_so_many_hooks_are_open() -> None:
    calls = Calls(limit=2)
    calls.order.start(True)
    held = [calls.make(1)]
    calls.order.start(True)
    held.append(calls.make(2))
    with pytest.raises(EPInputError, match="low_latency_dispatch: 2 open hooks are all that num_slots=2 allows; call the oldest"):
        calls.order.start(True)
    held[0]()
    calls.order.start(True)


@pytest.mark.parametrize(
    "meet", [lambda order: order.start(True), lambda order: order.start(False), lambda order: order.check_none_open("masking")]
)
def test_lost_hooks_are_called_when_their_turn_comes(meet: Any) -> None:
    """The other ranks have made the calls."""
    calls = Calls()
    calls.lose(1)
    calls.lose(2)
    assert calls.received == []
    meet(calls.order)
    assert calls.received == [-1, -2]


def test_a_lost_hook_is_called_before_the_one_after_it_and_not_before_the_one_before_it() -> None:
    calls = Calls(limit=4)
    first = calls.make(1)
    calls.lose(2)
    third = calls.make(3)
    calls.order.start(True)
    assert calls.received == [], "the first is not lost"
    first()
    third()
    assert calls.received == [1, -2, 3]


def test_what_may_not_be_done_while_hooks_are_open() -> None:
    hooks = Hooks(2, Turns())
    hooks.check_none_open("masking a rank")
    for order, kind in ((hooks.dispatch, "low_latency_dispatch"), (hooks.combine, "low_latency_combine")):
        hook = order.hook(lambda: None)
        with pytest.raises(EPInputError, match=rf"^masking a rank: hooks of {kind} are open \(1\); call them first$"):
            hooks.check_none_open("masking a rank")
        hook()
    hooks.check_none_open("masking a rank")


def test_both_kinds_of_hooks_have_the_limit_and_the_turns() -> None:
    turns = Turns()
    hooks = Hooks(1, turns)
    for order in (hooks.dispatch, hooks.combine):
        depths: list[int] = []
        hook = order.hook(lambda depths=depths: depths.append(turns.depth))  # type: ignore[misc]
        with pytest.raises(EPInputError, match="num_slots=1"):
            order.start(True)
        hook()
        assert depths == [1]


@pytest.mark.parametrize(("made_in", "called_in"), [(None, 5), (5, None), (5, 6)])
def test_a_hook_belongs_in_the_capture_of_its_call(made_in: int | None, called_in: int | None) -> None:
    calls = Calls()
    calls.capture = made_in
    hook = calls.make(1)
    calls.capture = called_in
    with pytest.raises(EPInputError, match="a low_latency_dispatch and its hook belong in the same capture of a CUDA graph"):
        hook()
    assert calls.received == []
    calls.capture = made_in
    hook()
    assert calls.received == [1]


def test_a_lost_hook_of_an_eager_call_stays_for_after_the_capture() -> None:
    calls = Calls()
    calls.lose(1)
    calls.capture = 5
    with pytest.raises(EPInputError, match="a hook of low_latency_dispatch was lost and has to be called first"):
        calls.order.start(True)
    calls.capture = None
    calls.order.start(True)
    assert calls.received == [-1]


@pytest.mark.parametrize(("now", "received"), [(None, [-3]), (6, []), (5, [-1, -2])])
def test_lost_hooks_of_a_capture(now: int | None, received: list[int]) -> None:
    """Nothing was sent outside of it; within it they are called like others."""
    calls = Calls(limit=4)
    calls.capture = 5
    calls.lose(1)
    calls.lose(2)
    calls.capture = now
    if now is None:
        calls.lose(3)
    calls.order.start(False)
    assert calls.received == received
    calls.order.check_none_open("masking")


def test_a_hook_that_was_called_keeps_nothing() -> None:
    class Memory: ...

    memory = Memory()
    seen = weakref.ref(memory)
    order = HookOrder(1, "low_latency_combine", Turns())
    hook = order.hook(lambda memory=memory: None)  # type: ignore[misc]
    del memory
    hook()
    gc.collect()
    assert seen() is None


def test_a_handle_is_used_after_its_hook() -> None:
    check_received(None)
    check_received(Reception(is_done=True))
    with pytest.raises(EPInputError, match="handle: the hook of its low_latency_dispatch was not called yet; call it first"):
        check_received(Reception())
