"""Low-latency calls on GPUs: sizes against the host backend bit for bit, hooks, CUDA graphs, concurrent work, timeouts."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import gpu_buffers  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_buffers import SHARED_GPUS, TAKE_TURNS, cpu, make, read, routing, rows, same, write  # noqa: E402
from process_group import in_reverse  # noqa: E402
from transports import transports  # noqa: E402

from deepep_rt import EPInputError, EPTimeoutError  # noqa: E402
from deepep_rt.jit import current_gpu  # noqa: E402
from deepep_rt.kernels import structs  # noqa: E402
from deepep_rt.kernels.layout import Layout  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402

FORMATS = [dict(use_fp8=False), dict(), dict(round_scale=True), dict(use_ue8m0=True)]


def formats():
    return FORMATS if has_fp8(current_gpu.target_arch()) else FORMATS[:1]


@pytest.fixture(params=[pytest.param(settings, id=name) for name, settings in transports()], autouse=True)
def transport(request, monkeypatch):
    """Run every test over NVLink, over NVSHMEM, and with both."""
    monkeypatch.setattr(gpu_buffers, "more", request.param)


def make_both(comm, **sizes):
    sizes = {"num_max_tokens_per_rank": 128, "num_experts": 8 * comm.Get_size(), "low_latency": True, **sizes}
    return make(comm, **sizes), make(comm, "host", **sizes)


def filled(array, counts):
    """Return the defined rows of each expert, as bytes."""
    array = array.cpu()
    return torch.cat([array[e, :n].contiguous().view(torch.uint8).flatten() for e, n in enumerate(counts.tolist())])


def same_sent(got, want):
    counts = want.num_recv_tokens_per_expert
    same(got.num_recv_tokens_per_expert, counts)
    for name in ("recv_x", "recv_x_scales"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(filled(a, counts), filled(b, counts))


def outputs(comm, buffer, seed):
    """Make the rows that stand for the experts' outputs."""
    c = buffer.config
    return rows(comm, seed, c.num_local_experts, c.num_max_recv_tokens, c.hidden)


def round_trip(
    comm, gpu, host, seed, num_tokens, *, early_weights=True, reduce=True, idx_dtype=torch.int64, one_rank=False, **options
):
    config = gpu.config
    idx, weights = routing(comm, seed, num_tokens, config.num_topk, config.num_experts, dtype=idx_dtype, one_rank=one_rank)
    x, y = rows(comm, seed, num_tokens, config.hidden), outputs(comm, gpu, seed + 1)
    cx, cy, ci, cw = cpu(x, y, idx, weights)
    got = gpu.low_latency_dispatch(x, idx, topk_weights=weights if early_weights else None, **options)
    want = host.low_latency_dispatch(cx, ci, topk_weights=cw if early_weights else None, **options)
    same_sent(got, want)
    back = gpu.low_latency_combine(y, idx, weights, got.handle, allow_multiple_reduction=reduce)
    reference = host.low_latency_combine(cy, ci, cw, want.handle, allow_multiple_reduction=reduce)
    same(back.x, reference.x)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize(("hidden", "num_topk"), [(7168, 8), (5120, 9), (4096, 1), (2880, 4), (512, 32)])
