"""Calls that repeat the form of an earlier one, on a fake GPU: they look at no array again, and differ in nothing else."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import KINDS, Calls, LowLatencyCalls, ThroughputCalls, calls, each_kind, quick, without
from fake_gpu import CALLERS_STREAM, Array, FakeGpu, fake, like, make

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.arrays import frameworks
from deepep_rt.arrays.view import View
from deepep_rt.backends import nvtx_ranges
from deepep_rt.backends.call_forms import MOST_FORMS
from deepep_rt.cuda import driver
from deepep_rt.results import generations

__all__ = ["calls", "fake", "make", "quick"]

ADDRESSES = (
    *(
        "x",
        "y",
        "topk_idx",
        "topk_weights",
        "scales",
        "bias_0",
        "handle",
        "out",
        "out_topk_weights",
        "num_recv",
        "num_recv_per_expert",
    ),
    *("recv_x", "recv_scales", *(f"recv_{name}_offset" for name in ("x", "scales", "topk_idx", "topk_weights", "src_idx"))),
)
RESULTS = (
    "recv_x",
    "recv_x_scales",
    "num_recv_tokens_per_expert",
    "num_recv_tokens",
    "recv_topk_idx",
    "recv_src_idx",
    "x",
    "topk_weights",
)


@pytest.fixture
def looks(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of arrays that calls have looked at, in order: none in a call that repeats a form."""
    looked: list[str] = []
    library = frameworks.FRAMEWORK_OF_CLASS[Array]
    view: Callable[..., View] = library.view

    def note(array: Any, name: str, stream: int | None) -> View:
        looked.append(name)
        return view(array, name, stream)

    monkeypatch.setattr(library, "view", note)
    return looked


def results(result: Any) -> dict[str, Any]:
    """Return the forms of the arrays of a result, and the numbers of its handle."""
    found = {name: like(array) for name in RESULTS if (array := getattr(result, name, None)) is not None}
    handle = getattr(result, "handle", None)
    numbers = ("num_tokens", "num_recv_rows", "buffer_serial", "has_weights", "capacity", "layout")
    return (
        found
        | {name: getattr(handle, name) for name in numbers if hasattr(handle, name)}
        | {"hook": getattr(result, "hook", None)}
    )


@each_kind
@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_a_call_that_repeats_a_form_looks_at_no_array(
    fake: FakeGpu, make: Any, looks: list[str], kind: type[Calls], name: str
) -> None:
    """Its launch and its result are those of the ordinary call, but for addresses. Those are of its own arrays and memory."""
    with make(**kind.sizes) as buffer:
        one = kind(fake, buffer)
        handle, y = one.dispatch().handle, one.y()
        fake.pop_launches()
        buffer._forms[name if kind is ThroughputCalls else f"low_latency_{name}"].forget()
        launches, made, held = [], [], []
        for _ in range(3):
            looks.clear()
            if name == "dispatch":
                one.x = Array(fake, "bfloat16", 10, 256)
                result, given = one.dispatch(), {"x": one.x.ptr}
            else:
                y = one.y()
                result, given = one.combine(handle, y=y), {"y": y.ptr}
            held.append(result)
            (launched,) = fake.pop_launches()
            assert {member: getattr(launched, member) for member in given} == given
            if name == "combine":
                assert launched.handle == handle.routing[0].ptr if kind is LowLatencyCalls else handle.routing.ptr
                assert result.x.ptr == launched.out
            elif kind is LowLatencyCalls:
                assert (result.recv_x.ptr, result.recv_x_scales.ptr) == (launched.recv_x, launched.recv_scales)
                assert result.handle.routing[0].ptr == launched.handle
            launches.append(without(launched, *ADDRESSES))
            made.append(results(result))
            assert not held[0].event.handle
            was_ordinary = bool(looks)
            assert was_ordinary == (len(launches) < 3), looks
        assert launches[0] == launches[1] == launches[2]
        assert made[0] == made[1] == made[2]
        del result, held, one.x


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dispatch", {"use_fp8": False}),
    ("dispatch", {"round_scale": True}),
    ("dispatch", {"use_ue8m0": True}),
    ("dispatch", {"async_finish": True}),
    ("dispatch", {"stream": 77}),
    ("dispatch", {"num_max_tokens": 63}),
    ("combine", {"reduce": "topk"}),
    ("combine", {"allow_multiple_reduction": False}),
    ("combine", {"async_finish": True}),
    ("combine", {"stream": 77}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_another_option_is_another_form(quick: LowLatencyCalls, looks: list[str], name: str, options: dict[str, Any]) -> None:
    handle, y = quick.dispatch().handle, quick.y()

    def call(**more: Any) -> Any:
        looks.clear()
        return quick.dispatch(**more) if name == "dispatch" else quick.combine(handle, y=y, **more)

    for _ in range(3):
        call()
    assert not looks
    call(**options)
    assert looks
    call()
    assert not looks, "the first form is still known"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dispatch", {"use_fp8": 1.0}, "use_fp8=1.0"),
        ("dispatch", {"use_fp8": "yes"}, "use_fp8='yes'"),
        ("dispatch", {"num_max_tokens": True}, "num_max_tokens=True"),
        ("dispatch", {"return_recv_hook": None}, "return_recv_hook=None"),
        ("dispatch", {"stream": 1.5}, "stream=1.5"),
        ("combine", {"allow_multiple_reduction": 1.0}, "allow_multiple_reduction=1.0"),
        ("combine", {"compress": "zip"}, "compress='zip'"),
        ("combine", {"zero_copy": True}, "zero_copy=True"),
    ],
)
def test_a_wrong_option_is_refused_after_calls_with_a_right_one(
    quick: LowLatencyCalls, name: str, options: dict[str, Any], message: str
) -> None:
    handle, y = quick.dispatch().handle, quick.y()
    for _ in range(3):
        quick.dispatch()
        quick.combine(handle, y=y)
    with pytest.raises(EPInputError, match=message):
        quick.dispatch(**options) if name == "dispatch" else quick.combine(handle, y=y, **options)


