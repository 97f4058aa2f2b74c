"""The memory maps: ordered lists of regions become offsets, sizes and constants; size hints are computed from them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from ..arrays.dtypes import FP8_GROUP
from ..config import MAX_ROUTE_BLOCKS, Config, rows_per_copy
from . import structs

ALIGNMENT = 256
"""Regions and result arrays start on this boundary (rows on a 128-byte one cross NVLink 10 % faster)."""


def align_up(value: int, multiple: int = ALIGNMENT) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Map:
    """Regions laid out one after the other."""

    offsets: dict[str, int]
    sizes: dict[str, int]
    num_bytes: int

    def constants(self, prefix: str) -> dict[str, int]:
        """`kPrefixName` for the offset of each region."""
        return {f"k{prefix}{_camel(name)}": offset for name, offset in self.offsets.items()}


def arrange(regions: Iterable[tuple[str, int]]) -> Map:
    """Give each (name, bytes) an aligned offset, in the order given."""
    offsets, sizes, end = {}, {}, 0
    for name, num_bytes in regions:
        offsets[name], sizes[name] = end, num_bytes
        end = align_up(end + num_bytes)
    return Map(offsets, sizes, end)


def control(config: Config) -> Map:
    """Flags and inboxes, in symmetric memory; written by peers. Inboxes have two sides, by the parity of the epoch."""
    constants = config.constants()
    ranks = config.num_ranks
    chunks = -(-config.num_max_tokens_per_rank // rows_per_copy(config.row_bytes))
    return arrange(
        [
            ("route_inbox", 2 * ranks * route_stride(config)),
            ("dispatch_landing", 2 * ranks * structs.Landing.size(constants)),
            ("combine_landing", 2 * ranks * structs.Landing.size(constants)),
            ("dispatch_flags", ranks * 4),
            ("combine_flags", ranks * chunks * 4),
        ]
    )


def local(config: Config) -> Map:
    """Epochs and counters, in plain memory of each rank."""
    constants = config.constants()
    return arrange(
        [
            ("state", structs.State.size({})),
            ("route_blocks", MAX_ROUTE_BLOCKS * structs.RouteBlock.size(constants)),
            ("ll_dispatch", structs.LlProgress.size({})),
            ("ll_combine", structs.LlProgress.size({})),
            ("masked", config.num_ranks * 4),  # whether low-latency calls leave a rank out
            ("verdicts", config.num_ranks * 4),  # of a receiving low-latency dispatch about each source, and its epoch
            ("signed", 8),  # when this rank last gave a sign of life
            ("waits", 2 * config.num_ranks * 8),  # nanoseconds that receivers waited for each source, by the epoch's parity
        ]
    )


def low_latency(config: Config) -> Map:
    """Inboxes of the low-latency calls, in symmetric memory; `low_latency_sides` sides, by the epoch.

    All zero before the first call, but for `messages` and `rows`, the last ones, of which each byte is 0xff (kNotYet).
    """
    sides, ranks, tokens, topk = config.low_latency_sides, config.num_ranks, config.num_max_tokens_per_rank, config.num_topk
    rows = max(ranks, topk) * tokens  # from each rank, or for each choice
    header, message, row = low_latency_header_stride(config), low_latency_message_stride(config), low_latency_row_bytes(config)
    far = int(config.has_network)  # signals, and what waits to be put
    return arrange(
        [
            ("dispatch_acks", ranks * 8),
            ("combine_acks", ranks * 8),
            ("signs", ranks * 8),  # signs of life
            ("headers", sides * ranks * header),
            ("combine_headers", sides * ranks * structs.LlCombineHeader.size({})),
            ("weights", sides * ranks * tokens * topk * 8),
            ("message_flags", far * sides * ranks * tokens * 8),
            ("weight_flags", far * sides * ranks * 8),
            ("row_flags", far * sides * rows * 8),
            ("staged_headers", far * sides * ranks * header),
            ("staged_messages", far * sides * tokens * message),
            ("staged_weights", far * sides * tokens * topk * 8),
            ("staged_rows", far * sides * config.num_max_recv_tokens * row),
            ("messages", sides * ranks * tokens * message),
            ("rows", sides * rows * row),
        ]
    )


def low_latency_header_stride(config: Config) -> int:
    return align_up(structs.LlHeader.size(config.constants()), 128)


def low_latency_head_bytes(config: Config) -> int:
    """Where the row starts in a message."""
    return align_up(structs.LlMessage.size(config.constants()), 128)


def low_latency_row_bytes(config: Config) -> int:
    """Bytes of a bfloat16 row."""
    return config.hidden * 2


def low_latency_message_stride(config: Config) -> int:
    """A message carries a bfloat16 row, or an FP8 one with its scales, which is shorter."""
    return align_up(low_latency_head_bytes(config) + low_latency_row_bytes(config), 128)


def low_latency_handle(config: Config) -> Map:
    """What a low-latency dispatch leaves behind for its combine; local memory of each rank."""
    return arrange(
        [
            ("num_entries", 4),
            ("epoch", 4),  # of the dispatch
            ("out", config.num_ranks * 4),  # whether a rank was left out
            ("choices", config.num_max_tokens_per_rank * config.num_topk * 2),  # [token][choice] int16: the expert, or -1
            ("num_recv_per_expert", config.num_local_experts * 4),
            ("entries", config.num_max_recv_tokens * structs.LlEntry.size(config.constants())),
        ]
    )


def low_latency_result(config: Config, *, use_fp8: bool, use_ue8m0: bool) -> Map:
    """What a low-latency dispatch fills: worst case, expert by expert."""
    rows = config.num_experts * config.num_max_tokens_per_rank  # local experts * ranks * tokens
    scale_bytes = 0 if not use_fp8 else config.hidden // FP8_GROUP * (1 if use_ue8m0 else 4)
    return arrange([("x", rows * config.hidden * (1 if use_fp8 else 2)), ("scales", rows * scale_bytes)])


def route_stride(config: Config) -> int:
    """Bytes from one message of the route inbox to the next."""
    return align_up(structs.RouteMessage.size(config.constants()), 128)


def handle(config: Config) -> Map:
    """What dispatch leaves behind for combine and for later calls with the same routing; local memory of each rank."""
    ranks, tokens = config.num_ranks, config.num_max_tokens_per_rank
    return arrange(
        [
            ("num_rows", ranks * ranks * 4),  # [source][destination] int32
            ("num_recv", 4),
            ("serial", 4),  # of the routing: the same on all ranks
            ("num_recv_per_expert", config.num_local_experts * 4),
            ("send_pos", tokens * ranks * 4),  # [token][rank] int32: the how-manieth row for that rank, or -1
            ("send_list", ranks * tokens * 4),  # [rank][position] int32: the token
            ("counts", counts(config).num_bytes),  # the caller's, of the dispatch that made the handle
        ]
    )


def counts(config: Config) -> Map:
    """What arrived in a dispatch, as its caller gets it."""
    return arrange([("num_recv", 4), ("num_recv_per_expert", config.num_local_experts * 4)])


@functools.lru_cache
def result(config: Config, capacity: int, row_bytes: int, scale_bytes: int, idx_bytes: int, with_topk: bool) -> Map:
    """One dispatch result of at most `capacity` rows. The rows come last, so that trimming it to what arrived is a cut."""
    topk = config.num_topk if with_topk else 0
    return arrange(
        [
            ("topk_idx", capacity * topk * idx_bytes),
            ("topk_weights", capacity * topk * 4),
            ("src_idx", capacity * 8),
            ("scales", capacity * scale_bytes),
            ("x", capacity * row_bytes),
        ]
    )


def worst_result_bytes(config: Config) -> int:
    """Bytes of the largest dispatch result."""
    return result(
        config,
        config.num_max_recv_tokens,
        row_bytes=config.row_bytes,
        scale_bytes=config.scale_bytes,
        idx_bytes=8,
        with_topk=True,
    ).num_bytes


@functools.lru_cache
def staging(config: Config, row_bytes: int) -> Map:
    """Where combine's rows arrive at their source, before they are added up."""
    rows = config.num_max_sent_rows
    return arrange([("topk_weights", rows * config.num_topk * 4), ("x", rows * row_bytes)])


