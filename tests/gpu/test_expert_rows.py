"""Compare rows by expert on GPUs with the host backend, bit for bit, also in CUDA graphs and on two streams."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import captured, cpu, make, poison, replays, rounds, routing, rows, same, some, tokens  # noqa: E402

from deepep_rt import EPTimeoutError  # noqa: E402
from deepep_rt.torch import grouped_product  # noqa: E402

NAMES = (
    "recv_topk_weights",
    "recv_src_idx",
    "recv_expert_idx",
    "expert_offsets",
    "num_recv_tokens",
    "num_recv_tokens_per_expert",
)


def same_rows(got, want, *, with_padding):
    """Compare two results. The padding of rows is undefined unless the call has filled it."""
    for name in NAMES:
        same(getattr(got, name), getattr(want, name))
    kept = slice(None) if with_padding else want.recv_expert_idx >= 0
    same(got.recv_x.cpu()[kept], want.recv_x[kept])
    if want.recv_x_scales is None:
        assert got.recv_x_scales is None
    else:
        same(got.recv_x_scales.cpu()[kept], want.recv_x_scales[kept])


def round_trip(comm, gpu, host, seed, num_tokens, *, dtype=torch.bfloat16, scales=False, alignment=16, worst=None, zero=False):
    """Dispatch and combine on both backends, with and without weights, and compare all results bit for bit."""
    hidden, num_topk = gpu.config.hidden, gpu.config.num_topk
    idx, weights = routing(comm, seed, num_tokens, num_topk, gpu.config.num_experts)
    x = rows(comm, seed, num_tokens, hidden, dtype=dtype)
    s = rows(comm, seed + 1, num_tokens, max(1, hidden // 128), dtype=torch.float32) if scales else None
    options = dict(layout="expert", expert_alignment=alignment, num_worst_tokens=worst, zero_padding=zero)
    got = gpu.dispatch(x, idx, weights, x_scales=s, **options)
    cx, ci, cw, cs = cpu(x, idx, weights, s)
    want = host.dispatch(cx, ci, cw, x_scales=cs, **options)
    same_rows(got, want, with_padding=zero)
    assert got.num_recv_tokens_per_expert_list == want.num_recv_tokens_per_expert_list
    y = rows(comm, seed + 2, got.recv_x.shape[0], hidden)
    bias = rows(comm, seed + 3, num_tokens, hidden)
    for weighted in (True, False):
        back = gpu.combine(y, got.handle, topk_weights=got.recv_topk_weights, weighted=weighted, bias=bias)
        reference = host.combine(y.cpu(), want.handle, topk_weights=want.recv_topk_weights, weighted=weighted, bias=bias.cpu())
        same(back.x, reference.x)
        same(back.topk_weights, reference.topk_weights)
    return got, want


@pytest.mark.parametrize("hidden", [520, 7168])
@pytest.mark.parametrize("num_topk", [1, 8, 9, 32])
def test_sizes(comm, hidden, num_topk):
    with make(comm, hidden=hidden, num_topk=num_topk) as gpu, make(comm, "host", hidden=hidden, num_topk=num_topk) as host:
        for seed, tokens in enumerate((37 + 11 * comm.Get_rank(), 0 if comm.Get_rank() % 2 else 200, 1)):
            poison(gpu)
            round_trip(comm, gpu, host, seed, tokens, zero=seed % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
def test_payloads(comm, dtype):
    with make(comm) as gpu, make(comm, "host") as host:
        round_trip(comm, gpu, host, 5, 130, dtype=dtype, scales=True, alignment=128, zero=True)


def test_fixed_size(comm):
    with make(comm) as gpu, make(comm, "host") as host:
        for worst in (100 * comm.Get_size() * 8 + 1000, 300, 0):
            round_trip(comm, gpu, host, 6, 100, worst=worst, zero=True)


def test_graph(comm):
    """A captured dispatch and weighted combine, replayed with other tokens, among calls outside of the graph."""
    num_tokens, hidden = 96, 1024
    with make(comm, hidden=hidden) as gpu, make(comm, "host", hidden=hidden) as host:
        worst = 2 * num_tokens * gpu.config.num_topk

        def step(buffer, x, idx, weights):
            sent = buffer.dispatch(
                x, idx, weights, layout="expert", expert_alignment=16, num_worst_tokens=worst, zero_padding=True
            )
            back = buffer.combine(sent.recv_x * 2, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True)
            return sent, back.x

        for seed, (sent, sums), (want, reference) in replays(comm, gpu, host, range(2, 8), num_tokens, step):
            gpu.synchronize()
            same_rows(sent, want, with_padding=True)
            same(sums, reference)
            if seed % 2:
                round_trip(comm, gpu, host, 10 * seed, num_tokens)


def test_conversion_in_a_graph(comm):
    """Replays convert the rows of that time, among calls that would reuse the memory of the converted rows."""
    num_tokens, hidden = 96, 1024
    with make(comm, hidden=hidden) as gpu, make(comm, "host", hidden=hidden) as host:
        x, idx, weights = tokens(comm, gpu, 1, num_tokens)
        for layout in ("token", "expert"):
            options = dict(layout=layout, num_worst_tokens=2 * num_tokens * 8, use_fp8=True)
            if layout == "token":
                options["num_worst_tokens"] = comm.Get_size() * num_tokens

            def convert(options=options):
                sent = gpu.dispatch(x, idx, weights, **options)
                return sent.recv_x, sent.recv_x_scales, sent

            graph, (*got, _sent) = captured(comm, convert, warm_up=True)
            for seed in range(2, 6):
                x.copy_(rows(comm, seed, num_tokens, hidden))
                for _ in range(3):
                    gpu.dispatch(-x, idx, weights, layout=layout, use_fp8=True)
                graph.replay()
                want = host.dispatch(*cpu(x, idx, weights), **options)
                kept = int(want.num_recv_tokens[0])
                for a, b in zip(got, (want.recv_x, want.recv_x_scales), strict=True):
                    same(a[:kept], b[:kept])


def test_100_rounds(comm):
    """Calls of all sizes without pauses, on two streams, while earlier results are held."""
    streams, sizes = [torch.cuda.Stream(), torch.cuda.current_stream()], dict(hidden=1024, num_max_tokens_per_rank=256)
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        held = []
        for i in rounds(comm, 100):
            with torch.cuda.stream(streams[i // 10 % 2]):
                zero = bool(i % 2)
                held.append((*round_trip(comm, gpu, host, 10 * i, some(comm, i, 256), alignment=1 + i % 17, zero=zero), zero))
                if len(held) > i % 3:  # keep some results during later calls
                    got, want, zero = held.pop(0)
                    same_rows(got, want, with_padding=zero)


def test_lost_rank_gives_nan(comm):
    """The last rank makes no call. Replays of the others give no rows of earlier replays."""
    if comm.Get_size() == 1:
        return
    gpu = make(comm, hidden=1024, timeout_s=2.0)
    x, idx, weights = tokens(comm, gpu, 1, 64)

    def step():
        sent = gpu.dispatch(x, idx, weights, layout="expert", num_worst_tokens=2048)
        return sent, sent.recv_x, gpu.combine(sent.recv_x, sent.handle).x

    gpu.dispatch(x, idx, weights, layout="expert", num_worst_tokens=2048)
    graph, (sent, recv_x, sums) = captured(comm, step)
    graph.replay()
    gpu.synchronize()
    arrived = int(sent.num_recv_tokens[0])
    assert arrived > 0
    assert not recv_x[:arrived].isnan().any()
    comm.Barrier()
    if comm.Get_rank() != comm.Get_size() - 1:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        assert recv_x[:arrived].isnan().all()
        assert sums.isnan().all()
        with pytest.raises(EPTimeoutError):
            gpu.check()
    gpu.destroy()
    comm.Barrier()


def weights_of(comm, gpu, columns=256):
    """Make a matrix for each local expert."""
    random = torch.Generator("cuda").manual_seed(comm.Get_rank())
    shape = gpu.config.num_local_experts, columns, gpu.config.hidden
    return (torch.randn(shape, generator=random, device="cuda") * gpu.config.hidden**-0.5).bfloat16().transpose(1, 2)


def test_a_consumer_of_tiles(comm):
    """Products that wait for their tiles, in 1000 rounds. In some rounds the GPU of a rank is late, or a routing is repeated."""
    with make(comm, hidden=1024, num_max_tokens_per_rank=256, num_sms=16) as gpu:
        matrices, options = weights_of(comm, gpu), dict(layout="expert", zero_padding=True)
        for i in rounds(comm, 1000, every=20, cycles=2e6):
            x, idx, weights = tokens(comm, gpu, i, some(comm, i, 256))
            options["expert_alignment"] = (64, 128)[i % 2]
            sent = gpu.dispatch(x, idx, weights, **options, signals=True)
            got = grouped_product(sent, matrices)
            plain = gpu.dispatch(x, idx, weights, **options)
            if i % 3 == 0:
                again = gpu.dispatch(-x, handle=sent.handle, zero_padding=True, signals=True)
                negative = gpu.dispatch(-x, handle=plain.handle, zero_padding=True)
                same(grouped_product(again, matrices), grouped_product(negative, matrices))
            same(got, grouped_product(plain, matrices))
            if i % 50 == 0:
                sent.event.wait()
                same_rows(sent, plain, with_padding=True)
                assert (sent.tile_ready == sent.signal).all()
                for _ in range(6):  # more products than the dispatch has counters for
                    torch.full_like(got, torch.nan)  # the product gets its memory
                    same(grouped_product(sent, matrices), got)


def test_sums_of_tiles(comm):
    """Words are set one after another on another stream, while combine sends the rows of tiles that are complete."""
    with make(comm, hidden=1024, num_max_tokens_per_rank=256, num_sms=16) as gpu:
        writer = torch.cuda.Stream()
        for i in rounds(comm, 300, every=20, cycles=2e6):
            x, idx, weights = tokens(comm, gpu, i, some(comm, i, 256))
            sent = gpu.dispatch(x, idx, weights, layout="expert", expert_alignment=(64, 128)[i % 2])
            y, how = torch.randn_like(sent.recv_x), dict(topk_weights=sent.recv_topk_weights, weighted=i % 3 > 0)
            how |= ({}, {}, {}, dict(reduce="topk"), dict(compress="log10"))[i % 5]  # the last two wait for all tiles
            want = gpu.combine(y, sent.handle, **how)
            size = sent.handle.tile_rows
            late, words = torch.full_like(y, torch.nan), torch.zeros(-(-len(y) // size), dtype=torch.int32, device="cuda")
            writer.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(writer):
                for tile in torch.randperm(len(words), generator=torch.Generator().manual_seed(i)).tolist():
                    late[tile * size : (tile + 1) * size].copy_(y[tile * size : (tile + 1) * size])
                    words[tile].fill_(sent.signal)  # a kernel of its own, which begins when the copy has ended
            out = gpu.combine(late, sent.handle, **how, y_ready=words)
            same(out.x, want.x)
            if not how["weighted"]:
                same(out.topk_weights, want.topk_weights)
            torch.cuda.current_stream().wait_stream(writer)


def test_a_consumer_of_tiles_in_a_graph(comm):
    """Each replay waits for the tiles of its own rows."""
    with make(comm, hidden=1024, num_max_tokens_per_rank=256, num_sms=16) as gpu:
        matrices, (x, idx, weights) = weights_of(comm, gpu), tokens(comm, gpu, 0, 200)
        options = dict(layout="expert", expert_alignment=64, zero_padding=True)
        worst = 64 * (gpu.config.num_local_experts + 200 * comm.Get_size() * 8 // 64)

        def step():
            sent = gpu.dispatch(x, idx, weights, **options, num_worst_tokens=worst, signals=True)
            y = grouped_product(sent, matrices)
            return sent, y, gpu.combine(y[:, :256].repeat(1, 4).contiguous(), sent.handle).x

        graph, (sent, y, sums) = captured(comm, step, warm_up=True)
        for seed in range(1, 30):
            for target, source in zip((x, idx, weights), tokens(comm, gpu, seed, 200), strict=True):
                target.copy_(source)
            graph.replay()
            plain = gpu.dispatch(x, idx, weights, **options)
            wanted = grouped_product(plain, matrices)
            kept = slice(0, len(wanted))
            same(sent.recv_x[kept], plain.recv_x)
            same(y[kept], wanted)
            same(sums, gpu.combine(wanted.repeat(1, 4), plain.handle).x)


def test_tiles_of_a_lost_rank(comm):
    """The last rank makes no call. All tiles become ready, with NaN, so that no consumer waits for ever."""
    if comm.Get_size() == 1:
        return
    gpu = make(comm, hidden=1024, timeout_s=2.0, num_sms=16)
    matrices, (x, idx, weights) = weights_of(comm, gpu), tokens(comm, gpu, 1, 64)
    options = dict(layout="expert", expert_alignment=64, signals=True)
    known = gpu.dispatch(x, idx, weights, **options)
    assert not grouped_product(known, matrices)[known.recv_expert_idx >= 0].isnan().any()
    torch.cuda.synchronize()
    comm.Barrier()
    if comm.Get_rank() != comm.Get_size() - 1:
        sent = gpu.dispatch(x, handle=known.handle, signals=True)
        y = grouped_product(sent, matrices)
        torch.cuda.synchronize()
        assert y.isnan().all()
        assert (sent.tile_ready == sent.signal).all()
        with pytest.raises(EPTimeoutError):
            gpu.check()
    gpu.destroy()
    comm.Barrier()
