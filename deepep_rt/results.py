"""Results and handles of calls. A result makes an array in the caller's framework when the caller first reads it.

Fields marked internal serve the rest of this package. Programs must not use them.
The classes are not frozen. Freezing triples the time to make an object, and every call makes several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from .arrays.frameworks import of_stream
from .arrays.view import Framework, View


class Event:
    """A point in the work of a stream. On the host backend every event has passed already.

    Example:
        >>> result = buffer.dispatch(x, topk_idx, async_finish=True)
        >>> ...                     # work that does not need the result
        >>> result.event.wait()     # the current stream continues once the result is there
    """

    __slots__ = ("handle",)

    handle: int | None
    """The CUDA event as an integer. None if there is nothing to wait for."""

    def __init__(self) -> None:
        self.handle = None

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for this event. The host does not wait.

        Without `async_finish`, the event covers everything that the call's stream holds at the time of this call. That includes work
        queued after the Buffer's call.

        Args:
            stream: An integer handle or an array library's stream; default: the caller's current stream.

        Example:
            >>> result.event.wait()
        """
        if stream is not None:
            of_stream(stream)  # the host backend refuses the same arguments as the CUDA backend

    def synchronize(self) -> None:
        """Make the host wait for this event.

        Raises:
            EPTimeoutError: if a peer did not answer in the meantime.

        Example:
            >>> result.event.synchronize()
        """


class _ProcessLocal:
    """An object that refers to memory of this process. It refuses to be pickled."""

    _refused, _instead = "pickled or copied", ""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be {self._refused}: it belongs to the process that made it; {self._instead}"
        )


class SharedByCopies(_ProcessLocal):
    """An object that copies of its owner share: copying it returns the same object."""

    _refused = "pickled"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


MAKE_ANOTHER = "leave it out (save a model's state_dict, not the model), and make a Buffer where you load"
"""The remedy in the error that pickling a Buffer raises."""


generations = [0]
"""How often a Buffer of this process has begun a generation."""


@dataclass(eq=False, kw_only=True)
class _Handle(SharedByCopies):
    _instead = "send what was routed (topk_idx), and dispatch where you load it"

    born: int = field(default_factory=lambda: generations[0], repr=False)  # internal: `generations` at the dispatch


@dataclass(eq=False)
class DispatchHandle(_Handle):
    """The routing of a dispatch. Pass it to `combine`, or to `dispatch(handle=)` to repeat the routing."""

    num_tokens: int
    """Tokens that this rank dispatched."""
    num_recv_rows: int
    """Rows of `recv_x`, and of the `x` that combine expects: exact, or `num_worst_tokens`. With `layout="expert"`, with padding."""
    num_recv_tokens_per_expert_list: list[int] | None
    """Received tokens of each local expert, aligned up. None if the host did not receive the counts."""

    # Internal fields:
    buffer_serial: int = field(repr=False)  # the number of the Buffer in this process
    routing: Any = field(repr=False)  # tables of the backend
    views: dict[str, View] = field(repr=False)  # arrays that belong to the routing (host backend)

    layout: str = field(default="token", kw_only=True)
    """The order of the rows: "token" or "expert"."""
    tile_rows: int = field(default=0, kw_only=True)
    """Rows of a tile of a dispatch with `signals=True`: 128 or 64, the largest that divides its `expert_alignment`. 0: none does."""


Views = dict[str, View | None]


class _Arrays(_ProcessLocal):
    """Arrays of the caller's framework. They are made when the caller first reads them, which saves the call this time."""

    _instead = "take its arrays, and copy those"
    make_views: Callable[[], Views]

    @cached_property
    def views(self) -> Views:
        """The results without a framework, by name. Internal."""
        return self.make_views()

    def _array(self, name: str) -> Any:
        view = self.views.get(name)
        return None if view is None else view.to_framework()


