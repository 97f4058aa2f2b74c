"""Memory that a captured CUDA graph uses: no other call gets it while the graph can be replayed. On a fake GPU that records requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import Array, FakeGpu, arguments, fake, make

from deepep_rt.cuda import driver

__all__ = ["fake", "make"]

MEMBERS = {
    "route": ["handle"],
    "dispatch": ["handle", "recv_x_offset", "num_recv"],
    "combine": ["handle", "out"],
    "combine_choices": ["handle", "out", "positions"],
    "expert_positions": ["positions"],
    "expand_rows": ["positions", "out_x"],
    "sum_expert_rows": ["positions", "out"],
    "add_choice": ["x"],
    "fp8_encode": ["out"],
    "ll_dispatch": ["handle", "recv_x"],
    "ll_combine": ["handle", "out"],
}
"""What kernels read and write in memory of the Buffer that calls take from a pool."""

NODES = dict(ranks_per_node=2)


def places(fake: FakeGpu) -> set[tuple[str, int]]:
    """Return where the last launches read and write."""
    found = set()
    for call in fake.pop_launches():
        for name in MEMBERS[call.kernel.removesuffix("_nodes")]:
            kind = "rows" if name == "recv_x_offset" else "other"  # an offset, or an address
            if getattr(call, name):
                found.add((kind, getattr(call, name)))
    return found


class Calls:
    """Calls of every kind, with the handles that they make or get."""

    def __init__(self, fake: FakeGpu, buffer: Any, rows: int = 40, **how: Any) -> None:
        self.buffer, self.rows, self.how = buffer, rows, how
        self.x, self.idx, self.weights = arguments(fake)
        self.y, self.quick_y = Array(fake, "bfloat16", rows, 256), Array(fake, "bfloat16", 8, 256, 256)

    def dispatch(self, handle: Any = None, **options: Any) -> Any:
        if handle is not None:
            return self.buffer.dispatch(self.x, handle=handle, **options, **self.how)
        return self.buffer.dispatch(self.x, self.idx, self.weights, num_worst_tokens=self.rows, **options, **self.how)

    def combine(self, handle: Any, **options: Any) -> Any:
        return self.buffer.combine(self.y, handle, **options, **self.how)

    def by_expert(self, handle: Any = None) -> Any:
        return self.dispatch(handle, layout="expert")

    def quick(self) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, **self.how)

    def quick_combine(self, handle: Any) -> Any:
        return self.buffer.low_latency_combine(self.quick_y, self.idx, self.weights, handle, **self.how)

    def prepared(self, handle: Any) -> Any:
        step = self.buffer.prepare_throughput(self.x, handle, y=self.y, **self.how)
        quick = self.buffer.prepare_low_latency(self.x, self.idx, self.weights, **self.how)
        return SimpleNamespace(run=lambda: (step.dispatch(), step.combine(), quick.dispatch(), quick.combine(self.quick_y)))


Case = tuple[Callable[[Calls], Any], Callable[[Calls, Any], Any]]
"""What the program does before the capture, and in the capture with the result of that."""

CASES: dict[str, Case] = {
    "combine": (lambda calls: calls.dispatch().handle, Calls.combine),
    "dispatch with a handle": (lambda calls: calls.dispatch().handle, Calls.dispatch),
    "combine by expert": (lambda calls: calls.by_expert().handle, Calls.combine),
    "choices": (lambda calls: calls.by_expert().handle, lambda calls, handle: calls.combine(handle, reduce="topk")),
    "dispatch by expert with a handle": (lambda calls: calls.by_expert().handle, Calls.by_expert),
    "low latency": (lambda calls: calls.quick().handle, Calls.quick_combine),
    "prepared": (lambda calls: calls.prepared(calls.dispatch().handle), lambda calls, step: step.run()),
    "both": (
        lambda calls: None,
        lambda calls, _: (calls.combine(calls.dispatch().handle), calls.quick_combine(calls.quick().handle)),
    ),
    "both by expert": (lambda calls: None, lambda calls, _: calls.combine(calls.by_expert().handle)),
    "FP8": (lambda calls: None, lambda calls, _: calls.dispatch(use_fp8=True)),
}


def run_all(calls: Calls) -> None:
    """Make calls of all kinds, and keep nothing."""
    sent, by_expert = calls.dispatch(), calls.by_expert()
    for handle in (sent.handle, by_expert.handle):
        calls.combine(handle)
    calls.combine(by_expert.handle, reduce="topk")
    calls.dispatch(sent.handle)
    calls.by_expert(by_expert.handle)
    calls.dispatch(use_fp8=True)
    if calls.buffer.config.low_latency:
        calls.quick_combine(calls.quick().handle)
    calls.prepared(sent.handle).run()


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
    before, in_capture = CASES[kind]
    with make(low_latency=True, num_slots=4, **sizes) as buffer:
        calls = Calls(fake, buffer, async_finish=is_async)
        work = functools.partial(in_capture, calls, before(calls))
        fake.pop_launches()
        capture(monkeypatch, 7, work)
        del work
        captured = places(fake)
        assert captured
        for _ in range(3):
            run_all(calls)
            buffer.synchronize()
        assert not places(fake) & captured


def test_captures_do_not_use_up_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a capture, and captures, share memory, which no other call gets."""
    with make(low_latency=True, num_slots=2) as buffer:
        calls = Calls(fake, buffer, rows=256)  # which fill a slot of the pool

        def step() -> None:
            for _ in range(10):
                calls.combine(calls.dispatch().handle)
                calls.quick_combine(calls.quick().handle)

        for number in range(5):
            capture(monkeypatch, number, step)
        captured = places(fake)
        assert len(captured) < 12
        sent = [calls.dispatch() for _ in range(2)]
        assert len(fake.copies) == 1, "the graphs have a slot of the pool"
        del sent


def test_a_graph_that_reads_its_own_memory_is_launched_fast(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA launches a graph slowly that shall tell its end. Only what it holds of other calls needs that."""
    with make(low_latency=True) as buffer:
        calls = Calls(fake, buffer)
        known = calls.dispatch(), calls.quick()

        def step() -> None:
            calls.combine(calls.dispatch().handle)
            calls.combine(calls.by_expert().handle)
            calls.quick_combine(calls.quick().handle)

        capture(monkeypatch, 7, step)
        assert fake.num_graph_ends == 0
        for number, (work, handle) in enumerate(((calls.combine, known[0].handle), (calls.quick_combine, known[1].handle)), 1):
            capture(monkeypatch, 7 + number, lambda work=work, handle=handle: (work(handle), work(handle)))
            assert fake.num_graph_ends == number
