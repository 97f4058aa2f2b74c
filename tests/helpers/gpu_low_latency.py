"""Shared by the GPU tests of the low-latency calls: transports, formats, and both backends with the same calls."""

from __future__ import annotations

import gpu_buffers
import pytest
import torch
from gpu_buffers import cpu, make, routing, rows, same
from transports import transports

from deepep_rt.jit import compiler
from deepep_rt.kernels.tuning import has_fp8

FORMATS = [dict(use_fp8=False), dict(), dict(round_scale=True), dict(use_ue8m0=True)]


def formats():
    return FORMATS if has_fp8(compiler.target_arch()) else FORMATS[:1]


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
    return rows(comm, seed, c.num_local_experts, c.worst_recv_tokens, c.hidden)


def both_calls(buffer, x, idx, weights, rows_of=lambda recv_x: recv_x, **options):
    """Dispatch and combine where `rows_of` stands for the experts. Return both results."""
    sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **{"use_fp8": False, **options})
    return sent, buffer.low_latency_combine(rows_of(sent.recv_x), idx, weights, sent.handle)


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