def test_sizes(comm, hidden, num_topk, on_timeout):
    each = max(4, -(-num_topk // comm.Get_size()))
    sizes = dict(hidden=hidden, num_topk=num_topk, num_experts=each * comm.Get_size(), on_timeout=on_timeout)
    gpu, host = make_both(comm, **sizes)
    reduce = on_timeout == "mask"  # required on GPUs if timeouts mask
    with gpu, host:
        for seed, options in enumerate(formats() if hidden % 128 == 0 else FORMATS[:1]):
            options = {"use_fp8": True, **options}
            round_trip(comm, gpu, host, 10 * seed, 128, **options)
            round_trip(comm, gpu, host, 10 * seed + 2, 3 * comm.Get_rank(), reduce=reduce, idx_dtype=torch.int32, **options)
            round_trip(comm, gpu, host, 10 * seed + 4, 1, early_weights=False, **options)
            if num_topk <= each:
                round_trip(comm, gpu, host, 10 * seed + 6, 40, one_rank=True, early_weights=False, **options)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
@pytest.mark.parametrize(("num_sms", "hidden"), [(1, 1024), (3, 1024), (37, 1024), (100, 1024), (16, 7168), (5, 5120)])
def test_numbers_of_sms(comm, num_sms, hidden, on_timeout):
    """All ways to share tokens among warps: many tokens for a block, several blocks for a token, idle blocks, and tiles of rows."""
    gpu, host = make_both(comm, hidden=hidden, low_latency_sms=num_sms, on_timeout=on_timeout)
    with gpu, host:
        for seed, tokens in enumerate((1, 2, 3 * comm.Get_rank(), 17, 128)):
            round_trip(comm, gpu, host, 7 * seed, tokens, early_weights=seed % 2 == 0, **{"use_fp8": True, **formats()[-1]})


@pytest.mark.parametrize(("num_slots", "num_rounds"), [(2, 100), (1, 30), (5, 30)])
def test_100_rounds(comm, num_slots, num_rounds):
    """Calls without pauses, with delays on one rank, and throughput calls in between. They show early reuse of an inbox."""
    gpu, host = make_both(comm, hidden=512, num_slots=num_slots)
    with gpu, host:
        rng = np.random.default_rng(5)  # the same on all ranks
        for i in range(num_rounds):
            if i % 4 == 0 and comm.Get_rank() == int(rng.integers(comm.Get_size())):
                torch.cuda._sleep(int(10e6))
            options = formats()[i % len(formats())]
            tokens = int(np.random.default_rng([i, comm.Get_rank()]).integers(0, 129))
            round_trip(
                comm, gpu, host, 5 * i, tokens, early_weights=i % 2 == 0, reduce=i % 3 != 0, **{"use_fp8": True, **options}
            )
            if i % 10 == 0:
                idx, weights = routing(comm, i, 50, 8, gpu.config.num_experts)
                x = rows(comm, i, 50, 512)
                same(gpu.dispatch(x, idx, weights).recv_x, host.dispatch(*cpu(x, idx, weights)).recv_x)


def test_epochs_wrap_around(comm):
    """Epochs wrap after 2**32 calls, within a day of decoding."""
    gpu, host = make_both(comm, hidden=512)
    ranks, config = comm.Get_size(), gpu.config
    layout, progress, calls = Layout(config), structs.LlProgress.dtype({}), 2**32 - 9
    inboxes = gpu._backend.runtime.memory.ptr + gpu._backend.runtime.regions.offsets["low_latency"]
    with gpu, host:
        for name in ("dispatch", "combine"):
            made = np.zeros(1, progress)
            made["sent"] = made["received"] = calls
            made["tickets"] = made["tickets_before"] = 2**32 - 1000
            write(gpu._backend.runtime.state + layout.local.offsets[f"ll_{name}"], made)
            write(inboxes + layout.low_latency.offsets[f"{name}_acks"], np.full(ranks, calls, np.uint64))
        comm.Barrier()
        # Unused memory holds 0 and -1, which are epochs too. After 2**32 calls no memory is unused, so send every token to every rank.
        choice = torch.arange(8, device="cuda")
        everywhere = (choice % ranks * config.num_local_experts + choice // ranks).expand(128, 8).contiguous()
        weights = torch.rand(128, 8, device="cuda")
        for i in range(2 * config.low_latency_ring_depth):
            early = weights if i < config.low_latency_ring_depth else None
            sent = gpu.low_latency_dispatch(rows(comm, i, 128, 512), everywhere, topk_weights=early, use_fp8=False)
            gpu.low_latency_combine(sent.recv_x, everywhere, weights, sent.handle)
        for i in range(20):
            round_trip(comm, gpu, host, 8 * i, 128 - 3 * i, early_weights=i % 4 < 2, use_fp8=len(formats()) > 1 and i % 3 > 0)
        after = np.zeros(1, progress)
        read(gpu._backend.runtime.state + layout.local.offsets["ll_dispatch"], after)
        assert after["sent"] == after["received"] == calls + 2 * config.low_latency_ring_depth + 20 - 2**32


def test_rows_that_look_like_the_empty_sentinel(comm):
    """NaNs with all bits set arrive as NaNs."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        x, y = rows(comm, 1, 40, 512), outputs(comm, gpu, 2)
        for array in (x, y):
            array.view(torch.int32)[..., ::7] = -1
            array.view(torch.int16)[..., 101::50] = -1
        idx, weights = routing(comm, 1, 40, 8, gpu.config.num_experts)
        cx, cy, ci, cw = cpu(x, y, idx, weights)
        for use_fp8 in sorted({False, len(formats()) > 1}):
            got = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=use_fp8)
            want = host.low_latency_dispatch(cx, ci, topk_weights=cw, use_fp8=use_fp8)
            for mine, theirs, count in zip(got.recv_x, want.recv_x, want.num_recv_tokens_per_expert.tolist(), strict=True):
                same_numbers(mine[:count], theirs[:count])
            for reduce in (True, False):
                back = gpu.low_latency_combine(y, idx, weights, got.handle, allow_multiple_reduction=reduce)
                same_numbers(back.x, host.low_latency_combine(cy, ci, cw, want.handle, allow_multiple_reduction=reduce).x)


def same_numbers(a, b):
    """Compare bit for bit, but accept any NaN for a NaN."""
    a, b = a.cpu().float(), b.float()
    same(a.isnan(), b.isnan())
    same(a.nan_to_num(), b.nan_to_num())


def test_replay_while_a_hook_is_open(comm):
    """The hook would receive rows of the replay. All ranks raise, and a new Buffer works."""
    gpu, host = make_both(comm, hidden=512)
    idx, _ = routing(comm, 70, 20, 8, gpu.config.num_experts)
    x = rows(comm, 70, 20, 512)
    gpu.low_latency_dispatch(x, idx, use_fp8=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gpu.low_latency_dispatch(x, idx, use_fp8=False)
    sent = gpu.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True)
    graph.replay()
    with pytest.raises(EPInputError, match="replayed while a hook"):
        gpu.synchronize()
    del captured, sent
    gpu.destroy()
    comm.Barrier()
    gpu, _ = make_both(comm, hidden=512)
    with gpu, host:
        round_trip(comm, gpu, host, 71, 20, use_fp8=False)


def test_two_micro_batches(comm):
    """Send both before one is received. Another rank is late in each round."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        for i in range(20):
            if comm.Get_rank() == i % comm.Get_size():
                torch.cuda._sleep(int(10e6))
            batches = []
            for half in range(2):
                idx, weights = routing(comm, 100 + 2 * i + half, 60, 8, gpu.config.num_experts)
                x = rows(comm, 200 + 2 * i + half, 60, 1024)
                sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, return_recv_hook=True)
                batches.append((x, idx, weights, sent))
            sums = []
            for _, idx, weights, sent in batches:
                sent.hook()
                y = sent.recv_x * 2
                sums.append(gpu.low_latency_combine(y, idx, weights, sent.handle, return_recv_hook=True))
            for (x, idx, weights, _), back in zip(batches, sums, strict=True):
                back.hook()
                cx, ci, cw = cpu(x, idx, weights)
                want = host.low_latency_dispatch(cx, ci, topk_weights=cw, use_fp8=False)
                same(back.x, host.low_latency_combine(want.recv_x * 2, ci, cw, want.handle).x)


def test_graph(comm):
    """Capture dispatch, experts and combine once. Replay with changing inputs, 10,000 times if no ranks share a GPU."""
    gpu, host = make_both(comm, hidden=1024)
    replays, every = (200, 50) if TAKE_TURNS else (10_000, 500)
    with gpu, host:
        x = rows(comm, 1, 64, 1024)
        idx, weights = routing(comm, 1, 64, 8, gpu.config.num_experts)
        use_fp8 = len(formats()) > 1

        def step():
            sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=use_fp8)
            y = sent.recv_x.to(torch.bfloat16)
            return sent, gpu.low_latency_combine(y, idx, weights, sent.handle)

        held = step()
        torch.cuda.synchronize()
        comm.Barrier()
        del held
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sent, back = step()
        before, num_wrong = torch.zeros_like(back.x), torch.zeros(1, dtype=torch.int64, device="cuda")
        for i in range(replays):
            if i % every == 0:
                new_idx, new_weights = routing(comm, i, 64, 8, gpu.config.num_experts)
                idx.copy_(new_idx), weights.copy_(new_weights)
            x.mul_(-1) if i % every else x.copy_(rows(comm, i, 64, 1024))
            graph.replay()
            if i % every:
                num_wrong += (back.x != -before).sum()
            before.copy_(back.x)
            if (i + 1) % every == 0:
                assert num_wrong.item() == 0
                cx, ci, cw = cpu(x, idx, weights)
                want = host.low_latency_dispatch(cx, ci, topk_weights=cw, use_fp8=use_fp8)
                same_sent(sent, want)
                same(back.x, host.low_latency_combine(want.recv_x.to(torch.bfloat16), ci, cw, want.handle).x)


def test_concurrent_matrix_products(comm):
    """A long matrix product on another stream occupies every SM, without a deadlock."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        for i in range(10):
            with torch.cuda.stream(side):
                for _ in range(3):
                    a @ a
            round_trip(comm, gpu, host, 300 + i, 100, early_weights=i % 2 == 0, use_fp8=len(formats()) > 1)
        side.synchronize()


def test_concurrent_nccl(comm):
    """Kernels of NCCL and of the Buffer wait for their peers on different SMs. Neither blocks the launch of the other."""
    if SHARED_GPUS or comm.Get_size() == 1:
        return  # NCCL needs a GPU for each rank
    gpu, host = make_both(comm, hidden=1024)
    side = torch.cuda.Stream()
    with gpu, host, in_reverse(comm, "nccl"):
        for i in range(10):
            numbers = torch.full((16 << 20,), float(comm.Get_rank()), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            round_trip(comm, gpu, host, 400 + i, 100, early_weights=i % 2 == 0, use_fp8=False)
            side.synchronize()
            assert bool((numbers == comm.Get_size() - 1).all())


def test_memory_is_reused_in_stream_order(comm):
    """The caller drops a result while its reader is queued. The next call, on another stream, must not overwrite it."""
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        idx, weights = routing(comm, 40, 60, 8, gpu.config.num_experts)
        x = rows(comm, 41, 60, 1024)
        cx, ci, cw = cpu(x, idx, weights)
        want = host.low_latency_dispatch(cx, ci, topk_weights=cw, use_fp8=False)
        reference = host.low_latency_combine(want.recv_x, ci, cw, want.handle).x
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        kept = []
        for i in range(12):
            with torch.cuda.stream(streams[i % 2]):
                sent = gpu.low_latency_dispatch(x * (i + 1), idx, topk_weights=weights, use_fp8=False)
                out = gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle).x
                torch.cuda._sleep(int(20e6))  # the reader runs late
                kept.append(out.clone())
                del sent, out
        torch.cuda.synchronize()
        for i, out in enumerate(kept):
            scale = i + 1
            if scale & scale - 1 == 0:  # powers of two: exact
                same(out, (reference.float() * scale).bfloat16())


def test_streams(comm):
    gpu, host = make_both(comm, hidden=1024)
    with gpu, host:
        idx, weights = routing(comm, 50, 60, 8, gpu.config.num_experts)
        for seed in range(51, 57):
            torch.cuda._sleep(int(10e6))
            x = rows(comm, seed, 60, 1024)  # filled after the sleep
            sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False, async_finish=True)
            del x
            sent.event.wait()
            back = gpu.low_latency_combine(sent.recv_x * 2, idx, weights, sent.handle, async_finish=True)
            back.event.wait()
            if seed % 2:  # the event covers both halves
                again = gpu.low_latency_combine(
                    sent.recv_x * 2, idx, weights, sent.handle, async_finish=True, return_recv_hook=True
                )
                again.hook()
                again.event.wait()
                same(again.x, back.x)
            cx, ci, cw = cpu(rows(comm, seed, 60, 1024), idx, weights)
            want = host.low_latency_dispatch(cx, ci, topk_weights=cw, use_fp8=False)
            same(back.x, host.low_latency_combine(want.recv_x * 2, ci, cw, want.handle).x)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_wait_times_are_per_call(comm, on_timeout):
    """Also if only some calls ask for them."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    with make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True, on_timeout=on_timeout) as gpu:
        idx, _ = routing(comm, 60, 20, 8, gpu.config.num_experts, skip=0)
        x = rows(comm, 60, 20, 512)
        waited = torch.zeros(comm.Get_size(), dtype=torch.int64, device="cuda")
        for stats in (waited, None, waited):
            torch.cuda.synchronize()
            comm.Barrier()
            if comm.Get_rank() == late:
                torch.cuda._sleep(int(400e6))  # about 0.2 s; ranks that share a GPU may start late too
            gpu.low_latency_dispatch(x, idx, use_fp8=False, wait_recv_cost_stats=stats)
        torch.cuda.synchronize()
        if comm.Get_rank() != late:
            assert waited[late] > 250e6
            assert TAKE_TURNS or waited[:late].max() < 50e6, "the other ranks were in time"
        comm.Barrier()


def test_gpus_without_fp8_log_it(comm, caplog):
    if len(formats()) > 1:
        return
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        x, (idx, _) = rows(comm, 1, 4, 512), routing(comm, 1, 4, 8, gpu.config.num_experts)
        sent, plain = gpu.low_latency_dispatch(x, idx), gpu.low_latency_dispatch(x, idx, use_fp8=False)
        assert "cannot convert to FP8: rows travel and arrive as bfloat16" in caplog.text
        assert (sent.recv_x_scales, sent.recv_x.dtype) == (None, torch.bfloat16)
        for mine, theirs, count in zip(sent.recv_x, plain.recv_x, plain.num_recv_tokens_per_expert.tolist(), strict=True):
            assert torch.equal(mine[:count], theirs[:count])
        round_trip(comm, gpu, host, 2, 4, use_fp8=False)


def test_a_rank_stops(comm):
    """The last rank stops in the middle of a run. The others mask it, and finish 1,000 more steps."""
    if comm.Get_size() == 1:
        return
    last, steps, every = comm.Get_size() - 1, 100 if TAKE_TURNS else 1000, 20
    gpu, host = make_both(comm, hidden=512, on_timeout="mask", timeout_s=2.0)
    for i in range(5):
        round_trip(comm, gpu, host, 600 + i, 40, use_fp8=False)
    assert gpu.query_masked_ranks() == []
    comm.Barrier()
    if comm.Get_rank() != last:
        host.mask_rank(last)
        idx, weights = routing(comm, 700, 40, 8, gpu.config.num_experts)
        x = rows(comm, 700, 40, 512)
        for i in range(steps):
            if i % every == 0:
                early = i // every % 2 == 0
                round_trip(comm, gpu, host, 700 + i, 40, early_weights=early, use_fp8=False)
                assert gpu.query_masked_ranks() == [last]
            else:
                sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
                gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle)
        with pytest.raises(EPInputError, match="allow_multiple_reduction"):
            gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle, allow_multiple_reduction=False)
        gpu.synchronize()
    comm.Barrier()
    for buffer in (gpu, host):
        buffer.destroy()


