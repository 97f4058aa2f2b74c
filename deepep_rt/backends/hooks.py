"""Hooks of `return_recv_hook=True`: a call sends, and its hook receives later. They run in the order of their calls.

At the end are prepared calls that are made as ordinary calls: on the host backend, and for arrays in host memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..arrays.view import View
from ..errors import EPInputError
from ..results import CombineResult, DispatchResult, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle
from .base import Backend, Call, CombineInputs, LowLatencyCombineInputs, LowLatencyPreparation, ThroughputPreparation


@dataclass(slots=True)
class HookState:
    """Whether a hook has run. Handles keep this state and not the hook: a caller that dropped the hook cannot call it any more."""

    is_done: bool = False
    is_outdated: bool = False  # other members have begun a generation since the call


class Hook:
    """The receiving half of a call. It runs once, and after the hooks of earlier calls."""

    def __init__(self, queue: HookQueue, state: HookState) -> None:
        self._queue = queue
        self.state = state

    def __call__(self) -> None:
        self._queue.run(self)


@dataclass(slots=True)
class _OpenCall:
    """A call whose receiving half has not run."""

    hook: weakref.ref[Hook]
    receive: Callable[[], None]
    state: HookState
    current_capture: Callable[[], int | None]
    captured_in: int | None

    def run(self) -> None:
        self.state.is_done = True
        self.receive()

    def is_in_other_capture(self) -> bool:
        return self.captured_in != self.current_capture()


class HookQueue:
    """The open calls of one kind, oldest first.

    An exception may take the caller past a hook. The next call or hook then runs the lost hook in its place, because the other ranks have
    made that call too. `call_lock` is held while a hook runs, which is half a call.
    """

    def __init__(self, limit: int, name: str, call_lock: AbstractContextManager[Any]) -> None:
        self.name, self._limit, self._call_lock = name, limit, call_lock
        self._open: deque[_OpenCall] = deque()

    def check_can_start(self, has_hook: bool) -> None:
        """Raise EPInputError if a call may not start now. This records nothing: the call may still fail."""
        if self._open:
            self.run_lost_hooks()
        if not has_hook and self._open:
            raise EPInputError(f"{self.name} without return_recv_hook, but {len(self._open)} hooks are open; call them first")
        if has_hook and len(self._open) >= self._limit:
            raise EPInputError(
                f"{self.name}: {len(self._open)} open hooks are all that num_slots={self._limit} allows; call the oldest first"
            )

    def check_none_open(self, action: str) -> None:
        """Raise EPInputError if a call waits for its hook. `action` names what the caller is about to do."""
        self.run_lost_hooks()
        if self._open:
            raise EPInputError(f"{action}: hooks of {self.name} are open ({len(self._open)}); call them first")

    def append(self, receive: Callable[[], None], current_capture: Callable[[], int | None] = lambda: None) -> Hook:
        """Record a call that was made, and return its hook. `receive` runs the receiving half. It must not hold the hook.

        `current_capture` returns the number of the CUDA graph capture of the call's stream, or None.
        """
        hook = Hook(self, HookState())
        self._open.append(_OpenCall(weakref.ref(hook), receive, hook.state, current_capture, current_capture()))
        return hook

    def run(self, hook: Hook) -> None:
        """Run a hook of this queue; raise EPInputError if it has run, or if an earlier one is open."""
        with self._call_lock:
            if hook.state.is_outdated:
                raise EPInputError(
                    f"this hook of {self.name} is of an older generation; expected one since shrink() or admit(). Call again without it"
                )
            if hook.state.is_done:
                raise EPInputError(f"this hook of {self.name} was called already; expected one call. Call each hook once")
            self.run_lost_hooks()
            first = self._open[0]
            if first.hook() is not hook:
                raise EPInputError(f"an earlier hook of {self.name} is open; call hooks in the order of their calls")
            if first.is_in_other_capture():
                raise EPInputError(
                    f"a {self.name} and its hook belong in the same capture of a CUDA graph, or both outside of any; drop this hook if "
                    f"its capture has ended"
                )
            self._open.popleft().run()  # removed first, so that the hook keeps no memory alive

    def drop_all(self) -> None:
        """Forget the open calls: the members have changed, and their rows do not come."""
        for call in self._open:
            call.state.is_outdated = call.state.is_done = True
        self._open.clear()

    def is_open(self, state: HookState | None) -> bool:
        """Return whether the call with this state waits for its hook, and its hook can still run."""
        return any(call.state is state for call in self._open)

    def run_lost_hooks(self) -> None:
        """Run the hooks that the caller dropped, in the place of the caller."""
        while self._open and self._open[0].hook() is None:
            first = self._open[0]
            in_other_capture = first.is_in_other_capture()
            if in_other_capture and first.captured_in is None:
                raise EPInputError(
                    f"a hook of {self.name} was lost and has to be called first, which cannot be in a capture of a CUDA graph; make a "
                    f"call before it"
                )
            self._open.popleft()
            if not in_other_capture:
                first.run()
            # A hook lost in another capture cannot run: the caller dropped half of that graph.


class Hooks:
    """The hooks of a Buffer's low-latency calls. The arguments are those of `HookQueue`."""

    def __init__(self, limit: int, call_lock: AbstractContextManager[Any]) -> None:
        self.dispatch = HookQueue(limit, "low_latency_dispatch", call_lock)
        self.combine = HookQueue(limit, "low_latency_combine", call_lock)

    def drop_all(self) -> None:
        """Forget the open calls of both kinds."""
        for queue in (self.dispatch, self.combine):
            queue.drop_all()

    def check_none_open(self, action: str) -> None:
        """Raise EPInputError if a call of either kind waits for its hook."""
        for queue in (self.dispatch, self.combine):
            queue.check_none_open(action)


