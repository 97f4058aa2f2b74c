"""`CallOrder`: which stream waits for which event. The fake driver records requests."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from deepep_rt import EPInputError
from deepep_rt.arrays import frameworks
from deepep_rt.backends.cuda.stream_order import CallOrder
from deepep_rt.cuda import captured_graph, driver
from deepep_rt.cuda.stream_tracking import Allocation

OWN, CALLERS, OTHER, DEVICE = 3, 11, 12, 4


class Driver:
    """Numbers events in the order of their construction. A wait is (stream, event), or (stream, "all of", other stream)."""

    def __init__(self) -> None:
        self.waits: list[tuple] = []
        self.records: list[tuple[int, int]] = []  # (event, stream)
        self.captures: dict[int, int] = {}  # stream -> number of the capture
        self.finished: set[int] = set()
        self.destroyed: set[int] = set()  # events
        self.num_events = 0
        self.ended_graphs: set[int] = set()  # a stream that was captured in each


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()

    class Event:
        def __init__(self, stream: int) -> None:
            fake.num_events += 1
            self.handle = fake.num_events
            self.record(stream)

        def record(self, stream: int) -> None:
            fake.records.append((self.handle, stream))

        def __del__(self) -> None:
            fake.destroyed.add(self.handle)

        def done(self) -> bool:
            return self.handle in fake.finished

        def synchronize(self) -> None:
            fake.waits.append(("host", self.handle))

    def wait_event(stream: int, event: int) -> None:
        assert event not in fake.destroyed, "the driver would read freed memory as an event"
        fake.waits.append((stream, event))

    def wait_stream(stream: int, other: int) -> None:
        fake.waits.append((stream, "all of", other))
        if other in fake.captures:
            fake.captures[stream] = fake.captures[other]

    class GraphEnd:
        def __init__(self, stream: int) -> None:
            self.stream = stream

        def has_come(self) -> bool:
            return self.stream in fake.ended_graphs

    monkeypatch.setattr(driver, "CudaEvent", Event)
    monkeypatch.setattr(captured_graph, "GraphEnd", GraphEnd)
    monkeypatch.setattr(driver, "acquire_stream", lambda: OWN)
    monkeypatch.setattr(driver, "capture_id", fake.captures.get)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream in fake.captures)
    monkeypatch.setattr(driver, "wait_event", wait_event)
    monkeypatch.setattr(driver, "wait_stream", wait_stream)
    monkeypatch.setattr(driver, "synchronize", lambda stream: fake.waits.append(("host", "all of", stream)))
    return fake


@pytest.fixture
def callers() -> SimpleNamespace:
    """The caller's library."""

    def current_stream(device: int) -> int:
        assert device == DEVICE
        return CALLERS

    return SimpleNamespace(current_stream=current_stream)


