"""Prepared low-latency calls on GPUs, against ordinary calls and the host backend, bit for bit."""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, cpu, make, routing, rows, same  # noqa: E402
from gpu_low_latency import formats, make_both, round_trip, transport  # noqa: E402
from gpu_prepared_low_latency import TOKENS, Step  # noqa: E402

from deepep_rt import EPInputError  # noqa: E402
from deepep_rt.arrays.compressed_rows import COMPRESSIONS  # noqa: E402

__all__ = ["transport"]


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


def test_a_second_buffer(comm):
    """While two Buffers have low-latency kernels, these do not overlap. A prepared call follows that too."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        step = Step(comm, gpu, host, 140, use_fp8=False)
        for _ in range(2):
            other = make(comm, num_max_tokens_per_rank=128, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True)
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
    gpu, host = make_both(comm, hidden=7168)
    with gpu, host:
        if TAKE_TURNS or gpu.config.has_relay:  # the relay's thread takes Python's lock, so both times are as long as its turns
            return
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
