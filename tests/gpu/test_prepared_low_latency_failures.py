"""Prepared low-latency calls on GPUs: wrong input, and ranks that are lost or late."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS  # noqa: E402
from gpu_low_latency import make_both, transport  # noqa: E402
from gpu_prepared_low_latency import Step  # noqa: E402

from deepep_rt import EPDestroyedError, EPInputError, EPTimeoutError  # noqa: E402

__all__ = ["transport"]


def test_experts_chosen_twice_and_bad_input(comm):
    """The device reports wrong expert numbers as in ordinary calls, and the next step is right."""
    gpu, host = make_both(comm, hidden=512, check_inputs=True)
    with gpu, host:
        step = Step(comm, gpu, host, 110, use_fp8=False)
        good = step.idx.clone()
        step.idx[3, 2] = gpu.config.num_experts
        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {gpu.config.num_experts}"):  # noqa: PT012
            step.call.dispatch()
            gpu.synchronize()
        step.idx.copy_(good)
        step.idx[:, 1] = step.idx[:, 0]
        step.check(*step.run())


def test_a_rank_stops(comm):
    """The last rank stops. The others mask it, and go on with their prepared calls."""
    if comm.Get_size() == 1:
        return
    last, steps = comm.Get_size() - 1, 10 if TAKE_TURNS else 100
    gpu, host = make_both(comm, hidden=512, on_timeout="mask", timeout_s=2.0)
    step = Step(comm, gpu, host, 120, use_fp8=False)
    for seed in range(3):
        step.write(120 + seed)
        step.check(*step.run())
    comm.Barrier()
    if comm.Get_rank() != last:
        host.mask_rank(last)
        for seed in range(steps):
            step.write(1200 + seed)
            sent, back = step.run()
            if seed % 10 == 0:
                step.check(sent, back)
                assert gpu.query_masked_ranks() == [last]
        gpu.synchronize()
    comm.Barrier()
    for buffer in (gpu, host):
        buffer.destroy()


def test_late_rank(comm):
    """The last rank makes no call. The others name it, in this call or the next one."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    for call in ("dispatch", "combine"):
        gpu, host = make_both(comm, hidden=512, timeout_s=2.0)
        step = Step(comm, gpu, host, 130, use_fp8=False)
        step.run()
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            back = step.call.dispatch() if call == "dispatch" else step.call.combine()
            with pytest.raises(EPTimeoutError, match=f"low-latency {call}") as caught:
                gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert time.monotonic() - start < 4
            for again in (step.call.dispatch, step.call.combine):
                with pytest.raises(EPTimeoutError, match=f"low-latency {call}"):
                    again()
            assert call == "dispatch" or bool(back.x.isnan().any()), "no stale sums"
        gpu.destroy()
        for again in (step.call.dispatch, step.call.combine):
            with pytest.raises(EPDestroyedError):
                again()
        host.destroy()
        comm.Barrier()
