"""The low-latency calls: every bit that arrives and comes back. `low_latency_hooks`, `low_latency_errors` and others run with it."""

from __future__ import annotations

from typing import Any

import low_latency_oracle
import numpy as np
import spmd
from low_latency_rounds import (
    FORMATS,
    HIDDEN,
    MAX_TOKENS,
    assert_same,
    expected_arrivals,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
    run_checked_round,
    to_backend,
    to_host,
)
from mpi4py import MPI
from spmd import main, raises

from deepep_rt import EPInputError

NUM_ROUNDS = 40


def check_every_format(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        for seed, options in enumerate(FORMATS):
            run_checked_round(comm, buffer, make_low_latency_inputs(comm, seed), seed, **options)


def check_index_types_and_patterns(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm) as buffer:
        for seed, (idx_dtype, pattern) in enumerate((t, p) for t in ("int32", "int64") for p in ("random", "one_rank", "skewed")):
            run_checked_round(
                comm, buffer, make_low_latency_inputs(comm, seed, idx_dtype=idx_dtype, pattern=pattern, skip_probability=0), seed
            )


def check_no_tokens(comm: MPI.Intracomm) -> None:
    last = comm.Get_size() - 1
    with make_low_latency_buffer(comm) as buffer:
        for num_tokens in (lambda rank: 0, lambda rank: 7 * (rank == 0), lambda rank: 16 * (rank == last)):
            run_checked_round(comm, buffer, make_low_latency_inputs(comm, 3, num_tokens), 3, use_fp8=True)
            run_checked_round(comm, buffer, make_low_latency_inputs(comm, 4, num_tokens, pattern="one_rank"), 4)
        run_checked_round(comm, buffer, make_low_latency_inputs(comm, 5, skip_probability=1.0), 5, use_fp8=True)


def check_full_batches_to_one_rank(comm: MPI.Intracomm) -> None:
    """One expert receives as many tokens as fit."""
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 6, lambda rank: MAX_TOKENS, pattern="one_rank", skip_probability=0)
        for one in inputs:
            one.topk_idx[:, 1:] = -1
            one.topk_idx[:, 0] = buffer.config.num_experts - 1
        run_checked_round(comm, buffer, inputs, 6, use_fp8=True)


def check_experts_chosen_twice(comm: MPI.Intracomm) -> None:
    num_experts, num_tokens = 4 * comm.Get_size(), MAX_TOKENS // 2
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 7, lambda rank: num_tokens, skip_probability=0)
        for one in inputs:
            one.topk_idx[:, 2] = one.topk_idx[:, 0] = np.arange(num_tokens) % num_experts
        run_checked_round(comm, buffer, inputs, 7, use_fp8=True)
        run_checked_round(comm, buffer, inputs, 8)


def check_one_choice_and_one_expert_each(comm: MPI.Intracomm) -> None:
    ranks = comm.Get_size()
    with make_low_latency_buffer(comm, num_topk=1, num_experts=ranks) as buffer:
        run_checked_round(comm, buffer, make_low_latency_inputs(comm, 8, num_topk=1, num_experts=ranks), 8, use_fp8=True)


def check_hidden_not_a_multiple_of_128(comm: MPI.Intracomm) -> None:
    with make_low_latency_buffer(comm, hidden=24) as buffer:
        run_checked_round(comm, buffer, make_low_latency_inputs(comm, 9, hidden=24), 9)
        mine = make_low_latency_inputs(comm, 9, hidden=24)[comm.Get_rank()]
        with raises(EPInputError, "hidden=24", "128", "use_fp8=False"):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx)


def check_special_numbers_in_fp8(comm: MPI.Intracomm) -> None:
    """Zeros, infinities, NaN, the smallest numbers, and groups of very different magnitudes."""
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 10, lambda rank: 12)
        for rank, one in enumerate(inputs):
            rng = np.random.default_rng([10, rank])
            one.x[:] = (one.x.astype(np.float32) * np.exp2(rng.integers(-100, 100, (12, 1)))).astype(one.x.dtype)
            one.x[0] = 0
            one.x[1, :3] = np.nan, 1, -np.nan
            one.x[2, 130:132] = np.inf, -np.inf
            one.x[3, :128] = np.nan
            one.x.view(np.uint16)[4] = rng.integers(0, 1 << 16, HIDDEN)
            one.x.view(np.uint16)[5] = rng.integers(0, 1 << 7, HIDDEN)  # subnormal
            one.x[6, ::2] = -0.0
        for options in FORMATS[1:4]:
            run_checked_round(comm, buffer, inputs, 11, **options)


def check_sums_have_an_order(comm: MPI.Intracomm) -> None:
    """Sums whose float32 value depends on the order of terms, and sums of negative zeros, which are positive."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 12, lambda rank: 8, skip_probability=0)
        terms = np.array([1.0, 1e8, -1e8, 3.0, 2e8, -2e8, 0.01], np.float32)
        for one in inputs:
            one.topk_weights[:] = np.random.default_rng(12).choice(terms, one.topk_weights.shape)
        y = [np.ones_like(a) for a in expert_outputs(buffer, 12)]
        zeros = [np.full_like(a, -0.0) for a in y]
        mine = inputs[rank]
        handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        for reduce_early in (True, False):
            for given in (y, zeros):
                wanted = low_latency_oracle.expected_combine(rank, inputs, given, 4 * ranks, reduce_early=reduce_early)
                back = buffer.low_latency_combine(
                    given[rank], mine.topk_idx, mine.topk_weights, handle, allow_multiple_reduction=reduce_early
                )
                assert_same("x", back.x, wanted)


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


def check_random_rounds(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    held: list[tuple[Any, low_latency_oracle.Arrived]] = []
    with make_low_latency_buffer(comm) as buffer:
        for number in range(NUM_ROUNDS):
            rng = np.random.default_rng([21, number])  # the same on all ranks, so that they make the same choices
            sizes = rng.integers(0, MAX_TOKENS + 1 if number % 7 else 1, ranks)
            inputs = make_low_latency_inputs(
                comm,
                2000 + number,
                lambda r, sizes=sizes: int(sizes[r]),
                skip_probability=float(rng.choice([0.0, 0.3, 0.9])),
                pattern=str(rng.choice(["random", "one_rank", "skewed"])),
                idx_dtype=str(rng.choice(["int32", "int64"])),
            )
            options = FORMATS[int(rng.integers(0, len(FORMATS)))]
            early, with_hook, reduce_early = (bool(rng.integers(0, 2)) for _ in range(3))
            mine, y = inputs[rank], expert_outputs(buffer, number, special=bool(rng.integers(0, 2)))
            sent = buffer.low_latency_dispatch(
                mine.x,
                mine.topk_idx,
                topk_weights=mine.topk_weights if early else None,
                return_recv_hook=with_hook,
                **options,
            )
            if with_hook:
                sent.hook()
            held.append((sent, expected_arrivals(buffer, rank, inputs, options)))
            back = buffer.low_latency_combine(
                y[rank],
                mine.topk_idx,
                mine.topk_weights,
                sent.handle,
                allow_multiple_reduction=reduce_early,
                return_recv_hook=with_hook,
            )
            if with_hook:
                back.hook()
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=reduce_early)
            assert_same(f"round {number}", back.x, wanted)
            if number % 8 == 7:  # later calls do not change results
                for result, expected in held:
                    low_latency_oracle.check_dispatch(result, expected)
                held.clear()


if __name__ == "__main__":
    main(__name__, "low_latency_compressed", "low_latency_hooks", "low_latency_prepared", "low_latency_errors")
