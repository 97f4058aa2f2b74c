"""Buffers in CUDA's virtual memory: groups of any shape, memory that comes back at once, and no NVSHMEM."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import make, routing  # noqa: E402
from launch import environment  # noqa: E402
from paths import PROGRAMS  # noqa: E402

from deepep_rt import EPOutOfMemoryError, EPTimeoutError  # noqa: E402
from deepep_rt.cuda import driver  # noqa: E402

CYCLES = int(os.environ.get("CYCLES", "200"))  # of sleep and wake
SIZES = dict(num_max_tokens_per_rank=128, hidden=512, num_topk=4)


@pytest.fixture(autouse=True)
def _heap(monkeypatch):
    monkeypatch.setenv("DEEPEP_RT_SYMMETRIC_MEMORY", "heap")


def _group_buffer(comm, **sizes):
    return make(comm, **{**SIZES, "num_experts": 8 * comm.Get_size(), "low_latency": True, **sizes})


def _use(buffer, comm, seed=1):
    """Rows come back as often as they were sent, and as the sum of their weights."""
    rank, size = comm.Get_rank(), comm.Get_size()
    idx, _ = routing(comm, seed, 100, 4, 8 * size)
    x = (torch.arange(100, device="cuda") % 8 + 8 * rank + 1.0)[:, None].repeat(1, 512).bfloat16()
    weights = torch.full(idx.shape, 0.5, device="cuda")
    sent = buffer.dispatch(x, idx, weights)
    owner = torch.where(idx >= 0, idx // 8, -1)
    copies = sum((owner == peer).any(1).float() for peer in range(size))
    assert torch.equal(buffer.combine(sent.recv_x, sent.handle).x.float(), x.float() * copies[:, None])
    quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
    back = buffer.low_latency_combine(quick.recv_x, idx, weights, quick.handle).x
    assert torch.equal(back.float(), x.float() * 0.5 * (owner >= 0).sum(1).float()[:, None])


def _free_bytes(comm):
    torch.cuda.synchronize()
    comm.Barrier()
    found = driver.free_bytes()
    comm.Barrier()
    return found


def test_groups_of_any_shape(comm):
    """At once, of different sizes, some overlapping, and without a Buffer over all ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    held = []
    for number, parts in enumerate(([1], [size - 1], [size // 2], [size])):
        color = sum(rank >= sum(parts[: i + 1]) for i in range(len(parts)))
        group = comm.Split(color, rank)
        held.append((group, _group_buffer(group, num_max_tokens_per_rank=128 * (1 + number + color))))
    for seed in range(3):
        for group, buffer in held:
            _use(buffer, group, seed)
    for _, buffer in held[::2]:
        buffer.destroy()
    for group, buffer in held[1::2]:
        _use(buffer, group, 4)
        buffer.destroy()
    for group, _ in held:
        group.Free()


def _collect(held):
    held.clear()
    gc.collect()


def test_memory_comes_back(comm):
    """After a with block, after a time-out, and after an exception. No other program may use these GPUs meanwhile."""
    _group_buffer(comm).destroy()  # CUDA keeps some memory for modules
    before = _free_bytes(comm)
    with _group_buffer(comm) as buffer:
        _use(buffer, comm)
        assert driver.free_bytes() < before
    assert _free_bytes(comm) >= before, "a with block"
    buffer = _group_buffer(comm, timeout_s=1.0)
    _use(buffer, comm)
    if comm.Get_size() > 1:
        if comm.Get_rank():
            idx, weights = routing(comm, 1, 10, 4, 8 * comm.Get_size(), skip=0.0)
            with pytest.raises(EPTimeoutError):
                buffer.dispatch(torch.ones(10, 512, device="cuda", dtype=torch.bfloat16), idx, weights)
        else:
            time.sleep(2.5)
    begin = time.monotonic()
    buffer.destroy(in_touch=False)
    assert time.monotonic() - begin < 1, "this rank waits for no other"
    assert _free_bytes(comm) >= before, "a time-out"
    with pytest.raises(KeyError), _group_buffer(comm) as buffer:
        raise KeyError(_use(buffer, comm))
    assert _free_bytes(comm) >= before, "an exception"
    held = [_group_buffer(comm)]
    _use(held[0], comm)
    torch.cuda.synchronize()
    with pytest.warns(ResourceWarning):
        _collect(held)
    _group_buffer(comm).destroy()
    assert _free_bytes(comm) >= before, "a Buffer that was dropped"


def test_too_little_memory(comm, monkeypatch):
    """Another process may take the memory between the check and the allocation."""
    _group_buffer(comm).destroy()
    before = _free_bytes(comm)
    monkeypatch.setattr(driver, "free_bytes", lambda: 1 << 50)
    with pytest.raises(EPOutOfMemoryError, match="GB of memory for a Buffer"):
        _group_buffer(comm, num_max_tokens_per_rank=1 << 17, hidden=32768, low_latency=False)
    monkeypatch.undo()
    assert _free_bytes(comm) >= before


def test_sleep_and_wake(comm):
    """A captured graph of both modes, a prepared call and ordinary calls give the same after the Buffer has slept."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with _group_buffer(comm, num_max_tokens_per_rank=4096) as buffer:
        idx, _ = routing(comm, 3, 100, 4, 8 * size)
        x = torch.randn(100, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(rank)).bfloat16()
        weights = torch.rand(idx.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))

        def step():
            sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100 * size)
            back = buffer.combine(sent.recv_x, sent.handle).x
            quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
            return back, buffer.low_latency_combine(quick.recv_x, idx, weights, quick.handle).x

        known = buffer.dispatch(x, idx, weights)
        prepared = buffer.prepare_throughput(x, known.handle)
        for _ in range(2):
            wanted = [part.clone() for part in step()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        least = buffer._backend.runtime.layout.symmetric.num_bytes
        for cycle in range(20):
            awake = _free_bytes(comm)
            buffer.sleep()
            assert _free_bytes(comm) - awake >= 0.9 * least, "the memory of all ranks is free"
            buffer.wake()
            for part in captured:
                part.fill_(7.0)
            for _ in range(cycle % 3 + 1):
                graph.replay()
            for got, want in zip((*captured, *step()), 2 * wanted, strict=True):
                assert torch.equal(got, want), cycle
            again = prepared.dispatch()
            assert torch.equal(prepared.combine(again.recv_x).x, wanted[0]), cycle
            _use(buffer, comm, cycle)


def test_many_cycles(comm):
    """A graph replays with new rows after each of many cycles. No memory and no descriptor stays behind. It prints the time of a cycle."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with _group_buffer(comm) as buffer:
        idx, _ = routing(comm, 9, 100, 4, 8 * size)
        owner = torch.where(idx >= 0, idx // 8, -1)
        copies = sum((owner == peer).any(1).float() for peer in range(size))[:, None]
        x, weights = torch.empty(100, 512, dtype=torch.bfloat16, device="cuda"), torch.full(idx.shape, 0.5, device="cuda")
        x.fill_(1.0)

        def step():
            sent = buffer.dispatch(x, idx, weights, num_worst_tokens=100 * size)
            quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
            return buffer.combine(sent.recv_x, sent.handle).x, buffer.low_latency_combine(
                quick.recv_x, idx, weights, quick.handle
            ).x

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        num_wrong, share = torch.zeros((), dtype=torch.int64, device="cuda"), 0.5 * (owner >= 0).sum(1).float()[:, None]
        before, spent, rng = None, [], np.random.default_rng(rank)
        for cycle in range(CYCLES):
            begin = time.perf_counter()
            buffer.sleep()
            buffer.wake()
            spent.append(time.perf_counter() - begin)
            x.copy_((torch.arange(100, device="cuda") % 8 + int(rng.integers(1, 100)))[:, None])
            for part in captured:
                part.fill_(float("nan"))
            graph.replay()
            for part, factor in zip(captured, (copies, share), strict=True):
                num_wrong += (part.float() != (x.float() * factor).bfloat16().float()).sum()
            if cycle in (10, CYCLES - 1):
                now = _free_bytes(comm), len(os.listdir("/proc/self/fd"))
                before = before or now
                assert now[1] == before[1], "descriptors"
                assert before[0] - now[0] < 8 << 20, "memory"
        assert num_wrong.item() == 0
        _use(buffer, comm)
        p50, longest = 1e3 * np.median(spent), 1e3 * max(spent)
        print(f"rank {rank}: {CYCLES} cycles of sleep and wake, each with a replay: p50 {p50:.2f} ms, max {longest:.1f} ms")


def _checks():
    try:
        import sleeping
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    return [check for name, check in vars(sleeping).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", _checks())
def test_buffers_that_sleep(check, comm, monkeypatch):
    """The checks of the host backend, with arrays of NumPy."""
    import spmd

    monkeypatch.setattr(spmd, "backend", "cuda")
    assert spmd.run_check(check, comm)


def test_kept_results(comm):
    """In the pool, and of low-latency calls. Results that are not kept have other contents, and the memory of all ranks is free."""
    size = comm.Get_size()
    with _group_buffer(comm) as buffer:
        idx, _ = routing(comm, 3, 100, 4, 8 * size)
        x = torch.randn(100, 512, device="cuda").bfloat16()
        weights = torch.rand(idx.shape, device="cuda")
        sent = buffer.dispatch(x, idx, weights)
        back = buffer.combine(sent.recv_x, sent.handle)
        quick = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        parts = [sent.recv_x, sent.recv_topk_idx, back.x, quick.recv_x]
        wanted = [part.clone() for part in parts]
        for _ in range(3):
            buffer.sleep(keep_results=True)
            filler = torch.full((1 << 28,), 3, dtype=torch.uint8, device="cuda")  # takes the pages that came free
            del filler
            torch.cuda.empty_cache()
            buffer.wake()
            for got, want in zip(parts, wanted, strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            again = buffer.low_latency_combine(quick.recv_x, idx, weights, quick.handle)
            _use(buffer, comm)
            del again


def test_the_pool_grows(comm):
    """While results fill it, on each rank by itself, in a capture too. It shrinks when they are gone, and sleeps with what they hold."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with _group_buffer(comm, num_max_tokens_per_rank=2048, statistics=True) as buffer:
        _use(buffer, comm)
        before = _free_bytes(comm)
        idx, _ = routing(comm, 5, 1500, 4, 8 * size)
        weights = torch.rand(idx.shape, device="cuda")
        held, wanted = [], []
        for number in range(8):
            x = torch.full((1500, 512), 8.0 * number + rank, device="cuda").bfloat16()
            sent = buffer.dispatch(x, idx, weights)
            back = buffer.combine(sent.recv_x, sent.handle).x
            if number % 2 or rank % 2:  # some ranks keep all results
                held.append((sent.recv_x, back))
                wanted.append((sent.recv_x.clone(), back.clone()))
        pool = buffer.statistics().pool
        assert pool.results_copied == 0
        assert pool.capacity_bytes > buffer._backend.runtime.regions.sizes["pool"]
        buffer.sleep(keep_results=True)
        buffer.wake()
        for got, want in zip(held, wanted, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        del sent, back, got, want
        held.clear()
        wanted.clear()
        gc.collect()
        comm.Barrier()
        assert buffer.trim() > 0
        assert buffer.statistics().pool.capacity_bytes == buffer._backend.runtime.regions.sizes["pool"]
        torch.cuda.empty_cache()
        assert _free_bytes(comm) >= before - (64 << 20)
        _use(buffer, comm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # three results do not fit
            captured = [buffer.dispatch(x, idx, weights, num_worst_tokens=1500 * size).recv_x for _ in range(3)]
        for replay in range(3):
            if replay:
                buffer.sleep()
                buffer.wake()
            graph.replay()
            torch.cuda.synchronize()
            buffer.check()
            sent = buffer.dispatch(x, idx, weights)
            rows = sent.recv_x.shape[0]
            assert all(torch.equal(one[:rows], sent.recv_x) for one in captured)


def test_nvshmem_is_not_loaded(comm):
    """Also with GPUs that each process hides from the others."""
    if not comm.rank:
        for more in ((), ("one-gpu",) if comm.size <= torch.cuda.device_count() else ()):
            words = [sys.executable, str(PROGRAMS / "spawned.py"), "cuda", str(comm.size), *more]
            setting = {"DEEPEP_RT_SYMMETRIC_MEMORY": "heap"}
            done = subprocess.run(words, env=environment(**setting), capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "all passed" in done.stdout
    comm.Barrier()


def test_survivors_of_random_kills(comm):
    """Any rank may die, in any call. The others make a new Buffer each time, and go on. It prints how long that took."""
    if comm.rank == 0 and comm.size > 2:
        words = [sys.executable, str(PROGRAMS / "kills.py"), "cuda", "4", str(comm.size), "3"]
        env = environment(DEEPEP_RT_SYMMETRIC_MEMORY="heap")
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed: 4 kills in" in done.stdout
    comm.Barrier()


def test_survivors_go_on(comm):
    """After the death of a rank, the others make a new Buffer, and go on."""
    if comm.rank == 0 and comm.size > 1:
        for call in ("dispatch", "low_latency_combine"):
            words = [sys.executable, str(PROGRAMS / "gpu_faults.py"), "cuda", "killed", call, "100", str(comm.size)]
            env = environment(DEEPEP_RT_SYMMETRIC_MEMORY="heap")
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=150, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            print("\n".join(line for line in done.stdout.splitlines() if "new Buffer" in line))
            assert done.stdout.count("new Buffer") == comm.size - 1
    comm.Barrier()
