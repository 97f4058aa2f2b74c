"""The low-latency calls on GPUs with ranks that differ, are late or stop, and with masks."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, captured, make, rows, tokens  # noqa: E402
from gpu_low_latency import both_calls, make_both, round_trip, transport  # noqa: E402

from deepep_rt import EPInputError, EPTimeoutError  # noqa: E402
from deepep_rt.jit import compiler  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402

__all__ = ["transport"]


def test_replay_while_a_hook_is_open(comm):
    """The hook would receive rows of the replay. All ranks raise, and a new Buffer works."""
    gpu, host = make_both(comm, hidden=512)
    x, idx, _ = tokens(comm, gpu, 70, 20)
    graph, replayed = captured(comm, lambda: gpu.low_latency_dispatch(x, idx, use_fp8=False), warm_up=True)
    sent = gpu.low_latency_dispatch(x, idx, use_fp8=False, return_recv_hook=True)
    graph.replay()
    with pytest.raises(EPInputError, match="replayed while a hook"):
        gpu.synchronize()
    del replayed, sent
    gpu.destroy()
    comm.Barrier()
    gpu, _ = make_both(comm, hidden=512)
    with gpu, host:
        round_trip(comm, gpu, host, 71, 20, use_fp8=False)


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
        x, idx, weights = tokens(comm, gpu, 700, 40)
        for i in range(steps):
            if i % every == 0:
                early = i // every % 2 == 0
                round_trip(comm, gpu, host, 700 + i, 40, early_weights=early, use_fp8=False)
                assert gpu.query_masked_ranks() == [last]
            else:
                sent, _ = both_calls(gpu, x, idx, weights)
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
    for what in (
        "topk_weights",
        "topk_idx",
        *(("x of", "x_scales", "round_scale") if has_fp8(compiler.target_arch()) else ()),
    ):
        gpu, _ = make_both(comm, hidden=512, timeout_s=5.0)
        x, idx, weights = tokens(comm, gpu, 96, 40)
        start = time.monotonic()
        with pytest.raises(EPInputError, match=rf"the ranks disagree on the {what}.*rank \d: .*rank \d: .*cannot be used"):  # noqa: PT012
            gpu.low_latency_dispatch(
                x,
                idx.int() if odd and what == "topk_idx" else idx,
                topk_weights=weights if odd or what != "topk_weights" else None,
                use_fp8=what in ("x_scales", "round_scale") or (what == "x of" and bool(odd)),
                round_scale=what == "round_scale" and bool(odd),
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
        x, idx, weights = tokens(comm, gpu, 95, 40, skip=0)
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
