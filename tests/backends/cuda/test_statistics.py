"""How the CUDA backend reads what kernels count, on a fake GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_gpu import BASE, OWN_STREAM, FakeGpu, arguments, fake, make, routed

from deepep_rt import EPInputError, EPUnavailableError
from deepep_rt.cuda import driver
from deepep_rt.kernels import structs

__all__ = ["fake", "make"]


def counting(buffer: Any, fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the numbers that the GPU has counted, as an array of CallStatistics that a test may write to."""
    layout = buffer._backend.runtime.layout
    first = buffer._backend.runtime.state + layout.local.offsets["statistics"]
    memory = np.zeros(layout.local.num_bytes - layout.local.offsets["statistics"], np.uint8)

    def copy(to: int, source: int, num_bytes: int, stream: int) -> None:
        assert source == first
        ctypes.memmove(to, memory.ctypes.data, num_bytes)
        fake.note("copy_async")

    monkeypatch.setattr(driver, "copy_async", copy)
    dtype = structs.CallStatistics.dtype(layout.constants)
    return memory[: 4 * dtype.itemsize].view(dtype)


def test_numbers_of_the_gpu(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(statistics=True)
    found = counting(buffer, fake, monkeypatch)
    found["calls"], found["waits"][:, 3] = [1, 2, 3, 4], 5_000_000
    counted = buffer.statistics()
    kinds = counted.dispatch, counted.combine, counted.low_latency_dispatch, counted.low_latency_combine
    assert [kind.calls for kind in kinds] == [1, 2, 3, 4]
    assert counted.combine.wait_s == (0.0, 0.0, 0.0, 0.005)
    assert counted.rows_by_expert == (0,) * 8


def test_reading_waits_for_no_call(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is the only request on the stream that the host waits for."""
    streams = iter([OWN_STREAM, 77])
    monkeypatch.setattr(driver, "acquire_stream", lambda: next(streams))
    buffer = make(statistics=True)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(driver, "copy_async", lambda *arguments: asked.append(("copy", arguments[-1])))
    monkeypatch.setattr(driver, "synchronize", lambda stream: asked.append(("synchronize", stream)))
    buffer.statistics()
    assert asked == [("copy", 77), ("synchronize", 77)]


def test_without_statistics_nothing_is_allocated(
    fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, counting_one = make(), make(statistics=True)
    assert plain._backend._statistics is None
    sizes = [one._backend.runtime.layout.local.num_bytes for one in (plain, counting_one)]
    assert sizes[0] < sizes[1]
    constants = {kernel.name: constants for kernel, constants in list(fake.constants.values())[:3]}
    assert {numbers["kHasStatistics"] for numbers in constants.values()} == {0}
    with pytest.raises(EPInputError, match=r"statistics=False; expected .* Make it with statistics=True"):
        plain.statistics()


def test_captures_are_refused(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture would hold one reading, and replays would not repeat it. The thread that writes files reads all the same."""
    buffer = make(statistics=True)
    x, idx, _ = arguments(fake)
    monkeypatch.setattr(driver, "capture_id", lambda stream: 5)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: True)
    buffer.statistics()  # no call yet
    buffer.dispatch(x, idx, num_worst_tokens=10)
    with pytest.raises(EPInputError, match=r"statistics\(\) during the capture of a CUDA graph; expected it outside"):
        buffer.statistics()
    buffer._backend.counters(during_capture=True)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: False)
    buffer.statistics()


def test_the_last_numbers_outlive_the_memory(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(statistics=True)
    backend, found = buffer._backend, counting(buffer, fake, monkeypatch)
    found["calls"] = 7
    buffer.destroy()
    assert BASE in fake.freed
    found["calls"] = 8
    assert backend.counters(during_capture=True).calls[0].calls == 7
    assert backend.counters().calls[0].calls == 7


def test_a_signal_handler_destroys_the_buffer_during_a_reading(
    fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading ends, and nothing that it uses is freed."""
    buffer = make(statistics=True)
    pinned = buffer._backend._statistics._copy
    monkeypatch.setattr(driver, "copy_async", lambda *_: buffer.destroy())
    buffer.statistics()
    assert pinned not in fake.freed
    assert BASE in fake.freed
    other = make(statistics=True)
    pinned = other._backend._statistics._copy
    other.destroy()
    assert pinned in fake.freed


def test_a_gpu_that_has_failed(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(statistics=True)

    def fails(*_: object) -> None:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(driver, "copy_async", fails)
    with pytest.raises(EPUnavailableError, match="LAUNCH_FAILED"):
        buffer.statistics()
    buffer.destroy()


def test_use_of_the_pool(fake: FakeGpu, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(statistics=True, num_slots=2)
    fake.on_launch = routed(buffer, 20, [3] * 8)
    x, idx, _ = arguments(fake)
    empty = buffer.statistics().pool
    assert (empty.bytes_in_use, empty.most_bytes_in_use, empty.results_copied) == (0, 0, 0)
    worst = buffer.config.num_max_recv_tokens
    sent = [buffer.dispatch(x, idx, num_worst_tokens=worst) for _ in range(3)]
    full = buffer.statistics().pool
    assert full.bytes_in_use == full.most_bytes_in_use > full.capacity_bytes * 0.9
    assert full.results_copied == 1, "the third has no room"
    del sent
    dropped = buffer.statistics().pool
    assert dropped.bytes_in_use < full.bytes_in_use
    assert dropped.most_bytes_in_use == full.most_bytes_in_use
