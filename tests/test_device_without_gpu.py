"""What the CUDA backend asks of a GPU, and what it hands out: addresses, shapes, streams and lifetimes, on a GPU that computes nothing."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import BASE, CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, _Communicator, fake, make

from deepep_rt import (
    Buffer,
    EPCacheError,
    EPConfigError,
    EPDestroyedError,
    EPInputError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
    alike,
    arrays,
    driver,
    jit,
    layout,
    structs,
    symmetric,
    together,
)
from deepep_rt.device_low_latency import DeviceLowLatencyBackend
from deepep_rt.inputs import LowLatencyMemory, low_latency_dispatch_inputs
from deepep_rt.kernels import TABLE

__all__ = ["fake", "make"]


def arguments(fake: FakeGpu, tokens: int = 10, hidden: int = 256) -> tuple[Array, Array, Array]:
    return Array(fake, "bfloat16", tokens, hidden), Array(fake, "int64", tokens, 4), Array(fake, "float32", tokens, 4)


def routed(buffer: Buffer, num_rows: int, counts: list[int]) -> Any:
    """Acts as the routing kernel: tells the host what arrives."""

    def act(call: SimpleNamespace) -> None:
        if call.kernel == "route" and call.to_host:
            page = buffer._backend._page
            page._mailbox["num_recv"], page._mailbox["num_recv_per_expert"] = num_rows, counts
            page._counted.value = 1

    return act


def region(buffer: Buffer, name: str) -> range:
    """Addresses of a region of symmetric memory."""
    found = buffer._backend._map
    return range(BASE + found.offsets[name], BASE + found.offsets[name] + found.sizes[name])


def like(view: Any) -> tuple:
    return view.dtype, tuple(view.shape)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_buffer_that_does_not_fit_allocates_nothing(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """All ranks hear which one has too little memory, and what to lower; nobody waits in an allocation for one that gave up."""
    few, plenty = 1 << 20, 1 << 50
    monkeypatch.setattr(driver, "free_bytes", lambda: plenty if rank else few)
    monkeypatch.setattr(
        _Communicator,
        "allgather",
        lambda _, mine: [few if r == rank else plenty for r in range(4)] if mine in (few, plenty) else [mine] * 4,
    )
    monkeypatch.setattr(symmetric, "SymmetricMemory", lambda *_: pytest.fail("symmetric memory was allocated"))
    need = Buffer.size_hint(num_ranks=4, num_max_tokens_per_rank=4096, hidden=7168, num_topk=4, num_experts=32)["total"]
    with pytest.raises(EPOutOfMemoryError) as caught:
        make(num_max_tokens_per_rank=4096, hidden=7168)
    message = str(caught.value)
    for words in (f"takes {need / 1e9:.2f} GB", f"rank {rank} has 0.00 GB free", "lower num_max_tokens_per_rank or num_slots"):
        assert words in message
    assert not [name for name in fake.asked if name.startswith(("allocate", "fill", "take_stream"))]


# --- throughput --------------------------------------------------------------------------------------------------------------------


def test_dispatch_and_combine(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights)
        route, dispatch = fake.take()
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
        assert dispatch.capacity == 4 * 64, "rows are not counted yet"
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
            assert array.ptr == BASE + getattr(dispatch, f"land_{name}"), name

        y = Array(fake, "bfloat16", 30, 256)
        back = buffer.combine(y, sent.handle, topk_weights=Array(fake, "float32", 30, 4), bias=Array(fake, "bfloat16", 10, 256))
        (combine,) = fake.take()
        assert (combine.y, combine.num_tokens, combine.capacity, combine.handle) == (y.ptr, 10, 30, dispatch.handle)
        assert combine.bias_0
        assert not combine.bias_1
        rows, landing = buffer.config.num_max_sent_rows, region(buffer, "landing")
        assert landing.start <= BASE + combine.land_topk_weights <= BASE + combine.land_x - rows * 4 * 4
        assert BASE + combine.land_x + rows * 512 <= landing.stop
        assert (like(back.x), back.x.ptr) == (("bfloat16", (10, 256)), combine.out)
        assert (like(back.topk_weights), back.topk_weights.ptr) == (("float32", (10, 4)), combine.out_topk_weights)


def test_a_dispatch_waits_for_readers_of_its_own_memory_only(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches: the rows of one travel while the experts of the other, on the caller's stream, read theirs."""
    with make(num_slots=2) as buffer, monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
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


