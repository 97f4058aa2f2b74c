"""Prepared calls: a dispatch and a combine whose arguments are checked once, so that each call only launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .arrays.view import View
from .backends.base import PreparedCalls
from .backends.call_lock import CallLock
from .backends.nvtx_ranges import Annotate, PreparedTexts
from .errors import EPInputError
from .results import CombineResult, DispatchResult, LowLatencyCombineResult, LowLatencyDispatchResult, SharedByCopies

_Sent = TypeVar("_Sent", DispatchResult, LowLatencyDispatchResult)
_Back = TypeVar("_Back", CombineResult, LowLatencyCombineResult)


def check_in_place(view: View, name: str) -> None:
    """Raise EPInputError for JAX arrays: a program cannot write new values to them, and expects that results never change."""
    if view.framework.name == "jax":
        raise EPInputError(
            f"{name} is a JAX array, which is read-only; expected an array that the program updates in place between prepared calls. Make "
            f"ordinary calls, or use deepep_rt.jax"
        )


class _Prepared(SharedByCopies, Generic[_Sent, _Back]):
    """A dispatch and a combine, and the rows of the last combine."""

    _instead = "prepare the calls where you load it"
    _names = "dispatch", "combine"  # of the calls, as methods of `Buffer`

    def __init__(
        self,
        _prepared: PreparedCalls[_Sent, _Back],
        _call_lock: CallLock,
        _view_rows: Callable[[Any], View],
        _y: Any,
        _annotate: Annotate | None,
        _texts: PreparedTexts | None,  # of ranges, if `_annotate` is given
    ) -> None:
        self._prepared: PreparedCalls[_Sent, _Back] = _prepared
        self._call_lock, self._view_rows, self._annotate = _call_lock, _view_rows, _annotate
        self._dispatch_text, self._text_of_combine = _texts or ("", lambda rows: "")
        self._combine_text = ""
        self._y: Any = None
        if _y is not None:
            self._set_rows(_y)

    def _set_rows(self, y: Any) -> None:
        rows = self._view_rows(y)
        self._prepared.set_rows(rows)
        self._y = y
        if self._annotate is not None:
            self._combine_text = self._text_of_combine(rows)

    def _make_dispatch(self) -> _Sent:
        with (lock := self._call_lock):
            lock.progress.name = self._names[0]
            if self._annotate is None:
                return self._prepared.dispatch()
            with self._annotate(self._dispatch_text):
                return self._prepared.dispatch()

    def _make_combine(self, y: Any) -> _Back:
        with (lock := self._call_lock):
            lock.progress.name = self._names[1]
            if y is not None and y is not self._y:
                self._set_rows(y)
            elif self._y is None:
                raise EPInputError("y=None; expected the experts' rows, because no earlier call got them. Pass y")
            if self._annotate is None:
                return self._prepared.combine()
            with self._annotate(self._combine_text):
                return self._prepared.combine()


class PreparedThroughput(_Prepared[DispatchResult, CombineResult]):
    """A dispatch along a known routing and its combine, with arguments that `Buffer.prepare_throughput` has checked.

    Before each call, write the new values to `x` and the other arrays in place. The calls hold these arrays. They do not notice if a
    program gives one of them other memory, as `tensor.set_()` and `tensor.resize_()` do. Calls then read the old memory, which its library
    may have given to another array.

    On GPUs all calls use the same memory: a dispatch overwrites the results of the last dispatch, and a combine those of the last combine.
    Work on other streams that reads results has to be ordered before the next call. The memory is that of a dispatch result
    (`num_slots`) and belongs to this object and its results, also while no call runs.

    The calls need no fixed order: a program may make the combine alone, or several of either kind. They occupy `Buffer.num_sms` SMs at the
    time. A CUDA graph can capture them. Keep this object and its arrays as long as the graph.

    Example:
        >>> handle = buffer.dispatch(x, topk_idx, topk_weights).handle
        >>> step = buffer.prepare_throughput(x, handle)
        >>> while training:
        ...     update(x)  # in place
        ...     sent = step.dispatch()
        ...     out = step.combine(experts(sent.recv_x)).x
    """

    def dispatch(self) -> DispatchResult:
        """Make the dispatch. See `Buffer.dispatch` with `handle`.

        Returns:
            The same as there. `recv_x` and the other arrays are valid until the next `dispatch()`. Calls on one stream return the same
            object.

        Raises:
            EPTimeoutError: If a peer did not answer in an earlier call.
            EPDestroyedError: After `Buffer.destroy`.

        Example:
            >>> sent = step.dispatch()
        """
        return self._make_dispatch()

    def combine(self, y: Any = None) -> CombineResult:
        """Make the combine. See `Buffer.combine`.

        Args:
            y: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`. Only an array other than the last one is
                checked. None: the last one.

        Returns:
            The same as there. `x` and `topk_weights` are valid until the next `combine()`.

        Raises:
            EPInputError: If `y` is wrong, or was never given.
            EPTimeoutError: If a peer did not answer in an earlier call.
            EPDestroyedError: After `Buffer.destroy`.

        Example:
            >>> out = step.combine(y).x
        """
        return self._make_combine(y)


class PreparedLowLatency(_Prepared[LowLatencyDispatchResult, LowLatencyCombineResult]):
    """A low-latency dispatch and its combine, with arguments that `Buffer.prepare_low_latency` has checked.

    Before each step, write the new values to `x`, `topk_idx`, `topk_weights` and `x_scales` in place. What `PreparedThroughput` says of
    these arrays, of results that the next call overwrites, and of CUDA graphs holds here too. With hooks, at most one dispatch and one
    combine are open. For two micro-batches, prepare two calls.

    Example:
        >>> step = buffer.prepare_low_latency(x, topk_idx, topk_weights)
        >>> while decoding:
        ...     update(x, topk_idx, topk_weights)  # in place
        ...     sent = step.dispatch()
        ...     y = experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)
        ...     out = step.combine(y).x
    """

    _names = "low_latency_dispatch", "low_latency_combine"

    def dispatch(self) -> LowLatencyDispatchResult:
        """Make the dispatch. See `Buffer.low_latency_dispatch`; on GPUs the host takes a third of its time.

        Returns:
            The same as there. `recv_x` and the other arrays are valid until the next `dispatch()`. Calls without hooks, on one stream,
            return the same object.

        Raises:
            EPInputError: If a hook of this object is open, or as `Buffer.low_latency_dispatch`.
            EPTimeoutError: If a peer did not answer in an earlier call.
            EPDestroyedError: After `Buffer.destroy`.

        Example:
            >>> sent = step.dispatch()
        """
        return self._make_dispatch()

    def combine(self, y: Any = None) -> LowLatencyCombineResult:
        """Make the combine of the last dispatch. See `Buffer.low_latency_combine`.

        Args:
            y: `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16, in the order of `recv_x`. Only an array
                other than the last one is checked. None: the last one.

        Returns:
            The same as there. `x` is valid until the next `combine()`.

        Raises:
            EPInputError: If `y` is wrong, if there was no dispatch, if a hook of this object is open, or as
                `Buffer.low_latency_combine`.
            EPTimeoutError: If a peer did not answer in an earlier call.
            EPDestroyedError: After `Buffer.destroy`.

        Example:
            >>> out = step.combine(y).x
        """
        return self._make_combine(y)
