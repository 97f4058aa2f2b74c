"""What calls return. Arrays are handed out in the caller's framework, when they are first looked at.

These classes are not frozen: that would triple the time in which one is made, and every call makes several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .arrays.stream_handles import of_stream
from .arrays.view import Framework, View


class Event:
    """A point in the work of a stream. On the host backend it has always passed.

    Example:
        >>> result = buffer.dispatch(x, topk_idx, async_finish=True)
        >>> ...                     # work that does not need the result
        >>> result.event.wait()     # the current stream goes on once the result is there
    """

    __slots__ = ("handle",)

    handle: int | None
    """The CUDA event (an integer), or None where there is nothing to wait for."""

    def __init__(self) -> None:
        self.handle = None

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for this event; the host does not wait.

        Without `async_finish`, the event stands for all that the call's stream holds when it is asked: other work behind the call, too.

        Args:
            stream: An integer handle or an array library's stream; default: the caller's current stream.

        Example:
            >>> result.event.wait()
        """
        if stream is not None:
            of_stream(stream)  # without streams too, a program hears what it would hear on GPUs

    def synchronize(self) -> None:
        """Make the host wait for this event.

        Raises:
            EPTimeoutError: if a peer did not answer in the meantime.

        Example:
            >>> result.event.synchronize()
        """

    def _move(self) -> None:
        """Let it stand for all that the call has queued by now: a hook has queued the rest."""


class _OfProcess:
    """It stands for memory that no other process has."""

    _refused, _instead = "pickled or copied", ""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be {self._refused}: it belongs to the process that made it; {self._instead}"
        )


class SharedByCopies(_OfProcess):
    """A copy of what holds it goes on with the same one."""

    _refused = "pickled"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


MAKE_ANOTHER = "leave it out (save a model's state_dict, not the model), and make a Buffer where you load"
"""What to do instead of pickling a Buffer."""


class _Handle(SharedByCopies):
    _instead = "send what was routed (topk_idx), and dispatch where you load it"


@dataclass(eq=False)
class DispatchHandle(_Handle):
    """A routing that dispatch worked out: give it to `combine`, or to `dispatch(handle=)` to repeat the routing."""

    num_tokens: int
    """Tokens that this rank dispatched."""
    num_recv_rows: int
    """Rows of `recv_x`, and of the `x` that combine expects: exact, or `num_worst_tokens`."""
    num_recv_tokens_per_expert_list: list[int] | None
    """Received tokens of each local expert, aligned up; None when the host was not told."""
    _buffer: int = field(repr=False)  # serial number of the Buffer
    _routing: Any = field(repr=False)  # the backend's own tables
    _views: dict[str, View] = field(repr=False)


Views = dict[str, View | None]


class _Arrays(_OfProcess):
    """Arrays of the caller's framework, made when somebody looks at them: calls have no time for what nobody looks at."""

    _instead = "take its arrays, and copy those"
    _make_views: Callable[[], Views]

    @cached_property
    def _views(self) -> Views:
        return self._make_views()

    def _array(self, name: str) -> Any:
        view = self._views.get(name)
        return None if view is None else view.to_framework()


