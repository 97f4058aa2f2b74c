"""Arguments of calls of the CUDA backend: lifetime, host memory, alignment. On a fake GPU that records requests."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import BASE, Array, FakeGpu, arguments, fake, like, make, routed

from deepep_rt import EPInputError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays import view as arrays
from deepep_rt.cuda import driver

__all__ = ["fake", "make"]


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


def test_arguments_of_different_libraries(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that works on another stream than the call could reuse the memory before the kernels read it."""

    class Other(Array): ...

    class Library(type(frameworks.framework_of(Array(fake, "int32", 1), "x"))): ...  # type: ignore[misc]

    monkeypatch.setitem(frameworks.FRAMEWORK_OF_CLASS, Other, Library())
    with make(low_latency=True) as buffer:
        x, _, weights = arguments(fake)
        packed, own_idx = Array(fake, "uint8", 10, 128), Array(fake, "int64", 10, 4)
        for kind, call in (
            (("int64", 10, 4), lambda idx: buffer.dispatch(x, idx, weights, num_worst_tokens=40)),
            (("int64", 10, 4), lambda idx: buffer.low_latency_dispatch(x, idx)),
            (("uint8", 10, 8), lambda scales: buffer.low_latency_dispatch(packed, own_idx, x_scales=scales, use_fp8=False)),
        ):
            array = Other(fake, *kind)
            seen = weakref.ref(array)
            call(array)
            del array
            gc.collect()
            assert seen() is not None
            call(Other(fake, *kind))  # the fake GPU has finished the first call
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
