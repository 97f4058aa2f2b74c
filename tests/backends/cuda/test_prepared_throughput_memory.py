"""Memory and streams of prepared throughput calls, on a fake GPU that records requests."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import CALLERS_STREAM, OWN_STREAM, FakeGpu, _Library, arguments, fake, make
from prepared_on_fake_gpu import collected, handle_of, no_collection, rows_of_handle

from deepep_rt import EPInputError, EPOutOfMemoryError
from deepep_rt.cuda import driver

__all__ = ["collected", "fake", "make", "no_collection"]

pytestmark = pytest.mark.usefixtures("collected")


def test_results_stay_in_their_memory(fake: FakeGpu, make: Any) -> None:
    """Ordinary calls get other memory, also while the caller holds no result."""
    with make(num_slots=3) as buffer:
        handle, x = handle_of(fake, buffer), arguments(fake)[0]
        step = buffer.prepare_throughput(x, handle, y=rows_of_handle(fake))
        places = set()
        for _ in range(3):
            step.dispatch(), step.combine()
            prepared = fake.pop_launches()
            places.add((prepared[0].recv_x_offset, prepared[0].num_recv, prepared[1].out))
            buffer.dispatch(x, handle=handle), buffer.combine(rows_of_handle(fake), handle)
            ordinary = fake.pop_launches()
            assert not {ordinary[0].recv_x_offset, ordinary[0].num_recv, ordinary[1].out} & {*next(iter(places))}
        assert len(places) == 1


def test_memory_is_free_after_the_last_reference(fake: FakeGpu, make: Any, no_collection: None) -> None:
    """The results keep their memory, the object keeps all of it, and nothing else does."""
    with make(num_slots=1) as buffer:
        handle, pool = handle_of(fake, buffer), buffer._backend.throughput.results.pool
        x, y = arguments(fake)[0], rows_of_handle(fake)
        held = [weakref.ref(array) for array in (x, y)]
        step = buffer.prepare_throughput(x, handle)
        assert pool.used_bytes
        step.dispatch(), step.combine(y)
        step.combine(other := rows_of_handle(fake))
        del y
        assert [one() is None for one in held] == [False, True], "a new y lets the last one go"
        received = step.dispatch().recv_x
        del x, step, other
        assert held[0]() is None
        assert pool.used_bytes, "the caller still holds these rows"
        del received
        assert pool.used_bytes == 0


def test_a_full_pool(fake: FakeGpu, make: Any) -> None:
    """Rows that arrive cannot be copied in each call, so the preparation needs room, whatever `on_exhausted` says."""
    with make(num_slots=1, on_exhausted="copy") as buffer:
        handle, x = handle_of(fake, buffer, num_rows=256), arguments(fake)[0]  # as many as fit
        step = buffer.prepare_throughput(x, handle)
        with pytest.raises(EPOutOfMemoryError, match=r"no room for a result.*larger num_slots$"):
            buffer.prepare_throughput(x, handle)
        buffer.dispatch(x, handle=handle)  # this result is copied
        del step
        buffer.prepare_throughput(x, handle).dispatch()


def test_streams(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the caller's current stream, after calls on other streams, prepared or not."""
    with make() as buffer:
        handle, x = handle_of(fake, buffer), arguments(fake)[0]
        step = buffer.prepare_throughput(x, handle, y=rows_of_handle(fake))
        fake.waits.clear()
        first = step.dispatch()
        step.combine()
        assert fake.waits == []
        buffer.dispatch(x, handle=handle, stream=12)
        monkeypatch.setattr(_Library, "current_stream", lambda library, device: 13)
        fake.waits.clear()
        second = step.dispatch()
        assert (fake.pop_launches()[-1].stream, fake.waits) == (13, [(13, 5)])
        assert first.recv_x.dependency.stream == CALLERS_STREAM
        assert second.recv_x.dependency.stream == 13, "consumers wait for the stream of the last call"


def test_later_calls_wait_for_the_memory(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers on another stream may still use the memory when a call is prepared."""
    with make(num_slots=1) as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        handle, x = handle_of(fake, buffer, num_rows=256), arguments(fake)[0]  # as many as fit
        place = buffer.dispatch(x, handle=handle, stream=31).recv_x.ptr  # the caller's stream reads it
        fake.pop_launches()
        fake.waits.clear()
        step = buffer.prepare_throughput(x, handle, stream=32)
        assert (31, ("work of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        assert step.dispatch().recv_x.ptr == place
        assert fake.waits == [(32, ("work of", 31))], "after the wait that was queued on the stream of the last call"


def test_async_finish(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call waits for the caller's stream, the event is recorded at its end, and arguments live until then."""
    with make() as buffer, monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        x, y = arguments(fake)[0], rows_of_handle(fake)
        held = [weakref.ref(array) for array in (x, y)]
        handle = handle_of(fake, buffer)
        step = buffer.prepare_throughput(x, handle, y=y, async_finish=True)
        for call in (step.dispatch, step.combine) * 2:
            fake.waits.clear()
            recorded: list[Any] = []
            with busy.context() as records:
                records.setattr(driver.CudaEvent, "record", lambda event, stream, to=recorded: to.append((event, stream)))
                result = call()
            assert fake.waits[0] == (OWN_STREAM, ("all of", CALLERS_STREAM))
            assert recorded[-1] == (result.event._event, OWN_STREAM)
        assert not buffer._backend.runtime.order._arguments, "repeated calls hold their arguments once"
        del x, y, step, call, result
        assert all(one() is not None for one in held)
        busy.setattr(driver.CudaEvent, "done", lambda event: True)
        buffer.dispatch(arguments(fake)[0], handle=handle)
        assert all(one() is None for one in held)


def test_captures(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is prepared before a capture. A combine of new rows works there too, because it takes no memory."""
    with make() as buffer, monkeypatch.context() as capturing:
        handle, x = handle_of(fake, buffer), arguments(fake)[0]
        step = buffer.prepare_throughput(x, handle)
        capturing.setattr(driver, "capture_id", lambda stream: 7)
        capturing.setattr(driver, "is_capturing", lambda stream: True)
        with pytest.raises(EPInputError, match="Prepare the call before the capture"):
            buffer.prepare_throughput(x, handle)
        fake.waits.clear()
        step.dispatch()
        assert fake.waits == [], "a capture does not wait for work before it"
        fake.requests.clear()
        step.combine(rows_of_handle(fake))
        assert "allocate_async" not in fake.requests


def test_the_relay_is_woken(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch over nodes puts something."""
    with make(ranks_per_node=2) as buffer:
        step = buffer.prepare_throughput(arguments(fake)[0], handle_of(fake, buffer), y=rows_of_handle(fake))
        woken: list[int] = []
        monkeypatch.setattr(buffer._backend.runtime.network, "wake", lambda: woken.append(len(fake.launched)))
        step.dispatch(), step.combine()
        assert woken == [0, 1]
