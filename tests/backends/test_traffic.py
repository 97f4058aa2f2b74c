"""Compare the expected traffic of a token with all orders of a few experts."""

from __future__ import annotations

import itertools

import pytest

from deepep_rt.backends.path_choice import expected_traffic
from deepep_rt.errors import EPConfigError


def enumerated(num_nodes: int, node_size: int, num_topk: int, num_experts: int, num_groups: int) -> tuple[float, float]:
    """Average nodes and ranks of a token over every order of the experts. A router keeps the nodes of the best experts."""
    nodes = ranks = 0
    orders = list(itertools.permutations(range(num_experts)))
    for order in orders:
        best = list(dict.fromkeys(expert // (num_experts // num_nodes) for expert in order))[:num_groups]
        chosen = [expert for expert in order if expert // (num_experts // num_nodes) in best][:num_topk]
        nodes += len({expert // (num_experts // num_nodes) for expert in chosen})
        ranks += len({expert // (num_experts // (num_nodes * node_size)) for expert in chosen})
    return nodes / len(orders), ranks / len(orders)


@pytest.mark.parametrize(
    ("num_nodes", "node_size", "num_topk", "num_experts", "num_groups"),
    [(1, 2, 2, 6, 1), (2, 1, 3, 6, 2), (2, 2, 2, 8, 1), (3, 1, 3, 6, 2), (3, 2, 3, 6, 2), (4, 2, 4, 8, 2), (4, 1, 3, 8, 4)],
)
def test_expected_places_agree_with_all_orders(
    num_nodes: int, node_size: int, num_topk: int, num_experts: int, num_groups: int
) -> None:
    traffic = expected_traffic(num_nodes, node_size, num_topk, num_experts, num_groups)
    assert traffic[:2] == pytest.approx(enumerated(num_nodes, node_size, num_topk, num_experts, num_groups))
    assert traffic.far_ranks + traffic.near_ranks == pytest.approx(traffic.ranks)
    assert traffic.far_nodes == pytest.approx(traffic.nodes * (num_nodes - 1) / num_nodes)


def test_experts_have_to_fit() -> None:
    with pytest.raises(EPConfigError, match=r"num_experts=255; expected a multiple of the 16 ranks"):
        expected_traffic(2, 8, 8, 255)
    with pytest.raises(EPConfigError, match=r"num_topk=5; expected at most the 4 experts of 1 nodes"):
        expected_traffic(2, 2, 5, 8, 1)
