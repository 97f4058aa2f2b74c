"""Addresses, streams and lifetimes in the throughput calls of the CUDA backend, and in all calls, on a fake GPU that records requests."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import BASE, CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, arguments, fake, like, make, region, routed

from deepep_rt import EPConfigError, EPInputError, EPOutOfMemoryError, EPUnavailableError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays import view as arrays
from deepep_rt.cuda import driver
from deepep_rt.cuda import nvshmem as symmetric
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make"]


def test_dispatch_and_combine(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights)
        route, dispatch = fake.pop_launches()
        assert (route.kernel, route.num_tokens, route.topk_idx, route.idx_bytes, route.to_host) == ("route", 10, idx.ptr, 8, 1)
        assert (dispatch.kernel, dispatch.x, dispatch.topk_idx, dispatch.topk_weights) == (
            "dispatch",
            x.ptr,
            idx.ptr,
            weights.ptr,
        )
        assert (dispatch.row_bytes, dispatch.scales, dispatch.scale_bytes, dispatch.blocks) == (512, 0, 0, 24)
        assert dispatch.peers[0] == BASE
        assert dispatch.handle == route.handle
        assert route.stream == dispatch.stream == CALLERS_STREAM
        assert dispatch.capacity == 4 * 64, "the host does not know the counts yet"
        assert sent.num_recv_tokens_per_expert_list == [3, 4, 5, 6, 0, 0, 6, 6]
        assert like(sent.recv_x) == ("bfloat16", (30, 256))
        assert like(sent.recv_topk_idx) == ("int64", (30, 4))
        assert like(sent.recv_topk_weights) == ("float32", (30, 4))
        assert like(sent.recv_src_idx) == ("int32", (30, 2))
        assert like(sent.num_recv_tokens) == ("int32", (1,))
        assert like(sent.num_recv_tokens_per_expert) == ("int32", (8,))
        assert sent.recv_x_scales is None
        arrived = {"x": sent.recv_x, "topk_idx": sent.recv_topk_idx, "topk_weights": sent.recv_topk_weights}
        for name, array in {**arrived, "src_idx": sent.recv_src_idx}.items():
            assert array.ptr == BASE + getattr(dispatch, f"recv_{name}_offset"), name

        y = Array(fake, "bfloat16", 30, 256)
        back = buffer.combine(y, sent.handle, topk_weights=Array(fake, "float32", 30, 4), bias=Array(fake, "bfloat16", 10, 256))
        (combine,) = fake.pop_launches()
        assert (combine.y, combine.num_tokens, combine.capacity, combine.handle) == (y.ptr, 10, 30, dispatch.handle)
        assert combine.bias_0
        assert not combine.bias_1
        rows, landing = buffer.config.num_max_sent_rows, region(buffer, "landing")
        assert landing.start <= BASE + combine.recv_topk_weights_offset <= BASE + combine.recv_x_offset - rows * 4 * 4
        assert BASE + combine.recv_x_offset + rows * 512 <= landing.stop
        assert (like(back.x), back.x.ptr) == (("bfloat16", (10, 256)), combine.out)
        assert (like(back.topk_weights), back.topk_weights.ptr) == (("float32", (10, 4)), combine.out_topk_weights)


def test_a_dispatch_waits_only_for_readers_of_its_own_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: one dispatch runs while the experts of the other batch read their rows on the caller's stream."""
    with make(num_slots=2) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        send: dict[str, Any] = dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=1234))
        first = buffer.dispatch(x, idx, weights, **send)
        first.event.wait()
        assert first.recv_x.shape == (30, 256)
        del first
        fake.waits.clear()
        second = buffer.dispatch(x, idx, weights, **send)
        assert fake.waits == [(OWN_STREAM, 1234)]
        third = buffer.dispatch(x, idx, weights, **send)
        assert fake.waits[1:] == [(OWN_STREAM, 1234), (OWN_STREAM, 5)], "the memory of the first"
        assert second.recv_x.ptr != third.recv_x.ptr


