"""Prepared low-latency calls on GPUs, against ordinary calls and the host backend, bit for bit: graphs, streams, hooks and failures."""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, cpu, make, routing, rows, same  # noqa: E402
from gpu_low_latency import formats, make_both, outputs, round_trip, same_sent, transport  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError  # noqa: E402
from deepep_rt.arrays.compressed_rows import COMPRESSIONS  # noqa: E402

__all__ = ["transport"]

TOKENS = 60


class Step:
    """A prepared call with arrays that `write` fills in place. The host backend makes the same calls for comparison."""

    def __init__(self, comm, gpu, host, seed, *, num_tokens=TOKENS, idx_dtype=torch.int64, **options):
        self.comm, self.gpu, self.host, self.num_tokens = comm, gpu, host, num_tokens
        config = gpu.config
        self.idx, self.weights = routing(comm, seed, num_tokens, config.num_topk, config.num_experts, dtype=idx_dtype)
        self.x, self.y = rows(comm, seed, num_tokens, config.hidden), outputs(comm, gpu, seed + 1)
        names = {"use_fp8", "round_scale", "use_ue8m0"}
        self.format = {"use_fp8": True, **{name: value for name, value in options.items() if name in names}}
        self.form = {name: value for name, value in options.items() if name in ("allow_multiple_reduction", "compress")}
        self.call = gpu.prepare_low_latency(self.x, self.idx, self.weights, **{**options, **self.format})

    def write(self, seed):
        """Queue new inputs on the current stream."""
        config = self.gpu.config
        idx, weights = routing(self.comm, seed, self.num_tokens, config.num_topk, config.num_experts)
        self.idx.copy_(idx), self.weights.copy_(weights)
        self.x.copy_(rows(self.comm, seed, self.num_tokens, config.hidden))
        self.y.copy_(outputs(self.comm, self.gpu, seed + 1))

    def expected(self):
        """Return what the host backend's dispatch and combine return for the current inputs."""
        x, idx, weights, y = cpu(self.x, self.idx, self.weights, self.y)
        want = self.host.low_latency_dispatch(x, idx, topk_weights=weights, **self.format)
        return want, self.host.low_latency_combine(y, idx, weights, want.handle, **self.form).x

    def check(self, sent, back):
        """Compare the results of both calls with those of the host backend."""
        want, reference = self.expected()
        same_sent(sent, want)
        same(back.x, reference)

    def run(self):
        return self.call.dispatch(), self.call.combine(self.y)

    def ordinary(self):
        """Make the same calls as ordinary ones, with the same options."""
        sent = self.gpu.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, **self.format)
        return sent, self.gpu.low_latency_combine(self.y, self.idx, self.weights, sent.handle, **self.form)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize(("hidden", "num_topk"), [(7168, 8), (2880, 4), (512, 1)])
def test_bits_of_ordinary_calls(comm, hidden, num_topk, on_timeout):
    """In every format, with inputs that change in place, for the same memory of results."""
    gpu, host = make_both(comm, hidden=hidden, num_topk=num_topk, on_timeout=on_timeout)
    with gpu, host:
        for number, options in enumerate(formats() if hidden % 128 == 0 else [dict(use_fp8=False)]):
            for reduce in (True,) if on_timeout == "mask" else (True, False):
                tokens, dtype = (128, 3 * comm.Get_rank(), 1, 40)[number], (torch.int32, torch.int64)[number % 2]
                form = dict(allow_multiple_reduction=reduce)
                step = Step(comm, gpu, host, 10 * number, num_tokens=tokens, idx_dtype=dtype, **options, **form)
                places = set()
                for seed in range(3):
                    step.write(10 * number + seed)
                    sent, back = step.run()
                    places.add((sent.recv_x.data_ptr(), back.x.data_ptr()))
                    step.check(sent, back)
                    kept = [array.clone() for array in (sent.num_recv_tokens_per_expert, back.x)]
                    plain, summed = step.ordinary()
                    same(kept[0], plain.num_recv_tokens_per_expert)
                    same(kept[1], summed.x)
                assert len(places) == 1


