"""`kernels.copy_shapes`: the usual shapes are what they were, and those that are tried fit the hardware and the protocol."""

from __future__ import annotations

from typing import Any

import pytest
from generated_configs import configs
from hypothesis import given

from deepep_rt.arrays.dtypes import DTYPES
from deepep_rt.config import COMBINE_DTYPES, Config, rows_per_copy
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import kernel_constants, used_constants
from deepep_rt.kernels.table import KERNELS
from deepep_rt.kernels.tuning import (
    combine_constants,
    copy_constants,
    is_possible,
    shapes_to_try,
    stage_bytes,
    tuning,
    usual_shape,
)
from deepep_rt.tuned import CALLS, CopyShape

NAMES = (
    *("kStageBytes", "kDispatchCopyWarps", "kDispatchStages", "kDispatchThreads", "kDispatchSharedBytes", "kCombineCopyWarps"),
    *("kCopyWarpsOfManyBlocks", "kCombineStages", "kCombineThreads", "kCombineSharedBytes"),
    *("kChoicesCopyWarps", "kChoicesStages", "kChoicesThreads", "kChoicesSharedBytes"),
)
SM_80 = (12, 2, 512, 0, 8, 8, 2, 512, 0, 8, 2, 512, 0)
SM_90 = (2, 6, 256, 198144, 2, 2, 6, 512, 198144, 3, 4, 512, 198144)


def _config(**changes: Any) -> Config:
    sizes = dict(num_ranks=4, num_max_tokens_per_rank=64, hidden=7168, num_topk=4, num_experts=32)
    return Config(**{**sizes, "timeout_s": 1.0, "check_inputs": False, "statistics": False, **changes})


@pytest.mark.parametrize(
    ("hidden", "dtype", "arch", "expected"),
    [
        (7168, "bfloat16", "sm_80", (16512, *SM_80)),
        (7168, "bfloat16", "sm_90", (16512, *SM_90)),
        (7168, "bfloat16", "sm_100", (16512, *SM_90)),
        (256, "bfloat16", "sm_90", (16512, *SM_90)),
        (7168, "float8_e4m3fn", "sm_90", (16512, *SM_90)),
        (24576, "float32", "sm_80", (98432, *SM_80)),
        (24576, "float32", "sm_90", (98432, 1, 2, 224, 196864, 1, 1, 2, 480, 196864, 1, 2, 448, 196864)),
    ],
)
def test_kernels_of_untuned_buffers_stay(hidden: int, dtype: str, arch: str, expected: tuple[int, ...]) -> None:
    """The constants are a part of the cache key. With others, every user would compile again."""
    found = tuning(_config(hidden=hidden, dtype=dtype), arch)
    assert tuple(found[name] for name in NAMES) == expected


def test_a_shape_changes_only_its_own_kernel() -> None:
    layout, shape = Layout(_config()), CopyShape(3, 5, 14336)
    for call in CALLS:
        kernel = KERNELS[call]
        usual, tuned = (kernel_constants(layout, "sm_90", kernel, "bfloat16", given) for given in (None, shape))
        changed = {name for name, value in tuned.items() if usual[name] != value}
        assert changed <= {"kStageBytes", *(name for name in NAMES if call.capitalize() in name), "kCopyWarpsOfManyBlocks"}
        assert changed & set(used_constants(kernel, tuned))
        assert (tuned["kStageBytes"], tuned["kChunkRows"] if call == "combine" else 1) == (14336 + 128, 1)


@given(configs())
def test_shapes_that_are_tried_fit(config: Config) -> None:
    for call in CALLS:
        assert shapes_to_try(call, config, with_tma=False) == []
        shapes = shapes_to_try(call, config, with_tma=True)
        assert len(set(shapes)) == len(shapes) <= 24, "each takes time to compile"
        assert usual_shape(call, config, True) not in shapes
        for shape in shapes:
            assert is_possible(call, shape, config)
            found = copy_constants(call, config, shape, True)
            name = call.capitalize()
            threads, copy_warps = found[f"k{name}Threads"], found[f"k{name}CopyWarps"]
            assert found["kStageBytes"] >= config.row_bytes + 128, "a row may begin anywhere in a line"
            assert found["kStageBytes"] % 128 == 0
            assert 2 <= found[f"k{name}Stages"] <= 32
            assert 32 * (copy_warps + 4) <= threads <= 512, "other warps have work too, and 512 threads have 128 registers each"
            assert found[f"k{name}SharedBytes"] == copy_warps * shape.stages * found["kStageBytes"] <= 223 * 1024


@given(configs())
def test_rows_of_a_copy_fit_a_stage(config: Config) -> None:
    """Calls may have narrower rows than the Buffer. Chunks of combine are the same in all shapes, because ranks may have different ones."""
    for call in CALLS:
        for shape in shapes_to_try(call, config, with_tma=True):
            room = stage_bytes(config, shape.copy_bytes)
            for dtype in COMBINE_DTYPES if call == "combine" else DTYPES:
                row_bytes = config.hidden * DTYPES[dtype].itemsize
                if row_bytes > config.row_bytes or row_bytes % 16:
                    continue
                rows = rows_per_copy(row_bytes, shape.copy_bytes)
                if call == "combine":
                    rows = combine_constants(config, dtype)["kChunkRows"]
                assert rows <= 32
                assert rows * row_bytes <= room


@pytest.mark.parametrize("shape", [CopyShape(16, 12, 16384), CopyShape(2, 1, 14336), CopyShape(2, 7, 14335), CopyShape(0, 0, 0)])
def test_other_shapes_are_refused(shape: CopyShape) -> None:
    assert not is_possible("dispatch", shape, _config())
