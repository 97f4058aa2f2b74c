"""Dispatch and combine of rows that lie expert by expert, against the oracle, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
from dispatch import CASES
from mpi4py import MPI
from spmd import groups_of_every_size, inputs_of_all, main, make_buffer, raises

from deepep_rt import EPInputError


def _dispatch(buffer: Any, mine: oracle.RankInputs, **options: Any) -> Any:
    return buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, x_scales=mine.scales, layout="expert", **options)


def _run_case(comm: MPI.Intracomm, num_tokens, case, *, expert_alignment: int = 1, seed: int = 1, **options: Any) -> None:
    num_topk, each, hidden, dtype, num_scales, given = case
    sizes = dict(hidden=hidden, num_topk=num_topk, num_experts=each * comm.Get_size())
    inputs = inputs_of_all(comm, seed, num_tokens, dtype=dtype, num_scales=num_scales, **sizes, **given)
    expected = oracle.expected_expert_rows(comm.Get_rank(), inputs, sizes["num_experts"], expert_alignment=expert_alignment)
    with make_buffer(comm, **sizes, dtype="bfloat16" if np.dtype(dtype).itemsize < 2 else dtype) as buffer:
        sent = _dispatch(buffer, inputs[comm.Get_rank()], expert_alignment=expert_alignment, **options)
        oracle.check_expert_rows(
            sent,
            expected,
            by_column=options.get("scales_layout") == "column",
            with_padding=options.get("zero_padding", False),
        )


def check_every_kind_of_row(comm: MPI.Intracomm) -> None:
    for case in CASES:
        if case[0] <= case[1] * comm.Get_size():
            _run_case(comm, lambda rank: 5 + 3 * rank, case)


def check_alignment_and_padding(comm: MPI.Intracomm) -> None:
    for alignment in (2, 100, 128):
        _run_case(comm, lambda rank: 9, CASES[1], expert_alignment=alignment)
        _run_case(comm, lambda rank: 9, CASES[1], expert_alignment=alignment, zero_padding=True)
        if comm.Get_size() > 1:
            _run_case(comm, lambda rank: 9, CASES[6], expert_alignment=alignment, zero_padding=True)


def check_scales_by_column(comm: MPI.Intracomm) -> None:
    for tokens in (1, 9):
        _run_case(comm, lambda rank, tokens=tokens: tokens + rank, CASES[5], scales_layout="column")
    _run_case(comm, lambda rank: 9, CASES[7], scales_layout="column", zero_padding=True)


def check_few_tokens(comm: MPI.Intracomm) -> None:
    for case in (CASES[1], CASES[5]):
        _run_case(comm, lambda rank: 0, case)
        _run_case(comm, lambda rank: 7 * (rank == 0), case, expert_alignment=8)
    _run_case(comm, lambda rank: 64, CASES[1])


def check_experts_named_twice(comm: MPI.Intracomm) -> None:
    """A token that names an expert repeatedly has a row for each choice."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    inputs = [
        oracle.RankInputs(
            np.full((3, 32), r, np.float32),
            np.full((3, 4), ranks - 1, np.int64),
            np.arange(12, dtype=np.float32).reshape(3, 4) + r,
        )
        for r in range(ranks)
    ]
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        sent = _dispatch(buffer, inputs[rank])
        expected = oracle.expected_expert_rows(rank, inputs, 4 * ranks)
        oracle.check_expert_rows(sent, expected)
        out = buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights)
        np.testing.assert_array_equal(out.x, 4 * inputs[rank].x)
        np.testing.assert_array_equal(out.topk_weights, inputs[rank].topk_weights)


