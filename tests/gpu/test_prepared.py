"""Prepared calls on GPUs, against ordinary calls and the host backend, bit for bit."""

from __future__ import annotations

import functools
import gc
import statistics
import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, cpu, make, rounds, routing, rows, same, tokens  # noqa: E402
from gpu_low_latency import formats, round_trip  # noqa: E402
from gpu_prepared import TOKENS, LowLatency, Throughput, WithHooks, each, kind  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPOutOfMemoryError  # noqa: E402
from deepep_rt.arrays.compressed_rows import COMPRESSIONS  # noqa: E402

__all__ = ["kind"]


def check_bits(calls, seed):
    """Make both calls three times, with inputs that change in place, for the same memory of results. Compare with ordinary calls too."""
    places, names = set(), ("recv_x",) if isinstance(calls, Throughput) else ("num_recv_tokens_per_expert",)
    for i in range(3):
        calls.write(seed + i)
        sent, back = calls.run_anew()
        places.add((sent.recv_x.data_ptr(), back.x.data_ptr()))
        calls.check(sent, back)
        kept = [*(getattr(sent, name).clone() for name in names), back.x.clone()]
        plain, summed = calls.ordinary()
        for mine, theirs in zip(kept, [*(getattr(plain, name) for name in names), summed.x], strict=True):
            same(mine, theirs)
        if isinstance(calls, Throughput):
            assert plain.recv_x.data_ptr() != sent.recv_x.data_ptr() or not plain.recv_x.numel()
    assert len(places) == 1


def kinds_of_rows():
    """Return the options of throughput calls: each kind of row, scales, weights, biases and compression."""
    found = [
        {},
        dict(with_idx=True),
        dict(dtype=torch.uint8, scales=True, num_biases=1),
        dict(dtype=torch.float8_e4m3fn, scales=True, with_idx=True, num_biases=2),
        dict(y_dtype=torch.float16, with_idx=True),
        dict(compress="log10", num_biases=1),
    ]
    return [*found, dict(compress="fp8")] if len(formats()) > 1 else found


@each(Throughput, on_nodes=True)
def test_bits_of_ordinary_throughput_calls(comm, kind):
    """For each kind of row, also on a rank without tokens."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        for number, options in enumerate(kinds_of_rows()):
            tokens = (128, 3 * comm.Get_rank(), 1, 40)[number % 4]
            check_bits(kind(comm, gpu, host, 10 * number, num_tokens=tokens, **options), 1000 + 10 * number)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize(("hidden", "num_topk"), [(7168, 8), (2880, 4), (512, 1)])
@each(LowLatency)
def test_bits_of_ordinary_low_latency_calls(comm, kind, hidden, num_topk, on_timeout):
    """In every format, also on a rank without tokens."""
    gpu, host = kind.make_both(comm, hidden=hidden, num_topk=num_topk, on_timeout=on_timeout)
    with gpu, host:
        for number, options in enumerate(formats() if hidden % 128 == 0 else [dict(use_fp8=False)]):
            for reduce in (True,) if on_timeout == "mask" else (True, False):
                tokens, dtype = (128, 3 * comm.Get_rank(), 1, 40)[number], (torch.int32, torch.int64)[number % 2]
                options = {"use_fp8": True, **options, "allow_multiple_reduction": reduce}
                check_bits(kind(comm, gpu, host, 10 * number, num_tokens=tokens, idx_dtype=dtype, **options), 10 * number)


@each(LowLatency)
def test_compressed_rows_and_own_memory(comm, kind):
    """`compress`, `out` and the memory for experts' outputs."""
    gpu, host = kind.make_both(comm, hidden=1024)
    with gpu, host:
        for number, compress in enumerate(form for form in COMPRESSIONS if form != "fp8" or len(formats()) > 1):
            out = torch.empty(TOKENS, 1024, dtype=torch.bfloat16, device="cuda")
            calls = kind(comm, gpu, host, 20 + number, compress=compress, out=out, zero_copy=True)
            for seed in range(3):
                calls.write(20 + seed)
                sent = calls.call.dispatch()
                y = gpu.get_low_latency_combine_buffer(sent.handle)
                y.copy_(calls.y)
                back = calls.call.combine(y)
                assert back.x.data_ptr() == out.data_ptr()
                calls.check(sent, back)
            with pytest.raises(EPInputError, match="zero_copy=True"):
                calls.call.combine(calls.y)


@each(Throughput)
def test_rows_of_other_arrays(comm, kind):
    """Each combine may get other rows, also of another dtype. The memory of the sums stays."""
    gpu, host = kind.make_both(comm, dtype="float32")
    with gpu, host:
        calls = kind(comm, gpu, host, 100)
        places = set()
        for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)):
            y = rows(comm, 110 + seed, *calls.y.shape, dtype=dtype)
            out = calls.call.combine(y).x
            same(out, host.combine(y.cpu(), calls.host_handle).x)
            places.add(out.data_ptr())
        assert len(places) == 1


