"""The throughput calls of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, Calls, LowLatencyCalls, each_kind, old_rank
from fake_gpu import (
    BASE,
    CALLERS_STREAM,
    OWN_STREAM,
    Array,
    FakeGpu,
    arguments,
    fake,
    like,
    make,
    region,
    routed,
)

from deepep_rt import EPConfigError, EPInputError, EPUnavailableError, NetworkOptions
from deepep_rt.cuda import driver
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make", "old_rank"]


@pytest.mark.parametrize(("compress", "row_bytes"), [("fp8", 272), ("log10", 336)])
def test_compressed_rows(fake: FakeGpu, make: Any, compress: str, row_bytes: int) -> None:
    """Another kernel sends them, and they take less staging."""
    with make() as buffer:
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, _ = arguments(fake)
        sent = buffer.dispatch(x, idx)
        y = Array(fake, "bfloat16", 30, 256)
        signatures = set()
        for given in (None, compress):
            fake.pop_launches()
            back = buffer.combine(y, sent.handle, topk_weights=Array(fake, "float32", 30, 4), compress=given)
            (combine,) = fake.pop_launches()
            signatures.add(combine.call_signature)
            assert combine.kernel == (f"combine_{given}" if given else "combine")
            assert like(back.x) == ("bfloat16", (10, 256))
            rows, landing = buffer.config.num_max_sent_rows, region(buffer, "landing")
            assert BASE + combine.recv_topk_weights_offset + rows * 4 * 4 <= BASE + combine.recv_x_offset
            assert BASE + combine.recv_x_offset + rows * (row_bytes if given else 512) <= landing.stop
        assert len(signatures) == 2, "ranks that differ find out"


@each_kind
def test_compressed_rows_on_gpus_without_fp8(fake: FakeGpu, make: Any, kind: type[Calls], old_rank: int) -> None:
    with make(**kind.sizes, hidden=512) as buffer:
        calls = kind(fake, buffer)
        handle = calls.dispatch().handle
        fake.pop_launches()
        for call in (lambda: calls.combine(handle, compress="fp8"), lambda: calls.prepare(compress="fp8")):
            with pytest.raises(
                EPUnavailableError, match=rf"compress='fp8'; expected GPUs with FP8 on all ranks, but rank {old_rank} has sm_80"
            ):
                call()
        assert fake.pop_launches() == []
        for compress in ("log10", None):
            calls.combine(handle, compress=compress)
        plain = "ll_combine" if kind is LowLatencyCalls else "combine"
        log10, none = fake.pop_launches()
        assert (log10.kernel, none.kernel) == (f"{plain}_log10", plain)
        assert log10.call_signature != none.call_signature


ONE_NODE: dict[str, Any] = {}
NODES: dict[str, Any] = dict(ranks_per_node=2)
RELAY = dict(ranks_per_node=2, network=NetworkOptions(transport="mpi"))
TOPOLOGIES = pytest.mark.parametrize("sizes", [ONE_NODE, NODES, RELAY], ids=["one node", "nodes", "relay"])


@TOPOLOGIES
def test_dispatch_and_combine(fake: FakeGpu, make: Any, sizes: dict[str, Any]) -> None:
    suffix = "_nodes" if sizes else ""
    with make(**sizes) as buffer:
        fake.on_launch = routed(buffer, 30, [3, 4, 5, 6, 0, 0, 6, 6])
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights)
        route, dispatch = fake.pop_launches()
        assert (route.kernel, route.num_tokens, route.topk_idx, route.idx_bytes, route.to_host) == (
            *(f"route{suffix}", 10, idx.ptr),
            *(8, 1),
        )
        assert (dispatch.kernel, dispatch.x, dispatch.topk_idx, dispatch.topk_weights) == (
            *(f"dispatch{suffix}", x.ptr),
            *(idx.ptr, weights.ptr),
        )
        assert (dispatch.row_bytes, dispatch.scales, dispatch.scale_bytes, dispatch.blocks) == (512, 0, 0, buffer.num_sms)
        assert dispatch.peers[0] == BASE
        assert dispatch.handle == route.handle
        assert route.stream == dispatch.stream == CALLERS_STREAM
        assert dispatch.capacity == buffer.config.num_max_recv_tokens == 4 * 64, "the host does not know the counts yet"
        assert not sizes or dispatch.refuses_more, "it runs before this rank knows how many rows arrive"
        assert sent.num_recv_tokens_per_expert_list == [3, 4, 5, 6, 0, 0, 6, 6]
        assert like(sent.recv_x) == ("bfloat16", (30, 256))
        assert like(sent.recv_topk_idx) == ("int64", (30, 4))
        assert like(sent.recv_topk_weights) == ("float32", (30, 4))
        assert like(sent.recv_src_idx) == ("int32", (30, 2))
        assert like(sent.num_recv_tokens) == ("int32", (1,))
        assert like(sent.num_recv_tokens_per_expert) == ("int32", (8,))
        assert sent.recv_x_scales is None
        arrived = {"x": sent.recv_x, "topk_idx": sent.recv_topk_idx, "topk_weights": sent.recv_topk_weights}
        for name, array in {**arrived, "src_idx": sent.recv_src_idx}.items():
            assert array.ptr == BASE + getattr(dispatch, f"recv_{name}_offset"), name

        y = Array(fake, "bfloat16", 30, 256)
        back = buffer.combine(y, sent.handle, topk_weights=Array(fake, "float32", 30, 4), bias=Array(fake, "bfloat16", 10, 256))
        (combine,) = fake.pop_launches()
        assert (combine.kernel, combine.y, combine.num_tokens, combine.capacity, combine.handle) == (
            *(f"combine{suffix}", y.ptr),
            *(10, 30, dispatch.handle),
        )
        assert combine.bias_0
        assert not combine.bias_1
        rows, landing = buffer.config.num_max_sent_rows, region(buffer, "landing")
        if not sizes:
            assert landing.start <= BASE + combine.recv_topk_weights_offset <= BASE + combine.recv_x_offset - rows * 4 * 4
            assert BASE + combine.recv_x_offset + rows * 512 <= landing.stop
        else:
            assert combine.sum_stride == 640
            assert landing.start <= BASE + combine.exposed_weights_offset < BASE + combine.exposed_offset
            assert BASE + combine.exposed_offset + buffer.config.num_max_recv_tokens * 512 <= landing.stop
        assert (like(back.x), back.x.ptr) == (("bfloat16", (10, 256)), combine.out)
        assert (like(back.topk_weights), back.topk_weights.ptr) == (("float32", (10, 4)), combine.out_topk_weights)


def test_number_of_sms(fake: FakeGpu, make: Any) -> None:
    with make(num_sms=16) as buffer:
        x, idx, weights = arguments(fake, 64)
        known = buffer.dispatch(x, idx, weights, num_worst_tokens=100).handle
        assert (buffer.num_sms, fake.pop_launches()[1].blocks) == (16, 16)
        buffer.num_sms = 8
        buffer.dispatch(x, handle=known)
        buffer.combine(Array(fake, "bfloat16", 100, 256), known)
        assert [call.blocks for call in fake.pop_launches()] == [8, 8]
        for bad in (0, 1025, 2.5, True):
            with pytest.raises(EPConfigError, match="num_sms="):
                buffer.num_sms = bad
        assert buffer.num_sms == 8
    with make(num_max_tokens_per_rank=2048, num_sms=24) as buffer:
        for num_sms, blocks in ((24, 8), (3, 3)):
            buffer.num_sms = num_sms
            buffer.dispatch(*arguments(fake, 2048), num_worst_tokens=100)
            assert fake.pop_launches()[0].blocks == blocks, "256 tokens for each block, or more if there are few SMs"


def test_known_routing_and_scales(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        fake.on_launch = routed(buffer, 7, [1] * 7 + [0])
        x, idx, _ = arguments(fake)
        first = buffer.dispatch(x, idx)
        assert first.recv_topk_weights is None
        fake.pop_launches()
        rows, scales = Array(fake, "float8_e4m3fn", 10, 256), Array(fake, "float32", 10, 2)
        again = buffer.dispatch(rows, handle=first.handle, x_scales=scales)
        (dispatch,) = fake.pop_launches()
        assert (dispatch.row_bytes, dispatch.scale_bytes, dispatch.topk_idx, dispatch.idx_bytes, dispatch.capacity) == (
            256,
            8,
            0,
            0,
            7,
        )
        assert (like(again.recv_x), like(again.recv_x_scales)) == (("float8_e4m3fn", (7, 256)), ("float32", (7, 2)))
        assert (dispatch.scales, again.recv_x_scales.ptr) == (scales.ptr, BASE + dispatch.recv_scales_offset)
        assert again.recv_topk_idx is None
        assert again.handle is first.handle


def test_options_reach_the_kernels(fake: FakeGpu, make: Any) -> None:
    with make(check_inputs=True, low_latency=True, timeout_s=2.5) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=0, expert_alignment=128)
        given = [Array(fake, "float32", 0, 4), Array(fake, "bfloat16", 10, 256), Array(fake, "bfloat16", 10, 256)]
        buffer.combine(Array(fake, "bfloat16", 0, 256), sent.handle, topk_weights=given[0], bias=given[1:])
        counts, waits = Array(fake, "int32", 8), Array(fake, "int64", 4)
        buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=counts, wait_recv_cost_stats=waits)
        route, dispatch, combine, quick = fake.pop_launches()
        assert (route.expert_alignment, route.check, quick.check) == (128, 1, 1)
        assert (dispatch.capacity, sent.recv_x.shape) == (0, (0, 256)), "0 is a number of rows, not its absence"
        assert [combine.topk_weights, combine.bias_0, combine.bias_1] == [array.ptr for array in given]
        assert (quick.recv_stats, quick.wait_stats) == (counts.ptr, waits.ptr)
        backend = buffer._backend
        for kernel in (route, dispatch, combine, quick):
            assert (kernel.timeout_ns, kernel.rank, kernel.pes) == (2_500_000_000, 0, [0, 1, 2, 3])
            assert (kernel.state, kernel.status_page) == (backend.runtime.state, backend.runtime.page.ptr)


def test_no_tokens(fake: FakeGpu, make: Any) -> None:
    """Some libraries give 0 as the address of an empty array. Kernels still have to know that the array was given."""
    with make() as buffer:
        empty = arguments(fake, 0)
        for array in empty:
            array.ptr = 0
        sent = buffer.dispatch(*empty, num_worst_tokens=0)
        weights = Array(fake, "float32", 0, 4)
        weights.ptr = 0
        buffer.combine(empty[0], sent.handle, topk_weights=weights)
        route, dispatch, combine = fake.pop_launches()
        assert route.blocks == 1
        assert dispatch.topk_idx
        assert dispatch.topk_weights
        assert combine.topk_weights


def test_fixed_number_of_rows(fake: FakeGpu, make: Any) -> None:
    """The kernel reports no counts, and the host does not wait. The pool has room for two results of the worst case."""
    with make(on_exhausted="error") as buffer:
        x, idx, weights = arguments(fake)
        held = [buffer.dispatch(x, idx, weights, num_worst_tokens=100) for _ in range(2)]
        route, dispatch, *_ = fake.pop_launches()
        assert (route.to_host, dispatch.capacity) == (0, 100)
        assert held[0].num_recv_tokens_per_expert_list is None
        assert like(held[0].recv_x) == ("bfloat16", (100, 256))
        first, second = (result.recv_x.ptr for result in held)
        del held
        assert buffer.dispatch(x, idx, weights, num_worst_tokens=100).recv_x.ptr == min(first, second), (
            "the pool reuses the memory"
        )


def test_ranks_without_peer_access(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as buffer:
        handle = buffer.dispatch(*arguments(fake), num_worst_tokens=40).handle
    fake.pop_launches()
    monkeypatch.setattr(fake.allocator.allocate, "peers", (BASE, BASE + (1 << 36), 0, 0))
    with make(low_latency=True) as buffer:
        handle.buffer_serial = buffer._info.serial
        for call in (
            lambda: buffer.dispatch(*arguments(fake), num_worst_tokens=40),
            lambda: buffer.combine(Array(fake, "bfloat16", 40, 256), handle),
            buffer.copy_ceiling,
        ):
            with pytest.raises(EPUnavailableError, match=r"no direct access.*Use the low-latency calls"):
                call()
        assert fake.pop_launches() == []
        buffer.low_latency_dispatch(*arguments(fake)[:2])
        assert [call.kernel for call in fake.pop_launches()] == ["ll_dispatch"]


def test_counts_belong_to_the_caller(fake: FakeGpu, make: Any) -> None:
    """The counts are not the handle's tables, and they do not keep the rows alive."""
    with make() as buffer:
        x, idx, _ = arguments(fake)
        pool = buffer._backend.throughput.results.pool
        free = pool.free_bytes
        sent = buffer.dispatch(x, idx, num_worst_tokens=40)
        again = buffer.dispatch(x, handle=sent.handle)
        launches = [launch for launch in fake.pop_launches() if launch.kernel == "dispatch"]
        kept = Layout(buffer.config).handle.offsets
        addresses = {sent.handle.routing.ptr + kept[name] for name in ("num_recv", "num_recv_per_expert")}
        for result, launch in zip((sent, again), launches, strict=True):
            counts = result.num_recv_tokens, result.num_recv_tokens_per_expert
            assert [array.ptr for array in counts] == [launch.num_recv, launch.num_recv_per_expert]
            addresses |= {array.ptr for array in counts}
        assert len(addresses) == 6
        counts = sent.num_recv_tokens, again.num_recv_tokens_per_expert
        del sent, again, result
        assert pool.free_bytes == free
        assert counts


