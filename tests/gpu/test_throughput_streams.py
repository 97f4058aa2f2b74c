"""The throughput calls on several streams of a GPU."""

from __future__ import annotations

import os
import time
import weakref

import pytest

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of every GPU, in every rank
torch = pytest.importorskip("torch")

from gpu_buffers import cpu, make, routing, rows, same, tokens  # noqa: E402


def test_streams(comm):
    """Results with async_finish, previous_event and stream are right while the caller's stream is busy."""
    with make(comm) as gpu, make(comm, "host") as host:
        idx, weights = routing(comm, 50, 200, 8, gpu.config.num_experts)
        for seed in range(51, 57):
            torch.cuda._sleep(int(10e6))
            x = rows(comm, seed, 200, 7168)  # filled after the sleep
            sent = gpu.dispatch(x, idx, weights, async_finish=True)
            del x
            sent.event.wait()
            y = sent.recv_x * 2
            back = gpu.combine(y, sent.handle, async_finish=True)
            del y
            back.event.wait()
            x = rows(comm, seed, 200, 7168)
            want = host.dispatch(*cpu(x, idx, weights))
            same(sent.recv_x, want.recv_x)
            same(back.x, host.combine(want.recv_x * 2, want.handle).x)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            on_side = gpu.dispatch(x, idx, weights, stream=side)
            side.synchronize()
            same(on_side.recv_x, want.recv_x)


def test_two_micro_batches_overlap(comm):
    """A dispatch waits for readers of its own memory, and not for the experts of another micro-batch."""
    with make(comm, num_slots=2) as gpu:
        x, idx, weights = tokens(comm, gpu, 58, 200)
        x.sum()  # the first launch of a kernel loads it, and may wait for all work on the GPU
        asked = torch.cuda.Event()
        asked.record()
        send = dict(
            async_finish=True, previous_event=asked
        )  # x is ready, so the call does not have to wait for the caller's stream
        first = gpu.dispatch(x, idx, weights, **send)
        first.event.wait()
        torch.cuda._sleep(int(1.5e9))  # about a second
        first.recv_x.sum()
        done = torch.cuda.Event()
        done.record()
        del first
        second = gpu.dispatch(x, idx, weights, **send)
        second.event.synchronize()
        assert not done.query(), "the second dispatch waited for the experts of the first"
        third = gpu.dispatch(x, idx, weights, **send)  # only the memory of the first is large enough
        third.event.synchronize()
        assert done.query(), "the third dispatch got the memory of the first before the experts had read it"
        same(third.recv_x, second.recv_x)


@pytest.mark.parametrize("call", ["dispatch", "low_latency_dispatch"])
def test_rows_dropped_before_another_stream_has_read_them(comm, call):
    """A dispatch gets their memory, and waits for the stream that was current when the caller dropped the rows. A low-latency call takes
    other memory, and does not wait.
    """
    with make(comm, num_slots=1, low_latency=True, num_max_tokens_per_rank=64) as gpu:
        idx, weights = routing(comm, 59, 64, 8, gpu.config.num_experts)
        first, second = (rows(comm, seed, 64, 7168) for seed in (59, 60))

        def send(x):
            if call == "dispatch":
                return gpu.dispatch(x, idx, weights).recv_x
            return gpu.low_latency_dispatch(x, idx, use_fp8=False).recv_x

        want = send(
            first
        ).clone()  # low latency does not write some rows; these stay equal, because all calls get the same memory
        torch.cuda.synchronize()  # the next low-latency call takes memory that no stream uses
        read, done = torch.empty_like(want), torch.cuda.Event()
        calls, compute = torch.cuda.Stream(), torch.cuda.current_stream()
        calls.wait_stream(compute)
        with torch.cuda.stream(calls):
            arrived = send(first)
        compute.wait_stream(calls)
        torch.cuda._sleep(int(5e8))  # about a third of a second
        read.copy_(arrived)
        done.record()
        place = arrived.data_ptr()
        del arrived
        assert not done.query(), "the read ended before the drop, so this run tests nothing"
        with torch.cuda.stream(calls):
            again = send(second)
        if call == "dispatch":
            assert again.data_ptr() == place, "the call got other memory, so this run tests nothing"
        else:
            assert again.data_ptr() != place
            calls.synchronize()
            assert not done.query(), "the call waited for the reader of other memory"
        torch.cuda.synchronize()
        same(read, want)


