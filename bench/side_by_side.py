"""Repeat work on several streams at once, and time each kind of work while all of them run.

A load is work that repeats, one unit after the other. Between its units there are marks: times in seconds. A unit counts if it began and
ended while all loads ran. So units at the ends of a run, which had the machine for themselves, do not count.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_DEPTH = 4  # units that wait in a stream, so that it always has work


@dataclass
class Load:
    """Work that repeats.

    Args:
        queue: Queue a unit. On the host backend: do it.
        units: The number of units. None: as many as it takes until all other loads are done.
        stream: The CuPy stream of the work, or None on the host backend.
    """

    queue: Callable[[], Any]
    units: int | None
    stream: Any = None


def mean_seconds(marks: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean seconds of a unit of each load while all loads ran, from the marks of each. Infinity: no unit of it counts."""
    begin, end = max(times[0] for times in marks), min(times[-1] for times in marks)
    found = []
    for times in marks:
        inside = [mark for mark in times if begin <= mark <= end]
        found.append((inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else math.inf)
    return found


def run(loads: Sequence[Load]) -> list[float]:
    """Run all loads at once, until those with a number of units are done. Return what `mean_seconds` does."""
    return mean_seconds(_marks_on_gpu(loads) if loads[0].stream is not None else _marks_on_host(loads))


# --- on a GPU ----------------------------------------------------------------------------------------------------------------------


class _Queue:
    """A stream with a load, and events between its units."""

    def __init__(self, load: Load) -> None:
        import cupy

        self._make_event, self._load, self._num_done = cupy.cuda.Event, load, 0
        self.events = [self._record()]

    def _record(self) -> Any:
        event = self._make_event()
        event.record(self._load.stream)
        return event

    @property
    def num_queued(self) -> int:
        return len(self.events) - 1

    def is_full(self) -> bool:
        """Return whether enough units wait."""
        while self._num_done < self.num_queued and self.events[self._num_done + 1].done:
            self._num_done += 1
        return self.num_queued - self._num_done >= _DEPTH

    def fill(self) -> None:
        """Queue a unit if there are too few."""
        is_wanted = self._load.units is None or self.num_queued < self._load.units
        if is_wanted and not self.is_full():
            with self._load.stream:
                self._load.queue()
            self.events.append(self._record())

    def is_done(self) -> bool:
        return self._load.units is None or (self.num_queued >= self._load.units and self.events[-1].done)


def _marks_on_gpu(loads: Sequence[Load]) -> list[list[float]]:
    import cupy

    start = cupy.cuda.Event()
    start.record(loads[0].stream)
    queues = [_Queue(load) for load in loads]
    while not all(queue.is_done() for queue in queues):
        for queue in queues:
            queue.fill()
    for queue in queues:
        queue.events[-1].synchronize()
    return [[cupy.cuda.get_elapsed_time(start, event) / 1e3 for event in queue.events] for queue in queues]


# --- on the host -------------------------------------------------------------------------------------------------------------------


def _marks_on_host(loads: Sequence[Load]) -> list[list[float]]:
    """Run loads without a number of units in threads. The others take turns in this one, which alone may make calls of a Buffer."""
    marks: list[list[float]] = [[] for _ in loads]
    is_over = threading.Event()

    def repeat(load: Load, times: list[float]) -> None:
        times.append(time.perf_counter())
        while not is_over.is_set():
            load.queue()
            times.append(time.perf_counter())

    with contextlib.ExitStack() as threads:
        threads.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-4)  # by default a thread that computes keeps Python's lock for 5 ms
        threads.callback(is_over.set)
        for load, times in zip(loads, marks, strict=True):
            if load.units is None:
                thread = threading.Thread(target=repeat, args=(load, times), daemon=True)
                thread.start()
                threads.callback(thread.join)
                threads.callback(is_over.set)
                while not times:
                    time.sleep(1e-4)
            else:
                times.append(time.perf_counter())
        for i in range(max(load.units or 0 for load in loads)):
            for load, times in zip(loads, marks, strict=True):
                if load.units is not None and i < load.units:
                    load.queue()
                    times.append(time.perf_counter())
    return marks
