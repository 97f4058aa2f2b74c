"""Low-latency calls that write to memory of the caller, and other names of options. `low_latency_hooks` and others run with it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import spmd
from low_latency_rounds import HIDDEN, Batch, counts_of, make_low_latency_buffer, to_backend, to_host
from mpi4py import MPI
from spmd import main, raises

from deepep_rt import EPInputError


def check_names_of_the_order(comm: MPI.Intracomm) -> None:
    """`reduce` is another name for `allow_multiple_reduction`."""
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 9, lambda rank: 5)
        combine, given = buffer.low_latency_combine, (batch.y, batch.mine.topk_idx, batch.mine.topk_weights)
        for reduce in ("rank", "topk"):
            batch.check_sum(combine(*given, batch.dispatch(early=False).handle, reduce=reduce), reduce == "rank")
        sent = batch.dispatch(early=False)
        for wrong, words in (
            (dict(reduce="rank", allow_multiple_reduction=False), "reduce='topk'"),
            (dict(reduce="all"), "'rank' or 'topk'"),
        ):
            with raises(EPInputError, words):
                combine(*given, sent.handle, **wrong)
        batch.combine(sent)


def check_out(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 13)
        sent, outs = batch.dispatch(early=False), [to_backend(np.full_like(batch.mine.x, 7)) for _ in range(2)]
        backs = [batch.combine(sent, out=out, return_recv_hook=hook) for out, hook in zip(outs, (False, True), strict=True)]
        assert (to_host(outs[1]) == 7).all(), "out was written before the hook"
        backs[1].hook()
        for array in (*outs, *(back.x for back in backs)):
            batch.check_sum(SimpleNamespace(x=array))


def check_zero_copy(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        config = buffer.config
        for seed in (14, 16):
            batch = Batch(comm, buffer, seed)
            mine, given = batch.mine, (batch.mine.topk_idx, batch.mine.topk_weights)
            handle = buffer.low_latency_dispatch(to_backend(mine.x), mine.topk_idx, use_fp8=False).handle
            y = buffer.get_low_latency_combine_buffer(handle)
            assert tuple(y.shape) == (config.num_local_experts, config.worst_recv_tokens, HIDDEN)
            y.view(np.uint8)[...] = to_backend(batch.y.view(np.uint8))
            for reduce_early in (True, False):
                how = dict(zero_copy=True, allow_multiple_reduction=reduce_early)
                back = buffer.low_latency_combine(y, *given, handle, **how)
                batch.check_sum(back, reduce_early)
            with raises(EPInputError, "zero_copy", "get_low_latency_combine_buffer"):
                buffer.low_latency_combine(batch.y, *given, handle, zero_copy=True)


def check_counters(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 16)
        mine, counts = batch.mine, counts_of(batch)
        stats = to_backend(np.full(buffer.config.num_local_experts, 100, np.int32))
        waits = to_backend(np.zeros(ranks, np.int64))
        counters = dict(cumulative_local_expert_recv_stats=stats, wait_recv_cost_stats=waits, use_fp8=False)
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, **counters)
        buffer.synchronize()
        assert (to_host(stats) == 100 + counts).all()
        first = to_host(waits).copy()
        others = np.arange(ranks) != rank
        assert (first[others] >= (spmd.backend == "host")).all(), first  # on a GPU, rows may arrive before the kernel waits
        assert (first < 60e9).all(), first
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, return_recv_hook=True, **counters)
        sent.hook()
        buffer.synchronize()
        assert (to_host(stats) == 100 + 2 * counts).all()
        assert (to_host(waits) >= first).all()


if __name__ == "__main__":
    main(__name__, "low_latency_hooks", "low_latency_prepared", "low_latency_errors")