@dataclass(eq=False)
class DispatchResult(_Arrays):
    """What arrived at this rank, in the order (source rank, source token).

    With `num_worst_tokens`, arrays have that many rows; those past `num_recv_tokens` are padding (`recv_topk_idx` -1,
    `recv_topk_weights` 0, the rest undefined).
    """

    handle: DispatchHandle
    event: Event
    _make_views: Callable[[], Views] = field(repr=False)

    @cached_property
    def recv_x(self) -> Any:
        """Rows, `[num_recv, hidden]`, dtype of `x`."""
        return self._array("x")

    @cached_property
    def recv_x_scales(self) -> Any:
        """Scales of the rows, `[num_recv, ...]` as `x_scales`; None without them."""
        return self._array("scales")

    @cached_property
    def recv_topk_idx(self) -> Any:
        """Local expert numbers, `[num_recv, num_topk]`, dtype of `topk_idx`; -1 where the expert lives on another rank."""
        return self._array("topk_idx")

    @cached_property
    def recv_topk_weights(self) -> Any:
        """Weights, `[num_recv, num_topk]` float32; 0 where the expert lives on another rank. None without `topk_weights`."""
        return self._array("topk_weights")

    @cached_property
    def recv_src_idx(self) -> Any:
        """Where each row comes from, `[num_recv, 2]` int32: source rank, source token."""
        return self._array("src_idx")

    @cached_property
    def num_recv_tokens(self) -> Any:
        """Rows that arrived, `[1]` int32, on the device."""
        return self._array("num_recv")

    @cached_property
    def num_recv_tokens_per_expert(self) -> Any:
        """Received tokens of each local expert, aligned up to `expert_alignment`, `[num_local_experts]` int32, on the device."""
        return self._array("num_recv_per_expert")

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int] | None:
        """The same on the host; None when no CPU synchronisation was made."""
        return self.handle.num_recv_tokens_per_expert_list


@dataclass(eq=False)
class CombineResult(_Arrays):
    """Rows added up over the ranks, back at the tokens' own rank."""

    event: Event
    _make_views: Callable[[], Views] = field(repr=False)

    @cached_property
    def x(self) -> Any:
        """`[num_tokens, hidden]`, dtype of combine's `x`."""
        return self._array("x")

    @cached_property
    def topk_weights(self) -> Any:
        """`[num_tokens, num_topk]` float32; None unless `topk_weights` was given."""
        return self._array("topk_weights")


@dataclass(eq=False)
class LowLatencyHandle(_Handle):
    """What `low_latency_combine` has to know about a `low_latency_dispatch`."""

    num_tokens: int
    """Tokens that this rank dispatched."""
    _buffer: int = field(repr=False)  # serial number of the Buffer
    _routing: Any = field(repr=False)  # the backend's own tables
    _has_weights: bool = field(repr=False)  # topk_weights travelled with the rows
    _framework: Framework = field(repr=False)  # the caller's


@dataclass(eq=False)
class LowLatencyDispatchResult(_Arrays):
    """What arrived at this rank, expert by expert. Rows of an expert come in the order (source rank, source token, choice)."""

    handle: LowLatencyHandle
    event: Event
    hook: Callable[[], None] | None
    """With `return_recv_hook=True`: call it to receive; the arrays hold nothing before. Otherwise None."""
    _make_views: Callable[[], Views] = field(repr=False)

    @cached_property
    def recv_x(self) -> Any:
        """Rows, `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden]` bfloat16 or float8_e4m3fn.

        The first `num_recv_tokens_per_expert[e]` rows of expert e are filled, the others are undefined.
        """
        return self._array("x")

    @cached_property
    def recv_x_scales(self) -> Any:
        """Scales, `[num_local_experts, num_ranks * num_max_tokens_per_rank, hidden // 128]`: float32, or uint8 exponents (UE8M0).

        A channel is its FP8 value times the scale of its 128 channels. None without FP8.
        """
        return self._array("scales")

    @cached_property
    def num_recv_tokens_per_expert(self) -> Any:
        """Rows of each local expert, `[num_local_experts]` int32, on the device."""
        return self._array("num_recv_per_expert")


@dataclass(eq=False)
class LowLatencyCombineResult(_Arrays):
    """The experts' outputs, weighted and added up, back at the tokens' own rank."""

    event: Event
    hook: Callable[[], None] | None
    """With `return_recv_hook=True`: call it to receive; `x` holds nothing before. Otherwise None."""
    _make_views: Callable[[], Views] = field(repr=False)

    @cached_property
    def x(self) -> Any:
        """`[num_tokens, hidden]` bfloat16."""
        return self._array("x")