def test_dropped_results_wait_for_their_readers(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on the caller's stream may still read them: sums in the Buffer's memory and in other memory, and copied rows."""
    with make(num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake, 64)
        y, send = Array(fake, "bfloat16", 256, 256), dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=1234))
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256, **send)
        inside, outside = (buffer.combine(y, sent.handle, **send) for _ in range(2))
        copied = buffer.dispatch(x, handle=sent.handle, **send)
        assert [result.x.ptr in region(buffer, "sums") for result in (inside, outside)] == [True, False]
        assert len(fake.copies) == 1
        for result in ("outside", "copied"):
            fake.waits.clear()
            if result == "outside":
                del outside
            else:
                del copied
            assert fake.waits == [(OWN_STREAM, 5)], result
        fake.waits.clear()
        del inside
        inside = buffer.combine(y, sent.handle, **send)
        assert inside.x.ptr in region(buffer, "sums")
        assert fake.waits == [(OWN_STREAM, 1234), (OWN_STREAM, 5)]


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


def test_number_of_sms(fake: FakeGpu, make: Any) -> None:
    with make(num_sms=16) as buffer:
        x, idx, weights = arguments(fake, 64)
        known = buffer.dispatch(x, idx, weights, num_worst_tokens=100).handle
        assert (buffer.num_sms, fake.pop_launches()[1].blocks) == (16, 16)
        buffer.num_sms = 8
        buffer.dispatch(x, handle=known)
        buffer.combine(Array(fake, "bfloat16", 100, 256), known)
        assert [call.blocks for call in fake.pop_launches()] == [8, 8]
        for bad in (0, 1025, 2.5, True):
            with pytest.raises(EPConfigError, match="num_sms="):
                buffer.num_sms = bad
        assert buffer.num_sms == 8
    with make(num_max_tokens_per_rank=2048, num_sms=24) as buffer:
        for num_sms, blocks in ((24, 8), (3, 3)):
            buffer.num_sms = num_sms
            buffer.dispatch(*arguments(fake, 2048), num_worst_tokens=100)
            assert fake.pop_launches()[0].blocks == blocks, "256 tokens for each block, or more if there are few SMs"


def test_known_routing_and_scales(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 7, [1] * 7 + [0])
        x, idx, _ = arguments(fake)
        first = buffer.dispatch(x, idx)
        assert first.recv_topk_weights is None
        fake.pop_launches()
        rows, scales = Array(fake, "float8_e4m3fn", 10, 256), Array(fake, "float32", 10, 2)
        again = buffer.dispatch(rows, handle=first.handle, x_scales=scales)
        (dispatch,) = fake.pop_launches()
        assert (dispatch.row_bytes, dispatch.scale_bytes, dispatch.topk_idx, dispatch.idx_bytes, dispatch.capacity) == (
            256,
            8,
            0,
            0,
            7,
        )
        assert (like(again.recv_x), like(again.recv_x_scales)) == (("float8_e4m3fn", (7, 256)), ("float32", (7, 2)))
        assert (dispatch.scales, again.recv_x_scales.ptr) == (scales.ptr, BASE + dispatch.recv_scales_offset)
        assert again.recv_topk_idx is None
        assert again.handle is first.handle


def test_options_reach_the_kernels(fake: FakeGpu, make: Any) -> None:
    with make(check_inputs=True, low_latency=True, timeout_s=2.5) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=0, expert_alignment=128)
        given = [Array(fake, "float32", 0, 4), Array(fake, "bfloat16", 10, 256), Array(fake, "bfloat16", 10, 256)]
        buffer.combine(Array(fake, "bfloat16", 0, 256), sent.handle, topk_weights=given[0], bias=given[1:])
        counts, waits = Array(fake, "int32", 8), Array(fake, "int64", 4)
        buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=counts, wait_recv_cost_stats=waits)
        route, dispatch, combine, quick = fake.pop_launches()
        assert (route.expert_alignment, route.check, quick.check) == (128, 1, 1)
        assert (dispatch.capacity, sent.recv_x.shape) == (0, (0, 256)), "0 is a number of rows, not its absence"
        assert [combine.topk_weights, combine.bias_0, combine.bias_1] == [array.ptr for array in given]
        assert (quick.recv_stats, quick.wait_stats) == (counts.ptr, waits.ptr)
        backend = buffer._backend
        for kernel in (route, dispatch, combine, quick):
            assert (kernel.timeout_ns, kernel.rank, kernel.pes) == (2_500_000_000, 0, [0, 1, 2, 3])
            assert (kernel.state, kernel.status_page) == (backend.runtime.state, backend.runtime.page.ptr)


def test_no_tokens(fake: FakeGpu, make: Any) -> None:
    """Some libraries give 0 as the address of an empty array. Kernels still have to know that the array was given."""
    with make() as buffer:
        empty = arguments(fake, 0)
        for array in empty:
            array.ptr = 0
        sent = buffer.dispatch(*empty, num_worst_tokens=0)
        weights = Array(fake, "float32", 0, 4)
        weights.ptr = 0
        buffer.combine(empty[0], sent.handle, topk_weights=weights)
        route, dispatch, combine = fake.pop_launches()
        assert route.blocks == 1
        assert dispatch.topk_idx
        assert dispatch.topk_weights
        assert combine.topk_weights


def test_fixed_number_of_rows(fake: FakeGpu, make: Any) -> None:
    """The kernel reports no counts, and the host does not wait. The pool has room for two results of the worst case."""
    with make(on_exhausted="error") as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=100) for _ in range(2)]
        route, dispatch, *_ = fake.pop_launches()
        assert (route.to_host, dispatch.capacity) == (0, 100)
        assert held[0].num_recv_tokens_per_expert_list is None
        assert like(held[0].recv_x) == ("bfloat16", (100, 256))
        first, second = (result.recv_x.ptr for result in held)
        del held
        assert buffer.dispatch(x, idx, weights, num_worst_tokens=100).recv_x.ptr == min(first, second), (
            "the pool reuses the memory"
        )


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


def test_ranks_without_peer_access(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        handle = buffer.dispatch(*arguments(fake), num_worst_tokens=40).handle
    fake.pop_launches()
    monkeypatch.setattr(symmetric.SymmetricMemory, "peers", (BASE, BASE + (1 << 36), 0, 0))
    with make(ranks_per_node=2, low_latency=True) as buffer:
        handle.buffer_serial = buffer._info.serial
        for call in (
            lambda: buffer.dispatch(*arguments(fake), num_worst_tokens=40),
            lambda: buffer.combine(Array(fake, "bfloat16", 40, 256), handle),
            buffer.copy_ceiling,
        ):
            with pytest.raises(EPUnavailableError, match=r"no direct access.*Use the low-latency calls"):
                call()
        assert fake.pop_launches() == []
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert [call.kernel for call in fake.pop_launches()] == ["ll_dispatch"]


def test_counts_belong_to_the_caller(fake: FakeGpu, make: Any) -> None:
    """The counts are not the handle's tables, and they do not keep the rows alive."""
    with make() as buffer:
        x, idx, _ = arguments(fake)
        pool = buffer._backend.throughput.results.pool
        free = pool.free_bytes
        sent = buffer.dispatch(x, idx, num_worst_tokens=40)
        again = buffer.dispatch(x, handle=sent.handle)
        launches = [launch for launch in fake.pop_launches() if launch.kernel == "dispatch"]
        kept = Layout(buffer.config).handle.offsets
        addresses = {sent.handle.routing.ptr + kept[name] for name in ("num_recv", "num_recv_per_expert")}
        for result, launch in zip((sent, again), launches, strict=True):
            counts = result.num_recv_tokens, result.num_recv_tokens_per_expert
            assert [array.ptr for array in counts] == [launch.num_recv, launch.num_recv_per_expert]
            addresses |= {array.ptr for array in counts}
        assert len(addresses) == 6
        counts = sent.num_recv_tokens, again.num_recv_tokens_per_expert
        del sent, again, result
        assert pool.free_bytes == free
        assert counts


def test_copy_ceiling(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows for all peers fit their region. The result counts the bytes that leave the rank."""
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: 10.0)
    with make() as buffer:
        assert buffer.copy_ceiling(row_bytes=256, num_rows=7, iterations=5) == pytest.approx(3 * 7 * 256 / 2e-3)
        assert {(call.num_rows, call.row_bytes) for call in fake.pop_launches()} == {(7, 256)}
        buffer.copy_ceiling(num_rows=10**9)
        (num_rows,) = {call.num_rows for call in fake.pop_launches()}
        room = min(len(region(buffer, "landing")), len(region(buffer, "pool")))
        assert room - 4 * 512 < 4 * num_rows * 512 <= room


def test_streams(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100, async_finish=True)
        assert {call.stream for call in fake.pop_launches()} == {OWN_STREAM}
        assert (OWN_STREAM, ("all of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        sent.event.wait()
        assert fake.waits == [(CALLERS_STREAM, 5)]
        buffer.combine(Array(fake, "bfloat16", 100, 256), sent.handle, stream=77)
        assert fake.pop_launches()[0].stream == 77


def test_results_on_other_streams(fake: FakeGpu, make: Any) -> None:
    """Another library reads them at any time, with another context current. Its stream waits for the call."""
    with make() as buffer:
        sent = buffer.dispatch(*arguments(fake), num_worst_tokens=40, stream=7)
        fake.waits.clear()
        sent.recv_x.__dlpack__(stream=21)
        sent.event.wait(22)
        assert fake.waits == [(21, ("all of", 7)), (22, ("all of", 7))]


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


def test_counts_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        monkeypatch.setattr("deepep_rt.cuda.driver.capture_id", lambda stream: 1)
        with pytest.raises(EPInputError, match="num_worst_tokens"):
            buffer.dispatch(*arguments(fake))
        assert fake.pop_launches() == []


def test_arguments_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parallel branch of the graph gets their memory. Arrays in host memory are refused."""
    capture = 7
    with make(low_latency=True) as buffer, monkeypatch.context() as capturing:
        capturing.setattr(driver, "capture_id", lambda stream: capture)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        seen = []
        for call in (
            lambda x, idx: buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True),
            lambda x, idx: buffer.low_latency_dispatch(x, idx, async_finish=True),
        ):
            x, idx, _ = arguments(fake)
            call(x, idx)
            seen.append(weakref.ref(x))
            del x, idx
            gc.collect()
            assert all(ref() is not None for ref in seen)
        capture = 8
        x, idx, _ = arguments(fake)
        buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True)
        gc.collect()
        assert all(ref() is None for ref in seen)
        fake.pop_launches()
        with pytest.raises(EPInputError, match=r"host memory.*each replay.*on the GPU"):
            buffer.dispatch(x, np.zeros((10, 4), np.int64), num_worst_tokens=40)
        assert fake.pop_launches() == []


