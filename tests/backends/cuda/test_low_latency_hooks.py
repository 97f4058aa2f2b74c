"""Hooks of the low-latency calls of the CUDA backend, ordinary and prepared, on a fake GPU that records requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import LowLatencyCalls, collected, quick
from fake_gpu import CALLERS_STREAM, FakeGpu, arguments, fake, make

from deepep_rt import EPInputError
from deepep_rt.cuda import driver

__all__ = ["collected", "fake", "make", "quick"]

pytestmark = pytest.mark.usefixtures("collected")

PREPARED_TOO = pytest.mark.parametrize("is_prepared", [False, True])


def send(calls: LowLatencyCalls, is_prepared: bool = False, **how: Any) -> Any:
    """Make a dispatch with a hook."""
    how["return_recv_hook"] = True
    return calls.prepare(**how).dispatch() if is_prepared else calls.dispatch(**how)


def kernels_and_phases(fake: FakeGpu) -> list[tuple[str, int]]:
    return [(call.kernel, call.phases) for call in fake.pop_launches()]


def test_hooks(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    sent = send(quick)
    (sending,) = fake.pop_launches()
    with pytest.raises(EPInputError, match="hooks are open"):
        quick.dispatch()
    with pytest.raises(EPInputError, match="was not called yet"):
        quick.combine(sent.handle)
    assert fake.pop_launches() == []
    sent.hook()
    (receiving,) = fake.pop_launches()
    assert (sending.phases, receiving.phases) == (1, 2)
    assert {**vars(sending), "phases": 0} == {**vars(receiving), "phases": 0}, "both launches have the same parameters"
    assert sent.recv_x.ptr == receiving.recv_x


def test_hooks_of_prepared_calls(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    """One call of each kind may be open. Another prepared call has its own memory, and its own hooks."""
    y = quick.y()
    step, other = (quick.prepare(y=y, return_recv_hook=True) for _ in range(2))
    sent = step.dispatch()
    with pytest.raises(EPInputError, match=r"last low_latency_dispatch is open.*prepare another call"):
        step.dispatch()
    with pytest.raises(EPInputError, match="was not called yet"):
        step.combine()
    second = other.dispatch()
    with pytest.raises(EPInputError, match="in the order of their calls"):
        second.hook()
    with pytest.raises(EPInputError, match="2 open hooks"):
        send(quick)
    sent.hook(), second.hook()
    back = step.combine()
    for call in (step.combine, lambda: step.combine(quick.y()), step.dispatch):
        with pytest.raises(EPInputError, match="last low_latency_combine is open"):
            call()
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


def test_prepared_calls_wait_for_hooks_of_other_calls(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    step = quick.prepare(y=quick.y())
    handle = step.dispatch().handle
    sent = send(quick)
    with pytest.raises(EPInputError, match="hooks are open"):
        step.dispatch()
    sent.hook()
    back = quick.combine(handle, return_recv_hook=True)
    with pytest.raises(EPInputError, match="hooks are open"):
        step.combine()
    back.hook()


def test_halves_in_different_captures(fake: FakeGpu, quick: LowLatencyCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture sends nothing. A hook in a capture receives only in the replays."""

    def phases() -> list[int]:
        return [launch.phases for launch in fake.pop_launches()]

    def is_in(capture: int | None) -> None:
        monkeypatch.setattr(driver, "capture_id", lambda stream: capture)

    is_in(7)
    send(quick).hook()
    assert phases() == [1, 2]
    lost = send(quick)
    is_in(None)
    with pytest.raises(EPInputError, match=r"belong in the same capture.*drop this hook"):
        lost.hook()
    del lost
    quick.dispatch()
    assert phases() == [1, 3], "the capture failed: no launch waits for its rows"

    sent = send(quick)
    is_in(8)
    with pytest.raises(EPInputError, match="belong in the same capture"):
        sent.hook()
    del sent
    with pytest.raises(EPInputError, match="was lost and has to be called first"):
        quick.dispatch()
    is_in(None)
    quick.dispatch()
    assert phases() == [1, 2, 3]