def test_results_that_are_dropped_may_still_be_read(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the caller's stream holds then: sums in the Buffer's memory and outside of it, and rows that were copied out."""
    with make(num_slots=1) as buffer, monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
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
    """Nothing can be allocated there: sums take the room of rows, too, and what finds none is refused."""
    with make(num_slots=1) as buffer, monkeypatch.context() as capturing:
        x, idx, weights = arguments(fake, 64)
        y, sent = Array(fake, "bfloat16", 256, 256), buffer.dispatch(x, idx, weights, num_worst_tokens=256)
        handle = sent.handle
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        first = buffer.combine(y, handle)
        assert first.x.ptr in region(buffer, "sums")
        fake.take()
        for call in (lambda: buffer.combine(y, handle), lambda: buffer.dispatch(x, handle=handle)):
            with pytest.raises(EPOutOfMemoryError, match=r"nothing can be allocated while a CUDA graph is captured.*num_slots"):
                call()
        assert fake.take() == []
        del sent
        second = buffer.combine(y, handle)
        assert second.x.ptr in region(buffer, "pool")


def test_number_of_sms(fake: FakeGpu, make: Any) -> None:
    with make(num_sms=16) as buffer:
        x, idx, weights = arguments(fake, 64)
        known = buffer.dispatch(x, idx, weights, num_worst_tokens=100).handle
        assert (buffer.num_sms, fake.take()[1].blocks) == (16, 16)
        buffer.num_sms = 8
        buffer.dispatch(x, handle=known)
        buffer.combine(Array(fake, "bfloat16", 100, 256), known)
        assert [call.blocks for call in fake.take()] == [8, 8]
        for bad in (0, 1025, 2.5, True):
            with pytest.raises(EPConfigError, match="num_sms is"):
                buffer.num_sms = bad
        assert buffer.num_sms == 8
    with make(num_max_tokens_per_rank=2048, num_sms=24) as buffer:
        for num_sms, blocks in ((24, 8), (3, 3)):
            buffer.num_sms = num_sms
            buffer.dispatch(*arguments(fake, 2048), num_worst_tokens=100)
            assert fake.take()[0].blocks == blocks, "256 tokens each, or more where SMs are few"


def test_known_routing_and_scales(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 7, [1] * 7 + [0])
        x, idx, _ = arguments(fake)
        first = buffer.dispatch(x, idx)
        assert first.recv_topk_weights is None
        fake.take()
        rows, scales = Array(fake, "float8_e4m3fn", 10, 256), Array(fake, "float32", 10, 2)
        again = buffer.dispatch(rows, handle=first.handle, x_scales=scales)
        (dispatch,) = fake.take()
        assert (dispatch.row_bytes, dispatch.scale_bytes, dispatch.topk_idx, dispatch.idx_bytes, dispatch.capacity) == (
            256,
            8,
            0,
            0,
            7,
        )
        assert (like(again.recv_x), like(again.recv_x_scales)) == (("float8_e4m3fn", (7, 256)), ("float32", (7, 2)))
        assert (dispatch.scales, again.recv_x_scales.ptr) == (scales.ptr, BASE + dispatch.land_scales)
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
        route, dispatch, combine, quick = fake.take()
        assert (route.expert_alignment, route.check, quick.check) == (128, 1, 1)
        assert (dispatch.capacity, sent.recv_x.shape) == (0, (0, 256)), "no rows is a number of rows"
        assert [combine.topk_weights, combine.bias_0, combine.bias_1] == [array.ptr for array in given]
        assert (quick.recv_stats, quick.wait_stats) == (counts.ptr, waits.ptr)
        backend = buffer._backend
        for kernel in (route, dispatch, combine, quick):
            assert (kernel.timeout_ns, kernel.rank, kernel.pes) == (2_500_000_000, 0, [0, 1, 2, 3])
            assert (kernel.state, kernel.page) == (backend._state, backend._page.ptr)


def test_no_tokens(fake: FakeGpu, make: Any) -> None:
    """Some libraries say that empty arrays are nowhere. The kernels run, and know that the arrays were given."""
    with make() as buffer:
        empty = arguments(fake, 0)
        for array in empty:
            array.ptr = 0
        sent = buffer.dispatch(*empty, num_worst_tokens=0)
        weights = Array(fake, "float32", 0, 4)
        weights.ptr = 0
        buffer.combine(empty[0], sent.handle, topk_weights=weights)
        route, dispatch, combine = fake.take()
        assert route.blocks == 1
        assert dispatch.topk_idx
        assert dispatch.topk_weights
        assert combine.topk_weights


def test_fixed_number_of_rows(fake: FakeGpu, make: Any) -> None:
    """Nothing is told to the host, which does not wait; the pool has room for two results of the worst case."""
    with make(on_exhausted="error") as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=100) for _ in range(2)]
        route, dispatch, *_ = fake.take()
        assert (route.to_host, dispatch.capacity) == (0, 100)
        assert held[0].num_recv_tokens_per_expert_list is None
        assert like(held[0].recv_x) == ("bfloat16", (100, 256))
        first, second = (result.recv_x.ptr for result in held)
        del held
        assert buffer.dispatch(x, idx, weights, num_worst_tokens=100).recv_x.ptr == min(first, second), "memory came back"


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
        with pytest.raises(EPOutOfMemoryError) as behind:
            buffer.dispatch(x, idx, weights)
        with pytest.raises(EPOutOfMemoryError) as before:
            buffer.combine(Array(fake, "bfloat16", 256, 256), held[0].handle)
        assert behind.value.call_made, "the other ranks go on"
        assert not before.value.call_made


@pytest.mark.parametrize("share", [1.0, 0.9, 0.66, 0.5])
def test_layers_one_after_the_other(fake: FakeGpu, make: Any, share: float) -> None:
    """The last layer's result is held while the next one is made. All find room, whatever part of the worst case arrives."""
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
    """However many results of combine are held, a dispatch finds room, as long as no other results of dispatch fill the pool."""
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


def test_ranks_without_a_direct_path(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        handle = buffer.dispatch(*arguments(fake), num_worst_tokens=40).handle
    fake.take()
    monkeypatch.setattr(symmetric.SymmetricMemory, "peers", (BASE, BASE + (1 << 36), 0, 0))
    with make(ranks_per_node=2, low_latency=True) as buffer:
        handle._buffer = buffer._site.serial
        for call in (
            lambda: buffer.dispatch(*arguments(fake), num_worst_tokens=40),
            lambda: buffer.combine(Array(fake, "bfloat16", 40, 256), handle),
            buffer.copy_ceiling,
        ):
            with pytest.raises(
                EPUnavailableError, match="reach each other over NVLink; between hosts there are only the low-latency"
            ):
                call()
        assert fake.take() == []
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert [call.kernel for call in fake.take()] == ["ll_dispatch"]


def test_copy_ceiling(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for each peer fit where they land; bytes are those that leave the rank."""
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: 10.0)
    with make() as buffer:
        assert buffer.copy_ceiling(row_bytes=256, num_rows=7, iterations=5) == pytest.approx(3 * 7 * 256 / 2e-3)
        assert {(call.num_rows, call.row_bytes) for call in fake.take()} == {(7, 256)}
        buffer.copy_ceiling(num_rows=10**9)
        (num_rows,) = {call.num_rows for call in fake.take()}
        room = min(len(region(buffer, "landing")), len(region(buffer, "pool")))
        assert room - 4 * 512 < 4 * num_rows * 512 <= room


def test_streams(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100, async_finish=True)
        assert {call.stream for call in fake.take()} == {OWN_STREAM}
        assert (OWN_STREAM, ("all of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        sent.event.wait()
        assert fake.waits == [(CALLERS_STREAM, 5)]
        buffer.combine(Array(fake, "bfloat16", 100, 256), sent.handle, stream=77)
        assert fake.take()[0].stream == 77


def test_results_that_others_look_at(fake: FakeGpu, make: Any) -> None:
    """They look at any time, with another context current; their streams wait for what is still being written."""
    with make() as buffer:
        sent = buffer.dispatch(*arguments(fake), num_worst_tokens=40, stream=7)
        fake.waits.clear()
        sent.recv_x.__dlpack__(stream=21)
        sent.event.wait(22)
        assert fake.waits == [(21, ("all of", 7)), (22, ("all of", 7))]


def test_a_result_that_is_copied_out(fake: FakeGpu, make: Any) -> None:
    """Rows that had no room in the pool are copied from where the next call's rows land: that call waits for the copy."""
    with make(num_slots=1) as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=256)]
        fake.asked.clear()
        held.append(buffer.dispatch(x, idx, weights, num_worst_tokens=256, async_finish=True))
        assert "record" in fake.asked[fake.asked.index("copy_async") :]
        fake.waits.clear()
        buffer.combine(Array(fake, "bfloat16", 256, 256), held[1].handle)
        assert (CALLERS_STREAM, 5) in fake.waits


def test_results_take_the_room_of_what_arrived(fake: FakeGpu, make: Any) -> None:
    with make(num_slots=1) as buffer:
        fake.on_launch = routed(buffer, 20, [20] + [0] * 7)
        x, idx, _ = arguments(fake, 64)
        sent = buffer.dispatch(x, idx)
        held = [buffer.dispatch(x, handle=sent.handle) for _ in range(5)]
        assert all(result.recv_x.ptr in region(buffer, "pool") for result in held)
        assert not fake.copies


def test_counts_that_come_late(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the call before are not taken for them."""
    with make() as buffer:
        x, idx, _ = arguments(fake)
        page = buffer._backend._page

        def count() -> None:
            page._mailbox["num_recv"] = num_rows
            page._counted.value = 1

        monkeypatch.setattr("deepep_rt.watch.os.sched_yield", count)
        for num_rows in (30, 20):
            assert buffer.dispatch(x, idx).recv_x.shape == (num_rows, 256)


def test_a_time_out_while_the_host_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU says for whom it has waited: it is heard, also where the host's own time is up."""
    buffer = make(timeout_s=0.05)
    page, start = buffer._backend._page, time.monotonic()

    def report() -> None:
        if time.monotonic() > start + 0.2:
            page._report["rank"], page._report["peer"], page._report["phase"], page._timed_out.value = 0, 2, 3, 1

    monkeypatch.setattr("deepep_rt.watch.os.sched_yield", report)
    with pytest.raises(EPTimeoutError, match=r"waited 0\.05 s for rank 2: the rows of dispatch"):
        buffer.dispatch(*arguments(fake))
    assert time.monotonic() < start + 2
    buffer.destroy()


def test_a_host_that_is_interrupted_while_it_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of this call would be taken for those of the next one."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    buffer = make()
    with monkeypatch.context() as interrupted:
        interrupted.setattr("deepep_rt.watch.os.sched_yield", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(*arguments(fake))
    fake.take()
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="a dispatch was interrupted while it waited for its counts"):
            buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    assert fake.take() == []
    buffer.destroy()
    assert BASE not in fake.freed


def test_counts_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        monkeypatch.setattr("deepep_rt.driver.capture_id", lambda stream: 1)
        with pytest.raises(EPInputError, match="num_worst_tokens"):
            buffer.dispatch(*arguments(fake))
        assert fake.take() == []


def test_arguments_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is not given to a branch of the graph beside the call; what lies in host memory is refused."""
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
        fake.take()
        with pytest.raises(EPInputError, match=r"host memory.*each replay.*on the GPU"):
            buffer.dispatch(x, np.zeros((10, 4), np.int64), num_worst_tokens=40)
        assert fake.take() == []


def test_bad_input_that_the_gpu_reports(fake: FakeGpu, make: Any) -> None:
    """It is raised once the call is whole: its counts have come, and the second half of a low-latency call is launched."""
    with make(low_latency=True) as buffer:
        page = buffer._backend._page

        def report(call: SimpleNamespace) -> None:
            page._bad_input.value = 1
            if call.kernel == "route":
                fake.on_launch = lambda call: setattr(page._counted, "value", 1)  # later

        fake.on_launch = report
        with pytest.raises(EPInputError, match="It was skipped"):
            buffer.dispatch(*arguments(fake))
        assert [call.kernel for call in fake.take()] == ["route", "dispatch"]
        assert page._counted.value
        fake.on_launch = report
        sent = buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
        fake.take()
        with pytest.raises(EPInputError, match="It was skipped"):
            sent.hook()
        assert [call.phases for call in fake.take()] == [2]


def test_ranks_that_differ(fake: FakeGpu, make: Any) -> None:
    """Kernels report what two ranks gave; it is raised once, or, from a call that cannot be mended, in every call from then on."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)[:3]
        page = buffer._backend._page
        buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        (mine,) = (call.alike for call in fake.take() if call.kernel == "dispatch")
        report = page._report[0]
        report["rank"], report["other"], report["serial"] = 1, 0, (5, 5)
        report["alike"] = mine, alike.packed("dispatch", x.dtype, idx.dtype, None)
        page._differs.value = 1
        with pytest.raises(
            EPInputError, match=r"topk_weights of this call.* rank 0: None, rank 1: float32. No rows were sent"
        ) as caught:
            buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        assert caught.value.call_made
        assert [call.kernel for call in fake.take()] == ["route", "dispatch"], "the other ranks make this call too"
        buffer.synchronize()
        buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        (mine,) = (call.alike for call in fake.take())
        report["alike"] = mine, alike.packed("low_latency_dispatch", "bfloat16", idx.dtype, "float32", None)
        page._differs.value = 1  # and a moment later, that the time was up
        for _ in range(2):
            with pytest.raises(
                EPInputError, match=r"x of this call.*rank 0: bfloat16, rank 1: float8_e4m3fn.*cannot be used any more"
            ):
                buffer.low_latency_dispatch(x, idx)
        assert fake.take() == []


def test_arrays_in_host_memory(fake: FakeGpu, make: Any) -> None:
    """They are copied in, and results are copied out."""
    with make(dtype="float32") as buffer:
        fake.on_launch = routed(buffer, 3, [3] + [0] * 7)
        x, idx = np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32)
        sent = buffer.dispatch(x, idx)
        _, dispatch = fake.take()
        copied_in = {source: (to, num_bytes) for to, source, num_bytes in fake.copies[:2]}
        assert copied_in[x.ctypes.data] == (dispatch.x, x.nbytes)
        assert copied_in[idx.ctypes.data] == (dispatch.topk_idx, idx.nbytes)
        assert isinstance(sent.recv_x, np.ndarray)
        assert sent.recv_x.shape == (3, 256)
        copied_out = {source: (to, num_bytes) for to, source, num_bytes in fake.copies[2:]}
        assert copied_out[BASE + dispatch.land_x] == (sent.recv_x.ctypes.data, 3 * 1024)
        assert "synchronize" in fake.asked[len(fake.asked) - fake.asked[::-1].index("copy_async") :], "the host waits for them"
        for array in (sent.recv_x, sent.recv_topk_idx, sent.recv_src_idx, sent.num_recv_tokens_per_expert):
            assert array.ctypes.data % 64 == 0, "JAX would copy it once more"


# --- low latency -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "scales"),
    [
        ({}, "float8_e4m3fn", ("float32", (8, 256, 2))),
        ({"use_ue8m0": True}, "float8_e4m3fn", ("uint8", (8, 256, 2))),
        ({"use_fp8": False}, "bfloat16", None),
        ({"use_fp8": np.True_, "use_ue8m0": 0}, "float8_e4m3fn", ("float32", (8, 256, 2))),
        ({"use_fp8": "yes"}, "float8_e4m3fn", ("float32", (8, 256, 2))),
    ],
)
def test_low_latency(fake: FakeGpu, make: Any, options: dict, dtype: str, scales: tuple | None) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **options)
        (dispatch,) = fake.take()
        assert (dispatch.kernel, dispatch.phases, dispatch.num_tokens, dispatch.stream) == ("ll_dispatch", 3, 10, CALLERS_STREAM)
        assert (dispatch.x, dispatch.topk_idx, dispatch.topk_weights) == (x.ptr, idx.ptr, weights.ptr)
        assert dispatch.use_fp8 == (dtype != "bfloat16")
        assert dispatch.use_ue8m0 == dispatch.round_scale == bool(options.get("use_ue8m0"))
        assert dispatch.recv_stats == dispatch.wait_stats == 0
        assert (like(sent.recv_x), sent.recv_x.ptr) == ((dtype, (8, 256, 256)), dispatch.recv_x)
        assert (sent.recv_x_scales and like(sent.recv_x_scales)) == scales
        if scales:
            assert sent.recv_x_scales.ptr == dispatch.recv_scales
        counts = layout.low_latency_handle(buffer.config).offsets["num_recv_per_expert"]
        assert (like(sent.num_recv_tokens_per_expert), sent.num_recv_tokens_per_expert.ptr) == (
            ("int32", (8,)),
            dispatch.handle + counts,
        )
        assert sent.hook is None

        y = Array(fake, "bfloat16", 8, 256, 256)
        back = buffer.low_latency_combine(y, idx, weights, sent.handle)
        (combine,) = fake.take()
        assert (combine.kernel, combine.phases, combine.handle, combine.y) == ("ll_combine", 3, dispatch.handle, y.ptr)
        assert (combine.has_weights, combine.reduce_early) == (1, 1)
        assert (like(back.x), back.x.ptr) == (("bfloat16", (10, 256)), combine.out)
        out = Array(fake, "bfloat16", 10, 256)
        assert buffer.low_latency_combine(y, idx, weights, sent.handle, out=out).x.ptr == out.ptr == fake.take()[0].out
        with pytest.raises(EPInputError, match="out"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, out=Array(fake, "bfloat16", 10, 256, offset=2))


