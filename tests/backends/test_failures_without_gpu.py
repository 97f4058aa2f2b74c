"""Making and destroying Buffers of the CUDA backend, and what goes wrong in between, on a GPU that computes nothing."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import BASE, Array, FakeGpu, _Communicator, arguments, fake, make, region

from deepep_rt import Buffer, EPCacheError, EPDestroyedError, EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from deepep_rt.backends.cuda.low_latency import LowLatency
from deepep_rt.comm import call_signature
from deepep_rt.comm.consensus import Consensus
from deepep_rt.cuda import driver
from deepep_rt.cuda import nvshmem as symmetric
from deepep_rt.jit import build as jit
from deepep_rt.kernels import structs
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make"]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_buffer_that_does_not_fit_allocates_nothing(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """All ranks hear which one has too little memory, and what to lower; nobody waits in an allocation for one that gave up."""
    few, plenty = 1 << 20, 1 << 50
    monkeypatch.setattr(driver, "free_bytes", lambda: plenty if rank else few)
    monkeypatch.setattr(
        _Communicator,
        "allgather",
        lambda _, mine: [(few if r == rank else plenty, *mine[1:]) for r in range(4)],
    )
    monkeypatch.setattr(symmetric, "SymmetricMemory", lambda *_: pytest.fail("symmetric memory was allocated"))
    need = Buffer.size_hint(num_ranks=4, num_max_tokens_per_rank=4096, hidden=7168, num_topk=4, num_experts=32)["total"]
    with pytest.raises(EPOutOfMemoryError) as caught:
        make(num_max_tokens_per_rank=4096, hidden=7168)
    message = str(caught.value)
    for words in (f"takes {need / 1e9:.2f} GB", f"rank {rank} has 0.00 GB free", "Lower num_max_tokens_per_rank or num_slots"):
        assert words in message
    assert not [name for name in fake.asked if name.startswith(("allocate", "fill", "acquire_stream"))]


def test_counts_that_come_late(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the call before are not taken for them."""
    with make() as buffer:
        x, idx, _ = arguments(fake)
        page = buffer._backend.runtime.page

        def count() -> None:
            page.mailbox["num_recv"] = num_rows
            page.counted.value = 1

        monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", count)
        for num_rows in (30, 20):
            assert buffer.dispatch(x, idx).recv_x.shape == (num_rows, 256)


def test_a_time_out_while_the_host_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU says for whom it has waited: it is heard, also where the host's own time is up."""
    buffer = make(timeout_s=0.05)
    page, start = buffer._backend.runtime.page, time.monotonic()

    def report() -> None:
        if time.monotonic() > start + 0.2:
            page.report["rank"], page.report["peer"], page.report["phase"], page.timed_out.value = 0, 2, 3, 1

    monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", report)
    with pytest.raises(EPTimeoutError, match=r"waited 0\.05 s for rank 2: the rows of dispatch"):
        buffer.dispatch(*arguments(fake))
    assert time.monotonic() < start + 2
    buffer.destroy()


def test_a_host_that_is_interrupted_while_it_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of this call would be taken for those of the next one."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    buffer = make()
    with monkeypatch.context() as interrupted:
        interrupted.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(*arguments(fake))
    fake.take()
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="a dispatch was interrupted while it waited for its counts"):
            buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    assert fake.take() == []
    buffer.destroy()
    assert BASE not in fake.freed


def test_bad_input_that_the_gpu_reports(fake: FakeGpu, make: Any) -> None:
    """It is raised once the call is whole: its counts have come, and the second half of a low-latency call is launched."""
    with make(low_latency=True) as buffer:
        page = buffer._backend.runtime.page

        def report(call: SimpleNamespace) -> None:
            page.bad_input.value = 1
            if call.kernel == "route":
                fake.on_launch = lambda call: setattr(page.counted, "value", 1)  # later

        fake.on_launch = report
        with pytest.raises(EPInputError, match="It was skipped"):
            buffer.dispatch(*arguments(fake))
        assert [call.kernel for call in fake.take()] == ["route", "dispatch"]
        assert page.counted.value
        fake.on_launch = report
        sent = buffer.low_latency_dispatch(*arguments(fake)[:2], return_recv_hook=True)
        fake.take()
        with pytest.raises(EPInputError, match="It was skipped"):
            sent.hook()
        assert [call.phases for call in fake.take()] == [2]