def test_copy_ceilings(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows for all peers fit their region. The result counts the bytes that leave the rank, by method."""
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: 10.0)
    num_measurements = 3
    with make(num_sms=20) as buffer:
        rate = pytest.approx(3 * 7 * 256 / 2e-3)
        rates = buffer.copy_ceilings(row_bytes=256, num_rows=7, iterations=5)
        assert rates == {"kernel": rate, "kernel on all SMs": rate, "copy engines": rate}
        launches = fake.pop_launches()
        assert {(call.num_rows, call.row_bytes) for call in launches} == {(7, 256)}
        assert [call.blocks for call in launches] == [20] * 5 * num_measurements + [132] * 5 * num_measurements
        landing, pool = region(buffer, "landing").start, region(buffer, "pool").start
        copies = {(landing + (peer << 36), pool + peer * 7 * 256, 7 * 256) for peer in (1, 2, 3)}
        assert set(fake.copies) == copies
        assert len(fake.copies) == 5 * num_measurements * len(copies)
        buffer.copy_ceiling(num_rows=10**9)
        (num_rows,) = {call.num_rows for call in fake.pop_launches()}
        room = min(len(region(buffer, "landing")), len(region(buffer, "pool")))
        assert room - 4 * 512 < 4 * num_rows * 512 <= room


def test_copy_ceiling_is_the_largest(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow measurement of one method does not count, because the median of three does."""
    times_ms = iter([4.0, 9.0, 4.0, 2.0, 2.0, 9.0, 8.0, 8.0, 9.0] * 2)
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: next(times_ms))
    with make() as buffer:
        arguments = dict(row_bytes=256, num_rows=1, iterations=1)
        assert buffer.copy_ceilings(**arguments) == pytest.approx(
            {"kernel": 3 * 256 / 4e-3, "kernel on all SMs": 3 * 256 / 2e-3, "copy engines": 3 * 256 / 8e-3}
        )
        assert buffer.copy_ceiling(**arguments) == pytest.approx(3 * 256 / 2e-3)