@functools.lru_cache
def combined(config: Config, num_tokens: int, row_bytes: int, with_weights: bool) -> Map:
    """A result of combine."""
    return arrange([("topk_weights", num_tokens * config.num_topk * 4 if with_weights else 0), ("x", num_tokens * row_bytes)])


def most_sums_bytes(config: Config) -> int:
    """Bytes of the largest result of combine."""
    return combined(config, config.num_max_tokens_per_rank, config.row_bytes, with_weights=True).num_bytes


def symmetric(config: Config) -> Map:
    """A Buffer's symmetric memory."""
    worst = worst_result_bytes(config)
    return arrange(
        [
            ("control", control(config).num_bytes),
            # combine's staging, and where a dispatch lands whose result is copied out because the pool is full
            ("landing", max(worst, staging(config, config.row_bytes).num_bytes)),
            ("pool", config.num_slots * worst),
            ("sums", config.num_slots * most_sums_bytes(config)),
            ("low_latency", low_latency(config).num_bytes if config.low_latency else 0),
        ]
    )


def host_page(config: Config) -> Map:
    """Pinned host memory that kernels write and the host reads."""
    constants = config.constants()
    return arrange(
        [
            ("report", structs.Report.size(constants)),
            ("mailbox", structs.Mailbox.size(constants)),
            ("masked", config.num_ranks * 4),  # as in local memory
        ]
    )


