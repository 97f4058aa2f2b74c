"""What kernels are compiled with besides the sizes of a Buffer: what depends on the architecture, and on the element type."""

from __future__ import annotations

import re

from ..arrays.dtypes import DTYPES, FP8_GROUP
from ..config import COMBINE_DTYPES, LOW_LATENCY_STRETCH, MAX_ROUTE_BLOCKS, ROUTE_THREADS, STAGE_BYTES, Config, rows_per_copy
from ..errors import EPConfigError

MIN_ARCH = "sm_80"
"""The oldest GPUs that the kernels are written for."""

_STAGING_BYTES = 192 * 1024  # shared memory of a block that is given to stages; sm_90 has 227 KB


def arch_number(arch: str) -> int:
    """Compute capability of a target: 90 for `sm_90`, `sm_90a` or `compute_90`.

    Raises:
        EPConfigError: if `arch` is no such name.
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", arch)
    if match is None:
        raise EPConfigError(f"arch is {arch!r}; expected a name such as sm_80, sm_90 or compute_80")
    return int(match[1])


def has_fp8(arch: str) -> bool:
    """Whether a target can convert to FP8."""
    return arch_number(arch) >= 89


def tuning(config: Config, arch: str) -> dict[str, int]:
    """Constants that differ between architectures, and the shape of the thread blocks.

    Movers are warps that copy rows; with TMA one thread of each issues bulk copies through its own ring of stages, without it the
    whole warp copies. The other warps of a block carry the small arrays (dispatch), or raise flags and add rows up (combine).
    """
    has_tma = arch_number(arch) >= 90
    stage = max(STAGE_BYTES, -(-config.row_bytes // 128) * 128)
    pitch = stage + 128  # bytes begin where they do in a line of their target
    dispatch_movers = min(2, max(1, _STAGING_BYTES // (2 * stage))) if has_tma else 12
    combine_movers = min(3, max(1, _STAGING_BYTES // (2 * stage))) if has_tma else 8
    dispatch_stages = max(2, min(8, _STAGING_BYTES // (dispatch_movers * stage)))
    combine_stages = max(2, min(8, _STAGING_BYTES // (combine_movers * stage)))
    return {
        "kHasTma": int(has_tma),
        "kHasOverlap": int(arch_number(arch) >= 90),  # programmatic dependent launch
        "kLlThreads": config.low_latency_threads,
        # Of a row, what a thread has on its way at once; registers decide.
        "kLlPieces": 7 if arch_number(arch) < 100 and config.on_timeout == "raise" else 4,
        "kLlTableBytes": config.low_latency_table_bytes,
        "kLlStretch": LOW_LATENCY_STRETCH,
        "kStageBytes": pitch,
        "kRouteThreads": ROUTE_THREADS,
        "kRouteBlocks": MAX_ROUTE_BLOCKS,
        "kDispatchTake": 4,
        "kDispatchMovers": dispatch_movers,
        "kDispatchStages": dispatch_stages,
        "kDispatchThreads": 32 * (dispatch_movers + (6 if has_tma else 4)),
        "kDispatchSharedBytes": dispatch_movers * dispatch_stages * pitch if has_tma else 0,
        "kCombineTake": 2,
        "kCombineMovers": combine_movers,
        "kCombineStages": combine_stages,
        "kCombineThreads": 32 * (combine_movers + (13 if has_tma else 8)),
        "kCombineSharedBytes": combine_movers * combine_stages * pitch if has_tma else 0,
    }


def local_constants(arch: str, dtype: str | None = None) -> dict[str, int]:
    """Constants that need no Buffer: all of kernels that work on a rank's own arrays."""
    elements = {f"k{name.capitalize()}": number for number, name in enumerate(COMBINE_DTYPES)}
    return {
        "kHasFp8": int(has_fp8(arch)),
        "kFp8Group": FP8_GROUP,
        "kLocalThreads": 256,
        "kCountedExperts": 2048,
        **elements,
        **({} if dtype is None else {"kElement": COMBINE_DTYPES.index(dtype)}),
    }


def combine_constants(config: Config, dtype: str) -> dict[str, int]:
    """Constants of a combine kernel for rows of `dtype`."""
    row_bytes = config.hidden * DTYPES[dtype].itemsize
    return {"kRowBytes": row_bytes, "kChunkRows": rows_per_copy(row_bytes)}