def test_arrays_in_host_memory(fake: FakeGpu, make: Any) -> None:
    """The call copies them to the GPU, and its results to host memory."""
    with make(dtype="float32") as buffer:
        fake.on_launch = routed(buffer, 3, [3] + [0] * 7)
        x, idx = np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32)
        sent = buffer.dispatch(x, idx)
        _, dispatch = fake.pop_launches()
        copied_in = {source: (to, num_bytes) for to, source, num_bytes in fake.copies[:2]}
        assert copied_in[x.ctypes.data] == (dispatch.x, x.nbytes)
        assert copied_in[idx.ctypes.data] == (dispatch.topk_idx, idx.nbytes)
        assert isinstance(sent.recv_x, np.ndarray)
        assert sent.recv_x.shape == (3, 256)
        copied_out = {source: (to, num_bytes) for to, source, num_bytes in fake.copies[2:]}
        assert copied_out[BASE + dispatch.recv_x_offset] == (sent.recv_x.ctypes.data, 3 * 1024)
        assert "synchronize" in fake.requests[len(fake.requests) - fake.requests[::-1].index("copy_async") :], (
            "the host waits for them"
        )
        for array in (sent.recv_x, sent.recv_topk_idx, sent.recv_src_idx, sent.num_recv_tokens_per_expert):
            assert array.ctypes.data % 64 == 0, "JAX would copy an array with less alignment"


