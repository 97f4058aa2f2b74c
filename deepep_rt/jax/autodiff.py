"""`dispatch` and `combine` inside compiled functions, their gradients, and layers that are computed again for theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._checks import argument_error, choice, whole_number
from ..backends.inputs import combine_inputs, dispatch_inputs, most_recv_rows
from ..buffer import Buffer, backend_of, check_buffer, info_of
from ..config import COMBINE_DTYPES, MAX_ALIGNMENT
from ..errors import EPInputError
from ..results import DispatchHandle
from .arguments import as_array, token_of, tokens_and_indices, traced_view
from .buffer_calls import run_combine, run_dispatch, run_known_dispatch
from .callbacks import Combined, call
from .device import check_threads


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "num_recv_tokens", "token"],
    meta_fields=["num_tokens", "num_recv_rows", "buffer", "layout"],
)
@dataclass(frozen=True)
class Handle:
    """The routing of a `dispatch`, for its `combine`: a pytree of arrays, which JAX treats like other arrays."""

    tables: jax.Array
    """The tables of the Buffer, `[n]` int32."""
    num_recv_tokens: jax.Array
    """Rows sent to this rank, `[1]` int32. The result may have room for fewer."""
    token: jax.Array
    """Orders later calls after the dispatch, `[1]` float32; see `after`."""
    num_tokens: int
    """Tokens that this rank dispatched."""
    num_recv_rows: int
    """Rows of `recv_x`."""
    buffer: int
    """Number of the Buffer in this process."""
    layout: str = "token"
    """The order of the rows: "token" or "expert"."""


class Dispatched(NamedTuple):
    """The rows that arrived at this rank, in the order (source rank, source token), then padding up to `num_worst_tokens` rows.

    With `layout="expert"` there is a row for each (token, choice), expert by expert, with padding after each expert's rows.
    """

    recv_x: jax.Array
    """Rows, `[num_worst_tokens, hidden]`, dtype of `x`; padding is zero."""
    recv_topk_idx: jax.Array | None
    """Local expert numbers, `[num_worst_tokens, num_topk]` int32; -1 for experts of other ranks, and in padding. None with
    `layout="expert"`.
    """
    recv_topk_weights: jax.Array | None
    """Weights, `[num_worst_tokens, num_topk]` float32; 0 for experts of other ranks, and in padding. With `layout="expert"`, the weight of
    each row, `[num_worst_tokens]`.
    """
    num_recv_tokens_per_expert: jax.Array
    """Received tokens of each local expert, `[num_local_experts]` int32."""
    handle: Handle
    expert_offsets: jax.Array | None = None
    """With `layout="expert"`, the first row of each local expert and the end, `[num_local_experts + 1]` int32."""


class _Form(NamedTuple):
    """The form of a dispatch's result."""

    rows: int
    layout: str
    alignment: int
    reduce: str  # of the gradient


class _Sum(NamedTuple):
    """How a combine adds up rows."""

    reduce: str
    compress: str | None = None


