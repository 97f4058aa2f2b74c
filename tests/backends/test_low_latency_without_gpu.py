"""The low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import BASE, CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, arguments, fake, like, make

from deepep_rt import EPInputError, EPTimeoutError, EPUnavailableError
from deepep_rt.arrays import frameworks
from deepep_rt.backends.calls import LowLatencyMemory
from deepep_rt.backends.inputs import low_latency_dispatch_inputs
from deepep_rt.cuda import driver
from deepep_rt.jit import loader
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.table import KERNELS

__all__ = ["fake", "make"]


@pytest.mark.parametrize(
    ("options", "dtype", "scales"),
    [
        ({}, "float8_e4m3fn", ("float32", (8, 256, 2))),
        ({"use_ue8m0": True}, "float8_e4m3fn", ("uint8", (8, 256, 2))),
        ({"use_fp8": False}, "bfloat16", None),
        ({"use_fp8": np.True_, "use_ue8m0": 0}, "float8_e4m3fn", ("float32", (8, 256, 2))),
        ({"use_fp8": 1, "use_ue8m0": np.False_}, "float8_e4m3fn", ("float32", (8, 256, 2))),
    ],
)
def test_low_latency(fake: FakeGpu, make: Any, options: dict, dtype: str, scales: tuple | None) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **options)
        (dispatch,) = fake.pop_launches()
        assert (dispatch.kernel, dispatch.phases, dispatch.num_tokens, dispatch.stream) == ("ll_dispatch", 3, 10, CALLERS_STREAM)
        assert (dispatch.x, dispatch.topk_idx, dispatch.topk_weights) == (x.ptr, idx.ptr, weights.ptr)
        assert dispatch.use_fp8 == (dtype != "bfloat16")
        assert dispatch.use_ue8m0 == dispatch.round_scale == bool(options.get("use_ue8m0"))
        assert dispatch.recv_stats == dispatch.wait_stats == 0
        assert (like(sent.recv_x), sent.recv_x.ptr) == ((dtype, (8, 256, 256)), dispatch.recv_x)
        assert (sent.recv_x_scales and like(sent.recv_x_scales)) == scales
        if scales:
            assert sent.recv_x_scales.ptr == dispatch.recv_scales
        counts = Layout(buffer.config).low_latency_handle.offsets["num_recv_per_expert"]
        assert (like(sent.num_recv_tokens_per_expert), sent.num_recv_tokens_per_expert.ptr) == (
            ("int32", (8,)),
            dispatch.handle + counts,
        )
        assert sent.hook is None

        y = Array(fake, "bfloat16", 8, 256, 256)
        back = buffer.low_latency_combine(y, idx, weights, sent.handle)
        (combine,) = fake.pop_launches()
        assert (combine.kernel, combine.phases, combine.handle, combine.y) == ("ll_combine", 3, dispatch.handle, y.ptr)
        assert (combine.has_weights, combine.reduce_early) == (1, 1)
        assert (like(back.x), back.x.ptr) == (("bfloat16", (10, 256)), combine.out)
        out = Array(fake, "bfloat16", 10, 256)
        assert buffer.low_latency_combine(y, idx, weights, sent.handle, out=out).x.ptr == out.ptr == fake.pop_launches()[0].out
        with pytest.raises(EPInputError, match="out"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, out=Array(fake, "bfloat16", 10, 256, offset=2))


def test_large_combines_use_another_kernel(fake: FakeGpu, make: Any) -> None:
    """The choice does not depend on other ranks. A hook launches the same kernel as the sending half."""
    with make(low_latency=True, num_max_tokens_per_rank=512, hidden=7168, low_latency_sms=128) as buffer:
        y = Array(fake, "bfloat16", 8, 2048, 7168)
        config = buffer.config
        # 7 tiles of a row, rounded up to 8, share the 16 warps of a block
        least = (128 * 16 >> 3) // min(config.num_ranks, config.num_topk) + 1
        for tokens, reduce_early, kernel in (
            (least - 1, True, ""),
            (least, True, "_large"),
            (512, True, "_large"),
            (512, False, ""),
        ):
            x, idx, weights = (Array(fake, "bfloat16", tokens, 7168), *arguments(fake, tokens)[1:])
            sent = buffer.low_latency_dispatch(x, idx)
            buffer.low_latency_combine(
                y, idx, weights, sent.handle, allow_multiple_reduction=reduce_early, return_recv_hook=True
            ).hook()
            assert [launch.kernel for launch in fake.pop_launches()[1:]] == [f"ll_combine{kernel}"] * 2
    with make(low_latency=True, num_max_tokens_per_rank=512, ranks_per_node=2) as buffer:
        x, idx, weights = arguments(fake, 512)
        sent = buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 2048, 256), idx, weights, sent.handle)
        assert fake.pop_launches()[1].kernel == "ll_combine", "the large one does not use the network"


def test_the_grid_does_not_depend_on_tokens(fake: FakeGpu, make: Any) -> None:
    """A rank with few tokens may receive many."""
    with make(low_latency=True, num_max_tokens_per_rank=512, low_latency_sms=64) as buffer:
        y = Array(fake, "bfloat16", 8, 2048, 256)
        for tokens in (0, 1, 65, 512):
            x, idx, weights = arguments(fake, tokens)
            sent = buffer.low_latency_dispatch(x, idx)
            buffer.low_latency_combine(y, idx, weights, sent.handle)
            dispatch, combine = fake.pop_launches()
            assert dispatch.blocks == combine.blocks == 64
            assert not combine.has_weights
    with make(low_latency=True, low_latency_sms=500) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert fake.pop_launches()[0].blocks == 128, "twice the tokens, and at most the number of SMs"


def test_hooks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True)
        (send,) = fake.pop_launches()
        with pytest.raises(EPInputError, match="hooks are open"):
            buffer.low_latency_dispatch(x, idx)
        with pytest.raises(EPInputError, match="was not called yet"):
            buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle)
        assert fake.pop_launches() == []
        sent.hook()
        (receive,) = fake.pop_launches()
        assert (send.phases, receive.phases) == (1, 2)
        assert {**vars(send), "phases": 0} == {**vars(receive), "phases": 0}, "both launches have the same parameters"
        assert sent.recv_x.ptr == receive.recv_x


def test_halves_in_different_captures(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture sends nothing. A hook in a capture receives only in the replays."""
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)

        def send() -> Any:
            return buffer.low_latency_dispatch(x, idx, return_recv_hook=True)

        def phases() -> list[int]:
            return [launch.phases for launch in fake.pop_launches()]

        def is_in(capture: int | None) -> None:
            monkeypatch.setattr(driver, "capture_id", lambda stream: capture)

        is_in(7)
        send().hook()
        assert phases() == [1, 2]
        lost = send()
        is_in(None)
        with pytest.raises(EPInputError, match=r"belong in the same capture.*drop this hook"):
            lost.hook()
        del lost
        buffer.low_latency_dispatch(x, idx)
        assert phases() == [1, 3], "the capture failed: no launch waits for its rows"

        sent = send()
        is_in(8)
        with pytest.raises(EPInputError, match="belong in the same capture"):
            sent.hook()
        del sent
        with pytest.raises(EPInputError, match="was lost and has to be called first"):
            buffer.low_latency_dispatch(x, idx)
        is_in(None)
        buffer.low_latency_dispatch(x, idx)
        assert phases() == [1, 2, 3]


