"""Memory that a captured CUDA graph uses: no other call gets it while the graph can be replayed. On a fake GPU that records requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, NEED_COUNTS, LowLatencyCalls, Prepare, ThroughputCalls
from fake_gpu import FakeGpu, fake, make, routed

from deepep_rt.cuda import driver

__all__ = ["fake", "make"]

MEMBERS = {
    "route": ["handle"],
    "dispatch": ["handle", "recv_x_offset", "num_recv"],
    "combine": ["handle", "out"],
    "combine_choices": ["handle", "out", "positions", "rows"],
    "expert_positions": ["positions"],
    "expand_rows": ["positions", "out_x"],
    "sum_expert_rows": ["positions", "out"],
    "list_choices": ["positions", "rows", "first"],
    "fp8_encode": ["out"],
    "ll_dispatch": ["handle", "recv_x"],
    "ll_dispatch_opaque": ["handle", "recv_x"],
    "ll_combine": ["handle", "out"],
}
"""What kernels read and write in memory of the Buffer that calls take from a pool."""

NODES = dict(ranks_per_node=2)


def places(fake: FakeGpu) -> set[tuple[str, int]]:
    """Return where the last launches read and write."""
    found = set()
    for call in fake.pop_launches():
        for name in MEMBERS[call.kernel.replace("_nodes", "").removesuffix("_log10")]:
            kind = "rows" if name == "recv_x_offset" else "other"  # an offset, or an address
            if getattr(call, name, 0):
                found.add((kind, getattr(call, name)))
    return found


WHOLE = {name: call for name, call in CALLS.items() if "half" not in name}
CASES: dict[str, Prepare] = {
    **{name: call for name, call in WHOLE.items() if name not in NEED_COUNTS},
    "both": lambda fake, buffer, **how: functools.partial(run_both, *calls_of(fake, buffer, **how), ("token", "expert")),
}


def calls_of(fake: FakeGpu, buffer: Any, rows: int = 24, **how: Any) -> tuple[ThroughputCalls, LowLatencyCalls]:
    return ThroughputCalls(fake, buffer, rows, **how), LowLatencyCalls(fake, buffer, **how)


def run_both(calls: ThroughputCalls, quick: LowLatencyCalls, layouts: tuple[str, ...] = ("token",)) -> None:
    """Make a dispatch and a combine of both kinds, and keep nothing."""
    for layout in layouts:
        calls.combine(calls.route(layout=layout).handle)
    quick.combine(quick.dispatch().handle)


def capture(monkeypatch: pytest.MonkeyPatch, number: int, work: Callable[[], Any]) -> None:
    with monkeypatch.context() as capturing:
        capturing.setattr(driver, "capture_id", lambda stream: number)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        work()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("sizes", [{}, NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", CASES)
def test_no_other_call_gets_the_memory_of_a_graph(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any], is_async: bool
) -> None:
    """The program drops all results and handles after the capture. Replays read the routing of the capture, and write its results."""
    with make(low_latency=True, num_slots=4, **sizes) as buffer:
        fake.on_launch = routed(buffer, 24, [3] * 8)
        work = CASES[kind](fake, buffer, async_finish=is_async)
        fake.pop_launches()
        capture(monkeypatch, 7, work)
        del work
        captured = places(fake)
        assert captured
        for _ in range(3):
            for call in WHOLE.values():
                call(fake, buffer, async_finish=is_async)()
            buffer.synchronize()
        assert not places(fake) & captured


def test_async_calls_of_a_capture_share_no_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait orders reuse after readers in a parallel branch."""
    with make(low_latency=True) as buffer:
        calls, quick = calls_of(fake, buffer, async_finish=True)
        sent = quick.dispatch()
        addresses = [calls.handle.routing.ptr, sent.recv_x.ptr]

        def step() -> None:
            calls.combine(calls.handle)
            calls.handle = None
            for _ in range(10):
                addresses.append(calls.route().handle.routing.ptr)
                addresses.append(quick.dispatch().recv_x.ptr)
                addresses.append(quick.combine(sent.handle).x.ptr)

        capture(monkeypatch, 7, step)
        assert len(set(addresses)) == len(addresses)


def test_captures_do_not_use_up_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a capture, and captures, share memory, which no other call gets."""
    with make(low_latency=True, num_slots=2) as buffer:
        calls, quick = calls_of(fake, buffer, 256)  # which fill a slot of the pool

        def step() -> None:
            for _ in range(10):
                run_both(calls, quick)

        for number in range(5):
            capture(monkeypatch, number, step)
        captured = places(fake)
        assert len(captured) < 12
        sent = [calls.route() for _ in range(2)]
        assert len(fake.copies) == 1, "the graphs have a slot of the pool"
        del sent


def test_sums_of_choices_share_memory_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(**NODES) as buffer:
        captured: list[set[tuple[str, int]]] = []
        calls = ThroughputCalls(fake, buffer, layout="expert")

        def step() -> None:
            for _ in range(2):
                calls.combine(calls.handle, reduce="topk")
                captured.append({("rows", call.rows) for call in fake.pop_launches() if call.kernel == "list_choices"})

        capture(monkeypatch, 7, step)
        assert captured[0] == captured[1]
        assert len(captured[0]) == 1


def test_a_graph_that_reads_its_own_memory_is_launched_fast(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA launches a graph slowly that shall tell its end. Only what it holds of other calls needs that."""
    with make(low_latency=True) as buffer:
        calls, quick = calls_of(fake, buffer)
        sent = quick.dispatch()
        capture(monkeypatch, 7, lambda: run_both(calls, quick, ("token", "expert")))
        assert fake.num_graph_ends == 0
        for number, (work, handle) in enumerate(((calls.combine, calls.handle), (quick.combine, sent.handle)), 1):
            capture(monkeypatch, 7 + number, lambda work=work, handle=handle: (work(handle), work(handle)))
            assert fake.num_graph_ends == number
