"""The throughput calls on GPUs: frameworks, streams, graphs, pools and timeouts, against the host backend, bit for bit."""

from __future__ import annotations

import os
import time
import weakref

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of every GPU, in every rank
torch = pytest.importorskip("torch")

from gpu_buffers import SHARED_GPUS, cpu, make, poison, routing, rows, same  # noqa: E402

from deepep_rt import EPCompileError, EPConfigError, EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError  # noqa: E402
from deepep_rt.arrays.view import View  # noqa: E402
from deepep_rt.cuda import driver  # noqa: E402
from deepep_rt.jit import current_gpu, loader  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402


def same_dispatch(got, want, num_rows=None):
    for name in ("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", "recv_src_idx"):
        a, b = getattr(got, name), getattr(want, name)
        same(a if a is None else a[:num_rows], b if b is None else b[:num_rows])
    same(got.num_recv_tokens, want.num_recv_tokens)
    same(got.num_recv_tokens_per_expert, want.num_recv_tokens_per_expert)


def round_trip(
    comm, gpu, host, seed, num_tokens, num_topk, *, dtype=torch.bfloat16, idx_dtype=torch.int64, scales=False, one_rank=False
):
    """Dispatch and combine on both backends, and compare all results bit for bit."""
    experts, hidden = gpu.config.num_experts, gpu.config.hidden
    idx, weights = routing(comm, seed, num_tokens, num_topk, experts, dtype=idx_dtype, one_rank=one_rank)
    x = rows(comm, seed, num_tokens, hidden, dtype=dtype)
    s = rows(comm, seed + 1, num_tokens, max(1, hidden // 128), dtype=torch.float32) if scales else None
    got = gpu.dispatch(x, idx, weights, x_scales=s, expert_alignment=4)
    cx, ci, cw, cs = cpu(x, idx, weights, s)
    want = host.dispatch(cx, ci, cw, x_scales=cs, expert_alignment=4)
    same_dispatch(got, want)
    assert got.num_recv_tokens_per_expert_list == want.num_recv_tokens_per_expert_list
    y = rows(comm, seed + 2, got.recv_x.shape[0], hidden)
    bias = rows(comm, seed + 3, num_tokens, hidden)
    back = gpu.combine(y, got.handle, topk_weights=got.recv_topk_weights, bias=bias)
    reference = host.combine(y.cpu(), want.handle, topk_weights=want.recv_topk_weights, bias=bias.cpu())
    same(back.x, reference.x)
    same(back.topk_weights, reference.topk_weights)
    return got, want


# Rows of the first and the last size are no multiples of 128 bytes.
@pytest.mark.parametrize("hidden", [520, 2880, 4096, 5120, 7168, 7184])
@pytest.mark.parametrize(
    ("num_topk", "idx_dtype"), [(1, torch.int32), (4, torch.int64), (8, torch.int64), (9, torch.int32), (32, torch.int64)]
)
def test_sizes(comm, hidden, num_topk, idx_dtype):
    with make(comm, hidden=hidden, num_topk=num_topk) as gpu, make(comm, "host", hidden=hidden, num_topk=num_topk) as host:
        poison(gpu)
        round_trip(comm, gpu, host, 1, 37 + 11 * comm.Get_rank(), num_topk, idx_dtype=idx_dtype)
        poison(gpu)
        round_trip(comm, gpu, host, 2, 0 if comm.Get_rank() % 2 else 200, num_topk, idx_dtype=idx_dtype)
        poison(gpu)
        round_trip(comm, gpu, host, 3, 64, num_topk, idx_dtype=idx_dtype, one_rank=num_topk <= 32)


@pytest.mark.parametrize("hidden", [7168, 7184])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_payloads(comm, dtype, hidden):
    with make(comm, hidden=hidden) as gpu, make(comm, "host", hidden=hidden) as host:
        poison(gpu)
        got, _ = round_trip(comm, gpu, host, 5, 130, 8, dtype=dtype, scales=True)
        assert got.recv_x.dtype == dtype


def test_200_rounds(comm):
    """Calls of all sizes without pauses, with a delay on one rank in every fifth round. They show early reuse of memory."""
    rng = np.random.default_rng(7)  # the same on all ranks
    with (
        make(comm, hidden=1024, num_max_tokens_per_rank=256) as gpu,
        make(comm, "host", hidden=1024, num_max_tokens_per_rank=256) as host,
    ):
        held = []
        for i in range(200):
            late = int(rng.integers(comm.Get_size()))
            if i % 5 == 0 and comm.Get_rank() == late:
                torch.cuda._sleep(int(20e6))
            gpu.num_sms = (24, 3, 64)[i % 3]
            tokens = int(np.random.default_rng([i, comm.Get_rank()]).integers(0, 257))
            held.append(round_trip(comm, gpu, host, 10 * i, tokens, 8, idx_dtype=(torch.int32, torch.int64)[i % 2]))
            if len(held) > i % 3:  # keep some results during later calls
                same_dispatch(*held.pop(0))


def test_known_routing_and_fixed_size(comm):
    with make(comm) as gpu, make(comm, "host") as host:
        got, want = round_trip(comm, gpu, host, 20, 100, 8)
        for seed in (21, 22):
            x = rows(comm, seed, 100, 7168)
            poison_free = gpu.dispatch(x, handle=got.handle)
            same(poison_free.recv_x, host.dispatch(x.cpu(), handle=want.handle).recv_x)
        idx, weights = routing(comm, 23, 100, 8, gpu.config.num_experts)
        for limit in (100 * comm.Get_size(), 60, 0):
            fixed = gpu.dispatch(x, idx, weights, num_worst_tokens=limit)
            reference = host.dispatch(*cpu(x, idx, weights), num_worst_tokens=limit)
            kept = min(limit, int(reference.num_recv_tokens[0]))
            same_dispatch(fixed, reference, kept)
            assert (fixed.recv_topk_idx[kept:] == -1).all()
            assert (fixed.recv_topk_weights[kept:] == 0).all()
            y = rows(comm, 24, limit, 7168)
            same(gpu.combine(y, fixed.handle).x, host.combine(y.cpu(), reference.handle).x)


def test_counts_belong_to_the_caller(comm):
    """A write to them does not change the handle."""
    with make(comm) as gpu, make(comm, "host") as host:
        first, want = round_trip(comm, gpu, host, 15, 100, 8)
        for counts in (first.num_recv_tokens, first.num_recv_tokens_per_expert):
            counts.fill_(77)
        x = rows(comm, 16, 100, 7168)
        again, theirs = gpu.dispatch(x, handle=first.handle), host.dispatch(x.cpu(), handle=want.handle)
        same(again.num_recv_tokens, theirs.num_recv_tokens)
        same(again.num_recv_tokens_per_expert, theirs.num_recv_tokens_per_expert)


def test_graph(comm):
    """Capture once, and replay with changed inputs, also between ordinary calls."""
    with make(comm) as gpu, make(comm, "host") as host:
        worst = 256 * comm.Get_size()
        x = rows(comm, 30, 256, 7168)
        idx, weights = routing(comm, 30, 256, 8, gpu.config.num_experts)

        def step():
            sent = gpu.dispatch(x, idx, weights, num_worst_tokens=worst)
            return sent, gpu.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights)

        step()
        torch.cuda.synchronize()
        comm.Barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sent, back = step()
        out, out_weights = back.x, back.topk_weights
        for seed in range(31, 41):
            new_idx, new_weights = routing(comm, seed, 256, 8, gpu.config.num_experts)
            x.copy_(rows(comm, seed, 256, 7168)), idx.copy_(new_idx), weights.copy_(new_weights)
            graph.replay()
            want = host.dispatch(*cpu(x, idx, weights), num_worst_tokens=worst)
            kept = int(want.num_recv_tokens[0])
            same_dispatch(sent, want, kept)
            reference = host.combine(want.recv_x, want.handle, topk_weights=want.recv_topk_weights)
            same(out, reference.x)
            same(out_weights, reference.topk_weights)
            if seed % 3 == 0:
                round_trip(comm, gpu, host, seed, 50, 8)


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
        idx, weights = routing(comm, 58, 200, 8, gpu.config.num_experts)
        x = rows(comm, 58, 200, 7168)
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
    """The next call gets their memory. It has to wait for the stream that was current when the caller dropped the rows."""
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
        assert again.data_ptr() == place, "the call got other memory, so this run tests nothing"
        torch.cuda.synchronize()
        same(read, want)


def test_results_do_not_hold_arguments(comm):
    """A result makes its arrays on the first access. Until then it must not hold arguments that the caller has dropped."""
    with make(comm, low_latency=True, num_max_tokens_per_rank=64) as buffer:
        idx, weights = routing(comm, 1, 20, 8, buffer.config.num_experts)
        x = rows(comm, 1, 20, 7168)
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


def test_pool_is_full(comm):
    """The caller holds more results than the pool has room for. The Buffer copies them, or raises."""
    with make(comm, num_slots=1) as gpu, make(comm, "host") as host:
        held = [round_trip(comm, gpu, host, 60 + i, 400, 8) for i in range(6)]
        for got, want in held:
            same_dispatch(got, want)
    with make(comm, num_slots=1, on_exhausted="error") as gpu:
        idx, weights = routing(comm, 70, 400, 8, gpu.config.num_experts, skip=0)
        held = []

        def fill():
            for _ in range(9):
                held.append(gpu.dispatch(rows(comm, 70, 400, 7168), idx, weights, num_worst_tokens=400 * comm.Get_size()))

        with pytest.raises(EPOutOfMemoryError, match="num_slots"):
            fill()
        held.clear()
        assert gpu.dispatch(rows(comm, 70, 400, 7168), idx, weights).recv_x.shape[0] >= 0


def test_other_frameworks(comm):
    with make(comm, hidden=512, dtype="float32") as gpu, make(comm, "host", hidden=512, dtype="float32") as host:
        idx, weights = routing(comm, 80, 50, 8, gpu.config.num_experts, dtype=torch.int32)
        x = rows(comm, 80, 50, 512, dtype=torch.float32)
        want = host.dispatch(*cpu(x, idx, weights))
        reference = host.combine(want.recv_x, want.handle).x.numpy()
        cupy = pytest.importorskip("cupy")
        with cupy.cuda.Device(gpu._backend.info.device):
            sent = gpu.dispatch(*map(cupy.asarray, (x, idx, weights)))
            assert isinstance(sent.recv_x, cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(sent.recv_x), want.recv_x.numpy())
            np.testing.assert_array_equal(cupy.asnumpy(gpu.combine(sent.recv_x, sent.handle).x), reference)
        jax = pytest.importorskip("jax")
        device = next(d for d in jax.local_devices() if d.local_hardware_id == gpu._backend.info.device)
        arrays = [jax.device_put(t.cpu().numpy(), device) for t in (x, idx, weights)]
        with torch.cuda.stream(torch.cuda.ExternalStream(gpu._backend.runtime.order.own_stream)):
            torch.cuda._sleep(int(50e6))  # so JAX's stream has to wait for the rows
        sent = gpu.dispatch(*arrays, num_worst_tokens=50 * comm.Get_size())
        np.testing.assert_array_equal(np.asarray(sent.recv_x)[: len(want.recv_x)], want.recv_x.numpy())
        sent = gpu.dispatch(*arrays)
        assert isinstance(sent.recv_x, jax.Array)
        np.testing.assert_array_equal(np.asarray(sent.recv_x), want.recv_x.numpy())
        back = gpu.combine(sent.recv_x + 0, sent.handle).x
        assert isinstance(back, jax.Array)
        np.testing.assert_array_equal(np.asarray(back), reference)


def test_bad_input_leaves_the_buffer_usable(comm):
    with make(comm, check_inputs=True) as gpu, make(comm, "host") as host:
        idx, weights = routing(comm, 90, 40, 8, gpu.config.num_experts)
        x = rows(comm, 90, 40, 7168)
        with pytest.raises(EPInputError, match="contiguous"):
            gpu.dispatch(rows(comm, 90, 7168, 40).t(), idx, weights)
        if torch.cuda.device_count() > 1:
            other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
            with pytest.raises(EPInputError, match="this buffer works in GPU"):
                gpu.dispatch(x.to(other), idx, weights)
        bad = idx.clone()
        bad[3, 2] = gpu.config.num_experts
        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {gpu.config.num_experts}"):
            gpu.dispatch(x, bad, weights)
        round_trip(comm, gpu, host, 91, 40, 8)


def test_ranks_that_differ(comm):
    """With such arguments, ranks would overwrite each other's results. All ranks raise, and the Buffer stays usable."""
    if comm.Get_size() == 1:
        return
    odd = comm.Get_rank() % 2
    with make(comm) as gpu, make(comm, "host") as host:
        idx, weights = routing(comm, 92, 40, 8, gpu.config.num_experts)
        x = rows(comm, 92, 40, 7168)
        sent, other = (gpu.dispatch(x, idx, weights) for _ in range(2))
        wrong = (
            ("topk_weights", lambda: gpu.dispatch(x, idx, weights if odd else None)),
            ("topk_idx", lambda: gpu.dispatch(x, idx.int() if odd else idx, num_worst_tokens=40 * comm.Get_size())),
            ("x of", lambda: gpu.dispatch(x.to(torch.float8_e4m3fn) if odd else x, handle=sent.handle)),
            ("handle", lambda: gpu.combine(sent.recv_x, (other if odd else sent).handle)),
            ("topk_weights", lambda: gpu.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights if odd else None)),
        )
        for what, call in wrong:
            torch.cuda.synchronize()
            torch.cuda._sleep(50_000_000)  # so a call that does not wait for counts returns before its kernel runs
            result = None
            with pytest.raises(EPInputError, match=rf"the ranks disagree on the {what}.*rank \d: .*rank \d: .*No rows were sent"):  # noqa: PT012
                result = call()  # raises if the host waits for counts
                gpu.synchronize()
            if what == "topk_idx":
                assert (result.recv_topk_idx == -1).all()  # a caller that uses the result finds no token
            round_trip(comm, gpu, host, 93, 40, 8)


