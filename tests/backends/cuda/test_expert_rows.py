"""Dispatch of rows by expert on the CUDA backend: the order of its launches, on a fake GPU that records requests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import ThroughputCalls
from fake_gpu import BASE, Array, FakeGpu, arguments, fake, like, make, routed

from deepep_rt import EPOutOfMemoryError, EPUnavailableError
from deepep_rt.comm.call_signature import unpack
from deepep_rt.cuda import driver
from deepep_rt.jit import launch

__all__ = ["fake", "make"]

COUNTS = [3, 4, 5, 6, 0, 0, 6, 6]
ONE_NODE, TWO_NODES = {}, dict(ranks_per_node=2)


def launches_before_the_wait(fake: FakeGpu, buffer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that gets the kernels that are queued when the host begins to wait for counts."""
    monitor, seen = buffer._backend.runtime.monitor, []
    wait = monitor.await_counts

    def await_counts() -> Any:
        seen.extend(call.kernel for call in fake.launched)
        return wait()

    monkeypatch.setattr(monitor, "await_counts", await_counts)
    return seen


def test_positions_are_queued_before_the_host_waits(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the GPU would wait for the host between the rows by token and the rows by expert."""
    with make() as buffer:
        fake.on_launch, seen = routed(buffer, 20, COUNTS), launches_before_the_wait(fake, buffer, monkeypatch)
        sent = buffer.dispatch(*arguments(fake), layout="expert", expert_alignment=2)
        route, dispatch, positions, expand = fake.pop_launches()
        assert seen == ["route", "dispatch", "expert_positions"]
        assert (route.kernel, dispatch.kernel, expand.kernel) == ("route", "dispatch", "expand_rows")
        assert len({call.stream for call in (route, dispatch, positions, expand)}) == 1
        assert (positions.topk_idx, positions.src_idx) == (
            BASE + dispatch.recv_topk_idx_offset,
            BASE + dispatch.recv_src_idx_offset,
        )
        kept = (
            buffer._backend.runtime.layout.handle.offsets
        )  # by the handle: a dispatch that fails does not write the caller's counts
        assert positions.num_recv == route.handle + kept["num_recv"]
        assert positions.num_per_expert == route.handle + kept["num_recv_per_expert"]
        assert (positions.capacity, positions.num_rows, positions.alignment) == (dispatch.capacity, -1, 2)
        assert positions.blocks == 4 * 64 * 4 // 256
        for name in ("positions", "offsets", "ends", "totals"):
            assert getattr(expand, name) == getattr(positions, name)
        assert (expand.x, expand.num_rows) == (BASE + dispatch.recv_x_offset, sum(COUNTS))
        assert like(sent.recv_x) == ("bfloat16", (sum(COUNTS), 256))
        assert sent.num_recv_tokens_per_expert_list == COUNTS


@pytest.mark.parametrize("has_room", [True, False])
def test_several_nodes(has_room: bool, fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room in the pool for the most rows, the host waits for their number. The positions follow right behind the rows."""
    with make(**TWO_NODES) as buffer:
        fake.on_launch, seen = routed(buffer, 20, COUNTS), launches_before_the_wait(fake, buffer, monkeypatch)
        if not has_room:
            monkeypatch.setattr(buffer._backend.throughput.results, "reserve_in_pool", lambda *_: None)
        buffer.dispatch(*arguments(fake), layout="expert")
        launches, most = fake.pop_launches(), buffer.config.num_max_recv_tokens
        assert seen == (["route_nodes", "dispatch_nodes", "expert_positions"] if has_room else ["route_nodes"])
        assert [call.kernel for call in launches] == ["route_nodes", "dispatch_nodes", "expert_positions", "expand_rows"]
        assert (launches[2].capacity, launches[2].num_rows) == (most if has_room else 20, -1)


def test_launches_share_the_progress_of_blocks(fake: FakeGpu, make: Any) -> None:
    """It counts the launches of a Buffer. Two Buffers may run at the same time, so each has its own."""
    with make() as buffer, make() as other:
        places = []
        for one, worst in ((buffer, 0), (buffer, 100), (other, 100)):
            one.dispatch(*arguments(fake), layout="expert", num_worst_tokens=worst)
            positions = fake.pop_launches()[2]
            assert positions.num_rows == worst
            places.append((positions.progress, positions.block_counts))
        assert places[0] == places[1] != places[2]
        local = buffer._backend.runtime.layout.local
        assert places[0][0] == buffer._backend.runtime.state + local.offsets["position_progress"]


def test_known_routing_keeps_the_positions(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 20, COUNTS)
        x, idx, weights = arguments(fake)
        first = buffer.dispatch(x, idx, weights, layout="expert")
        positions = fake.pop_launches()[2]
        again = buffer.dispatch(x, handle=first.handle)
        dispatch, expand = fake.pop_launches()
        assert (dispatch.kernel, expand.kernel, expand.positions) == ("dispatch", "expand_rows", positions.positions)
        assert again.recv_x.shape == first.recv_x.shape


def no_room(num_bytes: int, stream: int) -> int:
    raise EPOutOfMemoryError("full")


def missing(kernel: Any, constants: Any, arch: str) -> Any:
    raise EPUnavailableError(f"{kernel.name} is not in the cache")


NO_ROOM, MISSING = (driver, "allocate_async", no_room), (launch, "load", missing)


@pytest.mark.parametrize(
    ("sizes", "call", "failure", "num_launches"),
    [
        *((sizes, "dispatch", failure, 4) for sizes in (ONE_NODE, TWO_NODES) for failure in (NO_ROOM, MISSING)),
        *((TWO_NODES, "combine", failure, 2) for failure in (NO_ROOM, MISSING)),
        (ONE_NODE, "combine", MISSING, 1),
    ],
)
def test_a_call_that_cannot_begin(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any, call: str, failure: tuple, num_launches: int
) -> None:
    """Without memory or without a kernel, this rank launches nothing, and its later calls match those of the others."""
    with make(**sizes) as buffer:
        calls = ThroughputCalls(fake, buffer, layout="token" if call == "dispatch" else "expert")
        fake.on_launch, y = routed(buffer, 20, COUNTS), calls.y("float16")  # no Buffer loads its kernels when it is made

        def make_call() -> Any:
            if call == "dispatch":
                return calls.route(layout="expert", num_worst_tokens=None)
            return calls.combine(calls.handle, y=y, reduce="topk")

        with monkeypatch.context() as patches:
            patches.setattr(*failure)
            with pytest.raises((EPOutOfMemoryError, EPUnavailableError), match=r"full|is not in the cache") as caught:
                make_call()
            assert not caught.value.call_made
        assert fake.pop_launches() == []
        make_call()
        assert len(fake.pop_launches()) == num_launches


def choice_sums(fake: FakeGpu, buffer: Any, **how: Any) -> Any:
    """Make a combine over nodes with `reduce="topk"`, and forget the launches of its dispatch."""
    sent = buffer.dispatch(*arguments(fake), layout="expert", num_worst_tokens=50)
    fake.pop_launches()
    how = {"topk_weights": Array(fake, "float32", 50), **how}
    return buffer.combine(Array(fake, "bfloat16", 50, 256), sent.handle, **how, reduce="topk")


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_choices_over_nodes(fake: FakeGpu, make: Any, weighted: bool) -> None:
    """Each window of tokens has a list of rows, and a kernel that sends them."""
    with make(**{**TWO_NODES, "num_max_tokens_per_rank": 512, "num_max_recv_tokens": 1024}) as buffer:
        bias = Array(fake, "bfloat16", 10, 256)
        back = choice_sums(fake, buffer, weighted=weighted, bias=bias)
        launches = fake.pop_launches()
        assert [call.kernel for call in launches] == ["list_choices", "combine_choices_nodes"] * 2
        assert len({call.stream for call in launches}) == 1
        for window, (listing, sending) in enumerate(zip(launches[::2], launches[1::2], strict=True)):
            assert (listing.blocks, listing.num_ranks, listing.num_topk) == (1, 4, 4)
            for call in (listing, sending):
                assert (call.first_token, call.window_tokens) == (256 * window, 256)
            assert (sending.rows, sending.first_rows) == (listing.rows, listing.first)
            assert sending.first_rows >= sending.rows + 50 * 16, "room for each row by expert"
            assert listing.weights == sending.topk_weights != 0
            assert (sending.bias_0, sending.bias_1, sending.out) == (bias.ptr, 0, back.x.ptr)
            assert sending.is_weighted == weighted
            assert sending.out_topk_weights == (0 if weighted else back.topk_weights.ptr)
        first, second = (unpack(call.call_signature) for call in launches[1::2])
        assert (first[:-1], first[-1], second[-1]) == (second[:-1], 0, 1)
        assert like(back.x) == ("bfloat16", (10, 256))


def test_windows_of_choices_have_signatures_of_their_own(fake: FakeGpu, make: Any) -> None:
    """If a rank did not make its last launches, the ranks are one window apart, and have to see it."""
    with make(num_topk=8, num_max_tokens_per_rank=512) as buffer:
        x, idx = Array(fake, "bfloat16", 10, 256), Array(fake, "int64", 10, 8)
        handle = buffer.dispatch(x, idx, layout="expert", num_worst_tokens=50).handle
        fake.pop_launches()
        buffer.combine(Array(fake, "bfloat16", 50, 256), handle, reduce="topk")
        launches = fake.pop_launches()
        assert [(call.kernel, call.first_token) for call in launches] == [("combine_choices", 256 * i) for i in range(2)]
        first, second = (unpack(call.call_signature) for call in launches)
        assert (first[:-1], first[-1], second[-1]) == (second[:-1], 0, 1)


def test_sums_of_choices_without_weights(fake: FakeGpu, make: Any) -> None:
    with make(**TWO_NODES) as buffer:
        back = choice_sums(fake, buffer, topk_weights=None)
        assert back.topk_weights is None
        for call in fake.pop_launches():
            if call.kernel == "list_choices":
                assert call.weights == 0
            else:
                assert (call.topk_weights, call.out_topk_weights) == (0, 0)
