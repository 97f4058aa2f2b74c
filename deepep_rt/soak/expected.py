"""Compute the expected results of a soak round at one rank from the choices of all ranks, without code of a backend.

NumPy computes positions on the host. Contents are computed on the device of the Buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .arrays import Arrays
from .row_formats import after_compression


class Rows(NamedTuple):
    """Received rows of a rank: source rank and source token of each, `[n]` int64."""

    source: np.ndarray
    token: np.ndarray


class Routing:
    """The routing of one dispatch for one rank.

    Args:
        choices: For each rank `[tokens, topk]`, experts or -1.
        rank: This one.
        num_experts: Experts over all ranks.
        worst: `num_worst_tokens` of each rank. None: all rows fit.
    """

    def __init__(self, choices: Sequence[np.ndarray], rank: int, num_experts: int, worst: Sequence[int] | None = None) -> None:
        self.choices, self.rank, self.num_ranks = choices, rank, len(choices)
        self.local = num_experts // len(choices)
        self._worst = worst
        expert_ranks = [np.where(idx >= 0, idx // self.local, -1) for idx in choices]
        self._send_masks = [
            np.stack([(home == peer).any(axis=1) for peer in range(self.num_ranks)], axis=1) for home in expert_ranks
        ]  # for each source [tokens, ranks]

    @property
    def mine(self) -> np.ndarray:
        """Choices of this rank's tokens."""
        return self.choices[self.rank]

    @cached_property
    def num_sent_here(self) -> int:
        """Count the rows that are sent to this rank, including rows that do not fit."""
        return self.num_sent_to(self.rank)

    def num_sent_to(self, peer: int) -> int:
        """Count the rows that are sent to a rank, including rows that do not fit."""
        return int(sum(goes[:, peer].sum() for goes in self._send_masks))

    @cached_property
    def num_rows(self) -> int:
        """Count the rows of the result."""
        return self.num_sent_here if self._worst is None else self._worst[self.rank]

    @cached_property
    def kept(self) -> Rows:
        """List the rows that fit, in the order of the result."""
        tokens = [np.flatnonzero(goes[:, self.rank]) for goes in self._send_masks]
        source = np.repeat(np.arange(self.num_ranks), [len(t) for t in tokens])
        return Rows(source[: self.num_rows], np.concatenate(tokens)[: self.num_rows])

    @cached_property
    def num_per_expert(self) -> np.ndarray:
        """Count the choices of each local expert, including rows that do not fit."""
        every = np.concatenate([idx.reshape(-1) for idx in self.choices])
        first = self.rank * self.local
        return np.bincount(every[(every >= first) & (every < first + self.local)] - first, minlength=self.local)

    @cached_property
    def local_choices(self) -> np.ndarray:
        """List the local experts of each row of the result, `[num_rows, topk]`. Other choices are -1."""
        made = np.full((self.num_rows, self.mine.shape[1]), -1, np.int64)
        for source in range(self.num_ranks):
            at = np.flatnonzero(self.kept.source == source)
            idx = self.choices[source][self.kept.token[at]]
            is_here = (idx >= 0) & (idx // self.local == self.rank)
            made[at] = np.where(is_here, idx - self.rank * self.local, -1)
        return made

    def returned_by(self, peer: int) -> np.ndarray:
        """List the tokens of this rank that have a row at `peer`, ascending."""
        tokens = np.flatnonzero(self._send_masks[self.rank][:, peer])
        if self._worst is None:
            return tokens
        before = sum(int(goes[:, peer].sum()) for goes in self._send_masks[: self.rank])
        return tokens[: max(self._worst[peer] - before, 0)]


class Entries(NamedTuple):
    """Rows of a low-latency dispatch by expert, `[n]` int64 each: position and source."""

    expert: np.ndarray  # local
    row: np.ndarray  # of the expert
    source: np.ndarray
    token: np.ndarray
    choice: np.ndarray


class ExpertRouting:
    """The routing of one low-latency dispatch for one rank. A token may name an expert more than once.

    Args:
        choices: For each rank `[tokens, topk]`, experts or -1.
        rank: This one.
        num_experts: Experts over all ranks.
        capacity: Rows of an expert that fit. Later ones are dropped.
    """

    def __init__(self, choices: Sequence[np.ndarray], rank: int, num_experts: int, capacity: int) -> None:
        self.choices, self.rank, self.num_ranks, self.capacity = choices, rank, len(choices), capacity
        self.local, self._num_experts = num_experts // len(choices), num_experts

    @property
    def mine(self) -> np.ndarray:
        """Choices of this rank's tokens."""
        return self.choices[self.rank]

    @cached_property
    def entries(self) -> Entries:
        """List the rows that fit, in the order of the result."""
        first = self.rank * self.local
        at = [np.nonzero((idx >= first) & (idx < first + self.local)) for idx in self.choices]
        source = np.repeat(np.arange(self.num_ranks), [len(token) for token, _ in at])
        token, choice = (np.concatenate(parts) for parts in zip(*at, strict=True))
        expert = np.concatenate([idx[where] for idx, where in zip(self.choices, at, strict=True)]) - first
        order = np.argsort(expert, kind="stable")
        expert = expert[order]
        row = np.arange(len(expert)) - np.searchsorted(expert, expert)
        fits = row < self.capacity
        return Entries(expert[fits], row[fits], source[order][fits], token[order][fits], choice[order][fits])

    @cached_property
    def num_per_expert(self) -> np.ndarray:
        """Count the rows of each local expert."""
        return np.bincount(self.entries.expert, minlength=self.local)

    @cached_property
    def fits(self) -> np.ndarray:
        """Tell which choices of this rank's tokens have a row, `[tokens, topk]` bool."""
        before = sum(np.bincount(idx[idx >= 0], minlength=self._num_experts) for idx in self.choices[: self.rank])
        found = np.zeros(self.mine.shape, bool)
        for expert in np.unique(self.mine[self.mine >= 0]):
            token, choice = np.nonzero(self.mine == expert)
            room = self.capacity - (before[expert] if self.rank else 0)  # type: ignore[index]
            found[token[: max(room, 0)], choice[: max(room, 0)]] = True
        return found


def summed(
    arrays: Arrays,
    routing: Routing,
    node_size: int,
    width: int,
    dtype: str,
    row: Callable[[int, np.ndarray], Any],
    biases: Sequence[Any] = (),
    compress: str | None = None,
    path: str = "hierarchical",
) -> Any:
    """Compute the sums of a combine: float32, each node in rank order, then the nodes, then the biases, rounded once.

    The sum of a node other than that of this rank is rounded before it is added, but for compressed rows of the direct path.

    Args:
        arrays: NumPy or CuPy.
        routing: Routing of the dispatch.
        node_size: Ranks of a node.
        width: Elements of a row.
        dtype: Element type of the rows.
        row: Returns rank `peer`'s rows for tokens of this rank, as unsigned integers.
        biases: Biases of all tokens, as unsigned integers.
        compress: The form of rows on the way, those of this rank included. With several nodes, it is the form of the rounded sums of other
            nodes, or on the direct path of their rows. None: as they are.
        path: The way between nodes.
    """
    has_nodes, is_direct = node_size < routing.num_ranks, compress is not None and path == "direct"
    total = arrays.xp.zeros((len(routing.mine), width), np.float32)
    for first in range(0, routing.num_ranks, node_size):
        node = arrays.xp.zeros(total.shape, np.float32)
        is_far = not first <= routing.rank < first + node_size
        form = compress if not has_nodes or (is_far and is_direct) else None
        for peer in range(first, first + node_size):
            tokens = routing.returned_by(peer)
            if len(tokens):
                rows = arrays.to_float32(row(peer, tokens), dtype)
                node[arrays.put(tokens)] += rows if form is None else after_compression(arrays, rows, form)
        if is_far and not is_direct:
            node = arrays.to_float32(arrays.from_float32(node, dtype), dtype)
            node = node if compress is None else after_compression(arrays, node, compress)
        total += node  # a node without a row adds 0, which changes no bit
    for bias in biases:
        total += arrays.to_float32(bias, dtype)
    return arrays.from_float32(total, dtype)


def weighted(
    arrays: Arrays,
    expert_ranks: np.ndarray,
    width: int,
    weights: Any,
    row: Callable[[int], Any],
    *,
    num_ranks: int,
    reduce_early: bool,
    compress: str | None = None,
) -> Any:
    """Compute the sums of a low-latency combine as bfloat16 in unsigned integers.

    Args:
        arrays: NumPy or CuPy.
        expert_ranks: `[tokens, topk]`, the rank that returns a row for a choice, or -1 if no row is added.
        width: Elements of a row.
        weights: `[tokens, topk]` float32 of this rank.
        row: Returns the rows of a choice for all tokens, as unsigned integers.
        num_ranks: Ranks of the Buffer.
        reduce_early: Whether expert ranks add up their rows of a token and round the sum.
        compress: The form of the rounded sums on the way. None: as they are.
    """
    xp, shape = arrays.xp, (len(expert_ranks), width)
    sums: dict[int, Any] = {peer: xp.zeros(shape, np.float32) for peer in (range(num_ranks) if reduce_early else [0])}
    for choice in range(expert_ranks.shape[1]):
        term = weights[:, choice, None] * arrays.to_float32(row(choice), "bfloat16")
        for peer, partial in sums.items():
            chosen = expert_ranks[:, choice] == peer if reduce_early else expert_ranks[:, choice] >= 0
            if chosen.any():
                partial += xp.where(arrays.put(chosen)[:, None], term, xp.float32(0))
    if not reduce_early:
        return arrays.from_float32(sums[0], "bfloat16")
    total = xp.zeros(shape, np.float32)
    for peer in range(num_ranks):
        rows = arrays.to_float32(arrays.from_float32(sums[peer], "bfloat16"), "bfloat16")
        total += rows if compress is None else after_compression(arrays, rows, compress)
    return arrays.from_float32(total, "bfloat16")
