"""The sizes and settings of a Buffer: frozen, validated once, and what the kernels know of them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import _env
from ._checks import argument_error, choice, flag, format_value, seconds, whole_number
from .arrays.dtypes import DTYPES, FP8_GROUP
from .errors import EPConfigError

MAX_TOPK = 32
MAX_EXPERTS = 1 << 13
MAX_SMS = 1 << 10
MAX_RANKS_PER_NODE = 8
COMBINE_DTYPES = ("bfloat16", "float16", "float32")
"""Element types that combine can add up."""

ROW_ALIGNMENT = 16
"""Rows are moved in pieces of 16 bytes."""

STAGE_BYTES = 16 * 1024
"""What one bulk copy carries at most, unless a single row is larger."""
LOW_LATENCY_TILE_BYTES = 2048
"""Bytes of a row that a warp adds up at once in a low-latency combine; with more, registers spill."""

MAX_ROW_BYTES = 96 * 1024
"""Two stages of the widest row fit in the shared memory of a block."""

MAX_TIMEOUT_S = 1e9
"""Thirty years. Kernels count nanoseconds, in 64 bits."""

_LOW_LATENCY_SHARED_BYTES = 160 * 1024  # what a block of low-latency dispatch may take; sm_80 has 163 KB

ROUTE_THREADS = 256
MAX_ROUTE_BLOCKS = 16
"""Blocks that share the counting of a new routing; one token a thread up to 4096 tokens."""


@functools.lru_cache
def rows_per_copy(row_bytes: int) -> int:
    """Rows that travel together: a power of two up to 32, as many as fit a stage, at least one."""
    rows = 1
    while rows < 32 and 2 * rows * row_bytes <= STAGE_BYTES:
        rows *= 2
    return rows


def _name_of(dtype: Any) -> Any:
    """The name of an element type: of `torch.bfloat16`, `np.float32` and `jnp.dtype("float32")` alike. What is none stays as it is."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        if hasattr(dtype, "__dlpack__") or isinstance(dtype, np.generic):  # an array has a dtype, and is none
            return dtype
        if type(dtype).__module__ == "torch":
            return str(dtype).removeprefix("torch.")
        return np.dtype(dtype).name
    except Exception:  # NumPy asks the object, which may raise anything
        return dtype


