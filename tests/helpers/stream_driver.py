"""A fake of the driver's streams and events, and an array library with a current stream in each thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deepep_rt import EPOutOfMemoryError, EPUnavailableError
from deepep_rt.arrays.view import Framework, View
from deepep_rt.cuda import driver, stream_tracking
from deepep_rt.cuda.slots import Slots

DEVICE = 3


class FakeDriver:
    """Record driver calls. A wait is (stream, other stream, number of tasks of the other stream that it waits for)."""

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.waits: list[tuple[int, int, int]] = []
        self.capturing: set[int] = set()
        self.captures: dict[int, int] = {}  # stream -> number of its capture, if it is not 5
        self.ended: set[int] = set()  # streams whose work is done
        self.destroyed: set[int] = set()
        self.num_events = 0
        self.num_allocations = 0
        self.is_out_of_memory = False
        self.freed: list[int] = []

    def work(self, stream: int) -> None:
        self.queued[stream] = self.queued.get(stream, 0) + 1


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Replace the driver's streams and events by a fake."""
    fake = FakeDriver()

    class Event:
        def __init__(self, stream: int) -> None:
            if stream in fake.destroyed:
                raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_INVALID_HANDLE")
            fake.num_events += 1
            self.handle = (stream, fake.queued.get(stream, 0))

        def done(self) -> bool:
            return self.handle[0] in fake.ended

    class Context:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(driver, "CudaEvent", Event)
    monkeypatch.setattr(driver, "CurrentContext", Context)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream in fake.capturing)
    monkeypatch.setattr(driver, "capture_id", lambda stream: fake.captures.get(stream, 5) if stream in fake.capturing else None)
    monkeypatch.setattr(driver, "wait_event", lambda stream, handle: fake.waits.append((stream, *handle)))
    monkeypatch.setattr(
        driver, "wait_stream", lambda stream, other: fake.waits.append((stream, other, fake.queued.get(other, 0)))
    )

    def allocate(num_bytes: int) -> int:
        if fake.is_out_of_memory:
            raise EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")
        fake.num_allocations += 1
        return 1000 * fake.num_allocations + num_bytes

    monkeypatch.setattr(driver, "allocate", allocate)
    stream_tracking._deferred.clear()
    return fake


def only_slots(fake: FakeDriver, count: int) -> Slots:
    """Make slots, and let the GPU have no memory for more."""
    fake.is_out_of_memory = False
    slots = Slots(64, count)
    fake.is_out_of_memory = True
    return slots


class Library(Framework):
    """An array library; each thread has its own current stream."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.asked = 0

    def current_stream(self, device: int) -> int:
        assert device == DEVICE
        self.asked += 1
        return self.streams.get(threading.get_ident(), 0)

    def work_on(self, stream: int) -> None:
        self.streams[threading.get_ident()] = stream


def array_of(allocation: Any, library: Framework) -> Any:
    """Make an array of the library. It has the only reference to the allocation."""
    return View(4096, (1,), "int32", DEVICE, allocation, library).to_framework()
