"""Prepared low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import CALLERS_STREAM, OWN_STREAM, Array, FakeGpu, _Library, arguments, fake, make
from prepared_on_fake_gpu import collected, no_collection, without

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError, EPUnavailableError
from deepep_rt.arrays.frameworks import ViewFramework
from deepep_rt.arrays.view import View
from deepep_rt.cuda import driver

__all__ = ["collected", "fake", "make", "no_collection"]

pytestmark = pytest.mark.usefixtures("collected")

ADDRESSES = {"handle", "recv_x", "recv_scales", "out"}
OPTIONS = [
    {},
    {"use_fp8": False},
    {"round_scale": True},
    {"use_ue8m0": True},
    {"allow_multiple_reduction": False},
    {"reduce": "topk"},
    {"compress": "log10", "hidden": 512},
    {"return_recv_hook": True},
    {"async_finish": True},
    {"stream": 77},
]
DISPATCH_OPTIONS = {"use_fp8", "round_scale", "use_ue8m0"}
COMBINE_OPTIONS = {"allow_multiple_reduction", "reduce", "compress"}


def rows(fake: FakeGpu, hidden: int = 256) -> Array:
    return Array(fake, "bfloat16", 8, 256, hidden)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_launches_are_those_of_ordinary_calls(fake: FakeGpu, make: Any, options: dict[str, Any], on_timeout: str) -> None:
    """All parameters are the same, but for the memory of results."""
    options = dict(options)
    hidden = options.pop("hidden", 256)
    if on_timeout == "mask" and (options.get("reduce") == "topk" or options.get("allow_multiple_reduction") is False):
        with make(low_latency=True, on_timeout="mask") as buffer, pytest.raises(EPInputError, match="on_timeout='mask'"):
            buffer.prepare_low_latency(*arguments(fake), **options)
        return
    with make(low_latency=True, hidden=hidden, on_timeout=on_timeout) as buffer:
        x, idx, weights = arguments(fake, hidden=hidden)
        y = rows(fake, hidden)
        stats = Array(fake, "int32", 8)
        for_dispatch = {name: value for name, value in options.items() if name not in COMBINE_OPTIONS}
        for_combine = {name: value for name, value in options.items() if name not in DISPATCH_OPTIONS}
        for_dispatch["cumulative_local_expert_recv_stats"] = stats
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **for_dispatch)
        if sent.hook:
            sent.hook()
        back = buffer.low_latency_combine(y, idx, weights, sent.handle, **for_combine)
        if back.hook:
            back.hook()
        ordinary = fake.pop_launches()
        step = buffer.prepare_low_latency(x, idx, weights, **options, cumulative_local_expert_recv_stats=stats)
        assert fake.pop_launches() == []
        for _ in range(3):
            new = step.dispatch()
            assert (new.hook is None) == (sent.hook is None)
            if new.hook:
                new.hook()
            summed = step.combine(y)
            if summed.hook:
                summed.hook()
            prepared = fake.pop_launches()
            assert [without(one, *ADDRESSES) for one in prepared] == [without(one, *ADDRESSES) for one in ordinary]
            for mine, theirs in ((new, sent), (summed, back)):
                assert type(mine) is type(theirs)
                for name, view in theirs.views.items():
                    assert (mine.views[name].dtype, mine.views[name].shape) == (view.dtype, view.shape)
            assert new.recv_x.ptr == prepared[0].recv_x
            assert summed.x.ptr == prepared[-1].out
            assert new.handle.num_tokens == 10
            assert {launch.handle for launch in prepared} == {prepared[0].handle}


def test_a_call_asks_the_driver_for_three_things(fake: FakeGpu, make: Any) -> None:
    """Each request takes the host a microsecond."""
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake))
        y = rows(fake)
        for call in (step.dispatch, lambda: step.combine(y)):
            call()
            fake.requests.clear()
            result = call()
            assert fake.requests == ["context", "capture_id", "launch"]
            assert call() is result, "the arrays that the caller has read need not be made again"


def test_results_stay_in_their_memory(fake: FakeGpu, make: Any) -> None:
    """Ordinary calls get other memory, also while the caller holds no result."""
    with make(low_latency=True, num_slots=1) as buffer:
        x, idx, weights = arguments(fake)
        step = buffer.prepare_low_latency(x, idx, weights, y=rows(fake))
        places = set()
        for _ in range(3):
            step.dispatch(), step.combine()
            prepared = fake.pop_launches()
            places.add((prepared[0].recv_x, prepared[0].handle, prepared[1].out))
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
            buffer.low_latency_combine(rows(fake), idx, weights, sent.handle)
            ordinary = fake.pop_launches()
            assert not {ordinary[0].recv_x, ordinary[0].handle, ordinary[1].out} & {*next(iter(places))}
        assert len(places) == 1


def test_memory_is_free_after_the_last_reference(fake: FakeGpu, make: Any, no_collection: None) -> None:
    """The results keep their memory, the object keeps all of it, and nothing else does."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        held = [weakref.ref(array) for array in (x, idx, weights)]
        step = buffer.prepare_low_latency(x, idx, weights)
        del x, idx, weights
        assert all(one() is not None for one in held)
        received = step.dispatch().recv_x
        step.combine(rows(fake))
        first, last = fake.pop_launches()
        del step
        assert all(one() is None for one in held)
        x, idx, weights = arguments(fake)
        assert buffer.low_latency_dispatch(x, idx).recv_x.ptr != first.recv_x, "the caller still holds these rows"
        del received
        sent = [buffer.low_latency_dispatch(x, idx) for _ in range(2)]
        back = buffer.low_latency_combine(rows(fake), idx, weights, sent[0].handle)
        assert first.recv_x in [result.recv_x.ptr for result in sent]
        assert back.x.ptr == last.out


