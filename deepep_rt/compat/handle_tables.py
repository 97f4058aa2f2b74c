"""The tables of DeepEP V1's handles. PyTorch computes them from ours on the current stream, and the host does not wait."""

from __future__ import annotations

import torch

from ..arrays.frameworks import framework_of
from ..arrays.view import Framework
from ..buffer import Buffer, backend_of
from ..results import DispatchHandle, LowLatencyHandle


def topk_idx_of_ranks(is_token_in_rank: torch.Tensor, num_topk: int, num_local_experts: int) -> torch.Tensor:
    """Make a `topk_idx` that sends tokens to these ranks. The first expert of a rank stands for the rank."""
    num_tokens, num_ranks = is_token_in_rank.shape
    first = torch.arange(num_ranks, dtype=torch.int32, device=is_token_in_rank.device) * num_local_experts
    topk_idx = torch.full((num_tokens, num_topk), -1, dtype=torch.int32, device=is_token_in_rank.device)
    topk_idx[:, :num_ranks] = torch.where(is_token_in_rank, first, -1)
    return topk_idx


def rank_prefix_matrix(buffer: Buffer, handle: DispatchHandle) -> torch.Tensor:
    """Return `[num_ranks, num_ranks]` int32: entry (i, j) counts the rows that rank j receives from the ranks 0 to i."""
    rows = backend_of(buffer).tables.rows_between_ranks(handle, _pytorch()).to_framework()
    return rows.cumsum(0, dtype=torch.int32)


def expert_tables(buffer: Buffer, handle: LowLatencyHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sources of the rows of a low-latency dispatch.

    Returns:
        `[num_local_experts, rows]` int32: the token, at its source, of each row (-1 for places without a row); and
        `[num_local_experts, num_ranks]` int64: the first row of each source in the upper 32 bits, the number of rows in the lower ones.
    """
    config, entries = buffer.config, backend_of(buffer).tables.entries(handle, _pytorch())
    words, num_entries = entries.words.to_framework(), entries.num_entries.to_framework()
    is_filled = torch.arange(len(words), device=words.device) < num_entries
    rows = torch.where(is_filled[:, None], words[:, entries.rows], -1)
    source, token = (words[:, column].repeat_interleave(rows.shape[1]) for column in (entries.source, entries.token))
    sizes = config.num_local_experts, config.worst_recv_tokens, config.num_ranks
    return _tables(rows.flatten().long(), source.long(), token, *sizes)


def _pytorch() -> Framework:
    return framework_of(torch.empty(0, device="cpu"), "handle")


def _tables(
    row: torch.Tensor, source: torch.Tensor, token: torch.Tensor, num_experts: int, num_rows: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make both tables of `[n]` entries. Entries with a negative row count for nothing: they go to a cell past the end."""
    device, end = row.device, num_experts * num_rows
    is_row = row >= 0
    row = torch.where(is_row, row, end)
    tokens = torch.full((end + 1,), -1, dtype=torch.int32, device=device).scatter_(0, row, token.int())
    pair = torch.where(is_row, torch.div(row, num_rows, rounding_mode="floor") * num_ranks + source, num_experts * num_ranks)
    counts = torch.zeros(num_experts * num_ranks + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, pair, torch.ones_like(pair))
    first = torch.full_like(counts, num_rows).scatter_reduce_(0, pair, row % num_rows, "amin")
    ranges = torch.where(counts > 0, first << 32 | counts, 0)
    return tokens[:-1].view(num_experts, num_rows), ranges[:-1].view(num_experts, num_ranks)
