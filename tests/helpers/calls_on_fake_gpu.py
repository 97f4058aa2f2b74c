"""Calls of every kind on a fake GPU, so that a test asks its question of each of them."""

from __future__ import annotations

import contextlib
import functools
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import Array, FakeCommunicator, FakeGpu, routed

from deepep_rt.cuda import driver


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Memory has to be free without the garbage collector, which runs at any time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def collected(fake: FakeGpu) -> Iterator[None]:
    """Errors that a Buffer keeps hold the frames that raised them. Free their memory before the fake driver is gone."""
    yield
    fake.on_launch = None
    gc.collect()


@pytest.fixture(params=[0, 2])
def old_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the GPU of one rank be too old for FP8. Return that rank."""
    found = [(1 << 50, "sm_80" if rank == request.param else "sm_90", None) for rank in range(4)]
    monkeypatch.setattr(FakeCommunicator, "allgather", lambda self, value: found if value == found[1] else [value] * 4)
    return request.param


@contextlib.contextmanager
def busy_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the GPU have run no call yet. Events are known by the stream on which they were recorded last."""
    with monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        yield busy


def without(launch: SimpleNamespace, *names: str) -> dict[str, Any]:
    """Return the members of a launch, but for some."""
    return {name: value for name, value in vars(launch).items() if name not in names}


def received(result: Any) -> Any:
    """Call the hook of a result, if it has one."""
    if getattr(result, "hook", None):
        result.hook()
    return result