def mixed_rounds(comm, calls, num_rounds):
    """Make calls. Some ranks prepare theirs, others do not, and one is late. Yield the number of a round and the check of its results."""
    for i in rounds(comm, num_rounds, every=4, cycles=10e6):
        calls.write(2000 + 10 * i)
        sent, back = calls.run() if (comm.Get_rank() + i) % 3 else calls.ordinary()
        yield i, functools.partial(calls.check, sent, back)


@each(Throughput, on_nodes=True)
def test_throughput_calls_between_others(comm, kind):
    """Ordinary calls of both modes come in between. All ranks change the number of SMs."""
    gpu, host = kind.make_both(comm, low_latency=True, num_slots=3)
    with gpu, host:
        for i, check in mixed_rounds(comm, kind(comm, gpu, host, 200, with_idx=True, num_biases=1), 50):
            if i % 5 == 0:
                kind.round_trip(comm, gpu, host, 3000 + i, 50)
            if i % 7 == 0:
                LowLatency.round_trip(comm, gpu, host, 4000 + i, 40)
            check()
            if i % 10 == 9:
                gpu.num_sms = (8, 24, 16)[i // 10 % 3]


@pytest.mark.parametrize(("num_slots", "num_rounds"), [(2, 60), (1, 30), (5, 30)])
@each(LowLatency)
def test_low_latency_calls_between_others(comm, kind, num_slots, num_rounds):
    """Ordinary and throughput calls come in between."""
    gpu, host = kind.make_both(comm, num_slots=num_slots)
    with gpu, host:
        for i, check in mixed_rounds(comm, kind(comm, gpu, host, 30, **kind.most_arrays()), num_rounds):
            if i % 5 == 0:
                x, idx, weights = tokens(comm, gpu, i, 50)
                same(gpu.dispatch(x, idx, weights).recv_x, host.dispatch(*cpu(x, idx, weights)).recv_x)
            check()
            round_trip(comm, gpu, host, 200 + i, 40, early_weights=i % 2 == 0, reduce=i % 3 != 0, use_fp8=False)


@each(Throughput, LowLatency, on_nodes=True)
def test_calls_without_pauses(comm, kind):
    """The host runs ahead, and ranks run at different speeds. No call overwrites rows before the last ones were read."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls = kind(comm, gpu, host, 300)
        first, kept = calls.x.clone(), []
        torch.cuda.synchronize()
        comm.Barrier()
        for i in range(50):
            if i % 5 == comm.Get_rank() % 5:
                torch.cuda._sleep(int(1e6))
            calls.x.copy_(first).mul_(2.0 ** (i % 4))
            sent = calls.call.dispatch()
            kept.append(calls.call.combine(sent.recv_x).x.clone())
        torch.cuda.synchronize()
        calls.x.copy_(first)
        _, reference = calls.expected(lambda want: want.recv_x)
        for i, out in enumerate(kept):
            same(out, reference.x * 2.0 ** (i % 4))  # powers of two: exact


@each(WithHooks)
def test_two_micro_batches(comm, kind):
    """Each has a prepared call. Send both before one is received. Another rank is late in each round."""
    gpu, host = kind.make_both(comm, hidden=1024)
    with gpu, host:
        batches = [kind(comm, gpu, host, 80 + half) for half in range(2)]
        for i in range(20):
            if comm.Get_rank() == i % comm.Get_size():
                torch.cuda._sleep(int(10e6))
            for half, calls in enumerate(batches):
                calls.write(600 + 2 * i + half)
            sent = [calls.call.dispatch() for calls in batches]
            with pytest.raises(EPInputError, match="prepare another call"):
                batches[0].call.dispatch()
            back = []
            for calls, result in zip(batches, sent, strict=True):
                result.hook()
                back.append(calls.call.combine(calls.y))
            for calls, result, summed in zip(batches, sent, back, strict=True):
                summed.hook()
                calls.check(result, summed)
        sent = [calls.call.dispatch() for calls in batches]
        if comm.Get_rank() == 0:
            sent.clear()  # an exception would lose hooks so; the next call runs them
        for result in sent:
            result.hook()
        del sent, result
        kind.round_trip(comm, gpu, host, 700, 40)


@each(Throughput)
def test_fixed_number_of_rows(comm, kind):
    """A handle of `num_worst_tokens` has padding rows, or brings fewer rows than arrive."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        x, idx, _ = tokens(comm, gpu, 400, 50)
        for worst in (128 * comm.Get_size(), 7):
            handle = gpu.dispatch(x, idx, num_worst_tokens=worst).handle
            want = host.dispatch(*cpu(x, idx), num_worst_tokens=worst)
            step = gpu.prepare_throughput(x, handle)
            num_kept = min(int(want.num_recv_tokens[0]), worst)
            for _ in range(2):
                sent = step.dispatch()
                assert sent.recv_x.shape == (worst, kind.hidden)
                same(sent.recv_x[:num_kept], want.recv_x[:num_kept])
                same(step.combine(sent.recv_x).x, host.combine(want.recv_x, want.handle).x)


@each(Throughput)
def test_memory_of_throughput_calls(comm, kind):
    """Prepared calls that are dropped give their memory to later calls. Results outlive them. A full pool refuses a preparation."""
    gpu, host = kind.make_both(comm, num_slots=2)
    with gpu, host:
        pool, before = gpu._backend.throughput.results.pool, None
        for i in range(12):
            calls = kind(comm, gpu, host, 500 + i)
            sent, back = calls.run()
            x, out = sent.recv_x, back.x
            calls.check(sent, back)
            kept = x.clone(), out.clone()
            del calls, sent, back
            kind.round_trip(comm, gpu, host, 600 + i, 40)
            same(x, kept[0])
            same(out, kept[1])
            del x, out
            torch.cuda.synchronize()
            used = pool.used_bytes
            before = used if before is None else before
            assert used == before, "the pool has its memory back"
        idx, _ = routing(comm, 620, 128, gpu.config.num_topk, gpu.config.num_experts, skip=0.0)
        full = rows(comm, 620, 128, kind.hidden)
        handle = gpu.dispatch(full, idx, num_worst_tokens=128 * comm.Get_size()).handle
        held = [gpu.prepare_throughput(full, handle) for _ in range(2)]
        if gpu.describe().grows:
            held.append(gpu.prepare_throughput(full, handle))
        else:
            with pytest.raises(EPOutOfMemoryError, match="larger num_slots"):
                gpu.prepare_throughput(full, handle)
        same(held[-1].dispatch().recv_x[:1], gpu.dispatch(full, handle=handle).recv_x[:1])


@each(LowLatency)
def test_memory_of_low_latency_calls(comm, kind):
    """Prepared calls that are dropped give their memory to later calls. Results outlive them."""
    gpu, host = kind.make_both(comm, hidden=1024)
    with gpu, host:
        before = None
        for i in range(20):
            calls = kind(comm, gpu, host, 1000 + i)
            sent, back = calls.run()
            x, out = sent.recv_x, back.x
            calls.check(sent, back)
            kept = out.clone()
            del calls, sent, back
            gc.collect()
            kind.round_trip(comm, gpu, host, 1100 + i, 40)
            same(out, kept)
            del x, out, kept
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            if i == 9:
                before = free
        assert TAKE_TURNS or before - free < 64 << 20, "memory is used again"


@each(Throughput)
def test_rows_by_expert_are_refused(comm, kind):
    gpu, host = kind.make_both(comm)
    with gpu, host:
        x, idx, _ = tokens(comm, gpu, 700, 50)
        handle = gpu.dispatch(x, idx, layout="expert").handle
        with pytest.raises(EPInputError, match=r"layout='expert'; expected 'token'.*dispatch\(handle=\)"):
            gpu.prepare_throughput(x, handle)


@each(Throughput)
def test_a_destroyed_buffer(comm, kind):
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls = kind(comm, gpu, host, 710)
        calls.check(*calls.run())
    for call in (calls.call.dispatch, calls.call.combine):
        with pytest.raises(EPDestroyedError):
            call()


@each(LowLatency)
def test_a_second_buffer(comm, kind):
    """While two Buffers have low-latency kernels, these do not overlap. A prepared call follows that too."""
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls = kind(comm, gpu, host, 140)
        for _ in range(2):
            other = make(comm, num_max_tokens_per_rank=128, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True)
            with other:
                second = kind(comm, other, host, 141)
                for seed in range(3):
                    calls.write(1400 + seed), second.write(1410 + seed)
                    calls.check(*calls.run())
                    second.check(*second.run())
            calls.write(1420)
            calls.check(*calls.run())


@each(Throughput, LowLatency)
def test_time_of_the_host(comm, kind, capsys):
    """A prepared call takes the host less than two thirds of the time of an ordinary call."""
    gpu, host = kind.make_both(comm, hidden=7168)
    with gpu, host:
        if TAKE_TURNS or gpu.config.has_relay:  # the relay's thread takes Python's lock, so both times are as long as its turns
            return
        prepared = kind(comm, gpu, host, 720, num_tokens=8, **({} if kind is Throughput else kind.most_arrays()))
        (dispatch, combine), step, y, other = prepared.plain(), prepared.call, prepared.y, prepared.y.clone()
        calls = {
            "dispatch": dispatch,
            "prepared dispatch": step.dispatch,
            "combine": combine,
            "prepared combine": lambda: step.combine(y),
            "prepared combine, another y": lambda: (step.combine(y), step.combine(other))[1],
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
            assert us[f"prepared {name}"] < 0.8 * us[name]  # ordinary calls that repeat a form took two thirds more at times
