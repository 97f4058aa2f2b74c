"""Shared by the GPU tests of the throughput calls: both backends make the same calls."""

from __future__ import annotations

import torch
from gpu_buffers import cpu, routing, rows, same


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