class Calls(ABC):
    """Ordinary and prepared calls of one kind, with the arrays that they take. `how`: options of all calls."""

    name: str
    sizes: dict[str, Any]  # of a Buffer that makes these calls
    places: tuple[str, ...]  # members of a launch that tell where a dispatch writes
    for_dispatch: frozenset[str]  # options that only a dispatch has
    for_combine: frozenset[str]
    x: Array
    idx: Array
    weights: Array

    def __init__(self, fake: FakeGpu, buffer: Any, **how: Any) -> None:
        self.fake, self.buffer, self.how, config = fake, buffer, how, buffer.config
        self.x = Array(fake, "bfloat16", 10, config.hidden)
        self.idx, self.weights = (Array(fake, dtype, 10, config.num_topk) for dtype in ("int64", "float32"))

    @abstractmethod
    def y(self, dtype: str = "bfloat16") -> Array:
        """Make rows for a combine."""

    @abstractmethod
    def given(self) -> tuple[Array, ...]:
        """Return the arrays that a prepared call takes first."""

    @abstractmethod
    def prepare(self, **options: Any) -> Any: ...

    @abstractmethod
    def dispatch(self, **options: Any) -> Any: ...

    @abstractmethod
    def combine(self, handle: Any, **options: Any) -> Any: ...

    def split(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of an ordinary dispatch, and of an ordinary combine."""
        return (
            {name: value for name, value in options.items() if name not in self.for_combine},
            {name: value for name, value in options.items() if name not in self.for_dispatch},
        )


class ThroughputCalls(Calls):
    """Dispatches with a handle, and combines. Rows are by token, or by expert."""

    name, sizes = "PreparedThroughput", {}
    places = ("recv_x_offset", "num_recv")
    for_dispatch = frozenset({"topk_idx", "topk_weights", "x_scales"})
    for_combine = frozenset({"y_weights", "bias", "compress"})

    def __init__(self, fake: FakeGpu, buffer: Any, num_rows: int = 24, layout: str = "token", **how: Any) -> None:
        super().__init__(fake, buffer, **how)
        self.num_rows, before = num_rows, fake.on_launch
        fake.on_launch = routed(buffer, num_rows, [3] * 8)
        self.handle = buffer.dispatch(self.x, self.idx, self.weights, layout=layout).handle
        fake.on_launch = before
        fake.pop_launches()

    def y(self, dtype: str = "bfloat16") -> Array:
        return Array(self.fake, dtype, self.num_rows, self.buffer.config.hidden)

    def given(self) -> tuple[Array, ...]:
        return (self.x,)

    def prepare(self, **options: Any) -> Any:
        return self.buffer.prepare_throughput(self.x, self.handle, **options, **self.how)

    def dispatch(self, **options: Any) -> Any:
        return self.buffer.dispatch(self.x, handle=self.handle, **options, **self.how)

    def route(self, **options: Any) -> Any:
        """Dispatch without a handle, by default to a fixed number of rows."""
        return self.buffer.dispatch(self.x, self.idx, self.weights, **{"num_worst_tokens": self.num_rows, **options}, **self.how)

    def combine(self, handle: Any, *, y: Array | None = None, y_weights: Array | None = None, **options: Any) -> Any:
        return self.buffer.combine(y or self.y(), handle, topk_weights=y_weights, **options, **self.how)


class LowLatencyCalls(Calls):
    name, sizes = "PreparedLowLatency", {"low_latency": True}
    places = ("recv_x", "handle")
    for_dispatch = frozenset({"use_fp8", "round_scale", "use_ue8m0", "cumulative_local_expert_recv_stats"})
    for_combine = frozenset({"allow_multiple_reduction", "reduce", "compress"})

    def __init__(self, fake: FakeGpu, buffer: Any, num_rows: int = 0, **how: Any) -> None:
        super().__init__(fake, buffer, **how)

    def y(self, dtype: str = "bfloat16") -> Array:
        config = self.buffer.config
        num_local = config.num_experts // config.num_ranks
        return Array(self.fake, dtype, num_local, config.num_ranks * config.num_max_tokens_per_rank, config.hidden)

    def given(self) -> tuple[Array, ...]:
        return self.x, self.idx, self.weights

    def prepare(self, **options: Any) -> Any:
        return self.buffer.prepare_low_latency(self.x, self.idx, self.weights, **options, **self.how)

    def dispatch(self, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, **options, **self.how)

    def combine(self, handle: Any, *, y: Array | None = None, **options: Any) -> Any:
        return self.buffer.low_latency_combine(y or self.y(), self.idx, self.weights, handle, **options, **self.how)


KINDS: tuple[type[Calls], ...] = (ThroughputCalls, LowLatencyCalls)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["throughput", "low latency"])


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def calls(request: pytest.FixtureRequest, fake: FakeGpu, make: Any) -> Iterator[Calls]:
    """Calls of each kind, in a Buffer of the default sizes."""
    with make(**request.param.sizes) as buffer:
        made = request.param(fake, buffer)
        yield made
    vars(made).clear()  # pytest holds it until the fake GPU is gone


@pytest.fixture
def quick(fake: FakeGpu, make: Any) -> Iterator[LowLatencyCalls]:
    """Low-latency calls, in a Buffer of the default sizes."""
    with make(low_latency=True) as buffer:
        made = LowLatencyCalls(fake, buffer)
        yield made
    vars(made).clear()


Prepare = Callable[..., Callable[[], Any]]
"""Makes what a call needs, from a fake GPU, a Buffer and options of the call. Returns the function that makes the call."""


def _dispatch(**options: Any) -> Prepare:
    return lambda fake, buffer, **how: functools.partial(ThroughputCalls(fake, buffer, **how).route, **options)


def _with_handle(call: str, layout: str, **options: Any) -> Prepare:
    def prepare(fake: FakeGpu, buffer: Any, **how: Any) -> Callable[[], Any]:
        calls = ThroughputCalls(fake, buffer, layout=layout, **how)
        y = calls.y()
        return calls.dispatch if call == "dispatch" else lambda: calls.combine(calls.handle, y=y, **options)

    return prepare


def _prepared(call: str) -> Prepare:
    def prepare(fake: FakeGpu, buffer: Any, **how: Any) -> Callable[[], Any]:
        calls = ThroughputCalls(fake, buffer, **how)
        return getattr(calls.prepare(y=calls.y()), call)

    return prepare


def _low_latency(call: str, is_prepared: bool, part: str) -> Prepare:
    """`part`: "whole", or the half of a call with a hook."""

    def prepare(fake: FakeGpu, buffer: Any, **how: Any) -> Callable[[], Any]:
        calls, hook = LowLatencyCalls(fake, buffer, **how), dict(return_recv_hook=part != "whole")
        y = calls.y()
        if is_prepared:
            step = calls.prepare(y=y, **hook)
            dispatch, combine = step.dispatch, step.combine
        else:

            def dispatch() -> Any:
                return calls.dispatch(**hook)

            def combine() -> Any:
                return calls.combine(sent.handle, y=y, **hook)

        make_call = dispatch
        if call == "combine":
            sent, make_call = received(dispatch()), combine
        if part != "receiving half":
            return make_call
        return make_call().hook

    return prepare


CALLS: dict[str, Prepare] = {
    "dispatch": _dispatch(num_worst_tokens=None),
    "dispatch to FP8": _dispatch(num_worst_tokens=None, use_fp8=True),
    "dispatch by expert": _dispatch(num_worst_tokens=None, layout="expert"),
    "dispatch of a fixed size": _dispatch(),
    "dispatch of a fixed size to FP8": _dispatch(use_fp8=True),
    "dispatch of a fixed size by expert": _dispatch(layout="expert"),
    "dispatch of a fixed size by expert to FP8": _dispatch(layout="expert", use_fp8=True),
    "dispatch with a handle": _with_handle("dispatch", "token"),
    "dispatch by expert with a handle": _with_handle("dispatch", "expert"),
    "combine": _with_handle("combine", "token"),
    "combine compressed": _with_handle("combine", "token", compress="log10"),
    "combine by expert": _with_handle("combine", "expert"),
    "combine by choice": _with_handle("combine", "expert", reduce="topk"),
    "prepared dispatch": _prepared("dispatch"),
    "prepared combine": _prepared("combine"),
    **{
        f"low-latency {call}, {'prepared, ' * is_prepared}{part}": _low_latency(call, is_prepared, part)
        for call in ("dispatch", "combine")
        for is_prepared in (False, True)
        for part in ("whole", "sending half", "receiving half")
    },
}
"""Every kind of call. Those without "low-latency" in the name need no Buffer with low_latency=True."""

NEED_COUNTS = ("dispatch", "dispatch to FP8", "dispatch by expert")
"""Calls that wait for counts, and reserve memory for the most rows until they have come."""
