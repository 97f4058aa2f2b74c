"""What a Buffer hands to its backend: how a call runs, and its checked arguments.

What is made in every call is not frozen: freezing triples the time that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays.view import Framework, View
from ..config import Config
from ..results import DispatchHandle, LowLatencyHandle


@dataclass(slots=True)
class Call:
    """How a call runs: the stream it is launched on (of no meaning to the host backend) and what orders it."""

    stream: int
    caller_stream: int | None
    async_finish: bool
    previous_event: Any
    framework: Framework | None = None  # the caller's
    capture: int | None = None  # the number of the graph capture that the stream is part of


@dataclass(frozen=True)
class BufferInfo:
    """The Buffer that a call belongs to: its serial number in this process, its sizes and its device."""

    serial: int
    config: Config
    device: int


@dataclass(slots=True)
class DispatchInputs:
    """Checked arguments of dispatch. Exactly one of `topk_idx` (a new routing) and `handle` (a known one) decides the routing."""

    x: View
    topk_idx: View | None
    topk_weights: View | None
    scales: View | None
    handle: DispatchHandle | None
    num_worst_tokens: int | None
    expert_alignment: int


@dataclass(slots=True)
class CombineInputs:
    """Checked arguments of combine."""

    x: View
    handle: DispatchHandle
    topk_weights: View | None
    biases: tuple[View, ...]


@dataclass(slots=True)
class LowLatencyMemory:
    """Memory on the GPU for what arrives. None of it is the Buffer's, so a call that is captured may be replayed whatever comes between."""

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
    use_ue8m0: bool  # and travel as their exponents
    recv_stats: View | None
    wait_stats: View | None
    into: LowLatencyMemory | None = None  # the caller's own, where it has some


@dataclass(slots=True)
class LowLatencyCombineInputs:
    """Checked arguments of low_latency_combine."""

    y: View
    topk_idx: View
    topk_weights: View
    handle: LowLatencyHandle
    reduce_early: bool  # an expert rank adds up its own experts' rows of a token before it sends
    out: View | None