def test_combines_of_many_tokens_have_a_kernel_of_their_own(fake: FakeGpu, make: Any) -> None:
    """Which one does not depend on the other ranks; a hook launches the one that has sent."""
    with make(low_latency=True, num_max_tokens_per_rank=512, hidden=7168, low_latency_sms=128) as buffer:
        y = Array(fake, "bfloat16", 8, 2048, 7168)
        config = buffer.config
        # 8 rows of 7 stretches fit the 16 warps of a block: 3 bits
        least = (128 * 16 >> 3) // min(config.num_ranks, config.num_topk) + 1
        for tokens, reduce_early, kernel in (
            (least - 1, True, ""),
            (least, True, "_many"),
            (512, True, "_many"),
            (512, False, ""),
        ):
            x, idx, weights = (Array(fake, "bfloat16", tokens, 7168), *arguments(fake, tokens)[1:])
            sent = buffer.low_latency_dispatch(x, idx)
            buffer.low_latency_combine(
                y, idx, weights, sent.handle, allow_multiple_reduction=reduce_early, return_recv_hook=True
            ).hook()
            assert [launch.kernel for launch in fake.take()[1:]] == [f"ll_combine{kernel}"] * 2
    with make(low_latency=True, num_max_tokens_per_rank=512, ranks_per_node=2) as buffer:
        x, idx, weights = arguments(fake, 512)
        sent = buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 2048, 256), idx, weights, sent.handle)
        assert fake.take()[1].kernel == "ll_combine", "the other one puts nothing on a network"


