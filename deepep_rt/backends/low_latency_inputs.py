"""Turn the arguments of low-latency calls into Views, and check them, before anything is launched."""

from __future__ import annotations

from typing import Any

from .._checks import argument_error, choice, flag
from ..arrays.compressed_rows import COMPRESSIONS, LOW_LATENCY_CHANNELS
from ..arrays.dtypes import FP8_GROUP
from ..arrays.view import View
from ..errors import EPInputError
from ..results import LowLatencyHandle
from .array_checks import as_view, check_start, check_tokens, check_writable
from .calls import BufferInfo, LowLatencyCombineInputs, LowLatencyDispatchInputs


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
    use_fp8, round_scale, use_ue8m0 = form_of_dispatch(info, use_fp8, round_scale, use_ue8m0)
    rows = as_view(info, x, "x", stream)
    if len(rows.shape) != 2 or rows.shape[1] != config.hidden or rows.dtype != "bfloat16":
        raise EPInputError(
            f"x.dtype={rows.dtype}, x.shape={list(rows.shape)}; expected bfloat16 [num_tokens, {config.hidden}]. Convert x"
        )
    check_start(rows, "x")
    check_tokens(info, rows)
    num_tokens = rows.shape[0]
    idx = as_view(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    weights = recv = waits = None
    if topk_weights is not None:
        weights = as_view(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    if recv_stats is not None:
        recv = as_view(info, recv_stats, "cumulative_local_expert_recv_stats", stream, (config.num_local_experts,), ("int32",))
        check_writable(info, recv, recv_stats, "cumulative_local_expert_recv_stats")
    if wait_stats is not None:
        waits = as_view(info, wait_stats, "wait_recv_cost_stats", stream, (config.num_ranks,), ("int64",))
        check_writable(info, waits, wait_stats, "wait_recv_cost_stats")
    return LowLatencyDispatchInputs(rows, idx, weights, use_fp8, round_scale, use_ue8m0, recv, waits)


def form_of_dispatch(info: BufferInfo, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> tuple[bool, bool, bool]:
    """Check the flags of a dispatch. Return them as Python's."""
    if not (use_fp8 is True and round_scale is False and use_ue8m0 is False):  # all but the defaults
        use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
        round_scale = flag(round_scale, "round_scale") or use_ue8m0
    if use_fp8 and info.config.hidden % FP8_GROUP:
        raise EPInputError(f"hidden={info.config.hidden}; expected a multiple of {FP8_GROUP} for FP8 scales. Pass use_fp8=False")
    if use_ue8m0 and not use_fp8:
        raise EPInputError("use_ue8m0=True; expected use_fp8=True with it, because it is a format of FP8 scales. Pass both")
    return use_fp8, round_scale, use_ue8m0


def low_latency_combine_inputs(
    info: BufferInfo,
    stream: int | None,
    y: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    allow_multiple_reduction: bool,
    out: Any,
    reduce: str | None = None,
    compress: str | None = None,
) -> LowLatencyCombineInputs:
    """Check the arguments of `Buffer.low_latency_combine`. Its docstring names the rules."""
    config = info.config
    reduce_early, compress = form_of_combine(info, allow_multiple_reduction, reduce, compress)
    check_low_latency_handle(info, handle)
    rows = expert_rows(info, stream, y)
    idx = as_view(info, topk_idx, "topk_idx", stream, (handle.num_tokens, config.num_topk), ("int32", "int64"))
    weights = as_view(info, topk_weights, "topk_weights", stream, (handle.num_tokens, config.num_topk), ("float32",))
    into = None
    if out is not None:
        into = sums_view(info, stream, out, handle.num_tokens)
        check_apart(into, rows)
    return LowLatencyCombineInputs(rows, idx, weights, handle, reduce_early, into, compress)


def form_of_combine(
    info: BufferInfo, allow_multiple_reduction: bool, reduce: str | None, compress: str | None
) -> tuple[bool, str | None]:
    """Check how the rows of a combine travel. Return whether an expert's rank adds up its rows, and the form of the rows."""
    reduce_early = allow_multiple_reduction is True or flag(allow_multiple_reduction, "allow_multiple_reduction")
    if reduce is not None:
        if choice(reduce, "reduce", ("rank", "topk")) == "rank" and not reduce_early:
            raise EPInputError("reduce='rank' with allow_multiple_reduction=False, which is reduce='topk'. Leave one of them out")
        reduce_early = reduce == "rank"
    if compress is not None:
        compress = choice(compress, "compress", COMPRESSIONS)
        _check_compression(info.config.hidden, compress, reduce_early)
    return reduce_early, compress


def expert_rows(info: BufferInfo, stream: int | None, y: Any) -> View:
    """Check the experts' rows of a combine."""
    config = info.config
    rows = as_view(info, y, "y", stream, (config.num_local_experts, config.worst_recv_tokens, config.hidden), ("bfloat16",))
    check_start(rows, "y")
    return rows


def sums_view(info: BufferInfo, stream: int | None, out: Any, num_tokens: int) -> View:
    """Check the caller's array for the result of a combine."""
    into = as_view(info, out, "out", stream, (num_tokens, info.config.hidden), ("bfloat16",))
    check_writable(info, into, out, "out")
    check_start(into, "out")
    return into


def check_apart(out: View, rows: View) -> None:
    """Raise EPInputError if the result of a combine overlaps its rows."""
    if out.ptr < rows.ptr + rows.nbytes and rows.ptr < out.ptr + out.nbytes:
        raise EPInputError("out overlaps y; expected separate memory, because y is read while out is written. Pass another array")


def _check_compression(hidden: int, compress: str, reduce_early: bool) -> None:
    if not reduce_early:
        raise EPInputError(
            f"compress={compress!r} with allow_multiple_reduction=False; expected True, because compression changes the bits that False "
            f"keeps. Leave one of them out"
        )
    if hidden % LOW_LATENCY_CHANNELS:
        raise EPInputError(
            f"hidden={hidden}; expected a multiple of {LOW_LATENCY_CHANNELS} with compress={compress!r} in low-latency calls. Leave it out"
        )


def check_low_latency_handle(info: BufferInfo, handle: Any) -> None:
    """Raise EPInputError unless a low-latency dispatch of this Buffer returned it."""
    if not isinstance(handle, LowLatencyHandle):
        raise argument_error(handle, "handle", "the .handle of a LowLatencyDispatchResult", "Pass that.")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle is of another Buffer; expected one of this Buffer's low_latency_dispatch. Call that Buffer")