def check_can_sleep(hooks: Hooks, masked: Sequence[int]) -> None:
    """Raise EPInputError if a hook is open or a rank is masked."""
    hooks.check_none_open("sleep()")
    if masked:
        raise EPInputError(
            f"sleep() while ranks {list(masked)} are masked; expected a Buffer that all its ranks use. Unmask them, or make a new Buffer "
            f"without them"
        )


class OwnHooks:
    """The hooks of one prepared call. Its dispatches share memory, and so do its combines, so at most one of each kind may be open."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.dispatch: HookState | None = None
        self.combine: HookState | None = None

    def check_can_dispatch(self) -> None:
        """Raise EPInputError if a hook of this prepared call is open."""
        self._check_closed(self._hooks.dispatch, self.dispatch)
        self.check_can_combine()

    def check_can_combine(self) -> None:
        """Raise EPInputError if the hook of this prepared call's last combine is open."""
        self._check_closed(self._hooks.combine, self.combine)

    def _check_closed(self, queue: HookQueue, state: HookState | None) -> None:
        if state is None or state.is_done:
            return
        queue.run_lost_hooks()
        if queue.is_open(state):
            raise EPInputError(
                f"the hook of this prepared call's last {queue.name} is open; expected no open hook, because calls share its memory. Call "
                f"the hook first, or prepare another call for the next micro-batch"
            )


def check_hook_called(state: HookState | None) -> None:
    """Raise EPInputError if the dispatch of a handle has a hook that was not called."""
    if state is not None and not state.is_done:
        raise EPInputError("handle: the hook of its low_latency_dispatch was not called yet; call it first")


class OrdinaryThroughput:
    """See `base.PreparedCalls`. Each result has memory of its own."""

    def __init__(self, backend: Backend, preparation: ThroughputPreparation) -> None:
        self._backend, self._given = backend, preparation
        self._combine: CombineInputs | None = None

    def dispatch(self) -> DispatchResult:
        return self._backend.dispatch(self._given.dispatch, self._begin())

    def set_rows(self, y: View) -> None:
        self._combine = self._given.combine(y)

    def combine(self) -> CombineResult:
        assert self._combine is not None
        return self._backend.combine(self._combine, self._begin())

    def _begin(self) -> Call:
        return self._backend.begin(self._given.caller_x, self._given.async_finish, None, self._given.stream)


class OrdinaryLowLatency:
    """See `base.PreparedCalls`. Each result has memory of its own."""

    def __init__(self, backend: Backend, preparation: LowLatencyPreparation, hooks: Hooks) -> None:
        self._backend, self._given, self._own_hooks = backend, preparation, OwnHooks(hooks)
        self._y: View | None = None
        self._handle: LowLatencyHandle | None = None

    def dispatch(self) -> LowLatencyDispatchResult:
        given = self._given
        call = self._begin()
        self._own_hooks.check_can_dispatch()
        sent = self._backend.low_latency_dispatch(given.dispatch, call, given.with_hook)
        self._handle, self._own_hooks.dispatch = sent.handle, state_of(sent.hook)
        return sent

    def set_rows(self, y: View) -> None:
        self._y = y

    def combine(self) -> LowLatencyCombineResult:
        given, handle, y = self._given, self._handle, self._y
        if handle is None:
            raise no_dispatch()
        assert y is not None
        call = self._begin()
        self._own_hooks.check_can_combine()
        idx, weights = given.dispatch.topk_idx, given.dispatch.topk_weights
        assert weights is not None
        inputs = LowLatencyCombineInputs(y, idx, weights, handle, given.reduce_early, given.out, given.compress)
        back = self._backend.low_latency_combine(inputs, call, given.with_hook)
        self._own_hooks.combine = state_of(back.hook)
        return back

    def _begin(self) -> Call:
        return self._backend.begin(self._given.caller_x, self._given.async_finish, None, self._given.stream)


def no_dispatch() -> EPInputError:
    """Make the error for a combine without a dispatch."""
    return EPInputError("combine of a prepared call; expected its dispatch before. Call dispatch() first")


def state_of(hook: Callable[[], None] | None) -> Any:
    """Return the state of a hook, which does not keep the hook alive; None without a hook."""
    assert hook is None or isinstance(hook, Hook)
    return None if hook is None else hook.state
