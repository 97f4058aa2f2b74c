"""Constants of the kernels that depend on the architecture or on the element type."""

from __future__ import annotations

import re

import numpy as np

from ..arrays.compressed_rows import COMPRESSIONS, LEAST_AMAX, SCALE_RULES, compressed_row_bytes
from ..arrays.dtypes import DTYPES, FP8_GROUP
from ..config import COMBINE_DTYPES, LOW_LATENCY_TILE_BYTES, MAX_ROUTE_BLOCKS, ROUTE_THREADS, Config, rows_per_copy
from ..errors import EPConfigError
from ..tuned import CALLS
from .copy_shapes import copy_constants, usual_shape

MIN_ARCH = "sm_80"
"""The oldest GPUs that the kernels are written for."""

TAIL_ROWS = 32
"""Rows after the last expert that a block of expand_rows marks at a time."""

MAX_POSITION_BLOCKS = 64
"""The most blocks of expert_positions. The last block reads the counts of all others."""

CHOICES_PER_BLOCK = 256
"""Choices for which expert_positions gets another block, up to its most blocks."""

# With fewer blocks, combine reads rows of its own rank where they lie. Measured on 2 H100 (bench/measured.md).
_COPY_OWN_ROWS_BLOCKS = 20

# Of blocks that compress rows, measured on 2 H100 (bench/measured.md). With more warps, a thread has 96 registers instead of 128.
_COMPRESSED_BYTES, _COMPRESSED_WARPS, _MOST_COPY_WARPS = 216 * 1024, 16, 7
_MANY_BLOCKS, _FEWER_COPY_WARPS = 48, 2  # with 48 blocks or more, each has 2 copy warps less


def arch_number(arch: str) -> int:
    """Return the compute capability of a target: 90 for `sm_90`, `sm_90a` or `compute_90`.

    Raises:
        EPConfigError: if `arch` is no such name.
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if match is None:
        raise EPConfigError(f"arch={arch!r}; expected a name such as sm_80, sm_90 or compute_80")
    return int(match[1])


def has_fp8(arch: str) -> bool:
    """Return whether a target can convert to FP8."""
    return arch_number(arch) >= 89


def has_overlap(arch: str) -> bool:
    """Return whether a target has programmatic dependent launch."""
    return arch_number(arch) >= 90


def has_tma(arch: str) -> bool:
    """Return whether a target has a copy engine for bulk copies."""
    return arch_number(arch) >= 90


def tuning(config: Config, arch: str) -> dict[str, int]:
    """Return the constants that differ between architectures, and the shape of the thread blocks.

    Copy warps copy rows. With TMA one thread of each copy warp issues bulk copies through the warp's own ring of stages. Without TMA the
    whole warp copies. The other warps of a dispatch block are metadata warps, which copy the small arrays. A combine block has a signal
    warp, which raises flags, and reduce warps, which add up rows.
    """
    with_tma = has_tma(arch)
    usual: dict[str, int] = {}
    for call in CALLS:  # both have stages of the same size
        usual |= copy_constants(call, config, usual_shape(call, config, with_tma), with_tma)
    return {
        "kHasTma": int(with_tma),
        "kLlThreads": config.low_latency_threads,
        "kLlTableBytes": config.low_latency_table_bytes,
        "kLlTileBytes": LOW_LATENCY_TILE_BYTES,
        "kRouteThreads": ROUTE_THREADS,
        "kRouteBlocks": MAX_ROUTE_BLOCKS,
        "kNodesThreads": 512 if with_tma else 256,
        "kCombineNodesThreads": _combine_nodes_threads(config, with_tma),
        "kDispatchItemsPerTicket": 4,
        "kCombineItemsPerTicket": 2,
        "kManyBlocks": _MANY_BLOCKS,
        "kCopyOwnRowsBlocks": _COPY_OWN_ROWS_BLOCKS,
        **usual,
    }


def _combine_nodes_threads(config: Config, with_tma: bool) -> int:
    """Return the threads of a block of combine_nodes: the most of 512, 384 and 256 without spills."""
    if not with_tma:
        return 256
    return 512 if config.node_size == 1 else 384


def local_constants(arch: str, dtype: str | None = None) -> dict[str, int]:
    """Return the constants that need no Buffer. Kernels that work on arrays of one rank use no others."""
    elements = {f"k{name.capitalize()}": number for number, name in enumerate(COMBINE_DTYPES)}
    return {
        "kHasFp8": int(has_fp8(arch)),
        "kHasOverlap": int(has_overlap(arch)),
        "kFp8Group": FP8_GROUP,
        "kLocalThreads": 256,
        "kPositionThreads": 1024,
        "kPositionBlocks": MAX_POSITION_BLOCKS,
        "kPositionCounts": 8192,  # of experts and warps, in shared memory
        "kTailRows": TAIL_ROWS,
        "kCountedExperts": 2048,
        **elements,
        **({} if dtype is None else {"kElement": COMBINE_DTYPES.index(dtype)}),
    }


def combine_constants(config: Config, dtype: str) -> dict[str, int]:
    """Return the constants of a combine kernel for rows of `dtype`."""
    row_bytes = config.hidden * DTYPES[dtype].itemsize
    return {"kRowBytes": row_bytes, "kSentRowBytes": row_bytes, "kChunkRows": rows_per_copy(row_bytes)}


def compression_constants(config: Config, compression: str) -> dict[str, int]:
    """Return the constants of a kernel that compresses rows on the way."""
    round_up, exponent = SCALE_RULES[compression]
    return {
        "kCompression": COMPRESSIONS.index(compression),
        **{f"kCompression{name.capitalize()}": number for number, name in enumerate(COMPRESSIONS)},
        "kSentRowBytes": compressed_row_bytes(config.hidden, compression),
        "kLeastAmaxBits": int(LEAST_AMAX.view(np.uint32)),
        "kScaleRoundUp": round_up,
        "kScaleExponent": exponent,
    }


def compressed_stages(config: Config, dtype: str, compression: str) -> dict[str, int]:
    """Return the constants of a combine kernel with TMA that compresses rows of `dtype`.

    Each copy warp has memory for a row, and two stages for compressed chunks. More warps copy than in a plain combine, because they
    convert. One of the other warps signals, and the rest reduces.
    """
    row_bytes = config.hidden * DTYPES[dtype].itemsize
    chunk_bytes = rows_per_copy(row_bytes) * compressed_row_bytes(config.hidden, compression)
    pitch = -(-chunk_bytes // 128) * 128 + 128  # staging keeps the destination's offset within its 128-byte line
    memory = row_bytes + 2 * pitch
    copy_warps = min(_MOST_COPY_WARPS, max(1, _COMPRESSED_BYTES // memory))
    return {
        "kStageBytes": pitch,
        "kCombineCopyWarps": copy_warps,
        "kCopyWarpsOfManyBlocks": max(1, copy_warps - _FEWER_COPY_WARPS),
        "kCombineThreads": 32 * _COMPRESSED_WARPS,
        "kCombineSharedBytes": copy_warps * memory,
    }