@pytest.mark.parametrize(
    ("phase", "expected", "call_idx"), [("kPhaseLlRows", 7, 7), ("kPhaseLlDispatchRoom", 7, 11), ("kPhaseLlCombineRoom", 7, 11)]
)
def test_which_call_timed_out(fake: FakeGpu, make: Any, phase: str, expected: int, call_idx: int) -> None:
    """One that waits for room waits for the call that has used it before; with three slots there is room for four."""
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


def test_a_replay_while_a_hook_was_open(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    page = buffer._backend.runtime.page
    page.report["phase"], page.timed_out.value = structs.LL_OPEN_HOOK, 1
    for call in (buffer.synchronize, lambda: buffer.low_latency_dispatch(*arguments(fake)[:2])):
        with pytest.raises(EPInputError, match=r"replayed while a hook of such a call was open.*cannot be used any more"):
            call()
    buffer.destroy()


def test_ranks_that_differ(fake: FakeGpu, make: Any) -> None:
    """Kernels report what two ranks gave; it is raised once, or, from a call that cannot be mended, in every call from then on."""
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)[:3]
        page = buffer._backend.runtime.page
        buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        (mine,) = (call.call_signature for call in fake.take() if call.kernel == "dispatch")
        report = page.report[0]
        report["rank"], report["other"], report["serial"] = 1, 0, (5, 5)
        report["call_signature"] = mine, call_signature.pack("dispatch", x.dtype, idx.dtype, None)
        page.ranks_differ.value = 1
        with pytest.raises(
            EPInputError, match=r"topk_weights of this call.* rank 0: None, rank 1: float32. No rows were sent"
        ) as caught:
            buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        assert caught.value.call_made
        assert [call.kernel for call in fake.take()] == ["route", "dispatch"], "the other ranks make this call too"
        buffer.synchronize()
        buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        (mine,) = (call.call_signature for call in fake.take())
        report["call_signature"] = mine, call_signature.pack("low_latency_dispatch", "bfloat16", idx.dtype, "float32", None)
        page.ranks_differ.value = 1  # and a moment later, that the time was up
        for _ in range(2):
            with pytest.raises(
                EPInputError, match=r"x of this call.*rank 0: bfloat16, rank 1: float8_e4m3fn.*cannot be used any more"
            ):
                buffer.low_latency_dispatch(x, idx)
        assert fake.take() == []


def test_a_silent_peer(fake: FakeGpu, make: Any) -> None:
    """What a kernel reports is raised by the next call, and by all after it."""
    buffer = make()
    page = buffer._backend.runtime.page
    page.report["rank"], page.report["peer"], page.report["phase"], page.timed_out.value = 0, 2, 3, 1
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 2: the rows of dispatch") as caught:
            buffer.dispatch(*arguments(fake))
        assert (caught.value.rank, caught.value.peer) == (0, 2)
    assert fake.take() == []
    buffer.destroy()
    assert BASE not in fake.freed, "peers may still write there"


