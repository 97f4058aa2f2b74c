"""NVTX ranges around the calls of a Buffer. Profilers such as Nsight Systems show them on their timeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import _env
from ..errors import EPConfigError
from .base import (
    Backend,
    CombineInputs,
    DispatchInputs,
    LowLatencyCombineInputs,
    LowLatencyDispatchInputs,
    LowLatencyPreparation,
    PreparedCalls,
    ThroughputPreparation,
)
from .hooks import OrdinaryLowLatency, OrdinaryThroughput

_DOMAIN = "deepep_rt"


def annotator() -> Callable[..., Any] | None:
    """Return `nvtx.annotate` if a profiler listens or the user asks for ranges, and otherwise None.

    Raises:
        EPConfigError: If the user asks for ranges, and the package nvtx is missing.
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
    return nvtx.annotate


def mark_calls(backend: Backend, annotate: Callable[..., Any]) -> None:
    """Put a range with its sizes around each call of a backend."""
    for name, text in _TEXTS.items():
        setattr(backend, name, _in_a_range(annotate, name, getattr(backend, name), text))
    for name, texts in _PREPARED_TEXTS.items():
        setattr(backend, name, _in_ranges(annotate, getattr(backend, name), texts))


class _MarkedCalls:
    """Prepared calls with a range around each."""

    def __init__(self, annotate: Callable[..., Any], prepared: PreparedCalls[Any, Any], texts: tuple[str, str]) -> None:
        self._annotate, self._prepared, self.set_rows = annotate, prepared, prepared.set_rows
        self._dispatch_text, self._combine_text = (f"{text}, prepared" for text in texts)

    def dispatch(self) -> Any:
        with self._annotate(self._dispatch_text, domain=_DOMAIN):
            return self._prepared.dispatch()

    def combine(self) -> Any:
        with self._annotate(self._combine_text, domain=_DOMAIN):
            return self._prepared.combine()


def _in_ranges(
    annotate: Callable[..., Any], prepare: Callable[..., Any], texts: Callable[[Any], tuple[str, str]]
) -> Callable[..., Any]:
    def prepare_marked(preparation: Any) -> Any:
        prepared = prepare(preparation)
        is_ordinary = isinstance(prepared, OrdinaryLowLatency | OrdinaryThroughput)  # these calls have ranges already
        return prepared if is_ordinary else _MarkedCalls(annotate, prepared, texts(preparation))

    return prepare_marked


def _in_a_range(
    annotate: Callable[..., Any], name: str, call: Callable[..., Any], text: Callable[[Any], str]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(inputs: Any, *arguments: Any) -> Any:
        with annotate(f"{name}: {text(inputs)}", domain=_DOMAIN):
            return call(inputs, *arguments)

    return marked


def _dispatch(inputs: DispatchInputs) -> str:
    routing = "known routing" if inputs.handle else "new routing"
    return f"{_rows(inputs.x, 'tokens')}, {routing}, layout {inputs.layout}"


def _combine(inputs: CombineInputs) -> str:
    return f"{_rows(inputs.x, 'rows')} for {inputs.handle.num_tokens} tokens, reduce {inputs.reduce}"


def _low_latency_dispatch(inputs: LowLatencyDispatchInputs) -> str:
    return _rows(inputs.x, "tokens") + (", FP8" if inputs.use_fp8 else "")


def _low_latency_combine(inputs: LowLatencyCombineInputs) -> str:
    return f"{inputs.handle.num_tokens} tokens of {inputs.y.row_bytes // inputs.y.shape[1]} bytes"


def _prepared_throughput(preparation: ThroughputPreparation) -> tuple[str, str]:
    handle = preparation.dispatch.handle
    assert handle is not None
    combine = f"combine: {handle.num_recv_rows} rows for {handle.num_tokens} tokens, reduce rank"
    return f"dispatch: {_dispatch(preparation.dispatch)}", combine


def _prepared_low_latency(preparation: LowLatencyPreparation) -> tuple[str, str]:
    given = preparation.dispatch
    return f"low_latency_dispatch: {_low_latency_dispatch(given)}", f"low_latency_combine: {_rows(given.x, 'tokens')}"


def _rows(x: Any, what: str) -> str:
    return f"{x.shape[0]} {what} of {x.row_bytes} bytes"


_TEXTS: dict[str, Callable[[Any], str]] = {
    "dispatch": _dispatch,
    "combine": _combine,
    "low_latency_dispatch": _low_latency_dispatch,
    "low_latency_combine": _low_latency_combine,
}

_PREPARED_TEXTS: dict[str, Callable[[Any], tuple[str, str]]] = {
    "prepare_throughput": _prepared_throughput,
    "prepare_low_latency": _prepared_low_latency,
}
