"""NVTX ranges around the calls of a Buffer. Profilers such as Nsight Systems show them on their timeline.

`Buffer` and `prepared` open a range where they hand a call to the backend, if one is wanted. This file has the texts, with the sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .. import _env
from ..arrays.view import View
from ..errors import EPConfigError
from .base import (
    CombineInputs,
    DispatchInputs,
    LowLatencyCombineInputs,
    LowLatencyDispatchInputs,
    LowLatencyPreparation,
    PreparedCalls,
    ThroughputPreparation,
)
from .hooks import OrdinaryLowLatency, OrdinaryThroughput

Annotate = Callable[[str], AbstractContextManager[Any]]
PreparedTexts = tuple[str, Callable[[View], str]]
"""The text of the dispatches of a prepared call, and a function that makes the text of combines of some rows."""


def annotator() -> Annotate | None:
    """Return what makes a range of a text if a profiler listens or the user asks for ranges, and otherwise None.

    Raise EPConfigError if the user asks for ranges, and the package nvtx is missing.
    """
    wanted = _env.nvtx()
    if wanted == "0":
        return None
    try:
        import nvtx
    except ImportError:
        if wanted == "auto":
            return None
        raise EPConfigError("DEEPEP_RT_NVTX=1, but the package nvtx is missing; expected it. Run: pip install nvtx") from None
    return functools.partial(nvtx.annotate, domain="deepep_rt")


def dispatch_text(inputs: DispatchInputs) -> str:
    routing = "known routing" if inputs.handle else "new routing"
    return f"dispatch: {_rows(inputs.x, 'tokens')}, {routing}, layout {inputs.layout}"


def combine_text(inputs: CombineInputs) -> str:
    return f"combine: {_rows(inputs.x, 'rows')} for {inputs.handle.num_tokens} tokens, reduce {inputs.reduce}"


def low_latency_dispatch_text(inputs: LowLatencyDispatchInputs) -> str:
    return f"low_latency_dispatch: {_rows(inputs.x, 'tokens')}{', FP8' if inputs.use_fp8 else ''}"


def low_latency_combine_text(inputs: LowLatencyCombineInputs) -> str:
    return f"low_latency_combine: {inputs.handle.num_tokens} tokens of {inputs.y.row_bytes // inputs.y.shape[1]} bytes"


def throughput_texts(given: ThroughputPreparation, prepared: PreparedCalls[Any, Any]) -> PreparedTexts:
    dispatch, handle = dispatch_text(given.dispatch), given.dispatch.handle
    if isinstance(prepared, OrdinaryThroughput):
        return dispatch, lambda y: combine_text(given.combine(y))
    assert handle is not None
    combine = f"combine: {handle.num_recv_rows} rows for {handle.num_tokens} tokens, reduce rank, prepared"
    return f"{dispatch}, prepared", lambda y: combine


def low_latency_texts(given: LowLatencyPreparation, prepared: PreparedCalls[Any, Any]) -> PreparedTexts:
    end = "" if isinstance(prepared, OrdinaryLowLatency) else ", prepared"
    start = f"low_latency_combine: {given.dispatch.x.shape[0]} tokens of"
    return f"{low_latency_dispatch_text(given.dispatch)}{end}", lambda y: f"{start} {y.row_bytes // y.shape[1]} bytes{end}"


def _rows(x: View, what: str) -> str:
    return f"{x.shape[0]} {what} of {x.row_bytes} bytes"