def test_results_do_not_hold_arguments(fake: FakeGpu, make: Any) -> None:
    """A result makes its arrays on the first access. Until then it must not hold arguments that the caller has dropped."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 100, 256), Array(fake, "bfloat16", 8, 256, 256)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100)
        back = buffer.combine(y, sent.handle)
        quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        home = buffer.low_latency_combine(z, idx, weights, quick.handle)
        given = [weakref.ref(array) for array in (x, idx, weights, y, z)]
        del x, idx, weights, y, z
        gc.collect()
        assert [ref() for ref in given] == [None] * 5
        assert like(back.x) == like(home.x) == ("bfloat16", (10, 256))


def test_driver_requests_of_a_call(fake: FakeGpu, make: Any) -> None:
    """Each request costs the host a microsecond or more. A call allocates nothing, and queues no wait."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 100, 256), Array(fake, "bfloat16", 8, 256, 256)
        known, quick = buffer.dispatch(x, idx, weights, num_worst_tokens=100).handle, buffer.low_latency_dispatch(x, idx).handle
        calls = {
            "dispatch, fixed": lambda: buffer.dispatch(x, idx, weights, num_worst_tokens=100),
            "dispatch, known": lambda: buffer.dispatch(x, handle=known),
            "combine": lambda: buffer.combine(y, known),
            "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, topk_weights=weights),
            "low_latency_combine": lambda: buffer.low_latency_combine(z, idx, weights, quick),
        }
        for name, call in calls.items():
            call()  # the first call may allocate
            fake.requests.clear()
            call()
            num_launches = 2 if name == "dispatch, fixed" else 1
            assert fake.requests == ["context", "capture_id", *["launch"] * num_launches], name