def check_handle_again(comm: MPI.Intracomm) -> None:
    experts, rank = 8 * comm.Get_size(), comm.Get_rank()
    sizes = dict(hidden=128, num_topk=4, num_experts=experts, skip_probability=0.4)
    inputs = inputs_of_all(comm, 5, lambda rank: 4 + 5 * (rank % 3), **sizes)
    with make_buffer(comm, num_experts=experts, hidden=128) as buffer:
        first = _dispatch(buffer, inputs[rank], expert_alignment=4)
        for name in ("recv_src_idx", "recv_expert_idx", "expert_offsets", "num_recv_tokens", "num_recv_tokens_per_expert"):
            getattr(first, name)[:] = 77  # results belong to the caller, so writing to one must not change the handle
        for seed in (6, 7):
            fresh = inputs_of_all(comm, seed, lambda rank: 4 + 5 * (rank % 3), dtype="bfloat16", num_scales=1, **sizes)
            for old, new in zip(inputs, fresh, strict=True):
                new.topk_idx = old.topk_idx
            ours = fresh[rank]
            expected = oracle.expected_expert_rows(rank, fresh, experts, expert_alignment=4)
            again = buffer.dispatch(ours.x, ours.topk_idx, ours.topk_weights, x_scales=ours.scales, handle=first.handle)
            oracle.check_expert_rows(again, expected)
            assert again.num_recv_tokens_per_expert_list == first.num_recv_tokens_per_expert_list
            expected.weights = None
            only_rows = buffer.dispatch(
                ours.x, x_scales=ours.scales, handle=again.handle, layout="expert", zero_padding=True, scales_layout="column"
            )
            oracle.check_expert_rows(only_rows, expected, by_column=True, with_padding=True)


def check_num_worst_tokens(comm: MPI.Intracomm) -> None:
    """Limits that are large enough, exact, too small and zero, and that differ between ranks."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(
        comm, 8, lambda rank: 3 + rank, hidden=32, num_topk=4, num_experts=experts, idx_dtype="int32", num_scales=1
    )
    arriving = oracle.expected_expert_rows(rank, inputs, experts, expert_alignment=2).num_recv
    with make_buffer(comm, num_experts=experts, num_max_tokens_per_rank=16) as buffer:
        for limit in (16 * ranks * 4 + 4, arriving, arriving // 2, 1 + rank % 2, 0, arriving * (rank % 2)):
            expected = oracle.expected_expert_rows(rank, inputs, experts, num_worst_tokens=limit, expert_alignment=2)
            sent = _dispatch(buffer, inputs[rank], num_worst_tokens=limit, expert_alignment=2, zero_padding=True)
            oracle.check_expert_rows(sent, expected, has_counts=False, with_padding=True)
            ours = inputs[rank]
            again = buffer.dispatch(
                ours.x, ours.topk_idx, ours.topk_weights, x_scales=ours.scales, handle=sent.handle, num_worst_tokens=limit
            )
            oracle.check_expert_rows(again, expected, has_counts=False)
            y = np.ones((limit, 32), np.float32)
            counted = buffer.combine(y, sent.handle).x[:, 0]  # rows of this rank's tokens that were not dropped
            assert comm.allreduce(int(counted.sum())) == comm.allreduce(int((expected.experts >= 0).sum()))


def check_sums_of_choices(comm: MPI.Intracomm) -> None:
    """`reduce="topk"` adds up the rows of choices in their order, in every type, with weights and biases. Some rows were dropped."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    for seed, (num_topk, each, hidden, dtype, _, given) in enumerate(CASES[:5]):
        experts = each * ranks
        if num_topk > experts:
            continue
        sizes = dict(hidden=hidden, num_topk=num_topk, num_experts=experts)
        inputs = inputs_of_all(comm, seed, lambda rank: 0 if rank == 1 else 40 + rank, dtype=dtype, **sizes, **given)
        bias = np.random.default_rng([seed, rank, 9]).standard_normal((len(inputs[rank].x), hidden), np.float32).astype(dtype)
        with make_buffer(comm, **sizes, dtype=dtype) as buffer:
            for worst in (None, 30):
                received = [
                    oracle.expected_expert_rows(r, inputs, experts, expert_alignment=3, num_worst_tokens=worst)
                    for r in range(ranks)
                ]
                outputs = [
                    np.random.default_rng([seed, r]).standard_normal((len(e.x), hidden), np.float32).astype(dtype)
                    for r, e in enumerate(received)
                ]
                for y, e in zip(outputs, received, strict=True):
                    y[e.experts < 0] = np.nan  # combine must not read padding
                sent = _dispatch(buffer, inputs[rank], expert_alignment=3, num_worst_tokens=worst)
                mine = received[rank]
                for weighted, biases in ((True, ()), (False, (bias,)), (True, (bias, bias))):
                    back = buffer.combine(
                        outputs[rank], sent.handle, topk_weights=mine.weights, weighted=weighted, reduce="topk", bias=biases
                    )
                    expected = oracle.expected_choice_sums(rank, inputs, outputs, received, weighted=weighted, biases=biases)
                    np.testing.assert_array_equal(back.x, expected)
                    assert (back.topk_weights is None) == weighted
                if worst is None:
                    back = buffer.combine(outputs[rank], sent.handle, topk_weights=mine.weights, reduce="topk")
                    ours = inputs[rank]
                    np.testing.assert_array_equal(
                        back.topk_weights, np.where(ours.topk_idx >= 0, ours.topk_weights, np.float32(0))
                    )
                back = buffer.combine(outputs[rank], sent.handle, reduce="topk")
                np.testing.assert_array_equal(back.x, oracle.expected_choice_sums(rank, inputs, outputs, received))
            with raises(EPInputError, "layout='token'", "reduce='topk'"):
                by_token = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx)
                buffer.combine(by_token.recv_x, by_token.handle, reduce="topk")
            with raises(EPInputError, "reduce='sum'", "'rank' or 'topk'"):
                buffer.combine(outputs[rank], sent.handle, reduce="sum")


