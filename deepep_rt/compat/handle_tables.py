"""The tables of DeepEP V1's handles. PyTorch computes them from ours on the current stream, and the host does not wait."""

from __future__ import annotations

import torch

from ..arrays.frameworks import framework_of
from ..arrays.view import Framework
from ..buffer import Buffer, backend_of
from ..results import DispatchHandle, LowLatencyHandle


def topk_idx_of_ranks(is_token_in_rank: torch.Tensor, num_topk: int, num_local_experts: int) -> torch.Tensor:
    """Make a `topk_idx` that sends a token to these ranks, at most `num_topk`. The first expert of a rank stands for the rank."""
    num_tokens, num_ranks = is_token_in_rank.shape
    first = torch.arange(num_ranks, dtype=torch.int32, device=is_token_in_rank.device) * num_local_experts
    chosen = torch.where(is_token_in_rank, first, -1)
    if num_ranks > num_topk:
        return chosen.sort(dim=1, descending=True).values[:, :num_topk].contiguous()
    topk_idx = torch.full((num_tokens, num_topk), -1, dtype=torch.int32, device=is_token_in_rank.device)
    topk_idx[:, :num_ranks] = chosen
    return topk_idx


def tokens_for_nodes(is_token_in_rank: torch.Tensor, ranks_per_node: int) -> torch.Tensor:
    """Count the tokens for each node, `[num_nodes]` int32. A token counts once for a node."""
    num_tokens, num_ranks = is_token_in_rank.shape
    is_in_node = is_token_in_rank.view(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(2)
    return is_in_node.sum(0, dtype=torch.int32)


def rank_prefix_sum(buffer: Buffer, handle: DispatchHandle, num_recv_tokens: torch.Tensor) -> torch.Tensor:
    """Return `[num_ranks]` int32: entry i counts the rows that this rank receives from the ranks 0 to i. Only for several nodes.

    Args:
        buffer: The Buffer of the dispatch.
        handle: Its handle.
        num_recv_tokens: `[1]`, the rows that arrived.
    """
    first = backend_of(buffer).tables.first_rows(handle, _pytorch()).to_framework()
    return torch.cat([first[1:].int(), num_recv_tokens.clamp(max=handle.num_recv_rows).int()])


def source_meta(ends: torch.Tensor, num_rows: int, rank: int, ranks_per_node: int) -> torch.Tensor:
    """Return `[num_rows, 8]` uint8: two int32 for each row. They are the node of its source, and a bit for this rank's number in its node.

    Rows that did not arrive have -1 and no bit.

    Args:
        ends: The result of `rank_prefix_sum`.
        num_rows: Rows of `recv_x`.
        rank: This rank.
        ranks_per_node: Ranks of a node.
    """
    source = torch.searchsorted(ends, torch.arange(num_rows, dtype=ends.dtype, device=ends.device), right=True)
    has_arrived = source < len(ends)
    node = torch.where(has_arrived, torch.div(source, ranks_per_node, rounding_mode="floor"), -1)
    bit = torch.where(has_arrived, 1 << rank % ranks_per_node, 0)
    return torch.stack([node, bit], dim=1).int().view(torch.uint8)


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
