"""Memory of results in the low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, arguments, fake, make

from deepep_rt.arrays import frameworks
from deepep_rt.cuda import driver
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make"]


def test_memory_of_results_is_reused(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        first, second = (buffer.low_latency_dispatch(x, idx, topk_weights=weights) for _ in range(2))
        addresses = [first.recv_x.ptr, second.recv_x.ptr]
        assert len(set(addresses)) == 2
        rows = first.recv_x
        del first
        assert buffer.low_latency_dispatch(x, idx).recv_x.ptr not in addresses, "the caller still holds the rows"
        del rows
        assert buffer.low_latency_dispatch(x, idx).recv_x.ptr == addresses[0]


def test_memory_waits_for_the_callers_stream(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That stream may still read results of a call on another stream, and the counts in its handle."""
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx).handle
        for call, pieces in (
            (lambda: buffer.dispatch(x, idx, weights, num_worst_tokens=256, async_finish=True), 2),
            (lambda: buffer.low_latency_dispatch(x, idx, async_finish=True), 2),
            (
                lambda: buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, handle, async_finish=True),
                1,
            ),
        ):
            for _ in range(10):
                fake.waits.clear()
                call()
            assert fake.waits == [(OWN_STREAM, ("all of", CALLERS_STREAM)), *[(OWN_STREAM, 5)] * pieces]


@pytest.mark.parametrize("call", ["dispatch", "low_latency_dispatch"])
def test_memory_waits_for_the_stream_that_is_current_when_a_result_is_dropped(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Dispatch with the communication stream current, read on the compute stream, drop, dispatch again."""
    compute = 12
    work_on = functools.partial(
        monkeypatch.setattr, type(frameworks.framework_of(Array(fake, "int32", 1), "x")), "current_stream"
    )
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        x, idx, weights = arguments(fake)
        send = {
            "dispatch": lambda: buffer.dispatch(x, idx, weights, num_worst_tokens=256),
            "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx),
        }[call]
        rows = send().recv_x
        place, fake.has_memory = rows.ptr, False
        work_on(lambda library, device: compute)
        del rows
        work_on(lambda library, device: CALLERS_STREAM)
        fake.waits.clear()
        assert send().recv_x.ptr == place
        assert fake.waits == [(CALLERS_STREAM, ("work of", compute))]


@pytest.mark.parametrize("how", [{}, {"async_finish": True}, {"stream": 77}], ids=str)
def test_memory_does_not_grow_while_the_host_runs_ahead(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Layers reuse the memory of dropped results, although the GPU has not run any call yet. It grows to twice what the caller holds."""
    with make(low_latency=True) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake)
        y = Array(fake, "bfloat16", 8, 256, 256)
        addresses: list[tuple[int, ...]] = []
        for _ in range(20):
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **how)
            back = buffer.low_latency_combine(y, idx, weights, sent.handle, **how)
            addresses.append((sent.recv_x.ptr, back.x.ptr, sent.num_recv_tokens_per_expert.ptr))
        rows, sums, handles = (len(set(of_one_kind)) for of_one_kind in zip(*addresses, strict=True))
        # The caller holds one while the next call runs. A call on another stream does not wait for the caller's stream, and takes more.
        most = 4 if "stream" in how else 2
        assert (rows, sums) == (most, most)
        assert handles <= most // 2 * Layout(buffer.config).num_handles