@pytest.fixture
def order(fake: Driver, callers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> CallOrder:
    monkeypatch.setattr(frameworks, "framework_of", lambda x, what: {"x": callers}[what])
    return CallOrder(DEVICE, nullcontext(), lambda: fake.waits.append("check"))


def call(order: CallOrder, arguments: Any = (), own: Any = (), **how: Any) -> Any:
    """Make a whole call. The driver records its waits."""
    settings: dict[str, Any] = {"async_finish": False, "previous_event": None, "stream": None}
    made = order.begin(None, *{**settings, **how}.values())
    order.enqueue_waits(made)
    order.record_end(made, arguments, own)
    return made


def test_calls_on_the_callers_stream_do_not_wait(order: CallOrder, fake: Driver) -> None:
    call(order)
    fake.waits.clear()
    for _ in range(3):
        assert call(order).stream == CALLERS
    assert fake.waits == []
    assert fake.records == [(1, OWN)], "a call records no event, which would cost the host 2 us"


def test_another_stream_waits_for_the_last_call(order: CallOrder, fake: Driver) -> None:
    for _ in range(2):
        call(order)
    fake.waits.clear()
    assert call(order, stream=OTHER).stream == OTHER
    assert fake.waits == [(OTHER, 2)]
    assert fake.records[1:3] == [(2, CALLERS), (1, OTHER)]


def test_calls_on_two_streams_do_not_wait_for_work_after_calls(order: CallOrder, fake: Driver) -> None:
    """Such as the experts of a micro-batch. Each call on either stream records the event."""
    for stream in (None, OTHER, OTHER, None):
        call(order, stream=stream)
    assert [stream for event, stream in fake.records if event == 1] == [OWN, OTHER, OTHER, CALLERS]
    count = len(fake.records)
    assert order.end().handle == 1
    assert len(fake.records) == count, "`end` records nothing"
    fake.waits.clear()
    call(order, stream=OTHER)
    assert fake.waits == [(OTHER, 1)]


def test_the_end_of_all_calls(order: CallOrder, fake: Driver) -> None:
    """`end` changes nothing, so another thread may call it during a call."""
    assert order.end().handle == 1
    call(order)
    for number in (2, 3):
        assert order.end().handle == number
        assert fake.records[-1] == (number, CALLERS)
    call(order)
    fake.waits.clear()
    call(order, stream=OTHER)
    assert fake.waits == [(OTHER, 4)]
    assert (4, CALLERS) in fake.records, "after the call in between"


def test_end_during_the_first_call_on_a_second_stream(order: CallOrder, fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread calls `end` before the shared event is recorded for the first time. That event covers no call yet."""
    call(order)
    asked, record = [], driver.CudaEvent.record

    def record_and_ask(event: Any, stream: int) -> None:
        if event.handle == 1:
            monkeypatch.setattr(driver.CudaEvent, "record", record)
            asked.append(order.end().handle)
        record(event, stream)

    monkeypatch.setattr(driver.CudaEvent, "record", record_and_ask)
    call(order, stream=OTHER)
    assert len(asked) == 1
    assert (asked[0], CALLERS) in fake.records


def test_the_last_stream_is_captured_now(order: CallOrder, fake: Driver) -> None:
    """An event on it would make a waiting stream a part of the graph."""
    call(order)
    fake.captures.update({CALLERS: 5})
    for ask in (order.end, lambda: call(order, stream=OTHER)):
        with pytest.raises(EPInputError, match=r"captured in a CUDA graph.*Wait until the capture has ended"):
            ask()
    assert fake.records == [(1, OWN)]


def test_an_async_call_waits_for_its_arguments(order: CallOrder, fake: Driver) -> None:
    call(order)
    fake.waits.clear()
    assert call(order, async_finish=True).stream == OWN
    assert fake.waits == [(OWN, "all of", CALLERS), (OWN, 2)]


@pytest.mark.parametrize("event", [77, SimpleNamespace(cuda_event=77), SimpleNamespace(ptr=77)])
def test_an_event_replaces_the_wait_for_the_callers_stream(order: CallOrder, fake: Driver, event: Any) -> None:
    call(order, async_finish=True)
    fake.waits.clear()
    call(order, async_finish=True, previous_event=event)
    assert fake.waits == [(OWN, 77)]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_event_of_another_buffer(order: CallOrder, fake: Driver, is_async: bool) -> None:
    """The call waits for it, with and without a CUDA event."""
    event = CallOrder(DEVICE, nullcontext(), lambda: None).event(
        call(order, async_finish=is_async, stream=None if is_async else OTHER)
    )
    call(order, async_finish=True)
    fake.waits.clear()
    call(order, async_finish=True, previous_event=event)
    assert fake.waits == [(OWN, event.handle) if is_async else (OWN, "all of", OTHER)]


def test_arguments_of_async_calls_are_held_until_the_end(order: CallOrder, fake: Driver) -> None:
    class Array:
        dropped: list[int] = []  # noqa: RUF012

        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            self.dropped.append(self.number)

    call(order, [Array(1)])
    assert Array.dropped == [1], "on the caller's stream, its allocator keeps the order"
    call(order, [Array(2)], async_finish=True)
    call(order, [Array(3)], own=[Array(0)], async_finish=True)
    assert Array.dropped.pop() == 0, "the Buffer's pools wait for readers of their memory"
    assert Array.dropped == [1]
    fake.finished.add(3)  # the event after the first of the two
    call(order)
    assert Array.dropped == [1, 2]
    order.drop_arguments()
    assert Array.dropped == [1, 2, 3]


def test_captured_calls_are_ordered_within_their_capture(order: CallOrder, fake: Driver) -> None:
    call(order)
    fake.waits.clear()
    fake.captures.update({CALLERS: 5, OTHER: 5})
    call(order)
    assert fake.waits == [], "a capture cannot wait for work outside of it"
    last = fake.num_events
    call(order, stream=OTHER)
    assert fake.waits == [(OTHER, last)]
    fake.captures.update({CALLERS: 6})
    fake.waits.clear()
    call(order)
    assert fake.waits == [], "another capture"
    fake.captures.clear()
    call(order)
    assert fake.waits == [], "the last call outside of captures was on this stream"


def test_a_captured_call_waits_for_the_last_one(order: CallOrder, fake: Driver) -> None:
    fake.captures.update({CALLERS: 5, OTHER: 5})
    call(order)
    call(order, stream=OTHER)
    last, stream = fake.records[-1]
    fake.waits.clear()
    call(order)
    assert (stream, fake.waits) == (OTHER, [(CALLERS, last)])


class Memory(Allocation):
    """Memory of the Buffer that the capture has not acquired."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        super().__init__(CALLERS, None)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_graph_keeps_the_memory_that_it_reads(order: CallOrder, fake: Driver, is_async: bool) -> None:
    """Until no replay can follow. The next capture, or the end of the Buffer's work, then drops it."""
    for number, end in enumerate((lambda: call(order), lambda: order.synchronize(driver.CudaEvent(OWN)), order.drop_arguments)):
        memory = Memory()
        seen = weakref.ref(memory)
        fake.captures.update({CALLERS: number})
        fake.ended_graphs.clear()
        call(order, own=[memory], async_finish=is_async)
        del memory
        fake.captures.clear()
        order.synchronize(order.end())
        call(order)
        assert seen() is not None, "replays read it"
        fake.ended_graphs.update({CALLERS, OWN})
        if number == 0:
            fake.captures.update({CALLERS: 100})
        end()
        assert seen() is None


def test_a_graph_does_not_keep_what_its_capture_has_acquired(order: CallOrder, fake: Driver) -> None:
    """Later calls of captures may get it, in the order of streams. Otherwise a step of many layers would have no memory."""
    fake.captures.update({CALLERS: 5})
    made = order.begin(None, False, None, None)
    order.enqueue_waits(made)
    memory, callers_memory = Memory(), type("Callers", (), {})()
    memory.acquired_in(made.capture)
    seen = [weakref.ref(memory), weakref.ref(callers_memory)]
    order.record_end(made, (), [memory, callers_memory])
    del memory, callers_memory
    assert [ref() for ref in seen] == [None, None]


@pytest.mark.parametrize("end", [lambda order: order.synchronize(order.end()), CallOrder.drop_arguments])
def test_arguments_in_a_capture(order: CallOrder, fake: Driver, end: Any) -> None:
    """They are held until the host has waited for all calls, or the next capture."""

    class Argument: ...

    held = [Argument()]
    seen = weakref.ref(held[0])
    fake.captures.update({CALLERS: 5})
    call(order, held.pop(), async_finish=True)
    assert seen() is not None
    end(order)
    assert seen() is None


def test_an_async_call_joins_the_callers_capture(order: CallOrder, fake: Driver) -> None:
    fake.captures.update({CALLERS: 5})
    first = call(order, async_finish=True)
    assert first.capture.number == 5, "the wait for the caller's stream makes it a part of the capture"
    last = fake.num_events
    fake.waits.clear()
    call(order)
    assert fake.waits == [(CALLERS, last)]


def test_an_event_makes_the_current_stream_wait(order: CallOrder, fake: Driver, callers: SimpleNamespace) -> None:
    event = order.event(call(order, async_finish=True))
    fake.waits.clear()
    callers.current_stream = lambda device: OTHER
    event.wait()
    callers.current_stream = lambda device: None
    event.wait()
    assert fake.waits == [(OTHER, event.handle), (0, event.handle)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_library_without_streams(order: CallOrder, fake: Driver, callers: SimpleNamespace, is_async: bool) -> None:
    """The call waits for none: the library fills its arrays before it gives them away."""
    callers.current_stream = lambda device: None
    call(order)
    fake.waits.clear()
    assert call(order, async_finish=is_async).stream == OWN
    assert fake.waits == []


def test_an_event_does_not_hold_the_previous_one(order: CallOrder) -> None:
    class Previous:
        cuda_event = 77

    previous = Previous()
    seen = weakref.ref(previous)
    event = order.event(call(order, async_finish=True, previous_event=previous))
    del previous
    assert event.handle
    assert seen() is None, "otherwise a chain of calls would hold all events"


def test_more_work_of_a_call(order: CallOrder, fake: Driver) -> None:
    """The next call on another stream waits for the last work."""
    call(order, stream=OTHER)
    made = call(order)
    count = len(fake.records)
    order.move_end(made)
    assert fake.records[count:] == [(1, CALLERS)]


def test_the_event_of_a_call_on_the_callers_stream(order: CallOrder, fake: Driver) -> None:
    event = order.event(call(order))
    assert event.handle is None
    fake.waits.clear()
    event.wait()
    assert fake.waits == []
    event.wait(OTHER)
    assert fake.waits == [(OTHER, "all of", CALLERS)]
    fake.waits.clear()
    event.synchronize()
    assert fake.waits == [("host", "all of", CALLERS), "check"]


def test_the_event_of_an_async_call(order: CallOrder, fake: Driver) -> None:
    event = order.event(call(order, async_finish=True))
    assert fake.records[-1] == (event.handle, OWN)
    fake.waits.clear()
    event.wait()
    event.wait(OTHER)
    assert fake.waits == [(CALLERS, event.handle), (OTHER, event.handle)]
    count = len(fake.records)
    event.record_again()
    assert fake.records[count:] == [(event.handle, OWN)], "a hook has queued the rest"


def test_synchronize(order: CallOrder, fake: Driver) -> None:
    call(order)
    fake.waits.clear()
    order.synchronize(order.end())
    assert fake.waits == [("host", 2), ("host", "all of", OWN), "check"]


def test_per_thread_default_streams(order: CallOrder, fake: Driver, callers: SimpleNamespace) -> None:
    """All threads use the same handle for different streams. So calls of two threads could not be ordered."""
    call(order, stream=2)
    assert fake.records == [(1, OWN), (1, 2), (2, 2)]
    refused = []

    def elsewhere(stream: int | None) -> None:
        with pytest.raises(EPInputError, match="per-thread default stream"):
            order.begin(None, False, None, stream)
        refused.append(stream)

    for stream in (2, 2, 7):
        assert order.begin(None, False, None, stream).stream == stream
    callers.current_stream = lambda device: 2
    assert order.begin(None, False, None, None).stream == 2
    for stream in (None, 7):
        thread = threading.Thread(target=elsewhere, args=(stream,))
        thread.start()
        thread.join()
    assert refused == [None, 7]


def test_threads_that_share_streams(order: CallOrder, fake: Driver) -> None:
    call(order)
    thread = threading.Thread(target=call, args=(order,), kwargs={"stream": OTHER})
    thread.start()
    thread.join()
    assert (1, OTHER) in fake.records