@dataclass(frozen=True)
class Config:
    """Sizes that every rank of a Buffer agrees on. NumPy's numbers are welcome, and become Python's.

    Args:
        num_ranks: Ranks of the communicator.
        num_max_tokens_per_rank: Most tokens that one rank gives to one `dispatch`.
        hidden: Elements of a row.
        num_topk: Experts of a token, 1 to 32.
        num_experts: Experts over all ranks; rank r holds `num_experts // num_ranks` consecutive ones.
        dtype: Widest element type of a row, its name or an array library's object for it; narrower ones (FP8 in a bfloat16 buffer) are
            welcome in each call.
        num_slots: Worst-case dispatch results that fit at once. Results of a new routing begin as such, and are trimmed to what arrived,
            which leaves room for smaller ones: of a known routing, or with `num_worst_tokens`.
        num_sms: Thread blocks of the dispatch and combine kernels (each takes one SM).
        timeout_s: Seconds after which a silent peer raises EPTimeoutError.
        low_latency: Whether memory is set aside for the low-latency calls.
        low_latency_sms: Thread blocks of the low-latency kernels; never more than the GPU has SMs.
        ranks_per_node: Consecutive ranks that reach each other over NVLink; low-latency calls reach the others through NVSHMEM.
            None: all of them.
        on_timeout: What a low-latency call does about a silent peer: "raise", or "mask" it and go on without it.
        check_inputs: Whether expert numbers out of range are reported from the device.

    Raises:
        EPConfigError: if a value is out of range, says which and what is allowed.
    """

    num_ranks: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bfloat16"
    num_slots: int = 2
    num_sms: int = 24
    timeout_s: float = dataclasses.field(default_factory=_env.timeout_s)
    low_latency: bool = False
    low_latency_sms: int = 128
    ranks_per_node: int | None = None
    on_timeout: str = "raise"
    check_inputs: bool = dataclasses.field(default_factory=_env.debug)

    def __post_init__(self) -> None:
        self._check_each()
        if self.num_experts % self.num_ranks:
            raise EPConfigError(
                f"num_experts={self.num_experts}; expected a multiple of the {self.num_ranks} ranks, which share them equally. "
                f"Add experts that no token chooses."
            )
        if self.num_topk > self.num_experts:
            raise EPConfigError(
                f"num_topk={self.num_topk}; expected at most num_experts ({self.num_experts}). Lower it, or add experts."
            )
        if self.row_bytes % ROW_ALIGNMENT or self.row_bytes > MAX_ROW_BYTES:
            raise EPConfigError(
                f"hidden={self.hidden} of {self.dtype} has {self.row_bytes} bytes a row; expected a multiple of {ROW_ALIGNMENT}, "
                f"and at most {MAX_ROW_BYTES}. Change hidden, or dtype."
            )
        if self.low_latency:
            self._check_low_latency()

    def _check_each(self) -> None:
        """Check each setting alone, and keep it as Python's own type."""
        self._set("dtype", _name_of(self.dtype))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise argument_error(
                self.dtype, "dtype", f"one of {', '.join(DTYPES)}", "Pass a name, or a library's dtype.", EPConfigError
            )
        for name, least, most in (
            ("num_ranks", 1, 1 << 16),
            ("num_max_tokens_per_rank", 1, 1 << 20),
            ("hidden", 1, 1 << 20),
            ("num_topk", 1, MAX_TOPK),
            ("num_experts", 1, MAX_EXPERTS),
            ("num_slots", 1, 1 << 10),
            ("num_sms", 1, MAX_SMS),
            ("low_latency_sms", 1, MAX_SMS),
        ):
            self._set(name, whole_number(getattr(self, name), name, least, most, error=EPConfigError))
        if self.ranks_per_node is not None:
            self._set("ranks_per_node", self._checked_node())
        for name in ("low_latency", "check_inputs"):
            self._set(name, flag(getattr(self, name), name, error=EPConfigError))
        self._set("on_timeout", choice(self.on_timeout, "on_timeout", ("raise", "mask"), error=EPConfigError))
        self._set("timeout_s", seconds(self.timeout_s, "timeout_s", MAX_TIMEOUT_S, error=EPConfigError))

    def _checked_node(self) -> int:
        try:
            node = whole_number(self.ranks_per_node, "ranks_per_node", 1, self.num_ranks, error=EPConfigError)
        except EPConfigError:
            node = 0
        if not node or self.num_ranks % node:
            raise EPConfigError(
                f"ranks_per_node={format_value(self.ranks_per_node)}; expected a divisor of the number of ranks ({self.num_ranks}). "
                f"Pass the ranks of a host, or leave it out."
            )
        return node

    def _check_low_latency(self) -> None:
        if 2 * self.hidden % ROW_ALIGNMENT:
            raise EPConfigError(
                f"hidden={self.hidden} has {2 * self.hidden} bytes a row of bfloat16; expected a multiple of {ROW_ALIGNMENT} for "
                f"low-latency calls, which carry rows of bfloat16. Change hidden, or leave low_latency out."
            )
        if not self.fits_low_latency:
            raise EPConfigError(
                f"num_max_tokens_per_rank={self.num_max_tokens_per_rank}; expected at most {self.most_low_latency_tokens} for "
                f"low-latency calls with num_topk={self.num_topk} and num_experts={self.num_experts} on {self.num_ranks} ranks. "
                f"Make a Buffer of its own for them, with fewer tokens."
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # it is frozen

    @cached_property
    def node_size(self) -> int:
        """Consecutive ranks that reach each other over NVLink."""
        return self.ranks_per_node or self.num_ranks

    @cached_property
    def has_network(self) -> bool:
        """Whether some ranks reach each other through NVSHMEM only."""
        return self.node_size < self.num_ranks

    @cached_property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the widest row."""
        return self.hidden * DTYPES[self.dtype].itemsize

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes kept for the scales of a row, one float32 for each group of channels."""
        return -(-self.hidden // FP8_GROUP) * 4

    @cached_property
    def low_latency_threads(self) -> int:
        """Threads of a block. NVSHMEM's functions take up to 158 registers, so fewer threads have to share an SM's."""
        return 256 if self.has_network else 512

    def least_large_combine(self, num_blocks: int) -> int:
        """Compute the least number of tokens for which `ll_combine_large` is faster than `ll_combine`.

        With fewer tokens, warps share a row, and each has at most one tile of it.
        """
        tiles = -(-2 * self.hidden // LOW_LATENCY_TILE_BYTES)
        most_rows = self.low_latency_threads // 32 * num_blocks >> (tiles - 1).bit_length()
        return most_rows // min(self.num_ranks, self.num_topk) + 1

    @cached_property
    def low_latency_ring_depth(self) -> int:
        """Ring slots of the inboxes: the power of two from `num_slots` on, so that the order stays the same where epochs wrap around."""
        return 1 << (self.num_slots - 1).bit_length()

    @cached_property
    def low_latency_table_bytes(self) -> int:
        """Shared memory of a low-latency dispatch: the experts of all tokens, as int16; then a bit for each token of each rank."""
        return max(self.num_max_tokens_per_rank * self.num_topk * 2 + 3 & ~3, self.num_ranks * self.low_latency_bitmap_words * 4)

    @cached_property
    def low_latency_bitmap_words(self) -> int:
        """32-bit words that have a bit for each token of a rank."""
        return -(-self.num_max_tokens_per_rank // 32)

    @cached_property
    def most_low_latency_tokens(self) -> int:
        """Tokens a rank that low-latency calls can take: what a block knows of them all has to fit its shared memory."""
        room = _LOW_LATENCY_SHARED_BYTES - 4 * self.num_experts - 9 * self.num_ranks
        return min(room // 4 * 2 // self.num_topk, room // (4 * self.num_ranks) * 32)

    @property
    def fits_low_latency(self) -> bool:
        """Whether low-latency calls can take so many tokens."""
        return self.num_max_tokens_per_rank <= self.most_low_latency_tokens

    @cached_property
    def num_max_recv_tokens(self) -> int:
        """Most rows that a rank can receive: every token of every rank."""
        return self.num_ranks * self.num_max_tokens_per_rank

    @cached_property
    def num_max_sent_rows(self) -> int:
        """Most rows that a rank sends, and gets back in combine: a token goes to each rank at most once."""
        return self.num_max_tokens_per_rank * min(self.num_ranks, self.num_topk)

    def constants(self) -> dict[str, int]:
        """What the kernels know at compile time."""
        return {
            "kNumRanks": self.num_ranks,
            "kNumTopk": self.num_topk,
            "kNumExperts": self.num_experts,
            "kNumLocalExperts": self.num_local_experts,
            "kNumMaxTokens": self.num_max_tokens_per_rank,
            "kHidden": self.hidden,
            "kRingDepth": self.low_latency_ring_depth,
            "kRanksPerNode": self.node_size,
            "kLlBitmapWords": self.low_latency_bitmap_words,
        }
