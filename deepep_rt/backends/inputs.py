"""Turn the arguments of a call into Views, and check them, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import argument_error, flag, whole_number
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
    """Check the arguments of `Buffer.dispatch`. Its docstring names the rules."""
    config = info.config
    rows = _as_view(info, x, "x", stream)
    if len(rows.shape) != 2 or rows.shape[1] != config.hidden:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected [num_tokens, {config.hidden}]. Pass rows of this Buffer's hidden"
        )
    _check_row(info, rows, "x")
    _check_tokens(info, rows)
    num_tokens = rows.shape[0]
    if handle is None and topk_idx is None:
        raise EPInputError(
            "topk_idx=None; expected expert numbers, or a handle. Pass topk_idx, or the handle of an earlier dispatch"
        )
    if num_worst_tokens is not None:
        largest = "num_max_recv_tokens of the Buffer" if config.has_network else "num_ranks * num_max_tokens_per_rank"
        remedy = f"The largest is {largest}; None leaves the number to what arrives."
        num_worst_tokens = whole_number(num_worst_tokens, "num_worst_tokens", 0, config.num_max_recv_tokens, remedy=remedy)
    expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MOST_ALIGNMENT)
    if handle is not None:
        _check_known_routing(info, rows, handle, num_worst_tokens)
    idx = weights = None
    if topk_idx is not None:
        idx = _as_view(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    if topk_weights is not None:
        if idx is None:
            raise EPInputError(
                "topk_idx=None; expected expert numbers for topk_weights, which travel to their experts. Pass topk_idx too"
            )
        weights = _as_view(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    scales = None if x_scales is None else _scales_view(info, x_scales, stream, num_tokens)
    if handle is not None and expert_alignment != 1:
        raise EPInputError(
            f"expert_alignment={expert_alignment}; expected 1 with a handle, which has counts already. Pass it to the first dispatch"
        )
    return DispatchInputs(rows, idx, weights, scales, handle, num_worst_tokens, expert_alignment)


def _check_known_routing(info: BufferInfo, rows: View, handle: DispatchHandle, num_worst_tokens: int | None) -> None:
    _check_handle(info, handle)
    if rows.shape[0] != handle.num_tokens:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected {handle.num_tokens} tokens, as the handle has. Pass as many, or leave out the handle"
        )
    if num_worst_tokens not in (None, handle.num_recv_rows):
        raise EPInputError(
            f"num_worst_tokens={num_worst_tokens}; expected {handle.num_recv_rows}, the rows of the handle. Leave it out with a handle"
        )


def _scales_view(info: BufferInfo, x_scales: Any, stream: int | None, num_tokens: int) -> View:
    scales, most = _as_view(info, x_scales, "x_scales", stream), info.config.scale_bytes
    if len(scales.shape) != 2 or scales.shape[0] != num_tokens:
        raise EPInputError(
            f"x_scales.shape={list(scales.shape)}; expected [{num_tokens}, scales of a row]. Pass one row of scales for each token"
        )
    if scales.ptr % 4 and scales.device != HOST:
        raise _misaligned(scales, "x_scales", 4)
    if scales.row_bytes % 4 or scales.row_bytes > most:
        raise EPInputError(
            f"x_scales has {scales.row_bytes} bytes a row; expected a multiple of 4 up to {most}. "
            f"Pass hidden // 128 float32, or packed UE8M0"
        )
    return scales


def combine_inputs(
    info: BufferInfo, stream: int | None, x: Any, handle: DispatchHandle, topk_weights: Any, bias: Any
) -> CombineInputs:
    """Check the arguments of `Buffer.combine`. Its docstring names the rules."""
    config = info.config
    _check_handle(info, handle)
    rows = _as_view(info, x, "x", stream, (handle.num_recv_rows, config.hidden), COMBINE_DTYPES)
    _check_row(info, rows, "x")
    weights = None
    if topk_weights is not None:
        weights = _as_view(info, topk_weights, "topk_weights", stream, (handle.num_recv_rows, config.num_topk), ("float32",))
    given: Sequence[Any] = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise EPInputError(f"len(bias)={len(given)}; expected at most 2 arrays. Add them up first")
    shape, dtypes = (handle.num_tokens, config.hidden), (rows.dtype,)
    biases = tuple(_as_view(info, array, f"bias[{i}]", stream, shape, dtypes) for i, array in enumerate(given))
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
    """Check the arguments of `Buffer.low_latency_dispatch`. Its docstring names the rules."""
    config = info.config
    use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
    round_scale = flag(round_scale, "round_scale") or use_ue8m0
    rows = _as_view(info, x, "x", stream)
    if len(rows.shape) != 2 or rows.shape[1] != config.hidden or rows.dtype != "bfloat16":
        raise EPInputError(
            f"x.dtype={rows.dtype}, x.shape={list(rows.shape)}; expected bfloat16 [num_tokens, {config.hidden}]. Convert x"
        )
    _check_start(rows, "x")
    _check_tokens(info, rows)
    num_tokens = rows.shape[0]
    if use_fp8 and config.hidden % FP8_GROUP:
        raise EPInputError(f"hidden={config.hidden}; expected a multiple of {FP8_GROUP} for FP8 scales. Pass use_fp8=False")
    if use_ue8m0 and not use_fp8:
        raise EPInputError("use_ue8m0=True; expected use_fp8=True with it, because it is a format of FP8 scales. Pass both")
    idx = _as_view(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    weights = recv = waits = None
    if topk_weights is not None:
        weights = _as_view(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    if recv_stats is not None:
        recv = _as_view(info, recv_stats, "cumulative_local_expert_recv_stats", stream, (config.num_local_experts,), ("int32",))
        _check_writable(info, recv, recv_stats, "cumulative_local_expert_recv_stats")
    if wait_stats is not None:
        waits = _as_view(info, wait_stats, "wait_recv_cost_stats", stream, (config.num_ranks,), ("int64",))
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
    """Check the arguments of `Buffer.low_latency_combine`. Its docstring names the rules."""
    config = info.config
    reduce_early = flag(allow_multiple_reduction, "allow_multiple_reduction")
    check_low_latency_handle(info, handle)
    rows = _as_view(info, y, "y", stream, (config.num_local_experts, config.worst_recv_tokens, config.hidden), ("bfloat16",))
    _check_start(rows, "y")
    idx = _as_view(info, topk_idx, "topk_idx", stream, (handle.num_tokens, config.num_topk), ("int32", "int64"))
    weights = _as_view(info, topk_weights, "topk_weights", stream, (handle.num_tokens, config.num_topk), ("float32",))
    into = None
    if out is not None:
        into = _as_view(info, out, "out", stream, (handle.num_tokens, config.hidden), ("bfloat16",))
        _check_writable(info, into, out, "out")
        _check_start(into, "out")
        if into.ptr < rows.ptr + rows.nbytes and rows.ptr < into.ptr + into.nbytes:
            raise EPInputError(
                "out overlaps y; expected separate memory, because y is read while out is written. Pass another array"
            )
    return LowLatencyCombineInputs(rows, idx, weights, handle, reduce_early, into)


def check_low_latency_handle(info: BufferInfo, handle: Any) -> None:
    """Raise EPInputError unless a low-latency dispatch of this Buffer returned it."""
    if not isinstance(handle, LowLatencyHandle):
        raise argument_error(handle, "handle", "the .handle of a LowLatencyDispatchResult", "Pass that.")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle is of another Buffer; expected one of this Buffer's low_latency_dispatch. Call that Buffer")


def _as_view(
    info: BufferInfo, array: Any, what: str, stream: int | None, shape: tuple[int, ...] | None = None, dtypes: Sequence[str] = ()
) -> View:
    """Return an argument as a View. If a shape is given, check it and the dtype."""
    try:
        view = frameworks.framework_of(array, what).view(array, what, stream)
    except EPError:
        raise
    except Exception as error:  # what the array's library raises: of DLPack producers, it may be anything
        raise frameworks.unreadable(array, what, error) from error
    if view.device != info.device and view.device != HOST:
        here = "host memory (the host backend has no GPU)" if info.device == HOST else f"GPU {info.device}"
        raise EPInputError(f"{what} is on GPU {view.device}; expected {here}, where this Buffer works. Move the array")
    if view.ptr % 8 and view.device != HOST and view.ptr % view.itemsize:
        raise _misaligned(view, what, view.itemsize)
    if shape is not None:
        if view.shape != shape:
            raise EPInputError(f"{what}.shape={list(view.shape)}; expected {list(shape)}. Pass an array of that shape")
        if view.dtype not in dtypes:
            raise EPInputError(f"{what}.dtype={view.dtype}; expected {' or '.join(dtypes)}. Convert it")
    return view


def _check_tokens(info: BufferInfo, rows: View) -> None:
    if rows.shape[0] > info.config.num_max_tokens_per_rank:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected at most {info.config.num_max_tokens_per_rank} tokens (num_max_tokens_per_rank). "
            f"Split the batch, or make a larger Buffer"
        )


def _check_writable(info: BufferInfo, view: View, array: Any, what: str) -> None:
    """Raise EPInputError if the call cannot write to an array."""
    if not view.framework.is_writable(array):
        raise EPInputError(f"{what} is read-only; expected an array that this call can write to (JAX has none). Pass another one")
    if view.device != info.device:
        raise EPInputError(f"{what} is in host memory; expected GPU {info.device}, which writes to it. Move the array")


def _check_row(info: BufferInfo, view: View, what: str) -> None:
    row_bytes = view.row_bytes
    if row_bytes % ROW_ALIGNMENT:
        raise EPInputError(f"{what} has {row_bytes} bytes a row; expected a multiple of {ROW_ALIGNMENT}. Pad the rows")
    if row_bytes > info.config.row_bytes:
        raise EPInputError(
            f"{what}.dtype={view.dtype}; expected at most the width of {info.config.dtype}, this Buffer's dtype. Convert it, or make a "
            f"Buffer with dtype={view.dtype!r}"
        )
    _check_start(view, what)


def _check_start(view: View, what: str) -> None:
    if view.ptr % ROW_ALIGNMENT and view.device != HOST:
        raise _misaligned(view, what, ROW_ALIGNMENT)


def _misaligned(view: View, what: str, alignment: int) -> EPInputError:
    return EPInputError(f"{what} starts at address {view.ptr:#x}; expected a multiple of {alignment} bytes. Pass a copy")


def _check_handle(info: BufferInfo, handle: Any) -> None:
    if not isinstance(handle, DispatchHandle):
        raise argument_error(handle, "handle", "the .handle of a DispatchResult", "Pass that.")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle is of another Buffer; expected one of this Buffer's dispatch. Call that Buffer")
