"""The order of receiving hooks: what `return_recv_hook=True` hands out, and when it may be called."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .errors import EPInputError


class Hook:
    """The receiving half of a call. Calling it receives; that happens once, and in the order of the calls."""

    def __init__(self, order: HookOrder, receive: Callable[[], None]) -> None:
        self._order = order
        self._receive: Callable[[], None] | None = receive

    @property
    def called(self) -> bool:
        return self._receive is None

    def __call__(self) -> None:
        if self._receive is None:
            raise EPInputError(f"this hook of {self._order.what} was called already; each is called once")
        self._order._close(self)
        receive, self._receive = self._receive, None  # forgotten, so that the hook keeps no memory alive
        receive()


class HookOrder:
    """The open hooks of one kind of call, oldest first.

    Args:
        limit: How many may be open (the buffer's `num_slots`).
        what: The call's name, for messages.
    """

    def __init__(self, limit: int, what: str) -> None:
        self.what, self._limit = what, limit
        self._open: deque[Hook] = deque()

    def start(self, has_hook: bool) -> None:
        """Raise EPInputError if such a call may not start now. Nothing is noted yet: the call may still fail."""
        if not has_hook and self._open:
            raise EPInputError(f"{self.what} without return_recv_hook, but {len(self._open)} hooks are open; call them first")
        if has_hook and len(self._open) >= self._limit:
            raise EPInputError(
                f"{self.what}: {len(self._open)} open hooks are all that num_slots={self._limit} allows; call the oldest first"
            )

    def check_none_open(self, doing: str) -> None:
        """Raise EPInputError if a call waits for its hook."""
        if self._open:
            raise EPInputError(f"{doing}: hooks of {self.what} are open ({len(self._open)}); call them first")

    def hook(self, receive: Callable[[], None]) -> Hook:
        """Note a call that was made, and wrap what receives for it."""
        made = Hook(self, receive)
        self._open.append(made)
        return made

    def _close(self, hook: Hook) -> None:
        if self._open[0] is not hook:
            raise EPInputError(f"an earlier hook of {self.what} is open; call hooks in the order of their calls")
        self._open.popleft()