def test_a_handle_works_in_an_ordinary_combine(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        step = buffer.prepare_low_latency(x, idx, weights)
        sent = step.dispatch()
        y = buffer.get_low_latency_combine_buffer(sent.handle)
        buffer.low_latency_combine(y, idx, weights, sent.handle, zero_copy=True)
        dispatch, combine = fake.pop_launches()
        assert (combine.handle, combine.has_weights) == (dispatch.handle, 1)


def test_rows_of_the_experts(fake: FakeGpu, make: Any) -> None:
    """A new array is checked, and read from then on. The same array is not looked at again."""
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), out=Array(fake, "bfloat16", 10, 256))
        with pytest.raises(EPInputError, match=r"expected its dispatch before"):
            step.combine(rows(fake))
        step = buffer.prepare_low_latency(*arguments(fake), out=(out := Array(fake, "bfloat16", 10, 256)))
        step.dispatch()
        with pytest.raises(EPInputError, match="y=None"):
            step.combine()
        first, second = rows(fake), rows(fake)
        for y in (first, first, second, None, first):
            fake.pop_launches()
            assert step.combine(y).x.ptr == out.ptr
            (launch,) = fake.pop_launches()
            assert (launch.y, launch.out) == ((y or second).ptr, out.ptr)
        overlapping = Array(fake, "bfloat16", 8, 256, 256)
        overlapping.ptr = out.ptr - 16
        on_host = SimpleNamespace(view=_Library().view(rows(fake), "y", None)).view
        on_host.device = -1
        for wrong, words in (
            (Array(fake, "bfloat16", 8, 255, 256), r"y.shape=\[8, 255, 256\]"),
            (Array(fake, "float16", 8, 256, 256), "y.dtype=float16"),
            (Array(fake, "bfloat16", 8, 256, 256, offset=8), "multiple of 16 bytes"),
            (overlapping, "out overlaps y"),
            (on_host, "y is in host memory"),
        ):
            with pytest.raises(EPInputError, match=words):
                step.combine(wrong)
        step.combine()
        assert fake.pop_launches()[0].y == first.ptr, "a refused array changes nothing"
        first.shape = (1,)
        step.combine(first)


