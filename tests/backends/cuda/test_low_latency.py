"""The low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import LowLatencyCalls, old_rank, quick
from fake_gpu import CALLERS_STREAM, Array, FakeGpu, arguments, fake, like, make

from deepep_rt import EPInputError, EPUnavailableError
from deepep_rt.arrays import frameworks
from deepep_rt.backends.base import LowLatencyMemory
from deepep_rt.backends.inputs import low_latency_dispatch_inputs
from deepep_rt.cuda import driver
from deepep_rt.jit import launch
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.table import KERNELS

__all__ = ["fake", "make", "old_rank", "quick"]


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
        calls = LowLatencyCalls(fake, buffer)
        for tokens in (0, 1, 65, 512):
            calls.x, calls.idx, calls.weights = arguments(fake, tokens)
            calls.combine(buffer.low_latency_dispatch(calls.x, calls.idx).handle)
            dispatch, combine = fake.pop_launches()
            assert dispatch.blocks == combine.blocks == 64
            assert not combine.has_weights
    with make(low_latency=True, low_latency_sms=500) as buffer:
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert fake.pop_launches()[0].blocks == 128, "twice the tokens, and at most the number of SMs"


def test_out_may_not_overlap_y(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    handle, y, out = quick.dispatch().handle, quick.y(), Array(fake, "bfloat16", 10, 256)
    for where in (y.ptr, y.ptr + 2 * 8 * 256 * 256 - 16, y.ptr - 16):
        out.ptr = where
        with pytest.raises(EPInputError, match="out overlaps y"):
            quick.combine(handle, y=y, out=out)
    out.ptr = y.ptr + 2 * 8 * 256 * 256
    assert quick.combine(handle, y=y, out=out).x.ptr == out.ptr


def test_kernels_are_loaded_when_a_buffer_is_made(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes seconds. In the first call, the other ranks would wait for it."""
    with make(low_latency=True, num_max_tokens_per_rank=512, hidden=7168) as buffer:
        monkeypatch.setattr(launch, "load", lambda *_: pytest.fail("loaded by a call"))
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_only_kernels_that_wait_for_the_previous_one_overlap_with_it(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Others would run before their input is ready. Older GPUs do not support such launches."""
    monkeypatch.setattr("deepep_rt.jit.compiler.target_arch", lambda: arch)
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


@pytest.mark.parametrize("is_prepared", [False, True])
def test_zero_copy(fake: FakeGpu, quick: LowLatencyCalls, is_prepared: bool) -> None:
    """A handle of a prepared dispatch works in an ordinary combine, too."""
    sent = quick.prepare().dispatch() if is_prepared else quick.dispatch()
    y = quick.buffer.get_low_latency_combine_buffer(sent.handle)
    assert like(y) == ("bfloat16", (8, 256, 256))
    quick.combine(sent.handle, y=y, zero_copy=True)
    dispatch, combine = fake.pop_launches()
    assert (combine.y, combine.handle, combine.has_weights) == (y.ptr, dispatch.handle, 1)
    with pytest.raises(EPInputError, match="zero_copy=True"):
        quick.combine(sent.handle, zero_copy=True)


@pytest.mark.parametrize("caller", [0, 12])
def test_the_combine_buffer_is_for_the_callers_stream(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, caller: int
) -> None:
    """0 is a stream too: the default one."""
    with make(low_latency=True) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, _ = arguments(fake)
        handle = buffer.low_latency_dispatch(x, idx, use_fp8=False).handle
        gc.collect()
        monkeypatch.setattr(type(frameworks.framework_of(x, "x")), "current_stream", lambda self, device: caller)
        fake.has_memory = False
        fake.waits.clear()
        buffer.get_low_latency_combine_buffer(handle)
        assert (caller, 5) in fake.waits, "an event of the stream that used the memory before"


def test_gpus_without_fp8(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture, old_rank: int) -> None:
    """Rows travel in one format. If the GPU of one rank cannot convert to FP8, no rank converts."""
    with make(low_latency=True) as buffer:
        calls = LowLatencyCalls(fake, buffer)
        for dispatch in (calls.dispatch, lambda **options: calls.prepare(**options).dispatch()):
            for options in ({}, {"use_ue8m0": True}, {"use_fp8": False}):
                sent = dispatch(**options)
                assert (like(sent.recv_x), sent.recv_x_scales) == (("bfloat16", (8, 256, 256)), None)
                assert fake.pop_launches()[-1].use_fp8 == 0
    told = [record.getMessage() for record in caplog.records if "FP8" in record.getMessage()]
    assert len(told) == 1
    assert f"rank {old_rank}'s sm_80 cannot convert to FP8: rows travel and arrive as bfloat16" in told[0]


@pytest.mark.parametrize("num_tokens", [10, 200])
def test_compressed_rows(fake: FakeGpu, make: Any, num_tokens: int) -> None:
    """Kernels of their own send them, for few and for many tokens."""
    with make(low_latency=True, hidden=512, num_max_tokens_per_rank=256, low_latency_sms=4) as buffer:
        calls = LowLatencyCalls(fake, buffer)
        calls.x, calls.idx, calls.weights = arguments(fake, num_tokens, 512)
        handle, signatures = calls.dispatch(use_fp8=False).handle, set()
        for compress in (None, "log10", "fp8"):
            fake.pop_launches()
            calls.combine(handle, compress=compress)
            (combine,) = fake.pop_launches()
            plain = "ll_combine" if num_tokens == 10 else "ll_combine_large"
            assert combine.kernel == (f"{plain}_{compress}" if compress else plain)
            signatures.add(combine.call_signature)
        assert len(signatures) == 3, "ranks that differ find out"


def test_memory_for_fp8_on_gpus_without_it(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX allocates it before the call. Rows of bfloat16 would be twice as long."""
    monkeypatch.setattr("deepep_rt.jit.compiler.target_arch", lambda: "sm_80")
    with make(low_latency=True) as buffer:
        x, idx, _ = arguments(fake)
        call = buffer._backend.begin(x, False, None, None)
        given = low_latency_dispatch_inputs(buffer._info, call.stream, x, idx, None, True, False, False, None, None)
        given.into = LowLatencyMemory(given.x, None, given.x)
        with pytest.raises(EPUnavailableError, match=r"sm_80 cannot convert to FP8\. Pass use_fp8=False"):
            buffer._backend.low_latency_dispatch(given, call, False)
        assert fake.pop_launches() == []
