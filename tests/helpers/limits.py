"""Limits of time for tests, in seconds of an idle machine. On a busy machine, they last longer."""

from __future__ import annotations

import math
import os
import statistics
import time

VARIABLE = "TESTS_SLOWNESS"
"""Tells a program what the test that started it has measured, so that all of its ranks have the same limits."""

_WARM_UP_S = 0.02
_NOISE = 1.5  # other tests of the same run
_MOST = 30.0  # tests that wait for the end of a limit would take too long


def slowness() -> float:
    """Return how many times longer work takes now than on an idle machine: 1, or a larger whole number."""
    measured = statistics.median(_warm_up() for _ in range(3))
    return 1.0 if measured < _NOISE else min(float(math.ceil(measured)), _MOST)


def _warm_up() -> float:
    """Work for a moment of this thread's processor time, and return how many times longer that took."""
    start, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < _WARM_UP_S:
        pass
    return (time.perf_counter() - start) / _WARM_UP_S


def seconds(number: float, times: float | None = None) -> float:
    """Return a limit that is `number` seconds on an idle machine; `times`: a result of `slowness`, default: that of the starting test."""
    return round(number * (float(os.environ.get(VARIABLE, "1")) if times is None else times), 3)