def dispatch(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    num_worst_tokens: int | None = None,
    expert_alignment: int = 1,
    layout: str = "token",
    reduce: str = "rank",
    after: jax.Array | None = None,
) -> Dispatched:
    """Send each token to the ranks that hold its experts, once to each rank. See `Buffer.dispatch`.

    Differentiable in `x` and `topk_weights`: the gradient is a combine along the same routing.

    Args:
        buffer: The Buffer, on the GPU on which JAX computes (`use_gpu_of_rank`). If JAX computes on the CPU, on the host backend.
        x: `[num_tokens, hidden]`, at least one row. For gradients bfloat16, float16 or float32.
        topk_idx: `[num_tokens, num_topk]` int32 (or int64, which becomes int32), expert numbers; -1 skips.
        topk_weights: `[num_tokens, num_topk]` float32, or None.
        num_worst_tokens: The fixed number of rows of the result. Default and maximum: `buffer.config.num_max_recv_tokens`. On one
            node, that many can arrive. Further rows are dropped: their tokens lack these experts, and so do their gradients.
            `handle.num_recv_tokens` counts them. With `layout="expert"`, the default and maximum is `num_topk` times as large, and
            padding: pass a number that fits your routing.
        expert_alignment: Round the count of each expert up to a multiple of this.
        layout: As in `Buffer.dispatch`. Padding is zero.
        reduce: The order in which the gradient adds up rows, as in `Buffer.combine`. "topk" needs `layout="expert"`.
        after: The `token` of an earlier call. All ranks make this call after that one.

    Returns:
        The rows that arrived at this rank, in the order (source rank, source token): see `Dispatched`.

    Raises:
        EPInputError: While JAX traces the call, if a shape or dtype is wrong.
        EPUnavailableError: If XLA's threads may not call MPI (host backend).

    Example:
        >>> sent = dispatch(buffer, x, topk_idx, topk_weights)
        >>> y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        >>> out = combine(buffer, y, sent.handle).x
        >>> sent = dispatch(buffer, x, topk_idx, topk_weights, layout="expert", num_worst_tokens=2 * x.shape[0] * topk_idx.shape[1])
        >>> y = jax.lax.ragged_dot(sent.recv_x, experts, jnp.diff(sent.expert_offsets))
        >>> out = combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights).x
    """
    check_threads(buffer)
    layout = choice(layout, "layout", ("token", "expert"))
    if choice(reduce, "reduce", ("rank", "topk")) == "topk" and layout == "token":
        raise EPInputError(
            "reduce='topk' with layout='token'; expected layout='expert', which has a row for each choice. Pass both"
        )
    expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MAX_ALIGNMENT)
    most = most_recv_rows(buffer.config, layout, expert_alignment)
    rows = most if num_worst_tokens is None else whole_number(num_worst_tokens, "num_worst_tokens", 0, most)
    x, topk_idx = tokens_and_indices(x, topk_idx)
    weights = None if topk_weights is None else as_array(topk_weights, "topk_weights")
    weights_view = None if weights is None else traced_view(buffer, weights, "topk_weights")
    x_view, idx_view = traced_view(buffer, x, "x"), traced_view(buffer, topk_idx, "topk_idx")
    dispatch_inputs(info_of(buffer), None, x_view, idx_view, weights_view, None, None, rows, expert_alignment, layout)
    return _dispatch(buffer, _Form(rows, layout, expert_alignment, reduce), x, topk_idx, weights, token_of(after))


def combine(
    buffer: Buffer,
    x: jax.Array,
    handle: Handle,
    *,
    topk_weights: jax.Array | None = None,
    reduce: str = "rank",
    compress: str | None = None,
    after: jax.Array | None = None,
) -> Combined:
    """Send rows back to the ranks of their tokens and add up the rows of each token there, in float32. See `Buffer.combine`.

    Differentiable in `x` and `topk_weights`: the gradient is a dispatch along the same routing.

    Args:
        buffer: The Buffer of the dispatch.
        x: `[num_worst_tokens, hidden]` bfloat16, float16 or float32, in the order of `recv_x`. The call does not read padding.
        handle: The handle of the dispatch that brought the tokens.
        topk_weights: None, or with a handle of `layout="expert"` the weight of each row, `[num_worst_tokens]` float32. Rows are multiplied
            by them in float32.
        reduce: The order of the sum, as in `Buffer.combine`.
        compress: The form of the rows on the way, as in `Buffer.combine`. Gradients ignore the rounding, and their rows are not compressed.
        after: As in `dispatch`. Default: the token of `handle`.

    Returns:
        `x` `[num_tokens, hidden]`, dtype of `x`, and the `token` of the call.

    Raises:
        EPInputError: While JAX traces the call, if a shape, a dtype or an option is wrong.

    Example:
        >>> out = combine(buffer, y, sent.handle).x
    """
    check_buffer(buffer)
    x = as_array(x, "x")
    if not isinstance(handle, Handle):
        raise argument_error(handle, "handle", "the .handle of deepep_rt.jax.dispatch", "Pass it as it is.")
    weights = None if topk_weights is None else as_array(topk_weights, "topk_weights")
    return _combine(buffer, _Sum(reduce, compress), x, weights, handle, token_of(handle.token if after is None else after))