def test_wrong_arguments(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        wrong = Array(fake, "bfloat16", 9, 256)
        for given, options, words in (
            ((x, idx, None), {}, "topk_weights=None"),
            ((x, Array(fake, "int64", 9, 4), weights), {}, "topk_idx.shape"),
            ((x, idx, weights), {"out": wrong}, r"out.shape=\[9, 256\]"),
            ((x, idx, weights), {"y": wrong}, "y.shape"),
            ((x, idx, weights), {"y": rows(fake), "zero_copy": True}, "zero_copy=True"),
            ((x, idx, weights), {"compress": "fp8"}, "hidden=256"),
            ((x, idx, weights), {"reduce": "all"}, "reduce"),
            ((x, idx, weights), {"use_fp8": False, "use_ue8m0": True}, "use_ue8m0=True"),
            ((x, idx, weights), {"stream": "fast"}, "stream"),
            ((x, idx, weights), {"return_recv_hook": 3}, "return_recv_hook"),
        ):
            with pytest.raises(EPInputError, match=words):
                buffer.prepare_low_latency(*given, **options)
        with monkeypatch.context() as other:
            other.setattr(_Library, "name", "jax")
            with pytest.raises(EPInputError, match="x is a JAX array"):
                buffer.prepare_low_latency(x, idx, weights)
        with monkeypatch.context() as other:
            other.setattr(_Library, "current_stream", lambda library, device: None)
            with pytest.raises(EPInputError, match="Pass stream="):
                buffer.prepare_low_latency(x, idx, weights)
            buffer.prepare_low_latency(x, idx, weights, stream=5).dispatch()
        assert [launch.stream for launch in fake.pop_launches()] == [5]
    with make() as buffer, pytest.raises(EPInputError, match="low_latency=True"):
        buffer.prepare_low_latency(x, idx, weights)


def test_gpus_without_fp8(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True, hidden=512) as buffer:
        buffer._backend.low_latency.kernels.archs_without_fp8 = {2: "sm_80"}
        x, idx, weights = arguments(fake, hidden=512)
        sent = buffer.prepare_low_latency(x, idx, weights).dispatch()
        assert (sent.recv_x.dtype, sent.recv_x_scales, fake.pop_launches()[0].use_fp8) == ("bfloat16", None, 0)
        with pytest.raises(EPUnavailableError, match="rank 2 has sm_80"):
            buffer.prepare_low_latency(x, idx, weights, compress="fp8")


def test_hooks(fake: FakeGpu, make: Any) -> None:
    """One call of each kind may be open. Another prepared call has its own memory, and its own hooks."""
    with make(low_latency=True) as buffer:
        y = rows(fake)
        step, other = (buffer.prepare_low_latency(*arguments(fake), y=y, return_recv_hook=True) for _ in range(2))
        sent = step.dispatch()
        with pytest.raises(EPInputError, match=r"last low_latency_dispatch is open.*prepare another call"):
            step.dispatch()
        with pytest.raises(EPInputError, match="was not called yet"):
            step.combine()
        second = other.dispatch()
        with pytest.raises(EPInputError, match="in the order of their calls"):
            second.hook()
        with pytest.raises(EPInputError, match="2 open hooks"):
            buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
        sent.hook(), second.hook()
        back = step.combine()
        for rows_again in (None, rows(fake)):
            with pytest.raises(EPInputError, match="last low_latency_combine is open"):
                step.combine(rows_again)
        with pytest.raises(EPInputError, match="last low_latency_combine is open"):
            step.dispatch()
        back.hook()
        with pytest.raises(EPInputError, match="called already"):
            back.hook()
        launches = fake.pop_launches()
        assert [(call.kernel, call.phases) for call in launches] == [
            *[("ll_dispatch", phases) for phases in (1, 1, 2, 2)],
            *[("ll_combine", phases) for phases in (1, 2)],
        ]
        assert launches[-1].y == launches[-2].y == y.ptr
        assert step.dispatch().recv_x is sent.recv_x, "all results share the arrays"
        assert second.recv_x.ptr != sent.recv_x.ptr


def test_hooks_of_other_calls(fake: FakeGpu, make: Any) -> None:
    """A call without a hook waits for open hooks. An ordinary combine knows whether the hook of a prepared dispatch was called."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        y = rows(fake)
        step = buffer.prepare_low_latency(x, idx, weights, y=y)
        handle = step.dispatch().handle
        sent = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
        with pytest.raises(EPInputError, match="hooks are open"):
            step.dispatch()
        sent.hook()
        back = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
        with pytest.raises(EPInputError, match="hooks are open"):
            step.combine()
        back.hook()
        sent = buffer.prepare_low_latency(x, idx, weights, return_recv_hook=True).dispatch()
        with pytest.raises(EPInputError, match="was not called yet"):
            buffer.low_latency_combine(y, idx, weights, sent.handle)
        buffer._backend.runtime.page.bad_input.value = 1
        with pytest.raises(EPInputError, match="It was skipped"):
            sent.hook()
        buffer.low_latency_combine(y, idx, weights, sent.handle)


def test_a_hook_waits_for_calls_in_between(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.prepare_low_latency(x, idx, weights, return_recv_hook=True, stream=77).dispatch()
        buffer.dispatch(x, idx, weights, num_worst_tokens=40, stream=78)
        fake.waits.clear()
        sent.hook()
        assert fake.waits == [(77, 5)]


def test_lost_hooks(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call runs a hook that the caller dropped. A hook lost in another capture does not run, and refuses nothing."""
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), return_recv_hook=True)
        step.dispatch()
        step.dispatch().hook()
        step.combine()
        step.dispatch().hook()
        step.combine()
        step.combine().hook()
        phases = [(call.kernel[3], call.phases) for call in fake.pop_launches()]
        assert phases == [*zip("ddddccddcccc", (1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2), strict=True)]
        with monkeypatch.context() as capture:
            capture.setattr(driver, "capture_id", lambda stream: 7)
            step.dispatch()
        step.dispatch().hook()
        assert [call.phases for call in fake.pop_launches()] == [1, 1, 2]


