"""`Config` of DeepEP V1: the tuning of its normal mode. Only the number of SMs has an effect in this library."""

from __future__ import annotations

from .._checks import whole_number
from ..buffer import Buffer
from ..config import MAX_EXPERTS, MAX_RANKS_PER_NODE, MAX_SMS, declared_ranks_per_node
from ..errors import EPConfigError

MOST_BYTES = 1 << 62
"""The largest number that this library accepts for bytes, or for a setting without effect."""
USUAL_TOPK = 8  # programs ask for a size hint before they know the routing; the tables that depend on it are small


class Config:
    """How the normal mode uses the GPU.

    DeepEP sends in chunks through rings of fixed size. This library has no rings and keeps the chunk sizes as attributes.
    `get_nvl_buffer_size_hint` computes from them how many tokens a program expects.

    Args:
        num_sms: SMs that a dispatch or combine occupies.
        num_max_nvl_chunked_send_tokens: Kept, not used.
        num_max_nvl_chunked_recv_tokens: Tokens of a ring. DeepEP has one ring for two SMs.
        num_max_rdma_chunked_send_tokens: Kept, not used.
        num_max_rdma_chunked_recv_tokens: Kept, not used.

    Raises:
        EPConfigError: If a number is out of range.

    Example:
        >>> Config(24, 8, 256).get_nvl_buffer_size_hint(2 * 7168, 8)
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens
        for name, value in vars(self).items():
            most = MAX_SMS if name == "num_sms" else MOST_BYTES
            setattr(self, name, whole_number(value, name, 1, most, error=EPConfigError))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return `num_nvl_bytes` for a Buffer in which each rank dispatches `num_sms // 2 * num_max_nvl_chunked_recv_tokens` tokens.

        A Buffer with fewer bytes grows when a call needs it.

        Args:
            hidden_bytes: Bytes of a row, at least two for each element.
            num_ranks: Ranks of the group. Only those of one node count: 8, or `DEEPEP_RT_RANKS_PER_NODE`.
        """
        hidden_bytes = whole_number(hidden_bytes, "hidden_bytes", 1, MOST_BYTES)
        num_ranks = whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return self._num_bytes(hidden_bytes, min(num_ranks, declared_ranks_per_node(num_ranks) or MAX_RANKS_PER_NODE))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return `num_rdma_bytes` for such a Buffer: the bytes that it takes on several nodes, in addition to `num_nvl_bytes`.

        Args:
            hidden_bytes: Bytes of a row, at least two for each element.
            num_ranks: Ranks of the group. Up to 8 are one node, which needs no such bytes, unless `DEEPEP_RT_RANKS_PER_NODE` declares
                smaller nodes. More than 8 count as nodes of 8, or of the largest divisor below.

        Example:
            >>> config = Config(24, 8, 288, 16, 128)
            >>> Buffer(group, config.get_nvl_buffer_size_hint(14336, 16), config.get_rdma_buffer_size_hint(14336, 16))
        """
        hidden_bytes = whole_number(hidden_bytes, "hidden_bytes", 1, MOST_BYTES)
        num_ranks = whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        node = expected_ranks_per_node(num_ranks)
        if node == num_ranks:
            return 0
        return max(0, self._num_bytes(hidden_bytes, num_ranks, node) - self.get_nvl_buffer_size_hint(hidden_bytes, num_ranks))

    def _num_bytes(self, hidden_bytes: int, num_ranks: int, ranks_per_node: int | None = None) -> int:
        """Return the bytes of a Buffer for the tokens that DeepEP's rings hold."""
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        experts = num_ranks * max(1, min(USUAL_TOPK, MAX_EXPERTS // num_ranks))
        return normal_bytes(
            num_ranks, tokens, hidden_bytes // 2, min(USUAL_TOPK, experts), experts, "bfloat16", ranks_per_node=ranks_per_node
        )

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


def normal_bytes(
    num_ranks: int,
    num_tokens: int,
    hidden: int,
    num_topk: int,
    num_experts: int,
    dtype: str,
    num_slots: int = 2,
    ranks_per_node: int | None = None,
) -> int:
    """Return the GPU memory, in bytes, of a `deepep_rt.Buffer` for the normal mode with these sizes."""
    return Buffer.size_hint(
        num_ranks,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype=dtype,
        num_slots=num_slots,
        ranks_per_node=ranks_per_node,
    )["total"]


def low_latency_bytes(num_tokens: int, hidden: int, num_ranks: int, num_experts: int, num_topk: int = USUAL_TOPK) -> int:
    """Return the GPU memory, in bytes, of a `deepep_rt.Buffer` for the low-latency mode with these sizes."""
    return Buffer.size_hint(
        num_ranks,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=min(num_topk, num_experts),
        num_experts=num_experts,
        low_latency=True,
        ranks_per_node=expected_ranks_per_node(num_ranks),
    )["total"]


def expected_ranks_per_node(num_ranks: int) -> int:
    """Return the ranks of a node, for sizes that a program asks for before there is a group.

    Without `DEEPEP_RT_RANKS_PER_NODE`, all nodes have equally many ranks, and as many as possible up to 8.
    """
    declared = declared_ranks_per_node(num_ranks)
    return declared or max(size for size in range(1, MAX_RANKS_PER_NODE + 1) if num_ranks % size == 0)