def test_streams(fake: FakeGpu, make: Any) -> None:
    with make() as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100, async_finish=True)
        assert {call.stream for call in fake.pop_launches()} == {OWN_STREAM}
        assert (OWN_STREAM, ("all of", CALLERS_STREAM)) in fake.waits
        fake.waits.clear()
        sent.event.wait()
        assert fake.waits == [(CALLERS_STREAM, 5)]
        buffer.combine(Array(fake, "bfloat16", 100, 256), sent.handle, stream=77)
        assert fake.pop_launches()[0].stream == 77


def test_results_on_other_streams(fake: FakeGpu, make: Any) -> None:
    """Another library reads them at any time, with another context current. Its stream waits for the call."""
    with make() as buffer:
        sent = buffer.dispatch(*arguments(fake), num_worst_tokens=40, stream=7)
        fake.waits.clear()
        sent.recv_x.__dlpack__(stream=21)
        sent.event.wait(22)
        assert fake.waits == [(21, ("all of", 7)), (22, ("all of", 7))]


@TOPOLOGIES
def test_counts_in_a_capture(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]) -> None:
    with make(**sizes) as buffer:
        monkeypatch.setattr(driver, "capture_id", lambda stream: 7)
        with pytest.raises(EPInputError, match="num_worst_tokens=None in a CUDA graph capture"):
            buffer.dispatch(*arguments(fake))
        assert fake.pop_launches() == []


ONE_LAUNCH = [kind for kind in CALLS if kind in ("combine", "dispatch with a handle") or kind.endswith("whole")]


@pytest.mark.parametrize(
    "kind", ["dispatch of a fixed size", "combine compressed", "prepared dispatch", "prepared combine", *ONE_LAUNCH]
)
def test_driver_requests_of_a_call(fake: FakeGpu, make: Any, kind: str) -> None:
    """Each request costs the host a microsecond or more. A call allocates nothing, and queues no wait."""
    with make(low_latency=True) as buffer:
        call = CALLS[kind](fake, buffer)
        call()  # the first call may allocate
        fake.requests.clear()
        call()
        num_launches = 2 if kind == "dispatch of a fixed size" else 1
        assert fake.requests == ["context", "capture_id", *["launch"] * num_launches]