def test_memory_that_is_not_empty_when_it_comes(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lies there is taken for a report, a count or a mask."""
    pinned = driver.allocate_pinned

    def allocate_pinned(num_bytes: int) -> int:
        return ctypes.memset(pinned(num_bytes), 0xFF, num_bytes)

    monkeypatch.setattr(driver, "allocate_pinned", allocate_pinned)
    with make(low_latency=True) as buffer:
        assert buffer.query_masked_ranks() == []
        buffer.dispatch(*arguments(fake), num_worst_tokens=40)
        fills = {at: (byte, num_bytes) for at, byte, num_bytes in fake.fills}
        backend, layout = buffer._backend, Layout(buffer.config)
        inboxes = layout.low_latency
        for name in ("control", "low_latency"):
            assert fills[region(buffer, name).start] == (0, len(region(buffer, name)))
        rows = inboxes.offsets["messages"]
        assert fills[region(buffer, "low_latency").start + rows] == (0xFF, inboxes.num_bytes - rows)
        assert fills[backend.runtime.state] == (0, layout.local.num_bytes)


def test_a_time_out_under_results_in_host_memory(fake: FakeGpu, make: Any) -> None:
    """The host has waited for them: who gets them knows that they are whole."""
    buffer = make(dtype="float32")
    page = buffer._backend.runtime.page
    page.report["peer"], page.report["phase"] = 2, 3
    fake.on_launch = lambda call: setattr(page.timed_out, "value", 1)
    with pytest.raises(EPTimeoutError, match="for rank 2"):
        buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
    buffer.destroy()


def test_host_memory_that_does_not_suffice_for_results(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call was made, and the other ranks go on."""

    def fail(*_: Any) -> None:
        raise MemoryError("Unable to allocate 7 TiB")

    with make(dtype="float32") as buffer:
        with monkeypatch.context() as full:
            full.setattr("deepep_rt.backends.cuda.transfer.Result", fail)
            with pytest.raises(EPOutOfMemoryError, match=r"7 TiB.*; expected room.*Pass arrays on the GPU") as caught:
                buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
        assert caught.value.call_made
        buffer.dispatch(np.ones((10, 256), np.float32), np.zeros((10, 4), np.int32), num_worst_tokens=40)
        del caught  # its traceback holds memory of the fake driver
        gc.collect()


def test_memory_is_cleared_before_others_may_write_to_it(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda *_: asked.append([*fake.asked]) or True)
    with make():
        _, made = asked
    assert "synchronize" in made[len(made) - made[::-1].index("fill") :]


@pytest.mark.parametrize(("on_timeout", "limit_s"), [("raise", 30.0), ("mask", 1.0)])
def test_how_long_destroy_waits(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, on_timeout: str, limit_s: float
) -> None:
    buffer, limits = make(on_timeout=on_timeout), []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, sound, what, timeout_s=None: limits.append(timeout_s) or sound)
    x, idx, _ = arguments(fake)
    seen = weakref.ref(x)
    with monkeypatch.context() as behind:
        behind.setattr(driver.CudaEvent, "done", lambda event: False)
        buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True)
        behind.setattr(buffer._backend.runtime.order, "end", lambda: SimpleNamespace(done=lambda: True, synchronize=lambda: None))
        order = buffer._backend.runtime.order
        buffer.destroy()
    del x
    gc.collect()
    assert limits == [limit_s]
    assert seen() is None, "nothing reads the arguments any more"
    del order


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_a_rank_that_does_not_destroy_its_buffer(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, on_timeout: str
) -> None:
    """It is named; the memory stays, as nobody can give it back alone."""
    buffer, start = make(on_timeout=on_timeout, timeout_s=0.2), time.monotonic()
    monkeypatch.setattr(_Communicator, "Irecv", lambda self, word, peer, tag: SimpleNamespace(Test=lambda: peer != 2))
    monkeypatch.setattr("deepep_rt.backends.cuda.backend._MIN_DESTROY_TIMEOUT_S", 0.0)
    if on_timeout == "raise":
        with pytest.raises(
            EPTimeoutError, match=r"expected all ranks to destroy their Buffer.*for rank 2, which did not arrive"
        ) as caught:
            buffer.destroy()
        assert caught.value.peer == 2
    else:
        with pytest.warns(UserWarning, match=r"for rank 2, which did not arrive.*The memory of this Buffer stays allocated"):
            buffer.destroy()
    assert time.monotonic() - start < 3
    assert BASE not in fake.freed
    buffer.destroy()