@dataclass(eq=False)
class DispatchResult(_Arrays):
    """The rows that arrived at this rank, in the order (source rank, source token).

    With `num_worst_tokens`, arrays have that many rows. Rows past `num_recv_tokens` are padding: `recv_topk_idx` is -1,
    `recv_topk_weights` is 0, and the rest is undefined.

    With `layout="expert"` there is a row for each (token, choice), expert by expert. `expert_offsets` has the first row of each expert.
    Rows of an expert have the order (source rank, source token, choice). The padding after them is undefined, but for weights of 0,
    and -1 in `recv_src_idx` and `recv_expert_idx`.
    """

    handle: DispatchHandle
    event: Event
    make_views: Callable[[], Views] = field(repr=False)  # internal
    num_sms: int = 0
    """With `signals=True`, the SMs that the call occupies until its end. Kernels that wait for its tiles leave as many free."""
    words_cleared: Event | None = None
    """With `signals=True` on GPUs: after this event, the call has cleared the words of `tile_ready`. The stream that was current at the
    call waits for it. Let any other stream wait for it before a kernel there reads the words. None on the host backend.
    """

    tickets_taken: int = field(default=0, init=False, repr=False)  # internal: of the counters in `views["tickets"]`, with signals

    @cached_property
    def recv_x(self) -> Any:
        """Rows, `[num_recv, hidden]`, dtype of `x`."""
        return self._array("x")

    @cached_property
    def recv_x_scales(self) -> Any:
        """Scales of the rows, `[num_recv, ...]` as `x_scales`; None without them. With `scales_layout="column"`, the transpose:
        `[scales of a row, num_recv rounded up to 4]`, undefined past `num_recv`.
        """
        return self._array("scales")

    @cached_property
    def recv_topk_idx(self) -> Any:
        """Local expert numbers, `[num_recv, num_topk]`, dtype of `topk_idx`; -1 where the expert lives on another rank. None with
        `layout="expert"`.
        """
        return self._array("topk_idx")

    @cached_property
    def recv_topk_weights(self) -> Any:
        """Weights, `[num_recv, num_topk]` float32; 0 where the expert lives on another rank. None without `topk_weights`. With
        `layout="expert"`, the weight of each row, `[num_recv]`.
        """
        return self._array("topk_weights")

    @cached_property
    def recv_src_idx(self) -> Any:
        """The origin of each row, `[num_recv, 2]` int32: source rank, source token. With `layout="expert"`, `[num_recv, 3]`: source rank,
        source token, choice.
        """
        return self._array("src_idx")

    @cached_property
    def expert_offsets(self) -> Any:
        """The first row of each local expert, and the end of the last one, `[num_local_experts + 1]` int32, on the device. Only with
        `layout="expert"`.

        Offsets are multiples of `expert_alignment`, and at most the rows of `recv_x`. `expert_offsets[1:]` is what grouped matrix products
        take as ends; differences are group sizes.
        """
        return self._array("expert_offsets")

    @cached_property
    def recv_expert_idx(self) -> Any:
        """The local expert of each row, `[num_recv]` int32; -1 in padding. Only with `layout="expert"`."""
        return self._array("expert_idx")

    @cached_property
    def tile_ready(self) -> Any:
        """Whether each tile of `handle.tile_rows` rows of `recv_x` is complete, `[tiles]` int32, on the device. Only with `signals=True`.

        A word is 0, and becomes `signal` once all rows of its tile are here. Tiles become ready in about ascending order, but in any order
        along the routing of a dispatch without signals.
        """
        return self._array("tile_ready")

    signal: ClassVar[int] = 1
    """The word of `tile_ready` that says that a tile is complete."""

    @cached_property
    def num_recv_tokens(self) -> Any:
        """Rows that arrived, `[1]` int32, on the device. With `layout="expert"`, with the padding of `expert_alignment`."""
        return self._array("num_recv")

    @cached_property
    def num_recv_tokens_per_expert(self) -> Any:
        """Received tokens of each local expert, aligned up to `expert_alignment`, `[num_local_experts]` int32, on the device."""
        return self._array("num_recv_per_expert")

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int] | None:
        """The same counts on the host. None if the call made no CPU synchronisation."""
        return self.handle.num_recv_tokens_per_expert_list


@dataclass(eq=False)
class CombineResult(_Arrays):
    """Sums of rows over the ranks, at the rank that owns the tokens."""

    event: Event
    make_views: Callable[[], Views] = field(repr=False)  # internal

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
    """The routing of a `low_latency_dispatch`, which `low_latency_combine` needs."""

    num_tokens: int
    """Tokens that this rank dispatched."""

    # Internal fields:
    buffer_serial: int = field(repr=False)  # the number of the Buffer in this process
    routing: Any = field(repr=False)  # tables of the backend
    has_weights: bool = field(repr=False)  # whether the dispatch sent topk_weights with the rows
    framework: Framework = field(repr=False)  # of the caller's arrays
    capacity: int = field(repr=False)  # rows for which each expert has room


@dataclass(eq=False)
class LowLatencyDispatchResult(_Arrays):
    """The rows that arrived at this rank, expert by expert. Rows of an expert have the order (source rank, source token, choice)."""

    handle: LowLatencyHandle
    event: Event
    hook: Callable[[], None] | None
    """With `return_recv_hook=True`: call it to receive. The arrays are undefined before that. Otherwise None."""
    make_views: Callable[[], Views] = field(repr=False)  # internal

    @cached_property
    def recv_x(self) -> Any:
        """Rows, `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16 or float8_e4m3fn; or as wide as `x`, and of its dtype.

        The first `num_recv_tokens_per_expert[e]` rows of expert e are filled, the others are undefined.
        """
        return self._array("x")

    @cached_property
    def recv_x_scales(self) -> Any:
        """Scales, `[num_local_experts, num_ranks * num_max_tokens, hidden // 128]`: float32, or uint8 exponents (UE8M0).

        A channel is its FP8 value times the scale of its 128 channels. With `x_scales`, these are as wide, and of their dtype. None
        without scales.
        """
        return self._array("scales")

    @cached_property
    def num_recv_tokens_per_expert(self) -> Any:
        """Rows of each local expert, `[num_local_experts]` int32, on the device."""
        return self._array("num_recv_per_expert")


@dataclass(eq=False)
class LowLatencyCombineResult(_Arrays):
    """Weighted sums of the experts' outputs, at the rank that owns the tokens."""

    event: Event
    hook: Callable[[], None] | None
    """With `return_recv_hook=True`: call it to receive. `x` is undefined before that. Otherwise None."""
    make_views: Callable[[], Views] = field(repr=False)  # internal

    @cached_property
    def x(self) -> Any:
        """`[num_tokens, hidden]` bfloat16."""
        return self._array("x")