def _dispatch_once(
    buffer: Buffer, form: _Form, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, after: jax.Array
) -> Dispatched:
    config, tables, rows = buffer.config, backend_of(buffer).tables, form.rows
    experts, by_expert = config.num_local_experts, form.layout == "expert"
    topk = (rows,) if by_expert else (rows, config.num_topk)
    shapes = [
        ((rows, x.shape[1]), x.dtype),
        ((experts + 1,) if by_expert else topk, jnp.int32),  # offsets, or expert numbers
        ((1,), jnp.int32),
        ((experts,), jnp.int32),
        ((tables.num_expert_words if by_expert else tables.num_words,), jnp.int32),
    ]
    given = [x, topk_idx]
    if topk_weights is not None:
        given, shapes = [*given, topk_weights], [*shapes, (topk, jnp.float32)]

    token, recv_x, experts_or_offsets, num_recv, per_expert, table, *recv_weights = _named(
        "deepep_rt.dispatch", call(buffer, run_dispatch, form[:3], [after], given, shapes)
    )
    handle = Handle(table, num_recv, token, x.shape[0], rows, info_of(buffer).serial, form.layout)
    recv_idx, offsets = (None, experts_or_offsets) if by_expert else (experts_or_offsets, None)
    return Dispatched(recv_x, recv_idx, recv_weights[0] if recv_weights else None, per_expert, handle, offsets)


def _dispatch_forward(buffer: Buffer, form: _Form, *arguments: Any) -> tuple[Dispatched, Any]:
    if (dtype := arguments[0].dtype.name) not in COMBINE_DTYPES:
        raise EPInputError(
            f"x.dtype={dtype}; expected {' or '.join(COMBINE_DTYPES)}, because the gradient is a combine. Convert x."
        )
    sent = _dispatch_once(buffer, form, *arguments)  # policies of `jax.checkpoint` see no names inside of `_dispatch`
    return sent, (sent.handle, sent.recv_topk_idx)


def _dispatch_backward(buffer: Buffer, form: _Form, kept: Any, gradient: Dispatched) -> tuple[Any, ...]:
    """Send rows back and add them up. Only the rank of an expert has a gradient of its weight: the zeros of other ranks are no copies."""
    handle, recv_idx = kept
    weights = gradient.recv_topk_weights
    if weights is not None and recv_idx is not None:
        weights = jnp.where(recv_idx >= 0, weights, 0)
    how = _Sum(form.reduce)
    token, x, *weights = _combine_rows(
        buffer, gradient.recv_x, weights, handle, gradient.handle.token, how, gradient_of="a dispatch"
    )
    return x, None, *(weights or [None]), token


_dispatch = jax.custom_vjp(_dispatch_once, nondiff_argnums=(0, 1))
_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _combine_once(
    buffer: Buffer, how: _Sum, x: jax.Array, weights: jax.Array | None, handle: Handle, after: jax.Array
) -> Combined:
    rows = _combine_rows(buffer, x, weights, handle, after, how, weighted=weights is not None)
    token, out = _named("deepep_rt.combine", rows)
    return Combined(out, token)


def _combine_forward(buffer: Buffer, how: _Sum, *arguments: Any) -> tuple[Combined, Any]:
    x, weights, handle, _ = arguments
    out = _combine_once(buffer, how, *arguments)
    return out, (handle, out.token, weights, None if weights is None else x)


def _combine_backward(buffer: Buffer, how: _Sum, kept: Any, gradient: Combined) -> tuple[Any, ...]:
    """Give each row the gradient of its token. If JAX computed the combine again for the gradient, this call comes after it."""
    handle, done, weights, x = kept
    shapes = [((handle.num_recv_rows, gradient.x.shape[1]), gradient.x.dtype)]
    given = [handle.tables, handle.num_recv_tokens, gradient.x]
    sizes = *_sizes(handle), handle.layout
    token, rows = call(buffer, run_known_dispatch, sizes, [gradient.token, done], given, shapes, gradient_of="a combine")
    if weights is None:
        return rows, None, None, token
    exact = rows.astype(jnp.float32)
    return (weights[:, None] * exact).astype(rows.dtype), (exact * x.astype(jnp.float32)).sum(1), None, token