def test_grids_of_one_size(fake: FakeGpu, make: Any) -> None:
    """Whatever the tokens: ranks with more of them than others are not waited for."""
    with make(low_latency=True, num_max_tokens_per_rank=512, low_latency_sms=64) as buffer:
        y = Array(fake, "bfloat16", 8, 2048, 256)
        for tokens in (0, 1, 65, 512):
            x, idx, weights = arguments(fake, tokens)
            sent = buffer.low_latency_dispatch(x, idx)
            buffer.low_latency_combine(y, idx, weights, sent.handle)
            dispatch, combine = fake.take()
            assert dispatch.blocks == combine.blocks == 64
            assert not combine.has_weights
    with make(low_latency=True, low_latency_sms=500) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert fake.take()[0].blocks == 128, "twice the tokens, and no more than there are SMs"


def test_hooks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True)
        (send,) = fake.take()
        with pytest.raises(EPInputError, match="hooks are open"):
            buffer.low_latency_dispatch(x, idx)
        with pytest.raises(EPInputError, match="was not called yet"):
            buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle)
        assert fake.take() == []
        sent.hook()
        (receive,) = fake.take()
        assert (send.phases, receive.phases) == (1, 2)
        assert {**vars(send), "phases": 0} == {**vars(receive), "phases": 0}, "both halves of one call"
        assert sent.recv_x.ptr == receive.recv_x


def test_a_hook_waits_for_nobody_elses_call(fake: FakeGpu, make: Any) -> None:
    """It is half a call: a thread that comes in the middle of it, or with it in the middle of a call, is refused, and may come again."""
    refused = []

    def elsewhere(call: Callable[[], Any]) -> None:
        def run() -> None:
            with pytest.raises(EPInputError, match="another thread"):
                call()
            refused.append(call)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        first, second = (buffer.low_latency_dispatch(x, idx, return_recv_hook=True) for _ in range(2))
        fake.on_launch = lambda call: elsewhere(lambda: buffer.low_latency_dispatch(x, idx))
        first.hook()
        fake.on_launch = lambda call: elsewhere(second.hook)
        buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        fake.on_launch = lambda call: None
        second.hook()
        assert [call.phases for call in fake.take() if call.kernel == "ll_dispatch"] == [1, 1, 2, 2]
    assert len(refused) == 3, "one for the hook, and one for each of the other call's kernels"


