"""Hooks run in the order of their calls, and lost hooks run in their place."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from deepep_rt import EPInputError
from deepep_rt.backends.hooks import Hook, HookQueue, Hooks, HookState, check_hook_called


class CallLock:
    """Count how often the lock is held."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Calls:
    """Make calls of one kind; `received` lists the numbers of the calls that received."""

    def __init__(self, limit: int = 3) -> None:
        self.call_lock, self.capture, self.received = CallLock(), None, []
        self.queue = HookQueue(limit, "low_latency_dispatch", self.call_lock)

    def make(self, number: int) -> Hook:
        def receive() -> None:
            assert self.call_lock.depth or number < 0
            self.received.append(number)

        return self.queue.append(receive, lambda: self.capture)

    def lose(self, number: int) -> None:
        """Make a call whose hook is lost. Its receiving half may run without the lock."""
        self.make(-number)


def test_a_hook_receives_once_and_under_the_lock() -> None:
    calls = Calls()
    hook = calls.make(1)
    assert not hook.state.is_done
    hook()
    assert (calls.received, calls.call_lock.depth, hook.state.is_done) == ([1], 0, True)
    with pytest.raises(EPInputError, match="this hook of low_latency_dispatch was called already; expected one call"):
        hook()
    assert (calls.received, calls.call_lock.depth) == ([1], 0)


def test_hooks_are_called_in_the_order_of_their_calls() -> None:
    calls = Calls()
    first, second = calls.make(1), calls.make(2)
    with pytest.raises(EPInputError, match="an earlier hook of low_latency_dispatch is open; call hooks in the order"):
        second()
    assert not second.state.is_done
    first()
    second()
    assert calls.received == [1, 2]


def test_a_call_without_a_hook_needs_all_hooks_called() -> None:
    calls = Calls()
    calls.queue.check_can_start(False)
    hook = calls.make(1)
    with pytest.raises(
        EPInputError, match="low_latency_dispatch without return_recv_hook, but 1 hooks are open; call them first"
    ):
        calls.queue.check_can_start(False)
    calls.queue.check_can_start(True)
    hook()
    calls.queue.check_can_start(False)


def test_at_most_num_slots_hooks_are_open() -> None:
    calls = Calls(limit=2)
    calls.queue.check_can_start(True)
    held = [calls.make(1)]
    calls.queue.check_can_start(True)
    held.append(calls.make(2))
    with pytest.raises(EPInputError, match="low_latency_dispatch: 2 open hooks are all that num_slots=2 allows; call the oldest"):
        calls.queue.check_can_start(True)
    held[0]()
    calls.queue.check_can_start(True)


@pytest.mark.parametrize(
    "act",
    [
        lambda queue: queue.check_can_start(True),
        lambda queue: queue.check_can_start(False),
        lambda queue: queue.check_none_open("masking"),
    ],
)
def test_later_calls_run_lost_hooks(act: Any) -> None:
    """The other ranks have made these calls too."""
    calls = Calls()
    calls.lose(1)
    calls.lose(2)
    assert calls.received == []
    act(calls.queue)
    assert calls.received == [-1, -2]


def test_a_lost_hook_runs_between_its_neighbours() -> None:
    calls = Calls(limit=4)
    first = calls.make(1)
    calls.lose(2)
    third = calls.make(3)
    calls.queue.check_can_start(True)
    assert calls.received == [], "the first is not lost"
    first()
    third()
    assert calls.received == [1, -2, 3]


def test_masking_needs_all_hooks_called() -> None:
    hooks = Hooks(2, CallLock())
    hooks.check_none_open("masking a rank")
    for queue, kind in ((hooks.dispatch, "low_latency_dispatch"), (hooks.combine, "low_latency_combine")):
        hook = queue.append(lambda: None)
        with pytest.raises(EPInputError, match=rf"^masking a rank: hooks of {kind} are open \(1\); call them first$"):
            hooks.check_none_open("masking a rank")
        hook()
    hooks.check_none_open("masking a rank")


def test_both_kinds_of_hooks_have_the_limit_and_the_lock() -> None:
    lock = CallLock()
    hooks = Hooks(1, lock)
    for queue in (hooks.dispatch, hooks.combine):
        depths: list[int] = []
        hook = queue.append(lambda depths=depths: depths.append(lock.depth))  # type: ignore[misc]
        with pytest.raises(EPInputError, match="num_slots=1"):
            queue.check_can_start(True)
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
        calls.queue.check_can_start(True)
    calls.capture = None
    calls.queue.check_can_start(True)
    assert calls.received == [-1]


@pytest.mark.parametrize(("now", "received"), [(None, [-3]), (6, []), (5, [-1, -2])])
def test_lost_hooks_of_a_capture(now: int | None, received: list[int]) -> None:
    """They run in their capture only: outside of it, nothing was sent."""
    calls = Calls(limit=4)
    calls.capture = 5
    calls.lose(1)
    calls.lose(2)
    calls.capture = now
    if now is None:
        calls.lose(3)
    calls.queue.check_can_start(False)
    assert calls.received == received
    calls.queue.check_none_open("masking")


def test_a_hook_that_has_run_holds_no_memory() -> None:
    class Memory: ...

    memory = Memory()
    seen = weakref.ref(memory)
    queue = HookQueue(1, "low_latency_combine", CallLock())
    hook = queue.append(lambda memory=memory: None)  # type: ignore[misc]
    del memory
    hook()
    gc.collect()
    assert seen() is None


def test_a_handle_needs_its_hook_called() -> None:
    check_hook_called(None)
    check_hook_called(HookState(is_done=True))
    with pytest.raises(EPInputError, match="handle: the hook of its low_latency_dispatch was not called yet; call it first"):
        check_hook_called(HookState())