def constants(config: Config) -> dict[str, int]:
    """Every offset that the kernels use."""
    page = host_page(config)
    in_box = symmetric(config).offsets["low_latency"]
    return {
        **control(config).constants("Control"),
        **local(config).constants("Local"),
        **handle(config).constants("Handle"),
        **page.constants("Page"),
        **{name: in_box + offset for name, offset in low_latency(config).constants("Ll").items()},
        **low_latency_handle(config).constants("LlHandle"),
        "kLlSend": structs.LL_SEND,
        "kLlReceive": structs.LL_RECEIVE,
        "kLlElsewhere": structs.LL_ELSEWHERE,
        "kLlNoRoom": structs.LL_NO_ROOM,
        "kLlUnknown": structs.LL_UNKNOWN,
        "kLlOpenHook": structs.LL_OPEN_HOOK,
        "kLlHeaderStride": low_latency_header_stride(config),
        "kLlHeadBytes": low_latency_head_bytes(config),
        "kLlMessageStride": low_latency_message_stride(config),
        "kRouteStride": route_stride(config),
        "kMaxCombineChunks": control(config).sizes["combine_flags"] // (4 * config.num_ranks),
        **{name: number for name, (number, _) in structs.PHASES.items()},
    }


def size_hint(config: Config) -> dict[str, int]:
    """Bytes of GPU memory that a Buffer takes on each rank, by region, and their sum as `total`."""
    parts = dict(symmetric(config).sizes)
    parts["handles"] = num_handles(config) * (handle(config).num_bytes + counts(config).num_bytes)
    if config.low_latency:  # as many as are held at once; this is one of each
        parts["handles"] += num_handles(config) * low_latency_handle(config).num_bytes
        parts["low_latency_results"] = low_latency_result(config, use_fp8=False, use_ue8m0=False).num_bytes
    parts["total"] = sum(parts.values())
    return parts


def num_handles(config: Config) -> int:
    """Routing handles kept ready; more are allocated when the caller holds more."""
    return 2 * config.num_slots + 2


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
