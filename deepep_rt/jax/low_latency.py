"""The low-latency calls inside `jax.jit`, for decoding. Rows and routing lie in XLA's memory.

XLA may therefore capture these calls in CUDA graphs (command buffers). It replays them without Python, and their results keep their memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._checks import argument_error
from ..arrays.dtypes import FP8_GROUP
from ..arrays.view import View
from ..backends.base import LowLatencyDispatchInputs, LowLatencyMemory
from ..backends.inputs import low_latency_combine_inputs, low_latency_dispatch_inputs
from ..buffer import Buffer, backend_of, check_buffer, info_of, low_latency_dispatch_into
from ..errors import EPInputError
from ..results import LowLatencyHandle as _Handle
from .arguments import NO_FRAMEWORK, as_array, as_int32, token_of, tokens_and_indices, traced_view
from .callbacks import Combined, call
from .device import check_threads


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "token"],
    meta_fields=["num_tokens", "has_weights", "capacity", "buffer"],
)
@dataclass(frozen=True)
class LowLatencyHandle:
    """The routing of a `low_latency_dispatch`, for its `low_latency_combine`: a pytree of arrays."""

    tables: jax.Array
    """The tables of the Buffer, `[n]` int32."""
    token: jax.Array
    """Orders later calls after the dispatch, `[1]` float32; see `after`."""
    num_tokens: int
    """Tokens that this rank dispatched."""
    has_weights: bool
    """Whether `topk_weights` travelled with the rows."""
    capacity: int
    """Rows for which each expert has room."""
    buffer: int
    """Number of the Buffer in this process."""


class LowLatencyDispatched(NamedTuple):
    """The rows that arrived at this rank, expert by expert, as in `LowLatencyDispatchResult`."""

    recv_x: jax.Array
    """Rows, `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16 or float8_e4m3fn; or as wide as `x`, and of its dtype."""
    recv_x_scales: jax.Array | None
    """Scales, `[num_local_experts, num_ranks * num_max_tokens, hidden // 128]` float32, or uint8 exponents; or those that came. Or None."""
    num_recv_tokens_per_expert: jax.Array
    """Rows of each local expert, `[num_local_experts]` int32."""
    handle: LowLatencyHandle


def low_latency_dispatch(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    x_scales: jax.Array | None = None,
    num_max_tokens: int | None = None,
    after: jax.Array | None = None,
) -> LowLatencyDispatched:
    """Call `Buffer.low_latency_dispatch` in a compiled function. For decoding: it has no gradient.

    XLA may capture it in a CUDA graph (command buffer). If a replay times out, the next call outside of graphs raises the error, or
    `Buffer.synchronize` does.

    Args:
        buffer: A Buffer with `low_latency=True`, on the GPU on which JAX computes. If JAX computes on the CPU, on the host backend.
        x: As in `Buffer.low_latency_dispatch`, with at least one row.
        topk_idx: See there. int64 becomes int32.
        topk_weights: See there.
        use_fp8: See there. If a rank's GPU has no FP8 (before sm_89), the call raises EPUnavailableError.
        round_scale: See there.
        use_ue8m0: See there.
        x_scales: See there.
        num_max_tokens: See there.
        after: The `token` of an earlier call. All ranks make this call after that one.

    Returns:
        Rows, scales, counts and the handle.

    Raises:
        EPInputError: While JAX traces the call, if a shape or dtype is wrong, or the Buffer was made without `low_latency=True`.
        EPUnavailableError: If XLA's threads may not call MPI (host backend). For `use_fp8`, when the call runs (see `errors`).

    Example:
        >>> sent = low_latency_dispatch(buffer, x, topk_idx, topk_weights)
        >>> y = experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)
        >>> out = low_latency_combine(buffer, y, topk_idx, topk_weights, sent.handle).x
    """
    check_threads(buffer)
    backend_of(buffer, low_latency=True)
    x, topk_idx = tokens_and_indices(x, topk_idx)
    given = {"x": x, "topk_idx": topk_idx}
    for name, array in (("topk_weights", topk_weights), ("x_scales", x_scales)):
        if array is not None:
            given[name] = as_array(array, name)
    views = {name: traced_view(buffer, array, name) for name, array in given.items()}
    inputs = _inputs(buffer, None, views, use_fp8, round_scale, use_ue8m0, num_max_tokens)
    form = (inputs.use_fp8, inputs.round_scale, inputs.use_ue8m0, inputs.num_max_tokens)
    return _without_gradient(partial(_dispatch, buffer, tuple(given), form), *given.values(), token_of(after))


def low_latency_combine(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    handle: LowLatencyHandle,
    *,
    allow_multiple_reduction: bool = True,
    compress: str | None = None,
    after: jax.Array | None = None,
) -> Combined:
    """Call `Buffer.low_latency_combine` in a compiled function. It has no gradient.

    Args:
        buffer: The Buffer of the dispatch.
        x: The `y` of `Buffer.low_latency_combine`. The call does not read rows past `num_recv_tokens_per_expert`.
        topk_idx: As in `Buffer.low_latency_combine`, and so are the weights.
        topk_weights: See there.
        handle: The handle of the `low_latency_dispatch` of this module that brought the tokens.
        allow_multiple_reduction: As in `Buffer.low_latency_combine`.
        compress: See there.
        after: As in `low_latency_dispatch`. Default: the token of `handle`.

    Returns:
        `x` `[num_tokens, hidden]` bfloat16, and the `token` of the call.

    Raises:
        EPInputError: While JAX traces the call, if a shape or dtype is wrong.

    Example:
        >>> out = low_latency_combine(buffer, y, topk_idx, topk_weights, sent.handle).x
    """
    check_buffer(buffer)
    if not isinstance(handle, LowLatencyHandle):
        raise argument_error(handle, "handle", "the .handle of deepep_rt.jax.low_latency_dispatch", "Pass it as it is.")
    given = [as_array(x, "x"), as_int32(topk_idx), as_array(topk_weights, "topk_weights")]
    known = _Handle(handle.num_tokens, handle.buffer, None, handle.has_weights, NO_FRAMEWORK, handle.capacity)
    y, idx, weights = (traced_view(buffer, *pair) for pair in zip(given, ("x", "topk_idx", "topk_weights"), strict=True))
    low_latency_combine_inputs(info_of(buffer), None, y, idx, weights, known, allow_multiple_reduction, None, None, compress)
    sizes = (handle.num_tokens, handle.has_weights, handle.capacity, allow_multiple_reduction, compress)
    return _without_gradient(
        partial(_combine, buffer, sizes), handle.tables, *given, token_of(handle.token if after is None else after)
    )


def _inputs(
    buffer: Buffer,
    stream: int | None,
    views: dict[str, View],
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    most: int | None,
) -> LowLatencyDispatchInputs:
    """Check the arguments of a dispatch. `views`: its arrays by name."""
    x, idx, weights, scales = (views.get(name) for name in ("x", "topk_idx", "topk_weights", "x_scales"))
    form = (use_fp8, round_scale, use_ue8m0)
    return low_latency_dispatch_inputs(info_of(buffer), stream, x, idx, weights, *form, None, None, scales, most)


def _dispatch(
    buffer: Buffer, names: tuple[str, ...], form: tuple[bool, bool, bool, int], *arrays: jax.Array
) -> LowLatencyDispatched:
    *given, after = arrays
    config, (use_fp8, _, use_ue8m0, most) = buffer.config, form
    tables = backend_of(buffer).tables
    x, capacity = given[0], config.num_ranks * most
    rows = (config.num_local_experts, capacity)
    words = tables.num_low_latency_words
    shapes: list[Any] = [((*rows, x.shape[1]), jnp.float8_e4m3fn if use_fp8 else x.dtype), ((words,), jnp.int32)]
    if use_fp8:
        shapes.append(((*rows, config.hidden // FP8_GROUP), jnp.uint8 if use_ue8m0 else jnp.float32))
    elif "x_scales" in names:
        scales = given[names.index("x_scales")]
        shapes.append(((*rows, scales.shape[1]), scales.dtype))
    token, recv_x, table, *scales = call(buffer, _run_dispatch, (names, form), [after], given, shapes, may_be_captured=True)
    counts = table[tables.low_latency_counts]
    handle = LowLatencyHandle(table, token, x.shape[0], "topk_weights" in names, capacity, info_of(buffer).serial)
    return LowLatencyDispatched(recv_x, scales[0] if scales else None, counts, handle)


def _combine(buffer: Buffer, sizes: tuple[int, bool, int, bool, str | None], *arrays: jax.Array) -> Combined:
    *given, after = arrays
    shapes = [((sizes[0], buffer.config.hidden), jnp.bfloat16)]
    token, out = call(buffer, _run_combine, sizes, [after], given, shapes, may_be_captured=True)
    return Combined(out, token)


def _run_dispatch(
    buffer: Buffer,
    stream: int | None,
    arguments: list[View],
    results: list[View],
    names: tuple[str, ...],
    form: tuple[bool, bool, bool, int],
) -> None:
    recv_x, table, *scales = results
    backend = backend_of(buffer, low_latency=True)
    with backend.call_lock:
        backend.call_lock.progress.name = "low_latency_dispatch"
        inputs = _inputs(buffer, stream, dict(zip(names, arguments, strict=True)), *form)
        inputs.into = LowLatencyMemory(recv_x, scales[0] if scales else None, table)
        low_latency_dispatch_into(buffer, backend, inputs, backend.begin(arguments[0], False, None, stream))


def _run_combine(
    buffer: Buffer,
    stream: int | None,
    arguments: list[View],
    results: list[View],
    num_tokens: int,
    has_weights: bool,
    capacity: int,
    reduce_early: bool,
    compress: str | None,
) -> None:
    table, y, idx, weights = arguments
    handle = backend_of(buffer).tables.load_low_latency(table, num_tokens, has_weights, capacity)
    buffer.low_latency_combine(
        *(y, idx, weights, handle), allow_multiple_reduction=reduce_early, compress=compress, out=results[0], stream=stream
    )


def _without_gradient(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function without a gradient. Its derivative raises EPInputError."""

    def forward(*arguments: Any) -> Any:
        raise EPInputError("low-latency calls have no gradient. Train with dispatch and combine, or use jax.lax.stop_gradient.")

    once = jax.custom_vjp(run)
    once.defvjp(forward, forward)
    return once(*arguments)