def routing_to_every_rank(comm, num_tokens):
    """Make expert numbers and weights of tokens that go to all ranks, up to eight."""
    token, choice, n = torch.arange(num_tokens)[:, None], torch.arange(8), comm.Get_size()
    return (choice % n * 8 + (choice // n + token) % 8).cuda(), torch.rand(num_tokens, 8, device="cuda")


@pytest.mark.parametrize("early_weights", [True, False])
def test_ranks_that_stop_together(comm, early_weights):
    """Two ranks of different groups send their rows and stop. The others mask both within the time limit of one.

    A token may wait for both ranks. Its rank then waits longer than the limit, and must not be masked by ranks that wait for it.
    """
    last = comm.Get_size() - 1
    quiet = [last // 2, last]
    if last < 2 or TAKE_TURNS:
        return
    gpu = make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True, on_timeout="mask", timeout_s=2.0)
    idx, weights = routing_to_every_rank(comm, 3)
    for stops in (False, True):
        x = rows(comm, 820, 3, 512)
        sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights if early_weights else None, use_fp8=False)
        torch.cuda.synchronize()
        comm.Barrier()
        if stops and comm.Get_rank() in quiet:
            continue
        start = time.monotonic()
        gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle)
        gpu.synchronize()
        assert not stops or time.monotonic() - start < 1.6 * gpu.config.timeout_s
        assert gpu.query_masked_ranks() == (quiet if stops else [])
    comm.Barrier()
    gpu.destroy()


