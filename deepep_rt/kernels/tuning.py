"""Constants of the kernels that depend on the architecture or on the element type, and the shapes of copy warps.

Dispatch and combine have usual shapes of their copy warps, and those that `Buffer.autotune` tries. Every shape is local to the kernel of
one rank, so ranks need not agree on it. The rows of a chunk of combine are no part of it: the receiver's flags count chunks. The rows of a
copy of dispatch are a part of it, because a receiver sees only the end of the call.
"""

from __future__ import annotations

import re

import numpy as np

from ..arrays.compressed_rows import COMPRESSIONS, LEAST_AMAX, SCALE_RULES, compressed_row_bytes
from ..arrays.dtypes import DTYPES, FP8_GROUP
from ..config import COMBINE_DTYPES, LOW_LATENCY_TILE_BYTES, MAX_ROUTE_BLOCKS, ROUTE_THREADS, STAGE_BYTES, Config, rows_per_copy
from ..errors import EPConfigError
from ..tuned import CALLS, CopyShape
from .regions import align_up

MIN_ARCH = "sm_80"
"""The oldest GPUs that the kernels are written for."""

TAIL_ROWS = 32
"""Rows after the last expert that a block of expand_rows marks at a time."""

MAX_POSITION_BLOCKS = 64
"""The most blocks of expert_positions. The last block reads the counts of all others."""

CHOICES_PER_BLOCK = 256
"""Choices for which expert_positions gets another block, up to its most blocks."""

# With fewer blocks, each block of combine has warps of all roles, and few ranks read rows of their own where they lie. With more, some
# blocks only copy: as many as fill NVLink of this architecture. Measured on 2 H100 and 2 H200 (bench/measured.md).
_FEW_BLOCKS, _COPY_BLOCKS = 20, {90: 10}

# Of blocks that compress rows, measured on 2 H100 (bench/measured.md). With more warps, a thread has 96 registers instead of 128.
_COMPRESSED_BYTES, _COMPRESSED_WARPS, _MOST_COPY_WARPS = 216 * 1024, 16, 7
_MANY_BLOCKS, _FEWER_COPY_WARPS = 48, 2  # with 48 blocks or more, each has 2 copy warps less

_STAGING_BYTES = 192 * 1024  # shared memory of a block for the stages of the usual shapes; sm_90 has 227 KB
_MOST_STAGING_BYTES = 220 * 1024  # the same for all shapes. The rest is for barriers, routes and the driver
_NODES_STAGING_BYTES = 208 * 1024  # the same for calls over several nodes, which have larger tables
_NODES_COPY_WARPS = 7  # the most that copy in dispatch_nodes
_LINE = 128
_MOST_ROWS = 32  # of a copy of dispatch, one for each lane
_MOST_STAGES = 12  # that are tried

# Warps of a block besides the copy warps, with TMA and without. A combine block keeps its size if it has another number of copy warps,
# because with more warps each thread would have fewer registers.
_OTHER_WARPS = {"dispatch": (6, 4), "combine": (14, 8)}

# Of combine_choices, with TMA and without: the most copy warps, and the other warps of a block. Its copy warps add up rows afterwards, and
# fewer of them are slower (bench/measured.md).
_CHOICES_WARPS, _OTHER_CHOICES_WARPS = (3, 8), (13, 8)

# Of expand_tiles, with TMA and without: the most copy warps. Of the other warps of a block, one signals or all fill padding.
_TILES_WARPS, _OTHER_TILES_WARPS = (6, 8), 2

_WARPS = (1, 2, 3, 4, 6)  # that are tried


