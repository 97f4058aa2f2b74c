"""The throughput calls of the CUDA backend over several nodes, on a fake GPU that records requests."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import LowLatencyCalls, ThroughputCalls
from fake_gpu import BASE, Array, FakeGpu, arguments, fake, like, make, region, routed

from deepep_rt import EPOutOfMemoryError, EPTimeoutError, NetworkOptions
from deepep_rt.backends.cuda import network_memory, runtime
from deepep_rt.cuda import driver
from deepep_rt.kernels import nodes_layout

__all__ = ["fake", "make"]

RELAY = dict(ranks_per_node=2, network=NetworkOptions(transport="mpi"))


def test_rows_move_before_the_host_has_counts(fake: FakeGpu, make: Any) -> None:
    """With room for the most rows. Without it, the dispatch waits for the counts and takes what it needs."""
    with make(**RELAY, num_slots=1) as buffer:
        act, seen = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6]), []

        def on_launch(call: Any) -> None:
            seen.append(call.kernel)
            if call.kernel == ("dispatch_nodes" if len(kept) == 0 else "route_nodes"):
                act(SimpleNamespace(kernel="route_nodes", to_host=1))

        kept: list[Any] = []
        fake.on_launch = on_launch
        for _ in range(2):
            kept.append(buffer.dispatch(*arguments(fake)))
        assert seen == 2 * ["route_nodes", "dispatch_nodes"]
        first, second = [call for call in fake.pop_launches() if call.kernel == "dispatch_nodes"]
        assert (first.capacity, second.capacity) == (buffer.config.num_max_recv_tokens, 30)


def test_a_chunk_fits_its_slot(fake: FakeGpu, make: Any) -> None:
    with make(**RELAY, hidden=7168) as buffer:
        for dtype, scale_words in (("bfloat16", 0), ("uint8", 56)):
            x, scales = Array(fake, dtype, 10, 7168), Array(fake, "float32", 10, scale_words) if scale_words else None
            buffer.dispatch(x, *arguments(fake)[1:], x_scales=scales, num_worst_tokens=40)
            dispatch = fake.pop_launches()[-1]
            nodes = buffer._backend.runtime.layout.nodes
            assert 1 <= dispatch.chunk_tokens <= 32
            assert dispatch.chunk_rows + dispatch.chunk_tokens * dispatch.row_bytes <= nodes.slot_bytes
            assert dispatch.chunk_scales + dispatch.chunk_tokens * dispatch.scale_bytes <= dispatch.chunk_rows
            assert dispatch.chunk_rows % 128 == 0


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_rows_of_a_result_stay_in_place(ranks_per_node: int, prepared: bool, fake: FakeGpu, make: Any) -> None:
    """Peers read them where they lie, unless they reach past the pool or no other rank of the node exists."""
    with make(**{**RELAY, "ranks_per_node": ranks_per_node}) as buffer:
        calls, landing, pool = ThroughputCalls(fake, buffer), region(buffer, "landing"), region(buffer, "pool")
        sent, num_bytes = calls.route(), calls.num_rows * buffer.config.row_bytes
        step = buffer.prepare_throughput(calls.x, sent.handle) if prepared else None
        fake.pop_launches()
        for first, in_place in (
            (sent.recv_x.ptr, True),
            (sent.recv_x.ptr + 16, True),
            (pool.stop - num_bytes, True),
            (pool.stop - num_bytes + 16, False),
            (pool.start - 16, False),
            (calls.y().ptr, False),
            (sent.recv_x.ptr, True),
        ):
            y = calls.y()
            y.ptr = first
            if step is None:
                buffer.combine(y, sent.handle)
            else:
                step.combine(y)
            (combine,) = fake.pop_launches()
            assert combine.y == first
            if in_place and ranks_per_node > 1:
                assert BASE + combine.exposed_offset == first
            else:
                assert BASE + combine.exposed_offset in landing
            assert BASE + combine.exposed_weights_offset in landing


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_sums_of_rows_by_expert_stay_in_place(ranks_per_node: int, fake: FakeGpu, make: Any) -> None:
    """They lie in the pool, while it has room. Afterwards nothing of the pool is in use."""
    with make(**{**RELAY, "ranks_per_node": ranks_per_node}) as buffer:
        calls = ThroughputCalls(fake, buffer, layout="expert")
        landing, results = region(buffer, "landing"), buffer._backend.throughput.results
        y = Array(fake, "bfloat16", calls.handle.num_recv_rows, buffer.config.hidden)
        used = results.pool.used_bytes
        for is_full in (False, True, False):
            others = [results.pool.allocate(4096, 0) for _ in range(1 if not is_full else results.pool.free_bytes // 4096)]
            buffer.combine(y, calls.handle)
            sums, combine = fake.pop_launches()
            assert combine.y == sums.out
            in_place = ranks_per_node > 1 and not is_full
            assert (BASE + combine.exposed_offset == sums.out) == in_place
            assert (BASE + combine.exposed_offset in landing) == (not in_place)
            others.clear()
        buffer.synchronize()
        assert results.pool.used_bytes == used


def test_calls_do_not_arrange_memory_anew(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of a chunk takes the host as long as half a call. Calls with known sizes have it."""
    with make(**RELAY) as buffer:
        calls = ThroughputCalls(fake, buffer)
        sent = calls.route()

        def both() -> None:
            buffer.dispatch(arguments(fake)[0], handle=sent.handle)
            buffer.combine(sent.recv_x, sent.handle)

        both()
        with monkeypatch.context() as patch:
            patch.setattr(nodes_layout, "arrange", None)
            both()