def test_a_last_dispatch_that_one_rank_misses(comm):
    """The last rank stops after a dispatch that does not reach rank 0.

    Rank 0 waits for it. Meanwhile the others wait for rank 0 in combine, longer than the limit. They must not mask rank 0, which sends
    heartbeats.
    """
    last = comm.Get_size() - 1
    if last < 2 or TAKE_TURNS:
        return
    gpu, host = make_both(comm, hidden=512, on_timeout="mask", timeout_s=2.0)
    for i in range(5):
        round_trip(comm, gpu, host, 800 + i, 40, use_fp8=False)
    torch.cuda.synchronize()
    comm.Barrier()
    idx, weights = routing_to_every_rank(comm, 40)
    x = rows(comm, 810, 40, 512)
    if comm.Get_rank() == last:
        gpu.mask_rank(0)
        gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        torch.cuda.synchronize()
    else:
        sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        if comm.Get_rank() == 0:
            torch.cuda._sleep(int(1e9))  # half a second
        gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle)
        gpu.synchronize()
        assert gpu.query_masked_ranks() == [last]
        host.mask_rank(last)
        for i in range(5):
            round_trip(comm, gpu, host, 820 + i, 40, early_weights=i % 2 == 0, use_fp8=False)
        assert gpu.query_masked_ranks() == [last]
        gpu.synchronize()
    comm.Barrier()
    for buffer in (gpu, host):
        buffer.destroy()