@pytest.mark.parametrize("half", [1, 2])
def test_half_a_call_that_is_interrupted(fake: FakeGpu, make: Any, half: int) -> None:
    """The other ranks count on both halves: what comes after it would be taken for the second one."""

    def interrupt(call: Any) -> None:
        if call.phases == half:
            raise KeyboardInterrupt

    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        fake.on_launch = interrupt
        with pytest.raises(KeyboardInterrupt):
            buffer.low_latency_dispatch(x, idx, return_recv_hook=True).hook()
        fake.on_launch = lambda call: None
        with pytest.raises(EPTimeoutError, match="interrupted between its halves"):
            buffer.low_latency_dispatch(x, idx)


def test_sums_do_not_lie_in_what_is_added_up(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx).handle
        y, out = Array(fake, "bfloat16", 8, 256, 256), Array(fake, "bfloat16", *x.shape)
        for where in (y.ptr, y.ptr + 2 * 8 * 256 * 256 - 16, y.ptr - 16):
            out.ptr = where
            with pytest.raises(EPInputError, match="out lies in the memory of y"):
                buffer.low_latency_combine(y, idx, weights, handle, out=out)
        out.ptr = y.ptr + 2 * 8 * 256 * 256
        assert buffer.low_latency_combine(y, idx, weights, handle, out=out).x.ptr == out.ptr


def test_a_hook_that_reports_bad_input_has_received(fake: FakeGpu, make: Any) -> None:
    """The other ranks have made the call, and go on to their combines."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True)
        buffer._backend._page._bad_input.value = 1
        with pytest.raises(EPInputError, match="It was skipped"):
            sent.hook()
        with pytest.raises(EPInputError, match="was called already"):
            sent.hook()
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle)
        assert [(call.kernel, call.phases) for call in fake.take()] == [("ll_dispatch", 1), ("ll_dispatch", 2), ("ll_combine", 3)]


def test_masks_after_a_hook_that_was_lost(fake: FakeGpu, make: Any) -> None:
    """It is called then: nobody else can."""
    with make(low_latency=True) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
        gc.collect()
        buffer.mask_rank(2)
        assert [call.phases for call in fake.take()] == [1, 2]


def test_hooks_among_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half runs on the stream of the first one, after the calls in between and before the next; the event moves behind it."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, return_recv_hook=True, async_finish=True, stream=77)
        buffer.dispatch(x, idx, weights, num_worst_tokens=40, stream=78)
        fake.waits.clear()
        recorded = []
        with monkeypatch.context() as records:
            records.setattr(driver.CudaEvent, "record", lambda event, stream: recorded.append((event, stream)))
            sent.hook()
        assert fake.waits[-1] == (77, 5)
        assert (sent.event._marker, 77) in recorded
        fake.waits.clear()
        buffer.dispatch(x, handle=buffer.dispatch(x, idx, num_worst_tokens=40, stream=78).handle, stream=78)
        assert fake.waits == [(78, 5)]


def test_a_hook_after_a_time_out(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    sent = buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
    fake.take()
    page = buffer._backend._page
    page._report["peer"], page._report["phase"], page._timed_out.value = 2, 3, 1
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        sent.hook()
    assert fake.take() == []
    buffer.destroy()


def test_kernels_are_loaded_when_a_buffer_is_made(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, which the first call does not have: the other ranks wait for it."""
    with make(low_latency=True, num_max_tokens_per_rank=512, hidden=7168) as buffer:
        monkeypatch.setattr(jit, "load", lambda *_: pytest.fail("loaded by a call"))
        x, idx, weights = Array(fake, "bfloat16", 512, 7168), *arguments(fake, 512)[1:]
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=40)
        buffer.combine(Array(fake, "bfloat16", 40, 7168), sent.handle)
        y, quick = Array(fake, "bfloat16", 8, 2048, 7168), buffer.low_latency_dispatch(x, idx)
        for early in (True, False):
            buffer.low_latency_combine(y, idx, weights, quick.handle, allow_multiple_reduction=early)
        assert [call.kernel for call in fake.take()] == [
            "route",
            "dispatch",
            "combine",
            "ll_dispatch",
            "ll_combine_many",
            "ll_combine",
        ]


@pytest.mark.parametrize("with_hook", [False, True])
def test_low_latency_from_host_memory(fake: FakeGpu, make: Any, with_hook: bool) -> None:
    """Results are copied out when they are there; what the caller gave to be written to stays where it is."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    x, idx, weights = np.zeros((10, 256), dtype), np.zeros((10, 4), np.int64), np.zeros((10, 4), np.float32)
    with make(low_latency=True) as buffer:
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, return_recv_hook=with_hook)
        kernel = fake.take()[0]
        if with_hook:
            assert kernel.recv_x not in [source for _, source, _ in fake.copies], "it has not come"
            sent.hook()
        copied = {source: (to, num_bytes) for to, source, num_bytes in fake.copies}
        assert copied[kernel.recv_x] == (sent.recv_x.ctypes.data, sent.recv_x.nbytes)
        assert (sent.recv_x.shape, sent.num_recv_tokens_per_expert.shape) == ((8, 256, 256), (8,))
        fake.take(), fake.copies.clear()

        out = Array(fake, "bfloat16", 10, 256)
        y = np.zeros((8, 256, 256), dtype)
        back = buffer.low_latency_combine(y, idx, weights, sent.handle, out=out, return_recv_hook=with_hook)
        if with_hook:
            back.hook()
        assert back.x.ptr == out.ptr
        assert out.ptr not in [source for _, source, _ in fake.copies]


def test_memory_of_results_is_handed_out_again(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        first, second = (buffer.low_latency_dispatch(x, idx, topk_weights=weights) for _ in range(2))
        addresses = [first.recv_x.ptr, second.recv_x.ptr]
        assert len(set(addresses)) == 2
        rows = first.recv_x
        del first
        assert buffer.low_latency_dispatch(x, idx).recv_x.ptr not in addresses, "the rows are still held"
        del rows
        assert buffer.low_latency_dispatch(x, idx).recv_x.ptr == addresses[0]


def test_memory_waits_for_the_callers_stream(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may still read what a call on another stream has left there: results, and the counts in a handle."""
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
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