def test_events_outlive_the_buffer(fake: FakeGpu, make: Any) -> None:
    """They do not look at memory that is gone."""
    buffer = make()
    event = buffer.dispatch(*arguments(fake), num_worst_tokens=40).event
    page = buffer._backend.runtime.page
    buffer.destroy()
    ctypes.memset(page.ptr, 0xFF, Layout(buffer.config).status_page.num_bytes)  # somebody else's by now
    event.synchronize()


def test_parting_from_ranks(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back only where nothing went wrong; the other ranks are told in any case."""
    said: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, sound, what, timeout_s=None: said.append(sound) or sound)

    def fail(*_: Any) -> None:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    buffer = make()
    monkeypatch.setattr(buffer._backend.runtime.order, "synchronize", fail)
    with pytest.raises(EPUnavailableError):
        buffer.destroy()
    make().destroy(in_touch=False)
    with pytest.raises(KeyError), make():
        raise KeyError
    buffer = make(low_latency=True)
    buffer.mask_rank(2)
    buffer.destroy()
    assert (said, fake.freed.count(BASE)) == ([True, True, False] * 4, 0)  # when it is made, and in the end
    said.clear()
    make().destroy()
    assert (said, fake.freed.count(BASE)) == ([True, True, True], 1)


def test_a_rank_that_an_error_throws_out(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why, and who waits for it stops waiting, on the host and on the GPU."""
    pytest.importorskip("mpi4py.MPI")
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: written.append((ptr, value)))
    buffer = make(timeout_s=60.0)
    ranks = buffer._backend.comm
    with pytest.raises(KeyError), buffer:
        raise KeyError("mine")
    assert ranks.said == "KeyError: 'mine'"
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


