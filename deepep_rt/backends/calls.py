"""The data that a Buffer gives to its backend in a call.

These classes are not frozen where each call makes one: freezing triples the time that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays.view import Framework, View
from ..comm.call_signature import Signature, combine_kind, dispatch_kind, low_latency_combine_kind
from ..config import Config
from ..results import DispatchHandle, LowLatencyHandle

SCALE_COLUMN_ALIGNMENT = 4
"""Rows of scales that lie by column are rounded up to it, because TMA loads columns of a multiple of 16 bytes."""


@dataclass(slots=True)
class Call:
    """How a call runs: its stream (unused on the host backend), and what it waits for."""

    stream: int
    caller_stream: int | None
    async_finish: bool
    previous_event: Any
    framework: Framework | None = None  # the caller's
    capture: Any = None  # the CapturedGraph of the stream, or None
    follows: int | None = None  # another stream, whose work the call waits for


@dataclass(frozen=True)
class BufferInfo:
    """The Buffer of a call: its serial number in this process, its sizes and its device."""

    serial: int
    config: Config
    device: int


@dataclass(slots=True)
class DispatchInputs:
    """Checked arguments of dispatch. Either `topk_idx` gives a new routing, or `handle` repeats a known one."""

    x: View
    topk_idx: View | None
    topk_weights: View | None
    scales: View | None
    handle: DispatchHandle | None
    num_worst_tokens: int | None
    expert_alignment: int
    layout: str = "token"  # the order of the rows: "token" or "expert"
    zero_padding: bool = False  # the other two only for "expert"
    scales_by_column: bool = False
    use_fp8: bool = False  # convert x on the way
    round_scale: bool = False  # scales are powers of two
    use_ue8m0: bool = False  # and are sent as their exponents

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on, after `use_fp8` has converted the rows."""
        x, scales = self.x, self.scales
        return Signature(
            dispatch_kind(self.layout, self.handle is not None),
            x.dtype,
            _dtype(self.topk_idx),
            _dtype(self.topk_weights),
            _dtype(scales),
            self.round_scale,
            self.zero_padding,
            "column" if self.scales_by_column else "row",
            x.row_bytes,
            scales.row_bytes if scales else 0,
            self.expert_alignment,
        )


@dataclass(slots=True)
class CombineInputs:
    """Checked arguments of combine."""

    x: View
    handle: DispatchHandle
    topk_weights: View | None
    biases: tuple[View, ...]
    weighted: bool = False  # multiply rows by topk_weights, instead of sending them back
    reduce: str = "rank"  # each rank adds up its rows of a token; "topk": the token's rank adds up the row of each choice
    compress: str | None = None  # the form of rows on the way, one of `COMPRESSIONS`; None: as they are

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on."""
        kind = combine_kind(self.weighted, self.reduce, self.compress)
        return Signature(kind, self.x.dtype, topk_weights=_dtype(self.topk_weights), row_bytes=self.x.row_bytes)


@dataclass(slots=True)
class ThroughputPreparation:
    """Checked arguments of prepare_throughput."""

    caller_x: Any  # the caller's array, whose library has the current stream
    dispatch: DispatchInputs  # with a handle
    y_weights: View | None  # the topk_weights of combines
    biases: tuple[View, ...]  # the next two as in CombineInputs
    compress: str | None
    async_finish: bool
    stream: Any

    def combine(self, y: View) -> CombineInputs:
        """Return the arguments of a combine of these rows."""
        assert self.dispatch.handle is not None
        return CombineInputs(y, self.dispatch.handle, self.y_weights, self.biases, compress=self.compress)

    @property
    def arrays(self) -> tuple[View, ...]:
        """All arrays but the rows of combines."""
        given = self.dispatch
        arrays = given.x, given.topk_idx, given.topk_weights, given.scales, self.y_weights, *self.biases
        return tuple(array for array in arrays if array is not None)


@dataclass(slots=True)
class LowLatencyMemory:
    """The caller's memory for results. A captured call may be replayed at any time, because no other call uses this memory."""

    recv_x: View
    recv_scales: View | None
    tables: View  # of the handle


@dataclass(slots=True)
class LowLatencyDispatchInputs:
    """Checked arguments of low_latency_dispatch."""

    x: View
    topk_idx: View
    topk_weights: View | None
    use_fp8: bool
    round_scale: bool  # scales are powers of two
    use_ue8m0: bool  # and are sent as their exponents
    recv_stats: View | None
    wait_stats: View | None
    into: LowLatencyMemory | None = None  # where the results shall lie, if the caller says so

    def signature(self, x: str, x_scales: str | None) -> Signature:
        """Return what all ranks must agree on. Arguments: the dtypes of rows and scales on the way."""
        return Signature("low_latency_dispatch", x, self.topk_idx.dtype, _dtype(self.topk_weights), x_scales, self.round_scale)


@dataclass(slots=True)
class LowLatencyCombineInputs:
    """Checked arguments of low_latency_combine."""

    y: View
    topk_idx: View
    topk_weights: View
    handle: LowLatencyHandle
    reduce_early: bool  # an expert rank adds up its own experts' rows of a token before it sends them
    out: View | None
    compress: str | None = None  # the form of rows on the way, one of `COMPRESSIONS`; None: as they are

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on."""
        return low_latency_combine_signature(self.reduce_early, self.compress, self.topk_idx)


@dataclass(slots=True)
class LowLatencyPreparation:
    """Checked arguments of prepare_low_latency."""

    caller_x: Any  # the caller's array, whose library has the current stream
    dispatch: LowLatencyDispatchInputs
    reduce_early: bool  # the next three as in LowLatencyCombineInputs
    compress: str | None
    out: View | None
    with_hook: bool
    async_finish: bool
    stream: Any

    @property
    def combine_signature(self) -> Signature:
        """What all ranks must agree on in the combines."""
        return low_latency_combine_signature(self.reduce_early, self.compress, self.dispatch.topk_idx)


def low_latency_combine_signature(reduce_early: bool, compress: str | None, topk_idx: View) -> Signature:
    """Return what all ranks must agree on in a low-latency combine."""
    return Signature(low_latency_combine_kind(reduce_early, compress), "bfloat16", topk_idx.dtype, "float32")


def _dtype(view: View | None) -> str | None:
    return view.dtype if view else None