def test_an_interrupted_half_breaks_the_buffer(fake: FakeGpu, make: Any) -> None:
    def interrupt(call: Any) -> None:
        raise KeyboardInterrupt

    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), return_recv_hook=True)
        fake.on_launch = interrupt
        with pytest.raises(KeyboardInterrupt):
            step.dispatch()
        fake.on_launch = lambda call: None
        with pytest.raises(EPTimeoutError, match="interrupted between its halves"):
            step.dispatch()


def test_reports_of_kernels(fake: FakeGpu, make: Any) -> None:
    """They raise as in ordinary calls: wrong input after the launch, a silent peer before it."""
    buffer = make(low_latency=True)
    step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake))
    page = buffer._backend.runtime.page
    page.bad_input.value = 1
    with pytest.raises(EPInputError, match="It was skipped") as caught:
        step.dispatch()
    assert caught.value.call_made
    step.combine()
    assert len(fake.pop_launches()) == 2
    page.report["peer"], page.report["phase"], page.timed_out.value = 2, 3, 1
    for call in (step.dispatch, step.combine, lambda: buffer.prepare_low_latency(*arguments(fake))):
        with pytest.raises(EPTimeoutError, match="for rank 2"):
            call()
    assert fake.pop_launches() == []
    buffer.destroy()
    for call in (step.dispatch, step.combine):
        with pytest.raises(EPDestroyedError):
            call()


def test_masked_ranks(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with make(low_latency=True, on_timeout="mask") as buffer:
        step = buffer.prepare_low_latency(*arguments(fake))
        buffer._backend.runtime.page.masked[3] = 1
        step.dispatch()
        assert "rank 3 is masked" in caplog.text
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), reduce="topk")
        step.dispatch(), step.combine()
        buffer.mask_rank(2)
        with pytest.raises(EPInputError, match="masked ranks"):
            step.combine()


def test_another_thread_is_refused_during_a_call(fake: FakeGpu, make: Any) -> None:
    refused = []

    def elsewhere(call: Any) -> None:
        def run() -> None:
            with pytest.raises(EPInputError, match="another thread"):
                step.combine()
            refused.append(call)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake))
        fake.on_launch = elsewhere
        step.dispatch()
    assert len(refused) == 1


