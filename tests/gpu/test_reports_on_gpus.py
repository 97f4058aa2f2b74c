"""Failures in replays, which make no call on the host: GPUs report them, and return no stale results."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU tests make their inputs with PyTorch")

import gpu_buffers  # noqa: E402
from gpu_buffers import SHARED_GPUS, TAKE_TURNS, captured, cpu, make, same, tokens  # noqa: E402
from gpu_low_latency import both_calls, transport  # noqa: E402

from deepep_rt import EPInputError, EPTimeoutError  # noqa: E402

__all__ = ["transport"]
pytestmark = pytest.mark.gpu

HIDDEN, TOKENS = 512, 40


def make_decoder(comm, backend="cuda", **settings):
    sizes = dict(num_max_tokens_per_rank=64, hidden=HIDDEN, num_experts=8 * comm.Get_size(), low_latency=True)
    return make(comm, backend, **{**sizes, **settings})


@pytest.mark.parametrize("early_weights", [True, False])
def test_other_choices_are_reported(comm, early_weights):
    """A graph's input changes between dispatch and combine. The sum follows the dispatch, and check() reports the change."""
    with make_decoder(comm) as gpu, make_decoder(comm, "host") as host:
        x, idx, weights = tokens(comm, gpu, 1, TOKENS, skip=0)
        for i in range(20):
            sent = gpu.low_latency_dispatch(x, idx, topk_weights=weights if early_weights else None, use_fp8=False)
            other = idx.clone()
            if i % 2:
                other[i, 3] = (idx[i, 3] + 1) % gpu.config.num_experts
            out = torch.empty_like(x)
            if i % 2:
                # This call or a later one raises, as soon as the host sees the report.
                with pytest.raises(EPInputError, match=rf"topk_idx\[{i}, 3\]={int(other[i, 3])}; expected {int(idx[i, 3])}"):  # noqa: PT012
                    gpu.low_latency_combine(sent.recv_x, other, weights, sent.handle, out=out)
                    gpu.synchronize()
            else:
                gpu.low_latency_combine(sent.recv_x, other, weights, sent.handle, out=out)
                gpu.synchronize()
            cx, ci, cw = cpu(x, idx, weights)
            want = host.low_latency_dispatch(cx, ci, topk_weights=cw if early_weights else None, use_fp8=False)
            same(out, host.low_latency_combine(want.recv_x, ci, cw, want.handle).x)
            gpu.check()


@pytest.mark.parametrize("what", ["kind", "handle"])
def test_combines_that_differ(comm, what):
    """Sums would be wrong, or time out. All ranks name the ranks that differ."""
    if comm.Get_size() == 1:
        return
    odd = bool(comm.Get_rank() % 2)
    gpu = make_decoder(comm, timeout_s=5.0)
    x, idx, weights = tokens(comm, gpu, 2, TOKENS)
    sent = [gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False) for _ in range(2)]
    start = time.monotonic()
    with pytest.raises(EPInputError, match=rf"the ranks disagree on the {what}.*rank \d: .*rank \d: .*cannot be used"):  # noqa: PT012
        gpu.low_latency_combine(
            sent[0].recv_x,
            idx,
            weights,
            sent[odd if what == "handle" else 0].handle,
            allow_multiple_reduction=not (odd and what == "kind"),
        )
        gpu.synchronize()
    with pytest.raises(EPInputError, match="cannot be used any more"):
        gpu.check()
    gpu.destroy()
    assert time.monotonic() - start < 4
    comm.Barrier()


def test_replays_after_a_timeout(comm):
    """The last rank stops replaying. From then on the others get NaN, no rows of an earlier replay, and check() raises."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    gpu = make_decoder(comm, timeout_s=1.0)
    x, idx, weights = tokens(comm, gpu, 3, TOKENS, skip=0)

    def step():
        sent, back = both_calls(gpu, x, idx, weights)
        return sent.recv_x, back.x, sent

    graph, (recv_x, out, _) = captured(comm, step, warm_up=True)
    for _ in range(3):
        graph.replay()
    gpu.synchronize()
    gpu.check()
    assert bool(out.isfinite().all())
    comm.Barrier()
    if comm.Get_rank() != late:
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert bool(out.isnan().all())
            with pytest.raises(EPTimeoutError) as caught:
                gpu.check()
            assert caught.value.peer == late
        assert bool(recv_x.isnan().all())
    comm.Barrier()
    gpu.destroy()


def test_throughput_replays_after_a_timeout(comm):
    """The same for the throughput calls."""
    if comm.Get_size() == 1 or gpu_buffers.more:
        return
    late = comm.Get_size() - 1
    gpu = make(comm, num_max_tokens_per_rank=64, hidden=HIDDEN, num_experts=8 * comm.Get_size(), timeout_s=1.0)
    x, idx, weights = tokens(comm, gpu, 4, TOKENS)

    def step():
        sent = gpu.dispatch(x, idx, weights, num_worst_tokens=64 * comm.Get_size())
        return sent.recv_x, sent.recv_topk_weights, gpu.combine(sent.recv_x, sent.handle).x, sent

    graph, (recv_x, recv_weights, out, _) = captured(comm, step, warm_up=True)
    graph.replay()
    gpu.synchronize()
    assert bool(out.isfinite().all())
    comm.Barrier()
    if comm.Get_rank() != late:
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert all(bool(array.isnan().all()) for array in (recv_x, recv_weights, out))
            with pytest.raises(EPTimeoutError):
                gpu.check()
    comm.Barrier()
    gpu.destroy()


def test_two_buffers_on_two_streams(comm):
    """Ranks launch the calls of two Buffers in opposite orders. Neither Buffer keeps the other off the GPU."""
    rounds = 200 if TAKE_TURNS or SHARED_GPUS else 10_000
    settings = dict(low_latency_sms=16 if SHARED_GPUS else 64, timeout_s=10.0)
    with make_decoder(comm, **settings) as first, make_decoder(comm, **settings) as second:
        x, idx, weights = tokens(comm, first, 5, TOKENS)
        pairs = [(first, torch.cuda.Stream()), (second, torch.cuda.Stream())]
        torch.cuda.synchronize()
        for _ in range(rounds):
            outs = []
            for buffer, stream in pairs if comm.Get_rank() % 2 else pairs[::-1]:
                with torch.cuda.stream(stream):
                    # A drop on another stream would order the Buffers after each other, and ranks would wait for each other in a cycle.
                    outs.append(both_calls(buffer, x, idx, weights)[1].x.clone())
        torch.cuda.synchronize()
        first.check(), second.check()
        same(*outs)
        assert np.isfinite(outs[0].float().cpu().numpy()).all()