def test_a_handle_does_not_keep_a_hook(fake: FakeGpu, make: Any) -> None:
    """If the caller drops the hook, the next call runs it, and the handle stays valid."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True).handle
        buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, handle)
        assert [launch.phases for launch in fake.pop_launches()] == [1, 2, 3, 3]


def test_a_hook_and_a_call_do_not_overlap(fake: FakeGpu, make: Any) -> None:
    """A hook is half a call. A second thread is refused during a hook, and its hook during a call. It may try again."""
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
        assert [call.phases for call in fake.pop_launches() if call.kernel == "ll_dispatch"] == [1, 1, 2, 2]
    assert len(refused) == 3, "once in the hook, and once in each kernel launch of the other call"


@pytest.mark.parametrize("half", [1, 2])
def test_an_interrupted_half_breaks_the_buffer(fake: FakeGpu, make: Any, half: int) -> None:
    """The other ranks wait for both halves. They would match a later launch with the missing half."""

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


def test_out_may_not_overlap_y(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx).handle
        y, out = Array(fake, "bfloat16", 8, 256, 256), Array(fake, "bfloat16", *x.shape)
        for where in (y.ptr, y.ptr + 2 * 8 * 256 * 256 - 16, y.ptr - 16):
            out.ptr = where
            with pytest.raises(EPInputError, match="out overlaps y"):
                buffer.low_latency_combine(y, idx, weights, handle, out=out)
        out.ptr = y.ptr + 2 * 8 * 256 * 256
        assert buffer.low_latency_combine(y, idx, weights, handle, out=out).x.ptr == out.ptr


def test_a_hook_receives_although_it_reports_bad_input(fake: FakeGpu, make: Any) -> None:
    """The other ranks have made the call, and continue with their combines."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, return_recv_hook=True)
        buffer._backend.runtime.page.bad_input.value = 1
        with pytest.raises(EPInputError, match="It was skipped"):
            sent.hook()
        with pytest.raises(EPInputError, match="was called already"):
            sent.hook()
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle)
        assert [(call.kernel, call.phases) for call in fake.pop_launches()] == [
            ("ll_dispatch", 1),
            ("ll_dispatch", 2),
            ("ll_combine", 3),
        ]


