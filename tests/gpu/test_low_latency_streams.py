"""The low-latency calls on several streams of a GPU, and next to other work."""

from __future__ import annotations

import functools

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from gpu_buffers import SHARED_GPUS, captured, cpu, routing, rows, same, tokens  # noqa: E402
from gpu_low_latency import both_calls, formats, make_both, round_trip, transport  # noqa: E402
from process_group import in_reverse  # noqa: E402

__all__ = ["transport"]


def doubled(recv_x):
    """Stand for the experts."""
    return recv_x * 2


def test_two_micro_batches(comm):
    """Send both before one is received. Another rank is late in each round."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        for i in range(20):
            if comm.Get_rank() == i % comm.Get_size():
                torch.cuda._sleep(int(10e6))
            batches = []
            for half in range(2):
                x, idx, weights = tokens(comm, gpu, 100 + 2 * i + half, 60)
                sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, return_recv_hook=True)
                batches.append((x, idx, weights, sent))
            sums = []
            for _, idx, weights, sent in batches:
                sent.hook()
                y = doubled(sent.recv_x)
                sums.append(gpu.low_latency_combine(y, idx, weights, sent.handle, return_recv_hook=True))
            for (x, idx, weights, _), back in zip(batches, sums, strict=True):
                back.hook()
                cx, ci, cw = cpu(x, idx, weights)
                same(back.x, both_calls(host, cx, ci, cw, doubled)[1].x)


def test_concurrent_matrix_products(comm):
    """A long matrix product on another stream occupies every SM, without a deadlock."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        for i in range(10):
            with torch.cuda.stream(side):
                for _ in range(3):
                    a @ a
            round_trip(comm, gpu, host, 300 + i, 100, early_weights=i % 2 == 0, use_fp8=len(formats()) > 1)
        side.synchronize()


def test_concurrent_nccl(comm):
    """Kernels of NCCL and of the Buffer wait for their peers on different SMs. Neither blocks the launch of the other."""
    if SHARED_GPUS or comm.Get_size() == 1:
        return  # NCCL needs a GPU for each rank
    gpu, host = make_both(comm, hidden=1024)
    side = torch.cuda.Stream()
    with gpu, host, in_reverse(comm, "nccl"):
        for i in range(10):
            numbers = torch.full((16 << 20,), float(comm.Get_rank()), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            round_trip(comm, gpu, host, 400 + i, 100, early_weights=i % 2 == 0, use_fp8=False)
            side.synchronize()
            assert bool((numbers == comm.Get_size() - 1).all())


def test_memory_is_reused_in_stream_order(comm):
    """The caller drops a result while its reader is queued. The next call, on another stream, must not overwrite it."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        x, idx, weights = tokens(comm, gpu, 40, 60)
        reference = both_calls(host, *cpu(x, idx, weights))[1].x
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        kept = []
        for i in range(12):
            with torch.cuda.stream(streams[i % 2]):
                sent, back = both_calls(gpu, x * (i + 1), idx, weights)
                torch.cuda._sleep(int(20e6))  # the reader runs late
                kept.append(back.x.clone())
                del sent, back
        torch.cuda.synchronize()
        for i, out in enumerate(kept):
            scale = i + 1
            if scale & scale - 1 == 0:  # powers of two: exact
                same(out, (reference.float() * scale).bfloat16())


def test_streams(comm):
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        idx, weights = routing(comm, 50, 60, 8, gpu.config.num_experts)
        for seed in range(51, 57):
            torch.cuda._sleep(int(10e6))
            x = rows(comm, seed, 60, 1024)  # filled after the sleep
            sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, async_finish=True)
            del x
            sent.event.wait()
            combine = functools.partial(gpu.low_latency_combine, handle=sent.handle, async_finish=True)
            back = combine(doubled(sent.recv_x), idx, weights)
            back.event.wait()
            if seed % 2:  # the event covers both halves
                again = combine(doubled(sent.recv_x), idx, weights, return_recv_hook=True)
                again.hook()
                again.event.wait()
                same(again.x, back.x)
            cx, ci, cw = cpu(rows(comm, seed, 60, 1024), idx, weights)
            same(back.x, both_calls(host, cx, ci, cw, doubled)[1].x)


def test_two_buffers_in_different_orders(comm):
    """Ranks call two Buffers in different orders, each on a stream of its own. A variable holds the result of both, so each result is
    dropped while the other stream is current. No call may wait for a call of the same round on the other stream.
    """
    first, host = make_both(comm, hidden=1024)
    second, other_host = make_both(comm, hidden=1024)
    with first, second, host, other_host:
        x, idx, weights = tokens(comm, first, 60, 60)
        want = both_calls(host, *cpu(x, idx, weights))[1].x
        calls = [(first, torch.cuda.Stream()), (second, torch.cuda.Stream())]
        if comm.Get_rank() % 2:
            calls.reverse()
        torch.cuda.synchronize()
        sums = {}
        for _ in range(200):
            for gpu, stream in calls:
                with torch.cuda.stream(stream):
                    _sent, back = both_calls(gpu, x, idx, weights)
                    sums[gpu] = back.x.clone()
        for gpu, _ in calls:
            gpu.synchronize()
            same(sums[gpu], want)


def test_a_captured_combine_keeps_its_routing(comm):
    """The program drops the handle. Other dispatches take free tables and memory."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        x, idx, weights = tokens(comm, gpu, 62, 60)
        sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        y = doubled(sent.recv_x)
        want = gpu.low_latency_combine(y, idx, weights, sent.handle).x.clone()

        def work():
            rows_of_graph = y[0, :60].clone()
            again = gpu.low_latency_dispatch(rows_of_graph, idx, topk_weights=weights, use_fp8=False)
            return gpu.low_latency_combine(y, idx, weights, again.handle).x.clone(), again, rows_of_graph

        graph, (total, *held) = captured(comm, work)
        del sent, held
        for seed in range(63, 75):
            eager, back = both_calls(gpu, *tokens(comm, gpu, seed, 60))
            before, rows_before = back.x.clone(), eager.recv_x.clone()
            graph.replay()
            same(total, want)
            same(back.x, before)
            same(eager.recv_x, rows_before)
