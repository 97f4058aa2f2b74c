"""Compute the rows that a token is expected to cause within its node and between nodes.

Pure arithmetic, without a Buffer. Experts are drawn without replacement, and every expert is equally likely. With groups, a router first
takes the nodes of the token's best experts, and then the best experts of those nodes (DeepSeek-V3 calls this group-limited routing).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .errors import EPConfigError


class Traffic(NamedTuple):
    """The places that one token is expected to reach. Places count once, however many of the token's experts they hold.

    Attributes:
        nodes: Nodes, the token's own node included if it holds an expert of the token.
        ranks: Ranks, the token's own rank included.
        num_nodes: Nodes of the job.
    """

    nodes: float
    ranks: float
    num_nodes: int

    @property
    def far_nodes(self) -> float:
        """Other nodes than the token's own. By symmetry, each node of the token is its own one with a chance of 1 in `num_nodes`."""
        return self.nodes * (1 - 1 / self.num_nodes)

    @property
    def far_ranks(self) -> float:
        """Ranks on other nodes than the token's own."""
        return self.ranks * (1 - 1 / self.num_nodes)

    @property
    def near_ranks(self) -> float:
        """Ranks on the token's own node."""
        return self.ranks / self.num_nodes


@functools.lru_cache(maxsize=256)
def expected_traffic(num_nodes: int, node_size: int, num_topk: int, num_experts: int, num_groups: int | None = None) -> Traffic:
    """Compute the expected numbers of nodes and ranks that a token goes to.

    Args:
        num_nodes: Nodes of the job.
        node_size: Ranks of a node.
        num_topk: Experts of a token.
        num_experts: Experts over all ranks, a multiple of the ranks.
        num_groups: Most nodes that a token may go to. Default: all of them.

    Returns:
        The expected numbers.

    Raises:
        EPConfigError: if the experts cannot be divided by the ranks, or if there are too few of them for a token.

    Example:
        >>> traffic = expected_traffic(2, 8, num_topk=8, num_experts=256)
        >>> round(traffic.far_nodes, 3), round(traffic.far_ranks, 3)
        (0.997, 3.262)
    """
    num_ranks = num_nodes * node_size
    if num_experts % num_ranks:
        raise EPConfigError(
            f"num_experts={num_experts}; expected a multiple of the {num_ranks} ranks. Choose another number of experts or nodes."
        )
    node_experts, rank_experts = num_experts // num_nodes, num_experts // num_ranks
    groups = min(num_groups or num_nodes, num_nodes)
    if groups * node_experts < num_topk:
        raise EPConfigError(
            f"num_topk={num_topk}; expected at most the {groups * node_experts} experts of {groups} nodes. Choose more groups or experts."
        )
    nodes = ranks = 0.0
    for counts, chance in _choices_by_node(num_nodes, node_experts, num_topk, groups).items():
        nodes += chance * len(counts)
        ranks += chance * sum(_distinct(node_size, rank_experts, count) for count in counts)
    return Traffic(nodes, ranks, num_nodes)


def _choices_by_node(num_nodes: int, node_experts: int, num_topk: int, groups: int) -> dict[tuple[int, ...], float]:
    """Compute the chance of each split of a token's choices over nodes. A split lists the choices of each chosen node, in falling order.

    The best expert comes first, then the next one. Until `groups` nodes hold a choice, the next expert is any other one. From then
    on, it is one of those nodes. The nodes of the best experts are thereby the first `groups` nodes that appear.
    """
    splits: dict[tuple[int, ...], float] = {(): 1.0}
    for drawn in range(num_topk):
        later: dict[tuple[int, ...], float] = {}
        for split, chance in splits.items():
            is_open = len(split) < groups
            left = (num_nodes if is_open else groups) * node_experts - drawn
            for i, count in enumerate(split):
                _add(later, (*split[:i], count + 1, *split[i + 1 :]), chance * (node_experts - count) / left)
            if is_open:
                _add(later, (*split, 1), chance * (num_nodes - len(split)) * node_experts / left)
        splits = later
    return splits


def _add(chances: dict[tuple[int, ...], float], split: tuple[int, ...], chance: float) -> None:
    if chance > 0:  # a node whose experts are all taken
        key = tuple(sorted(split, reverse=True))
        chances[key] = chances.get(key, 0.0) + chance


def _distinct(num_ranks: int, rank_experts: int, drawn: int) -> float:
    """Return the expected number of ranks that hold at least one of `drawn` experts of a node."""
    total = num_ranks * rank_experts
    return num_ranks * (1 - math.comb(total - rank_experts, drawn) / math.comb(total, drawn))
