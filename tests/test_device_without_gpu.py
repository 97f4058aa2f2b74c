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
        for name, array in (("x", sent.recv_x), ("topk_idx", sent.recv_topk_idx), ("src_idx", sent.recv_src_idx)):
            assert array.ptr == BASE + getattr(dispatch, f"land_{name}"), name

        y = Array(fake, "bfloat16", 30, 256)
        back = buffer.combine(y, sent.handle, topk_weights=Array(fake, "float32", 30, 4), bias=Array(fake, "bfloat16", 10, 256))
        (combine,) = fake.take()
        assert (combine.y, combine.num_tokens, combine.capacity, combine.handle) == (y.ptr, 10, 30, dispatch.handle)
        assert combine.bias_0
        assert not combine.bias_1
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
        assert again.recv_topk_idx is None
        assert again.handle is first.handle


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
    assert time.monotonic() - start < 10
    assert written == [(backend._state + structs.offset(structs.State.dtype({}), "abort"), 1)]
    buffer.destroy()


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
    monkeypatch.setattr(together.AllOrNone, "holds", lambda self, mine, what, limit=None: True)
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


def test_rows_at_odd_addresses(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        _, idx, weights = arguments(fake)
        odd = Array(fake, "bfloat16", 10, 256, offset=2)
        for call in (lambda: buffer.dispatch(odd, idx, weights), lambda: buffer.low_latency_dispatch(odd, idx)):
            with pytest.raises(EPInputError, match="multiple of 16 bytes; pass a copy"):
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