def test_compressed_rows_and_own_memory(comm):
    """`compress`, `out` and the memory for experts' outputs."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        for number, compress in enumerate(form for form in COMPRESSIONS if form != "fp8" or len(formats()) > 1):
            out = torch.empty(TOKENS, 1024, dtype=torch.bfloat16, device="cuda")
            step = Step(comm, gpu, host, 20 + number, use_fp8=False, compress=compress, out=out, zero_copy=True)
            for seed in range(3):
                step.write(20 + seed)
                sent = step.call.dispatch()
                y = gpu.get_low_latency_combine_buffer(sent.handle)
                y.copy_(step.y)
                back = step.call.combine(y)
                assert back.x.data_ptr() == out.data_ptr()
                step.check(sent, back)
            with pytest.raises(EPInputError, match="zero_copy=True"):
                step.call.combine(step.y)


@pytest.mark.parametrize(("num_slots", "num_rounds"), [(2, 60), (1, 30), (5, 30)])
def test_between_other_calls(comm, num_slots, num_rounds):
    """Some ranks prepare their calls, others do not, and one is late. Ordinary and throughput calls come in between."""
    gpu, host = make_both(comm, hidden=512, num_slots=num_slots)
    with gpu, host:
        step = Step(comm, gpu, host, 30, use_fp8=len(formats()) > 1)
        rng = np.random.default_rng(5)  # the same on all ranks
        for i in range(num_rounds):
            late = int(rng.integers(comm.Get_size()))
            if i % 4 == 0 and comm.Get_rank() == late:
                torch.cuda._sleep(int(10e6))
            step.write(100 + i)
            sent, back = step.run() if (comm.Get_rank() + i) % 3 else step.ordinary()
            if i % 5 == 0:
                idx, weights = routing(comm, i, 50, 8, gpu.config.num_experts)
                x = rows(comm, i, 50, 512)
                received = gpu.dispatch(x, idx, weights).recv_x
                same(received, host.dispatch(*cpu(x, idx, weights)).recv_x)
            step.check(sent, back)
            round_trip(comm, gpu, host, 200 + i, 40, early_weights=i % 2 == 0, reduce=i % 3 != 0, use_fp8=False)


def test_calls_without_pauses(comm):
    """The host runs ahead. The calls of each step read what the step has written, and later steps do not overwrite it too early."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        step = Step(comm, gpu, host, 40, use_fp8=False)
        first = step.x.clone()
        kept = []
        torch.cuda.synchronize()
        comm.Barrier()
        for i in range(50):
            step.x.copy_(first).mul_(2.0 ** (i % 4))
            sent = step.call.dispatch()
            kept.append(step.call.combine(sent.recv_x).x.clone())
        torch.cuda.synchronize()
        step.x.copy_(first)
        want, _ = step.expected()
        idx, weights = cpu(step.idx, step.weights)
        reference = host.low_latency_combine(want.recv_x, idx, weights, want.handle).x
        for i, out in enumerate(kept):
            same(out, reference * 2.0 ** (i % 4))  # powers of two: exact


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


def test_two_micro_batches(comm):
    """Each has a prepared call. Send both before one is received. Another rank is late in each round."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        steps = [Step(comm, gpu, host, 80 + half, use_fp8=False, return_recv_hook=True) for half in range(2)]
        for i in range(20):
            if comm.Get_rank() == i % comm.Get_size():
                torch.cuda._sleep(int(10e6))
            for half, step in enumerate(steps):
                step.write(600 + 2 * i + half)
            sent = [step.call.dispatch() for step in steps]
            with pytest.raises(EPInputError, match="prepare another call"):
                steps[0].call.dispatch()
            back = []
            for step, result in zip(steps, sent, strict=True):
                result.hook()
                back.append(step.call.combine(step.y))
            for step, result, summed in zip(steps, sent, back, strict=True):
                summed.hook()
                step.check(result, summed)
        sent = [step.call.dispatch() for step in steps]
        if comm.Get_rank() == 0:
            sent.clear()  # an exception would lose hooks so; the next call runs them
        for result in sent:
            result.hook()
        del sent, result
        round_trip(comm, gpu, host, 700, 40, use_fp8=False)


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


def test_memory(comm):
    """Prepared calls that are dropped give their memory to later calls. Results outlive them."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        before = None
        for i in range(20):
            step = Step(comm, gpu, host, 1000 + i, use_fp8=False)
            sent, back = step.run()
            x, out = sent.recv_x, back.x
            step.check(sent, back)
            kept = out.clone()
            del step, sent, back
            gc.collect()
            round_trip(comm, gpu, host, 1100 + i, 40, use_fp8=False)
            same(out, kept)
            del x, out, kept
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            if i == 9:
                before = free
        assert TAKE_TURNS or before - free < 64 << 20, "memory is used again"


