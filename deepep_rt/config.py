"""The sizes and settings of a Buffer: checked once, then immutable."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import _env
from ._checks import argument_error, choice, flag, is_int_in_range, seconds, whole_number
from .arrays.dtypes import DTYPES, FP8_GROUP
from .errors import EPConfigError
from .network import TRANSPORTS

MAX_TOPK = 32
MAX_EXPERTS = 1 << 13
MAX_SMS = 1 << 10
MAX_RANKS = 1 << 16
USUAL_SMS = 24
"""SMs of dispatch and combine, unless the program or a stored tuning says otherwise: see `usual_sms`."""
_SMS_OF_ONE_RANK = 64

MAX_RANKS_PER_NODE = 8
MAX_NODES = 32
"""Nodes of a Buffer with throughput calls."""

PATHS = ("auto", "hierarchical", "direct")
"""Ways of rows between nodes: see `Buffer`."""

COMBINE_DTYPES = ("bfloat16", "float16", "float32")
"""Element types of the rows that combine can sum."""

MAX_ALIGNMENT = 1 << 20
"""The largest `expert_alignment`."""

TILE_ROWS = (128, 64)
"""Rows that a tile of a dispatch with `signals=True` may have. The first that divides its `expert_alignment` holds."""

ROW_ALIGNMENT = 16
"""Bytes. Kernels copy rows in pieces of this size."""

STAGE_BYTES = 16 * 1024
"""The most bytes of one bulk copy, unless a single row is larger."""

LOW_LATENCY_TILE_BYTES = 2048
"""Bytes of a row that a warp sums at once in a low-latency combine. With more bytes, registers spill."""

MAX_ROW_BYTES = 96 * 1024
"""Two stages of such a row fit in the shared memory of a block."""

MAX_TIMEOUT_S = _env.MAX_TIMEOUT_S
"""Thirty years."""

NUMBERS_PER_SCALE_BYTE = 16
"""The fewest channels that share a byte of scales, as in NVFP4."""

MAX_SCALE_BYTES = MAX_ROW_BYTES // NUMBERS_PER_SCALE_BYTE
"""The most bytes for the scales of a row."""

_LOW_LATENCY_SHARED_BYTES = 160 * 1024  # of a block of low-latency dispatch; sm_80 has 163 KB

ROUTE_THREADS = 256
MAX_ROUTE_BLOCKS = 16
"""Blocks that count a new routing together. Up to 4096 tokens, each thread counts one token."""


def usual_sms(num_ranks: int, num_nodes: int = 1) -> int:
    """Return the SMs of dispatch and combine, unless the program or a stored tuning says otherwise.

    24 SMs keep the links busy. Without other ranks, no link limits a call, and 24 SMs would.
    """
    return _SMS_OF_ONE_RANK if num_ranks == num_nodes == 1 else USUAL_SMS


def tile_rows_of(expert_alignment: int) -> int:
    """Return the rows of a tile where the rows of each expert begin at a multiple of `expert_alignment`. 0: there are no tiles."""
    return next((rows for rows in TILE_ROWS if expert_alignment % rows == 0), 0)


@functools.lru_cache
def rows_per_copy(row_bytes: int, copy_bytes: int = STAGE_BYTES) -> int:
    """Return the rows of one bulk copy: the largest power of two up to 32 with at most `copy_bytes` bytes, at least one."""
    rows = 1
    while rows < 32 and 2 * rows * row_bytes <= copy_bytes:
        rows *= 2
    return rows


def declared_ranks_per_node(num_ranks: int) -> int | None:
    """Return `DEEPEP_RT_RANKS_PER_NODE` for a Buffer of `num_ranks` ranks, or None if the variable is unset.

    Raises:
        EPConfigError: If it does not divide the number of ranks.
    """
    declared = _env.ranks_per_node()
    if declared is None:
        return None
    if num_ranks % min(declared, num_ranks):
        raise EPConfigError(
            f"DEEPEP_RT_RANKS_PER_NODE={declared}; expected a divisor of the number of ranks ({num_ranks}), or at least that number. "
            f"Set it to the ranks of a node, or unset it."
        )
    return min(declared, num_ranks)


def dtype_name(dtype: Any) -> Any:
    """Return the name of an element type of any library, such as `torch.bfloat16` or `np.float32`. Return other objects unchanged."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        if hasattr(dtype, "__dlpack__") or isinstance(dtype, np.generic):  # an array is not a dtype, although it has one
            return dtype
        if type(dtype).__module__ == "torch":
            return str(dtype).removeprefix("torch.")
        return np.dtype(dtype).name
    except Exception:  # NumPy runs code of the object
        return dtype