def test_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the caller's current stream, after calls on other streams, prepared or not."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        step = buffer.prepare_low_latency(x, idx, weights, y=rows(fake))
        step.dispatch()
        assert fake.waits == [(CALLERS_STREAM, 5)], "the first call waits for what the Buffer has queued before"
        fake.waits.clear()
        step.combine()
        assert fake.waits == []
        buffer.low_latency_dispatch(x, idx, stream=12)
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
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        x, idx, weights = arguments(fake)
        step = buffer.prepare_low_latency(x, idx, weights)
        chosen = buffer.prepare_low_latency(x, idx, weights, stream=77)
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
            sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
            assert sent.recv_x.ptr == place
            assert {(23, ("work of", stream)) for stream in streams} <= set(fake.waits)
            chosen = None


def test_later_calls_wait_for_the_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers on another stream may still use the memory when a call is prepared."""
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        x, idx, weights = arguments(fake)
        place = buffer.low_latency_dispatch(x, idx, stream=31).recv_x.ptr  # the caller's stream reads it
        fake.pop_launches()
        buffer._backend.low_latency.kernels.sums.acquire(31)
        fake.has_memory = False
        fake.waits.clear()
        step = buffer.prepare_low_latency(x, idx, weights, stream=32)
        assert (31, ("work of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        step.dispatch()
        assert fake.pop_launches()[0].recv_x == place
        assert fake.waits == [(32, ("work of", 31))], "after the wait that was queued on the stream of the last call"


@pytest.mark.parametrize("has_calls", [False, True])
def test_later_calls_wait_for_the_waits_of_the_preparation(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, has_calls: bool
) -> None:
    """The event of the last call covers the waits for the memory, which were queued after that call; also if all calls were captured."""
    with make(low_latency=True, num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", (stream, len(fake.waits))))
        x, idx, weights = arguments(fake)
        if has_calls:
            for stream in (31, 32):
                buffer.low_latency_dispatch(x, idx, stream=stream)
            buffer._backend.low_latency.kernels.sums.acquire(31)
        else:
            with busy.context() as capture:
                capture.setattr(driver, "capture_id", lambda stream: 7)
                buffer.prepare_low_latency(x, idx, weights).dispatch()
            fake.has_graphs = False
            buffer._backend.runtime.order.drop_ended_graphs()
        fake.has_memory = False
        fake.waits.clear()
        step = buffer.prepare_low_latency(x, idx, weights, stream=33)
        num_waits = len(fake.waits)
        assert num_waits
        step.dispatch()
        assert fake.waits[num_waits:] == [(33, (32 if has_calls else OWN_STREAM, num_waits))]


def test_per_thread_default_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle means another stream in each thread, so only one thread may make calls, and prepare them."""
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake))
        monkeypatch.setattr(_Library, "current_stream", lambda library, device: 2)
        step.dispatch()
        refused = []

        def run() -> None:
            for call in (step.dispatch, lambda: buffer.prepare_low_latency(*arguments(fake))):
                with pytest.raises(EPInputError, match="per-thread default stream"):
                    call()
                refused.append(call)
                monkeypatch.setattr(_Library, "current_stream", lambda library, device: 12)  # of this thread

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(refused) == 2


@pytest.mark.parametrize("hooks", [False, True])
def test_async_finish(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, hooks: bool) -> None:
    """The call waits for the caller's stream, and the event is recorded at its end."""
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), async_finish=True, return_recv_hook=hooks)
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


@pytest.mark.parametrize("how", [{"async_finish": True}, {"stream": 77}], ids=str)
def test_arguments_live_until_calls_have_run(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, no_collection: None, how: dict[str, Any]
) -> None:
    """On another stream than the caller's, their allocator could reuse them before."""
    with make(low_latency=True) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, idx, weights = arguments(fake)
        y = rows(fake)
        held = [weakref.ref(array) for array in (x, idx, weights, y)]
        step = buffer.prepare_low_latency(x, idx, weights, **how)
        step.dispatch(), step.combine(y)
        del x, idx, weights, y
        other = rows(fake)
        held.append(weakref.ref(other))
        step.combine(other)
        del other
        assert all(one() is not None for one in held), "the first combine may not have read y yet"
        del step
        assert all(one() is not None for one in held)
        busy.setattr(driver.CudaEvent, "done", lambda event: True)
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert all(one() is None for one in held)