def test_a_handle_does_not_keep_a_hook(fake: FakeGpu, quick: LowLatencyCalls) -> None:
    """If the caller drops the hook, the next call runs it, and the handle stays valid."""
    handle = send(quick).handle
    quick.dispatch()
    quick.combine(handle)
    assert [launch.phases for launch in fake.pop_launches()] == [1, 2, 3, 3]


def test_lost_hooks_of_prepared_calls(fake: FakeGpu, quick: LowLatencyCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call runs a hook that the caller dropped. A hook lost in another capture does not run, and refuses nothing."""
    step = quick.prepare(y=quick.y(), return_recv_hook=True)
    step.dispatch()
    step.dispatch().hook()
    step.combine()
    step.dispatch().hook()
    step.combine()
    step.combine().hook()
    assert kernels_and_phases(fake) == [
        (f"ll_{call}", phases)
        for call in ("dispatch", "dispatch", "combine", "dispatch", "combine", "combine")
        for phases in (1, 2)
    ]
    with monkeypatch.context() as capture:
        capture.setattr(driver, "capture_id", lambda stream: 7)
        step.dispatch()
    step.dispatch().hook()
    assert [call.phases for call in fake.pop_launches()] == [1, 1, 2]


def test_a_hook_and_a_call_do_not_overlap(fake: FakeGpu, quick: LowLatencyCalls) -> None:
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

    first, second = (send(quick) for _ in range(2))
    fake.on_launch = lambda call: elsewhere(quick.dispatch)
    first.hook()
    fake.on_launch = lambda call: elsewhere(second.hook)
    quick.buffer.dispatch(*arguments(fake), num_worst_tokens=8)
    fake.on_launch = lambda call: None
    second.hook()
    assert [call.phases for call in fake.pop_launches() if call.kernel == "ll_dispatch"] == [1, 1, 2, 2]
    assert len(refused) == 3, "once in the hook, and once in each kernel launch of the other call"


@PREPARED_TOO
def test_a_hook_receives_although_it_reports_bad_input(fake: FakeGpu, quick: LowLatencyCalls, is_prepared: bool) -> None:
    """The other ranks have made the call, and continue with their combines."""
    sent = send(quick, is_prepared)
    with pytest.raises(EPInputError, match="was not called yet"):
        quick.combine(sent.handle)
    quick.buffer._backend.runtime.page.bad_input.value = 1
    with pytest.raises(EPInputError, match="It was skipped"):
        sent.hook()
    with pytest.raises(EPInputError, match="was called already"):
        sent.hook()
    quick.combine(sent.handle)
    assert kernels_and_phases(fake) == [("ll_dispatch", 1), ("ll_dispatch", 2), ("ll_combine", 3)]


@PREPARED_TOO
@pytest.mark.parametrize("is_async", [False, True])
def test_hooks_and_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, is_prepared: bool, is_async: bool) -> None:
    """The hook launches on the stream of its call, after calls in between and before the next call. The event moves to its end."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = send(LowLatencyCalls(fake, buffer), is_prepared, async_finish=is_async, stream=77)
        buffer.dispatch(x, idx, weights, num_worst_tokens=40, stream=78)
        fake.waits.clear()
        recorded = []
        with monkeypatch.context() as records:
            records.setattr(driver.CudaEvent, "record", lambda event, stream: recorded.append((event, stream)))
            sent.hook()
        assert fake.waits == [(77, ("all of", CALLERS_STREAM))] * is_async + [(77, 5)]
        assert not is_async or (sent.event._event, 77) in recorded
        fake.waits.clear()
        buffer.dispatch(x, handle=buffer.dispatch(x, idx, num_worst_tokens=40, stream=78).handle, stream=78)
        assert fake.waits == [(78, 5)]
