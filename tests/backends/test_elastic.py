"""Buffers with slots: ranks leave, join and are left out. Ranks are threads of this process. tests/soak/test_kills.py kills processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deepep_rt import (
    Buffer,
    EPAsleepError,
    EPConfigError,
    EPEvictedError,
    EPInputError,
    EPPeerLostError,
    EPTimeoutError,
    EPUnavailableError,
)
from deepep_rt.arrays.host_memory import Result
from deepep_rt.arrays.view import Framework
from deepep_rt.buffer import backend_of
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.results import LowLatencyHandle

SLOTS, LOCAL, HIDDEN = 4, 2, 64
SIZES: dict[str, Any] = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=2, num_experts=SLOTS * LOCAL, dtype="float32")
SIZES |= dict(backend="host", max_ranks=SLOTS, low_latency=True)


class Ranks:
    """The Buffers of some ranks, each with a thread of its own."""

    def __init__(self, address: str, num_ranks: int, **settings: Any) -> None:
        self.address, self.settings = address, {**SIZES, "timeout_s": 20.0, "rendezvous": f"{address}/test", **settings}
        host, port = address.rsplit(":", 1)

        def make(rank: int) -> Buffer:
            return Buffer(StoreCommunicator(StoreClient(host, int(port)), "start", rank, num_ranks), **self.settings)

        self.buffers: dict[int, Buffer] = dict(enumerate(together([lambda rank=rank: make(rank) for rank in range(num_ranks)])))

    def on(self, ranks: Any, call: Callable[[Buffer], Any]) -> list[Any]:
        """Make a call on some ranks at the same time. Return the results, or the exceptions."""
        return together([lambda rank=rank: call(self.buffers[rank]) for rank in ranks])

    def admit_one(self, rank: int, done: threading.Event | None = None) -> tuple[int, ...]:
        """Call `admit` until a process comes, or `done`."""
        buffer = self.buffers[rank]
        while not (new := buffer.admit()) and not (done is not None and done.wait(0.01)):
            pass
        return new

    def join(self, members: Any, **settings: Any) -> Any:
        """Let a process join while the members admit until it has come."""
        done = threading.Event()

        def apply() -> Any:
            try:
                return Buffer.join(**{**self.settings, **settings})
            finally:
                done.set()

        joined, *found = together([apply, *(lambda rank=rank: self.admit_one(rank, done) for rank in members)])
        if isinstance(joined, Buffer):
            self.buffers[found[0][0]] = joined
        return joined


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads. Return the results, or the exceptions."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def address() -> Iterator[str]:
    server = StoreServer()
    server.serve_in_thread()
    yield server.address
    server.close()


def step(buffer: Buffer) -> None:
    """Make calls of both modes, and compare all numbers."""
    rng = np.random.default_rng(buffer.members)
    x = rng.integers(-4, 5, (8, HIDDEN)).astype(np.float32)
    idx = rng.integers(-1, SLOTS * LOCAL, (8, 2))
    present = (idx >= 0) & np.isin(idx // LOCAL, buffer.members)
    sent = buffer.dispatch(x, idx)
    copies = np.array([len(set(row[kept] // LOCAL)) for row, kept in zip(idx, present, strict=True)])
    assert np.array_equal(buffer.combine(sent.recv_x, sent.handle).x, x * copies[:, None])
    weights = (2.0 ** rng.integers(-1, 2, idx.shape)).astype(np.float32)
    rows = buffer.low_latency_dispatch(x.astype("bfloat16"), idx, use_fp8=False)
    out = buffer.low_latency_combine(rows.recv_x, idx, weights, rows.handle).x
    assert np.array_equal(out.astype(np.float32), x * (weights * present).sum(1, keepdims=True))


def test_members_leave_join_and_take_other_slots(address: str) -> None:
    ranks = Ranks(address, 3)
    assert ranks.on(range(3), lambda b: (b.members, step(b))) == [((0, 1, 2), None)] * 3
    left = ranks.on(range(3), lambda b: b.shrink([1]) if b is ranks.buffers[1] else b.shrink())
    assert left == [(0, 2)] * 3
    assert ranks.buffers[1].is_asleep
    with pytest.raises(EPAsleepError):
        ranks.buffers[1].dispatch(np.ones((1, HIDDEN), np.float32), np.array([[0, 1]]))
    assert ranks.on((0, 2), step) == [None] * 2
    back = together([ranks.buffers[1].wake, *(lambda rank=rank: ranks.admit_one(rank) for rank in (0, 2))])
    assert back == [None, (1,), (1,)]
    assert ranks.on(range(3), lambda b: (b.members, step(b))) == [((0, 1, 2), None)] * 3
    assert ranks.on((0, 2), lambda b: b.shrink([1])) == [(0, 2)] * 2
    ranks.buffers.pop(1).destroy(in_touch=False)
    assert isinstance(ranks.join((0, 2)), Buffer)
    assert sorted(ranks.buffers) == [0, 1, 2]
    assert isinstance(ranks.join((0, 1, 2), slot=3), Buffer)
    assert ranks.on(range(4), lambda b: (b.members, step(b))) == [((0, 1, 2, 3), None)] * 4
    assert ranks.on((0, 3), lambda b: (b.shrink([1, 2]), step(b))) == [((0, 3), None)] * 2
    assert [type(error) for error in ranks.on((1, 2), lambda b: b.shrink())] == [EPEvictedError] * 2
    for buffer in ranks.buffers.values():
        buffer.destroy(in_touch=False)


def test_a_rank_that_is_lost_while_all_sleep(address: str) -> None:
    """`wake` names it, and `shrink` wakes the others. A rank that has left by itself stays asleep."""
    ranks = Ranks(address, 3, timeout_s=1.0)
    assert ranks.on(range(3), lambda b: b.sleep()) == [None] * 3
    assert [type(error) for error in ranks.on((0, 2), lambda b: b.admit())] == [EPAsleepError] * 2
    found = ranks.on((0, 2), lambda b: b.wake())
    assert all(isinstance(error, EPTimeoutError) and error.peer == 1 for error in found), found
    assert all(ranks.buffers[rank].is_asleep for rank in (0, 2))
    assert ranks.on((0, 2), lambda b: (b.shrink([1]), b.is_asleep, step(b))) == [((0, 2), False, None)] * 2
    assert isinstance(ranks.on((1,), lambda b: b.shrink())[0], EPEvictedError)
    left = ranks.on((0, 2), lambda b: b.shrink([2]) if b is ranks.buffers[2] else b.shrink())
    assert left == [(0,)] * 2
    with pytest.raises(EPAsleepError):
        ranks.buffers[2].shrink()
    for buffer in ranks.buffers.values():
        buffer.destroy(in_touch=False)


def test_a_store_that_ends() -> None:
    """Messages of the host backend go over it, too."""
    server = StoreServer()
    server.serve_in_thread()
    ranks = Ranks(server.address, 2)
    assert ranks.on((0, 1), step) == [None] * 2
    server.close()
    for call in (step, lambda b: b.admit(), lambda b: b.shrink([1 - b.rank])):
        assert [type(error) for error in ranks.on((0, 1), call)] == [EPUnavailableError] * 2
    for buffer in ranks.buffers.values():
        buffer.destroy(in_touch=False)


def test_a_lost_rank_is_named_and_a_silent_one_too(address: str) -> None:
    ranks = Ranks(address, 3, timeout_s=1.0)
    found = ranks.on((0, 1), step)
    assert all(isinstance(error, EPTimeoutError) and error.peer == 2 for error in found)
    assert ranks.on((0, 1), lambda b: (b.shrink(), step(b))) == [((0, 1), None)] * 2
    ranks.buffers[0]._backend.lose(1, "a test says so")
    (error,) = ranks.on((0,), step)
    assert isinstance(error, EPPeerLostError)
    assert (error.ranks, error.peer) == ((1,), 1)
    assert "a test says so" in str(error)


def exported(buffer: Buffer, handle: Any) -> Callable[[], Any]:
    """Return a function that makes the handle again from an array, as compiled functions of JAX and PyTorch keep it."""
    tables = backend_of(buffer).tables
    if isinstance(handle, LowLatencyHandle):
        words = Result((tables.num_low_latency_words,), "int32").view(Framework())
        tables.save_low_latency(handle, words)
        return lambda: tables.load_low_latency(words, handle.num_tokens, handle.has_weights, handle.capacity)
    words = Result((tables.num_words if handle.layout == "token" else tables.num_expert_words,), "int32").view(Framework())
    tables.save(handle, words, None)
    return lambda: tables.load(words, handle.num_tokens, handle.num_recv_rows, handle.layout)


def test_what_is_of_an_older_generation(address: str) -> None:
    ranks = Ranks(address, 2)
    x, idx = np.ones((1, HIDDEN), np.float32), np.array([[0, 1]])

    def before(buffer: Buffer) -> Any:
        sent = buffer.dispatch(x, idx)
        rows = buffer.low_latency_dispatch(x.astype("bfloat16"), idx, use_fp8=False)
        open_call = buffer.low_latency_dispatch(x.astype("bfloat16"), idx, use_fp8=False, return_recv_hook=True)
        by_expert = buffer.dispatch(x, idx, layout="expert", num_worst_tokens=16)
        kept = [exported(buffer, handle) for handle in (sent.handle, by_expert.handle, rows.handle)]
        for again, result in zip(kept[:2], (sent, by_expert), strict=True):
            buffer.combine(result.recv_x, again())
        buffer.low_latency_combine(rows.recv_x, idx, np.ones((1, 2), np.float32), kept[2]())
        return sent, rows, by_expert, kept, open_call

    kept = ranks.on((0, 1), before)
    assert isinstance(ranks.join((0, 1)), Buffer)
    sent, rows, by_expert, again, open_call = kept[0]
    buffer = ranks.buffers[0]
    weights = np.ones((1, 2), np.float32)
    for call in (
        lambda: buffer.combine(sent.recv_x, sent.handle),
        lambda: buffer.dispatch(x, handle=sent.handle),
        lambda: buffer.low_latency_combine(rows.recv_x, idx, weights, rows.handle),
        lambda: buffer.combine(sent.recv_x, again[0]()),
        lambda: buffer.dispatch(x, handle=again[0]()),
        lambda: buffer.combine(by_expert.recv_x, again[1]()),
        lambda: buffer.low_latency_combine(rows.recv_x, idx, weights, again[2]()),
        open_call.hook,
    ):
        with pytest.raises(EPInputError, match="generation"):
            call()
    assert np.array_equal(sent.recv_x, np.ones_like(sent.recv_x))
    assert ranks.on(range(3), step) == [None] * 3


def test_who_may_not_join(address: str) -> None:
    ranks = Ranks(address, 2, timeout_s=5.0)
    error = ranks.join((0, 1), num_slots=3)
    assert isinstance(error, EPConfigError)
    assert "num_slots: the members have 2, this process 3" in str(error)
    with pytest.raises(EPTimeoutError, match="free slot"):
        Buffer.join(**ranks.settings, slot=0, limit_s=0.2)
    with pytest.raises(EPTimeoutError, match="admit"):
        Buffer.join(**ranks.settings, limit_s=0.2)
    assert ranks.on((0, 1), lambda b: (b.admit(), b.members, step(b))) == [((), (0, 1), None)] * 2


def test_the_store_that_a_rank_starts(address: str) -> None:
    ranks = Ranks(address, 2, rendezvous=None)
    place = ranks.buffers[1].rendezvous
    assert place == ranks.buffers[0].rendezvous
    assert not place.startswith(address)
    ranks.settings["rendezvous"] = place
    assert isinstance(ranks.join((0, 1)), Buffer)
    assert ranks.on(range(3), lambda b: (b.members, step(b))) == [((0, 1, 2), None)] * 3


def test_ranks_that_disagree_on_slots(address: str) -> None:
    host, port = address.rsplit(":", 1)

    def make(rank: int, most: int | None) -> Any:
        comm = StoreCommunicator(StoreClient(host, int(port)), f"start {most}", rank, 2)
        Buffer(comm, **{**SIZES, "timeout_s": 20.0, "rendezvous": most and address, "max_ranks": most if rank else SLOTS})

    for most in (None, 2):
        found = together([lambda rank=rank, most=most: make(rank, most) for rank in range(2)])
        assert all(isinstance(error, EPConfigError) and "max_ranks=" in str(error) for error in found), found


def test_wrong_arguments(address: str) -> None:
    host, port = address.rsplit(":", 1)
    comm = StoreCommunicator(StoreClient(host, int(port)), "start", 0, 1)
    for wrong in ({"rendezvous": "nowhere"}, {"rendezvous": 1}, {"max_ranks": 0}):
        with pytest.raises(EPConfigError, match="; expected"):
            Buffer(comm, **{**SIZES, "rendezvous": address, **wrong})
    plain = Buffer(comm, **{**SIZES, "max_ranks": None})
    assert (plain.members, plain.rendezvous) == ((0,), None)
    for method in (plain.shrink, plain.admit):
        with pytest.raises(EPInputError, match="max_ranks"):
            method()
    with pytest.raises(EPConfigError, match="rendezvous"):
        Buffer.join("auto", **SIZES)


def test_the_log_says_why_a_rank_is_masked(address: str, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(address, 2, on_timeout="mask")
    buffer = ranks.buffers[0]
    backend_of(buffer).lose(1, "its process has ended")
    with caplog.at_level("WARNING", "deepep_rt"):
        buffer.low_latency_dispatch(np.ones((1, HIDDEN), ml_dtypes.bfloat16), np.array([[0, 2]]), use_fp8=False)
    assert buffer.query_masked_ranks() == [1]
    (text,) = [record.getMessage() for record in caplog.records if "excludes" in record.getMessage()]
    assert "rank 0 excludes rank 1 from low-latency calls from now on, because the process of rank 1 has ended" in text
    for each in ranks.buffers.values():
        each.destroy(in_touch=False)


def test_all_members_leave(address: str) -> None:
    ranks = Ranks(address, 2)
    assert ranks.on((0, 1), lambda b: b.shrink([b.rank])) == [()] * 2
    assert all(buffer.is_asleep for buffer in ranks.buffers.values())
