"""Wrong low-latency calls."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from expect import logged_warnings
from low_latency_rounds import (
    HIDDEN,
    MAX_TOKENS,
    NUM_TOPK,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
    run_checked_round,
)
from mpi4py import MPI
from spmd import main, make_buffer, raises

from deepep_rt import EPDestroyedError, EPInputError

WIDE = 512  # rows that can be compressed


def check_local_mistakes_can_be_retried(comm: MPI.Intracomm) -> None:
    """A wrong argument of one rank raises there before anything is sent. When that rank calls again, all ranks go on."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer, make_low_latency_buffer(comm) as other:
        inputs, y = make_low_latency_inputs(comm, 22, lambda rank: 5), expert_outputs(buffer, 22)
        mine, mine_y = inputs[rank], y[rank]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        handle = buffer.low_latency_dispatch(x, idx, use_fp8=False).handle
        foreign = other.low_latency_dispatch(x, idx, use_fp8=False).handle
        many = np.zeros((MAX_TOKENS + 1, HIDDEN), x.dtype)
        mistakes = [
            (("float32", "bfloat16"), lambda: buffer.low_latency_dispatch(x.astype(np.float32), idx)),
            (("[5, 128]", "256"), lambda: buffer.low_latency_dispatch(np.zeros((5, 128), x.dtype), idx)),
            (("x.shape=[17, ", "16 tokens"), lambda: buffer.low_latency_dispatch(many, np.zeros((17, NUM_TOPK), idx.dtype))),
            (("topk_idx", "shape"), lambda: buffer.low_latency_dispatch(x, idx[:3])),
            (("topk_weights", "float64"), lambda: buffer.low_latency_dispatch(x, idx, topk_weights=weights.astype("f8"))),
            (("use_ue8m0", "use_fp8"), lambda: buffer.low_latency_dispatch(x, idx, use_fp8=False, use_ue8m0=True)),
            (
                ("wait_recv_cost_stats", "int32", "int64"),
                lambda: buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=np.zeros(comm.Get_size(), np.int32)),
            ),
            (("y", "shape"), lambda: buffer.low_latency_combine(mine_y[:, 1:].copy(), idx, weights, handle)),
            (("y", "float16"), lambda: buffer.low_latency_combine(mine_y.astype(np.float16), idx, weights, handle)),
            (("topk_weights", "shape"), lambda: buffer.low_latency_combine(mine_y, idx, weights[:2], handle)),
            (("another Buffer",), lambda: buffer.low_latency_combine(mine_y, idx, weights, foreign)),
            (("handle='handle'", "LowLatencyDispatchResult"), lambda: buffer.low_latency_combine(mine_y, idx, weights, "handle")),
            (("out", "shape"), lambda: buffer.low_latency_combine(mine_y, idx, weights, handle, out=x[:3])),
        ]
        for words, call in mistakes:
            if rank == 0:
                with raises(EPInputError, *words):
                    call()
        run_checked_round(comm, buffer, inputs, 22)
        run_checked_round(comm, other, inputs, 23)


def check_buffer_without_low_latency(comm: MPI.Intracomm) -> None:
    mine = make_low_latency_inputs(comm, 24)[comm.Get_rank()]
    with (
        make_buffer(
            comm, num_experts=4 * comm.Get_size(), hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, dtype="bfloat16"
        ) as buffer,
        make_low_latency_buffer(comm) as other,
    ):
        handle = other.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        y = expert_outputs(other, 24)[comm.Get_rank()]
        for call in (
            lambda: buffer.low_latency_dispatch(mine.x, mine.topk_idx),
            lambda: buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle),
            lambda: buffer.get_low_latency_combine_buffer(handle),
        ):
            with raises(EPInputError, "low_latency=True"):
                call()
        sent = buffer.dispatch(mine.x, mine.topk_idx)
        assert buffer.combine(sent.recv_x, sent.handle).x.shape == mine.x.shape


