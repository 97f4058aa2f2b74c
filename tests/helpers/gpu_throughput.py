"""Shared by the GPU tests of the throughput calls: both backends make the same calls."""

from __future__ import annotations

import torch
from gpu_buffers import cpu, replays, rounds, routing, rows, same, some, tokens


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
    try:
        same(back.x, reference.x)
        same(back.topk_weights, reference.topk_weights)
    except AssertionError:
        gpu.synchronize()  # after a time-out the rows are NaN, and this tells the reason
        raise
    return got, want


def check_rounds(comm, gpu, host, num_rounds, nums_of_sms):
    """Make calls of all sizes without pauses, and keep some results during later calls."""
    held = []
    for i in rounds(comm, num_rounds):
        gpu.num_sms = nums_of_sms[i % 3]
        held.append(round_trip(comm, gpu, host, 10 * i, some(comm, i, 256), 8, idx_dtype=(torch.int32, torch.int64)[i % 2]))
        if len(held) > i % 3:
            same_dispatch(*held.pop(0))


def check_known_routing_and_fixed_size(comm, gpu, host):
    got, want = round_trip(comm, gpu, host, 20, 100, 8)
    for seed in (21, 22):
        x = rows(comm, seed, 100, 7168)
        same(gpu.dispatch(x, handle=got.handle).recv_x, host.dispatch(x.cpu(), handle=want.handle).recv_x)
    x, idx, weights = tokens(comm, gpu, 23, 100)
    for limit in (100 * comm.Get_size(), 60, 0):
        fixed = gpu.dispatch(x, idx, weights, num_worst_tokens=limit)
        reference = host.dispatch(*cpu(x, idx, weights), num_worst_tokens=limit)
        kept = min(limit, int(reference.num_recv_tokens[0]))
        same_dispatch(fixed, reference, kept)
        assert (fixed.recv_topk_idx[kept:] == -1).all()
        assert (fixed.recv_topk_weights[kept:] == 0).all()
        y = rows(comm, 24, limit, 7168)
        same(gpu.combine(y, fixed.handle).x, host.combine(y.cpu(), reference.handle).x)


def check_graph(comm, gpu, host, num_replays, every):
    """Capture once, and replay with changed inputs, also between ordinary calls."""

    def step(buffer, x, idx, weights):
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=256 * comm.Get_size())
        return sent, buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights)

    for seed, (sent, back), (want, reference) in replays(comm, gpu, host, range(31, 31 + num_replays), 256, step):
        same_dispatch(sent, want, int(want.num_recv_tokens[0]))
        same(back.x, reference.x)
        same(back.topk_weights, reference.topk_weights)
        if seed % every == 0:
            round_trip(comm, gpu, host, seed, 50, 8)
