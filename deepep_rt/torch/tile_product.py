"""A grouped matrix product in Triton, whose tiles may wait for their rows. Triton comes with PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_SHARED_BYTES = 99 * 1024  # of a block, on every GPU

_DEPTH = {1: 128, 2: 64}  # elements of a step, by the bytes of an element. With FP8, a step has one scale for each row

_BAND = 4  # tiles of rows. Tickets that follow each other are tiles of a band with the same weights, which are then in the cache
_WIDE, _NARROW = 256, 128  # columns of a tile. Wide ones load a quarter less, and need room for three steps


# A version for each kind of number would be compiled while other ranks wait.
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_product(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    experts,
    ready,
    signal,
    ticket,
    num_tiles,
    num_columns,
    depth,
    stride_expert,
    stride_depth,
    stride_column,
    WAITS: tl.constexpr,
    FP8: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles_across = num_columns // COLUMNS
    total = num_tiles * tiles_across
    tile = tl.atomic_add(ticket, 1, sem="relaxed")
    while tile < total:
        first = tile // (BAND * tiles_across) * BAND
        num_down, in_band = min(num_tiles - first, BAND), tile % (BAND * tiles_across)
        down, across = first + in_band % num_down, in_band // num_down
        column = across * COLUMNS + tl.arange(0, COLUMNS)
        if WAITS:
            word = tl.atomic_add(ready + down, 0, sem="acquire")
            while word != signal:
                word = tl.atomic_add(ready + down, 0, sem="acquire")
        expert = tl.load(experts + down * ROWS)  # written before the word
        if expert >= 0:
            row = (down * ROWS + tl.arange(0, ROWS)).to(tl.int64)
            step = tl.arange(0, DEPTH)
            left = x + row[:, None] * depth + step[None, :]
            right = (
                weight
                + expert.to(tl.int64) * stride_expert
                + step[:, None] * stride_depth
                + column[None, :].to(tl.int64) * stride_column
            )
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            if FP8:
                steps = depth // DEPTH
                left_scale = x_scales + row * steps
                right_scale = weight_scales + (expert.to(tl.int64) * tiles_across + across) * steps
                for i in range(steps):
                    part = tl.dot(tl.load(left), tl.load(right))
                    sums += part * (tl.load(left_scale + i) * tl.load(right_scale + i))[:, None]
                    left += DEPTH
                    right += DEPTH * stride_depth
            else:
                for _ in range(0, depth, DEPTH):
                    sums = tl.dot(tl.load(left), tl.load(right), sums)
                    left += DEPTH
                    right += DEPTH * stride_depth
            tl.store(out + row[:, None] * num_columns + column[None, :], sums.to(out.dtype.element_ty))
        tile = tl.atomic_add(ticket, 1, sem="relaxed")


@functools.cache
def num_sms(device: Any) -> int:
    """Return the SMs of a GPU."""
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


@functools.cache
def _shape(device: Any, columns: int, tile_rows: int, element_bytes: int) -> tuple[int, int]:
    """Return the columns of a tile and the stages of its loop, by the shared memory of a block."""
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_BYTES)

    def stages(width: int) -> int:
        return int(room // ((tile_rows + width) * _DEPTH[element_bytes] * element_bytes + 2048))

    # With FP8 a thread has no registers for a wide tile: it keeps the sums, and those of a step without scales.
    width = _WIDE if element_bytes == 2 and columns % _WIDE == 0 and stages(_WIDE) >= 3 else _NARROW
    return width, max(2, min(4, stages(width)))


def launch(
    programs: int,
    x: Any,
    weight: torch.Tensor,
    out: torch.Tensor,
    experts: Any,
    ticket: Any,
    *,
    tile_rows: int,
    scales: tuple[Any, Any] | None = None,
    ready: Any = None,
    signal: int = 1,
) -> None:
    """Launch blocks that take tiles of a product until none is left. Launches that share `ticket`, which begins with 0, share the tiles.

    `x` is `[rows, depth]`, `weight` `[experts, depth, columns]` with any strides, `out` `[rows, columns]`. All rows of a tile of
    `tile_rows` rows belong to the expert of its first row in `experts`; -1 skips the tile. With `ready`, a tile waits until its word is
    `signal`. Arrays are tensors, or other objects that Triton takes for pointers.
    """
    _, depth, columns = weight.shape
    x_scales, weight_scales = scales or (x, x)
    element_bytes = weight.element_size()
    width, num_stages = _shape(weight.device, columns, tile_rows, element_bytes)
    _grouped_product[(programs,)](
        x,
        x_scales,
        weight,
        weight_scales,
        out,
        experts,
        experts if ready is None else ready,
        signal,
        ticket,
        out.shape[0] // tile_rows,
        columns,
        depth,
        *weight.stride(),
        WAITS=ready is not None,
        FP8=scales is not None,
        BAND=_BAND,
        ROWS=tile_rows,
        COLUMNS=width,
        DEPTH=_DEPTH[element_bytes],
        num_warps=8,
        num_stages=num_stages,
    )
