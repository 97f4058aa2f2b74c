"""`EPHandle` of DeepEP V2: the routing of a dispatch. Its tables are made when a program first reads them, on PyTorch's current stream."""

from __future__ import annotations

from functools import cached_property

import torch

from ..buffer import Buffer
from ..results import DispatchHandle, SharedByCopies


class EPHandle(SharedByCopies):
    """What `ElasticBuffer.dispatch` returns, for `combine` and for a dispatch along the same routing.

    Rows have the order (source rank, source token). With `do_expand` there is a row for each choice, expert by expert.

    Attributes:
        do_expand: Whether there is a row for each choice.
        num_experts: Experts over all ranks.
        expert_alignment: The rows of an expert begin at a multiple of this.
        num_max_tokens_per_rank: The most tokens of a rank, T below.
        num_sms: SMs of the dispatch; 0: those that the library chose.
        topk_idx: `[num_tokens, num_topk]`, the expert numbers of this rank's tokens.
        num_recv_tokens_per_expert_list: Received tokens of each local expert, rounded up to `expert_alignment`. Empty without CPU sync.
        num_expanded_tokens: Their sum, or the rows of an expanded result in the worst case without CPU sync.

    Example:
        >>> recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, topk_weights, num_experts=256)
        >>> handle.psum_num_recv_tokens_per_scaleup_rank[-1]  # tokens that arrived, on the GPU
    """

    _instead = "dispatch where you load it"
    token_metadata_at_forward = channel_linked_list = None  # DeepEP's way over several nodes has them

    def __init__(
        self,
        buffer: Buffer,
        routing: DispatchHandle,
        *,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        rank: int,
        num_scaleup_ranks: int,
        sources: torch.Tensor,
        experts: torch.Tensor | None,
        offsets: torch.Tensor | None,
        most_expanded: int,
    ) -> None:
        self.buffer, self.routing = buffer, routing
        self.do_expand = offsets is not None
        self.num_experts, self.expert_alignment = buffer.config.num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = num_max_tokens_per_rank, num_sms, topk_idx
        counts = routing.num_recv_tokens_per_expert_list
        self.has_cpu_sync = counts is not None
        self.num_recv_tokens_per_expert_list = counts or []
        self.num_expanded_tokens = most_expanded if counts is None else sum(counts)
        self._rank, self._num_scaleup_ranks = rank, num_scaleup_ranks
        self.experts = experts
        """Local expert numbers of the rows, `[rows, num_topk]`. None with `do_expand`."""
        self._sources, self._offsets = sources, offsets

    @property
    def _num_keys(self) -> int:
        return int(self.buffer.config.num_ranks * self.num_max_tokens_per_rank)

    @cached_property
    def _keys(self) -> torch.Tensor:
        """The source of each row as one number, `rank * T + token`. Padding has the number past all of them."""
        source = self._sources.long()
        is_row = source[:, 0] >= 0 if self.experts is None else (self.experts >= 0).any(1)
        return torch.where(is_row, source[:, 0] * self.num_max_tokens_per_rank + source[:, 1], self._num_keys)

    @cached_property
    def _is_here(self) -> torch.Tensor:
        """Whether the token with a number has arrived, `[num_ranks * T]` int64."""
        found = torch.zeros(self._num_keys + 1, dtype=torch.int64, device=self._keys.device)
        return found.scatter_(0, self._keys, 1)[:-1]

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """Tokens from the scale-up ranks 0 to i, `[num_scaleup_ranks]` int32. A token counts once."""
        per_rank = self._is_here.view(-1, self._num_scaleup_ranks, self.num_max_tokens_per_rank).sum((0, 2))
        return per_rank.cumsum(0).int()

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """Rows of each local expert, `[num_local_experts]` int32."""
        num_experts = self.buffer.config.num_local_experts
        if self._offsets is None:
            assert self.experts is not None
            expert = self.experts.flatten().long()
        else:
            row = torch.arange(len(self._sources), dtype=self._offsets.dtype, device=self._offsets.device)
            expert = torch.searchsorted(self._offsets[1:], row, right=True)
            expert = torch.where(self._sources[:, 0] >= 0, expert, -1)
        expert = torch.where(expert < 0, num_experts, expert)
        counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=expert.device)
        return counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))[:-1]

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """`[num_local_experts]` int32: the sum of the aligned counts of the experts 0 to i. With `do_expand`, the end of the rows of
        expert i, without its padding.
        """
        if self._offsets is not None:
            return self._offsets[:-1] + self.num_unaligned_recv_tokens_per_expert
        alignment = self.expert_alignment
        aligned = (self.num_unaligned_recv_tokens_per_expert + alignment - 1) // alignment * alignment
        return aligned.cumsum(0).int()

    @cached_property
    def num_recv_tokens(self) -> int:
        """Tokens that arrived, or the most that can arrive without CPU sync. With `do_expand`, the first read waits for the GPU."""
        if not self.has_cpu_sync:
            return self._num_keys
        return int(self._is_here.sum()) if self.do_expand else len(self._sources)

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """`[num_recv_tokens, 2 + num_topk]` int32, for each token that arrived: `source rank * T + token`; `source rank * num_topk` plus
        its first choice on this rank; and with `do_expand` the row of each choice. -1: nothing.
        """
        num_topk, device = self.topk_idx.shape[1], self._keys.device
        place = torch.where(self._is_here > 0, self._is_here.cumsum(0) - 1, self._num_keys)  # of each number
        table = torch.full((self._num_keys + 1, 2 + num_topk), -1, dtype=torch.int32, device=device)
        table[place, 0] = torch.arange(self._num_keys, dtype=torch.int32, device=device)
        of_row = torch.cat([place, place.new_full((1,), self._num_keys)])[self._keys]
        if self.experts is None:
            choice = self._sources[:, 2].long().clamp(min=0)
            table[of_row, 2 + choice] = torch.arange(len(of_row), dtype=torch.int32, device=device)
            is_chosen = table[:, 2:] >= 0
        else:
            is_chosen = torch.zeros(table.shape[0], num_topk, dtype=torch.bool, device=device)
            is_chosen[of_row] = self.experts >= 0
        first = is_chosen.int().argmax(1).int()
        source = torch.div(table[:, 0], self.num_max_tokens_per_rank, rounding_mode="floor")
        table[:, 1] = torch.where(table[:, 0] < 0, -1, source * num_topk + first)
        return table[: self.num_recv_tokens]

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """`[num_tokens, num_topk]` int32: `rank * T` plus the number of the token's row among those of this rank at the rank of the choice.
        -1 where an earlier choice has sent the row, or there is none.
        """
        config = self.buffer.config
        target = torch.where(
            self.topk_idx >= 0, torch.div(self.topk_idx, config.num_local_experts, rounding_mode="floor"), -1
        ).long()
        goes = torch.zeros(target.shape[0], config.num_ranks + 1, dtype=torch.int64, device=target.device)
        goes.scatter_(1, torch.where(target < 0, config.num_ranks, target), 1)
        slot = (goes.cumsum(0) - 1).gather(1, target.clamp(min=0)) + self._rank * self.num_max_tokens_per_rank
        is_later = (target[:, :, None] == target[:, None, :]).tril(-1).any(2)
        return torch.where((target < 0) | is_later, -1, slot).int()

    def __repr__(self) -> str:
        kind = "expanded" if self.do_expand else "by token"
        return f"<EPHandle {kind}, {self.topk_idx.shape[0]} tokens, {self.num_experts} experts>"


def most_expanded_rows(num_tokens: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """Return the most rows of an expanded result, if `num_tokens` tokens arrive."""
    rows = num_tokens * min(num_topk, num_local_experts) + (alignment - 1) * num_local_experts
    return -(-rows // alignment) * alignment
