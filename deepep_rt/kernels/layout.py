"""The memory of a Buffer: ordered lists of regions become offsets, sizes and constants."""

from __future__ import annotations

import functools
from functools import cached_property

from ..arrays.dtypes import FP8_GROUP
from ..config import MAX_ROUTE_BLOCKS, Config, rows_per_copy
from ..statistics import CALL_KINDS
from . import structs
from .nodes_layout import NodesLayout
from .regions import ALIGNMENT, Map, align_up, arrange
from .tuning import MAX_POSITION_BLOCKS

_MIN_CHOICE_WINDOW = 64
"""Tokens, or all of them if they are fewer, whose choices always have room."""


class Layout:
    """All memory maps of a Buffer, and every constant of the kernels that follows from its sizes. Each is computed once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._sizes = config.constants()
        self.nodes = NodesLayout(config, self._sizes) if config.has_network else None
        """The part for throughput calls over several nodes."""

    # --- symmetric memory --------------------------------------------------------------------------------------------------------

    @cached_property
    def symmetric(self) -> Map:
        """A Buffer's symmetric memory."""
        config = self.config
        return arrange(
            [
                ("control", self.control.num_bytes),
                # Staging of combine. A dispatch also writes here if the pool is full, and its result is copied out.
                ("landing", self.landing_bytes),
                ("pool", config.num_slots * self.max_result_bytes),
                ("sums", config.num_slots * self.max_sums_bytes),
                ("low_latency", self.low_latency.num_bytes if config.low_latency else 0),
                *([("network", self.nodes.network.num_bytes)] if self.nodes else ()),
            ]
        )

    @cached_property
    def landing_bytes(self) -> int:
        """Bytes of the region where rows land that have no memory of their own."""
        config = self.config
        some_choices = self.choice_staging(min(config.num_max_tokens_per_rank, _MIN_CHOICE_WINDOW)).num_bytes
        return max(self.max_result_bytes, self.staging(config.row_bytes).num_bytes, some_choices)

    @property
    def network_start(self) -> int:
        """The offset in symmetric memory from which on a network carries it. A relay mirrors this part in pinned host memory."""
        return self.symmetric.offsets["low_latency"]

    @property
    def near_bytes(self) -> int:
        """Bytes of the first part of symmetric memory, which ranks of a node address."""
        return self.symmetric.offsets.get("network", self.symmetric.num_bytes)

    @cached_property
    def control(self) -> Map:
        """Flags and inboxes of the throughput calls. Peers write them. The parity of the epoch selects one of two ring slots."""
        if self.nodes:
            return self.nodes.control
        ranks = self.config.num_ranks
        chunks = -(-self.config.num_max_tokens_per_rank // rows_per_copy(self.config.row_bytes))
        return arrange(
            [
                ("route_inbox", 2 * ranks * self.route_stride),
                ("dispatch_windows", 2 * ranks * structs.WindowMessage.size(self._sizes)),
                ("combine_windows", 2 * ranks * structs.WindowMessage.size(self._sizes)),
                ("dispatch_flags", ranks * 4),
                ("combine_flags", ranks * chunks * 4),
                # [source][place] of the rows of a dispatch with signals: the row and the epoch
                ("arrivals", ranks * self.config.num_max_tokens_per_rank * 8),
            ]
        )

    @cached_property
    def route_stride(self) -> int:
        """Bytes from one message of the route inbox to the next."""
        return align_up(structs.RouteMessage.size(self._sizes), 128)

    @cached_property
    def low_latency(self) -> Map:
        """Inboxes of the low-latency calls. The epoch selects one of `low_latency_ring_depth` ring slots.

        All bytes are zero before the first call. The last two regions, `messages` and `rows`, start as 0xff in each byte (kEmptySentinel).
        """
        config = self.config
        slots, ranks, tokens, topk = (
            config.low_latency_ring_depth,
            config.num_ranks,
            config.num_max_tokens_per_rank,
            config.num_topk,
        )
        rows = max(ranks, topk) * tokens  # one from each rank, or one for each choice
        header, message, row = self.low_latency_header_stride, self.low_latency_message_stride, self.low_latency_row_bytes
        scale_out = int(config.has_network)  # only a network needs signals and staging
        acks = slots * ranks if config.has_network else ranks  # a network may deliver words in any order
        return arrange(
            [
                ("dispatch_acks", acks * 8),
                ("combine_acks", acks * 8),
                ("heartbeats", ranks * 8),
                ("headers", slots * ranks * header),
                ("combine_headers", slots * ranks * structs.LlCombineHeader.size({})),
                ("weights", slots * ranks * tokens * topk * 8),
                ("message_flags", scale_out * slots * ranks * tokens * 8),
                ("weight_flags", scale_out * slots * ranks * 8),
                ("row_flags", scale_out * slots * rows * 8),
                ("staged_headers", scale_out * slots * ranks * header),
                ("staged_messages", scale_out * slots * tokens * message),
                ("staged_weights", scale_out * slots * tokens * topk * 8),
                ("staged_rows", scale_out * slots * config.worst_recv_tokens * row),
                ("messages", slots * ranks * tokens * message),
                ("rows", slots * rows * row),
            ]
        )

    @cached_property
    def num_ring_entries(self) -> int:
        """Descriptors in the ring of a relay, a power of two: one for each put whose receiver may not have answered yet."""
        config = self.config
        if self.nodes is None:
            return 0
        far, tokens, topk = config.num_ranks - config.node_size, config.num_max_tokens_per_rank, config.num_topk
        dispatched = far + tokens * min(far, topk)  # headers and messages
        combined = 3 * far + far * tokens * topk  # weights, headers of two words, and a row for each choice
        acks = 4 * far  # from both halves of both kernels
        calls = config.low_latency_ring_depth + 1 if config.low_latency else 0
        most = self.nodes.num_ring_entries + calls * (dispatched + combined + acks)
        return 1 << (most - 1).bit_length()

    @property
    def network_bytes(self) -> int:
        """Bytes of network memory, the last part of symmetric memory."""
        return self.symmetric.num_bytes - self.network_start

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of a relay."""
        return self.num_ring_entries * structs.Descriptor.size({})

    @cached_property
    def low_latency_header_stride(self) -> int:
        return align_up(structs.LlHeader.size(self._sizes), 128)

    @cached_property
    def low_latency_head_bytes(self) -> int:
        """Offset of the row in a message."""
        return align_up(structs.LlMessage.size(self._sizes), 128)

    @cached_property
    def low_latency_row_bytes(self) -> int:
        """Bytes of a bfloat16 row."""
        return self.config.hidden * 2

    @cached_property
    def low_latency_message_stride(self) -> int:
        """Bytes from one message to the next. FP8 rows and quantised rows, with scales and keys, are no longer than a bfloat16 row."""
        return align_up(self.low_latency_head_bytes + self.low_latency_row_bytes, 128)

    # --- local memory of a rank --------------------------------------------------------------------------------------------------

    @cached_property
    def local(self) -> Map:
        """Epochs and counters."""
        ranks = self.config.num_ranks
        one_node = [] if self.nodes else [("route_blocks", MAX_ROUTE_BLOCKS * structs.RouteBlock.size(self._sizes))]
        return arrange(
            [
                ("state", structs.State.size({})),
                *one_node,
                ("ll_dispatch", structs.LlProgress.size({})),
                ("ll_combine", structs.LlProgress.size({})),
                ("masked", ranks * 4),  # 1: low-latency calls exclude the rank
                ("source_status", ranks * 4),  # whether a low-latency dispatch excludes a source, with the epoch
                ("heartbeat_sent", 8),  # time of this rank's last heartbeat
                ("waits", 2 * ranks * 8),  # nanoseconds that receivers waited for each source, by the epoch's parity
                ("network", structs.NetworkState.size({})),
                (
                    "ll_acked",
                    2 * ranks * 4,
                ),  # low-latency dispatches, then combines, that this rank has acknowledged to scale-out ranks
                *(self.nodes.local if self.nodes else ()),
                ("position_progress", 4 * (1 + MAX_POSITION_BLOCKS)),  # of the kernel expert_positions
                ("position_counts", 8 * MAX_POSITION_BLOCKS * self.config.num_local_experts),
                ("lost", structs.LostRanks.size({}) if self.config.has_slots else 0),
                *self._statistics,  # last: without them, all other offsets are the same
            ]
        )

    @property
    def _statistics(self) -> list[tuple[str, int]]:
        config = self.config
        sizes = {
            "statistics": len(CALL_KINDS) * structs.CallStatistics.size(self._sizes),
            "expert_rows": config.num_local_experts * 8,  # rows by local expert so far
            "longest_waits": structs.NUM_PHASES * 2 * config.num_ranks * 8,  # [phase][parity of the epoch][source]
        }
        return [(name, size if config.statistics else 0) for name, size in sizes.items()]

    @cached_property
    def handle(self) -> Map:
        """The tables that a dispatch leaves for combine, and for later calls with the same routing."""
        if self.nodes:
            tables = self.nodes.handle
            return arrange([*tables.sizes.items(), ("counts", self.counts.num_bytes)])
        ranks, tokens = self.config.num_ranks, self.config.num_max_tokens_per_rank
        return arrange(
            [
                ("num_rows", ranks * ranks * 4),  # [source][destination] int32
                ("num_recv", 4),
                ("serial", 4),  # of the routing: the same on all ranks
                ("generation", 4 if self.config.has_slots else 0),  # in which the routing was made
                ("num_recv_per_expert", self.config.num_local_experts * 4),
                ("send_pos", tokens * ranks * 4),  # [token][rank] int32: the token's index among the rows for that rank, or -1
                ("send_list", ranks * tokens * 4),  # [rank][position] int32: the token
                ("counts", self.counts.num_bytes),  # the caller's copy, of the dispatch that made the handle
            ]
        )

    def expert_tables(self, capacity: int) -> Map:
        """Arrange the tables that a handle of `layout="expert"` adds, with room for `capacity` rows by token."""
        experts = self.config.num_local_experts
        return arrange(
            [
                ("positions", 4 * capacity * self.config.num_topk),
                ("offsets", 4 * (experts + 1)),
                ("ends", 4 * experts),
                ("totals", 8),
                ("sources", 8 * capacity),
            ]
        )

    @cached_property
    def counts(self) -> Map:
        """The counts of a dispatch, as its caller gets them."""
        return arrange([("num_recv", 4), ("num_recv_per_expert", self.config.num_local_experts * 4)])

    @cached_property
    def low_latency_handle(self) -> Map:
        """The tables that a low-latency dispatch leaves for its combine."""
        config = self.config
        return arrange(
            [
                ("num_entries", 4),
                ("epoch", 4),  # of the dispatch
                ("generation", 4 if config.has_slots else 0),  # in which the routing was made
                ("excluded", config.num_ranks * 4),  # 1: the dispatch excluded the rank
                ("choices", config.num_max_tokens_per_rank * config.num_topk * 2),  # [token][choice] int16: the expert, or -1
                ("num_recv_per_expert", config.num_local_experts * 4),
                ("entries", config.worst_recv_tokens * structs.LlEntry.size(self._sizes)),
            ]
        )

    @cached_property
    def num_handles(self) -> int:
        """Handles of a kind that a Buffer allocates when it is made. It allocates more if the caller holds more."""
        return 2 * self.config.num_slots + 2

    @cached_property
    def status_page(self) -> Map:
        """Pinned host memory that kernels write and the host reads."""
        return arrange(
            [
                ("report", structs.Report.size(self._sizes)),
                ("mailbox", structs.Mailbox.size(self._sizes)),
                ("masked", self.config.num_ranks * 4),  # as in local memory
                ("lost", 4),  # with slots: a bit for each one whose process has ended in this generation; the host sets it
            ]
        )

    # --- results -----------------------------------------------------------------------------------------------------------------

    def result(self, capacity: int, row_bytes: int, scale_bytes: int, idx_bytes: int, with_topk: bool) -> Map:
        """One dispatch result of at most `capacity` rows. The rows come last, so that trimming it to what arrived is a cut."""
        return _result(capacity, row_bytes, scale_bytes, idx_bytes, self.config.num_topk if with_topk else 0)

    @cached_property
    def max_result_bytes(self) -> int:
        """Bytes of the largest dispatch result."""
        config = self.config
        wide, narrow = config.row_bytes, config.row_bytes // 2
        forms = ((wide, config.scale_bytes), (narrow, config.most_scale_bytes(narrow)))
        return max(self.result(config.num_max_recv_tokens, *form, 8, with_topk=True).num_bytes for form in forms)

    def staging(self, row_bytes: int) -> Map:
        """Memory at a token's rank, where the rows of combine arrive before the rank adds them up."""
        if self.nodes:
            return self.nodes.staging(row_bytes)
        return _rows_and_weights(self.config.num_max_sent_rows, row_bytes, self.config.num_topk)

    def choice_staging(self, window_tokens: int) -> Map:
        """Memory at a token's rank for the rows of each choice of some tokens; see the kernel combine_choices. Over several nodes
        marks in control memory take the place of masks.
        """
        config = self.config
        rows, mask_bytes = window_tokens * config.num_topk, 0 if self.nodes else config.num_ranks * 4
        return arrange([("masks", window_tokens * mask_bytes), ("topk_weights", rows * 4), ("x", rows * config.row_bytes)])

    @cached_property
    def choice_window(self) -> int:
        """The most tokens whose choices are staged at a time. All ranks agree on it, so it does not depend on the rows of a call."""
        window = self.config.num_max_tokens_per_rank
        least = min(window, _MIN_CHOICE_WINDOW)
        while window > least and self.choice_staging(window).num_bytes > self.landing_bytes:
            window = max(-(-window // 2), least)
        return window

    def combined(self, num_tokens: int, row_bytes: int, with_weights: bool) -> Map:
        """A result of combine."""
        return _rows_and_weights(num_tokens, row_bytes, self.config.num_topk if with_weights else 0)

    @cached_property
    def max_sums_bytes(self) -> int:
        """Bytes of the largest result of combine."""
        return self.combined(self.config.num_max_tokens_per_rank, self.config.row_bytes, with_weights=True).num_bytes

    def low_latency_result(self, *, use_fp8: bool, use_ue8m0: bool) -> Map:
        """The result of a low-latency dispatch: room for the worst case, expert by expert."""
        rows = self.config.num_experts * self.config.num_max_tokens_per_rank  # local experts * ranks * tokens
        scale_bytes = 0 if not use_fp8 else self.config.hidden // FP8_GROUP * (1 if use_ue8m0 else 4)
        return arrange([("x", rows * self.config.hidden * (1 if use_fp8 else 2)), ("scales", rows * scale_bytes)])

    # --- summaries ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def constants(self) -> dict[str, int]:
        """Every size and offset that the kernels use."""
        inboxes = self.symmetric.offsets["low_latency"]
        nodes = {} if self.nodes is None else self._nodes_constants(self.nodes)
        one_node = (
            {}
            if self.nodes
            else {
                "kAlignment": ALIGNMENT,
                "kRouteStride": self.route_stride,
                "kMaxCombineChunks": self.control.sizes["combine_flags"] // (4 * self.config.num_ranks),
            }
        )
        return {
            **self._sizes,
            **nodes,
            **one_node,
            **self.control.constants("Control"),
            **self.local.constants("Local"),
            **self.handle.constants("Handle"),
            **self.status_page.constants("StatusPage"),
            **{name: inboxes + offset for name, offset in self.low_latency.constants("Ll").items()},
            **self.low_latency_handle.constants("LlHandle"),
            "kLlSend": structs.LL_SEND,
            "kLlReceive": structs.LL_RECEIVE,
            "kLlElsewhere": structs.LL_ELSEWHERE,
            "kLlNoRoom": structs.LL_NO_ROOM,
            "kLlUnknown": structs.LL_UNKNOWN,
            "kLlOpenHook": structs.LL_OPEN_HOOK,
            "kLlHeaderStride": self.low_latency_header_stride,
            "kLlHeadBytes": self.low_latency_head_bytes,
            "kLlMessageStride": self.low_latency_message_stride,
            **{name: number for name, (number, _) in structs.PHASES.items()},
        }

    def _nodes_constants(self, nodes: NodesLayout) -> dict[str, int]:
        first = self.symmetric.offsets["network"]
        offsets = {name: first + offset for name, offset in nodes.network.constants("Network").items()}
        return {**nodes.region_constants, **offsets}

    @cached_property
    def size_hint(self) -> dict[str, int]:
        """Bytes of GPU memory that a Buffer takes on each rank, by region, and their sum as `total`."""
        parts = dict(self.symmetric.sizes)
        parts["handles"] = self.num_handles * (self.handle.num_bytes + self.counts.num_bytes)
        if self.config.low_latency:
            parts["handles"] += self.num_handles * self.low_latency_handle.num_bytes
            # One result. A Buffer allocates as many as the caller holds at once.
            parts["low_latency_results"] = self.low_latency_result(use_fp8=False, use_ue8m0=False).num_bytes
        parts["total"] = sum(parts.values())
        return parts


@functools.lru_cache
def _result(capacity: int, row_bytes: int, scale_bytes: int, idx_bytes: int, num_topk: int) -> Map:
    return arrange(
        [
            ("topk_idx", capacity * num_topk * idx_bytes),
            ("topk_weights", capacity * num_topk * 4),
            ("src_idx", capacity * 8),
            ("scales", capacity * scale_bytes),
            ("x", capacity * row_bytes),
        ]
    )


@functools.lru_cache
def _rows_and_weights(num_rows: int, row_bytes: int, num_topk: int) -> Map:
    return arrange([("topk_weights", num_rows * num_topk * 4), ("x", num_rows * row_bytes)])
