"""Prepared calls of the CUDA backend, of both kinds, on a fake GPU that records requests."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import (
    Calls,
    LowLatencyCalls,
    ThroughputCalls,
    busy_gpu,
    calls,
    collected,
    each_kind,
    no_collection,
    quick,
    received,
    without,
)
from fake_gpu import CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, _Library, arguments, fake, like, make, region

from deepep_rt import EPDestroyedError, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.arrays.frameworks import ViewFramework
from deepep_rt.arrays.view import View
from deepep_rt.cuda import driver

__all__ = ["calls", "collected", "fake", "make", "no_collection", "quick"]

pytestmark = pytest.mark.usefixtures("collected")

Kind = type[Calls]
THROUGHPUT: list[dict[str, Any]] = [
    {},
    {"topk_idx": True},
    {"topk_idx": True, "topk_weights": True, "y_weights": True},
    {"x_scales": True},
    {"bias": 1},
    {"bias": 2, "compress": "log10"},
    {"async_finish": True},
    {"stream": 77},
]
LOW_LATENCY: list[dict[str, Any]] = [
    {},
    {"use_fp8": False},
    {"round_scale": True},
    {"use_ue8m0": True},
    {"allow_multiple_reduction": False},
    {"reduce": "topk"},
    {"compress": "log10"},
    {"return_recv_hook": True},
    {"async_finish": True},
    {"stream": 77},
]
CASES = [
    *(
        pytest.param(ThroughputCalls, sizes, options, marks=marks)
        for sizes, marks in (({}, ()), ({"ranks_per_node": 2}, pytest.mark.full))
        for options in THROUGHPUT
    ),
    *(
        pytest.param(
            LowLatencyCalls, {"on_timeout": on_timeout, "hidden": 512 if "compress" in options else 256}, options, marks=marks
        )
        for on_timeout, marks in (("raise", ()), ("mask", pytest.mark.full))
        for options in LOW_LATENCY
    ),
]
MEMORY = (
    *(f"recv_{name}_offset" for name in ("x", "scales", "topk_idx", "topk_weights", "src_idx")),
    *("num_recv", "num_recv_per_expert", "out", "out_topk_weights"),
    *("handle", "recv_x", "recv_scales"),
)
"""Members of launches that tell where results go."""


def arrays_of(fake: FakeGpu, calls: Calls, options: dict[str, Any]) -> dict[str, Any]:
    """Replace options that say whether there is an array by an array."""
    made: dict[str, Any] = {
        "topk_idx": calls.idx,
        "topk_weights": calls.weights,
        "x_scales": Array(fake, "float32", 10, 2),
        "y_weights": Array(fake, "float32", 24, 4),
        "bias": [Array(fake, "bfloat16", 10, 256) for _ in range(options.get("bias", 0))],
    }
    return {name: made.get(name, value) for name, value in options.items()}


@pytest.mark.parametrize(("kind", "sizes", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_launches_are_those_of_ordinary_calls(
    fake: FakeGpu, make: Any, kind: Kind, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    """All parameters are the same, but for the memory of results."""
    is_throughput = kind is ThroughputCalls
    if sizes.get("on_timeout") == "mask" and ("reduce" in options or "allow_multiple_reduction" in options):
        with make(**kind.sizes, **sizes) as buffer, pytest.raises(EPInputError, match="on_timeout='mask'"):
            kind(fake, buffer).prepare(**options)
        return
    with make(**kind.sizes, **sizes) as buffer:
        calls = kind(fake, buffer)
        options, y = arrays_of(fake, calls, options), calls.y()
        if not is_throughput:
            options["cumulative_local_expert_recv_stats"] = Array(fake, "int32", 8)
        for_dispatch, for_combine = calls.split(options)
        sent = received(calls.dispatch(**for_dispatch))
        back = received(calls.combine(sent.handle, y=y, **for_combine))
        ordinary = fake.pop_launches()
        step = calls.prepare(**options)
        assert fake.pop_launches() == []
        for number in range(3):
            if is_throughput:
                buffer.num_sms = 8 + number
            new = step.dispatch()
            assert (getattr(new, "hook", None) is None) == (getattr(sent, "hook", None) is None)
            received(new)
            summed = received(step.combine(y))
            prepared = fake.pop_launches()
            blocks = {"blocks": 8 + number} if is_throughput else {}
            ignored = [name for name in MEMORY if name != "handle" or not is_throughput]
            assert [without(one, *ignored) for one in prepared] == [{**without(one, *ignored), **blocks} for one in ordinary]
            for mine, theirs in ((new, sent), (summed, back)):
                assert type(mine) is type(theirs)
                assert {name: view and like(view) for name, view in mine.views.items()} == {
                    name: view and like(view) for name, view in theirs.views.items()
                }
            assert summed.x.ptr == prepared[-1].out
            if is_throughput:
                start = region(buffer, "pool").start - buffer._backend.runtime.regions.offsets["pool"]
                assert new.recv_x.ptr == start + prepared[0].recv_x_offset
                assert new.num_recv_tokens.ptr == prepared[0].num_recv
                assert new.handle is calls.handle
            else:
                assert new.recv_x.ptr == prepared[0].recv_x
                assert new.handle.num_tokens == 10
                assert {launch.handle for launch in prepared} == {prepared[0].handle}


def test_results_share_their_arrays(fake: FakeGpu, calls: Calls) -> None:
    """Those that the caller has read need not be made again. New rows for a combine need no request to the driver."""
    step, y, other = calls.prepare(), calls.y(), calls.y()
    for call in (step.dispatch, lambda: step.combine(y)):
        result = call()
        assert call() is result
    fake.requests.clear()
    assert step.combine(other) is result
    assert fake.requests == ["context", "capture_id", "launch"]


@pytest.mark.parametrize(("kind", "num_slots"), [(ThroughputCalls, 3), (LowLatencyCalls, 1)])
def test_results_stay_in_their_memory(fake: FakeGpu, make: Any, kind: Kind, num_slots: int) -> None:
    """Ordinary calls get other memory, also while the caller holds no result."""
    with make(**kind.sizes, num_slots=num_slots) as buffer:
        calls, places = kind(fake, buffer), set()

        def written() -> tuple[int, ...]:
            dispatch, combine = fake.pop_launches()
            return (*(getattr(dispatch, name) for name in kind.places), combine.out)

        step = calls.prepare(y=calls.y())
        for _ in range(3):
            step.dispatch(), step.combine()
            places.add(written())
            calls.combine(calls.dispatch().handle)
            assert not {*written()} & {*next(iter(places))}
        assert len(places) == 1


def test_memory_of_a_pool_is_free_after_the_last_reference(fake: FakeGpu, make: Any, no_collection: None) -> None:
    """The results keep their memory, the object keeps all of it, and nothing else does."""
    with make(num_slots=1) as buffer:
        calls, pool = ThroughputCalls(fake, buffer), buffer._backend.throughput.results.pool
        y = calls.y()
        held = [weakref.ref(array) for array in (calls.x, y)]
        step = calls.prepare()
        assert pool.used_bytes
        step.dispatch(), step.combine(y)
        step.combine(other := calls.y())
        del y
        assert [one() is None for one in held] == [False, True], "a new y lets the last one go"
        arrived = step.dispatch().recv_x
        del calls, step, other
        assert held[0]() is None
        assert pool.used_bytes, "the caller still holds these rows"
        del arrived
        assert pool.used_bytes == 0


def test_memory_of_slots_is_free_after_the_last_reference(fake: FakeGpu, make: Any, no_collection: None) -> None:
    with make(low_latency=True) as buffer:
        calls, ordinary = LowLatencyCalls(fake, buffer), LowLatencyCalls(fake, buffer)
        held = [weakref.ref(array) for array in calls.given()]
        step = calls.prepare()
        del calls
        assert all(one() is not None for one in held)
        arrived = step.dispatch().recv_x
        step.combine(ordinary.y())
        first, last = fake.pop_launches()
        del step
        assert all(one() is None for one in held)
        assert ordinary.dispatch().recv_x.ptr != first.recv_x, "the caller still holds these rows"
        del arrived
        sent = [ordinary.dispatch() for _ in range(2)]
        back = ordinary.combine(sent[0].handle)
        assert first.recv_x in [result.recv_x.ptr for result in sent]
        assert back.x.ptr == last.out


def test_a_full_pool(fake: FakeGpu, make: Any) -> None:
    """Rows that arrive cannot be copied in each call, so the preparation needs room, whatever `on_exhausted` says."""
    with make(num_slots=1, on_exhausted="copy") as buffer:
        calls = ThroughputCalls(fake, buffer, num_rows=256)  # as many as fit
        step = calls.prepare()
        with pytest.raises(EPOutOfMemoryError, match=r"no room for a result.*larger num_slots$"):
            calls.prepare()
        calls.dispatch()  # this result is copied
        del step
        calls.prepare().dispatch()


def on_host(array: Array) -> View:
    view = _Library().view(array, "y", None)
    view.device, view.framework = -1, ViewFramework()
    return view


def refuses(step: Any, wrong: Any, words: str) -> None:
    with pytest.raises(EPInputError, match=words):
        step.combine(wrong)


def test_rows_of_the_experts(fake: FakeGpu, calls: Calls) -> None:
    """A new array is checked, and read from then on. The same array is not looked at again."""
    step = calls.prepare()
    step.dispatch()
    refuses(step, None, "y=None")
    first, second = calls.y(), calls.y()
    for y in (first, first, second, None, first):
        fake.pop_launches()
        back = step.combine(y)
        (launch,) = fake.pop_launches()
        assert (launch.y, launch.out) == ((y or second).ptr, back.x.ptr)
    short, unaligned = calls.y(), calls.y()
    short.shape = (short.shape[0] - 1, *short.shape[1:])
    unaligned.ptr += 8
    refuses(step, short, rf"y.shape=\[{short.shape[0]}, ")
    refuses(step, calls.y("int8"), "y.dtype=int8")
    refuses(step, unaligned, "multiple of 16 bytes")
    refuses(step, on_host(calls.y()), "y is in host memory")
    step.combine()
    assert fake.pop_launches()[0].y == first.ptr, "a refused array changes nothing"
    first.shape = (1,)
    step.combine(first)


def test_results_have_the_dtype_and_library_of_rows(fake: FakeGpu, make: Any) -> None:
    with make(dtype="float32") as buffer:
        calls, places = ThroughputCalls(fake, buffer), set()
        step, narrow, wide = calls.prepare(), calls.y(), calls.y("float32")
        for y in (narrow, None, wide, narrow):
            back = step.combine(y)
            assert like(back.x) == ((y or narrow).dtype, (10, 256))
            places.add(fake.pop_launches()[0].out)
        assert len(places) == 1, "there is room for the widest rows"
        foreign = View(wide.ptr, wide.shape, wide.dtype, 0, wide, ViewFramework())
        assert step.combine(foreign).x.framework is foreign.framework
        with_bias = calls.prepare(bias=Array(fake, "float32", 10, 256))
        refuses(with_bias, narrow, r"y\.dtype=bfloat16; expected float32")


def test_sums_in_an_array_of_the_caller(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        calls, out = LowLatencyCalls(fake, buffer), Array(fake, "bfloat16", 10, 256)
        step = calls.prepare(out=out)
        refuses(step, calls.y(), "expected its dispatch before")
        step.dispatch()
        assert step.combine(calls.y()).x.ptr == out.ptr == fake.pop_launches()[-1].out
        refuses(step, calls.y("float16"), "y.dtype=float16")
        overlapping = calls.y()
        overlapping.ptr = out.ptr - 16
        refuses(step, overlapping, "out overlaps y")


def wrong_throughput(fake: FakeGpu, calls: Any, other: Any) -> list[tuple[tuple[Any, ...], dict[str, Any], str]]:
    x, handle, weights = calls.x, calls.handle, Array(fake, "float32", 10, 4)
    by_expert = ThroughputCalls(fake, calls.buffer, layout="expert").handle
    return [
        ((x, None), {}, "handle=None"),
        ((x, ThroughputCalls(fake, other).handle), {}, "another Buffer"),
        ((x, by_expert), {}, r"layout='expert'; expected 'token'.*dispatch\(handle=\)"),
        ((Array(fake, "bfloat16", 9, 256), handle), {}, "expected 10 tokens"),
        ((x, handle), {"topk_weights": weights}, "topk_idx=None"),
        ((x, handle), {"x_scales": weights}, "x_scales"),
        ((x, handle), {"y": x}, "y.shape"),
        ((x, handle), {"y_weights": weights}, r"y_weights.shape=\[10, 4\]"),
        ((x, handle), {"bias": calls.y()}, r"bias\[0\].shape"),
        ((x, handle), {"bias": [x, Array(fake, "float32", 10, 256)]}, r"bias\[1\].dtype=float32"),
        ((x, handle), {"compress": "fp4"}, "compress"),
        ((x, handle), {"async_finish": 3}, "async_finish"),
        ((x, handle), {"stream": "fast"}, "stream"),
    ]


def wrong_low_latency(fake: FakeGpu, calls: Any, other: Any) -> list[tuple[tuple[Any, ...], dict[str, Any], str]]:
    x, idx, weights = given = calls.given()
    wrong = Array(fake, "bfloat16", 9, 256)
    return [
        ((x, idx, None), {}, "topk_weights=None"),
        ((x, Array(fake, "int64", 9, 4), weights), {}, "topk_idx.shape"),
        (given, {"out": wrong}, r"out.shape=\[9, 256\]"),
        (given, {"y": wrong}, "y.shape"),
        (given, {"y": calls.y(), "zero_copy": True}, "zero_copy=True"),
        (given, {"compress": "fp8"}, "hidden=256"),
        (given, {"reduce": "all"}, "reduce"),
        (given, {"use_fp8": False, "use_ue8m0": True}, "use_ue8m0=True"),
        (given, {"return_recv_hook": 3}, "return_recv_hook"),
        (given, {"stream": "fast"}, "stream"),
    ]


@pytest.mark.parametrize(
    ("kind", "prepare", "wrong"),
    [(ThroughputCalls, "prepare_throughput", wrong_throughput), (LowLatencyCalls, "prepare_low_latency", wrong_low_latency)],
)
def test_wrong_arguments(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind, prepare: str, wrong: Any) -> None:
    with make(**kind.sizes) as buffer, make() as other:
        calls = kind(fake, buffer)
        for given, options, words in wrong(fake, calls, other):
            with pytest.raises(EPInputError, match=words):
                getattr(buffer, prepare)(*given, **options)
        with monkeypatch.context() as patch:
            patch.setattr(_Library, "name", "jax")
            with pytest.raises(EPInputError, match="x is a JAX array"):
                calls.prepare()
        with monkeypatch.context() as patch:
            patch.setattr(_Library, "current_stream", lambda library, device: None)
            with pytest.raises(EPInputError, match="Pass stream="):
                calls.prepare()
            calls.prepare(stream=5).dispatch()
        assert [launch.stream for launch in fake.pop_launches()] == [5]
    with make() as buffer, pytest.raises(EPInputError, match="low_latency=True"):
        buffer.prepare_low_latency(*arguments(fake))


def test_scales_in_host_memory_are_copied_in_each_call(fake: FakeGpu, make: Any) -> None:
    """As other arrays there. Kernels cannot read them."""
    with make(low_latency=True) as buffer:
        _, idx, weights = arguments(fake)
        scales = np.ones((10, 2), np.float32)
        step = buffer.prepare_low_latency(Array(fake, "uint8", 10, 256), idx, weights, x_scales=scales, use_fp8=False)
        for _ in range(2):
            fake.copies.clear()
            step.dispatch()
            (launch,) = fake.pop_launches()
            assert (launch.x_scales, scales.ctypes.data, scales.nbytes) in fake.copies


def test_after_a_timeout_and_after_destroy(calls: Calls) -> None:
    """A silent peer is reported before a preparation."""
    step, buffer = calls.prepare(y=calls.y()), calls.buffer
    page = buffer._backend.runtime.page
    page.report["peer"], page.report["phase"], page.timed_out.value = 2, 3, 1
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        calls.prepare()
    buffer.destroy()
    for call in (step.dispatch, step.combine):
        with pytest.raises(EPDestroyedError):
            call()


def test_another_thread_is_refused_during_a_call(fake: FakeGpu, calls: Calls) -> None:
    refused = []

    def elsewhere(call: Any) -> None:
        def run() -> None:
            with pytest.raises(EPInputError, match="another thread"):
                step.combine()
            refused.append(call)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    step = calls.prepare(y=calls.y())
    fake.on_launch = elsewhere
    step.dispatch()
    assert len(refused) == 1


def test_streams(fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the caller's current stream, after calls on other streams, prepared or not."""
    step = calls.prepare(y=calls.y())
    step.dispatch()
    assert fake.waits == [(CALLERS_STREAM, 5)], "the first call waits for what the Buffer has queued before"
    fake.waits.clear()
    step.combine()
    assert fake.waits == []
    calls.dispatch(stream=12)
    fake.waits.clear()
    first = step.dispatch()
    assert fake.waits == [(CALLERS_STREAM, 5)]
    monkeypatch.setattr(_Library, "current_stream", lambda library, device: 13)
    fake.waits.clear()
    second = step.dispatch()
    assert (fake.pop_launches()[-1].stream, fake.waits) == (13, [(13, 5)])
    assert first.recv_x.dependency.stream == CALLERS_STREAM
    assert second.recv_x.dependency.stream == 13, "consumers wait for the stream of the last call"
    fake.waits.clear()
    step.combine()
    assert (fake.pop_launches()[-1].stream, fake.waits) == (13, [])


