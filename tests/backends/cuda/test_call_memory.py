"""Memory of results: who gets it, and what calls wait for. On a fake GPU that records requests."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, NEED_COUNTS
from fake_gpu import CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, arguments, fake, make, region, routed

from deepep_rt import EPOutOfMemoryError
from deepep_rt.arrays import frameworks
from deepep_rt.cuda import driver
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make"]

PREVIOUS = 1234
ASYNC: dict[str, Any] = dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=PREVIOUS))
KINDS = [kind for kind in CALLS if kind not in NEED_COUNTS and not kind.startswith(("low-latency", "prepared"))]


@pytest.mark.parametrize("sizes", [{}, dict(ranks_per_node=2)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_does_not_wait_for_later_work_of_the_caller(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any]
) -> None:
    """Results of earlier calls were dropped. The call runs on the Buffer's own stream, after an event. The caller's stream has got long
    work since then.
    """
    with make(**sizes) as buffer, monkeypatch.context() as busy:
        fake.on_launch = routed(buffer, 24, [3] * 8)
        make_call = CALLS[kind](fake, buffer, **ASYNC)
        for _ in range(4):
            make_call()
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        busy.setattr(driver.CudaEvent, "done", lambda event: event.handle == 5)
        fake.waits.clear()
        for _ in range(2):  # the second drops the result of the first
            make_call()
        assert set(fake.waits) == {(OWN_STREAM, PREVIOUS)}
        held = [make_call() for _ in range(2)]
        assert set(fake.waits) == {(OWN_STREAM, PREVIOUS)}
        del held


def test_a_dispatch_waits_only_for_readers_of_its_own_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: one dispatch runs while the experts of the other batch read their rows on the caller's stream."""
    with make(num_slots=2) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        first = buffer.dispatch(x, idx, weights, **ASYNC)
        first.event.wait()
        assert first.recv_x.shape == (30, 256)
        del first
        fake.waits.clear()
        second = buffer.dispatch(x, idx, weights, **ASYNC)
        assert fake.waits == [(OWN_STREAM, PREVIOUS)]
        third = buffer.dispatch(x, idx, weights, **ASYNC)
        assert fake.waits[1:] == [(OWN_STREAM, PREVIOUS), (OWN_STREAM, 5)], "the memory of the first"
        assert second.recv_x.ptr != third.recv_x.ptr


