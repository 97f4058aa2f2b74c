"""Prepared calls on GPUs: wrong input, and ranks that differ, stop or are late."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, rows  # noqa: E402
from gpu_prepared import TOKENS, LowLatency, Throughput, each, kind  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError  # noqa: E402

__all__ = ["kind"]


@each(LowLatency)
def test_experts_chosen_twice_and_bad_input(comm, kind):
    """The device reports wrong expert numbers as in ordinary calls, and the next step is right."""
    gpu, host = kind.make_both(comm, check_inputs=True)
    with gpu, host:
        calls = kind(comm, gpu, host, 110)
        good = calls.idx.clone()
        calls.idx[3, 2] = gpu.config.num_experts
        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {gpu.config.num_experts}"):  # noqa: PT012
            calls.call.dispatch()
            gpu.synchronize()
        calls.idx.copy_(good)
        calls.idx[:, 1] = calls.idx[:, 0]
        calls.check(*calls.run())


@each(Throughput)
def test_ranks_that_differ(comm, kind):
    """All ranks raise, no rank sends rows, and the prepared calls stay usable."""
    if comm.Get_size() == 1:
        return
    gpu, host = kind.make_both(comm)
    with gpu, host:
        calls, bytes_ = kind(comm, gpu, host, 100), rows(comm, 101, TOKENS, kind.hidden, dtype=torch.uint8)
        other = gpu.prepare_throughput(bytes_, calls.handle)
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # so the call returns before its kernel runs
        with pytest.raises(EPInputError, match=r"the ranks disagree on the x of.*No rows were sent"):  # noqa: PT012
            (other if comm.Get_rank() % 2 else calls.call).dispatch()
            gpu.synchronize()
        calls.write(1000)
        calls.check(*calls.run())


@each(LowLatency)
def test_a_rank_stops(comm, kind):
    """The last rank stops. The others mask it, and go on with their prepared calls."""
    if comm.Get_size() == 1:
        return
    last, steps = comm.Get_size() - 1, 10 if TAKE_TURNS else 100
    gpu, host = kind.make_both(comm, on_timeout="mask", timeout_s=2.0)
    calls = kind(comm, gpu, host, 120)
    for seed in range(3):
        calls.write(120 + seed)
        calls.check(*calls.run())
    comm.Barrier()
    if comm.Get_rank() != last:
        host.mask_rank(last)
        for seed in range(steps):
            calls.write(1200 + seed)
            sent, back = calls.run()
            if seed % 10 == 0:
                calls.check(sent, back)
                assert gpu.query_masked_ranks() == [last]
        gpu.synchronize()
    comm.Barrier()
    for buffer in (gpu, host):
        buffer.destroy()


@each(Throughput, LowLatency)
def test_late_rank(comm, kind):
    """The last rank makes no call. The others name it, in this call or the next one, and no stale sums remain."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    for call in ("dispatch", "combine"):
        named = f"low-latency {call}" if kind is LowLatency else ""
        gpu, host = kind.make_both(comm, timeout_s=2.0)
        calls = kind(comm, gpu, host, 130)
        calls.run()
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            back = calls.call.dispatch() if call == "dispatch" else calls.call.combine()
            with pytest.raises(EPTimeoutError, match=named) as caught:
                gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert time.monotonic() - start < 4
            for again in (calls.call.dispatch, calls.call.combine):
                with pytest.raises(EPTimeoutError, match=named):
                    again()
            assert call == "dispatch" or bool(back.x.isnan().any()), "no stale sums"
        gpu.destroy()
        for again in (calls.call.dispatch, calls.call.combine):
            with pytest.raises(EPDestroyedError):
                again()
        host.destroy()
        comm.Barrier()
