"""Layers that are computed again for their gradients, with their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .arguments import token_of


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