def test_experts_chosen_twice_and_bad_input(comm):
    """The device reports wrong expert numbers as in ordinary calls, and the next step is right."""
    gpu, host = make_both(comm, hidden=512, check_inputs=True)
    with gpu, host:
        step = Step(comm, gpu, host, 110, use_fp8=False)
        good = step.idx.clone()
        step.idx[3, 2] = gpu.config.num_experts
        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {gpu.config.num_experts}"):  # noqa: PT012
            step.call.dispatch()
            gpu.synchronize()
        step.idx.copy_(good)
        step.idx[:, 1] = step.idx[:, 0]
        step.check(*step.run())


def test_a_rank_stops(comm):
    """The last rank stops. The others mask it, and go on with their prepared calls."""
    if comm.Get_size() == 1:
        return
    last, steps = comm.Get_size() - 1, 10 if TAKE_TURNS else 100
    gpu, host = make_both(comm, hidden=512, on_timeout="mask", timeout_s=2.0)
    step = Step(comm, gpu, host, 120, use_fp8=False)
    for seed in range(3):
        step.write(120 + seed)
        step.check(*step.run())
    comm.Barrier()
    if comm.Get_rank() != last:
        host.mask_rank(last)
        for seed in range(steps):
            step.write(1200 + seed)
            sent, back = step.run()
            if seed % 10 == 0:
                step.check(sent, back)
                assert gpu.query_masked_ranks() == [last]
        gpu.synchronize()
    comm.Barrier()
    for buffer in (gpu, host):
        buffer.destroy()


def test_late_rank(comm):
    """The last rank makes no call. The others name it, in this call or the next one."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    for call in ("dispatch", "combine"):
        gpu, host = make_both(comm, hidden=512, timeout_s=2.0)
        step = Step(comm, gpu, host, 130, use_fp8=False)
        step.run()
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            back = step.call.dispatch() if call == "dispatch" else step.call.combine()
            with pytest.raises(EPTimeoutError, match=f"low-latency {call}") as caught:
                gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert time.monotonic() - start < 4
            for again in (step.call.dispatch, step.call.combine):
                with pytest.raises(EPTimeoutError, match=f"low-latency {call}"):
                    again()
            assert call == "dispatch" or bool(back.x.isnan().any()), "no stale sums"
        gpu.destroy()
        for again in (step.call.dispatch, step.call.combine):
            with pytest.raises(EPDestroyedError):
                again()
        host.destroy()
        comm.Barrier()


def test_a_second_buffer(comm):
    """While two Buffers have low-latency kernels, these do not overlap. A prepared call follows that too."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        step = Step(comm, gpu, host, 140, use_fp8=False)
        for _ in range(2):
            other = make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True)
            with other:
                second = Step(comm, other, host, 141, use_fp8=False)
                for seed in range(3):
                    step.write(1400 + seed), second.write(1410 + seed)
                    step.check(*step.run())
                    second.check(*second.run())
            step.write(1420)
            step.check(*step.run())


def test_time_of_the_host(comm, capsys):
    """A prepared call takes the host less than two thirds of the time of an ordinary call."""
    if TAKE_TURNS:
        return
    gpu, host = make_both(comm, hidden=7168)
    with gpu, host:
        step = Step(comm, gpu, host, 150, num_tokens=8, use_fp8=len(formats()) > 1)
        handle = step.call.dispatch().handle
        calls = {
            "dispatch": lambda: gpu.low_latency_dispatch(step.x, step.idx, topk_weights=step.weights, **step.format),
            "prepared dispatch": step.call.dispatch,
            "combine": lambda: gpu.low_latency_combine(step.y, step.idx, step.weights, handle),
            "prepared combine": lambda: step.call.combine(step.y),
        }
        us = {}
        for name, call in calls.items():
            spent, held = [], None
            for i in range(300):
                start = time.perf_counter()
                held = call()
                spent.append(1e6 * (time.perf_counter() - start))
                if i % 10 == 9:
                    gpu.synchronize()
            del held
            us[name] = statistics.median(spent)
            comm.Barrier()
        with capsys.disabled():
            if comm.Get_rank() == 0:
                print("\nhost:", ", ".join(f"{name} {time_us:.1f} us" for name, time_us in us.items()), flush=True)
        for name in ("dispatch", "combine"):
            assert us[f"prepared {name}"] < 0.67 * us[name]
