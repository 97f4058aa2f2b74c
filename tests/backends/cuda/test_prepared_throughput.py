"""Prepared throughput calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import Array, FakeGpu, _Library, arguments, fake, like, make, region
from prepared_on_fake_gpu import ROWS, collected, handle_of, no_collection, rows_of_handle, without

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError, EPUnavailableError
from deepep_rt.arrays.frameworks import ViewFramework
from deepep_rt.arrays.view import View

__all__ = ["collected", "fake", "make", "no_collection"]

pytestmark = pytest.mark.usefixtures("collected")

PLACES = (
    *(f"recv_{name}_offset" for name in ("x", "scales", "topk_idx", "topk_weights", "src_idx")),
    *("num_recv", "num_recv_per_expert", "out", "out_topk_weights"),
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"topk_idx": True},
    {"topk_idx": True, "topk_weights": True, "y_weights": True},
    {"x_scales": True},
    {"bias": 1},
    {"bias": 2, "compress": "log10"},
    {"async_finish": True},
    {"stream": 77},
]


@pytest.mark.parametrize("nodes", [{}, {"ranks_per_node": 2}], ids=["one-node", "nodes"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_launches_are_those_of_ordinary_calls(fake: FakeGpu, make: Any, options: dict[str, Any], nodes: dict[str, int]) -> None:
    """All parameters are the same, but for the memory of results."""
    with make(**nodes) as buffer:
        handle = handle_of(fake, buffer)
        x, idx, weights = arguments(fake)
        arrays = {"topk_idx": idx, "topk_weights": weights, "x_scales": Array(fake, "float32", 10, 2)}
        for_dispatch = {name: array for name, array in arrays.items() if name in options}
        biases = [Array(fake, "bfloat16", 10, 256) for _ in range(options.get("bias", 0))]
        y_weights = Array(fake, "float32", ROWS, 4) if "y_weights" in options else None
        for_combine = {"bias": biases or None, "compress": options.get("compress")}
        how = {name: options[name] for name in ("async_finish", "stream") if name in options}
        y = rows_of_handle(fake)
        sent = buffer.dispatch(x, handle=handle, **for_dispatch, **how)
        back = buffer.combine(y, handle, topk_weights=y_weights, **for_combine, **how)
        ordinary = fake.pop_launches()
        step = buffer.prepare_throughput(x, handle, **for_dispatch, y_weights=y_weights, **for_combine, **how)
        assert fake.pop_launches() == []
        for number in range(3):
            buffer.num_sms = 8 + number
            new, summed = step.dispatch(), step.combine(y)
            prepared = fake.pop_launches()
            wanted = [{**without(one, *PLACES), "blocks": 8 + number} for one in ordinary]
            assert [without(one, *PLACES) for one in prepared] == wanted
            for mine, theirs in ((new, sent), (summed, back)):
                assert type(mine) is type(theirs)
                assert {name: view and like(view) for name, view in mine.views.items()} == {
                    name: view and like(view) for name, view in theirs.views.items()
                }
            assert new.recv_x.ptr == region(buffer, "pool").start - buffer._backend.runtime.regions.offsets["pool"] + (
                prepared[0].recv_x_offset
            )
            assert new.num_recv_tokens.ptr == prepared[0].num_recv
            assert summed.x.ptr == prepared[1].out
            assert new.handle is handle


def test_a_call_asks_the_driver_for_three_things(fake: FakeGpu, make: Any) -> None:
    """Each request takes the host a microsecond."""
    with make() as buffer:
        step = buffer.prepare_throughput(arguments(fake)[0], handle_of(fake, buffer))
        y, other = rows_of_handle(fake), rows_of_handle(fake)
        for call in (step.dispatch, lambda: step.combine(y)):
            call()
            fake.requests.clear()
            result = call()
            assert fake.requests == ["context", "capture_id", "launch"]
            assert call() is result, "the arrays that the caller has read need not be made again"
        fake.requests.clear()
        assert step.combine(other) is result
        assert fake.requests == ["context", "capture_id", "launch"]


def test_rows_of_the_experts(fake: FakeGpu, make: Any) -> None:
    """A new array is checked, and read from then on. The same array is not looked at again. Results have its dtype and library."""
    with make(dtype="float32") as buffer:
        handle, x = handle_of(fake, buffer), arguments(fake)[0]
        step = buffer.prepare_throughput(x, handle)
        with pytest.raises(EPInputError, match="y=None"):
            step.combine()
        first, second, wide = rows_of_handle(fake), rows_of_handle(fake), rows_of_handle(fake, "float32")
        places = set()
        for y in (first, first, second, None, wide, first):
            back = step.combine(y)
            (launch,) = fake.pop_launches()
            assert (launch.y, like(back.x)) == ((y or second).ptr, ((y or second).dtype, (10, 256)))
            places.add(launch.out)
        assert len(places) == 1, "there is room for the widest rows"
        foreign = View(wide.ptr, wide.shape, wide.dtype, 0, wide, ViewFramework())
        assert step.combine(foreign).x.framework is foreign.framework
        on_host = _Library().view(rows_of_handle(fake), "y", None)
        on_host.device, on_host.framework = -1, ViewFramework()
        for wrong, words in (
            (Array(fake, "bfloat16", ROWS - 1, 256), r"y.shape=\[23, 256\]"),
            (Array(fake, "int8", ROWS, 256), "y.dtype=int8"),
            (Array(fake, "bfloat16", ROWS, 256, offset=8), "multiple of 16 bytes"),
            (on_host, "y is in host memory"),
        ):
            with pytest.raises(EPInputError, match=words):
                step.combine(wrong)
        fake.pop_launches()
        step.combine()
        assert fake.pop_launches()[0].y == wide.ptr, "a refused array changes nothing"
        with_bias = buffer.prepare_throughput(x, handle, bias=Array(fake, "float32", 10, 256))
        with pytest.raises(EPInputError, match=r"y\.dtype=bfloat16; expected float32"):
            with_bias.combine(first)


def test_wrong_arguments(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer, make() as other:
        handle, x = handle_of(fake, buffer), arguments(fake)[0]
        by_expert = buffer.dispatch(*arguments(fake), layout="expert", num_worst_tokens=40).handle
        fake.pop_launches()
        weights = Array(fake, "float32", 10, 4)
        for given, options, words in (
            ((x, None), {}, "handle=None"),
            ((x, handle_of(fake, other)), {}, "another Buffer"),
            ((x, by_expert), {}, r"layout='expert'; expected 'token'.*dispatch\(handle=\)"),
            ((Array(fake, "bfloat16", 9, 256), handle), {}, "expected 10 tokens"),
            ((x, handle), {"topk_weights": weights}, "topk_idx=None"),
            ((x, handle), {"x_scales": weights}, "x_scales"),
            ((x, handle), {"y": x}, "y.shape"),
            ((x, handle), {"y_weights": weights}, r"y_weights.shape=\[10, 4\]"),
            ((x, handle), {"bias": rows_of_handle(fake)}, r"bias\[0\].shape"),
            ((x, handle), {"bias": [x, Array(fake, "float32", 10, 256)]}, r"bias\[1\].dtype=float32"),
            ((x, handle), {"compress": "fp4"}, "compress"),
            ((x, handle), {"stream": "fast"}, "stream"),
            ((x, handle), {"async_finish": 3}, "async_finish"),
        ):
            with pytest.raises(EPInputError, match=words):
                buffer.prepare_throughput(*given, **options)
        with monkeypatch.context() as patch:
            patch.setattr(_Library, "name", "jax")
            with pytest.raises(EPInputError, match="x is a JAX array"):
                buffer.prepare_throughput(x, handle)
        with monkeypatch.context() as patch:
            patch.setattr(_Library, "current_stream", lambda library, device: None)
            with pytest.raises(EPInputError, match="Pass stream="):
                buffer.prepare_throughput(x, handle)
            buffer.prepare_throughput(x, handle, stream=5).dispatch()
        assert [launch.stream for launch in fake.pop_launches()] == [5]
        buffer._backend._calls._fp8_rows._without_fp8 = 2, "sm_80"
        with pytest.raises(EPUnavailableError, match=r"compress='fp8'; .*rank 2 has sm_80"):
            buffer.prepare_throughput(x, handle, compress="fp8")


def test_reports_of_kernels(fake: FakeGpu, make: Any) -> None:
    """They raise as in ordinary calls: a wrong call after the launch, a silent peer before it."""
    buffer = make()
    handle, x = handle_of(fake, buffer), arguments(fake)[0]
    step = buffer.prepare_throughput(x, handle, y=rows_of_handle(fake))
    page = buffer._backend.runtime.page
    page.report["peer"], page.report["phase"], page.timed_out.value = 2, 3, 1
    for call in (step.dispatch, step.combine, lambda: buffer.prepare_throughput(x, handle)):
        with pytest.raises(EPTimeoutError, match="for rank 2"):
            call()
    assert fake.pop_launches() == []
    buffer.destroy()
    for call in (step.dispatch, step.combine):
        with pytest.raises(EPDestroyedError):
            call()


def test_host_arrays_take_ordinary_calls(fake: FakeGpu, make: Any) -> None:
    """Each call copies them, so it sees values that the program has written."""
    import ml_dtypes
    import numpy as np

    with make() as buffer:
        handle, x = handle_of(fake, buffer), np.zeros((10, 256), ml_dtypes.bfloat16)
        step = buffer.prepare_throughput(x, handle)
        for _ in range(2):
            fake.copies.clear()
            sent = step.dispatch()
            step.combine(np.zeros((ROWS, 256), ml_dtypes.bfloat16))
            assert x.ctypes.data in [source for _, source, _ in fake.copies]
        assert sent.recv_x.shape == (ROWS, 256)
        assert [launch.kernel for launch in fake.pop_launches()] == ["dispatch", "combine"] * 2


def test_each_call_is_a_range_of_a_profiler(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def annotate(message: str, domain: str) -> Iterator[None]:
        seen.append(message)
        yield
        seen.append("end")

    nvtx: Any = ModuleType("nvtx")
    nvtx.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    monkeypatch.setenv("DEEPEP_RT_NVTX", "1")
    with make() as buffer:
        step = buffer.prepare_throughput(arguments(fake)[0], handle_of(fake, buffer), y=rows_of_handle(fake))
        seen.clear()
        assert step.dispatch() is step.dispatch()
        step.combine()
    dispatch = "dispatch: 10 tokens of 512 bytes, known routing, layout token, prepared", "end"
    assert seen == [*dispatch, *dispatch, "combine: 24 rows for 10 tokens, reduce rank, prepared", "end"]


def test_it_belongs_to_its_process(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        step = buffer.prepare_throughput(arguments(fake)[0], handle_of(fake, buffer))
        assert copy.deepcopy(step) is step
        with pytest.raises(TypeError, match="a PreparedThroughput cannot be pickled"):
            pickle.dumps(step)