@pytest.mark.parametrize("attribute", ["x", "idx", "weights"])
@pytest.mark.parametrize("change", ["dtype", "shape", "address"])
def test_a_wrong_array_is_refused_after_calls_with_right_ones(
    fake: FakeGpu, quick: LowLatencyCalls, attribute: str, change: str
) -> None:
    for _ in range(3):
        quick.dispatch()
    array = getattr(quick, attribute)
    shape = (10, 8) if change == "shape" else array.shape
    wrong = Array(fake, "float64" if change == "dtype" else array.dtype, *shape, offset=2 if change == "address" else 0)
    setattr(quick, attribute, wrong)
    with pytest.raises(EPInputError, match=attribute if attribute == "x" else f"topk_{attribute}"):
        quick.dispatch()


def test_a_handle_is_checked_in_each_call(fake: FakeGpu, make: Any, calls: Calls) -> None:
    handle, y = calls.dispatch().handle, calls.y()
    for _ in range(3):
        calls.combine(handle, y=y)
    with make(**calls.sizes) as other:
        foreign = type(calls)(fake, other).dispatch().handle
        with pytest.raises(EPInputError, match="another Buffer"):
            calls.combine(foreign, y=y)
        del foreign
    with pytest.raises(EPInputError, match="handle"):
        calls.combine(None, y=y)
    handle.num_tokens = 9  # of a dispatch of fewer tokens
    if isinstance(calls, LowLatencyCalls):
        with pytest.raises(EPInputError, match="shape"):
            calls.combine(handle, y=y)
    else:
        calls.combine(handle, y=y)
        assert fake.pop_launches()[-1].num_tokens == 9


@pytest.fixture
def new_generation() -> Iterator[Callable[[Any], None]]:
    """Return a function that begins a generation of a Buffer, as a change of the members does."""
    before = generations[0]

    def begin(buffer: Any) -> None:
        generations[0] += 1
        buffer._info.since = generations[0]

    yield begin
    generations[0] = before


def test_a_form_ends_with_its_generation(calls: Calls, looks: list[str], new_generation: Callable[[Any], None]) -> None:
    handle, y = calls.dispatch().handle, calls.y()
    for _ in range(3):
        calls.combine(handle, y=y)
        calls.dispatch()
    looks.clear()
    new_generation(calls.buffer)
    with pytest.raises(EPInputError, match="older generation"):
        calls.combine(handle, y=y)
    if isinstance(calls, LowLatencyCalls):
        calls.dispatch()
        assert looks[-3:] == ["x", "topk_idx", "topk_weights"]


def test_a_hook_or_a_report_stops_a_call_with_a_known_form(fake: FakeGpu, quick: LowLatencyCalls, looks: list[str]) -> None:
    for _ in range(3):
        quick.dispatch()
    looks.clear()
    sent = quick.dispatch(return_recv_hook=True)
    assert looks
    looks.clear()
    with pytest.raises(EPInputError, match="hooks are open"):
        quick.dispatch()
    assert not looks
    sent.hook()
    page = quick.buffer._backend.runtime.page
    page.report["bad_token"], page.report["bad_expert"], page.bad_input.value = 3, 99, 1
    with pytest.raises(EPInputError, match="holds expert 99"):
        quick.dispatch()
    page.timed_out.value = 1
    fake.pop_launches()
    with pytest.raises(EPTimeoutError):
        quick.dispatch()
    assert not looks
    assert not fake.pop_launches(), "a call after a time-out launches nothing"
    page.timed_out.value = 0
    quick.buffer._backend.runtime.monitor._error = None


def test_the_hook_of_a_dispatch_is_asked_for_in_a_combine_with_a_known_form(quick: LowLatencyCalls) -> None:
    handle, y = quick.dispatch().handle, quick.y()
    for _ in range(3):
        quick.combine(handle, y=y)
    sent = quick.dispatch(return_recv_hook=True)
    with pytest.raises(EPInputError, match="was not called yet"):
        quick.combine(sent.handle, y=y)
    sent.hook()