@pytest.mark.parametrize("layout", ["token", "expert"])
@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_calls_do_not_wait_for_later_work_of_the_caller(comm, call, layout):
    """Calls with `previous_event` end before long work that the caller's stream has got since. Earlier calls have freed memory."""
    with make(comm, num_slots=4) as gpu:
        x, idx, _ = tokens(comm, gpu, 61, 200)
        sent = gpu.dispatch(x, idx, layout=layout)
        y = sent.recv_x * 1

        def run(**options):
            if call == "combine":
                return gpu.combine(y, sent.handle, async_finish=True, **options)
            return gpu.dispatch(x, handle=sent.handle, layout=layout, async_finish=True, **options)

        torch.cuda._sleep(1)  # the first launch of a kernel loads it, and may wait for all work on the GPU
        for _ in range(4):
            run()
        held = [run() for _ in range(3)]
        del held
        torch.cuda.synchronize()
        comm.Barrier()
        asked, done = torch.cuda.Event(), torch.cuda.Event()
        asked.record()
        torch.cuda._sleep(int(1.5e9))  # about a second
        done.record()
        for _ in range(2):
            run(previous_event=asked)
        results = [run(previous_event=asked) for _ in range(3)]
        results[-1].event.synchronize()
        assert not done.query(), "a call waited for later work of the caller"
        torch.cuda.synchronize()
        if call == "combine":
            same(results[-1].x, results[0].x)
        elif layout == "token":
            same(results[-1].recv_x, y)


@pytest.mark.parametrize("layout", ["token", "expert"])
def test_a_captured_combine_keeps_its_routing(comm, layout):
    """The program drops the handle. Other routings take free tables, and no result of another call lies where a replay writes."""
    with make(comm, num_slots=4) as gpu:
        x, idx, _ = tokens(comm, gpu, 62, 200)
        sent = gpu.dispatch(x, idx, layout=layout)
        y = sent.recv_x * 2
        want = gpu.combine(y, sent.handle).x.clone()
        torch.cuda.synchronize()
        comm.Barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gpu.combine(y, sent.handle).x
            total = out.clone()
        del sent, out
        for seed in range(63, 75):
            x, other, _ = tokens(comm, gpu, seed, 150)
            sent = gpu.dispatch(x, other, layout=layout)
            back = gpu.combine(sent.recv_x * 1, sent.handle).x
            before = back.clone()
            total.zero_()
            graph.replay()
            same(total, want)
            same(back, before)
        del sent, back
        graphs = list(gpu._backend.runtime.order._graphs)
        assert [each.has_ended() for each in graphs] == [False]
        del graph
        torch.cuda.synchronize()
        limit = time.monotonic() + 60
        while not all(each.has_ended() for each in graphs):  # CUDA tells it in a thread of its own
            assert time.monotonic() < limit, "CUDA did not tell that the graph was destroyed"
            time.sleep(0.01)


def test_results_do_not_hold_arguments(comm):
    """A result makes its arrays on the first access. Until then it must not hold arguments that the caller has dropped."""
    with make(comm, low_latency=True, num_max_tokens_per_rank=64) as buffer:
        x, idx, weights = tokens(comm, buffer, 1, 20)
        sent = buffer.dispatch(x, idx, weights)
        y = rows(comm, 2, *sent.recv_x.shape)
        back = buffer.combine(y, sent.handle)
        quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        z = rows(comm, 3, *quick.recv_x.shape)
        home = buffer.low_latency_combine(z, idx, weights, quick.handle)
        arguments = [weakref.ref(a) for a in (x, idx, weights, y, z)]
        del x, idx, weights, y, z
        assert [ref() for ref in arguments] == [None] * 5
        assert back.x.shape == home.x.shape == (20, 7168)
        torch.cuda.synchronize()