def check_sums_of_no_rows(comm: MPI.Intracomm) -> None:
    """All tokens go to the last rank, or nowhere. Ranks without rows take part in both orders of the sum."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    x = np.random.default_rng(rank).standard_normal((5, 32), np.float32)
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        for chosen in (4 * ranks - 1, -1):
            idx = np.full((5, 4), -1)
            idx[:, 1] = chosen
            sent = buffer.dispatch(x, idx, np.ones((5, 4), np.float32), layout="expert")
            for reduce in ("rank", "topk"):
                back = buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True, reduce=reduce)
                np.testing.assert_array_equal(back.x, x if chosen >= 0 else np.zeros_like(x))


def check_same_bits_at_any_size(comm: MPI.Intracomm) -> None:
    """The tokens and experts of one rank, spread over 1, 2, 4 and 8 ranks, give the same bits with `reduce="topk"`."""
    hidden, experts, num_topk, tokens = 64, 16, 4, 48
    rng = np.random.default_rng(11)
    x = rng.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    idx = np.ascontiguousarray(rng.random((tokens, experts)).argsort(axis=1)[:, :num_topk])
    weights = rng.random((tokens, num_topk), np.float32)
    gains = rng.standard_normal((experts, hidden), np.float32)
    found = []
    for group in groups_of_every_size(comm):
        size, rank = group.Get_size(), group.Get_rank()
        part = slice(rank * tokens // size, (rank + 1) * tokens // size)
        with make_buffer(group, hidden=hidden, num_topk=num_topk, num_experts=experts, dtype="bfloat16") as buffer:
            sent = buffer.dispatch(x[part], idx[part], weights[part], layout="expert")
            expert = sent.recv_expert_idx + rank * experts // size
            y = (gains[expert] * sent.recv_x.astype(np.float32)).astype(ml_dtypes.bfloat16)
            back = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True, reduce="topk")
            found.append(np.concatenate(group.allgather(np.asarray(back.x).view(np.uint16).copy())))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def check_sums(comm: MPI.Intracomm) -> None:
    """Combine with and without weights, with biases, in every type, of a dispatch of any number of rows."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    for seed, (num_topk, each, hidden, dtype, _, given) in enumerate(CASES[:5]):
        experts = each * ranks
        if num_topk > experts:
            continue
        sizes = dict(hidden=hidden, num_topk=num_topk, num_experts=experts)
        inputs = inputs_of_all(comm, seed, lambda rank: 6 + rank, dtype=dtype, **sizes, **given)
        received = [oracle.expected_expert_rows(r, inputs, experts, expert_alignment=3) for r in range(ranks)]
        outputs = [
            np.random.default_rng([seed, r]).standard_normal((len(e.x), hidden), np.float32).astype(dtype)
            for r, e in enumerate(received)
        ]
        for y, e in zip(outputs, received, strict=True):
            y[e.experts < 0] = np.nan  # combine must not read padding
        bias = np.random.default_rng([seed, rank, 9]).standard_normal((len(inputs[rank].x), hidden), np.float32).astype(dtype)
        with make_buffer(comm, **sizes, dtype=dtype) as buffer:
            sent = _dispatch(buffer, inputs[rank], expert_alignment=3)
            node_size = buffer.config.node_size
            for weighted in (False, True):
                by_token = [
                    oracle.rows_by_token(
                        r, inputs, experts, outputs[r], received[r], weights=received[r].weights if weighted else None
                    )
                    for r in range(ranks)
                ]
                weights = sent.recv_topk_weights if weighted else None
                out = buffer.combine(outputs[rank], sent.handle, topk_weights=weights, weighted=weighted, bias=bias)
                oracle.check_sums(out, rank, inputs, by_token, experts, node_size=node_size, biases=[bias])