def test_ranks_that_differ(comm):
    """Ranks would misread each other's rows. All ranks raise, no rank hangs, and the next Buffer works."""
    if comm.Get_size() == 1:
        return
    odd = comm.Get_rank() % 2
    for what in ("topk_weights", "topk_idx", *(("x of", "x_scales") if has_fp8(current_gpu.target_arch()) else ())):
        gpu, _ = make_both(comm, hidden=512, timeout_s=5.0)
        idx, weights = routing(comm, 96, 40, 8, gpu.config.num_experts)
        x = rows(comm, 96, 40, 512)
        start = time.monotonic()
        with pytest.raises(EPInputError, match=rf"the ranks disagree on the {what}.*rank \d: .*rank \d: .*cannot be used"):  # noqa: PT012
            gpu.low_latency_dispatch(
                x,
                idx.int() if odd and what == "topk_idx" else idx,
                topk_weights=weights if odd or what != "topk_weights" else None,
                use_fp8=what == "x_scales" or (what == "x of" and bool(odd)),
                use_ue8m0=what == "x_scales" and bool(odd),
            )
            gpu.synchronize()
        with pytest.raises(EPInputError, match="cannot be used any more"):
            gpu.low_latency_dispatch(x, idx, use_fp8=False)
        gpu.destroy()
        assert time.monotonic() - start < 4
    comm.Barrier()


def test_late_rank(comm):
    """The last rank makes no call. The others name it."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    for call in ("dispatch", "combine"):
        gpu = make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True, timeout_s=2.0)
        idx, weights = routing(comm, 95, 40, 8, gpu.config.num_experts, skip=0)
        x = rows(comm, 95, 40, 512)
        sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            if call == "dispatch":
                gpu.low_latency_dispatch(x, idx, use_fp8=False)
            else:
                gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle)
            with pytest.raises(EPTimeoutError, match=f"low-latency {call}") as caught:
                gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert time.monotonic() - start < 4
        gpu.destroy()
        comm.Barrier()