def test_memory_in_a_capture_stays_with_its_call(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits there for who reads it beside the call."""
    with make(low_latency=True) as buffer, monkeypatch.context() as capturing:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 40, 256), Array(fake, "bfloat16", 8, 256, 256)
        sent, quick = buffer.dispatch(x, idx, num_worst_tokens=40), buffer.low_latency_dispatch(x, idx)
        addresses = [sent.num_recv_tokens.ptr, quick.recv_x.ptr]
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        buffer.combine(y, sent.handle, async_finish=True)
        del sent
        for _ in range(10):
            addresses.append(buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True).num_recv_tokens.ptr)
            addresses.append(buffer.low_latency_dispatch(x, idx, async_finish=True).recv_x.ptr)
            addresses.append(buffer.low_latency_combine(z, idx, weights, quick.handle, async_finish=True).x.ptr)
        assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("how", [{}, {"async_finish": True}, {"stream": 77}], ids=str)
def test_a_host_that_is_ahead_takes_no_more_memory(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Layers whose results are dropped share memory, although the GPU has done none of the calls yet."""
    with make(low_latency=True) as buffer, monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake)
        y = Array(fake, "bfloat16", 8, 256, 256)
        addresses: list[tuple[int, ...]] = []
        for _ in range(20):
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **how)
            back = buffer.low_latency_combine(y, idx, weights, sent.handle, **how)
            addresses.append((sent.recv_x.ptr, back.x.ptr, sent.num_recv_tokens_per_expert.ptr))
        rows, sums, handles = (len(set(of_one_kind)) for of_one_kind in zip(*addresses, strict=True))
        assert (rows, sums) == (2, 2), "one is held while the next is made"
        assert handles <= layout.num_handles(buffer.config), "none is made beside those of the start"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_only_kernels_that_wait_for_the_last_one_overlap_with_it(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Others would run before what they read is there; and older GPUs know no such launch."""
    monkeypatch.setattr("deepep_rt.jit.current_arch", lambda: arch)
    attributes = {}

    def cu_launch(config: Any, function: int, *rest: Any) -> tuple:
        attributes[fake.constants[function][0].name] = config.numAttrs
        return fake.launch(config, function, *rest)

    monkeypatch.setattr("deepep_rt.launch.driver.cuLaunchKernelEx", cu_launch)
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        buffer.combine(Array(fake, "bfloat16", 40, 256), buffer.dispatch(x, idx, num_worst_tokens=40).handle)
        quick = buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, quick.handle)
    overlapping = [name for name, count in attributes.items() if count]
    assert len(attributes) == 5
    assert overlapping == ([name for name in attributes if TABLE[name].overlaps] if arch == "sm_90" else [])


def test_zero_copy(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        y = buffer.get_low_latency_combine_buffer(sent.handle)
        assert like(y) == ("bfloat16", (8, 256, 256))
        buffer.low_latency_combine(y, idx, weights, sent.handle, zero_copy=True)
        assert fake.take()[-1].y == y.ptr
        with pytest.raises(EPInputError, match="zero_copy=True"):
            buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle, zero_copy=True)


def test_masks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True, on_timeout="mask") as buffer:
        backend = buffer._backend
        mask = backend._state + layout.local(buffer.config).offsets["masked"] + 4 * 2
        fake.fills.clear()
        buffer.mask_rank(2)
        assert fake.fills == [(mask, 1, 1)]
        assert buffer.query_masked_ranks() == [2]
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True)
        with pytest.raises(EPInputError, match="hooks of low_latency_dispatch are open"):
            buffer.unmask_rank(2)
        sent.hook()
        y = Array(fake, "bfloat16", 8, 256, 256)
        with pytest.raises(EPInputError, match="allow_multiple_reduction=False"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=False)
        fake.fills.clear()
        buffer.unmask_rank(2)
        (rows, unmasked) = fake.fills
        assert rows[1] == 0xFF, "half a row may have come: all are taken for not there"
        assert unmasked == (mask, 0, 1)
        assert buffer.query_masked_ranks() == []
        backend._page.masked[3] = 1  # as a kernel does
        assert buffer.query_masked_ranks() == [3]
    assert BASE not in fake.freed, "rank 3 may not come to free symmetric memory"


def test_masks_wait_for_earlier_calls(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        fake.asked.clear()
        buffer.mask_rank(2)
        assert "synchronize" in fake.asked[: fake.asked.index("fill")]


def test_rows_that_are_not_reduced_and_masks_by_hand(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, sent = Array(fake, "bfloat16", 8, 256, 256), buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=False)
        buffer.mask_rank(2)
        with pytest.raises(EPInputError, match="allow_multiple_reduction=False"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=False)


def test_ranks_that_kernels_mask_are_named_once(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each time that they are masked; those that the program masked are not."""
    with make(low_latency=True, on_timeout="mask") as buffer:
        x, idx, _ = arguments(fake)
        buffer.mask_rank(2)
        for _ in range(2):
            buffer._backend._page.masked[3] = 1  # as a kernel does
            for _ in range(2):
                buffer.low_latency_dispatch(x, idx)
            buffer.unmask_rank(3)
        assert caplog.messages == ["rank 0: rank 3 is masked: it was silent for 1 s"] * 2
        buffer.unmask_rank(2)


# --- both --------------------------------------------------------------------------------------------------------------------------


def test_results_let_their_arguments_go(fake: FakeGpu, make: Any) -> None:
    """Results are made when somebody looks at them, and must not keep what the caller has dropped until then."""
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


def test_what_a_call_asks_of_the_driver(fake: FakeGpu, make: Any) -> None:
    """Each question takes the host a microsecond or more. Nothing is allocated, and nothing waits."""
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
            call()  # may make room, once
            fake.asked.clear()
            call()
            num_launches = 2 if name == "dispatch, fixed" else 1
            assert fake.asked == ["context", "capture_id", *["launch"] * num_launches, "record"], name


def test_a_silent_peer(fake: FakeGpu, make: Any) -> None:
    """What a kernel reports is raised by the next call, and by all after it."""
    buffer = make()
    page = buffer._backend._page
    page._report["rank"], page._report["peer"], page._report["phase"], page._timed_out.value = 0, 2, 3, 1
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 2: the rows of dispatch") as caught:
            buffer.dispatch(*arguments(fake))
        assert (caught.value.rank, caught.value.peer) == (0, 2)
    assert fake.take() == []
    buffer.destroy()
    assert BASE not in fake.freed, "peers may still write there"


def test_memory_that_is_not_empty_when_it_comes(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lies there is taken for a report, a count or a mask."""
    pinned = driver.allocate_pinned

    def allocate_pinned(num_bytes: int) -> int:
        return ctypes.memset(pinned(num_bytes), 0xFF, num_bytes)

    monkeypatch.setattr(driver, "allocate_pinned", allocate_pinned)
    with make(low_latency=True) as buffer:
        assert buffer.query_masked_ranks() == []
        buffer.dispatch(*arguments(fake), num_worst_tokens=40)
        fills = {at: (byte, num_bytes) for at, byte, num_bytes in fake.fills}
        backend, inboxes = buffer._backend, layout.low_latency(buffer.config)
        for name in ("control", "low_latency"):
            assert fills[region(buffer, name).start] == (0, len(region(buffer, name)))
        rows = inboxes.offsets["messages"]
        assert fills[region(buffer, "low_latency").start + rows] == (0xFF, inboxes.num_bytes - rows)
        assert fills[backend._state] == (0, layout.local(buffer.config).num_bytes)


def test_a_time_out_under_results_in_host_memory(fake: FakeGpu, make: Any) -> None:
    """The host has waited for them: who gets them knows that they are whole."""
    buffer = make(dtype="float32")
    page = buffer._backend._page
    page._report["peer"], page._report["phase"] = 2, 3
    fake.on_launch = lambda call: setattr(page._timed_out, "value", 1)
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
    buffer.destroy()


def test_memory_is_cleared_before_others_may_write_to_it(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(together.AllOrNone, "holds", lambda *_: asked.append([*fake.asked]) or True)
    with make():
        _, made = asked
    assert "synchronize" in made[len(made) - made[::-1].index("fill") :]


@pytest.mark.parametrize(("on_timeout", "limit_s"), [("raise", None), ("mask", 1.0)])
def test_how_long_destroy_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, on_timeout: str, limit_s: Any) -> None:
    buffer, limits = make(on_timeout=on_timeout), []
    monkeypatch.setattr(together.AllOrNone, "holds", lambda self, sound, what, timeout_s=None: limits.append(timeout_s) or sound)
    x, idx, _ = arguments(fake)
    seen = weakref.ref(x)
    with monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
        buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True)
        behind.setattr(buffer._backend._order, "is_done", lambda: True)
        order = buffer._backend._order
        buffer.destroy()
    del x
    gc.collect()
    assert limits == [limit_s]
    assert seen() is None, "nothing reads the arguments any more"
    del order


def test_events_outlive_the_buffer(fake: FakeGpu, make: Any) -> None:
    """They do not look at memory that is gone."""
    buffer = make()
    event = buffer.dispatch(*arguments(fake), num_worst_tokens=40).event
    page = buffer._backend._page
    buffer.destroy()
    ctypes.memset(page.ptr, 0xFF, page._map.num_bytes)  # somebody else's by now
    event.synchronize()


def test_parting_from_ranks(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back only where nothing went wrong; the other ranks are told in any case."""
    said: list[bool] = []
    monkeypatch.setattr(together.AllOrNone, "holds", lambda self, sound, what, timeout_s=None: said.append(sound) or sound)

    def fail() -> None:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    buffer = make()
    monkeypatch.setattr(buffer._backend._order, "synchronize", fail)
    with pytest.raises(EPUnavailableError):
        buffer.destroy()
    make().destroy(in_touch=False)
    with pytest.raises(KeyError), make():
        raise KeyError
    buffer = make(low_latency=True)
    buffer.mask_rank(2)
    buffer.destroy()
    assert (said, fake.freed.count(BASE)) == ([True, True, False] * 4, 0)  # when it is made, and in the end
    said.clear()
    make().destroy()
    assert (said, fake.freed.count(BASE)) == ([True, True, True], 1)


def test_a_rank_that_an_error_throws_out(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why, and who waits for it stops waiting, on the host and on the GPU."""
    pytest.importorskip("mpi4py.MPI")
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "write_beside", lambda ptr, value: written.append((ptr, value)))
    buffer = make(timeout_s=60.0)
    ranks = buffer._backend._comm
    with pytest.raises(KeyError), buffer:
        raise KeyError("mine")
    assert ranks.said == "KeyError: 'mine'"
    buffer = make(timeout_s=60.0)
    backend = buffer._backend
    backend._comm.last_words = "ValueError: no batch"
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match=r"waits for rank 2 in vain.*ValueError: no batch") as caught:
            buffer.dispatch(*arguments(fake))
        assert caught.value.peer == 2
    waiting = make(timeout_s=60.0)
    waiting._backend._comm.last_words = "ValueError: no batch"
    monkeypatch.setattr(waiting._backend._order, "is_done", lambda: False)
    with pytest.raises(EPTimeoutError, match=r"waits for rank 2 in vain.*ValueError: no batch"):
        waiting.synchronize()
    waiting.destroy()
    written.pop()
    assert time.monotonic() - start < 10
    assert written == [(backend._state + structs.offset(structs.State.dtype({}), "abort"), 1)]
    buffer.destroy()


def test_a_rank_that_leaves_others_that_mask(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their low-latency calls go on without it."""
    with make(on_timeout="mask", low_latency=True) as buffer:
        backend = buffer._backend
        backend._comm.last_words, start = "ValueError: no batch", time.monotonic()
        monkeypatch.setattr(backend._order, "is_done", lambda: time.monotonic() > start + 0.5)
        buffer.synchronize()
        buffer.low_latency_dispatch(*arguments(fake)[:2])


@pytest.mark.parametrize(
    ("module", "name", "parts_before"),
    [(symmetric, "load", 0), (driver, "allocate_pinned", 1), (jit, "load", 1), (DeviceLowLatencyBackend, "_clear_rows", 1)],
)
def test_a_rank_that_cannot_make_its_part(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, parts_before: int
) -> None:
    """The others hear of it, and what was taken by then is given back."""
    said: list[bool] = []
    monkeypatch.setattr(together.AllOrNone, "holds", lambda self, mine, what, limit=None: said.append(mine) or mine)
    taken, given = (("allocate", "allocate_pinned"), ("free", "free_pinned"))

    def fail(*_: Any) -> None:
        raise EPCacheError("the folder is full")

    with monkeypatch.context() as broken:
        broken.setattr(module, name, fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert said == [True] * parts_before + [False] + [True] * parts_before, "in the end, to give memory back together"
    assert (BASE in fake.freed) == bool(parts_before)
    assert sum(map(fake.asked.count, taken)) == sum(map(fake.asked.count, given))
    for last in (1, 2):
        said.clear()
        monkeypatch.setattr(
            together.AllOrNone, "holds", lambda self, mine, what, limit=None, last=last: said.append(mine) or len(said) != last
        )
        with pytest.raises(EPUnavailableError, match="another rank"):
            make(low_latency=True)
        assert said == [True] * (2 * last - 1)
    monkeypatch.setattr(together.AllOrNone, "holds", lambda self, mine, what, limit=None: said.append(mine) or mine)
    monkeypatch.setattr(symmetric.SymmetricMemory, "is_of_several_buffers", True)
    said.clear()
    fake.freed.clear()
    with monkeypatch.context() as broken:
        broken.setattr(jit, "load", fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert (said, BASE in fake.freed) == ([True, False, False], False), "ranks of other Buffers have made theirs of it"
    make(low_latency=True)


def test_arguments_of_different_libraries(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not work on the stream of the call would give its memory away before the kernels have read it."""

    class Other(Array): ...

    class Library(type(arrays.framework_of(Array(fake, "int32", 1), "x"))): ...  # type: ignore[misc]

    monkeypatch.setitem(arrays._frameworks, Other, Library())
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
            call(Other(fake, "int64", 10, 4))  # by now the first one's kernels have run
            gc.collect()
            assert seen() is None


def test_host_memory_beside_a_gpu(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied later than the call returns: its library would give it away before."""

    class OnHost(Array): ...

    class Library(type(arrays.framework_of(Array(fake, "int32", 1), "x"))):  # type: ignore[misc]
        def view(self, array: Array, what: str, stream: int | None) -> arrays.View:
            return arrays.View(array.ptr, array.shape, array.dtype, arrays.HOST, array, library)

    library = arrays.framework_of(Array(fake, "int32", 1), "x")  # PyTorch's tensors are in both kinds of memory
    monkeypatch.setitem(arrays._frameworks, OnHost, Library())
    with make() as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=40)
        bias = OnHost(fake, "bfloat16", 10, 256)
        seen = weakref.ref(bias)
        buffer.combine(Array(fake, "bfloat16", 40, 256), sent.handle, bias=bias)
        del bias
        gc.collect()
        assert seen() is not None


@pytest.mark.parametrize("caller", [0, 12])
def test_the_combine_buffer_is_for_the_callers_stream(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, caller: int
) -> None:
    """The default stream is one too."""
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx, use_fp8=False).handle
        gc.collect()
        monkeypatch.setattr(type(arrays.framework_of(x, "x")), "current_stream", lambda self, device: caller)
        fake.waits.clear()
        buffer.get_low_latency_combine_buffer(handle)
        assert (caller, 5) in fake.waits, "an event of the stream that had the memory"


def test_scales_at_odd_addresses(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, _ = arguments(fake)
        for scales in (Array(fake, "uint8", 10, 8, offset=1), Array(fake, "float32", 10, 2, offset=2)):
            with pytest.raises(EPInputError, match=r"x_scales starts at an address.*multiple of 4 bytes.*pass a copy"):
                buffer.dispatch(x, idx, x_scales=scales)
        with pytest.raises(EPInputError, match=r"topk_idx starts at an address.*multiple of 8 bytes"):
            buffer.dispatch(x, Array(fake, "int64", 10, 4, offset=4))
        assert fake.take() == []


def test_a_gpu_that_does_not_run(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepep_rt.watch._GRACE_S", -0.9)
    with pytest.raises(EPTimeoutError, match="the routing kernel did not run"), make() as buffer:
        buffer.dispatch(*arguments(fake))


def test_gpus_without_fp8(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("deepep_rt.jit.current_arch", lambda: "sm_80")
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        for options in ({}, {"use_ue8m0": True}, {"use_fp8": False}):
            sent = buffer.low_latency_dispatch(x, idx, **options)
            assert like(sent.recv_x) == ("bfloat16", (8, 256, 256))
            assert sent.recv_x_scales is None
    told = [record.getMessage() for record in caplog.records if "FP8" in record.getMessage()]
    assert len(told) == 1
    assert "sm_80 cannot convert to FP8: rows travel and arrive as bfloat16" in told[0]


def test_memory_for_fp8_on_gpus_without_it(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's, which is made before the call: bfloat16 rows would be twice as long."""
    monkeypatch.setattr("deepep_rt.jit.current_arch", lambda: "sm_80")
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        call = buffer._backend.begin(x, False, None, None)
        given = low_latency_dispatch_inputs(buffer._site, call.stream, x, idx, None, True, False, False, None, None)
        given.into = LowLatencyMemory(given.x, None, given.x)
        with pytest.raises(EPUnavailableError, match="sm_80 cannot convert to FP8; pass use_fp8=False"):
            buffer._backend.low_latency_dispatch(buffer._site, given, call, False)
        assert fake.take() == []


def test_rows_at_odd_addresses(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 40, 256), Array(fake, "bfloat16", 8, 256, 256, offset=2)
        odd = Array(fake, "bfloat16", 10, 256, offset=2)
        sent, quick = buffer.dispatch(x, idx, num_worst_tokens=40), buffer.low_latency_dispatch(x, idx)
        fake.take()
        for call in (
            lambda: buffer.dispatch(odd, idx, weights),
            lambda: buffer.combine(y, sent.handle, bias=(x, odd)),
            lambda: buffer.low_latency_dispatch(odd, idx),
            lambda: buffer.low_latency_combine(z, idx, weights, quick.handle),
        ):
            with pytest.raises(EPInputError, match="multiple of 16 bytes; pass a copy"):
                call()
        assert fake.take() == []


def test_arrays_on_another_gpu(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, _ = arguments(fake)
        there = arrays.View(idx.ptr, idx.shape, idx.dtype, 1, idx, arrays.framework_of(idx, "idx"))
        with pytest.raises(EPInputError, match="topk_idx is on GPU 1, but this buffer works in GPU 0; move the array"):
            buffer.dispatch(x, there)
        assert fake.take() == []


def test_what_kernels_write_to_is_on_the_gpu(fake: FakeGpu, make: Any) -> None:
    """Or else what they write would have to be copied back, for which the host would have to wait."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, handle = Array(fake, "bfloat16", 8, 256, 256), buffer.low_latency_dispatch(x, idx).handle
        fake.take()
        for call in (
            lambda: buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=np.zeros(8, np.int32)),
            lambda: buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=np.zeros(4, np.int64)),
            lambda: buffer.low_latency_combine(y, idx, weights, handle, out=np.zeros((10, 256), dtype)),
        ):
            with pytest.raises(EPInputError, match="is in host memory, but this buffer works on GPU 0 and writes to it"):
                call()
        assert fake.take() == []


def test_the_end(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    x, idx, weights = arguments(fake)
    sent = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
    buffer.destroy()
    assert BASE in fake.freed
    assert buffer.destroy() is None
    for call in (sent.hook, lambda: buffer.dispatch(x, idx, weights), buffer.synchronize):
        with pytest.raises(EPDestroyedError):
            call()


def test_results_that_nobody_had_looked_at(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        back = buffer.combine(Array(fake, "bfloat16", 8, 256), sent.handle)
        soon = buffer.low_latency_dispatch(x, idx)
    for look in (lambda: sent.recv_x, lambda: back.x, lambda: soon.num_recv_tokens_per_expert):
        with pytest.raises(EPDestroyedError, match="look before"):
            look()
