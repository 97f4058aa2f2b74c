"""Low-latency calls that write to memory of the caller, and other names of options. `low_latency_hooks` and others run with it."""

from __future__ import annotations

import low_latency_oracle
import numpy as np
import spmd
from low_latency_rounds import (
    HIDDEN,
    assert_same,
    expected_arrivals,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
    to_backend,
    to_host,
)
from mpi4py import MPI
from spmd import main, raises

from deepep_rt import EPInputError


def check_names_of_the_order(comm: MPI.Intracomm) -> None:
    """`reduce` is another name for `allow_multiple_reduction`."""
    with make_low_latency_buffer(comm) as buffer:
        mine = make_low_latency_inputs(comm, 9, lambda rank: 5)[comm.Get_rank()]
        y = expert_outputs(buffer, 9)[comm.Get_rank()]
        for reduce, allowed in (("rank", True), ("topk", False)):
            found = []
            for how in (dict(reduce=reduce), dict(allow_multiple_reduction=allowed)):
                sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
                back = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, sent.handle, **how)
                found.append(np.asarray(back.x).copy())
            np.testing.assert_array_equal(*found)
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
        for wrong, words in (
            (dict(reduce="rank", allow_multiple_reduction=False), "reduce='topk'"),
            (dict(reduce="all"), "'rank' or 'topk'"),
        ):
            with raises(EPInputError, words):
                buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, sent.handle, **wrong)
        buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, sent.handle)


def check_out(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs, y = make_low_latency_inputs(comm, 13), expert_outputs(buffer, 13)
        mine = inputs[rank]
        handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=True)
        out = to_backend(np.full_like(mine.x, 7))
        back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, handle, out=out)
        assert_same("out", to_host(out), wanted)
        assert_same("x", to_host(back.x), wanted)
        out = to_backend(np.full_like(mine.x, 7))
        back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, handle, out=out, return_recv_hook=True)
        assert (to_host(out) == 7).all(), "out was written before the hook"
        back.hook()
        assert_same("out", to_host(out), wanted)


def check_zero_copy(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        config = buffer.config
        for seed in (14, 15):
            inputs, outputs = make_low_latency_inputs(comm, seed), expert_outputs(buffer, seed)
            mine = inputs[rank]
            handle = buffer.low_latency_dispatch(to_backend(mine.x), mine.topk_idx, use_fp8=False).handle
            y = buffer.get_low_latency_combine_buffer(handle)
            assert tuple(y.shape) == (config.num_local_experts, config.worst_recv_tokens, HIDDEN)
            y.view(np.uint8)[...] = to_backend(outputs[rank].view(np.uint8))
            for reduce_early in (True, False):
                back = buffer.low_latency_combine(
                    y, mine.topk_idx, mine.topk_weights, handle, zero_copy=True, allow_multiple_reduction=reduce_early
                )
                wanted = low_latency_oracle.expected_combine(rank, inputs, outputs, config.num_experts, reduce_early=reduce_early)
                assert_same("x", to_host(back.x), wanted)
            with raises(EPInputError, "zero_copy", "get_low_latency_combine_buffer"):
                buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, handle, zero_copy=True)


def check_counters(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 16)
        mine = inputs[rank]
        counts = np.array([len(found) for found in expected_arrivals(buffer, rank, inputs, {}).entries])
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
