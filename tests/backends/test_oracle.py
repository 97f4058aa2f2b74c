"""The oracle of the tests: cases written by hand, and laws that hold for all inputs. Scenarios compare backends with it, bit for bit."""

from __future__ import annotations

import low_latency_oracle
import numpy as np
import oracle
import pytest
from oracle import RankInputs

FOUR_ROWS = [  # two ranks with two experts each; row t of rank r has 10 * r + t
    RankInputs(np.array([[0], [1]], np.float32), np.array([[0, 2], [3, -1]]), np.array([[0.5, 0.25], [2, 9]], np.float32)),
    RankInputs(np.array([[10], [11]], np.float32), np.array([[1, 0], [2, 2]]), np.array([[4, 8], [16, 32]], np.float32)),
]


def test_rows_by_token() -> None:
    first, second = (oracle.expected_dispatch(rank, FOUR_ROWS, 4, expert_alignment=2) for rank in range(2))
    assert (first.x[:, 0].tolist(), first.src_idx.tolist()) == ([0, 10], [[0, 0], [1, 0]])
    assert (first.topk_idx.tolist(), first.topk_weights.tolist()) == ([[0, -1], [1, 0]], [[0.5, 0], [4, 8]])
    assert first.num_recv_per_expert == [2, 2]
    assert (second.x[:, 0].tolist(), second.topk_idx.tolist()) == ([0, 1, 11], [[-1, 0], [1, -1], [0, 0]])
    assert second.num_recv_per_expert == [4, 2]
    fewer = oracle.expected_dispatch(1, FOUR_ROWS, 4, num_worst_tokens=1)
    assert (fewer.x[:, 0].tolist(), fewer.num_recv, fewer.num_kept) == ([0], 3, 1)


def test_rows_by_expert() -> None:
    rows = oracle.expected_expert_rows(1, FOUR_ROWS, 4, expert_alignment=2)
    assert rows.x[:, 0].tolist() == [0, 11, 11, 0, 1, 0]
    assert rows.src_idx.tolist() == [[0, 0, 1], [1, 1, 0], [1, 1, 1], [-1] * 3, [0, 1, 0], [-1] * 3]
    assert rows.weights.tolist() == [0.25, 16, 32, 0, 2, 0]
    assert (rows.experts.tolist(), rows.offsets, rows.num_recv_per_expert) == ([0, 0, 0, -1, 1, -1], [0, 4, 6], [4, 2])
    assert oracle.expected_expert_rows(1, FOUR_ROWS, 4, num_worst_tokens=2).offsets == [0, 2, 2]
    by_token = oracle.rows_by_token(1, FOUR_ROWS, 4, rows.x + 1, rows, weights=rows.weights)
    assert by_token[:, 0].tolist() == [0.25, 4, 12 * 48]
    assert oracle.returned_weights(1, FOUR_ROWS, [rows]).tolist() == [[0, 0], [16, 32]]
    both = [oracle.expected_expert_rows(rank, FOUR_ROWS, 4) for rank in range(2)]
    wanted = oracle.expected_choice_sums(0, FOUR_ROWS, [one.x + 1 for one in both], both, weighted=True, biases=[FOUR_ROWS[0].x])
    assert wanted[:, 0].tolist() == [0.75, 5]


@pytest.mark.parametrize(("node_size", "wanted"), [(None, 1.0), (2, 0.0), (1, 1.0)])
def test_order_of_sums(node_size: int | None, wanted: float) -> None:
    """In float32, 1 + 1e8 is 1e8. A node is complete before it is added."""
    inputs = [RankInputs(np.zeros((1, 1), np.float32), np.array([[0, 1, 2, 3]])) for _ in range(4)]
    y = [np.full((4, 1), term, np.float32) for term in (1e8, -1e8, 1, 0)]
    if node_size == 2:
        y[1], y[2], y[3] = y[2], y[1], y[3]
    (got,), _ = oracle.expected_sums(0, inputs, y, 4, node_size=node_size)
    assert got == wanted


def test_roundings() -> None:
    """To the nearest, ties to even, once on one node. A sum of another node is rounded on its way."""
    tie = 2.0**-8  # half a step of bfloat16 at 1
    for value, wanted in ((1 + tie, 1), (1 + 3 * tie, 1 + 4 * tie), (1 + 1.5 * tie, 1 + 2 * tie), (3.4e38, np.inf)):
        assert oracle.rounded(np.array([value], np.float32), "bfloat16")[0] == wanted
    assert oracle.rounded(np.array([-np.nan], np.float32), "bfloat16").view(np.uint16)[0] == 0x7FFF
    inputs = [RankInputs(np.zeros((1, 1), "bfloat16"), np.array([[0, 1, 2, 3]])) for _ in range(4)]
    y = [np.full((4, 1), term).astype("bfloat16") for term in (tie / 2, tie / 2, 1, tie / 2)]
    assert oracle.expected_sums(0, inputs, y, 4)[0] == 1 + 2 * tie
    assert oracle.expected_sums(0, inputs, y, 4, node_size=2)[0] == 1


def test_calls_are_adjoints() -> None:
    """<dispatch(x), y> = <x, combine(y)>, also for weights. So each call is the other's backward pass."""
    inputs = [oracle.make_inputs(3, rank, (5, 0, 12)[rank], 8, 4, 12, skip_probability=0.2) for rank in range(3)]
    received = [oracle.expected_dispatch(rank, inputs, 12) for rank in range(3)]
    rng = np.random.default_rng(1)
    y = [rng.standard_normal(one.x.shape, np.float32) for one in received]
    v = [rng.standard_normal(one.topk_idx.shape, np.float32) * (one.topk_idx >= 0) for one in received]
    back = [oracle.expected_sums(rank, inputs, y, 12, all_weights=v, node_size=1) for rank in range(3)]
    left = sum(np.vdot(one.x, rows) + np.vdot(one.topk_weights, w) for one, rows, w in zip(received, y, v, strict=True))
    right = sum(np.vdot(one.x, x) + np.vdot(one.topk_weights, w) for one, (x, w) in zip(inputs, back, strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-4)


def test_low_latency_rows_and_sums() -> None:
    inputs = [RankInputs(np.repeat(one.x, 128, 1).astype("bfloat16"), one.topk_idx, one.topk_weights) for one in FOUR_ROWS]
    arrived = low_latency_oracle.expected_dispatch(1, inputs, 4)
    assert arrived.entries == [[(0, 0, 1), (1, 1, 0), (1, 1, 1)], [(0, 1, 0)]]
    assert [rows[:, 0].tolist() for rows in arrived.x] == [[0, 11, 11], [1]]
    converted = low_latency_oracle.expected_dispatch(1, inputs, 4, fp8=True, round_scale=True)
    assert converted.x[0].astype(np.float32)[1, 0] == 352
    assert converted.scales[0][1, 0] == 2.0**-5, "the least power of two by which 11 is at most 448"
    y = [np.full((2, 3, 128), rank + 1).astype("bfloat16") for rank in range(2)]
    for early in (True, False):
        got = low_latency_oracle.expected_combine(0, inputs, y, 4, reduce_early=early)
        assert got[:, 0].astype(np.float32).tolist() == [0.5 + 0.25 * 2, 2 * 2]
    got = low_latency_oracle.expected_combine(0, inputs, y, 4, reduce_early=True, live=[0])
    assert got[:, 0].astype(np.float32).tolist() == [0.5, 0]