def test_masking_runs_a_lost_hook(fake: FakeGpu, make: Any) -> None:
    """The caller cannot call it any more."""
    with make(low_latency=True) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
        gc.collect()
        buffer.mask_rank(2)
        assert [call.phases for call in fake.pop_launches()] == [1, 2]


def test_hooks_and_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook launches on the stream of its call, after calls in between and before the next call. The event moves to its end."""
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
        assert (sent.event._event, 77) in recorded
        fake.waits.clear()
        buffer.dispatch(x, handle=buffer.dispatch(x, idx, num_worst_tokens=40, stream=78).handle, stream=78)
        assert fake.waits == [(78, 5)]


def test_a_hook_after_a_timeout(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    sent = buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
    fake.pop_launches()
    page = buffer._backend.runtime.page
    page.report["peer"], page.report["phase"], page.timed_out.value = 2, 3, 1
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        sent.hook()
    assert fake.pop_launches() == []
    buffer.destroy()


def test_kernels_are_loaded_when_a_buffer_is_made(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes seconds. In the first call, the other ranks would wait for it."""
    with make(low_latency=True, num_max_tokens_per_rank=512, hidden=7168) as buffer:
        monkeypatch.setattr(loader, "load", lambda *_: pytest.fail("loaded by a call"))
        x, idx, weights = Array(fake, "bfloat16", 512, 7168), *arguments(fake, 512)[1:]
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=40)
        buffer.combine(Array(fake, "bfloat16", 40, 7168), sent.handle)
        y, quick = Array(fake, "bfloat16", 8, 2048, 7168), buffer.low_latency_dispatch(x, idx)
        for early in (True, False):
            buffer.low_latency_combine(y, idx, weights, quick.handle, allow_multiple_reduction=early)
        assert [call.kernel for call in fake.pop_launches()] == [
            "route",
            "dispatch",
            "combine",
            "ll_dispatch",
            "ll_combine_large",
            "ll_combine",
        ]


@pytest.mark.parametrize("with_hook", [False, True])
def test_low_latency_from_host_memory(fake: FakeGpu, make: Any, with_hook: bool) -> None:
    """Results are copied to host memory when they have arrived. An array that the caller gave as `out` is not copied."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    x, idx, weights = np.zeros((10, 256), dtype), np.zeros((10, 4), np.int64), np.zeros((10, 4), np.float32)
    with make(low_latency=True) as buffer:
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, return_recv_hook=with_hook)
        kernel = fake.pop_launches()[0]
        if with_hook:
            assert kernel.recv_x not in [source for _, source, _ in fake.copies], "the rows have not arrived"
            sent.hook()
        copied = {source: (to, num_bytes) for to, source, num_bytes in fake.copies}
        assert copied[kernel.recv_x] == (sent.recv_x.ctypes.data, sent.recv_x.nbytes)
        assert (sent.recv_x.shape, sent.num_recv_tokens_per_expert.shape) == ((8, 256, 256), (8,))
        fake.pop_launches(), fake.copies.clear()

        out = Array(fake, "bfloat16", 10, 256)
        y = np.zeros((8, 256, 256), dtype)
        back = buffer.low_latency_combine(y, idx, weights, sent.handle, out=out, return_recv_hook=with_hook)
        if with_hook:
            back.hook()
        assert back.x.ptr == out.ptr
        assert out.ptr not in [source for _, source, _ in fake.copies]


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
        place = rows.ptr
        work_on(lambda library, device: compute)
        del rows
        work_on(lambda library, device: CALLERS_STREAM)
        fake.waits.clear()
        assert send().recv_x.ptr == place
        assert fake.waits == [(CALLERS_STREAM, ("work of", compute))]


def test_memory_in_a_capture_stays_with_its_call(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture, no wait orders reuse after readers in a parallel branch."""
    with make(low_latency=True) as buffer, monkeypatch.context() as capturing:
        x, idx, weights = arguments(fake)
        y, z = Array(fake, "bfloat16", 40, 256), Array(fake, "bfloat16", 8, 256, 256)
        sent, quick = buffer.dispatch(x, idx, num_worst_tokens=40), buffer.low_latency_dispatch(x, idx)
        addresses = [sent.handle.routing.ptr, quick.recv_x.ptr]
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        buffer.combine(y, sent.handle, async_finish=True)
        del sent
        for _ in range(10):
            addresses.append(buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True).handle.routing.ptr)
            addresses.append(buffer.low_latency_dispatch(x, idx, async_finish=True).recv_x.ptr)
            addresses.append(buffer.low_latency_combine(z, idx, weights, quick.handle, async_finish=True).x.ptr)
        assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("how", [{}, {"async_finish": True}, {"stream": 77}], ids=str)