def test_dropped_results_wait_for_their_readers(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on the caller's stream may still read them: sums in the Buffer's memory and in other memory, and copied rows. Other memory is
    freed when it is done.
    """
    with make(num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake, 64)
        y = Array(fake, "bfloat16", 256, 256)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256, **ASYNC)
        inside, outside = (buffer.combine(y, sent.handle, **ASYNC) for _ in range(2))
        copied = buffer.dispatch(x, handle=sent.handle, **ASYNC)
        assert [result.x.ptr in region(buffer, "sums") for result in (inside, outside)] == [True, False]
        assert len(fake.copies) == 1
        for result in ("outside", "copied"):
            fake.waits.clear()
            if result == "outside":
                del outside
            else:
                del copied
            assert fake.waits == [], result
            assert fake.freed == []
        with busy.context() as done:
            done.setattr(driver.CudaEvent, "done", lambda event: True)
            buffer.dispatch(x, handle=sent.handle, **ASYNC)
        assert len(fake.freed) == 2
        fake.waits.clear()
        del inside
        inside = buffer.combine(y, sent.handle, **ASYNC)
        assert inside.x.ptr in region(buffer, "sums")
        assert fake.waits == [(OWN_STREAM, PREVIOUS), (OWN_STREAM, 5)]


def test_a_full_pool_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot allocate. Sums also use the pool of rows, and a call without room is refused."""
    with make(num_slots=1) as buffer, monkeypatch.context() as capturing:
        x, idx, weights = arguments(fake, 64)
        y, sent = Array(fake, "bfloat16", 256, 256), buffer.dispatch(x, idx, weights, num_worst_tokens=256)
        handle = sent.handle
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        first = buffer.combine(y, handle)
        assert first.x.ptr in region(buffer, "sums")
        fake.pop_launches()
        for call in (lambda: buffer.combine(y, handle), lambda: buffer.dispatch(x, handle=handle)):
            with pytest.raises(EPOutOfMemoryError, match=r"a captured CUDA graph cannot allocate.*num_slots"):
                call()
        assert fake.pop_launches() == []
        del sent
        second = buffer.combine(y, handle)
        assert second.x.ptr in region(buffer, "pool")


def test_a_full_pool(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(num_slots=1) as buffer:
        fake.on_launch = routed(buffer, 256, [256] + [0] * 7)
        x, idx, weights = arguments(fake, 64)
        held = [buffer.dispatch(x, idx, weights) for _ in range(2)]
        assert held[0].recv_x.ptr in region(buffer, "pool")
        ((to, source, num_bytes),) = fake.copies
        assert source == region(buffer, "landing").start
        assert to <= held[1].recv_x.ptr < to + num_bytes
        assert num_bytes >= 256 * 512

        def none_left(*_: Any) -> int:
            raise EPOutOfMemoryError("none left")

        held.append(buffer.combine(Array(fake, "bfloat16", 256, 256), held[0].handle))
        monkeypatch.setattr(driver, "allocate_async", none_left)
        with pytest.raises(EPOutOfMemoryError) as after_launch:
            buffer.dispatch(x, idx, weights)
        with pytest.raises(EPOutOfMemoryError) as before_launch:
            buffer.combine(Array(fake, "bfloat16", 256, 256), held[0].handle)
        assert after_launch.value.call_made, "the other ranks go on"
        assert not before_launch.value.call_made
    del held, after_launch, before_launch  # their tracebacks hold memory of the fake GPU
    gc.collect()


@pytest.mark.parametrize("share", [1.0, 0.9, 0.66, 0.5])
def test_successive_layers_fit_the_pool(fake: FakeGpu, make: Any, share: float) -> None:
    """Each layer runs while the caller holds the result before. All results fit, for any share of the worst case."""
    with make() as buffer:
        num_rows = int(share * 256)
        fake.on_launch = routed(buffer, num_rows, [1] * 8)
        x, idx, weights = arguments(fake, 64)
        sums = None
        for _ in range(20):
            sent = buffer.dispatch(x, idx, weights)
            bias = sums
            sums = buffer.combine(Array(fake, "bfloat16", num_rows, 256), sent.handle)
            assert sums.x.ptr in region(buffer, "sums")
        del bias
        assert not fake.copies


def test_sums_leave_room_for_rows(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The caller may hold any number of sums: only results of dispatch fill the pool of dispatch."""
    with make() as buffer, caplog.at_level("INFO", logger="deepep_rt"):
        x, idx, weights = arguments(fake, 64)
        y = Array(fake, "bfloat16", 256, 256)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256)
        sums = [buffer.combine(y, sent.handle) for _ in range(20)]
        assert [total.x.ptr in region(buffer, "sums") for total in sums] == [True] * 2 + [False] * 18
        again = buffer.dispatch(x, handle=sent.handle)
        assert again.recv_x.ptr in region(buffer, "pool")
        assert not fake.copies
        assert not caplog.messages
        third, fourth = (buffer.dispatch(x, handle=sent.handle) for _ in range(2))
        assert len(fake.copies) == 2
        assert len(caplog.messages) == 1
        assert "num_slots" in caplog.text
        del third, fourth


def test_summed_weights_keep_their_memory(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, weights = arguments(fake, 64)
        y, given = Array(fake, "bfloat16", 256, 256), Array(fake, "float32", 256, 4)
        handle = buffer.dispatch(x, idx, weights, num_worst_tokens=256).handle
        first, second = (buffer.combine(y, handle, topk_weights=given).topk_weights for _ in range(2))
        assert first.ptr != second.ptr


def test_a_copied_result(fake: FakeGpu, make: Any) -> None:
    """If the pool is full, rows are copied from the shared region. The next call uses that region, and waits for the copy."""
    with make(num_slots=1) as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=256)]
        fake.requests.clear()
        held.append(buffer.dispatch(x, idx, weights, num_worst_tokens=256, async_finish=True))
        assert "record" in fake.requests[fake.requests.index("copy_async") :]
        fake.waits.clear()
        buffer.combine(Array(fake, "bfloat16", 256, 256), held[1].handle)
        assert (CALLERS_STREAM, 5) in fake.waits


def test_results_are_trimmed_to_what_arrived(fake: FakeGpu, make: Any) -> None:
    with make(num_slots=1) as buffer:
        fake.on_launch = routed(buffer, 20, [20] + [0] * 7)
        x, idx, _ = arguments(fake, 64)
        sent = buffer.dispatch(x, idx)
        held = [buffer.dispatch(x, handle=sent.handle) for _ in range(5)]
        assert all(result.recv_x.ptr in region(buffer, "pool") for result in held)
        assert not fake.copies


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
