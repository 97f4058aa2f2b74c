"""Prepared throughput calls on GPUs: graphs, streams, events, and ranks that differ or are late."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, rows, same  # noqa: E402
from gpu_prepared_throughput import HIDDEN, Step, make_both  # noqa: E402
from gpu_throughput import round_trip  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError  # noqa: E402


def test_graph(comm):
    """Capture both calls once. Replay them with changing inputs, between calls outside of the graph with the same prepared call."""
    gpu, host = make_both(comm)
    replays, every = (60, 20) if TAKE_TURNS else (1000, 100)
    with gpu, host:
        step = Step(comm, gpu, host, 50, with_idx=True)
        step.check(*step.run())
        torch.cuda.synchronize()
        comm.Barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sent, back = step.run()
        before, num_wrong = torch.zeros_like(back.x), torch.zeros(1, dtype=torch.int64, device="cuda")
        for i in range(replays):
            if i % every == 0:
                step.write(3000 + 10 * i)
            else:
                step.y.mul_(-1)
            graph.replay()
            if i % every:
                num_wrong += (back.x != -before).sum()
            before.copy_(back.x)
            if (i + 1) % every == 0:
                assert num_wrong.item() == 0
                step.check(sent, back)
                step.check(*step.run())
                round_trip(comm, gpu, host, 400 + i, 40, gpu.config.num_topk)
                gpu.check()
        torch.cuda.synchronize()
        comm.Barrier()


def test_first_combine_in_a_capture(comm):
    """A combine takes no memory, so its first call may be captured. A preparation may not."""
    gpu, host = make_both(comm)
    with gpu, host:
        step = Step(comm, gpu, host, 60)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step.call.dispatch()
            torch.cuda.synchronize()
            comm.Barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                sent = step.call.dispatch()
                with pytest.raises(EPInputError, match="Prepare the call before the capture"):
                    gpu.prepare_throughput(step.x, step.handle)
                back = step.call.combine(step.y)
            for seed in range(5):
                step.write(600 + 10 * seed)
                graph.replay()
                step.check(sent, back)
        torch.cuda.synchronize()
        comm.Barrier()


def test_streams(comm):
    """Calls follow the current stream. Work before a call on another stream, and the caller's late work, stay in order."""
    gpu, host = make_both(comm)
    with gpu, host:
        step = Step(comm, gpu, host, 90)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for i in range(12):
            with torch.cuda.stream(streams[i % 3]):
                streams[i % 3].wait_stream(streams[(i - 1) % 3])  # the caller's own arrays
                torch.cuda._sleep(int(5e6))
                step.write(800 + 10 * i)
                sent = step.call.dispatch()
            other = streams[(i + 1) % 3]
            with torch.cuda.stream(other):
                other.wait_stream(streams[i % 3])
                back = step.call.combine(step.y)
                step.check(sent, back)
            streams[i % 3].wait_stream(other)


def test_async_finish(comm):
    """The calls wait for the caller's stream, and their events cover them. The caller drops arrays while calls run."""
    gpu, host = make_both(comm)
    with gpu, host:
        for seed in range(900, 906):
            step = Step(comm, gpu, host, seed, async_finish=True)
            torch.cuda._sleep(int(10e6))
            step.write(10 * seed)
            sent = step.call.dispatch()
            sent.event.wait()
            y = sent.recv_x * 2
            back = step.call.combine(y)
            del y
            torch.full((1 << 24,), float("nan"), dtype=torch.bfloat16, device="cuda")  # may take the memory of y, if that is free
            back.event.wait()
            out = back.x.clone()
            want, _ = step.expected()
            same(out, host.combine(want.recv_x * 2, step.host_handle).x)
            del step, sent, back


def test_a_chosen_stream(comm):
    gpu, host = make_both(comm)
    with gpu, host:
        stream = torch.cuda.Stream()
        step = Step(comm, gpu, host, 95, stream=stream)
        torch.cuda.synchronize()
        for seed in range(3):
            with torch.cuda.stream(stream):
                step.write(950 + 10 * seed)
            sent, back = step.run()
            torch.cuda.current_stream().wait_stream(stream)
            step.check(sent, back)
            stream.wait_stream(torch.cuda.current_stream())


def test_ranks_that_differ(comm):
    """All ranks raise, no rank sends rows, and the prepared calls stay usable."""
    if comm.Get_size() == 1:
        return
    gpu, host = make_both(comm)
    with gpu, host:
        step, bytes_ = Step(comm, gpu, host, 100), rows(comm, 101, 60, HIDDEN, dtype=torch.uint8)
        other = gpu.prepare_throughput(bytes_, step.handle)
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # so the call returns before its kernel runs
        with pytest.raises(EPInputError, match=r"the ranks disagree on the x of.*No rows were sent"):  # noqa: PT012
            (other if comm.Get_rank() % 2 else step.call).dispatch()
            gpu.synchronize()
        step.write(1000)
        step.check(*step.run())


def test_late_rank(comm):
    """The last rank makes no call. The others name it, in this call or the next one, and no stale sums remain."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    for call in ("dispatch", "combine"):
        gpu, host = make_both(comm, timeout_s=2.0)
        step = Step(comm, gpu, host, 130)
        step.run()
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            back = step.call.dispatch() if call == "dispatch" else step.call.combine()
            with pytest.raises(EPTimeoutError) as caught:
                gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert time.monotonic() - start < 4
            for again in (step.call.dispatch, step.call.combine):
                with pytest.raises(EPTimeoutError):
                    again()
            assert call == "dispatch" or bool(back.x.isnan().any()), "no stale sums"
        gpu.destroy()
        for again in (step.call.dispatch, step.call.combine):
            with pytest.raises(EPDestroyedError):
                again()
        host.destroy()
        comm.Barrier()