_combine = jax.custom_vjp(_combine_once, nondiff_argnums=(0, 1))
_combine.defvjp(_combine_forward, _combine_backward)


def _combine_rows(
    buffer: Buffer,
    x: jax.Array,
    weights: jax.Array | None,
    handle: Handle,
    after: jax.Array,
    how: _Sum,
    weighted: bool = False,
    gradient_of: str = "",
) -> list[jax.Array]:
    """Combine rows, and weights unless they are None or multiply the rows. Return the token and the sums."""
    config, tokens = buffer.config, handle.num_tokens
    known = DispatchHandle(*_sizes(handle), None, handle.buffer, None, {}, layout=handle.layout)
    weights_view = None if weights is None else traced_view(buffer, weights, "topk_weights")
    combine_inputs(info_of(buffer), None, traced_view(buffer, x, "x"), known, weights_view, None, weighted, *how)
    returned = [] if weights is None or weighted else [((tokens, config.num_topk), jnp.float32)]
    shapes = [((tokens, x.shape[1]), x.dtype), *returned]
    given = [handle.tables, x] + ([] if weights is None else [weights])
    sizes = *_sizes(handle), handle.layout, weighted, *how
    return call(buffer, run_combine, sizes, [after], given, shapes, gradient_of=gradient_of)


def _sizes(handle: Handle) -> tuple[int, int]:
    return handle.num_tokens, handle.num_recv_rows


def _named(name: str, results: list[jax.Array]) -> list[jax.Array]:
    """Name results for the policies of `jax.checkpoint`."""
    return [checkpoint_name(result, name) for result in results]


def checkpoint(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a layer and its calls again for its gradient, instead of keeping intermediate results. All ranks do it in the same order.

    With `jax.checkpoint`, XLA may compute a layer again at any time, even before the gradients of the layers above. On the CPU, ranks then
    make their calls in different orders. Here the layer's first call waits for the gradient. `jax.checkpoint` keeps the order inside of
    `jax.lax.scan`. It also does with a policy that keeps results of calls, which are named "deepep_rt.dispatch" and "deepep_rt.combine".

    Args:
        layer: `layer(*arrays, after=token)` gives `after` to its first call. Pass everything that needs a gradient as an array: the layer
            cannot close over it.

    Returns:
        The same function, as `layer(*arrays, after=None)`.

    Example:
        >>> def layer(parameters, x, after):
        ...     sent = dispatch(buffer, x, *router(parameters, x), after=after)
        ...     return x + combine(buffer, experts(parameters, sent), sent.handle).x
        >>> loss = lambda parameters, x: (checkpoint(layer)(parameters, x) ** 2).sum()
    """

    def once(after: jax.Array, *arguments: Any) -> Any:
        return layer(*arguments, after=after)

    def forward(after: jax.Array, *arguments: Any) -> tuple[Any, Any]:
        out = once(after, *arguments)
        return out, (arguments, _token_from(out))

    def backward(kept: Any, gradient: Any) -> tuple[Any, ...]:
        arguments, done = kept
        # Without the barrier XLA keeps the results that it should compute again.
        after, arguments = jax.lax.optimization_barrier((done + _token_from(gradient), arguments))
        _, pull = jax.vjp(once, after, *arguments)
        return tuple(pull(gradient))

    run = jax.custom_vjp(once)
    run.defvjp(forward, backward)

    def checkpointed(*arrays: Any, after: Any = None) -> Any:
        return run(token_of(after), *arrays)

    return checkpointed


def _token_from(tree: Any) -> jax.Array:
    """Return a token that depends on every element of a tree of arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((leaf.sum(dtype=jnp.float32) for leaf in leaves), start=jnp.zeros(1, jnp.float32))