def arch_number(arch: str) -> int:
    """Return the compute capability of a target: 90 for `sm_90`, `sm_90a` or `compute_90`. Raise EPConfigError for no such name."""
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
    choices = _fitting(config, with_tma, *_CHOICES_WARPS)
    usual |= _constants("Choices", config, choices, choices.warps + _OTHER_CHOICES_WARPS[0 if with_tma else 1], with_tma)
    tiles = _fitting(config, with_tma, *_TILES_WARPS)
    usual |= _constants("Tiles", config, tiles, tiles.warps + _OTHER_TILES_WARPS, with_tma)
    return {
        "kHasTma": int(with_tma),
        "kLlThreads": config.low_latency_threads,
        "kLlTableBytes": config.low_latency_table_bytes,
        "kLlTileBytes": LOW_LATENCY_TILE_BYTES,
        "kRouteThreads": ROUTE_THREADS,
        "kRouteBlocks": MAX_ROUTE_BLOCKS,
        **_nodes_constants(config, with_tma),
        "kDispatchItemsPerTicket": 4,
        "kCombineItemsPerTicket": 2,
        "kManyBlocks": _MANY_BLOCKS,
        "kFewBlocks": _FEW_BLOCKS,
        "kCopyBlocks": _COPY_BLOCKS.get(arch_number(arch), 0),
        **usual,
    }


