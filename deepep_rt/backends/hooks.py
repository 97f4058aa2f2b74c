"""The order of receiving hooks: what `return_recv_hook=True` hands out, and when it may be called."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import EPInputError


@dataclass(slots=True)
class Reception:
    """Whether what a call sent has been received. A handle keeps this, and not the hook: who has but the handle cannot call the hook."""

    is_done: bool = False


class Hook:
    """The receiving half of a call. Calling it receives; that happens once, and in the order of the calls."""

    def __init__(self, order: HookOrder, reception: Reception) -> None:
        self._order = order
        self.reception = reception

    def __call__(self) -> None:
        with self._order._turns:
            if self.reception.is_done:
                raise EPInputError(f"this hook of {self._order.what} was called already; each is called once")
            self._order._call(self)


def _outside() -> None:
    return None


@dataclass(slots=True)
class _Open:
    """A call whose receiving half has not run."""

    hook: weakref.ref[Hook]
    receive: Callable[[], None]
    reception: Reception
    capture_now: Callable[[], int | None]
    captured_in: int | None

    def run(self) -> None:
        self.reception.is_done = True
        self.receive()


class HookOrder:
    """The open hooks of one kind of call, oldest first.

    A hook that nobody can call any more (an exception took the caller past it) is called here, when its turn comes: the other ranks have
    made the call.

    Args:
        limit: How many may be open (the buffer's `num_slots`).
        what: The call's name, for messages.
        turns: Entered for the time of a hook, which is half a call.
    """

    def __init__(self, limit: int, what: str, turns: AbstractContextManager[Any]) -> None:
        self.what, self._limit, self._turns = what, limit, turns
        self._open: deque[_Open] = deque()

    def start(self, has_hook: bool) -> None:
        """Raise EPInputError if such a call may not start now. Nothing is noted yet: the call may still fail."""
        if self._open:
            self._call_abandoned()
        if not has_hook and self._open:
            raise EPInputError(f"{self.what} without return_recv_hook, but {len(self._open)} hooks are open; call them first")
        if has_hook and len(self._open) >= self._limit:
            raise EPInputError(
                f"{self.what}: {len(self._open)} open hooks are all that num_slots={self._limit} allows; call the oldest first"
            )

    def check_none_open(self, doing: str) -> None:
        """Raise EPInputError if a call waits for its hook."""
        self._call_abandoned()
        if self._open:
            raise EPInputError(f"{doing}: hooks of {self.what} are open ({len(self._open)}); call them first")

    def hook(self, receive: Callable[[], None], capture_now: Callable[[], int | None] = _outside) -> Hook:
        """Note a call that was made, and wrap what receives for it.

        Args:
            receive: Receives. It must not hold the hook.
            capture_now: The number of the CUDA graph capture that the call's stream is part of.
        """
        made = Hook(self, Reception())
        self._open.append(_Open(weakref.ref(made), receive, made.reception, capture_now, capture_now()))
        return made

    def _call(self, hook: Hook) -> None:
        self._call_abandoned()
        first = self._open[0]
        if first.hook() is not hook:
            raise EPInputError(f"an earlier hook of {self.what} is open; call hooks in the order of their calls")
        if first.captured_in != first.capture_now():
            raise EPInputError(
                f"a {self.what} and its hook belong in the same capture of a CUDA graph, or both outside of any; drop this hook if "
                f"its capture has ended"
            )
        self._open.popleft().run()  # forgotten, so that the hook keeps no memory alive

    def _call_abandoned(self) -> None:
        while self._open and self._open[0].hook() is None:
            first = self._open[0]
            elsewhere = first.captured_in != first.capture_now()
            if elsewhere and first.captured_in is None:
                raise EPInputError(
                    f"a hook of {self.what} was lost and has to be called first, which cannot be in a capture of a CUDA graph; make a "
                    f"call before it"
                )
            self._open.popleft()
            if not elsewhere:
                first.run()
            # Otherwise nothing was sent, or it is when the graph is replayed, and nobody receives: the caller lost half of a graph.


class Hooks:
    """Those of a Buffer's low-latency calls.

    Args:
        limit: As of `HookOrder`.
        turns: As of `HookOrder`.
    """

    def __init__(self, limit: int, turns: AbstractContextManager[Any]) -> None:
        self.dispatch = HookOrder(limit, "low_latency_dispatch", turns)
        self.combine = HookOrder(limit, "low_latency_combine", turns)

    def check_none_open(self, doing: str) -> None:
        """Raise EPInputError if a call of either kind waits for its hook."""
        for order in (self.dispatch, self.combine):
            order.check_none_open(doing)


def check_received(reception: Reception | None) -> None:
    """Raise EPInputError if the dispatch of a handle has a hook that was not called."""
    if reception is not None and not reception.is_done:
        raise EPInputError("handle: the hook of its low_latency_dispatch was not called yet; call it first")