@pytest.mark.parametrize("wait", ["synchronize", "destroy"])
def test_a_time_out_is_raised_while_the_callers_own_work_goes_on(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """What the caller has queued behind the call may wait for the lost rank for ever, as NCCL does."""
    buffer = make()
    buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    monkeypatch.setattr(driver.CudaEvent, "done", lambda event: False)
    buffer._backend.runtime.page.timed_out.value = 1
    with pytest.raises(EPTimeoutError):
        getattr(buffer, wait)()
    buffer.destroy()


def test_waiting_while_the_stream_is_captured(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside of the graph can wait for it: the Buffer ends, and its memory, which calls may be using, stays."""
    buffer = make()
    buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: True)
    for wait in (buffer.synchronize, buffer.destroy):
        with pytest.raises(EPInputError, match="Wait until the capture has ended"):
            wait()
    assert BASE not in fake.freed
    with pytest.raises(EPDestroyedError):
        buffer.synchronize()


def test_a_rank_that_leaves_others_that_mask(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their low-latency calls go on without it."""
    with make(on_timeout="mask", low_latency=True) as buffer:
        backend = buffer._backend
        backend.comm.incoming_notice, start = "ValueError: no batch", time.monotonic()
        end = SimpleNamespace(done=lambda: time.monotonic() > start + 0.5, synchronize=lambda: None)
        monkeypatch.setattr(backend.runtime.order, "end", lambda: end)
        buffer.synchronize()
        buffer.low_latency_dispatch(*arguments(fake)[:2])


@pytest.mark.parametrize(
    ("module", "name", "parts_before"),
    [(symmetric, "load", 0), (driver, "allocate_pinned", 1), (jit, "load", 1), (LowLatency, "clear_inboxes", 1)],
)
def test_a_rank_that_cannot_make_its_part(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, parts_before: int
) -> None:
    """The others hear of it, and what was taken by then is given back."""
    said: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: said.append(mine) or mine)
    taken, given = (("allocate", "allocate_pinned"), ("free", "free_pinned"))

    def fail(*_: Any) -> None:
        raise EPCacheError("the folder is full")

    with monkeypatch.context() as broken:
        broken.setattr(module, name, fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert said == [True] * parts_before + [False] + [True] * parts_before, "in the end, to give memory back together"
    assert (BASE in fake.freed) == bool(parts_before)
    assert sum(map(fake.asked.count, taken)) == sum(map(fake.asked.count, given))
    for last in (1, 2):
        said.clear()
        monkeypatch.setattr(
            Consensus, "all_ok", lambda self, mine, what, limit=None, last=last: said.append(mine) or len(said) != last
        )
        with pytest.raises(EPUnavailableError, match="another rank"):
            make(low_latency=True)
        assert said == [True] * (2 * last - 1)
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: said.append(mine) or mine)
    monkeypatch.setattr(symmetric.SymmetricMemory, "is_of_several_buffers", True)
    said.clear()
    fake.freed.clear()
    with monkeypatch.context() as broken:
        broken.setattr(jit, "load", fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert (said, BASE in fake.freed) == ([True, False, False], False), "ranks of other Buffers have made theirs of it"
    make(low_latency=True)


def test_a_gpu_that_is_busy_with_other_work(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a call may take begins when the GPU comes to it, and the host says for what it waits until then."""
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GRACE_S", 0.0)
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._WARNING_PERIOD_S", 0.2)
    with make(timeout_s=0.1) as buffer:
        page, start = buffer._backend.runtime.page, time.monotonic()

        def run() -> None:
            if time.monotonic() > start + 0.5:
                page.mailbox["num_recv"], page.started.value = 7, 1
            if time.monotonic() > start + 0.55:
                page.counted.value = 1

        monkeypatch.setattr("deepep_rt.backends.cuda.monitor.os.sched_yield", run)
        with pytest.warns(UserWarning, match=r"rank 0: the GPU has not started this dispatch after 0 s") as said:
            assert buffer.dispatch(*arguments(fake)).recv_x.shape == (7, 256)
        assert len(said) == 2
        page.started.value = 1
        yields = "deepep_rt.backends.cuda.monitor.os.sched_yield"
        monkeypatch.setattr(yields, lambda: setattr(page.counted, "value", not page.started.value))
        buffer.dispatch(*arguments(fake)), "the start of the call before is not taken for this one's"


def test_a_gpu_that_is_stuck(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GRACE_S", 0.1)
    buffer = make(timeout_s=0.1)
    fake.on_launch = lambda call: setattr(buffer._backend.runtime.page.started, "value", 1)
    with pytest.raises(EPTimeoutError, match=r"routing kernel has run for 0\.2 s, and reports neither"):
        buffer.dispatch(*arguments(fake))
    buffer.destroy()


def test_a_gpu_that_has_failed(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier work, perhaps of another library, has ended all work: the call's kernel will not start."""

    def fail() -> int:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("deepep_rt.backends.cuda.monitor._GPU_CHECK_PERIOD_S", 0.1)
    buffer = make()
    monkeypatch.setattr(driver, "free_bytes", fail)
    with pytest.raises(EPUnavailableError, match="ILLEGAL_ADDRESS"):
        buffer.dispatch(*arguments(fake))
    buffer.destroy()


def test_the_end(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    x, idx, weights = arguments(fake)
    sent = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
    buffer.destroy()
    assert BASE in fake.freed
    assert buffer.destroy() is None
    for call in (sent.hook, lambda: buffer.dispatch(x, idx, weights), buffer.synchronize):
        with pytest.raises(EPDestroyedError):
            call()


def test_results_that_nobody_had_looked_at(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        back = buffer.combine(Array(fake, "bfloat16", 8, 256), sent.handle)
        soon = buffer.low_latency_dispatch(x, idx)
    for look in (lambda: sent.recv_x, lambda: back.x, lambda: soon.num_recv_tokens_per_expert):
        with pytest.raises(EPDestroyedError, match=r"Access result arrays before destroy\(\)"):
            look()