@dataclass(frozen=True)
class Config:
    """Sizes and settings that all ranks of a Buffer agree on. Numbers of NumPy become Python's.

    Args:
        num_ranks: Ranks of the communicator.
        num_max_tokens_per_rank: The most tokens that one rank passes to one `dispatch`.
        hidden: Elements of a row.
        num_topk: Experts of a token, 1 to 32.
        num_experts: Experts of all ranks. Rank r holds `num_experts // num_ranks` consecutive ones.
        dtype: The widest element type of a row, as a name or as an array library's dtype. A call may pass rows of a narrower type, such as
            FP8 in a bfloat16 Buffer.
        num_slots: Worst-case dispatch results that fit at the same time. The result of a new routing first takes a worst-case slot, and is
            then trimmed to the rows that arrived. The rest has room for results of a known routing or with `num_worst_tokens`.
        num_sms: Thread blocks of the dispatch and combine kernels. Each occupies one SM.
        timeout_s: Seconds after which a silent peer raises EPTimeoutError.
        low_latency: Whether to allocate memory for the low-latency calls.
        low_latency_sms: Thread blocks of the low-latency kernels. The number of SMs of the GPU limits it.
        ranks_per_node: Consecutive ranks that reach each other over NVLink. They are a node. None: all ranks are one node.
        on_timeout: The reaction of a low-latency call to a silent peer: "raise", or "mask" it and continue without it.
        check_inputs: Whether the device reports expert numbers that are out of range.
        path: The way of rows between nodes: "auto", "hierarchical" or "direct".
        recv_limit: `num_max_recv_tokens` as given to the Buffer. The property `num_max_recv_tokens` is the number that counts.
        transport: "nvshmem", "nixl", "mpi" or "wire": the transport to ranks of other nodes, which is chosen when the Buffer is made.
        statistics: Whether calls add to the numbers of `Buffer.statistics`.
        leaves_sms: Whether the program passed `num_sms=None`. `usual_sms` or a stored tuning then replaces `num_sms`.
        has_slots: Whether ranks may come and go. `num_ranks` counts slots then: numbers of ranks that may have a process.

    Raises:
        EPConfigError: if a value is out of range. The message names the value and the range.
    """

    num_ranks: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: str = "bfloat16"
    num_slots: int = 2
    num_sms: int = USUAL_SMS
    timeout_s: float = dataclasses.field(default_factory=_env.timeout_s)
    low_latency: bool = False
    low_latency_sms: int = 128
    ranks_per_node: int | None = None
    on_timeout: str = "raise"
    check_inputs: bool = dataclasses.field(default_factory=_env.debug)
    path: str = "auto"
    recv_limit: int | None = None
    transport: str = "nvshmem"
    statistics: bool = dataclasses.field(default_factory=_env.statistics)
    leaves_sms: bool = False
    has_slots: bool = False

    def __post_init__(self) -> None:
        self._check_types_and_ranges()
        self._check_experts()
        self._check_row()
        if self.leaves_sms:
            self._set("num_sms", usual_sms(self.num_ranks, self.num_nodes))
        if self.low_latency:
            self._check_low_latency()

    def _check_types_and_ranges(self) -> None:
        """Check each setting alone, and store it as a Python type."""
        self._set("dtype", dtype_name(self.dtype))
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise argument_error(
                self.dtype, "dtype", f"one of {', '.join(DTYPES)}", "Pass a name, or a library's dtype.", EPConfigError
            )
        for name, least, most in (
            ("num_ranks", 1, MAX_RANKS),
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
            self._set("ranks_per_node", self._checked_ranks_per_node())
        if self.recv_limit is not None:
            self._set("recv_limit", self._checked_recv_limit())
        for name in ("low_latency", "check_inputs", "statistics", "leaves_sms", "has_slots"):
            self._set(name, flag(getattr(self, name), name, error=EPConfigError))
        self._set("transport", choice(self.transport, "transport", TRANSPORTS[1:], error=EPConfigError))
        self._set("on_timeout", choice(self.on_timeout, "on_timeout", ("raise", "mask"), error=EPConfigError))
        self._set("path", choice(self.path, "path", PATHS, error=EPConfigError))
        self._set("timeout_s", seconds(self.timeout_s, "timeout_s", MAX_TIMEOUT_S, error=EPConfigError))

    def _checked_ranks_per_node(self) -> int:
        expected = f"a divisor of the number of ranks ({self.num_ranks})"
        remedy = "Pass the ranks of a host, or leave it out."
        if is_int_in_range(self.ranks_per_node, 1, self.num_ranks):
            number = whole_number(self.ranks_per_node, "ranks_per_node", 1, self.num_ranks)
            if self.num_ranks % number == 0:
                return number
        raise argument_error(self.ranks_per_node, "ranks_per_node", expected, remedy, EPConfigError)

    def _checked_recv_limit(self) -> int:
        most, remedy = self.worst_recv_tokens, "The largest is num_ranks * num_max_tokens_per_rank; None lets the Buffer choose."
        return whole_number(self.recv_limit, "num_max_recv_tokens", 1, most, error=EPConfigError, remedy=remedy)

    def _check_experts(self) -> None:
        if self.num_experts % self.num_ranks:
            raise EPConfigError(
                f"num_experts={self.num_experts}; expected a multiple of the {self.num_ranks} ranks, which share them equally. "
                f"Add experts that no token chooses."
            )
        if self.num_topk > self.num_experts:
            raise EPConfigError(
                f"num_topk={self.num_topk}; expected at most num_experts ({self.num_experts}). Lower it, or add experts."
            )

    def _check_row(self) -> None:
        if self.row_bytes % ROW_ALIGNMENT or self.row_bytes > MAX_ROW_BYTES:
            raise EPConfigError(
                f"hidden={self.hidden}; expected rows of a multiple of {ROW_ALIGNMENT} bytes and at most {MAX_ROW_BYTES}, but a row of "
                f"{self.dtype} has {self.row_bytes} bytes. Change hidden or dtype."
            )

    def _check_low_latency(self) -> None:
        if 2 * self.hidden % ROW_ALIGNMENT:
            raise EPConfigError(
                f"hidden={self.hidden}; expected rows of a multiple of {ROW_ALIGNMENT} bytes, but low-latency calls carry rows of bfloat16 "
                f"with {2 * self.hidden} bytes. Change hidden, or leave low_latency out."
            )
        if not self.fits_low_latency:
            raise EPConfigError(
                f"num_max_tokens_per_rank={self.num_max_tokens_per_rank}; expected at most {self.most_low_latency_tokens} for "
                f"low-latency calls with num_topk={self.num_topk} and num_experts={self.num_experts} on {self.num_ranks} ranks. "
                f"Make another Buffer with fewer tokens for them."
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    @cached_property
    def node_size(self) -> int:
        """The number of consecutive ranks that reach each other over NVLink."""
        return self.ranks_per_node or self.num_ranks

    @cached_property
    def has_network(self) -> bool:
        """Whether some ranks reach each other only over a network."""
        return self.node_size < self.num_ranks

    @cached_property
    def num_nodes(self) -> int:
        """The number of groups of ranks that reach each other over NVLink."""
        return self.num_ranks // self.node_size

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank; None for an unknown rank, or if there is one node."""
        return rank // self.node_size if self.has_network and rank >= 0 else None

    @cached_property
    def has_relay(self) -> bool:
        """Whether a relay of the host carries what goes to other nodes."""
        return self.has_network and self.transport in ("nixl", "mpi")

    @cached_property
    def has_wire(self) -> bool:
        """Whether the kernel `wire` does, in tests and benches."""
        return self.has_network and self.transport == "wire"

    @cached_property
    def has_ring(self) -> bool:
        """Whether kernels put by descriptors in a ring, for a relay or the wire."""
        return self.has_relay or self.has_wire

    @cached_property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of the widest row."""
        return self.hidden * DTYPES[self.dtype].itemsize

    @cached_property
    def scale_bytes(self) -> int:
        """The bytes for the scales of a row: one float32 per group of channels."""
        return -(-self.hidden // FP8_GROUP) * 4

    def most_scale_bytes(self, row_bytes: int) -> int:
        """Return the most bytes for the scales of a row of `row_bytes`. Rows half as wide as the Buffer's leave room for more scales."""
        if 2 * row_bytes > self.row_bytes:
            return self.scale_bytes
        return max(self.scale_bytes, -(-self.hidden // NUMBERS_PER_SCALE_BYTE) + 3 & ~3)

    def fits_low_latency_message(self, row_bytes: int, scale_bytes: int) -> bool:
        """Return whether a low-latency message has room for a row that travels as it is, its scales, and a key for each 512 bytes of them.

        Messages have room for a row of bfloat16.
        """
        num_vecs = row_bytes // ROW_ALIGNMENT + -(-scale_bytes // ROW_ALIGNMENT)
        return ROW_ALIGNMENT * num_vecs + 4 * -(-num_vecs // 32) <= 2 * self.hidden

    @cached_property
    def low_latency_threads(self) -> int:
        """The threads of a block. NVSHMEM's functions use up to 158 registers, so fewer threads fit an SM."""
        return 256 if self.has_network else 512

    def least_large_combine(self, num_blocks: int, num_members: int) -> int:
        """Compute the least number of tokens for which `ll_combine_large` is faster than `ll_combine`.

        With fewer tokens, warps share a row, and each has at most one tile of it.
        """
        tiles = -(-2 * self.hidden // LOW_LATENCY_TILE_BYTES)
        most_rows = self.low_latency_threads // 32 * num_blocks >> (tiles - 1).bit_length()
        return most_rows // min(num_members, self.num_topk) + 1

    @cached_property
    def low_latency_ring_depth(self) -> int:
        """The ring slots of the inboxes: `num_slots` rounded up to a power of two, so that it divides the range of epochs."""
        return 1 << (self.num_slots - 1).bit_length()

    @cached_property
    def low_latency_table_bytes(self) -> int:
        """The bytes of shared memory of a low-latency dispatch. It holds the experts of all tokens, then a bit per token and rank."""
        most = max(self.num_max_tokens_per_rank * self.num_topk * 2, self.num_ranks * self.low_latency_bitmap_words * 4)
        return most + 7 & ~7  # a thread reads 8 bytes at a time

    @cached_property
    def low_latency_bitmap_words(self) -> int:
        """The 32-bit words of a bitmap of one rank's tokens."""
        return -(-self.num_max_tokens_per_rank // 32)

    @cached_property
    def most_low_latency_tokens(self) -> int:
        """The most tokens per rank of low-latency calls. The tables of a block have to fit its shared memory."""
        room = (_LOW_LATENCY_SHARED_BYTES - 4 * self.num_experts - 9 * self.num_ranks) // 8 * 8
        return min(room // 2 // self.num_topk, room // (4 * self.num_ranks) * 32)

    @property
    def fits_low_latency(self) -> bool:
        """Whether low-latency calls can take `num_max_tokens_per_rank` tokens."""
        return self.num_max_tokens_per_rank <= self.most_low_latency_tokens

    @cached_property
    def worst_recv_tokens(self) -> int:
        """The most rows that can arrive at a rank: every token of every rank."""
        return self.num_ranks * self.num_max_tokens_per_rank

    @cached_property
    def num_max_recv_tokens(self) -> int:
        """The most rows that one dispatch may bring to a rank.

        On one node these are all that can arrive, because a Buffer has memory for them. On several nodes they are `recv_limit`, or by
        default twice the rows that a rank sends at most.
        """
        if not self.has_network:
            return self.worst_recv_tokens
        return self.recv_limit or min(2 * self.num_max_sent_rows, self.worst_recv_tokens)

    @cached_property
    def num_max_sent_rows(self) -> int:
        """The most rows that a rank sends in dispatch and receives in combine. A token goes to each rank at most once."""
        return self.num_max_tokens_per_rank * min(self.num_ranks, self.num_topk)

    def settings(self) -> dict[str, Any]:
        """Return all settings by the names that `Buffer` gives them, so that ranks can compare them."""
        settings = dataclasses.asdict(self)
        settings["num_max_recv_tokens"] = settings.pop("recv_limit")
        if settings.pop("has_slots"):
            settings["max_ranks"] = self.num_ranks
        if settings.pop("leaves_sms"):
            settings["num_sms"] = None
        return settings

    def constants(self) -> dict[str, int]:
        """Return the constants that are compiled into every kernel."""
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
            "kHasRelay": int(self.has_ring),
            "kHasStatistics": int(self.statistics),
            "kHasSlots": int(self.has_slots),
        }