def _nodes_constants(config: Config, with_tma: bool) -> dict[str, int]:
    """Return the shapes of the blocks of calls over several nodes. With TMA each stage holds one row, or several short ones."""
    if not with_tma:
        return {
            "kWireThreads": 256,
            "kWireStageBytes": 4096,
            "kWireSharedBytes": 0,
            "kNodesThreads": 256,
            "kLinkRatesStageBytes": 2048,
            "kLinkRatesSharedBytes": 0,
            "kNodesStageBytes": 0,
            "kDispatchNodesThreads": 256,
            "kCombineNodesThreads": 256,
            **_copies("DispatchNodes", 8, 1, 0),
            **_copies("CombineNodes", 4, 1, 0),
        }
    pitch = stage_bytes(config, 0) + _LINE

    def shape(most_warps: int, stages: int) -> tuple[int, int]:
        warps = max(1, min(most_warps, _NODES_STAGING_BYTES // (2 * pitch)))
        return warps, max(2, min(stages, _NODES_STAGING_BYTES // (warps * pitch)))

    dispatch = shape(_NODES_COPY_WARPS, 8)
    return {
        "kWireThreads": 256,
        "kWireStageBytes": 4096,
        "kWireSharedBytes": 8 * 4 * 4096,  # four stages of each warp
        "kNodesThreads": 512,
        "kLinkRatesStageBytes": 2048,
        "kLinkRatesSharedBytes": 16 * 4 * 2048 + _LINE,  # four stages of each warp
        "kNodesStageBytes": pitch,
        "kDispatchNodesThreads": 32 * (dispatch[0] + 1),  # one of them raises signals
        "kCombineNodesThreads": 512,
        **_copies("DispatchNodes", *dispatch, pitch),
        **_copies("CombineNodes", *shape(2, 6), pitch),
    }


def _copies(name: str, warps: int, stages: int, pitch: int) -> dict[str, int]:
    room = _LINE if pitch else 0  # the stages begin with a line
    return {f"k{name}CopyWarps": warps, f"k{name}Stages": stages, f"k{name}SharedBytes": warps * stages * pitch + room}


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


def tile_sums(config: Config, dtype: str, with_tma: bool) -> dict[str, int]:
    """Return the constants of combine_tiles. Each block has warps of all roles. A copy warp adds up a chunk's rows in one of two stages."""
    constants = {"kFewBlocks": 0, "kCopyBlocks": 0}
    if not with_tma:
        return constants
    row_bytes = config.hidden * DTYPES[dtype].itemsize
    chunk_bytes = rows_per_copy(row_bytes) * row_bytes
    pitch = align_up(chunk_bytes, _LINE) + _LINE  # staging keeps the destination's offset within its 128-byte line
    copy_warps = min(_MOST_COPY_WARPS, max(1, _COMPRESSED_BYTES // (2 * pitch)))
    return {
        **constants,
        "kStageBytes": pitch,
        "kCombineStages": 2,
        "kCombineCopyWarps": copy_warps,
        "kCopyWarpsOfManyBlocks": copy_warps,
        "kCombineThreads": 32 * _COMPRESSED_WARPS,
        "kCombineSharedBytes": 2 * copy_warps * pitch,
    }


def usual_shape(call: str, config: Config, with_tma: bool) -> CopyShape:
    """Return the shape of a Buffer that was not tuned."""
    return _fitting(config, with_tma, *{"dispatch": (2, 12), "combine": (2, 8)}[call])


def _fitting(config: Config, with_tma: bool, most_warps: int, plain_warps: int) -> CopyShape:
    stage = stage_bytes(config, STAGE_BYTES)
    warps = min(most_warps, max(1, _STAGING_BYTES // (2 * stage))) if with_tma else plain_warps
    return CopyShape(warps, max(2, min(8, _STAGING_BYTES // (warps * stage))), STAGE_BYTES)


def shapes_to_try(call: str, config: Config, with_tma: bool) -> list[CopyShape]:
    """Return the shapes that may be faster than the usual one, without it. All fit the shared memory of a block.

    They differ in rows of a copy, copy warps and copies in flight. Without TMA, copies are loads and stores of warps, and there are none.
    """
    if not with_tma:
        return []
    rows = rows_per_copy(config.row_bytes)
    factors = (1, 2, 4) if call == "dispatch" else (1,)
    found: dict[CopyShape, None] = {}
    for factor in factors:
        if factor * rows > _MOST_ROWS:
            continue
        copy_bytes = factor * rows * config.row_bytes
        room = _MOST_STAGING_BYTES // (stage_bytes(config, copy_bytes) + _LINE)
        for warps in _WARPS:
            stages = min(_MOST_STAGES, room // warps)
            if stages >= 2:
                found[CopyShape(warps, stages, copy_bytes)] = None
            if factor == 1 and stages >= 6 and warps > 1:  # fewer copies in flight leave more of the caches to other work
                found[CopyShape(warps, stages // 2, copy_bytes)] = None
    usual = usual_shape(call, config, with_tma)
    return [
        shape for shape in found if (shape.warps, shape.stages, stage_bytes(config, shape.copy_bytes)) != _form(usual, config)
    ]


def is_possible(call: str, shape: CopyShape, config: Config) -> bool:
    """Return whether a kernel with TMA can have this shape. A shape from a file is used only if it is one of those that are tried."""
    return shape in shapes_to_try(call, config, with_tma=True)


def copy_constants(call: str, config: Config, shape: CopyShape, with_tma: bool) -> dict[str, int]:
    """Return the constants of a kernel of "dispatch" or "combine" with this shape.

    Without bulk copies (`with_tma`), blocks need no shared memory for stages.
    """
    assert call in CALLS
    others = _OTHER_WARPS[call][0 if with_tma else 1]
    all_warps = others + (shape.warps if call == "dispatch" else usual_shape(call, config, with_tma).warps)
    constants = _constants(call.capitalize(), config, shape, all_warps, with_tma)
    return constants if call == "dispatch" else {**constants, "kCopyWarpsOfManyBlocks": shape.warps}


def _constants(name: str, config: Config, shape: CopyShape, all_warps: int, with_tma: bool) -> dict[str, int]:
    pitch = stage_bytes(config, shape.copy_bytes) + _LINE  # staging keeps the destination's offset within its 128-byte line
    return {
        "kStageBytes": pitch,
        f"k{name}CopyWarps": shape.warps,
        f"k{name}Stages": shape.stages,
        f"k{name}Threads": 32 * all_warps,
        f"k{name}SharedBytes": shape.warps * shape.stages * pitch if with_tma else 0,
    }


def stage_bytes(config: Config, copy_bytes: int) -> int:
    """Return the bytes of a stage without its spare line: those of a copy, or of a single row if it is larger."""
    return align_up(max(copy_bytes, config.row_bytes), _LINE)


def _form(shape: CopyShape, config: Config) -> tuple[int, int, int]:
    return shape.warps, shape.stages, stage_bytes(config, shape.copy_bytes)
