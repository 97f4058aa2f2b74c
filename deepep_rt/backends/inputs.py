"""Turn the arguments of calls into Views, and check them, before anything is launched.

The functions come in three parts: what all calls ask of an array, throughput calls, and low-latency calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import argument_error, choice, flag, whole_number
from ..arrays import frameworks
from ..arrays.compressed_rows import COMPRESSIONS, LOW_LATENCY_CHANNELS
from ..arrays.dtypes import FP8_GROUP
from ..arrays.host_memory import values_of
from ..arrays.view import HOST, View
from ..config import COMBINE_DTYPES, MAX_ALIGNMENT, MAX_ROW_BYTES, MAX_SCALE_BYTES, ROW_ALIGNMENT, TILE_ROWS, Config, tile_rows_of
from ..errors import EPError, EPInputError
from ..kernels.regions import align_up
from ..results import DispatchHandle, DispatchResult, LowLatencyHandle
from .base import BufferInfo, CombineInputs, DispatchInputs, LowLatencyCombineInputs, LowLatencyDispatchInputs

_PACKED_DTYPES = ("uint8", "int8")
_MOST_ROWS = (1 << 31) - 1  # kernels count rows in 32 bits


def as_view(
    info: BufferInfo, array: Any, what: str, stream: int | None, shape: tuple[int, ...] | None = None, dtypes: Sequence[str] = ()
) -> View:
    """Return an argument as a View. If a shape is given, check it and the dtype."""
    try:
        # Each call comes here several times, and a known class needs no function.
        framework = frameworks.FRAMEWORK_OF_CLASS.get(type(array)) or frameworks.framework_of(array, what)
        view = framework.view(array, what, stream)
    except EPError:
        raise
    except Exception as error:  # what the array's library raises: of DLPack producers, it may be anything
        raise frameworks.unreadable(array, what, error) from error
    if view.device != info.device and view.device != HOST:
        here = "host memory (the host backend has no GPU)" if info.device == HOST else f"GPU {info.device}"
        raise EPInputError(f"{what} is on GPU {view.device}; expected {here}, where this Buffer works. Move the array")
    if view.ptr % 8 and view.device != HOST and view.ptr % view.itemsize:
        raise misaligned(view, what, view.itemsize)
    if shape is not None:
        if view.shape != shape:
            raise EPInputError(f"{what}.shape={list(view.shape)}; expected {list(shape)}. Pass an array of that shape")
        if view.dtype not in dtypes:
            raise EPInputError(f"{what}.dtype={view.dtype}; expected {' or '.join(dtypes)}. Convert it")
    return view


def check_tokens(info: BufferInfo, rows: View) -> None:
    """Raise EPInputError if there are more tokens than the Buffer takes."""
    if rows.shape[0] > info.config.num_max_tokens_per_rank:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected at most {info.config.num_max_tokens_per_rank} tokens (num_max_tokens_per_rank). "
            f"Split the batch, or make a larger Buffer"
        )


def check_writable(info: BufferInfo, view: View, array: Any, what: str) -> None:
    """Raise EPInputError if the call cannot write to an array."""
    if not view.framework.is_writable(array):
        raise EPInputError(f"{what} is read-only; expected an array that this call can write to (JAX has none). Pass another one")
    if view.device != info.device:
        raise EPInputError(f"{what} is in host memory; expected GPU {info.device}, which writes to it. Move the array")


def check_row(info: BufferInfo, view: View, what: str) -> None:
    """Raise EPInputError unless rows have a size and a start that kernels can copy."""
    row_bytes = view.row_bytes
    if row_bytes % ROW_ALIGNMENT:
        raise EPInputError(f"{what} has {row_bytes} bytes a row; expected a multiple of {ROW_ALIGNMENT}. Pad the rows")
    if row_bytes > info.config.row_bytes:
        raise EPInputError(
            f"{what}.dtype={view.dtype}; expected at most the width of {info.config.dtype}, this Buffer's dtype. Convert it, or make a "
            f"Buffer with dtype={view.dtype!r}"
        )
    check_start(view, what)


def check_start(view: View, what: str) -> None:
    """Raise EPInputError unless an array starts where kernels can read vectors."""
    if view.ptr % ROW_ALIGNMENT and view.device != HOST:
        raise misaligned(view, what, ROW_ALIGNMENT)


def misaligned(view: View, what: str, alignment: int) -> EPInputError:
    """Make the error for an array that starts at a wrong address."""
    return EPInputError(f"{what} starts at address {view.ptr:#x}; expected a multiple of {alignment} bytes. Pass a copy")


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
    layout: str | None = None,
    zero_padding: bool = False,
    scales_layout: str = "row",
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    signals: bool = False,
) -> DispatchInputs:
    """Check the arguments of `Buffer.dispatch`. Its docstring names the rules."""
    config = info.config
    rows = as_view(info, x, "x", stream)
    is_packed = rows.dtype in _PACKED_DTYPES and rows.shape[1:] == (config.hidden // 2,)  # two numbers of 4 bits in a byte
    if len(rows.shape) != 2 or (rows.shape[1] != config.hidden and not is_packed):
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected [num_tokens, {config.hidden}], or [num_tokens, {config.hidden // 2}] of uint8 for "
            f"numbers of 4 bits. Pass rows of this Buffer's hidden"
        )
    check_row(info, rows, "x")
    check_tokens(info, rows)
    num_tokens = rows.shape[0]
    if handle is None and topk_idx is None:
        raise EPInputError(
            "topk_idx=None; expected expert numbers, or a handle. Pass topk_idx, or the handle of an earlier dispatch"
        )
    expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MAX_ALIGNMENT)
    layout = _check_layout(info, layout, handle)
    if num_worst_tokens is not None:
        num_worst_tokens = check_worst(config, num_worst_tokens, layout, expert_alignment, handle)
    if handle is not None:
        _check_known_routing(rows, handle, num_worst_tokens)
    idx = weights = None
    if topk_idx is not None:
        idx = as_view(info, topk_idx, "topk_idx", stream, (num_tokens, config.num_topk), ("int32", "int64"))
    if topk_weights is not None:
        if idx is None:
            raise EPInputError(
                "topk_idx=None; expected expert numbers for topk_weights, which travel to their experts. Pass topk_idx too"
            )
        weights = as_view(info, topk_weights, "topk_weights", stream, (num_tokens, config.num_topk), ("float32",))
    scales = None if x_scales is None else _scales_view(info, x_scales, stream, rows)
    zero_padding = flag(zero_padding, "zero_padding")
    use_fp8, use_ue8m0 = flag(use_fp8, "use_fp8"), flag(use_ue8m0, "use_ue8m0")
    round_scale = flag(round_scale, "round_scale") or use_ue8m0
    if use_fp8 or round_scale:
        _check_fp8(rows, scales, use_fp8, use_ue8m0)
    by_column = choice(scales_layout, "scales_layout", ("row", "column")) == "column"
    if layout == "token" and (zero_padding or by_column):
        name = "zero_padding=True" if zero_padding else "scales_layout='column'"
        raise EPInputError(f"{name}; expected layout='expert' with it. Pass both")
    if by_column and (use_ue8m0 or (scales is not None and scales.itemsize != 4)):
        given = "use_ue8m0=True" if scales is None else f"x_scales.dtype={scales.dtype}"
        raise EPInputError(
            f"{given}; expected a type of 4 bytes with scales_layout='column', because its columns are 4-byte words. "
            f"Pass float32, or int32 of four packed UE8M0"
        )
    if handle is not None and expert_alignment != 1:
        raise EPInputError(
            f"expert_alignment={expert_alignment}; expected 1 with a handle, which has counts already. Pass it to the first dispatch"
        )
    if signals := flag(signals, "signals"):
        _check_signals(layout, tile_rows_of(expert_alignment) if handle is None else handle.tile_rows, expert_alignment)
    return DispatchInputs(
        rows,
        idx,
        weights,
        scales,
        handle,
        num_worst_tokens,
        expert_alignment,
        layout,
        zero_padding,
        by_column,
        use_fp8,
        round_scale,
        use_ue8m0,
        signals,
    )


def _check_signals(layout: str, tile_rows: int, expert_alignment: int) -> None:
    if layout != "expert":
        raise EPInputError("signals=True; expected layout='expert' with it, because tiles have rows of one expert. Pass both")
    if not tile_rows:
        raise EPInputError(
            f"signals=True with expert_alignment={expert_alignment}; expected a multiple of {min(TILE_ROWS)}, so that tiles have rows of "
            f"one expert. Pass expert_alignment={max(TILE_ROWS)} to the dispatch that makes the routing"
        )


def _check_fp8(rows: View, scales: View | None, use_fp8: bool, use_ue8m0: bool) -> None:
    hidden = rows.shape[1]
    if not use_fp8:
        raise EPInputError("round_scale or use_ue8m0=True; expected use_fp8=True with it, whose scales it means. Pass both")
    if rows.dtype not in COMBINE_DTYPES:
        raise EPInputError(f"x.dtype={rows.dtype}; expected {' or '.join(COMBINE_DTYPES)} with use_fp8=True. Convert x")
    if scales is not None:
        raise EPInputError("x_scales with use_fp8=True; expected none, because the call makes them. Leave one of them out")
    group = FP8_GROUP * (4 if use_ue8m0 else 1)  # a row of scales has whole 4-byte words
    if hidden % group:
        raise EPInputError(f"hidden={hidden}; expected a multiple of {group} for these FP8 scales. Pass use_fp8=False")


def _check_layout(info: BufferInfo, layout: str | None, handle: DispatchHandle | None) -> str:
    """Return the layout of the call's result: the caller's, or that of the handle."""
    if layout is not None:
        layout = choice(layout, "layout", ("token", "expert"))
    if handle is None:
        return layout or "token"
    check_handle(info, handle)
    if layout not in (None, handle.layout):
        raise EPInputError(f"layout={layout!r}; expected {handle.layout!r}, the layout of the handle. Leave it out with a handle")
    return handle.layout


def most_recv_rows(config: Config, layout: str, expert_alignment: int) -> int:
    """Return the most rows that a dispatch can give a rank: a row for each token, or for each choice with padding, up to a multiple of
    `expert_alignment`.
    """
    if layout == "token":
        return config.num_max_recv_tokens
    rows = config.num_max_recv_tokens * config.num_topk + config.num_local_experts * (expert_alignment - 1)
    return min(align_up(rows, expert_alignment), _MOST_ROWS)


def check_worst(
    config: Config, num_worst_tokens: int, layout: str, expert_alignment: int, handle: DispatchHandle | None = None
) -> int:
    """Check the rows that a dispatch shall have room for."""
    # Only the dispatch that made the handle had its alignment. A later check compares with the rows of the handle.
    most = max(most_recv_rows(config, layout, expert_alignment), 0 if handle is None else handle.num_recv_rows)
    largest = "num_max_recv_tokens of the Buffer" if config.has_network else "num_ranks * num_max_tokens_per_rank"
    if layout == "expert":
        largest = f"num_topk times {largest}, and the padding of each expert"
    remedy = f"The largest is {largest}; None leaves the number to what arrives."
    return whole_number(num_worst_tokens, "num_worst_tokens", 0, most, remedy=remedy)


def _check_known_routing(rows: View, handle: DispatchHandle, num_worst_tokens: int | None) -> None:
    if rows.shape[0] != handle.num_tokens:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected {handle.num_tokens} tokens, as the handle has. Pass as many, or leave out the handle"
        )
    if num_worst_tokens not in (None, handle.num_recv_rows):
        raise EPInputError(
            f"num_worst_tokens={num_worst_tokens}; expected {handle.num_recv_rows}, the rows of the handle. Leave it out with a handle"
        )


def _scales_view(info: BufferInfo, x_scales: Any, stream: int | None, rows: View) -> View:
    scales, num_tokens = as_view(info, x_scales, "x_scales", stream), rows.shape[0]
    most = info.config.most_scale_bytes(rows.row_bytes)
    if len(scales.shape) != 2 or scales.shape[0] != num_tokens:
        raise EPInputError(
            f"x_scales.shape={list(scales.shape)}; expected [{num_tokens}, scales of a row]. Pass one row of scales for each token"
        )
    if scales.ptr % 4 and scales.device != HOST:
        raise misaligned(scales, "x_scales", 4)
    if scales.row_bytes % 4 or scales.row_bytes > most:
        raise EPInputError(
            f"x_scales has {scales.row_bytes} bytes a row; expected a multiple of 4 up to {most}. "
            f"Pass hidden // 128 float32, packed UE8M0, or a byte for 16 channels of rows half as wide as this Buffer's"
        )
    return scales


def combine_inputs(
    info: BufferInfo,
    stream: int | None,
    x: Any,
    handle: DispatchHandle,
    topk_weights: Any,
    bias: Any,
    weighted: bool = False,
    reduce: str = "rank",
    compress: str | None = None,
    y_ready: Any = None,
) -> CombineInputs:
    """Check the arguments of `Buffer.combine`. Its docstring names the rules."""
    config = info.config
    check_handle(info, handle)
    rows = combine_rows(info, stream, x, "x", handle)
    weights = None if topk_weights is None else weights_of_rows(info, stream, topk_weights, "topk_weights", handle)
    if flag(weighted, "weighted"):
        if handle.layout == "token":
            raise EPInputError(
                "weighted=True with a handle of layout='token'; expected a handle of layout='expert', whose rows have one weight each. "
                "Multiply the rows, or dispatch with layout='expert'"
            )
        if weights is None:
            raise EPInputError("topk_weights=None; expected a weight for each row with weighted=True. Pass the recv_topk_weights")
    if choice(reduce, "reduce", ("rank", "topk")) == "topk" and handle.layout == "token":
        raise EPInputError(
            "reduce='topk' with a handle of layout='token'; expected a handle of layout='expert', which has a row for each choice. "
            "Dispatch with layout='expert'"
        )
    compress = compression(config, compress, reduce)
    biases = bias_views(info, stream, bias, handle, rows.dtype)
    words = None if y_ready is None else _words_of_tiles(info, stream, y_ready, rows, handle)
    return CombineInputs(rows, handle, weights, biases, bool(weighted), reduce, compress, words)


def _words_of_tiles(info: BufferInfo, stream: int | None, y_ready: Any, rows: View, handle: DispatchHandle) -> View:
    """Check the words of a combine's tiles."""
    if handle.layout == "token" or not handle.tile_rows:
        raise EPInputError(
            f"y_ready with a handle of layout={handle.layout!r} without tiles; expected a handle of layout='expert' whose "
            f"expert_alignment is a multiple of {min(TILE_ROWS)}. Dispatch so, or leave y_ready out"
        )
    words = as_view(info, y_ready, "y_ready", stream, (-(-handle.num_recv_rows // handle.tile_rows),), ("int32",))
    for view, name in ((words, "y_ready"), (rows, "x")):
        if view.device != info.device:
            raise EPInputError(
                f"{name} is in host memory; expected GPU {info.device}, where the product writes it. Move the array"
            )
    if info.device == HOST and not (values_of(words) == DispatchResult.signal).all():
        raise EPInputError(
            f"y_ready has words other than {DispatchResult.signal}; expected all rows, because the host backend waits for no product. "
            f"Write the rows first"
        )
    return words


def combine_rows(
    info: BufferInfo, stream: int | None, array: Any, name: str, handle: DispatchHandle, dtypes: Sequence[str] = COMBINE_DTYPES
) -> View:
    """Check the rows of a combine."""
    rows = as_view(info, array, name, stream, (handle.num_recv_rows, info.config.hidden), dtypes)
    check_row(info, rows, name)
    return rows


def weights_of_rows(info: BufferInfo, stream: int | None, array: Any, name: str, handle: DispatchHandle) -> View:
    """Check the weights of a combine's rows."""
    shape = (handle.num_recv_rows,) if handle.layout == "expert" else (handle.num_recv_rows, info.config.num_topk)
    return as_view(info, array, name, stream, shape, ("float32",))


def bias_views(info: BufferInfo, stream: int | None, bias: Any, handle: DispatchHandle, dtype: str | None) -> tuple[View, ...]:
    """Check the biases of a combine. `dtype` is that of its rows; None: the first bias decides."""
    given: Sequence[Any] = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise EPInputError(f"len(bias)={len(given)}; expected at most 2 arrays. Add them up first")
    shape = handle.num_tokens, info.config.hidden
    views: tuple[View, ...] = ()
    for i, array in enumerate(given):
        view = as_view(info, array, f"bias[{i}]", stream, shape, COMBINE_DTYPES if dtype is None else (dtype,))
        check_row(info, view, f"bias[{i}]")
        dtype, views = view.dtype, (*views, view)
    return views


def compression(config: Config, compress: str | None, reduce: str) -> str | None:
    """Return the form of combine's rows on the way, checked."""
    if compress is None:
        return None
    compress = choice(compress, "compress", COMPRESSIONS)
    if reduce == "topk":
        raise EPInputError(
            f"compress={compress!r} with reduce='topk'; expected reduce='rank', because compression changes the bits that reduce='topk' "
            f"keeps. Leave one of them out"
        )
    if config.hidden % FP8_GROUP:
        raise EPInputError(f"hidden={config.hidden}; expected a multiple of {FP8_GROUP} with compress={compress!r}. Leave it out")
    return compress


def check_handle(info: BufferInfo, handle: Any) -> None:
    """Raise EPInputError unless an object is a handle of this Buffer's dispatch."""
    if not isinstance(handle, DispatchHandle):
        raise argument_error(handle, "handle", "the .handle of a DispatchResult", "Pass that.")
    if handle.buffer_serial != info.serial:
        raise EPInputError("handle is of another Buffer; expected one of this Buffer's dispatch. Call that Buffer")
    check_generation(info, handle)


def check_generation(info: BufferInfo, handle: DispatchHandle | LowLatencyHandle) -> None:
    """Raise EPInputError if a handle is older than the generation of a Buffer with slots."""
    if handle.born < info.since:
        raise old_routing()


def old_routing(then: int | None = None, now: int | None = None) -> EPInputError:
    """Make the error about a routing of an older generation."""
    which = "an older generation" if then is None else f"generation {then}, and the Buffer is in generation {now}"
    return EPInputError(
        f"handle is of {which}; expected one of a dispatch since shrink() or admit(). Its rows may belong to ranks that are gone. "
        f"Dispatch again"
    )


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
    x_scales: Any = None,
    num_max_tokens: int | None = None,
) -> LowLatencyDispatchInputs:
    """Check the arguments of `Buffer.low_latency_dispatch`. Its docstring names the rules."""
    config = info.config
    use_fp8, round_scale, use_ue8m0 = form_of_dispatch(info, use_fp8, round_scale, use_ue8m0)
    rows, scales = as_view(info, x, "x", stream), None
    is_opaque = rows.dtype != "bfloat16" or x_scales is not None
    if is_opaque:
        scales = _opaque_rows(info, stream, rows, x_scales, use_fp8)
    elif len(rows.shape) != 2 or rows.shape[1] != config.hidden:
        raise EPInputError(
            f"x.dtype={rows.dtype}, x.shape={list(rows.shape)}; expected bfloat16 [num_tokens, {config.hidden}]. Convert x"
        )
    check_start(rows, "x")
    check_tokens(info, rows)
    num_tokens, most = rows.shape[0], config.num_max_tokens_per_rank
    if num_max_tokens is not None and num_tokens > (most := max_tokens_of(info, num_max_tokens)):
        raise EPInputError(
            f"num_max_tokens={most}; expected at least {num_tokens}, the tokens of this rank. Pass the most of all ranks"
        )
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
    return LowLatencyDispatchInputs(rows, idx, weights, use_fp8, round_scale, use_ue8m0, recv, waits, is_opaque, scales, most)


def max_tokens_of(info: BufferInfo, num_max_tokens: int | None) -> int:
    """Return the most tokens of a rank in a low-latency dispatch. All ranks give the same."""
    most = info.config.num_max_tokens_per_rank
    if num_max_tokens is None:
        return most
    remedy = "The largest is num_max_tokens_per_rank of the Buffer; None means that."
    return whole_number(num_max_tokens, "num_max_tokens", 1, most, remedy=remedy)


def _opaque_rows(info: BufferInfo, stream: int | None, rows: View, x_scales: Any, use_fp8: bool) -> View | None:
    """Check rows that travel as they are. Return their scales."""
    hidden, given = info.config.hidden, f"x.dtype={rows.dtype}, x.shape={list(rows.shape)}"
    if len(rows.shape) != 2 or rows.itemsize != 1 or not (rows.dtype in _PACKED_DTYPES or rows.shape[1] == hidden):
        with_scales = " without x_scales" if rows.dtype == "bfloat16" else ""
        raise EPInputError(
            f"{given}; expected [num_tokens, {hidden}] of bfloat16{with_scales}, or quantised rows: [num_tokens, {hidden}] of a type of 1 "
            f"byte, or [num_tokens, n] of uint8 or int8. Convert x"
        )
    if use_fp8:
        raise EPInputError(
            f"{given} with use_fp8=True; expected bfloat16, which the call converts. Pass use_fp8=False: quantised rows travel as they are"
        )
    scales = None
    if x_scales is not None:
        scales = as_view(info, x_scales, "x_scales", stream)
        if len(scales.shape) != 2 or scales.shape[0] != rows.shape[0]:
            raise EPInputError(
                f"x_scales.shape={list(scales.shape)}; expected [{rows.shape[0]}, scales of a row]. Pass one row of scales for each token"
            )
    scale_bytes = scales.row_bytes if scales else 0
    if rows.row_bytes % ROW_ALIGNMENT or not rows.row_bytes:
        raise EPInputError(f"x has {rows.row_bytes} bytes a row; expected a multiple of {ROW_ALIGNMENT}. Pad the rows")
    if rows.row_bytes > MAX_ROW_BYTES or scale_bytes > MAX_SCALE_BYTES:
        raise EPInputError(
            f"x has {rows.row_bytes} bytes a row and x_scales {scale_bytes}; expected at most {MAX_ROW_BYTES} and {MAX_SCALE_BYTES}. Send "
            f"less"
        )
    if not info.config.fits_low_latency_message(rows.row_bytes, scale_bytes):
        raise EPInputError(
            f"x has {rows.row_bytes} bytes a row and x_scales {scale_bytes}; expected at most {2 * hidden} together, with 4 more for each "
            f"512, because messages have room for a row of bfloat16. Make a Buffer with a larger hidden, or send less"
        )
    return scales


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
    rows = expert_rows(info, stream, y, handle.capacity)
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


def expert_rows(info: BufferInfo, stream: int | None, y: Any, capacity: int) -> View:
    """Check the experts' rows of a combine. `capacity` is the handle's."""
    config = info.config
    rows = as_view(info, y, "y", stream, (config.num_local_experts, capacity, config.hidden), ("bfloat16",))
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
    check_generation(info, handle)
