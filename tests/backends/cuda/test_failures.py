"""Failures in calls of the CUDA backend: silent peers, wrong input, lost ranks. On a fake GPU that records requests."""

from __future__ import annotations

import gc
import itertools
import time
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, collected
from fake_gpu import BASE, Array, FakeGpu, arguments, fake, make, routed

from deepep_rt import EPDestroyedError, EPInputError, EPOutOfMemoryError, EPPeerError, EPTimeoutError, EPUnavailableError
from deepep_rt.comm.call_signature import CALL_KINDS, Signature, pack
from deepep_rt.cuda import driver
from deepep_rt.kernels import structs

__all__ = ["collected", "fake", "make"]


def test_late_counts(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not take the counts of the call before for these."""
    with make() as buffer:
        x, idx, _ = arguments(fake)
        page = buffer._backend.runtime.page

        def count() -> None:
            page.mailbox["num_recv"] = num_rows
            page.counted.value = 1

        monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", count)
        for num_rows in (30, 20):
            assert buffer.dispatch(x, idx).recv_x.shape == (num_rows, 256)


def test_a_timeout_while_the_host_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reports the silent peer. The host raises that report, although its own limit has passed."""
    buffer = make(timeout_s=0.05)
    page, polls = buffer._backend.runtime.page, itertools.count()

    def report() -> None:
        if next(polls) == 20:
            page.report["rank"], page.report["peer"], page.report["phase"], page.timed_out.value = 0, 2, 3, 1

    monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", report)
    with pytest.raises(EPTimeoutError, match=r"waited 0\.05 s for rank 2: the rows of dispatch"):
        buffer.dispatch(*arguments(fake))
    buffer.destroy()


def test_an_interrupted_wait_breaks_the_buffer(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call would take the counts of this call for its own."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    buffer = make()
    with monkeypatch.context() as interrupted:
        interrupted.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(*arguments(fake))
    fake.pop_launches()
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="a dispatch was interrupted while it waited for its counts"):
            buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    assert fake.pop_launches() == []
    buffer.destroy()
    assert BASE not in fake.freed


def test_bad_input_that_is_reported_before_counts(fake: FakeGpu, make: Any) -> None:
    """The counts arrive first."""
    with make() as buffer:
        page = buffer._backend.runtime.page

        def report(call: SimpleNamespace) -> None:
            page.bad_input.value = 1
            if call.kernel == "route":
                fake.on_launch = lambda call: setattr(page.counted, "value", 1)  # later

        fake.on_launch = report
        with pytest.raises(EPInputError, match="It was skipped"):
            buffer.dispatch(*arguments(fake))
        assert [call.kernel for call in fake.pop_launches()] == ["route", "dispatch"]
        assert page.counted.value


@pytest.mark.parametrize(
    ("phase", "expected", "call_idx"), [("kPhaseLlRows", 7, 7), ("kPhaseLlDispatchRoom", 7, 11), ("kPhaseLlCombineRoom", 7, 11)]
)
def test_which_call_timed_out(fake: FakeGpu, make: Any, phase: str, expected: int, call_idx: int) -> None:
    """A call that waits for room waits for the call before in its ring slot. Three slots make a ring of four."""
    buffer = make(low_latency=True, num_slots=3)
    page = buffer._backend.runtime.page
    report = page.report[0]
    report["rank"], report["peer"], report["phase"] = 0, 2, structs.PHASES[phase][0]
    report["expected"], report["seen"] = expected, 6
    page.timed_out.value = 1
    with pytest.raises(EPTimeoutError, match=f"call {call_idx} of its kind.*rank 2 was at 6") as caught:
        buffer.synchronize()
    error = caught.value
    assert (error.peer, error.phase, error.expected, error.seen) == (2, structs.PHASES[phase][1], expected, 6)
    assert error.call_idx == call_idx
    buffer.destroy()


def _report_timeout(buffer: Any, phase: str, expected: int = 0) -> None:
    page = buffer._backend.runtime.page
    report = page.report[0]
    report["rank"], report["peer"], report["phase"], report["expected"] = 0, 2, structs.PHASES[phase][0], expected
    page.timed_out.value = 1


@pytest.mark.parametrize(
    ("phase", "call", "words"),
    [
        (
            "kPhaseDispatchWindow",
            2,
            "rank 2 does not run the backward of combine call 3. Run the same backward pass on all ranks",
        ),
        ("kPhaseCombineRows", 2, "rank 2 does not run the backward of dispatch call 3. Run the same backward pass on all ranks"),
        ("kPhaseDispatchWindow", 3, "to make the same calls. Check"),
        ("kPhaseRoute", 3, "to make the same calls. Check"),
    ],
)
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_a_rank_without_a_backward_pass(fake: FakeGpu, make: Any, phase: str, call: int, words: str, layout: str) -> None:
    """The number of the call tells what it was for, also if the host has made more calls since."""
    buffer = make()
    purposes, (x, idx, _) = buffer._backend.purposes, arguments(fake)
    sent = buffer.dispatch(x, idx, num_worst_tokens=40, layout=layout)
    y = Array(fake, "bfloat16", 40, 256)
    buffer.combine(y, sent.handle)
    with purposes.during("the backward of combine call 3"):
        buffer.dispatch(x, handle=sent.handle)
    with purposes.during("the backward of dispatch call 3"):
        buffer.combine(y, sent.handle)
    buffer.dispatch(x, handle=sent.handle)
    _report_timeout(buffer, phase, call)
    with pytest.raises(EPTimeoutError, match=words):
        buffer.combine(y, sent.handle)
    buffer.destroy()


def test_another_call_than_a_backward_pass(fake: FakeGpu, make: Any) -> None:
    """The host may be some calls ahead of the one that differed, and prepared calls belong to no backward pass."""
    with make() as buffer:
        page, (x, idx, _) = buffer._backend.runtime.page, arguments(fake)
        handle = buffer.dispatch(x, idx, num_worst_tokens=40).handle
        prepared = buffer.prepare_throughput(x, handle)
        kinds = [pack(Signature(kind, "bfloat16")) for kind in ("dispatch", "combine")]

        def differ(call: Any) -> str:
            page.report["rank"], page.report["other"], page.report["call_signature"], page.ranks_differ.value = 0, 3, kinds, 1
            with pytest.raises(EPInputError, match="the ranks disagree on the kind") as caught:
                call()
            return str(caught.value)

        with buffer._backend.purposes.during("the backward of combine call 3"):
            text = differ(lambda: buffer.dispatch(x, handle=handle))
        assert "; rank 3 does not run the backward of combine call 3, or of a later call. Run" in text
        assert text.endswith("No rows were sent")
        for call in (prepared.dispatch, lambda: buffer.dispatch(x, handle=handle)):
            assert "does not run" not in differ(call)


def test_a_replay_while_a_hook_is_open(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    page = buffer._backend.runtime.page
    page.report["phase"], page.timed_out.value = structs.LL_OPEN_HOOK, 1
    for call in (buffer.synchronize, lambda: buffer.low_latency_dispatch(*arguments(fake)[:2])):
        with pytest.raises(EPInputError, match=r"replayed while a hook of such a call was open.*cannot be used any more"):
            call()
    buffer.destroy()


def test_ranks_that_differ(fake: FakeGpu, make: Any) -> None:
    """Kernels report the arguments of two ranks. A throughput call raises that once. A low-latency call breaks the Buffer."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)[:3]
        page = buffer._backend.runtime.page
        buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        (mine,) = (call.call_signature for call in fake.pop_launches() if call.kernel == "dispatch")
        report = page.report[0]
        report["rank"], report["other"], report["serial"] = 1, 0, (5, 5)
        report["call_signature"] = mine, pack(Signature("dispatch", x.dtype, idx.dtype, row_bytes=512))
        page.ranks_differ.value = 1
        with pytest.raises(
            EPInputError, match=r"topk_weights of this call.* rank 0: None, rank 1: float32; .*No rows were sent"
        ) as caught:
            buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        assert caught.value.call_made
        assert [call.kernel for call in fake.pop_launches()] == ["route", "dispatch"], "the other ranks make this call too"
        buffer.synchronize()
        buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        (mine,) = (call.call_signature for call in fake.pop_launches())
        report["call_signature"] = mine, pack(Signature("low_latency_dispatch", "bfloat16", idx.dtype, "float32"))
        page.ranks_differ.value = 1  # the kernel also reports a timeout, a moment later
        for _ in range(2):
            with pytest.raises(
                EPInputError, match=r"x of this call.*rank 0: bfloat16, rank 1: float8_e4m3fn.*cannot be used any more"
            ):
                buffer.low_latency_dispatch(x, idx)
        assert fake.pop_launches() == []


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (number % 3 > 0)) for number, kind in enumerate(CALLS)]
)
def test_a_silent_peer(fake: FakeGpu, make: Any, kind: str) -> None:
    """The next call raises what a kernel has reported, and so do all later calls."""
    buffer = make(low_latency=True)
    fake.on_launch = routed(buffer, 24, [3] * 8)
    call = CALLS[kind](fake, buffer)
    fake.pop_launches()
    _report_timeout(buffer, "kPhaseDispatchRows")
    for one in (call, buffer.check, *([] if "receiving half" in kind else [call])):  # a hook can be called once
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 2: the rows of dispatch") as caught:
            one()
        assert (caught.value.rank, caught.value.peer) == (0, 2)
    assert fake.pop_launches() == []
    buffer.destroy()
    assert BASE not in fake.freed, "peers may still write to this memory"


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("kind", [kind for kind in CALLS if "sending half" not in kind])
def test_bad_input_is_raised_after_the_call(fake: FakeGpu, make: Any, kind: str) -> None:
    """The call is complete first, because the other ranks have made it and go on."""
    with make(low_latency=True) as buffer:
        fake.on_launch = routed(buffer, 24, [3] * 8)
        launched = []
        for is_bad in (False, True):
            call = CALLS[kind](fake, buffer)
            fake.pop_launches()
            buffer._backend.runtime.page.bad_input.value = is_bad
            if is_bad:
                with pytest.raises(EPInputError, match="It was skipped") as caught:
                    call()
                assert caught.value.call_made
            else:
                call()
            launched.append([(one.kernel, getattr(one, "phases", 0)) for one in fake.pop_launches()])
        assert launched[0] == launched[1]


def test_a_timeout_before_results_in_host_memory(fake: FakeGpu, make: Any) -> None:
    """The host waits for the copies, so it can raise before it returns incomplete results."""
    buffer = make(dtype="float32")
    page = buffer._backend.runtime.page
    page.report["peer"], page.report["phase"] = 2, 3
    fake.on_launch = lambda call: setattr(page.timed_out, "value", 1)
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
    buffer.destroy()
    del buffer  # the traceback of its error holds memory of the fake GPU
    gc.collect()


def test_too_little_host_memory_for_results(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call was made, so the other ranks go on."""

    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 7 TiB")

    with make(dtype="float32") as buffer:
        with monkeypatch.context() as full:
            full.setattr("deepep_rt.backends.cuda.runtime.Result", fail)
            with pytest.raises(EPOutOfMemoryError, match=r"7 TiB.*; expected room.*Pass arrays on the GPU") as caught:
                buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
        assert caught.value.call_made
        buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
        del caught  # its traceback holds memory of the fake GPU
        gc.collect()


def test_a_rank_that_leaves_after_an_exception(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the others why. They stop waiting for it, on the host and on the GPU."""
    pytest.importorskip("mpi4py.MPI")
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: written.append((ptr, value)))
    buffer = make(timeout_s=60.0)
    comm = buffer._backend.comm
    with pytest.raises(KeyError), buffer:
        raise KeyError("mine")
    assert comm.sent_notice == "KeyError: 'mine'"
    buffer = make(timeout_s=60.0)
    backend = buffer._backend
    backend.comm.incoming_notice = "ValueError: no batch"
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match=r"rank 2 left the Buffer.*ValueError: no batch") as caught:
            buffer.dispatch(*arguments(fake))
        assert caught.value.peer == 2
    waiting = make(timeout_s=60.0)
    waiting._backend.comm.incoming_notice = "ValueError: no batch"
    monkeypatch.setattr(waiting._backend.runtime.order, "end", lambda: SimpleNamespace(done=lambda: False))
    with pytest.raises(EPTimeoutError, match=r"rank 2 left the Buffer.*ValueError: no batch"):
        waiting.synchronize()
    waiting.destroy()
    written.pop()
    assert time.monotonic() - start < 10
    assert written == [(backend.runtime.state + structs.offset(structs.State.dtype({}), "abort"), 1)]
    buffer.destroy()


@pytest.mark.parametrize("call", ["dispatch", "low-latency dispatch", "low-latency hook"])
def test_a_rank_that_leaves_while_results_are_copied_to_host_memory(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The host hears of it before the kernel gives up."""
    pytest.importorskip("mpi4py.MPI")
    buffer, start = make(timeout_s=60.0, low_latency=True), time.monotonic()
    config = buffer.config
    x, idx = np.zeros((5, config.hidden), "float16"), np.zeros((5, config.num_topk), np.int64)
    buffer._backend.comm.incoming_notice = "ValueError: no batch"
    monkeypatch.setattr(driver.CudaEvent, "done", lambda event: time.monotonic() > start + 20)
    with pytest.raises(EPTimeoutError, match=r"rank 2 left the Buffer.*ValueError: no batch"):  # noqa: PT012
        if call == "dispatch":
            buffer.dispatch(x, idx, num_worst_tokens=40)
        else:
            rows = x.view(ml_dtypes.bfloat16)
            sent = buffer.low_latency_dispatch(rows, idx, return_recv_hook=call.endswith("hook"))
            if sent.hook is not None:
                sent.hook()
    assert time.monotonic() < start + 10
    buffer.destroy()


@pytest.mark.parametrize("wait", ["synchronize", "destroy"])
def test_a_timeout_is_raised_while_the_callers_own_work_runs(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """Work that the caller has queued after the call may wait for the lost rank without a limit, as NCCL does."""
    buffer = make()
    buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    monkeypatch.setattr(driver.CudaEvent, "done", lambda event: False)
    buffer._backend.runtime.page.timed_out.value = 1
    with pytest.raises(EPTimeoutError):
        getattr(buffer, wait)()
    buffer.destroy()


def test_waiting_while_the_stream_is_captured(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work outside of the graph cannot wait for the call. The Buffer ends, and its memory stays, because calls may use it."""
    buffer = make()
    buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: True)
    for wait in (buffer.synchronize, buffer.destroy):
        with pytest.raises(EPInputError, match="Wait until the capture has ended"):
            wait()
    assert BASE not in fake.freed
    with pytest.raises(EPDestroyedError):
        buffer.synchronize()


def test_a_rank_that_leaves_while_timeouts_mask(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The low-latency calls of the others go on without it."""
    with make(on_timeout="mask", low_latency=True) as buffer:
        backend = buffer._backend
        backend.comm.incoming_notice, start = "ValueError: no batch", time.monotonic()
        end = SimpleNamespace(done=lambda: time.monotonic() > start + 0.5, synchronize=lambda: None)
        monkeypatch.setattr(backend.runtime.order, "end", lambda: end)
        buffer.synchronize()
        buffer.low_latency_dispatch(*arguments(fake)[:2])


def test_a_gpu_with_earlier_work(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a call counts from the start of its kernel. Until then the host warns."""
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GRACE_S", 0.0)
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._WARNING_PERIOD_S", 0.2)
    now = itertools.count(step=0.01)  # each look at the clock takes 10 ms
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor.time", SimpleNamespace(monotonic=lambda: next(now)))
    with make(timeout_s=0.1) as buffer:
        page, polls = buffer._backend.runtime.page, itertools.count()

        def run() -> None:
            number = next(polls)
            if number == 50:
                page.mailbox["num_recv"], page.started.value = 7, 1
            if number == 55:
                page.counted.value = 1

        monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", run)
        with pytest.warns(UserWarning, match=r"rank 0: the GPU has not started this dispatch after 0 s") as warned:
            assert buffer.dispatch(*arguments(fake)).recv_x.shape == (7, 256)
        assert len(warned) == 2
        page.started.value = 1
        yields = "deepep_rt.backends.cuda.monitor.os.sched_yield"
        monkeypatch.setattr(yields, lambda: setattr(page.counted, "value", not page.started.value))
        buffer.dispatch(*arguments(fake)), "the start of the call before does not count"


def test_a_stuck_gpu(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GRACE_S", 0.1)
    buffer = make(timeout_s=0.1)
    fake.on_launch = lambda call: setattr(buffer._backend.runtime.page.started, "value", 1)
    with pytest.raises(EPTimeoutError, match=r"routing kernel has run for 0\.2 s, and reports neither"):
        buffer.dispatch(*arguments(fake))
    buffer.destroy()


def test_a_failed_gpu(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of earlier work, perhaps of another library, ends all work. The call's kernel will not start."""

    def fail() -> int:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GPU_CHECK_PERIOD_S", 0.1)
    buffer = make()
    monkeypatch.setattr(driver, "free_bytes", fail)
    with pytest.raises(EPUnavailableError, match="ILLEGAL_ADDRESS"):
        buffer.dispatch(*arguments(fake))
    buffer.destroy()


def _wait_in_dispatch(buffer: Any, fake: FakeGpu) -> Any:
    """Make a dispatch whose counts do not come, and return its error."""
    with pytest.raises(EPPeerError) as caught:
        buffer.dispatch(*arguments(fake))
    return caught.value


def _hear(buffer: Any, kind: str, text: str, num_made: int = 0, doing: str = "") -> None:
    comm = buffer._backend.comm
    comm.incoming_kind, comm.incoming_num_made, comm.incoming_doing, comm.incoming_notice = kind, num_made, doing, text


@pytest.fixture
def no_device_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: None)


@pytest.mark.usefixtures("no_device_writes")
@pytest.mark.parametrize("kind", ["exception", "signal", "end"])
def test_a_rank_that_leaves_for_any_reason(fake: FakeGpu, make: Any, kind: str) -> None:
    buffer = make(timeout_s=60.0)
    _hear(buffer, kind, "its reason")
    error = _wait_in_dispatch(buffer, fake)
    assert (error.peer, error.reason) == (2, "its reason")
    assert "rank 2 left the Buffer" in str(error)
    buffer.destroy()


@pytest.mark.usefixtures("no_device_writes")
def test_a_rank_that_makes_another_call_than_the_one_it_refused(fake: FakeGpu, make: Any) -> None:
    """Kernels of different calls wait for each other. This rank tells its peers that it gives up, too."""
    buffer = make(timeout_s=60.0)
    _hear(buffer, "elsewhere", "it refused dispatch (EPInputError: x), and made combine instead", 0, "combine")
    error = _wait_in_dispatch(buffer, fake)
    assert "rank 2 does not make this call (dispatch)" in str(error)
    assert "made combine instead" in str(error)
    assert buffer._backend.comm.sent_notice.startswith("EPPeerError: rank 2 does not make")
    buffer.destroy()


def test_ranks_that_refuse_the_same_call_and_go_on_together(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        _hear(buffer, "elsewhere", "it refused combine (EPInputError: x), and made dispatch instead", 0, "dispatch")
        page, start = buffer._backend.runtime.page, time.monotonic()
        found = lambda: setattr(page.counted, "value", int(time.monotonic() > start + 0.4))  # noqa: E731
        monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", found)
        buffer.dispatch(*arguments(fake))


def test_a_refused_call_is_told(fake: FakeGpu, make: Any) -> None:
    """Once, whatever follows. Peers hear when this rank repeats the call, or makes another one."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        comm = buffer._backend.comm
        for _ in range(2):
            with pytest.raises(EPInputError):
                buffer.dispatch(x, weights)
            assert comm.sent_notice.startswith("dispatch: EPInputError: topk_idx")
            comm.sent_notice = "" if comm.sent_kind == "elsewhere" else comm.sent_notice
        buffer.dispatch(x, idx, num_worst_tokens=8)
        assert comm.sent_kind == "repeated"
        with pytest.raises(EPInputError):
            buffer.dispatch(x, weights)
        buffer.low_latency_dispatch(x, idx)
        assert comm.sent_kind == "elsewhere"
        assert comm.sent_notice.endswith("made low_latency_dispatch instead")
        for step in (buffer.prepare_low_latency(x, idx, weights),):
            with pytest.raises(EPInputError, match="y=None"):
                step.combine()
            assert comm.sent_notice.startswith("low_latency_combine: EPInputError: y=None")


def test_a_timeout_quotes_the_refusal_of_the_silent_peer(fake: FakeGpu, make: Any) -> None:
    buffer = make()
    _hear(buffer, "refused", "dispatch: EPInputError: x.shape=[4]")
    page = buffer._backend.runtime.page
    page.report["rank"], page.report["peer"], page.report["phase"], page.timed_out.value = 0, 2, 3, 1
    with pytest.raises(EPPeerError, match=r"waited 1 s for rank 2.*Rank 2 has refused a call.*x\.shape=\[4\]") as caught:
        buffer.check()
    assert (caught.value.peer, caught.value.reason) == (2, "dispatch: EPInputError: x.shape=[4]")
    buffer.destroy()


def test_a_difference_that_breaks_the_buffer_is_told(fake: FakeGpu, make: Any) -> None:
    """With other kinds of combines, some ranks see no header that differs. They wait for data that does not come."""
    buffer = make(low_latency=True)
    page = buffer._backend.runtime.page
    signatures = [pack(Signature(kind, "bfloat16", "int64", "float32")) for kind in CALL_KINDS[4:6]]
    page.report[0]["rank"], page.report[0]["other"], page.report[0]["call_signature"] = 0, 1, signatures
    page.ranks_differ.value = 1
    with pytest.raises(EPInputError, match="allow_multiple_reduction=False"):
        buffer.check()
    assert "allow_multiple_reduction=False" in buffer._backend.comm.sent_notice
    buffer.destroy()


def test_a_dropped_buffer_is_told(fake: FakeGpu, make: Any) -> None:
    buffer = make()
    comm = buffer._backend.comm
    buffer_of = [buffer]
    del buffer
    with pytest.warns(ResourceWarning):
        buffer_of.clear()
    assert comm.sent_notice == "its program dropped the Buffer without destroy()"


@pytest.mark.usefixtures("no_device_writes")
def test_no_rank_waits_in_destroy_for_one_that_has_left(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, start = make(timeout_s=60.0), time.monotonic()
    comm = buffer._backend._consensus._comm
    monkeypatch.setattr(comm, "Irecv", lambda word, peer, tag: SimpleNamespace(Test=lambda: False))
    _hear(buffer, "end", "its program ended without destroy()")
    with pytest.raises(EPPeerError, match=r"rank 2 left the Buffer.*its program ended"):
        buffer.destroy()
    assert time.monotonic() - start < 20