def test_late_rank(comm):
    """The last rank makes no call. The others name it and the phase, within the limit."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    idx, weights = routing(comm, 95, 40, 8, 32 * comm.Get_size())
    x = rows(comm, 95, 40, 7168)
    for phase in ("the token counts of dispatch", "the address where combine may write"):
        gpu = make(comm, timeout_s=2.0)
        sent = gpu.dispatch(x, idx, weights)
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            with pytest.raises(EPTimeoutError) as caught:  # noqa: PT012  (combine only tells when the host looks)
                if "counts" in phase:
                    gpu.dispatch(x, idx, weights)
                else:
                    gpu.combine(sent.recv_x, sent.handle)
                    gpu.synchronize()
            assert (caught.value.rank, caught.value.peer, caught.value.phase) == (comm.Get_rank(), late, phase)
            assert time.monotonic() - start < 4
            with pytest.raises(EPTimeoutError):
                gpu.combine(sent.recv_x, sent.handle)
        gpu.destroy()
        comm.Barrier()


def test_a_rank_that_leaves_after_an_exception(comm):
    """The others stop waiting for it, also on the GPU, and quote its error. No rank waits in destroy, and the next Buffer works."""

    class Mistake(Exception): ...

    last = comm.Get_size() - 1
    idx, weights = routing(comm, 94, 40, 8, 32 * comm.Get_size())
    x = rows(comm, 94, 40, 7168)
    start = time.monotonic()
    if comm.Get_rank() == last:
        with pytest.raises(Mistake), make(comm, timeout_s=30) as gpu:  # noqa: PT012
            gpu.dispatch(x, idx, weights)
            raise Mistake("no more data")
    else:
        left = f"rank {last} left the Buffer.*Mistake: no more data"
        with pytest.raises(EPTimeoutError, match=left), make(comm, timeout_s=30) as gpu:  # noqa: PT012
            gpu.dispatch(x, idx, weights)
            gpu.dispatch(x, idx, weights)
    assert time.monotonic() - start < 8
    comm.Barrier()
    gpu, host = make(comm), make(comm, "host")
    with gpu, host:
        round_trip(comm, gpu, host, 93, 40, 8)


def test_two_ranks_on_one_gpu_are_refused(comm, monkeypatch):
    monkeypatch.delenv("DEEPEP_RT_SHARE_GPUS", raising=False)
    if comm.Get_size() == 1:
        return
    mine = torch.cuda.current_device()
    torch.cuda.set_device(0)
    try:
        with pytest.raises(EPConfigError, match="one rank a GPU"):
            make(comm)
    finally:
        torch.cuda.set_device(mine)


def test_a_buffer_that_one_rank_cannot_make(comm, monkeypatch):
    """All ranks learn of the failure and free their memory, so a program can try again."""
    real, last = loader.load, comm.Get_size() - 1

    def load(kernel, *given):
        if kernel.name == "combine":
            raise EPCompileError("not here")
        return real(kernel, *given)

    sizes = dict(hidden=4096, num_max_tokens_per_rank=2048)
    with make(comm, **sizes):
        pass
    before = driver.free_bytes()
    for _ in range(12):  # NVSHMEM's heap has no room for so many, if they stay allocated
        with monkeypatch.context() as broken:
            if comm.Get_rank() == last:
                broken.setattr(loader, "load", load)
            with pytest.raises(EPCompileError if comm.Get_rank() == last else EPUnavailableError, match=r"not here|another rank"):
                make(comm, **sizes)
    assert driver.free_bytes() > before - (64 << 20)
    with make(comm, **sizes) as buffer:
        idx, weights = routing(comm, 5, 100, 8, buffer.config.num_experts)
        sent = buffer.dispatch(rows(comm, 5, 100, 4096), idx, weights)
        assert buffer.combine(sent.recv_x, sent.handle).x.shape == (100, 4096)


def test_host_time(comm):
    """The host's time of a call that does not wait for counts: at most 60 us, or 25 us for low latency.

    The times of one machine's CPUs differ by a factor of up to 1.8, so the test takes the best ten calls of the best rank. Machines differ
    by more than 2, in Python or in the driver. The test measures PyTorch's smallest operation and the construction of twenty Views. If
    one takes longer than usual, the limits grow by the same factor.
    """
    if SHARED_GPUS:
        return  # times of ranks that share a GPU mean nothing

    def host_us(call):
        """Time of one call in ten successive calls, as in decoding."""
        times = []
        for _ in range(100):
            start = time.perf_counter()
            for _ in range(10):
                call()
            times.append((time.perf_counter() - start) / 10)
            torch.cuda.synchronize()
        return 1e6 * min(comm.allgather(min(times)))

    with make(comm, low_latency=True, num_max_tokens_per_rank=128) as gpu:
        idx, weights = routing(comm, 97, 64, 8, gpu.config.num_experts)
        x = rows(comm, 97, 64, 7168)
        fp8 = has_fp8(current_gpu.target_arch())
        known, quick = gpu.dispatch(x, idx, weights).handle, gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=fp8)
        y = rows(comm, 98, *quick.recv_x.shape)
        spent = {
            "dispatch": (60, host_us(lambda: gpu.dispatch(x, handle=known))),
            "dispatch, num_worst_tokens": (60, host_us(lambda: gpu.dispatch(x, idx, weights, num_worst_tokens=128))),
            "low_latency_dispatch": (25, host_us(lambda: gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=fp8))),
            "low_latency_combine": (25, host_us(lambda: gpu.low_latency_combine(y, idx, weights, quick.handle))),
        }
        one = torch.zeros(1, device="cuda")
        yardsticks = {
            "add_": (8, host_us(lambda: one.add_(1))),
            "Views": (5, host_us(lambda: [View(0, (1, 2), "int32", 0, None, one) for _ in range(20)])),
        }
        print({name: f"{us:.1f} us" for name, (_, us) in {**spent, **yardsticks}.items()})
        slowness = max(1.0, *(us / usual for usual, us in yardsticks.values()))
        assert not [name for name, (limit, us) in spent.items() if us > limit * slowness], (spent, yardsticks)
