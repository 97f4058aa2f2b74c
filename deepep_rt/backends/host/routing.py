"""Where rows of a call go and come from, as the host backend knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...config import Config
from ...results import DispatchHandle
from ..hooks import HookState


@dataclass(frozen=True, eq=False)
class Routing:
    """Where this rank's tokens go and where its rows come from; rows that did not fit, or did not come, are in neither."""

    serial: int
    sent_tokens: tuple[np.ndarray, ...]  # for each rank, the tokens that go there, ascending
    num_received: np.ndarray  # [num_ranks] rows from each rank
    first_row: np.ndarray  # [num_ranks] where they start
    num_sent: np.ndarray  # [source, destination] rows, of all ranks

    @property
    def num_rows(self) -> int:
        """Rows that are taken up, gaps of rows that did not come included."""
        return int((self.first_row + self.num_received).max())

    def only(self, sent: np.ndarray, received: np.ndarray) -> Routing:
        """The part of it that goes to some ranks and comes from some ranks, `[num_ranks]` bool each."""
        tokens = tuple(t if goes else t[:0] for t, goes in zip(self.sent_tokens, sent, strict=True))
        return replace(self, sent_tokens=tokens, num_received=np.where(received, self.num_received, 0))


@dataclass(frozen=True, eq=False)
class ExpertRouting:
    """A routing, and where the rows that arrived lie. An entry is a choice of a local expert by a token that arrived."""

    rows: DispatchHandle  # the routing of the rows
    topk_idx: np.ndarray  # [num_tokens, num_topk] of this rank, int64
    row: np.ndarray  # [entries] the row that arrived, ascending
    choice: np.ndarray  # [entries] which of its token's choices, ascending in a row
    expert: np.ndarray  # [entries] the local expert
    slot: np.ndarray  # [entries] where it lies in `[experts * capacity, hidden]`, or -1: the expert has no room left
    counts: np.ndarray  # [num_local_experts] entries of each expert, those without room included
    weights: np.ndarray | None  # [rows, num_topk] float32, if they came with the rows
    own_weights: np.ndarray | None  # [num_tokens, num_topk] of this rank, if it sent them with the rows
    hook_state: HookState | None = None  # None: no hook

    @staticmethod
    def of(
        rows: DispatchHandle,
        topk_idx: np.ndarray,
        recv_idx: np.ndarray,
        weights: np.ndarray | None,
        own_weights: np.ndarray | None,
        config: Config,
    ) -> ExpertRouting:
        """Lay out entries by expert; those of an expert keep the order of rows, which is that of source ranks and tokens."""
        routing: Routing = rows.routing
        is_there = np.zeros(len(recv_idx), bool)
        for first, count in zip(routing.first_row, routing.num_received, strict=True):
            is_there[first : first + count] = True  # a gap is left by rows of a rank that was masked before they came
        row, choice = np.nonzero((recv_idx >= 0) & is_there[:, None])
        expert = recv_idx[row, choice].astype(np.int64)
        counts = np.bincount(expert, minlength=config.num_local_experts)
        by_expert = np.argsort(expert, kind="stable")
        first = np.cumsum(counts) - counts
        position = np.empty_like(expert)
        position[by_expert] = np.arange(len(expert)) - first[expert[by_expert]]
        slot = np.where(position < config.num_max_recv_tokens, expert * config.num_max_recv_tokens + position, -1)
        return ExpertRouting(rows, topk_idx, row, choice, expert, slot, counts, weights, own_weights)
