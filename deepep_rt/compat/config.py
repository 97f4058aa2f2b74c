"""`Config` of DeepEP V1: the tuning of its normal mode. Only the number of SMs has an effect in this library."""

from __future__ import annotations

from .._checks import whole_number
from ..buffer import Buffer
from ..config import MAX_RANKS_PER_NODE, MAX_SMS
from ..errors import EPConfigError

MOST_BYTES = 1 << 62
"""The largest number that this library accepts for bytes, or for a setting without effect."""
_USUAL_TOPK = 8  # programs ask for a size hint before they know the routing; the tables that depend on it are small


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
            num_ranks: Ranks of the group. More than 8 count as 8, the limit of a host.
        """
        hidden_bytes = whole_number(hidden_bytes, "hidden_bytes", 1, MOST_BYTES)
        num_ranks = min(whole_number(num_ranks, "num_ranks", 1, MOST_BYTES), MAX_RANKS_PER_NODE)
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        return nvl_bytes(num_ranks, tokens, hidden_bytes // 2, _USUAL_TOPK, _USUAL_TOPK * num_ranks, "bfloat16")

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: the normal mode serves one host, and takes no `num_rdma_bytes`.

        Args:
            hidden_bytes: Bytes of a row.
            num_ranks: Ranks of the group.
        """
        whole_number(hidden_bytes, "hidden_bytes", 1, MOST_BYTES)
        whole_number(num_ranks, "num_ranks", 1, MOST_BYTES)
        return 0

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


def nvl_bytes(
    num_ranks: int, num_tokens: int, hidden: int, num_topk: int, num_experts: int, dtype: str, num_slots: int = 2
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
    )["total"]
