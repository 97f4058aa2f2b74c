"""Prepared throughput calls on GPUs, against ordinary calls and the host backend, bit for bit."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import gpu_buffers  # noqa: E402
from gpu_buffers import TAKE_TURNS, cpu, routing, rows, same  # noqa: E402
from gpu_low_latency import formats  # noqa: E402
from gpu_low_latency import round_trip as low_latency_round_trip  # noqa: E402
from gpu_prepared_throughput import HIDDEN, Step, make_both  # noqa: E402
from gpu_throughput import round_trip  # noqa: E402
from transports import nodes  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPOutOfMemoryError  # noqa: E402


@pytest.fixture(params=[pytest.param(settings, id=name) for name, settings in nodes()])
def on_nodes(request, monkeypatch):
    """Run a test on one node, and on two over each path and transport."""
    monkeypatch.setattr(gpu_buffers, "more", request.param)


def cases():
    """Return the options of steps: each kind of row, scales, weights, biases and compression."""
    found = [
        {},
        dict(with_idx=True),
        dict(dtype=torch.uint8, scales=True, num_biases=1),
        dict(dtype=torch.float8_e4m3fn, scales=True, with_idx=True, num_biases=2),
        dict(y_dtype=torch.float16, with_idx=True),
        dict(compress="log10", num_biases=1),
    ]
    return [*found, dict(compress="fp8")] if len(formats()) > 1 else found


def test_bits_of_ordinary_calls(comm, on_nodes):
    """With inputs that change in place, for the same memory of results, and also on a rank without tokens."""
    gpu, host = make_both(comm)
    with gpu, host:
        for number, options in enumerate(cases()):
            tokens = (128, 3 * comm.Get_rank(), 1, 40)[number % 4]
            step = Step(comm, gpu, host, 10 * number, num_tokens=tokens, **options)
            places = set()
            for seed in range(3):
                step.write(1000 + 10 * number + seed)
                sent, back = step.run_poisoned()
                places.add((sent.recv_x.data_ptr(), back.x.data_ptr()))
                step.check(sent, back)
                kept = sent.recv_x.clone(), back.x.clone()
                plain, summed = step.ordinary()
                same(kept[0], plain.recv_x)
                same(kept[1], summed.x)
                assert plain.recv_x.data_ptr() != sent.recv_x.data_ptr() or not plain.recv_x.numel()
            assert len(places) == 1


def test_rows_of_other_arrays(comm):
    """Each combine may get other rows, also of another dtype. The memory of the sums stays."""
    gpu, host = make_both(comm, dtype="float32")
    with gpu, host:
        step = Step(comm, gpu, host, 100)
        places = set()
        for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)):
            y = rows(comm, 110 + seed, *step.y.shape, dtype=dtype)
            out = step.call.combine(y).x
            same(out, host.combine(y.cpu(), step.host_handle).x)
            places.add(out.data_ptr())
        assert len(places) == 1


def test_between_other_calls(comm, on_nodes):
    """50 rounds: some ranks prepare their calls, others do not, and one is late. Calls of both modes come in between."""
    gpu, host = make_both(comm, low_latency=True, num_slots=3)
    with gpu, host:
        step = Step(comm, gpu, host, 200, with_idx=True, num_biases=1)
        rng = np.random.default_rng(5)  # the same on all ranks
        for i in range(50):
            late = int(rng.integers(comm.Get_size()))
            if i % 4 == 0 and comm.Get_rank() == late:
                torch.cuda._sleep(int(10e6))
            step.write(2000 + 10 * i)
            sent, back = step.run() if (comm.Get_rank() + i) % 3 else step.ordinary()
            if i % 5 == 0:
                round_trip(comm, gpu, host, 3000 + i, 50, gpu.config.num_topk)
            if i % 7 == 0:
                low_latency_round_trip(comm, gpu, host, 4000 + i, 40, use_fp8=False)
            step.check(sent, back)
            if i % 10 == 9:  # all ranks change it
                gpu.num_sms = (8, 24, 16)[i // 10 % 3]


def test_calls_without_pauses(comm, on_nodes):
    """The host runs ahead, and ranks run at different speeds. No rank writes rows before the last ones were read."""
    gpu, host = make_both(comm)
    with gpu, host:
        step = Step(comm, gpu, host, 300)
        first = step.x.clone()
        kept = []
        torch.cuda.synchronize()
        comm.Barrier()
        for i in range(50):
            if i % 5 == comm.Get_rank() % 5:
                torch.cuda._sleep(int(1e6))
            step.x.copy_(first).mul_(2.0 ** (i % 4))
            sent = step.call.dispatch()
            kept.append(step.call.combine(sent.recv_x).x.clone())
        torch.cuda.synchronize()
        step.x.copy_(first)
        want, _ = step.expected()
        reference = host.combine(want.recv_x, step.host_handle).x
        for i, out in enumerate(kept):
            same(out, reference * 2.0 ** (i % 4))  # powers of two: exact


def test_fixed_number_of_rows(comm):
    """A handle of `num_worst_tokens` has padding rows, or brings fewer rows than arrive."""
    gpu, host = make_both(comm)
    with gpu, host:
        idx, _ = routing(comm, 400, 50, gpu.config.num_topk, gpu.config.num_experts)
        x = rows(comm, 400, 50, HIDDEN)
        for worst in (128 * comm.Get_size(), 7):
            handle = gpu.dispatch(x, idx, num_worst_tokens=worst).handle
            want = host.dispatch(*cpu(x, idx), num_worst_tokens=worst)
            step = gpu.prepare_throughput(x, handle)
            num_kept = min(int(want.num_recv_tokens[0]), worst)
            for _ in range(2):
                sent = step.dispatch()
                assert sent.recv_x.shape == (worst, HIDDEN)
                same(sent.recv_x[:num_kept], want.recv_x[:num_kept])
                same(step.combine(sent.recv_x).x, host.combine(want.recv_x, want.handle).x)


def test_memory(comm):
    """Prepared calls that are dropped give their memory to later calls. Results outlive them. A full pool refuses a preparation."""
    gpu, host = make_both(comm, num_slots=2)
    with gpu, host:
        pool, before = gpu._backend.throughput.results.pool, None
        for i in range(12):
            step = Step(comm, gpu, host, 500 + i)
            sent, back = step.run()
            x, out = sent.recv_x, back.x
            step.check(sent, back)
            kept = x.clone(), out.clone()
            del step, sent, back
            round_trip(comm, gpu, host, 600 + i, 40, gpu.config.num_topk)
            same(x, kept[0])
            same(out, kept[1])
            del x, out
            torch.cuda.synchronize()
            used = pool.used_bytes
            before = used if before is None else before
            assert used == before, "the pool has its memory back"
        idx, _ = routing(comm, 620, 128, gpu.config.num_topk, gpu.config.num_experts, skip=0.0)
        full = rows(comm, 620, 128, HIDDEN)
        handle = gpu.dispatch(full, idx, num_worst_tokens=128 * comm.Get_size()).handle
        held = [gpu.prepare_throughput(full, handle) for _ in range(2)]
        with pytest.raises(EPOutOfMemoryError, match="larger num_slots"):
            gpu.prepare_throughput(full, handle)
        same(held[0].dispatch().recv_x[:1], gpu.dispatch(full, handle=handle).recv_x[:1])


def test_rows_by_expert_are_refused(comm):
    gpu, host = make_both(comm)
    with gpu, host:
        idx, _ = routing(comm, 700, 50, gpu.config.num_topk, gpu.config.num_experts)
        x = rows(comm, 700, 50, HIDDEN)
        handle = gpu.dispatch(x, idx, layout="expert").handle
        with pytest.raises(EPInputError, match=r"layout='expert'; expected 'token'.*dispatch\(handle=\)"):
            gpu.prepare_throughput(x, handle)


def test_a_destroyed_buffer(comm):
    gpu, host = make_both(comm)
    with gpu, host:
        step = Step(comm, gpu, host, 710)
        step.check(*step.run())
    for call in (step.call.dispatch, step.call.combine):
        with pytest.raises(EPDestroyedError):
            call()


def test_time_of_the_host(comm, capsys):
    """A prepared call takes the host less than two thirds of the time of an ordinary call."""
    gpu, host = make_both(comm, hidden=7168)
    with gpu, host:
        if TAKE_TURNS or gpu.config.has_relay:  # the relay's thread takes Python's lock, so both times are as long as its turns
            return
        step = Step(comm, gpu, host, 720, num_tokens=8)
        other = step.y.clone()
        calls = {
            "dispatch": lambda: gpu.dispatch(step.x, handle=step.handle),
            "prepared dispatch": step.call.dispatch,
            "combine": lambda: gpu.combine(step.y, step.handle),
            "prepared combine": lambda: step.call.combine(step.y),
            "prepared combine, another y": lambda: (step.call.combine(step.y), step.call.combine(other))[1],
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
        us["prepared combine, another y"] /= 2
        with capsys.disabled():
            if comm.Get_rank() == 0:
                print("\nhost:", ", ".join(f"{name} {time_us:.1f} us" for name, time_us in us.items()), flush=True)
        for name in ("dispatch", "combine"):
            assert us[f"prepared {name}"] < 0.67 * us[name]
