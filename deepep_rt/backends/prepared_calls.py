"""Prepared calls that are made as ordinary calls: on the host backend, and for arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..arrays.view import View
from ..errors import EPInputError
from ..results import CombineResult, DispatchResult, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle
from .calls import (
    Call,
    CombineInputs,
    DispatchInputs,
    LowLatencyCombineInputs,
    LowLatencyDispatchInputs,
    LowLatencyPreparation,
    ThroughputPreparation,
)
from .hooks import Hook, Hooks, OwnHooks


class OrdinaryBackend(Protocol):
    """The ordinary calls of a backend."""

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Choose the stream of a call; raise if an earlier call timed out."""

    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """See `Buffer.dispatch`."""

    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """See `Buffer.combine`."""

    def low_latency_dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """See `Buffer.low_latency_dispatch`."""

    def low_latency_combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """See `Buffer.low_latency_combine`."""


class OrdinaryThroughput:
    """See `base.PreparedCalls`. Each result has memory of its own.

    Args:
        backend: Makes the calls.
        preparation: Their arguments.
    """

    def __init__(self, backend: OrdinaryBackend, preparation: ThroughputPreparation) -> None:
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
    """See `base.PreparedCalls`. Each result has memory of its own.

    Args:
        backend: Makes the calls.
        preparation: Their arguments.
        hooks: The open hooks of the Buffer.
    """

    def __init__(self, backend: OrdinaryBackend, preparation: LowLatencyPreparation, hooks: Hooks) -> None:
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
