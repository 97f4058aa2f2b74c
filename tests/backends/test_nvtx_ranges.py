"""NVTX ranges around calls, with a stand-in for the package nvtx."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from deepep_rt import Buffer, EPConfigError, EPInputError
from deepep_rt.backends.inputs import low_latency_dispatch_inputs
from deepep_rt.buffer import backend_of, info_of, low_latency_dispatch_into

SIZES = dict(num_max_tokens_per_rank=8, hidden=128, num_topk=2, num_experts=4, backend="host", low_latency=True)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace nvtx. Return the ranges: "+" and its text where one begins, "-" where it ends."""
    seen: list[str] = []

    @contextlib.contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        assert domain == "deepep_rt"
        seen.append(f"+{message}")
        try:
            yield
        finally:
            seen.append("-")

    nvtx: Any = ModuleType("nvtx")
    nvtx.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    for name in ("DEEPEP_RT_NVTX", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    return seen


def _all_calls(buffer: Buffer) -> None:
    x, idx, weights = (
        np.ones((3, 128), np.float32).astype(ml_dtypes.bfloat16),
        np.array([[0, 1]] * 3),
        np.ones((3, 2), np.float32),
    )
    sent = buffer.dispatch(x, idx, weights, layout="expert")
    buffer.dispatch(x, handle=sent.handle)
    buffer.combine(sent.recv_x, sent.handle, reduce="topk")
    few = buffer.low_latency_dispatch(x, idx)
    y = np.zeros((4, 8, 128), x.dtype)
    buffer.low_latency_combine(y, idx, weights, few.handle)
    step = buffer.prepare_low_latency(x, idx, weights, y=y)
    step.dispatch()
    step.combine()


@pytest.mark.parametrize("variable", [("DEEPEP_RT_NVTX", "1"), ("NVTX_INJECTION64_PATH", "/a/profiler.so")])
def test_each_call_is_a_range(ranges: list[str], monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]) -> None:
    monkeypatch.setenv(*variable)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        _all_calls(buffer)
    assert ranges == [
        *("+dispatch: 3 tokens of 256 bytes, new routing, layout expert", "-"),
        *("+dispatch: 3 tokens of 256 bytes, known routing, layout expert", "-"),
        *("+combine: 6 rows of 256 bytes for 3 tokens, reduce topk", "-"),
        *("+low_latency_dispatch: 3 tokens of 256 bytes, FP8", "-"),
        *("+low_latency_combine: 3 tokens of 256 bytes", "-"),
        *("+low_latency_dispatch: 3 tokens of 256 bytes, FP8", "-"),  # of the prepared call
        *("+low_latency_combine: 3 tokens of 256 bytes", "-"),
    ]


def test_bytes_of_quantised_rows(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A combine carries bfloat16, whatever the dispatch carried."""
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    x, idx, weights = np.ones((3, 64), np.uint8), np.array([[0, 1]] * 3), np.ones((3, 2), np.float32)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        step = buffer.prepare_low_latency(x, idx, weights, use_fp8=False)
        step.dispatch()
        step.combine(np.zeros((4, 8, 128), ml_dtypes.bfloat16))
    assert ranges == [
        *("+low_latency_dispatch: 3 tokens of 64 bytes", "-"),
        *("+low_latency_combine: 3 tokens of 256 bytes", "-"),
    ]


def test_prepared_throughput_calls_of_the_host_backend(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    x = np.ones((3, 128), np.float32).astype(ml_dtypes.bfloat16)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        sent = buffer.dispatch(x, np.array([[0, 1]] * 3))
        step = buffer.prepare_throughput(x, sent.handle)
        ranges.clear()
        step.dispatch()
        step.combine(sent.recv_x)
    assert ranges == [
        *("+dispatch: 3 tokens of 256 bytes, known routing, layout token", "-"),
        *("+combine: 3 rows of 256 bytes for 3 tokens, reduce rank", "-"),
    ]


def test_the_dispatch_of_a_wrapper_is_a_range(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    x, idx = np.ones((3, 128), np.float32).astype(ml_dtypes.bfloat16), np.array([[0, 1]] * 3)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        backend = backend_of(buffer)
        with backend.call_lock:
            call = backend.begin(x, False, None, None)
            inputs = low_latency_dispatch_inputs(info_of(buffer), call.stream, x, idx, None, False, False, False, None, None)
            low_latency_dispatch_into(buffer, backend, inputs, call)
    assert ranges == ["+low_latency_dispatch: 3 tokens of 256 bytes", "-"]


def test_a_range_ends_with_an_error(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    x = np.ones((3, 128), np.float32).astype(ml_dtypes.bfloat16)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        with pytest.raises(EPInputError):
            buffer.dispatch(x, np.full((3, 2), 9))
        assert ranges == ["+dispatch: 3 tokens of 256 bytes, new routing, layout token", "-"]


@pytest.mark.parametrize("variables", [{}, {"DEEPEP_RT_NVTX": "0", "NVTX_INJECTION64_PATH": "/a/profiler.so"}])
def test_without_a_profiler_calls_are_plain(
    ranges: list[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        assert buffer._annotate is None
        assert "dispatch" not in vars(buffer._backend), "the call is the backend's own method"
        _all_calls(buffer)
    assert ranges == []


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)  # an import of it raises
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    with pytest.raises(EPConfigError, match="pip install nvtx"):
        Buffer(MPI.COMM_SELF, **SIZES)
    monkeypatch.delenv("DEEPEP_RT_NVTX")
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/a/profiler.so")
    with Buffer(MPI.COMM_SELF, **SIZES) as buffer:
        _all_calls(buffer)