def test_arrays_of_another_library_live_until_calls_have_run(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    """Its allocator does not know the stream of the call."""
    with make(low_latency=True) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake))
        step.dispatch(), step.combine()
        owner = rows(fake)
        step.combine(View(owner.ptr, owner.shape, owner.dtype, 0, owner, ViewFramework()))
        held = weakref.ref(owner)
        del owner, step
        assert held() is not None
        busy.setattr(driver.CudaEvent, "done", lambda event: True)
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert held() is None


def test_a_destroyed_buffer_holds_no_arguments(fake: FakeGpu, make: Any, no_collection: None) -> None:
    x, idx, weights = arguments(fake)
    held = weakref.ref(x)
    buffer = make(low_latency=True)
    step = buffer.prepare_low_latency(x, idx, weights, stream=77)
    step.dispatch()
    buffer.destroy()
    del step, x
    assert held() is None


def test_arguments_do_not_pile_up(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host runs ahead, repeated calls hold their arguments once."""
    with make(low_latency=True) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), async_finish=True)
        for _ in range(5):
            step.dispatch(), step.combine()
        assert not buffer._backend.runtime.order._arguments


def test_captures(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture orders calls among themselves, and holds arguments that their allocator could reuse. A call is prepared before it."""
    with make(low_latency=True) as buffer, monkeypatch.context() as capturing:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake))
        step.dispatch(), step.combine()
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        with pytest.raises(EPInputError, match="Prepare the call before the capture"):
            buffer.prepare_low_latency(*arguments(fake))
        fake.waits.clear()
        step.dispatch()
        assert fake.waits == [], "a capture does not wait for work before it"
        capturing.setattr(_Library, "current_stream", lambda library, device: 14)
        step.combine()
        assert fake.waits == [(14, 5)], "another stream of the capture waits for the call before"
        order = buffer._backend.runtime.order
        assert order._capture.arguments == []
        elsewhere = buffer._backend.runtime.order._last_call.stream
        assert elsewhere == CALLERS_STREAM, "no call outside of the capture waits for captured work"
        with capturing.context() as ended:
            ended.setattr(driver, "is_capturing", lambda stream: False)
            other = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), stream=78)
        fake.requests.clear()
        other.dispatch()
        assert len(order._capture.arguments) == 1
        assert fake.requests.count("record") == 1, "the event that holds arguments is not part of a capture"


def test_the_relay_is_woken(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch puts something."""
    with make(low_latency=True, ranks_per_node=2) as buffer:
        woken: list[int] = []
        monkeypatch.setattr(buffer._backend.runtime.network, "wake", lambda: woken.append(len(fake.launched)))
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake), return_recv_hook=True)
        step.dispatch().hook()
        step.combine().hook()
        assert woken == [0, 1, 2, 3]


def test_host_arrays_take_ordinary_calls(fake: FakeGpu, make: Any) -> None:
    """Each call copies them, so it sees values that the program has written."""
    import ml_dtypes
    import numpy as np

    with make(low_latency=True) as buffer:
        x, idx, weights = np.zeros((4, 256), ml_dtypes.bfloat16), np.zeros((4, 4), np.int64), np.ones((4, 4), np.float32)
        step = buffer.prepare_low_latency(x, idx, weights, use_fp8=False)
        for _ in range(2):
            fake.copies.clear()
            sent = step.dispatch()
            step.combine(np.zeros((8, 256, 256), ml_dtypes.bfloat16))
            assert x.ctypes.data in [source for _, source, _ in fake.copies]
        assert sent.recv_x.shape == (8, 256, 256)
        assert [launch.kernel for launch in fake.pop_launches()] == ["ll_dispatch", "ll_combine"] * 2


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
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake), y=rows(fake))
        assert step.dispatch() is step.dispatch()
        step.combine()
    dispatch = "low_latency_dispatch: 10 tokens of 512 bytes, FP8, prepared", "end"
    assert seen == [*dispatch, *dispatch, "low_latency_combine: 10 tokens of 512 bytes, prepared", "end"]


def test_it_belongs_to_its_process(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        step = buffer.prepare_low_latency(*arguments(fake))
        assert copy.deepcopy(step) is step
        with pytest.raises(TypeError, match="a PreparedLowLatency cannot be pickled"):
            pickle.dumps(step)