def check_weights_return(comm: MPI.Intracomm) -> None:
    """Weights that combine gets return to their tokens and choices: the backward pass of dispatch."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(comm, 4, lambda rank: 9, hidden=32, num_topk=4, num_experts=experts, skip_probability=0.3)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts) as buffer:
        sent = _dispatch(buffer, mine, expert_alignment=5, zero_padding=True)
        out = buffer.combine(sent.recv_x, sent.handle, topk_weights=2 * sent.recv_topk_weights)
        chosen = mine.topk_idx >= 0
        np.testing.assert_array_equal(out.topk_weights, np.where(chosen, 2 * mine.topk_weights, 0))
        np.testing.assert_allclose(out.x, chosen.sum(1, keepdims=True) * mine.x, rtol=1e-6)


def check_random_rounds(comm: MPI.Intracomm) -> None:
    """Calls of both layouts take turns on one Buffer, with random sizes, alignments, limits and handles."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts, hidden, num_topk = 8 * ranks, 48, 5
    with make_buffer(comm, num_experts=experts, hidden=hidden, num_topk=num_topk, dtype="float32") as buffer:
        most = buffer.config.num_max_recv_tokens
        for seed in range(40):
            rng = np.random.default_rng([seed, 28])
            alignment, layout = int(rng.integers(1, 9)), str(rng.choice(["token", "expert"]))
            tokens = rng.integers(0, 12, ranks)
            inputs = inputs_of_all(
                comm,
                seed,
                lambda r, tokens=tokens: int(tokens[r]),
                hidden=hidden,
                num_topk=num_topk,
                num_experts=experts,
                skip_probability=float(rng.choice([0, 0.5])),
                pattern=str(rng.choice(["random", "skewed"])),
            )
            mine, fixed = inputs[rank], bool(rng.integers(2))
            limit = (most if layout == "token" else int(rng.integers(0, 2 * most))) if fixed else None
            sent = buffer.dispatch(
                mine.x, mine.topk_idx, mine.topk_weights, layout=layout, expert_alignment=alignment, num_worst_tokens=limit
            )
            options = dict(expert_alignment=alignment, num_worst_tokens=limit)
            if layout == "token":
                oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, experts, **options), has_counts=not fixed)
                continue
            expected = oracle.expected_expert_rows(rank, inputs, experts, **options)
            oracle.check_expert_rows(sent, expected, has_counts=not fixed)
            back = buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights, weighted=bool(seed % 2))
            if limit is None or all(comm.allgather(limit >= expected.num_recv)):
                chosen = mine.topk_idx >= 0
                factor = np.where(chosen, mine.topk_weights, 0).sum(1) if seed % 2 else chosen.sum(1)
                np.testing.assert_allclose(back.x, factor[:, None] * mine.x, rtol=1e-5, atol=1e-5)


