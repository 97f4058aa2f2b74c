"""`Config` of DeepEP V1: the tuning of its normal mode, of which only the number of SMs means something here."""

from __future__ import annotations

from .._checks import whole_number
from ..buffer import Buffer
from ..config import MAX_RANKS_PER_NODE, MAX_SMS
from ..errors import EPConfigError

MOST_BYTES = 1 << 62
"""The largest number that is taken for bytes, or for a setting without effect here."""
_USUAL_TOPK = 8  # a size hint is asked for before anybody knows the routing; these tables are small


class Config:
    """How the normal mode uses the GPU.

    DeepEP sends in chunks through rings of fixed size; this library has no rings. The chunk sizes are kept as attributes, and
    `get_nvl_buffer_size_hint` reads how many tokens they are meant for.

    Args:
        num_sms: SMs that a dispatch or combine occupies.
        num_max_nvl_chunked_send_tokens: Kept, not used.
        num_max_nvl_chunked_recv_tokens: Tokens of a ring; there is one for two SMs.
        num_max_rdma_chunked_send_tokens: Kept, not used.
        num_max_rdma_chunked_recv_tokens: Kept, not used.

    Raises:
        EPConfigError: if a number is out of range.

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
        """Bytes for `Buffer(num_nvl_bytes=)` that let each rank dispatch `num_sms // 2 * num_max_nvl_chunked_recv_tokens` tokens.

        A Buffer that is made with fewer grows when a call needs it.

        Args:
            hidden_bytes: Bytes of a row, at least those of bfloat16.
            num_ranks: Ranks of the group. More than 8 count as 8, the most that a host holds.
        """
        hidden_bytes = whole_number(hidden_bytes, "hidden_bytes", 1, MOST_BYTES)
        num_ranks = min(whole_number(num_ranks, "num_ranks", 1, MOST_BYTES), MAX_RANKS_PER_NODE)
        tokens = max(1, self.num_sms // 2) * self.num_max_nvl_chunked_recv_tokens
        return nvl_bytes(num_ranks, tokens, hidden_bytes // 2, _USUAL_TOPK, _USUAL_TOPK * num_ranks, "bfloat16")

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `Buffer(num_rdma_bytes=)` in the normal mode: none, because that mode serves one host.

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
    """GPU memory of a `deepep_rt.Buffer` for the normal mode with so many tokens a rank, and room for so many results."""
    return Buffer.size_hint(
        num_ranks,
        num_max_tokens_per_rank=num_tokens,
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        dtype=dtype,
        num_slots=num_slots,
    )["total"]
