"""The arguments of calls: looked at once, checked once, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import flag, whole_number
from ..arrays import frameworks
from ..arrays.dtypes import FP8_GROUP
from ..arrays.view import HOST, View
from ..config import COMBINE_DTYPES, ROW_ALIGNMENT
from ..errors import EPError, EPInputError
from ..results import DispatchHandle, LowLatencyHandle
from .calls import BufferInfo, CombineInputs, DispatchInputs, LowLatencyCombineInputs, LowLatencyDispatchInputs

MOST_ALIGNMENT = 1 << 20
"""The largest `expert_alignment`."""


def dispatch_inputs(
    info: BufferInfo,
    stream: int | None,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    x_scales: Any,
    handle: DispatchHandle | None,
    num_worst_tokens: int | None,
    expert_alignment: int,
) -> DispatchInputs:
    """Check the arguments of `Buffer.dispatch`, whose docstring names the rules."""
    config = info.config
    rows = _look(info, x, "x", stream)
    if len(rows.shape) != 2 or rows.shape[1] != config.hidden:
        raise EPInputError(f"x has shape {list(rows.shape)}; expected [num_tokens, {config.hidden}], the hidden of this buffer")
    _check_row(info, rows, "x")
    _check_tokens(info, rows)
    num_tokens = rows.shape[0]
    if handle is None and topk_idx is None:
        raise EPInputError("dispatch needs topk_idx, or the handle of an earlier dispatch; got neither")
    if num_worst_tokens is not None:
        remedy = "The largest is num_ranks * num_max_tokens_per_rank; None leaves the number to what arrives."
        num_worst_tokens = whole_number(num_worst_tokens, "num_worst_tokens", 0, config.num_max_recv_tokens, remedy=remedy)
    expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MOST_ALIGNMENT)
    if handle is not None:
        _check_handle(info, handle)
        if num_tokens != handle.num_tokens:
            raise EPInputError(f"x has {num_tokens} tokens, but the handle was made with {handle.num_tokens}")
        if num_worst_tokens not in (None, handle.num_recv_rows):
            raise EPInputError(f"num_worst_tokens is {num_worst_tokens}, but the handle's result has {handle.num_recv_rows} rows")
    idx = weights = scales = None
    if topk_idx is not None:
        idx = _look(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    if topk_weights is not None:
        if idx is None:
            raise EPInputError("topk_weights needs topk_idx beside it: a weight is kept where its expert lives")
        weights = _look(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    if x_scales is not None:
        scales = _look(info, x_scales, "x_scales", stream)
        if len(scales.shape) != 2 or scales.shape[0] != num_tokens:
            raise EPInputError(f"x_scales has shape {list(scales.shape)}; expected [{num_tokens}, scales of a row]")
        if scales.ptr % 4 and scales.device != HOST:
            raise EPInputError("x_scales starts at an address that is not a multiple of 4 bytes; pass a copy")
        if scales.row_bytes % 4 or scales.row_bytes > config.scale_bytes:
            raise EPInputError(
                f"x_scales has {scales.row_bytes} bytes a row; expected a multiple of 4 up to {config.scale_bytes} "
                f"(hidden // 128 float32, or packed UE8M0)"
            )
    if handle is not None and expert_alignment != 1:
        raise EPInputError(
            f"expert_alignment is {expert_alignment} beside a handle, which keeps the counts of its routing; give it to the first dispatch"
        )
    return DispatchInputs(rows, idx, weights, scales, handle, num_worst_tokens, expert_alignment)


def combine_inputs(
    info: BufferInfo, stream: int | None, x: Any, handle: DispatchHandle, topk_weights: Any, bias: Any
) -> CombineInputs:
    """Check the arguments of `Buffer.combine`, whose docstring names the rules."""
    config = info.config
    _check_handle(info, handle)
    rows = _look(info, x, "x", stream, (handle.num_recv_rows, config.hidden), COMBINE_DTYPES)
    _check_row(info, rows, "x")
    weights = None
    if topk_weights is not None:
        weights = _look(info, topk_weights, "topk_weights", stream, (handle.num_recv_rows, config.num_topk), ("float32",))
    given: Sequence[Any] = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise EPInputError(f"bias: {len(given)} arrays were given; at most two can be added")
    shape, dtypes = (handle.num_tokens, config.hidden), (rows.dtype,)
    biases = tuple(_look(info, array, f"bias[{i}]", stream, shape, dtypes) for i, array in enumerate(given))
    for i, view in enumerate(biases):
        _check_row(info, view, f"bias[{i}]")
    return CombineInputs(rows, handle, weights, biases)


def low_latency_dispatch_inputs(
    info: BufferInfo,
    stream: int | None,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    recv_stats: Any,
    wait_stats: Any,
) -> LowLatencyDispatchInputs:
    """Check the arguments of `Buffer.low_latency_dispatch`, whose docstring names the rules."""
    config = info.config
    use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
    round_scale = flag(round_scale, "round_scale") or use_ue8m0
    rows = _look(info, x, "x", stream)
    if len(rows.shape) != 2 or rows.shape[1] != config.hidden or rows.dtype != "bfloat16":
        raise EPInputError(f"x is {rows.dtype} {list(rows.shape)}; expected bfloat16 [num_tokens, {config.hidden}]")
    _check_start(rows, "x")
    _check_tokens(info, rows)
    num_tokens = rows.shape[0]
    if use_fp8 and config.hidden % FP8_GROUP:
        raise EPInputError(f"hidden is {config.hidden}, no multiple of {FP8_GROUP}, the channels of a scale; pass use_fp8=False")
    if use_ue8m0 and not use_fp8:
        raise EPInputError("use_ue8m0 is a format of FP8 scales; pass use_fp8=True beside it")
    idx = _look(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    weights = recv = waits = None
    if topk_weights is not None:
        weights = _look(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    if recv_stats is not None:
        recv = _look(info, recv_stats, "cumulative_local_expert_recv_stats", stream, (config.num_local_experts,), ("int32",))
        _check_writable(info, recv, recv_stats, "cumulative_local_expert_recv_stats")
    if wait_stats is not None:
        waits = _look(info, wait_stats, "wait_recv_cost_stats", stream, (config.num_ranks,), ("int64",))
        _check_writable(info, waits, wait_stats, "wait_recv_cost_stats")
    return LowLatencyDispatchInputs(rows, idx, weights, use_fp8, round_scale, use_ue8m0, recv, waits)


def low_latency_combine_inputs(
    info: BufferInfo,
    stream: int | None,
    y: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    allow_multiple_reduction: bool,
    out: Any,
) -> LowLatencyCombineInputs:
    """Check the arguments of `Buffer.low_latency_combine`, whose docstring names the rules."""
    config = info.config
    reduce_early = flag(allow_multiple_reduction, "allow_multiple_reduction")
    check_low_latency_handle(info, handle)
    rows = _look(info, y, "y", stream, (config.num_local_experts, config.num_max_recv_tokens, config.hidden), ("bfloat16",))
    _check_start(rows, "y")
    idx = _look(info, topk_idx, "topk_idx", stream, (handle.num_tokens, config.num_topk), ("int32", "int64"))
    weights = _look(info, topk_weights, "topk_weights", stream, (handle.num_tokens, config.num_topk), ("float32",))
    into = None
    if out is not None:
        into = _look(info, out, "out", stream, (handle.num_tokens, config.hidden), ("bfloat16",))
        _check_writable(info, into, out, "out")
        _check_start(into, "out")
        if into.ptr < rows.ptr + rows.nbytes and rows.ptr < into.ptr + into.nbytes:
            raise EPInputError("out lies in the memory of y, which is still read while sums are written; pass another array")
    return LowLatencyCombineInputs(rows, idx, weights, handle, reduce_early, into)


def check_low_latency_handle(info: BufferInfo, handle: Any) -> None:
    """Raise EPInputError unless a low-latency dispatch of this Buffer returned it."""
    if not isinstance(handle, LowLatencyHandle):
        raise EPInputError(f"handle is a {type(handle).__name__}; expected the .handle of a LowLatencyDispatchResult")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle comes from another Buffer; use the one whose low_latency_dispatch returned it")


def _look(
    info: BufferInfo, array: Any, what: str, stream: int | None, shape: tuple[int, ...] | None = None, dtypes: Sequence[str] = ()
) -> View:
    """An argument as a View; where a shape is given, it and the dtype are checked."""
    try:
        view = frameworks.framework_of(array, what).view(array, what, stream)
    except EPError:
        raise
    except Exception as error:  # what the array's library raises: of DLPack producers, it may be anything
        raise frameworks.not_shown(array, what, error) from error
    if view.device != info.device and view.device != HOST:
        here = "host memory (the host backend has no GPU)" if info.device == HOST else f"GPU {info.device}"
        raise EPInputError(f"{what} is on GPU {view.device}, but this buffer works in {here}; move the array first")
    if view.ptr % 8 and view.device != HOST and view.ptr % view.itemsize:
        raise EPInputError(
            f"{what} starts at an address that is not a multiple of {view.itemsize} bytes, its element; pass a copy"
        )
    if shape is not None:
        if view.shape != shape:
            raise EPInputError(f"{what} has shape {list(view.shape)}; expected {list(shape)}")
        if view.dtype not in dtypes:
            raise EPInputError(f"{what} has dtype {view.dtype}; expected {' or '.join(dtypes)}")
    return view


def _check_tokens(info: BufferInfo, rows: View) -> None:
    if rows.shape[0] > info.config.num_max_tokens_per_rank:
        raise EPInputError(
            f"x has {rows.shape[0]} tokens, more than num_max_tokens_per_rank={info.config.num_max_tokens_per_rank}; "
            f"split the batch or make the buffer larger"
        )


def _check_writable(info: BufferInfo, view: View, array: Any, what: str) -> None:
    """What is written to has to be where the work is done, and the caller's to change."""
    if not view.framework.is_writable(array):
        raise EPInputError(f"{what} is read-only, and would be written to; pass an array that may be changed (JAX has none)")
    if view.device != info.device:
        raise EPInputError(
            f"{what} is in host memory, but this buffer works on GPU {info.device} and writes to it; move it there"
        )


def _check_row(info: BufferInfo, view: View, what: str) -> None:
    row_bytes = view.row_bytes
    if row_bytes % ROW_ALIGNMENT:
        raise EPInputError(f"{what}: a row has {row_bytes} bytes; expected a multiple of {ROW_ALIGNMENT}")
    if row_bytes > info.config.row_bytes:
        raise EPInputError(
            f"{what} has dtype {view.dtype}, wider than this buffer's {info.config.dtype}; convert it, or make a buffer with "
            f"dtype={view.dtype!r}"
        )
    _check_start(view, what)


def _check_start(view: View, what: str) -> None:
    if view.ptr % ROW_ALIGNMENT and view.device != HOST:
        raise EPInputError(f"{what} starts at an address that is not a multiple of {ROW_ALIGNMENT} bytes; pass a copy")


def _check_handle(info: BufferInfo, handle: Any) -> None:
    if not isinstance(handle, DispatchHandle):
        raise EPInputError(f"handle is a {type(handle).__name__}; expected the .handle of a DispatchResult")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle comes from another Buffer; use the one whose dispatch returned it")
