"""Hooks of the low-latency calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import Array, FakeGpu, arguments, fake, make

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.cuda import driver

__all__ = ["fake", "make"]


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