def check_wrong_arguments(comm: MPI.Intracomm) -> None:
    experts, rank = 4 * comm.Get_size(), comm.Get_rank()
    inputs = inputs_of_all(comm, 2, lambda rank: 6, hidden=32, num_topk=4, num_experts=experts, num_scales=1)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts) as buffer:
        by_expert, by_token = _dispatch(buffer, mine), buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        most = buffer.config.num_max_recv_tokens * 4
        y, weights = by_expert.recv_x, by_expert.recv_topk_weights
        with raises(EPInputError, "layout='rows'; expected 'token' or 'expert'"):
            buffer.dispatch(mine.x, mine.topk_idx, layout="rows")
        with raises(EPInputError, "layout='token'; expected 'expert', the layout of the handle"):
            buffer.dispatch(mine.x, handle=by_expert.handle, layout="token")
        with raises(EPInputError, "zero_padding=True; expected layout='expert' with it"):
            buffer.dispatch(mine.x, mine.topk_idx, zero_padding=True)
        with raises(EPInputError, "scales_layout='column'; expected layout='expert' with it"):
            buffer.dispatch(mine.x, mine.topk_idx, scales_layout="column")
        with raises(EPInputError, "expected a type of 4 bytes with scales_layout='column'"):
            scales = mine.scales.view(np.uint8)
            buffer.dispatch(mine.x, mine.topk_idx, x_scales=scales, layout="expert", scales_layout="column")
        with raises(EPInputError, f"num_worst_tokens={most + 1}; expected a whole number from 0 to {most}"):
            _dispatch(buffer, mine, num_worst_tokens=most + 1)
        with raises(EPInputError, "weighted=True with a handle of layout='token'"):
            buffer.combine(by_token.recv_x, by_token.handle, topk_weights=by_token.recv_topk_weights, weighted=True)
        with raises(EPInputError, "topk_weights=None; expected a weight for each row with weighted=True"):
            buffer.combine(y, by_expert.handle, weighted=True)
        with raises(EPInputError, f"topk_weights.shape=[{len(y)}, 4]; expected [{len(y)}]"):
            buffer.combine(y, by_expert.handle, topk_weights=np.zeros((len(y), 4), np.float32))
        oracle.check_expert_rows(_dispatch(buffer, mine), oracle.expected_expert_rows(rank, inputs, experts))
        assert buffer.combine(y, by_expert.handle, topk_weights=weights).topk_weights.shape == (6, 4)


def check_ranks_with_different_layouts(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    inputs = inputs_of_all(comm, 2, lambda rank: 6, hidden=32, num_topk=4, num_experts=4 * ranks)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        with raises(EPInputError, "the ranks disagree on the kind of this call"):
            buffer.dispatch(mine.x, mine.topk_idx, layout="expert" if rank == 0 else "token")
            buffer.synchronize()  # on GPUs, a later call raises it
        sent = _dispatch(buffer, mine)
        oracle.check_expert_rows(sent, oracle.expected_expert_rows(rank, inputs, 4 * ranks))
        with raises(EPInputError, "the ranks disagree on the kind of this call"):
            buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights, weighted=rank == 0)
            buffer.synchronize()


if __name__ == "__main__":
    main(__name__)