def check_low_latency_bad_expert_number(comm: MPI.Intracomm) -> None:
    """Host only: every rank raises in the same call."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    num_experts, culprit = 4 * ranks, ranks - 1
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 25, lambda rank: 5)
        mine = inputs[rank]
        for value in (num_experts, -2, 1 << 40):
            idx = mine.topk_idx.copy()
            if rank == culprit:
                idx[3, 1] = value
            for hook in (False, True):
                with raises(EPInputError, "token 3", f"expert {value}", *([] if rank == culprit else [f"rank {culprit}"])):
                    buffer.low_latency_dispatch(mine.x, idx, return_recv_hook=hook)
        run_checked_round(comm, buffer, inputs, 25)


def check_wrong_low_latency_arguments(comm: MPI.Intracomm) -> None:
    """Host only."""
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 27, lambda rank: 5)
        mine, y = inputs[comm.Get_rank()], expert_outputs(buffer, 27)[comm.Get_rank()]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        with raises(EPInputError, "topk_weights differ", "low_latency_dispatch"):
            buffer.low_latency_combine(y, idx, weights + 1, sent.handle)
        given = weights.copy()
        changed = buffer.low_latency_dispatch(x, idx, topk_weights=given)
        given *= 2  # in place
        with raises(EPInputError, "topk_weights differ", "low_latency_dispatch"):
            buffer.low_latency_combine(y, idx, given, changed.handle)
        given[:] = np.nan
        same = buffer.low_latency_dispatch(x, idx, topk_weights=given)
        buffer.low_latency_combine(y, idx, given, same.handle)
        read_only = np.zeros_like(x)
        read_only.flags.writeable = False
        with raises(EPInputError, "out is read-only"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, out=read_only)
        counts = np.zeros(buffer.config.num_local_experts, np.int32)
        counts.flags.writeable = False
        with raises(EPInputError, "cumulative_local_expert_recv_stats is read-only"):
            buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=counts)
        waits = np.zeros(comm.Get_size(), np.int64)
        buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=waits)
        assert waits[comm.Get_rank()] == 0, "a rank does not wait for itself"
        waits.flags.writeable = False
        with raises(EPInputError, "wait_recv_cost_stats is read-only"):
            buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=waits)
        run_checked_round(comm, buffer, inputs, 27)
        last = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
    with raises(EPDestroyedError, "this Buffer was destroyed"):
        last.hook()


def check_ranks_that_disagree_on_low_latency_calls(comm: MPI.Intracomm) -> None:
    """Host only."""
    if comm.Get_size() == 1:
        return
    is_odd = comm.Get_rank() % 2
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 26, lambda rank: 5)
        mine, y = inputs[comm.Get_rank()], expert_outputs(buffer, 26)[comm.Get_rank()]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        sent, other = (buffer.low_latency_dispatch(x, idx, topk_weights=weights) for _ in range(2))
        with raises(EPInputError, "kind", "rank 0: low_latency_dispatch", "rank 1: dispatch"):
            buffer.dispatch(x, idx) if is_odd else buffer.low_latency_dispatch(x, idx, use_fp8=False)
        with raises(EPInputError, "x of this call", "bfloat16", "float8_e4m3fn"):
            buffer.low_latency_dispatch(x, idx, use_fp8=bool(is_odd))
        with raises(EPInputError, "x_scales", "uint8", "float32"):
            buffer.low_latency_dispatch(x, idx, use_ue8m0=bool(is_odd))
        with raises(EPInputError, "topk_weights", "None"):
            buffer.low_latency_dispatch(x, idx, topk_weights=weights if is_odd else None)
        with raises(EPInputError, "kind", "rank 1: low_latency_combine with allow_multiple_reduction=False"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=not is_odd)
        with raises(EPInputError, "round_scale", ": True", ": False"):
            buffer.low_latency_dispatch(x, idx, round_scale=bool(is_odd))
        with raises(EPInputError, "round_scale", ": True", ": False"):
            buffer.prepare_low_latency(x, idx, weights, round_scale=bool(is_odd)).dispatch()
        with raises(EPInputError, "num_max_tokens", "rank 0: 8", "rank 1: 7"):
            buffer.low_latency_dispatch(x, idx, num_max_tokens=8 - is_odd)
        quantised, scales = x.view(np.uint8), np.ones((5, 4 + 2 * is_odd), np.uint8)
        with raises(EPInputError, "bytes of a row of x of", "rank 0: 240", "rank 1: 224"):
            buffer.low_latency_dispatch(np.ascontiguousarray(quantised[:, 16 * is_odd : 240]), idx, use_fp8=False)
        with raises(EPInputError, "bytes of a row of x_scales", "rank 0: 4", "rank 1: 6"):
            rows = np.ascontiguousarray(quantised[:, :240])
            buffer.low_latency_dispatch(rows, idx, use_fp8=False, x_scales=scales)
        with raises(EPInputError, "x of this call", "float8_e4m3fn", "uint8"):
            rows = np.ascontiguousarray(quantised[:, :HIDDEN]) if is_odd else x
            buffer.low_latency_dispatch(rows, idx, use_fp8=not is_odd)
        same = np.ascontiguousarray(quantised[:, :HIDDEN]).view(ml_dtypes.float8_e4m3fn)
        mine_scales = np.ones((5, HIDDEN // 128), np.float32)
        with raises(EPInputError, "bytes of a row of x of", "rank 0: converted by the call", f"rank 1: {HIDDEN}"):
            given = dict(x_scales=mine_scales, use_fp8=False) if is_odd else {}
            buffer.low_latency_dispatch(same if is_odd else x, idx, **given)
        for reduce_early in (True, False):
            how = dict(allow_multiple_reduction=reduce_early)
            with raises(EPInputError, "handle"):
                buffer.low_latency_combine(y, idx, weights, (other if is_odd else sent).handle, **how)
            with raises(EPInputError, "topk_idx", ": int32", ": int64"):
                buffer.low_latency_combine(y, idx.astype(np.int32 if is_odd else np.int64), weights, sent.handle, **how)
        run_checked_round(comm, buffer, inputs, 26)


def check_hidden_not_a_multiple_of_128(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm, hidden=24) as buffer:
        mine = make_low_latency_inputs(comm, 9, hidden=24)[comm.Get_rank()]
        with raises(EPInputError, "hidden=24", "128", "use_fp8=False"):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx)


def check_experts_without_room(comm: MPI.Intracomm) -> None:
    """Rows that do not fit cause one warning."""
    rank, most = comm.Get_rank(), 8
    with logged_warnings() as log, make_low_latency_buffer(comm, num_max_tokens_per_rank=most) as buffer:
        inputs = make_low_latency_inputs(comm, 1, lambda rank: (8, 5, 0, 3)[rank % 4])
        for theirs in inputs:
            theirs.topk_idx[:] = 0  # of up to 8 tokens, 4 times each; room for 8 of each rank
        arrived = NUM_TOPK * sum(len(theirs.topk_idx) for theirs in inputs)
        for _ in range(3):
            buffer.low_latency_dispatch(inputs[rank].x, inputs[rank].topk_idx, use_fp8=False)
        buffer.synchronize()
        buffer.check()
    warnings = [line for line in log if "dropped" in line]
    assert len(warnings) == (rank == 0 and arrived > buffer.config.worst_recv_tokens), warnings
    for line in warnings:
        assert f"rank 0: low_latency_dispatch received {arrived} rows for local expert 0" in line, line


def check_other_choices_are_refused(comm: MPI.Intracomm) -> None:
    """Host only: combine refuses other experts than those of the dispatch."""
    experts = 4 * comm.Get_size()
    with make_low_latency_buffer(comm) as buffer:
        x, weights = np.zeros((2, HIDDEN), ml_dtypes.bfloat16), np.ones((2, NUM_TOPK), np.float32)
        idx = np.array([[0, 1, 2, -1], [3, 2, 1, 0]])
        sent = buffer.low_latency_dispatch(x, idx, use_fp8=False)
        y = np.zeros((4, buffer.config.worst_recv_tokens, HIDDEN), ml_dtypes.bfloat16)

        def combine(token: int, choice: int, value: Any, **how: Any) -> Any:
            given = idx.copy()
            given[token, choice] = value
            return buffer.low_latency_combine(y, given, weights, sent.handle, **how)

        for value, token, choice in ((2, 0, 0), (1, 0, 3), (experts, 1, 1), (-1, 1, 2)):
            with raises(EPInputError, f"topk_idx[{token}, {choice}]={value}; expected {idx[token, choice]}"):
                combine(token, choice, value)
        with raises(EPInputError, "topk_idx[1, 0]=1"):
            combine(1, 0, 1, allow_multiple_reduction=False)
        combine(1, 2, -1, allow_multiple_reduction=False)


def check_wrong_low_latency_compression(comm: MPI.Intracomm) -> None:
    idx, weights = np.zeros((MAX_TOKENS, NUM_TOPK), np.int64), np.ones((MAX_TOKENS, NUM_TOPK), np.float32)
    for hidden, allowed in ((WIDE, True), (384, False)):
        with make_low_latency_buffer(comm, hidden=hidden) as buffer:
            (one,) = make_low_latency_inputs(comm, 1, lambda rank: MAX_TOKENS, hidden=hidden)[:1]
            sent = buffer.low_latency_dispatch(one.x, idx, use_fp8=False)
            (y,) = expert_outputs(buffer, 1)[:1]
            combine: Any = buffer.low_latency_combine
            if allowed:
                with raises(EPInputError, "compress=", "fp8"):
                    combine(y, idx, weights, sent.handle, compress="fp4")
                with raises(EPInputError, "allow_multiple_reduction=False"):
                    combine(y, idx, weights, sent.handle, compress="fp8", allow_multiple_reduction=False)
            else:
                with raises(EPInputError, "hidden=384", "multiple of 512"):
                    combine(y, idx, weights, sent.handle, compress="log10")
            assert combine(y, idx, weights, sent.handle).x.shape == (MAX_TOKENS, hidden)


def check_ranks_that_disagree_on_low_latency_compression(comm: MPI.Intracomm) -> None:
    """Host only: on GPUs, a difference breaks the Buffer."""
    rank = comm.Get_rank()
    if comm.Get_size() == 1:
        return
    with make_low_latency_buffer(comm, hidden=WIDE) as buffer:
        inputs = make_low_latency_inputs(comm, 5, hidden=WIDE)
        mine, y = inputs[rank], expert_outputs(buffer, 5)[rank]
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
        with raises(EPInputError, "kind", "rank 0: low_latency_combine with compress='fp8'", "rank 1: low_latency_combine"):
            compress = None if rank % 2 else "fp8"
            buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, sent.handle, compress=compress)


if __name__ == "__main__":
    main(__name__)