def test_arguments_of_different_libraries(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that works on another stream than the call could reuse the memory before the kernels read it."""

    class Other(Array): ...

    class Library(type(frameworks.framework_of(Array(fake, "int32", 1), "x"))): ...  # type: ignore[misc]

    monkeypatch.setitem(frameworks.FRAMEWORK_OF_CLASS, Other, Library())
    with make(low_latency=True) as buffer:
        x, _, weights = arguments(fake)
        for call in (
            lambda idx: buffer.dispatch(x, idx, weights, num_worst_tokens=40),
            lambda idx: buffer.low_latency_dispatch(x, idx),
        ):
            idx = Other(fake, "int64", 10, 4)
            seen = weakref.ref(idx)
            call(idx)
            del idx
            gc.collect()
            assert seen() is not None
            call(Other(fake, "int64", 10, 4))  # the fake GPU has finished the first call
            gc.collect()
            assert seen() is None


def test_host_memory_and_gpu_memory_of_one_library(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy to the GPU runs after the call returns. Its library could reuse the memory before."""

    class OnHost(Array): ...

    class Library(type(frameworks.framework_of(Array(fake, "int32", 1), "x"))):  # type: ignore[misc]
        def view(self, array: Array, what: str, stream: int | None) -> arrays.View:
            return arrays.View(array.ptr, array.shape, array.dtype, arrays.HOST, array, library)

    library = frameworks.framework_of(Array(fake, "int32", 1), "x")  # as PyTorch: one library has both kinds of memory
    monkeypatch.setitem(frameworks.FRAMEWORK_OF_CLASS, OnHost, Library())
    with make() as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=40)
        bias = OnHost(fake, "bfloat16", 10, 256)
        seen = weakref.ref(bias)
        buffer.combine(Array(fake, "bfloat16", 40, 256), sent.handle, bias=bias)
        del bias
        gc.collect()
        assert seen() is not None


def test_unaligned_scales(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, _ = arguments(fake)
        for scales in (Array(fake, "uint8", 10, 8, offset=1), Array(fake, "float32", 10, 2, offset=2)):
            with pytest.raises(EPInputError, match=r"x_scales starts at address.*multiple of 4 bytes. Pass a copy"):
                buffer.dispatch(x, idx, x_scales=scales)
        with pytest.raises(EPInputError, match=r"topk_idx starts at address.*multiple of 8 bytes"):
            buffer.dispatch(x, Array(fake, "int64", 10, 4, offset=4))
        assert fake.pop_launches() == []


def test_unaligned_rows(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 40, 256), Array(fake, "bfloat16", 8, 256, 256, offset=2)
        odd = Array(fake, "bfloat16", 10, 256, offset=2)
        sent, quick = buffer.dispatch(x, idx, num_worst_tokens=40), buffer.low_latency_dispatch(x, idx)
        fake.pop_launches()
        for call in (
            lambda: buffer.dispatch(odd, idx, weights),
            lambda: buffer.combine(y, sent.handle, bias=(x, odd)),
            lambda: buffer.low_latency_dispatch(odd, idx),
            lambda: buffer.low_latency_combine(z, idx, weights, quick.handle),
        ):
            with pytest.raises(EPInputError, match=r"multiple of 16 bytes\. Pass a copy"):
                call()
        assert fake.pop_launches() == []


def test_arrays_on_another_gpu(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, _ = arguments(fake)
        there = arrays.View(idx.ptr, idx.shape, idx.dtype, 1, idx, frameworks.framework_of(idx, "idx"))
        with pytest.raises(EPInputError, match=r"topk_idx is on GPU 1; expected GPU 0, where this Buffer works. Move the array"):
            buffer.dispatch(x, there)
        assert fake.pop_launches() == []


def test_output_arguments_are_on_the_gpu(fake: FakeGpu, make: Any) -> None:
    """Otherwise the host would have to wait, and to copy what kernels wrote."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, handle = Array(fake, "bfloat16", 8, 256, 256), buffer.low_latency_dispatch(x, idx).handle
        fake.pop_launches()
        for call in (
            lambda: buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=np.zeros(8, np.int32)),
            lambda: buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=np.zeros(4, np.int64)),
            lambda: buffer.low_latency_combine(y, idx, weights, handle, out=np.zeros((10, 256), dtype)),
        ):
            with pytest.raises(EPInputError, match="is in host memory; expected GPU 0, which writes to it"):
                call()
        assert fake.pop_launches() == []