def test_calls_wake_the_relay(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []

    class Relay:
        def __init__(self, *_: object, node_size: int, transport: str) -> None:
            assert (node_size, transport) == (RELAY["ranks_per_node"], "mpi")

        def check(self) -> None: ...
        def close(self) -> bool:
            return True

        def wake(self) -> None:
            woken.append("wake")

    monkeypatch.setattr(network_memory, "start_relay", Relay)
    with make(**RELAY, low_latency=True) as buffer:
        calls, quick = ThroughputCalls(fake, buffer), LowLatencyCalls(fake, buffer)
        fake.on_launch = lambda call: woken.append(call.kernel)
        for call in (
            lambda: calls.combine(calls.route().handle),
            lambda: quick.combine(quick.dispatch().handle, return_recv_hook=True).hook(),
        ):
            woken.clear()
            call()
            kernels = woken[1::2]
            assert woken[::2] == ["wake"] * len(kernels)
            assert kernels in (
                ["route_nodes", "dispatch_nodes", "combine_nodes"],
                ["ll_dispatch", "ll_combine", "ll_combine"],
            )


def test_a_relay_that_fails_ends_the_wait_for_counts(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that waits is stopped, and later calls raise the same error."""
    failed = EPTimeoutError("the relay of rank 3 on node 1 failed", rank=0, peer=3, phase="the relay", node=1)
    written: list[int] = []

    def check() -> None:
        raise failed

    relay = SimpleNamespace(check=check, close=lambda: True, wake=lambda: None, progress="")
    monkeypatch.setattr(network_memory, "start_relay", lambda *_, **__: relay)
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: written.append(value))
    buffer = make(**RELAY, timeout_s=60.0)
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="the relay of rank 3 on node 1 failed"):
            buffer.dispatch(*arguments(fake))
    assert written == [1], "the abort flag"
    assert [call.kernel for call in fake.pop_launches()] == ["route_nodes", "dispatch_nodes"]
    buffer.destroy(in_touch=False)


@pytest.mark.parametrize("waits", [False, True])
def test_more_rows_than_fit(waits: bool, fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs, so that all ranks hear of it, and the host raises."""
    with make(**RELAY, num_max_recv_tokens=20) as buffer:
        if waits:
            monkeypatch.setattr(buffer._backend.throughput.results, "reserve_in_pool", lambda *_: None)
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        with pytest.raises(EPOutOfMemoryError, match="num_max_recv_tokens=20; expected at least 30"):
            buffer.dispatch(*arguments(fake))
        dispatch = fake.pop_launches()[-1]
        assert (dispatch.capacity, dispatch.refuses_more, fake.pop_launches()) == (0 if waits else 20, 1, [])


def test_no_row_arrives_and_the_pool_is_full(fake: FakeGpu, make: Any) -> None:
    with make(**RELAY, num_slots=1, on_exhausted="error") as buffer:
        kept = []
        for num_rows in (buffer.config.num_max_recv_tokens, 0):
            fake.on_launch = routed(buffer, num_rows, [num_rows] + 7 * [0])
            kept.append(buffer.dispatch(*arguments(fake)))
        assert like(kept[1].recv_x) == ("bfloat16", (0, 256))


def test_an_interruption_between_counts_and_rows(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for the rows of this rank, so it must not go on with another call."""
    with make(**RELAY) as buffer:
        act = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        fake.on_launch = act
        monkeypatch.setattr(buffer._backend.throughput.results, "reserve_in_pool", lambda *_: None)
        monkeypatch.setattr(buffer._backend.throughput.results, "reserve", interrupt)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(*arguments(fake))
        assert [call.kernel for call in fake.pop_launches()] == ["route_nodes"]
        with pytest.raises(EPTimeoutError, match="interrupted between its counts and its rows"):
            buffer.check()


def test_describe_counts_the_inboxes_of_the_network(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual memory of a node has some of its own."""
    sizes = dict(ranks_per_node=2, low_latency=True)
    with make(**sizes) as buffer:
        assert "low_latency of the network" not in buffer.describe().memory
    memory = SimpleNamespace(can_grow=False, free=lambda: None)
    monkeypatch.setattr(fake.allocator.allocate, "heap", memory)
    monkeypatch.setattr(runtime, "LocalHeap", lambda: SimpleNamespace(allocate=fake.allocate, free=lambda: None))
    with make(**sizes) as buffer:
        layout, found = buffer._backend.runtime.layout, buffer.describe().memory
        assert found["low_latency of the network"] == layout.symmetric.sizes["low_latency"] > 0
        assert found["total"] == layout.size_hint["total"] + found["low_latency of the network"]


def test_describe_counts_a_relays_host_memory(fake: FakeGpu, make: Any) -> None:
    def pinned() -> int:
        return sum(ctypes.sizeof(memory) for memory in fake._pinned)

    start = pinned()
    with make() as buffer:
        of_all_buffers = pinned() - start
        assert "pinned on the host" not in buffer.describe().memory
    start = pinned()
    with make(**RELAY) as buffer:
        memory = buffer.describe().memory
        assert memory["pinned on the host"] == pinned() - start - of_all_buffers
        assert memory["total"] == buffer._backend.runtime.layout.size_hint["total"]
        assert "pinned on the host" in str(buffer.describe())
