"""Check the arguments of a call that JAX traces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._checks import argument_error
from ..arrays.dtypes import DTYPES
from ..arrays.frameworks import check_unmasked, unreadable
from ..arrays.view import Framework, View
from ..buffer import Buffer, info_of
from ..errors import EPInputError

NO_FRAMEWORK = Framework()
"""The framework of results that stay Views, because a callback must not make JAX arrays."""


def token_of(after: Any) -> jax.Array:
    """Return the token that a call comes after. None gives a new one."""
    if after is None:
        return jnp.zeros(1, jnp.float32)
    if not isinstance(after, jax.Array):
        raise argument_error(after, "after", "the token of an earlier call, or of its handle", "Pass one, or None.")
    if after.shape != (1,) or after.dtype != jnp.float32:
        raise EPInputError(f"after={after.aval!s}; expected the token of an earlier call, or of its handle. Pass one, or None.")
    return after


def tokens_and_indices(x: Any, topk_idx: Any) -> tuple[jax.Array, jax.Array]:
    """Return the arguments of a dispatch as JAX arrays, with int32 indices."""
    if topk_idx is None:
        raise EPInputError("topk_idx=None; expected [num_tokens, num_topk] int32. Pass the experts of each token.")
    x = as_array(x, "x")
    if x.ndim and not x.shape[0]:
        raise EPInputError(
            f"x.shape={list(x.shape)}; expected at least one row, because XLA leaves out a call without input, and the other ranks wait "
            f"for it. Pass a row with topk_idx -1."
        )
    return x, as_int32(topk_idx)


def as_array(value: Any, name: str) -> jax.Array:
    """Return an argument as a JAX array. It must not be deleted, and must lie on one device."""
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise argument_error(value, name, "an array that JAX has not deleted", "Pass one that was not donated to a function.")
        if len(value.sharding.device_set) > 1:
            expected = f"an array on one device (it is on {len(value.sharding.device_set)})"
            raise argument_error(value, name, expected, "Pass the part of this rank.")
        return value
    check_unmasked(value, name)
    try:
        return jnp.asarray(value)
    except Exception as error:  # JAX calls methods of the object, which may raise anything
        raise unreadable(value, name, error) from error


def as_int32(topk_idx: Any) -> jax.Array:
    """Convert int64 indices to int32. The checks of all backends refuse other dtypes later."""
    topk_idx = as_array(topk_idx, "topk_idx")
    return topk_idx.astype(jnp.int32) if topk_idx.dtype == jnp.int64 else topk_idx


def traced_view(buffer: Buffer, array: jax.Array, name: str) -> View:
    """Return a View without an address, so that `backends.inputs` checks the shape and dtype of a traced array."""
    if array.dtype.name not in DTYPES:
        raise EPInputError(f"{name}.dtype={array.dtype.name}; expected one of {', '.join(DTYPES)}. Convert the array.")
    return View(0, array.shape, array.dtype.name, info_of(buffer).device, None, NO_FRAMEWORK)
