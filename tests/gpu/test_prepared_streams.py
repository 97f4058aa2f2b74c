"""Prepared calls on GPUs: graphs, streams and events."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, captured, make, replay_often, same, tokens  # noqa: E402
from gpu_prepared import LowLatency, Throughput, WithHooks, each, kind, received  # noqa: E402

from deepep_rt import EPInputError  # noqa: E402

__all__ = ["kind"]


@each(Throughput, LowLatency, WithHooks)
def test_graph(comm, kind):
    """Capture both calls once. Replay them with changing inputs, between calls outside of the graph with the same prepared call."""
    gpu, host = kind.make_both(comm, hidden=1024)
    replays, every = (60, 20) if TAKE_TURNS else (1000 if kind is Throughput else 2000, 100)
    with gpu, host:
        calls = kind(comm, gpu, host, 50, **kind.most_arrays())
        calls.check(*calls.run())
        graph, (sent, back) = captured(comm, calls.run)
        for i in replay_often(graph, back.x, replays, every, lambda i: calls.write(3000 + 10 * i), lambda: calls.y.mul_(-1)):
            calls.check(sent, back)
            calls.check(*calls.run())
            kind.round_trip(comm, gpu, host, 400 + i, 40)
            gpu.check()
        torch.cuda.synchronize()
        comm.Barrier()


@each(LowLatency)
def test_two_graphs_of_one_prepared_call(comm, kind):
    """Dispatch and combine are captured apart, on a stream of their own, with work of the caller in between."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls = kind(comm, gpu, host, 60)
        calls.run()
        sending, sent = captured(comm, calls.call.dispatch)
        summing, back = captured(comm, lambda: calls.call.combine(calls.y))
        for seed in range(10):
            calls.write(500 + 10 * seed)
            sending.replay()
            calls.y.mul_(2)
            summing.replay()
            calls.check(sent, back)
        torch.cuda.synchronize()
        comm.Barrier()


@each(Throughput)
def test_first_combine_in_a_capture(comm, kind):
    """A combine takes no memory, so its first call may be captured. A preparation may not."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls = kind(comm, gpu, host, 60)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())

        def work():
            sent = calls.call.dispatch()
            with pytest.raises(EPInputError, match="Prepare the call before the capture"):
                gpu.prepare_throughput(calls.x, calls.handle)
            return sent, calls.call.combine(calls.y)

        with torch.cuda.stream(stream):
            calls.call.dispatch()
            graph, results = captured(comm, work, stream=stream)
            for seed in range(5):
                calls.write(600 + 10 * seed)
                graph.replay()
                calls.check(*results)
        torch.cuda.synchronize()
        comm.Barrier()


@each(LowLatency)
def test_preparing_in_a_capture(comm, kind):
    """It is refused if the capture is on the stream of the last call. The Buffer stays usable."""
    with make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True) as gpu:
        x, idx, weights = tokens(comm, gpu, 70, 20)
        stream = torch.cuda.Stream()

        def work():
            x.add_(1)
            with pytest.raises(EPInputError, match="Prepare the call before the capture"):
                gpu.prepare_low_latency(x, idx, weights)

        with torch.cuda.stream(stream):
            gpu.low_latency_dispatch(x, idx, use_fp8=False)
            captured(comm, work, stream=stream)
            gpu.prepare_low_latency(x, idx, weights, use_fp8=False).dispatch()
        torch.cuda.synchronize()
        comm.Barrier()


@each(Throughput, LowLatency)
def test_streams(comm, kind):
    """Calls follow the current stream. Work before a call on another stream, and the caller's late work, stay in order."""
    gpu, host = kind.make_both(comm, hidden=1024)
    with gpu, host:
        calls = kind(comm, gpu, host, 90)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for i in range(12):
            with torch.cuda.stream(streams[i % 3]):
                streams[i % 3].wait_stream(streams[(i - 1) % 3])  # the caller's own arrays
                torch.cuda._sleep(int(5e6))
                calls.write(800 + 10 * i)
                sent = calls.call.dispatch()
            other = streams[(i + 1) % 3]
            with torch.cuda.stream(other):
                other.wait_stream(streams[i % 3])
                back = calls.call.combine(calls.y)
                calls.check(sent, back)
            streams[i % 3].wait_stream(other)


@each(Throughput, LowLatency, WithHooks)
def test_async_finish(comm, kind):
    """The calls wait for the caller's stream, and their events cover them, with both halves. The caller drops arrays while calls run."""
    gpu, host = kind.make_both(comm, hidden=1024)
    with gpu, host:
        for seed in range(900, 906):
            calls = kind(comm, gpu, host, seed, async_finish=True)
            torch.cuda._sleep(int(10e6))
            calls.write(10 * seed)
            sent = received(calls.call.dispatch())
            sent.event.wait()
            y = sent.recv_x * 2
            back = calls.call.combine(y)
            del y
            torch.full((1 << 24,), float("nan"), dtype=torch.bfloat16, device="cuda")  # may take the memory of y, if that is free
            received(back).event.wait()
            out = back.x.clone()
            _, reference = calls.expected(lambda want: want.recv_x * 2)
            same(out, reference.x)
            del calls, sent, back


@each(Throughput, LowLatency)
def test_a_chosen_stream(comm, kind):
    gpu, host = kind.make_both(comm)
    with gpu, host:
        stream = torch.cuda.Stream()
        calls = kind(comm, gpu, host, 95, stream=stream)
        torch.cuda.synchronize()
        for seed in range(3):
            with torch.cuda.stream(stream):
                calls.write(950 + 10 * seed)
            sent, back = calls.run()
            torch.cuda.current_stream().wait_stream(stream)
            calls.check(sent, back)
            stream.wait_stream(torch.cuda.current_stream())