def test_memory_does_not_grow_while_the_host_runs_ahead(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Layers reuse the memory of dropped results, although the GPU has not run any call yet."""
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
        assert (rows, sums) == (2, 2), "the caller holds one while the next call runs"
        assert handles <= Layout(buffer.config).num_handles, "no more than at the start"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_only_kernels_that_wait_for_the_previous_one_overlap_with_it(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Others would run before their input is ready. Older GPUs do not support such launches."""
    monkeypatch.setattr("deepep_rt.jit.current_gpu.target_arch", lambda: arch)
    attributes = {}

    def cu_launch(config: Any, function: int, *rest: Any) -> tuple:
        attributes[fake.constants[function][0].name] = config.numAttrs
        return fake.launch(config, function, *rest)

    monkeypatch.setattr("deepep_rt.jit.launch.driver.cuLaunchKernelEx", cu_launch)
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        buffer.combine(Array(fake, "bfloat16", 40, 256), buffer.dispatch(x, idx, num_worst_tokens=40).handle)
        quick = buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, quick.handle)
    overlapping = [name for name, count in attributes.items() if count]
    assert len(attributes) == 5
    assert overlapping == ([name for name in attributes if KERNELS[name].overlaps] if arch == "sm_90" else [])


def test_zero_copy(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        y = buffer.get_low_latency_combine_buffer(sent.handle)
        assert like(y) == ("bfloat16", (8, 256, 256))
        buffer.low_latency_combine(y, idx, weights, sent.handle, zero_copy=True)
        assert fake.pop_launches()[-1].y == y.ptr
        with pytest.raises(EPInputError, match="zero_copy=True"):
            buffer.low_latency_combine(Array(fake, "bfloat16", 8, 256, 256), idx, weights, sent.handle, zero_copy=True)


def test_masks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True, on_timeout="mask") as buffer:
        backend = buffer._backend
        mask = backend.runtime.state + Layout(buffer.config).local.offsets["masked"] + 4 * 2
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
        assert rows[1] == 0xFF, "half a row may have arrived, so all rows are marked as not arrived"
        assert unmasked == (mask, 0, 1)
        assert buffer.query_masked_ranks() == []
        backend.runtime.page.masked[3] = 1  # as a kernel does it
        assert buffer.query_masked_ranks() == [3]
    assert BASE not in fake.freed, "rank 3 may not call destroy, so symmetric memory stays"


def test_masks_wait_for_earlier_calls(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        fake.requests.clear()
        buffer.mask_rank(2)
        assert "synchronize" in fake.requests[: fake.requests.index("fill")]


def test_unreduced_rows_are_refused_with_masked_ranks(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y, sent = Array(fake, "bfloat16", 8, 256, 256), buffer.low_latency_dispatch(x, idx)
        buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=False)
        buffer.mask_rank(2)
        with pytest.raises(EPInputError, match="allow_multiple_reduction=False"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=False)


def test_kernels_masks_are_logged_once(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each time that a kernel masks the rank. A mask of the program is not logged."""
    with make(low_latency=True, on_timeout="mask") as buffer:
        x, idx, _ = arguments(fake)
        buffer.mask_rank(2)
        for _ in range(2):
            buffer._backend.runtime.page.masked[3] = 1  # as a kernel does it
            for _ in range(2):
                buffer.low_latency_dispatch(x, idx)
            buffer.unmask_rank(3)
        assert caplog.messages == ["rank 0: rank 3 is masked: it was silent for 1 s"] * 2
        buffer.unmask_rank(2)


@pytest.mark.parametrize("caller", [0, 12])
def test_the_combine_buffer_is_for_the_callers_stream(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, caller: int
) -> None:
    """0 is a stream too: the default one."""
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx, use_fp8=False).handle
        gc.collect()
        monkeypatch.setattr(type(frameworks.framework_of(x, "x")), "current_stream", lambda self, device: caller)
        fake.waits.clear()
        buffer.get_low_latency_combine_buffer(handle)
        assert (caller, 5) in fake.waits, "an event of the stream that used the memory before"


def test_gpus_without_fp8(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("deepep_rt.jit.current_gpu.target_arch", lambda: "sm_80")
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
    """JAX allocates it before the call. Rows of bfloat16 would be twice as long."""
    monkeypatch.setattr("deepep_rt.jit.current_gpu.target_arch", lambda: "sm_80")
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        call = buffer._backend.begin(x, False, None, None)
        given = low_latency_dispatch_inputs(buffer._info, call.stream, x, idx, None, True, False, False, None, None)
        given.into = LowLatencyMemory(given.x, None, given.x)
        with pytest.raises(EPUnavailableError, match=r"sm_80 cannot convert to FP8\. Pass use_fp8=False"):
            buffer._backend.low_latency_dispatch(given, call, False)
        assert fake.pop_launches() == []
