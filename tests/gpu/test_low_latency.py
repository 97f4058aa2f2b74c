"""The low-latency calls on GPUs: sizes, epochs, graphs, formats and statistics, against the host backend, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, captured, cpu, make, read, replay_often, rounds, rows, same, some, tokens, write  # noqa: E402
from gpu_low_latency import FORMATS, both_calls, formats, make_both, outputs, round_trip, same_sent, transport  # noqa: E402

from deepep_rt.kernels import structs  # noqa: E402
from deepep_rt.kernels.layout import Layout  # noqa: E402

__all__ = ["transport"]


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
        for i in rounds(comm, num_rounds, every=4, cycles=10e6):
            options = {"use_fp8": True, **formats()[i % len(formats())]}
            round_trip(comm, gpu, host, 5 * i, some(comm, i, 128), early_weights=i % 2 == 0, reduce=i % 3 != 0, **options)
            if i % 10 == 0:
                x, idx, weights = tokens(comm, gpu, i, 50)
                same(gpu.dispatch(x, idx, weights).recv_x, host.dispatch(*cpu(x, idx, weights)).recv_x)


def acknowledgements(config, rank, calls):
    """Return the words of a rank after that many calls: one for each rank of its node, and one for each ring slot of the others."""
    if not config.has_network:
        return np.full(config.num_ranks, calls, np.uint64)
    depth, node = config.low_latency_ring_depth, rank // config.node_size
    words = np.empty((depth, config.num_ranks), np.uint64)
    words[:] = [[calls - (calls - slot) % depth] for slot in range(depth)]
    words[0, node * config.node_size : (node + 1) * config.node_size] = calls
    return words


def test_epochs_wrap_around(comm):
    """Epochs wrap after 2**32 calls, within a day of decoding."""
    gpu, host = make_both(comm, hidden=512)
    ranks, config, runtime = comm.Get_size(), gpu.config, gpu._backend.runtime
    layout, progress, calls = Layout(config), structs.LlProgress.dtype({}), 2**32 - 9
    with gpu, host:
        write(runtime.state + layout.local.offsets["ll_acked"], np.full(2 * ranks, calls, np.uint32))
        for name in ("dispatch", "combine"):
            made = np.zeros(1, progress)
            made["sent"] = made["received"] = calls
            made["tickets"] = made["tickets_before"] = 2**32 - 1000
            write(runtime.state + layout.local.offsets[f"ll_{name}"], made)
            acks = runtime.regions.offsets["low_latency"] + layout.low_latency.offsets[f"{name}_acks"]
            for base in {runtime.memory.ptr, runtime.network.base if runtime.network else runtime.memory.ptr}:
                write(base + acks, acknowledgements(config, comm.Get_rank(), calls))
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
        read(runtime.state + layout.local.offsets["ll_dispatch"], after)
        assert after["sent"] == after["received"] == calls + 2 * config.low_latency_ring_depth + 20 - 2**32


def test_rows_that_look_like_the_empty_sentinel(comm):
    """NaNs with all bits set arrive as NaNs."""
    gpu, host = make_both(comm, hidden=512)
    with gpu, host:
        (x, idx, weights), y = tokens(comm, gpu, 1, 40), outputs(comm, gpu, 2)
        for array in (x, y):
            array.view(torch.int32)[..., ::7] = -1
            array.view(torch.int16)[..., 101::50] = -1
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


def test_graph(comm):
    """Capture dispatch, experts and combine once. Replay with changing inputs, 10,000 times if no ranks share a GPU."""
    gpu, host = make_both(comm, hidden=1024)
    replays, every = (200, 50) if TAKE_TURNS else (10_000, 500)
    with gpu, host:
        x, *_ = given = tokens(comm, gpu, 1, 64)
        how = dict(rows_of=lambda recv_x: recv_x.to(torch.bfloat16), use_fp8=len(formats()) > 1)
        graph, (sent, back) = captured(comm, lambda: both_calls(gpu, *given, **how), warm_up=True)

        def write(i):
            for mine, new in zip(given, tokens(comm, gpu, i, 64), strict=True):
                mine.copy_(new)

        for _ in replay_often(graph, back.x, replays, every, write, lambda: x.mul_(-1)):
            want, reference = both_calls(host, *cpu(*given), **how)
            same_sent(sent, want)
            same(back.x, reference.x)


@pytest.mark.parametrize("hook", [False, True])
def test_quantised_rows_in_a_graph(comm, hook):
    """Rows of real sizes that the program has quantised: random bytes, with all of the words that mark empty inboxes."""
    gpu, host = make_both(comm, hidden=7168)
    kinds = (
        (torch.float8_e4m3fn, 7168, torch.float32, 56),
        (torch.uint8, 3584, torch.uint8, 224),
        (torch.uint8, 3584, torch.uint8, 448),
    )
    with gpu, host:
        for number, (dtype, width, scale_dtype, num_scales) in enumerate(kinds):
            _, idx, weights = tokens(comm, gpu, number, 64)

            def draw(seed, width=width, num_scales=num_scales, scale_dtype=scale_dtype):
                made = torch.Generator().manual_seed(100 * seed + comm.Get_rank())
                num_bytes = num_scales * torch.empty(0, dtype=scale_dtype).element_size()
                drawn = [torch.randint(0, 256, (64, n), dtype=torch.uint8, generator=made) for n in (width, num_bytes)]
                for part in drawn:
                    part[torch.rand(part.shape, generator=made) < 0.2] = 0xFF
                    part[torch.randint(0, 64, (5,), generator=made)] = 0xFF
                return drawn

            x, scales = (part.cuda() for part in draw(0))
            given = dict(x_scales=scales.view(scale_dtype), use_fp8=False, num_max_tokens=(None, 64)[number % 2])

            def both(x=x, idx=idx, weights=weights, given=given, dtype=dtype):
                sent = gpu.low_latency_dispatch(x.view(dtype), idx, topk_weights=weights, return_recv_hook=hook, **given)
                if hook:
                    sent.hook()
                y = sent.recv_x.view(torch.uint8)[..., :1].bfloat16().expand(*sent.recv_x.shape[:2], 7168).contiguous()
                return sent, gpu.low_latency_combine(y, idx, weights, sent.handle)

            graph, (sent, back) = captured(comm, both, warm_up=True)
            for i in range(20):
                for mine, new in zip((x, scales), draw(i), strict=True):
                    mine.copy_(new)
                graph.replay()
                cx, cs, ci, cw = cpu(x, scales, idx, weights)
                how = {**given, "x_scales": cs.view(scale_dtype)}
                want = host.low_latency_dispatch(cx.view(dtype), ci, topk_weights=cw, **how)
                same_sent(sent, want)
                y = want.recv_x.view(torch.uint8)[..., :1].bfloat16().expand(*want.recv_x.shape[:2], 7168).contiguous()
                same(back.x, host.low_latency_combine(y, ci, cw, want.handle).x)


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_wait_times_are_per_call(comm, on_timeout):
    """Also if only some calls ask for them."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    with make(comm, hidden=512, num_experts=8 * comm.Get_size(), low_latency=True, on_timeout=on_timeout) as gpu:
        x, idx, _ = tokens(comm, gpu, 60, 20, skip=0)
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
        x, idx, _ = tokens(comm, gpu, 1, 4)
        sent, plain = gpu.low_latency_dispatch(x, idx), gpu.low_latency_dispatch(x, idx, use_fp8=False)
        assert "cannot convert to FP8: rows travel and arrive as bfloat16" in caplog.text
        assert (sent.recv_x_scales, sent.recv_x.dtype) == (None, torch.bfloat16)
        for mine, theirs, count in zip(sent.recv_x, plain.recv_x, plain.num_recv_tokens_per_expert.tolist(), strict=True):
            assert torch.equal(mine[:count], theirs[:count])
        round_trip(comm, gpu, host, 2, 4, use_fp8=False)
