"""The shapes of the copy warps of dispatch and combine: the usual ones, those that `Buffer.autotune` tries, and their constants.

Every shape is local to the kernel of one rank, so ranks need not agree on it. The rows of a chunk of combine are no part of it: the
receiver's flags count chunks. The rows of a copy of dispatch are a part of it, because a receiver sees only the end of the call.
"""

from __future__ import annotations

from ..config import STAGE_BYTES, Config, rows_per_copy
from ..tuned import CALLS, CopyShape
from .regions import align_up

_STAGING_BYTES = 192 * 1024  # shared memory of a block for the stages of the usual shapes; sm_90 has 227 KB
_MOST_STAGING_BYTES = 220 * 1024  # the same for all shapes. The rest is for barriers, routes and the driver
_LINE = 128
_MOST_ROWS = 32  # of a copy of dispatch, one for each lane
_MOST_STAGES = 12  # that are tried

# Warps of a block besides the copy warps, with TMA and without. A combine block keeps its size if it has another number of copy warps,
# because with more warps each thread would have fewer registers.
_OTHER_WARPS = {"dispatch": (6, 4), "combine": (13, 8)}

_WARPS = (1, 2, 3, 4, 6)  # that are tried


def usual_shape(call: str, config: Config, with_tma: bool) -> CopyShape:
    """Return the shape of a Buffer that was not tuned."""
    most_warps, plain_warps = {"dispatch": (2, 12), "combine": (3, 8)}[call]
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
    """Return the constants of a kernel with this shape.

    Args:
        call: "dispatch" or "combine".
        config: The sizes.
        shape: The shape.
        with_tma: Whether the target has bulk copies. Without them, blocks need no shared memory for stages.
    """
    assert call in CALLS
    name, others = call.capitalize(), _OTHER_WARPS[call][0 if with_tma else 1]
    pitch = stage_bytes(config, shape.copy_bytes) + _LINE  # staging keeps the destination's offset within its 128-byte line
    all_warps = others + (shape.warps if call == "dispatch" else usual_shape(call, config, with_tma).warps)
    constants = {
        "kStageBytes": pitch,
        f"k{name}CopyWarps": shape.warps,
        f"k{name}Stages": shape.stages,
        f"k{name}Threads": 32 * all_warps,
        f"k{name}SharedBytes": shape.warps * shape.stages * pitch if with_tma else 0,
    }
    return constants if call == "dispatch" else {**constants, "kCopyWarpsOfManyBlocks": shape.warps}


def stage_bytes(config: Config, copy_bytes: int) -> int:
    """Return the bytes of a stage without its spare line: those of a copy, or of a single row if it is larger."""
    return align_up(max(copy_bytes, config.row_bytes), _LINE)


def _form(shape: CopyShape, config: Config) -> tuple[int, int, int]:
    return shape.warps, shape.stages, stage_bytes(config, shape.copy_bytes)