def test_memory_waits_for_every_stream_of_the_calls(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the object is gone, the next user of its memory waits for the streams that have used it."""
    with make(low_latency=True, num_slots=1) as buffer, busy_gpu(monkeypatch) as busy:
        calls = LowLatencyCalls(fake, buffer)
        step, chosen = calls.prepare(), calls.prepare(stream=77)
        for stream in (21, 22):
            busy.setattr(_Library, "current_stream", lambda library, device, stream=stream: stream)
            step.dispatch()
        chosen.dispatch()
        first, _, second = fake.pop_launches()
        fake.has_memory = False
        busy.setattr(_Library, "current_stream", lambda library, device: 23)
        del step
        for place, streams in ((first.recv_x, {21, 22}), (second.recv_x, {22, 77})):
            fake.waits.clear()
            sent = calls.dispatch()
            assert sent.recv_x.ptr == place
            assert {(23, ("work of", stream)) for stream in streams} <= set(fake.waits)
            chosen = None


@each_kind
def test_later_calls_wait_for_the_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Readers on another stream may still use the memory when a call is prepared."""
    with make(**kind.sizes, num_slots=1) as buffer, busy_gpu(monkeypatch):
        calls = kind(fake, buffer, num_rows=256)  # as many as fit
        place = calls.dispatch(stream=31).recv_x.ptr  # the caller's stream reads it
        if kind is LowLatencyCalls:
            buffer._backend.low_latency.kernels.sums.acquire(31)
            fake.has_memory = False
        fake.waits.clear()
        step = calls.prepare(stream=32)
        assert (31, ("work of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        assert step.dispatch().recv_x.ptr == place
        assert fake.waits == [(32, ("work of", 31))], "after the wait that was queued on the stream of the last call"


@pytest.mark.parametrize("has_calls", [False, True])
def test_later_calls_wait_for_the_waits_of_the_preparation(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, has_calls: bool
) -> None:
    """The event of the last call covers the waits for the memory, which were queued after that call; also if all calls were captured."""
    with make(low_latency=True, num_slots=1) as buffer, busy_gpu(monkeypatch) as busy:
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", (stream, len(fake.waits))))
        calls = LowLatencyCalls(fake, buffer)
        if has_calls:
            for stream in (31, 32):
                calls.dispatch(stream=stream)
            buffer._backend.low_latency.kernels.sums.acquire(31)
        else:
            with busy.context() as capture:
                capture.setattr(driver, "capture_id", lambda stream: 7)
                calls.prepare().dispatch()
            fake.has_graphs = False
            buffer._backend.runtime.order.drop_ended_graphs()
        fake.has_memory = False
        fake.waits.clear()
        step = calls.prepare(stream=33)
        num_waits = len(fake.waits)
        assert num_waits
        step.dispatch()
        assert fake.waits[num_waits:] == [(33, (32 if has_calls else OWN_STREAM, num_waits))]


def test_per_thread_default_streams(fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle means another stream in each thread, so only one thread may make calls, and prepare them."""
    step = calls.prepare()
    thread = threading.Thread(target=step.dispatch)  # on an ordinary stream
    thread.start()
    thread.join()
    step.dispatch()
    monkeypatch.setattr(_Library, "current_stream", lambda library, device: 2)
    step.dispatch()
    refused = []

    def run() -> None:
        for call in (step.dispatch, calls.prepare):
            with pytest.raises(EPInputError, match="per-thread default stream"):
                call()
            refused.append(call)
            monkeypatch.setattr(_Library, "current_stream", lambda library, device: 12)  # of this thread

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(refused) == 2


WITH_HOOKS = pytest.mark.parametrize(
    ("kind", "hooks"), [(ThroughputCalls, {}), (LowLatencyCalls, {}), (LowLatencyCalls, {"return_recv_hook": True})]
)


@WITH_HOOKS
def test_async_finish(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind, hooks: dict[str, Any]) -> None:
    """The call waits for the caller's stream, and the event is recorded at its end."""
    with make(**kind.sizes) as buffer:
        calls = kind(fake, buffer)
        step = calls.prepare(y=calls.y(), async_finish=True, **hooks)
        for call in (step.dispatch, step.combine) * 2:
            fake.waits.clear()
            recorded: list[Any] = []
            with monkeypatch.context() as records:
                records.setattr(driver.CudaEvent, "record", lambda event, stream, to=recorded: to.append((event, stream)))
                result = call()
                if hooks:
                    recorded.clear()
                    result.hook()
            assert fake.waits[0] == (OWN_STREAM, ("all of", CALLERS_STREAM))
            assert recorded[-1] == (result.event._event, OWN_STREAM)
            assert {launch.stream for launch in fake.pop_launches()} == {OWN_STREAM}


@each_kind
@pytest.mark.parametrize("how", [{"async_finish": True}, {"stream": 77}], ids=str)
def test_arguments_live_until_calls_have_run(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, no_collection: None, kind: Kind, how: dict[str, Any]
) -> None:
    """On another stream than the caller's, their allocator could reuse them before."""
    with make(**kind.sizes) as buffer, busy_gpu(monkeypatch) as busy:
        calls, later = kind(fake, buffer), kind(fake, buffer)
        y, other = calls.y(), calls.y()
        held = [weakref.ref(array) for array in (*calls.given(), y, other)]
        step = calls.prepare(**how)
        step.dispatch(), step.combine(y)
        del calls, y
        step.combine(other)
        del other
        assert all(one() is not None for one in held), "the first combine may not have read y yet"
        del step
        assert all(one() is not None for one in held)
        busy.setattr(driver.CudaEvent, "done", lambda event: True)
        later.dispatch()
        assert all(one() is None for one in held)


def test_arrays_of_another_library_live_until_calls_have_run(
    fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    """Its allocator does not know the stream of the call."""
    with busy_gpu(monkeypatch) as busy:
        step = calls.prepare(y=calls.y())
        step.dispatch(), step.combine()
        owner = calls.y()
        step.combine(View(owner.ptr, owner.shape, owner.dtype, 0, owner, ViewFramework()))
        held = weakref.ref(owner)
        del owner, step
        assert held() is not None
        busy.setattr(driver.CudaEvent, "done", lambda event: True)
        calls.dispatch()
        assert held() is None


@each_kind
def test_a_destroyed_buffer_holds_no_arguments(fake: FakeGpu, make: Any, no_collection: None, kind: Kind) -> None:
    buffer = make(**kind.sizes)
    calls = kind(fake, buffer)
    held = weakref.ref(calls.x)
    step = calls.prepare(stream=77)
    step.dispatch()
    buffer.destroy()
    del step, calls
    assert held() is None


def test_arguments_do_not_pile_up(fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host runs ahead, repeated calls hold their arguments once."""
    with busy_gpu(monkeypatch):
        step = calls.prepare(y=calls.y(), async_finish=True)
        for _ in range(5):
            step.dispatch(), step.combine()
        assert not calls.buffer._backend.runtime.order._arguments


def test_captures(fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture orders calls among themselves, and holds arguments that their allocator could reuse. A call is prepared before it."""
    with monkeypatch.context() as capturing:
        step, order = calls.prepare(y=calls.y()), calls.buffer._backend.runtime.order
        step.dispatch(), step.combine()
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        with pytest.raises(EPInputError, match="Prepare the call before the capture"):
            calls.prepare()
        fake.waits.clear()
        step.dispatch()
        assert fake.waits == [], "a capture does not wait for work before it"
        capturing.setattr(_Library, "current_stream", lambda library, device: 14)
        fake.requests.clear()
        step.combine(calls.y())
        assert "allocate_async" not in fake.requests, "new rows take no memory"
        assert fake.waits == [(14, 5)], "another stream of the capture waits for the call before"
        assert order._capture.arguments == []
        assert order._last_call.stream == CALLERS_STREAM, "no call outside of the capture waits for captured work"
        with capturing.context() as ended:
            ended.setattr(driver, "is_capturing", lambda stream: False)
            other = calls.prepare(y=calls.y(), stream=78)
        fake.requests.clear()
        other.dispatch()
        assert len(order._capture.arguments) == 1
        assert fake.requests.count("record") == 1, "the event that holds arguments is not part of a capture"


@WITH_HOOKS
def test_the_relay_is_woken(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind, hooks: dict[str, Any]) -> None:
    """Every launch over nodes puts something."""
    with make(**kind.sizes, ranks_per_node=2) as buffer:
        calls = kind(fake, buffer)
        step, woken = calls.prepare(y=calls.y(), **hooks), []
        monkeypatch.setattr(buffer._backend.runtime.network, "wake", lambda: woken.append(len(fake.launched)))
        received(step.dispatch()), received(step.combine())
        assert woken == [*range(4 if hooks else 2)]


@each_kind
def test_host_arrays_take_ordinary_calls(fake: FakeGpu, make: Any, kind: Kind) -> None:
    """Each call copies them, so it sees values that the program has written."""
    import ml_dtypes
    import numpy as np

    def host(array: Array) -> Any:
        return np.zeros(array.shape, {"bfloat16": ml_dtypes.bfloat16}.get(array.dtype, array.dtype))

    form, prefix = ({"use_fp8": False}, "ll_") if kind is LowLatencyCalls else ({}, "")
    with make(**kind.sizes, hidden=512) as buffer:
        calls = kind(fake, buffer)
        calls.x, calls.idx, calls.weights, y = host(calls.x), host(calls.idx), host(calls.weights), host(calls.y())
        step = calls.prepare(**form, compress="log10")
        if kind is LowLatencyCalls:
            refuses(step, y, "expected its dispatch before")
        for _ in range(2):
            fake.copies.clear()
            sent = step.dispatch()
            step.combine(y)
            assert calls.x.ctypes.data in [source for _, source, _ in fake.copies]
        assert sent.recv_x.shape == y.shape
        assert [launch.kernel for launch in fake.pop_launches()] == [f"{prefix}dispatch", f"{prefix}combine_log10"] * 2


@pytest.mark.parametrize(
    ("kind", "dispatch", "combine"),
    [
        (
            ThroughputCalls,
            "dispatch: 10 tokens of 512 bytes, known routing, layout token, prepared",
            "combine: 24 rows for 10 tokens, reduce rank, prepared",
        ),
        (
            LowLatencyCalls,
            "low_latency_dispatch: 10 tokens of 512 bytes, FP8, prepared",
            "low_latency_combine: 10 tokens of 512 bytes, prepared",
        ),
    ],
)
def test_each_call_is_a_range_of_a_profiler(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: Kind, dispatch: str, combine: str
) -> None:
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
    with make(**kind.sizes) as buffer:
        calls = kind(fake, buffer)
        step = calls.prepare(y=calls.y())
        seen.clear()
        assert step.dispatch() is step.dispatch()
        step.combine()
    assert seen == [dispatch, "end", dispatch, "end", combine, "end"]


def test_it_belongs_to_its_process(fake: FakeGpu, calls: Calls) -> None:
    step = calls.prepare()
    assert copy.deepcopy(step) is step
    with pytest.raises(TypeError, match=f"a {calls.name} cannot be pickled"):
        pickle.dumps(step)
