"""Routings of the host backend: which tokens go to which rank, and which rows come from which rank.

Those of low-latency dispatches also hold where the rows of each local expert lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...config import Config
from ...results import DispatchHandle
from ..hooks import HookState


@dataclass(frozen=True, eq=False)
class Routing:
    """Where this rank's tokens go and where its rows come from. Rows that were dropped, or that did not arrive, are left out.

    Its size grows with the number of ranks. Only Buffers on one node keep the rows between all ranks.
    """

    serial: int
    sent_tokens: tuple[np.ndarray, ...]  # for each rank, the tokens that go there, ascending
    num_received: np.ndarray  # [num_ranks] rows from each rank
    first_row: np.ndarray  # [num_ranks] position of the first row from each rank
    num_chosen: np.ndarray  # [num_ranks] rows that this rank's tokens choose at each rank, dropped ones too
    rows_between: np.ndarray | None = None  # [source, destination] rows, dropped ones too; None on several nodes, or after `load`

    @property
    def num_rows(self) -> int:
        """The end of the last row that arrived; gaps of rows that did not arrive count."""
        return int((self.first_row + self.num_received).max())

    @property
    def row_ranges(self) -> list[tuple[int, int]]:
        """For each rank, the position of its first row and the number of its rows."""
        return list(zip(self.first_row.tolist(), self.num_received.tolist(), strict=True))

    def restricted(self, send_mask: np.ndarray, recv_mask: np.ndarray) -> Routing:
        """Keep the tokens that go to some ranks, and the rows that come from some ranks, `[num_ranks]` bool each."""
        tokens = tuple(t if sends else t[:0] for t, sends in zip(self.sent_tokens, send_mask, strict=True))
        return replace(self, sent_tokens=tokens, num_received=np.where(recv_mask, self.num_received, 0))

    def is_chosen_by(self, topk_idx: np.ndarray, config: Config) -> bool:
        """Whether the expert numbers of this rank choose the ranks of this routing."""
        owner = topk_idx // config.num_local_experts
        for peer, (tokens, count) in enumerate(zip(self.sent_tokens, self.num_chosen, strict=True)):
            chosen = np.flatnonzero((owner == peer).any(axis=1))
            # A routing holds the first tokens that were chosen. It lacks those that were dropped.
            if len(chosen) != count or not np.array_equal(chosen[: len(tokens)], tokens):
                return False
        return True


def tokens_by_rank(topk_idx: np.ndarray, config: Config) -> list[np.ndarray]:
    """For each rank, find the tokens that choose one of its experts, ascending."""
    chosen = np.zeros((len(topk_idx), config.num_ranks), bool)
    token, choice = np.nonzero((topk_idx >= 0) & (topk_idx < config.num_experts))
    chosen[token, topk_idx[token, choice] // config.num_local_experts] = True
    return [np.flatnonzero(chosen[:, peer]).astype(np.int32) for peer in range(config.num_ranks)]


def choices_by_expert(topk_idx: np.ndarray, config: Config) -> np.ndarray:
    """Count how often each expert is chosen, `[num_ranks, num_local_experts]`."""
    chosen = topk_idx[(topk_idx >= 0) & (topk_idx < config.num_experts)]
    return np.bincount(chosen, minlength=config.num_experts).reshape(config.num_ranks, -1)


def new_routing(
    serial: int,
    rank: int,
    tokens: list[np.ndarray],
    num_sent: np.ndarray,
    num_worst_tokens: np.ndarray,
    *,
    keeps_rows_between: bool,
) -> Routing:
    """Work out the routing of a dispatch from the headers of all ranks.

    `tokens` are those that this rank sends to each rank. `num_sent`, `[source, destination]`, are the rows that all ranks send. Each rank
    receives at most `num_worst_tokens`, `[num_ranks]`; -1: no limit. `keeps_rows_between` says whether the routing keeps `num_sent`.
    """
    room = np.where(num_worst_tokens < 0, np.iinfo(np.int64).max, num_worst_tokens)  # [destination]
    first_row = np.cumsum(num_sent, axis=0) - num_sent
    num_kept = np.clip(room - first_row, 0, num_sent)
    return Routing(
        serial=serial,
        sent_tokens=tuple(t[:n] for t, n in zip(tokens, num_kept[rank], strict=True)),
        num_received=num_kept[:, rank].copy(),
        first_row=np.minimum(first_row[:, rank], room[rank]),
        num_chosen=num_sent[rank].copy(),  # a view would keep all of `num_sent`
        rows_between=num_sent if keeps_rows_between else None,
    )


@dataclass(frozen=True, eq=False)
class ExpertRouting:
    """The routing of a low-latency dispatch. An entry is a choice of a local expert by a token that arrived."""

    rows: DispatchHandle  # the routing of the rows
    topk_idx: np.ndarray  # [num_tokens, num_topk] of this rank, int64
    row: np.ndarray  # [entries] the row that arrived, ascending
    choice: np.ndarray  # [entries] which of its token's choices, ascending in a row
    expert: np.ndarray  # [entries] the local expert
    slot: np.ndarray  # [entries] its position in `[experts * capacity, hidden]`, or -1: it was dropped
    counts: np.ndarray  # [num_local_experts] entries of each expert, dropped ones included
    weights: np.ndarray | None  # [rows, num_topk] float32, if they came with the rows
    own_weights: np.ndarray | None  # [num_tokens, num_topk] of this rank, if it sent them with the rows
    hook_state: HookState | None = None  # None: no hook

    @property
    def is_kept(self) -> np.ndarray:
        """`[entries]` bool: whether the expert had room for the entry."""
        return self.slot >= 0


def new_expert_routing(
    rows: DispatchHandle,
    topk_idx: np.ndarray,
    recv_idx: np.ndarray,
    weights: np.ndarray | None,
    own_weights: np.ndarray | None,
    num_experts: int,
    capacity: int,
) -> ExpertRouting:
    """Sort the entries of the rows that arrived by expert. Entries of an expert keep the order of rows: by source rank and token.

    Each of the `num_experts` local experts has room for `capacity` rows.
    """
    routing: Routing = rows.routing
    has_arrived = np.zeros(len(recv_idx), bool)  # rows of a rank that was masked before it sent them leave a gap
    for first, count in routing.row_ranges:
        has_arrived[first : first + count] = True
    row, choice = np.nonzero((recv_idx >= 0) & has_arrived[:, None])
    expert = recv_idx[row, choice].astype(np.int64)
    counts = np.bincount(expert, minlength=num_experts)
    by_expert = np.argsort(expert, kind="stable")
    first_entry = np.cumsum(counts) - counts
    position = np.empty_like(expert)
    position[by_expert] = np.arange(len(expert)) - first_entry[expert[by_expert]]
    slot = np.where(position < capacity, expert * capacity + position, -1)
    return ExpertRouting(rows, topk_idx, row, choice, expert, slot, counts, weights, own_weights)
