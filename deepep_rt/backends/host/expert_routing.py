"""Routings of low-latency dispatches of the host backend: where the rows of each local expert lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...config import Config
from ...results import DispatchHandle
from ..hooks import HookState
from .routing import Routing


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
    config: Config,
) -> ExpertRouting:
    """Sort the entries of the rows that arrived by expert. Entries of an expert keep the order of rows: by source rank and token."""
    routing: Routing = rows.routing
    has_arrived = np.zeros(len(recv_idx), bool)  # rows of a rank that was masked before it sent them leave a gap
    for first, count in routing.row_ranges:
        has_arrived[first : first + count] = True
    row, choice = np.nonzero((recv_idx >= 0) & has_arrived[:, None])
    expert = recv_idx[row, choice].astype(np.int64)
    counts = np.bincount(expert, minlength=config.num_local_experts)
    by_expert = np.argsort(expert, kind="stable")
    first_entry = np.cumsum(counts) - counts
    position = np.empty_like(expert)
    position[by_expert] = np.arange(len(expert)) - first_entry[expert[by_expert]]
    slot = np.where(position < config.worst_recv_tokens, expert * config.worst_recv_tokens + position, -1)
    return ExpertRouting(rows, topk_idx, row, choice, expert, slot, counts, weights, own_weights)
