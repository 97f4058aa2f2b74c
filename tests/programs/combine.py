"""Combine: the bits of the oracle, close to its float64 sums, and the adjoint of dispatch."""

from __future__ import annotations

import numpy as np
import oracle
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, outputs_of_all, same_bits

HIDDEN, NUM_TOPK = 48, 6


def _tokens(rank: int) -> int:
    return (5, 0, 12, 3)[rank % 4]


def _assert_close(out: np.ndarray, expected: np.ndarray, size: np.ndarray, num_terms: int, num_nodes: int) -> None:
    error = np.abs(out.astype(np.float64) - expected)
    allowed = oracle.combine_tolerance(out.dtype.name, size, num_terms, num_nodes)
    worst = np.unravel_index(int(np.argmax(error - allowed)), error.shape) if error.size else None
    assert (error <= allowed).all(), f"at {worst}: {out[worst]} against {expected[worst]}, allowed {allowed[worst]}"


def check_sums_biases_and_weights(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 8 * ranks
    for seed, dtype in enumerate(("float32", "bfloat16", "float16")):
        inputs = inputs_of_all(
            comm, seed, _tokens, hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=experts, skip_probability=0.3, dtype=dtype
        )
        mine = inputs[rank]
        outputs = outputs_of_all(inputs, experts, seed, HIDDEN, dtype)
        weights = outputs_of_all(inputs, experts, seed + 100, NUM_TOPK, "float32")
        biases = [np.random.default_rng([seed, rank, i]).standard_normal(mine.x.shape).astype(dtype) for i in range(2)]
        with make_buffer(comm, num_experts=experts, hidden=HIDDEN, num_topk=NUM_TOPK) as buffer:
            handle = buffer.dispatch(mine.x, mine.topk_idx).handle
            for num_biases in (0, 1, 2):
                given = biases[:num_biases]
                bias = (None, given[0] if given else None, tuple(given))[num_biases]
                got = buffer.combine(outputs[rank], handle, topk_weights=weights[rank], bias=bias)
                expected, size, summed = oracle.expected_combine(
                    rank, inputs, outputs, experts, all_weights=weights, biases=given
                )
                assert got.x.shape == mine.x.shape
                assert got.x.dtype == np.dtype(dtype)
                _assert_close(got.x, expected, size, ranks + num_biases, buffer.config.num_nodes)
                options = dict(node_size=buffer.config.node_size, all_weights=weights, biases=given)
                oracle.check_sums(got, rank, inputs, outputs, experts, **options)
                np.testing.assert_allclose(got.topk_weights, summed, rtol=1e-5, atol=1e-5)
                assert got.topk_weights.dtype == np.float32
                again = buffer.combine(outputs[rank], handle, topk_weights=weights[rank], bias=bias)
                assert same_bits(again.x, got.x)
                assert same_bits(again.topk_weights, got.topk_weights)
            assert buffer.combine(outputs[rank], handle).topk_weights is None


def check_whole_numbers_are_exact(comm: MPI.Intracomm) -> None:
    experts, rank = 4 * comm.Get_size(), comm.Get_rank()
    for dtype in ("float32", "bfloat16", "float16"):
        inputs = inputs_of_all(comm, 2, _tokens, hidden=HIDDEN, num_topk=4, num_experts=experts)
        outputs = outputs_of_all(inputs, experts, 3, HIDDEN, dtype, integers=True)
        expected, _, _ = oracle.expected_combine(rank, inputs, outputs, experts)
        mine = inputs[rank]
        with make_buffer(comm, num_experts=experts, hidden=HIDDEN) as buffer:
            out = buffer.combine(outputs[rank], buffer.dispatch(mine.x, mine.topk_idx).handle).x
            assert (out.astype(np.float64) == expected).all()


def check_rank_order(comm: MPI.Intracomm) -> None:
    """Sums whose value depends on the order of terms: in float32, 1 + 1e8 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1.

    The sum of a node is complete before it is added.
    """
    ranks, rank = comm.Get_size(), comm.Get_rank()
    terms = np.array([1.0, 1e8, -1e8, 3.0, 1e-3, 2e8, -2e8, 7.0], np.float32)
    num_topk = min(ranks, 8)
    idx = np.arange(ranks, dtype=np.int64)[None, :num_topk].repeat(2, 0)  # every token goes to every rank
    bias = np.full((2, 32), 1e-3, np.float32)
    with make_buffer(comm, num_experts=ranks, num_topk=num_topk) as buffer:
        sent = buffer.dispatch(np.zeros((2, 32), np.float32), idx)
        weights = np.full((len(sent.recv_x), num_topk), terms[rank], np.float32)
        y = np.full(sent.recv_x.shape, terms[rank])
        got = buffer.combine(y, sent.handle, topk_weights=weights, bias=[bias, -2 * bias])
        total = np.float32(0)
        for node in np.split(terms[:ranks], buffer.config.num_nodes):
            total += np.cumsum(node, dtype=np.float32)[-1]
        assert (got.topk_weights == total).all()
        total = np.float32(np.float32(total + bias[0, 0]) - 2 * bias[0, 0])
        assert (got.x == total).all(), (got.x[0, 0], total)


def check_rounding_to_bfloat16(comm: MPI.Intracomm) -> None:
    """The final sum is rounded once, and ties go to the even number. Infinities and NaN stay."""
    tie, above_tie = 2.0**-8, 2.0**-8 + 2.0**-12
    rows = [  # y, two biases, the result; steps at 1.0 are 2**-7
        (1.0, tie, 0.0, 1.0),
        (1.0 + 2.0**-7, tie, 0.0, 1.0 + 2.0**-6),
        (1.0, above_tie, 0.0, 1.0 + 2.0**-7),
        (1.0, 2.0**-9, 2.0**-9, 1.0),
        (1.0, 2.0**-9, 2.0**-8, 1.0 + 2.0**-7),
        (-1.0, -tie, 0.0, -1.0),
        (3.3895e38, 3.3895e38, 0.0, np.inf),
        (np.inf, 1.0, 0.0, np.inf),
        (-np.inf, 1.0, 0.0, -np.inf),
        (np.inf, -np.inf, 0.0, np.nan),
        (np.nan, 0.0, 0.0, np.nan),
        (9.2e-41, 0.0, 0.0, 9.2e-41),
    ]
    y, first, second, expected = (np.array(column, np.float32).astype("bfloat16") for column in zip(*rows, strict=True))
    wide = [np.repeat(column[:, None], 32, 1) for column in (y, first, second, expected)]
    idx = np.full((len(rows), 1), comm.Get_rank(), np.int32)
    with make_buffer(comm, num_experts=comm.Get_size(), num_topk=1, dtype="bfloat16") as buffer:
        sent = buffer.dispatch(wide[0], idx)
        assert same_bits(sent.recv_x, wide[0])
        out = buffer.combine(sent.recv_x, sent.handle, bias=wide[1:3]).x
        np.testing.assert_array_equal(out.astype(np.float32), wide[3].astype(np.float32))
        assert (out.view(np.uint16)[np.isnan(out)] == 0x7FFF).all(), "not the NaN of a GPU's conversion"


def check_tokens_without_experts(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    idx = np.full((3, 4), -1, np.int64)
    idx[1] = 4 * ((rank + 1) % ranks)
    x, bias = np.ones((3, 32), np.float16), np.full((3, 32), 0.5, np.float16)
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        sent = buffer.dispatch(x, idx)
        assert (buffer.combine(sent.recv_x, sent.handle).x[:, 0] == [0, 1, 0]).all()
        assert (buffer.combine(sent.recv_x, sent.handle, bias=bias).x[:, 0] == [0.5, 1.5, 0.5]).all()


def check_dropped_rows_add_nothing(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(comm, 9, lambda rank: 4 + rank, hidden=32, num_topk=4, num_experts=experts)
    arriving = [oracle.expected_dispatch(r, inputs, experts).num_recv for r in range(ranks)]
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts) as buffer:
        for worst in ([n // 2 for n in arriving], [n * (r % 2) for r, n in enumerate(arriving)], [n + 5 for n in arriving]):
            outputs = outputs_of_all(inputs, experts, 4, 32, "float32", worst=worst, integers=True)
            weights = outputs_of_all(inputs, experts, 5, 4, "float32", worst=worst, integers=True)
            expected, _, summed = oracle.expected_combine(rank, inputs, outputs, experts, all_worst=worst, all_weights=weights)
            sent = buffer.dispatch(mine.x, mine.topk_idx, num_worst_tokens=worst[rank])
            for handle in (sent.handle, buffer.dispatch(mine.x, handle=sent.handle).handle):
                got = buffer.combine(outputs[rank], handle, topk_weights=weights[rank])
                assert (got.x == expected).all()
                assert (got.topk_weights == summed).all()


def check_adjoints(comm: MPI.Intracomm) -> None:
    """<dispatch(x), y> = <x, combine(y)>, also for weights. So each call is the backward pass of the other."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 8 * ranks
    for seed in range(3):
        inputs = inputs_of_all(comm, seed, _tokens, hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=experts, skip_probability=0.2)
        mine = inputs[rank]
        y = outputs_of_all(inputs, experts, seed, HIDDEN, "float32")[rank]
        with make_buffer(comm, num_experts=experts, hidden=HIDDEN, num_topk=NUM_TOPK) as buffer:
            sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            v = outputs_of_all(inputs, experts, seed + 50, NUM_TOPK, "float32")[rank] * (sent.recv_topk_idx >= 0)
            back = buffer.combine(y, sent.handle, topk_weights=v)
            pairs = (
                (sent.recv_x, y, mine.x, back.x),
                (sent.recv_topk_weights, v, mine.topk_weights, back.topk_weights),
            )
            for arrived, at_experts, given, returned in pairs:
                left = comm.allreduce(float(np.vdot(arrived.astype(np.float64), at_experts.astype(np.float64))))
                right = comm.allreduce(float(np.vdot(given.astype(np.float64), returned.astype(np.float64))))
                scale = comm.allreduce(float(np.abs(given * returned).sum())) + 1e-30
                assert abs(left - right) <= 1e-5 * scale, (left, right)


if __name__ == "__main__":
    main(__name__)
