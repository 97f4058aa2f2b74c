"""The order of receiving hooks: what `return_recv_hook=True` hands out, and when it may be called."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .errors import EPInputError


class Hook:
    """The receiving half of a call. Calling it receives; that happens once, and in the order of the calls."""

    def __init__(self, order: HookOrder) -> None:
        self._order = order
        self.called = False

    def __call__(self) -> None:
        with self._order._turns:
            if self.called:
                raise EPInputError(f"this hook of {self._order.what} was called already; each is called once")
            receive = self._order._close(self)
            self.called = True
            receive()


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
        self._open: deque[tuple[weakref.ref[Hook], Callable[[], None]]] = deque()

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

    def hook(self, receive: Callable[[], None]) -> Hook:
        """Note a call that was made, and wrap what receives for it. `receive` must not hold the hook."""
        made = Hook(self)
        self._open.append((weakref.ref(made), receive))
        return made

    def _close(self, hook: Hook) -> Callable[[], None]:
        self._call_abandoned()
        if self._open[0][0]() is not hook:
            raise EPInputError(f"an earlier hook of {self.what} is open; call hooks in the order of their calls")
        return self._open.popleft()[1]  # forgotten, so that the hook keeps no memory alive

    def _call_abandoned(self) -> None:
        while self._open and self._open[0][0]() is None:
            self._open.popleft()[1]()


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


def check_called(hook: Hook | None) -> None:
    """Raise EPInputError if the dispatch of a handle has a hook that was not called."""
    if hook is not None and not hook.called:
        raise EPInputError("handle: the hook of its low_latency_dispatch was not called yet; call it first")
