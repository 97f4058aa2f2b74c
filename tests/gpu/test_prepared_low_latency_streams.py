"""Prepared low-latency calls on GPUs: graphs, streams and events."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, cpu, make, routing, rows, same  # noqa: E402
from gpu_low_latency import formats, make_both, round_trip, transport  # noqa: E402
from gpu_prepared_low_latency import Step  # noqa: E402

from deepep_rt import EPInputError  # noqa: E402

__all__ = ["transport"]


@pytest.mark.parametrize("hooks", [False, True])
def test_graph(comm, hooks):
    """Capture a step once. Replay it with changing inputs, between calls outside of the graph with the same prepared call."""
    gpu, host = make_both(comm, hidden=1024)
    replays, every = (60, 20) if TAKE_TURNS else (2000, 100)
    with gpu, host:
        step = Step(comm, gpu, host, 50, use_fp8=len(formats()) > 1, return_recv_hook=hooks)

        def whole():
            sent = step.call.dispatch()
            if hooks:
                sent.hook()
            back = step.call.combine(step.y)
            if hooks:
                back.hook()
            return sent, back

        step.check(*whole())
        torch.cuda.synchronize()
        comm.Barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sent, back = whole()
        before, num_wrong = torch.zeros_like(back.x), torch.zeros(1, dtype=torch.int64, device="cuda")
        for i in range(replays):
            if i % every == 0:
                step.write(300 + i)
            else:
                step.y.mul_(-1)
            graph.replay()
            if i % every:
                num_wrong += (back.x != -before).sum()
            before.copy_(back.x)
            if (i + 1) % every == 0:
                assert num_wrong.item() == 0
                step.check(sent, back)
                step.check(*whole())
                round_trip(comm, gpu, host, 400 + i, 40, use_fp8=False)
                gpu.check()
        torch.cuda.synchronize()
        comm.Barrier()


def test_two_graphs_of_one_prepared_call(comm):
    """Dispatch and combine are captured apart, on a stream of their own, with work of the caller in between."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        step = Step(comm, gpu, host, 60, use_fp8=False)
        step.run()
        torch.cuda.synchronize()
        comm.Barrier()
        graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph, call in zip(graphs, (step.call.dispatch, lambda: step.call.combine(step.y)), strict=True):
            with torch.cuda.graph(graph):
                results.append(call())
        for seed in range(10):
            step.write(500 + seed)
            graphs[0].replay()
            step.y.mul_(2)
            graphs[1].replay()
            step.check(*results)
        torch.cuda.synchronize()
        comm.Barrier()


def test_preparing_in_a_capture(comm):
    """It is refused if the capture is on the stream of the last call. The Buffer stays usable."""
    with make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True) as gpu:
        idx, weights = routing(comm, 70, 20, 8, gpu.config.num_experts)
        x = rows(comm, 70, 20, 512)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            gpu.low_latency_dispatch(x, idx, use_fp8=False)
            torch.cuda.synchronize()
            comm.Barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                x.add_(1)
                with pytest.raises(EPInputError, match="Prepare the call before the capture"):
                    gpu.prepare_low_latency(x, idx, weights)
            gpu.prepare_low_latency(x, idx, weights, use_fp8=False).dispatch()
        torch.cuda.synchronize()
        comm.Barrier()


def test_streams(comm):
    """Calls follow the current stream. Work before a call on another stream, and the caller's late work, stay in order."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        step = Step(comm, gpu, host, 90, use_fp8=False)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for i in range(12):
            with torch.cuda.stream(streams[i % 3]):
                streams[i % 3].wait_stream(streams[(i - 1) % 3])  # the caller's own arrays
                torch.cuda._sleep(int(5e6))
                step.write(800 + i)
                sent = step.call.dispatch()
            other = streams[(i + 1) % 3]
            with torch.cuda.stream(other):
                other.wait_stream(streams[i % 3])
                back = step.call.combine(step.y)
                step.check(sent, back)
            streams[i % 3].wait_stream(other)


@pytest.mark.parametrize("hooks", [False, True])
def test_async_finish(comm, hooks):
    """The calls wait for the caller's stream, and the event covers both halves. The caller drops arrays while calls run."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        for seed in range(900, 906):
            step = Step(comm, gpu, host, seed, use_fp8=False, async_finish=True, return_recv_hook=hooks)
            torch.cuda._sleep(int(10e6))
            step.write(seed + 50)
            sent = step.call.dispatch()
            if hooks:
                sent.hook()
            sent.event.wait()
            y = sent.recv_x * 2
            back = step.call.combine(y)
            del y
            torch.full((1 << 24,), float("nan"), dtype=torch.bfloat16, device="cuda")  # may take the memory of y, if that is free
            if hooks:
                back.hook()
            back.event.wait()
            out = back.x.clone()
            want, _ = step.expected()
            idx, weights = cpu(step.idx, step.weights)
            same(out, host.low_latency_combine(want.recv_x * 2, idx, weights, want.handle).x)
            del step, sent, back


def test_a_chosen_stream(comm):
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        stream = torch.cuda.Stream()
        step = Step(comm, gpu, host, 95, use_fp8=False, stream=stream)
        torch.cuda.synchronize()
        for seed in range(3):
            with torch.cuda.stream(stream):
                step.write(950 + seed)
            sent, back = step.run()
            torch.cuda.current_stream().wait_stream(stream)
            step.check(sent, back)
            stream.wait_stream(torch.cuda.current_stream())