def test_a_call_with_a_known_form_follows_the_callers_stream(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, calls: Calls, looks: list[str]
) -> None:
    for _ in range(3):
        calls.dispatch()
    looks.clear()
    monkeypatch.setattr(frameworks.FRAMEWORK_OF_CLASS[Array], "current_stream", lambda device: 12)
    fake.waits.clear()
    fake.pop_launches()
    calls.dispatch()
    assert not looks
    assert fake.pop_launches()[0].stream == 12
    assert fake.waits, "it waits for the calls on the other stream"


def test_a_captured_call_with_a_known_form_takes_memory_of_captures(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, calls: Calls, looks: list[str]
) -> None:
    for _ in range(3):
        calls.dispatch()
    looks.clear()
    with monkeypatch.context() as capturing:
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        capturing.setattr(driver, "capture_id", lambda stream: 5)
        sent = calls.dispatch()
    assert not looks
    assert sent.views["x"].owner.graph is calls.buffer._backend.runtime.order._capture is not None


def test_forms_keep_no_array_and_are_few(fake: FakeGpu, calls: Calls) -> None:
    handle = calls.dispatch().handle
    for _ in range(3):
        calls.dispatch()
        calls.combine(handle, y=(y := calls.y()))
    kept = [weakref.ref(array) for array in (calls.x, y)]
    calls.x = y = None  # type: ignore[assignment]
    gc.collect()
    assert [array() for array in kept] == [None, None]
    for tokens in range(1, 2 * MOST_FORMS):
        if isinstance(calls, LowLatencyCalls):
            calls.idx, calls.weights = Array(fake, "int64", tokens, 4), Array(fake, "float32", tokens, 4)
        else:
            handle.num_tokens = tokens
        calls.x = Array(fake, "bfloat16", tokens, 256)
        for _ in range(3):
            calls.dispatch() if isinstance(calls, LowLatencyCalls) else calls.buffer.dispatch(calls.x, handle=handle)
    counts = [len(forms._known) for forms in calls.buffer._forms.values()]
    assert max(counts) == MOST_FORMS


def test_calls_that_all_differ_make_no_form(fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = calls.buffer._forms["dispatch" if isinstance(calls, ThroughputCalls) else "low_latency_dispatch"]
    made: list[Any] = []
    monkeypatch.setattr(forms, "_form_of", lambda inputs, call: made.append(inputs))
    for tokens in range(1, 20):
        if isinstance(calls, LowLatencyCalls):
            calls.idx, calls.weights = Array(fake, "int64", tokens, 4), Array(fake, "float32", tokens, 4)
        else:
            calls.handle.num_tokens = tokens
        calls.x = Array(fake, "bfloat16", tokens, 256)
        calls.dispatch()
    assert not made


def test_num_sms_counts_in_calls_with_a_known_form(fake: FakeGpu, make: Any, looks: list[str]) -> None:
    with make() as buffer:
        calls = ThroughputCalls(fake, buffer)
        y = calls.y()
        for _ in range(3):
            calls.dispatch()
            calls.combine(calls.handle, y=y)
        buffer.num_sms = 7
        looks.clear()
        fake.pop_launches()
        calls.dispatch()
        calls.combine(calls.handle, y=y)
        assert not looks
        assert [one.blocks for one in fake.pop_launches()] == [7, 7]
        vars(calls).clear()


def test_an_interrupted_call_with_a_known_form_breaks_the_buffer(
    fake: FakeGpu, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        calls.dispatch()

    def interrupt(launched: Any) -> None:
        raise KeyboardInterrupt

    fake.on_launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        calls.dispatch()
    fake.on_launch = lambda launched: None
    with pytest.raises(EPTimeoutError, match="interrupted"):
        calls.dispatch()
    calls.buffer._backend.runtime.monitor._error = None
    gc.collect()


def test_ranges_have_the_same_text(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, looks: list[str]) -> None:
    texts: list[str] = []

    def annotate(text: str) -> contextlib.AbstractContextManager[None]:
        texts.append(text)
        return contextlib.nullcontext()

    monkeypatch.setattr(nvtx_ranges, "annotator", lambda: annotate)
    with make(low_latency=True) as buffer:
        for kind in KINDS:
            one = kind(fake, buffer)
            handle, y = one.dispatch().handle, one.y()
            for call in (one.dispatch, lambda one=one, y=y, handle=handle: one.combine(handle, y=y)):
                texts.clear()
                for _ in range(3):
                    looks.clear()
                    call()
                assert not looks
                assert len(texts) == 3
                assert len(set(texts)) == 1
            vars(one).clear()


def test_a_call_on_a_stream_of_its_own_has_no_form(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """The given stream counts, also if it was the caller's current one before."""
    handle, y = calls.dispatch().handle, calls.y()
    for _ in range(3):
        calls.dispatch(stream=CALLERS_STREAM)
        calls.combine(handle, y=y, stream=CALLERS_STREAM)
    monkeypatch.setattr(frameworks.FRAMEWORK_OF_CLASS[Array], "current_stream", lambda device: 12)
    fake.pop_launches()
    calls.dispatch(stream=CALLERS_STREAM)
    calls.combine(handle, y=y, stream=CALLERS_STREAM)
    assert [one.stream for one in fake.pop_launches()] == [CALLERS_STREAM] * 2
