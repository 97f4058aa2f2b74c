"""A call of a Buffer as a step of a compiled program: XLA calls back, and the call is launched on its stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

from .._checks import argument_error
from ..arrays import dlpack
from ..arrays import view as arrays
from ..arrays.dtypes import DTYPES
from ..arrays.frameworks import check_unmasked, unreadable
from ..arrays.view import HOST, Framework, View
from ..backends.base import Backend
from ..buffer import Buffer, backend_of, info_of
from ..errors import EPError, EPInputError
from .device import check_device


class Combined(NamedTuple):
    """Rows added up over the ranks, back at the tokens' own rank."""

    x: jax.Array
    """`[num_tokens, hidden]`, dtype of combine's `x`; zero for tokens that went nowhere."""
    token: jax.Array
    """Orders later calls after this one, `[1]` float32; see `after`."""


_PLAIN = Framework()  # results stay Views: a callback must not make JAX arrays
_one_at_a_time = threading.RLock()  # XLA may run callbacks of independent programs at once
_failures: list[BaseException] = []  # what callbacks raised, for `errors`


@contextmanager
def errors() -> Iterator[None]:
    """Raise what went wrong in a call as what it is: JAX shows every exception of a callback as `JaxRuntimeError`, with its text inside.

    Results have to be waited for inside of the block, because JAX raises where somebody waits.

    Example:
        >>> with errors():
        ...     jax.block_until_ready(step(parameters, batch))  # raises EPTimeoutError
    """
    _failures.clear()
    try:
        yield
    except EPError:
        raise
    except (RuntimeError, ValueError) as error:  # JAX raises either, by where it notices
        if not _failures:
            raise
        raise _failures.pop() from error


def call(
    buffer: Buffer,
    run: Callable[..., None],
    sizes: tuple[int, ...],
    after: list[jax.Array],
    given: list[jax.Array],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    may_be_captured: bool = False,
) -> list[jax.Array]:
    """Put a call into the program: `run(buffer, stream, arguments, results, *sizes)`, after what `after` depends on.

    The first result is the token. It is the first of `after`, which nobody looks at: XLA only sees that it comes out of the call.
    `may_be_captured`: whether XLA may put it into a CUDA graph, which it replays without calling back.
    """
    token, *results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in [((1,), jnp.float32), *shapes]]
    made: dict[Any, Callable[..., None]] = vars(buffer).setdefault("_jax_callbacks", {})
    key = run, sizes, len(after), _forms(given), _forms(results)
    if key not in made:  # the same function each time, or JAX would compile calls outside of jit again
        made[key] = _callback(buffer, *key)
    aliases, all_results = {0: 0}, [token, *results]
    step = buffer_callback(made[key], all_results, input_output_aliases=aliases, command_buffer_compatible=may_be_captured)
    done = step(*after, *given)
    # In a scan on a GPU, XLA would fuse the call with what stacks its results, keep the call for its other results, and so make it twice.
    return jax.lax.optimization_barrier(done)


_Forms = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype name of arrays


def _forms(like: Sequence[Any]) -> _Forms:
    return tuple((array.shape, array.dtype.name) for array in like)


def _callback(
    buffer: Buffer, run: Callable[..., None], sizes: tuple[int, ...], num_after: int, given: _Forms, results: _Forms
) -> Callable[..., None]:
    """What XLA calls. It outlives the trace, so it must not hold arrays."""
    on_host, checked = buffer.backend == "host", False

    def callback(ctx: Any, out: Any, *arguments: Any) -> None:
        nonlocal checked
        with _one_at_a_time:
            try:
                with backend_of(buffer).context:  # the calls below are entered one by one
                    if not checked:
                        check_device(buffer, out[0])
                        checked = True
                    look = _copy_of if on_host else _look
                    views = [look(buffer, *pair) for pair in zip(arguments[num_after:], given, strict=True)]
                    filled = [_look(buffer, *pair) for pair in zip(out[1:], results, strict=True)]
                    run(buffer, None if on_host else ctx.stream, views, filled, *sizes)
            except BaseException as error:
                if not _failures:
                    _failures.append(error)
                raise

    return callback


def token_of(after: Any) -> jax.Array:
    """What a call comes after: the token that was given, or nothing."""
    if after is None:
        return jnp.zeros(1, jnp.float32)
    if not isinstance(after, jax.Array):
        raise argument_error(after, "after", "the token of an earlier call, or of its handle", "Pass one, or None.")
    if after.shape != (1,) or after.dtype != jnp.float32:
        raise EPInputError(f"after is {after.aval!s}; expected the token of an earlier call, or of its handle")
    return after


def _look(buffer: Buffer, array: Any, form: tuple[tuple[int, ...], str]) -> View:
    """An array of XLA's, while the callback runs."""
    return View(dlpack.address(array.__dlpack__()), *form, info_of(buffer).device, None, _PLAIN)


def _copy_of(buffer: Buffer, array: Any, form: tuple[tuple[int, ...], str]) -> View:
    """A copy of an argument: after a time-out, MPI may still read it when XLA has given its memory to somebody else."""
    import numpy as np

    memory = np.asarray(array).copy()
    return View(memory.ctypes.data, *form, HOST, memory, _PLAIN)


def tokens_and_indices(x: Any, topk_idx: Any) -> tuple[jax.Array, jax.Array]:
    """What a dispatch is given, as JAX's arrays; indices as int32."""
    if topk_idx is None:
        raise EPInputError("topk_idx is None; pass [num_tokens, num_topk] int32")
    x = as_array(x, "x")
    if x.ndim and not x.shape[0]:
        raise EPInputError(
            "x has no rows: XLA leaves out a call that is given nothing, and the others would wait for it; pass a row with topk_idx -1"
        )
    return x, as_int32(topk_idx)


def as_array(value: Any, name: str) -> jax.Array:
    """An argument as an array of JAX's, whose memory is there and lies on one device."""
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise argument_error(value, name, "an array that JAX has not deleted", "Pass one that was not donated to a function.")
        if len(value.sharding.device_set) > 1:
            where = f"an array on one device (it is on {len(value.sharding.device_set)})"
            raise argument_error(value, name, where, "Pass the part of this rank.")
        return value
    check_unmasked(value, name)
    try:
        return jnp.asarray(value)
    except Exception as error:  # JAX asks the object, which may raise anything
        raise unreadable(value, name, error) from error


def as_int32(topk_idx: Any) -> jax.Array:
    """Indices that may be int64; what else they must not be is for those to say who check all arguments."""
    topk_idx = as_array(topk_idx, "topk_idx")
    return topk_idx.astype(jnp.int32) if topk_idx.dtype == jnp.int64 else topk_idx


def traced(buffer: Buffer, array: jax.Array) -> View:
    """Stands for an array whose address is not known yet, so that its shape and dtype are checked by those who check all others."""
    if array.dtype.name not in DTYPES:
        raise EPInputError(f"dtype {array.dtype.name} is not supported; expected one of {', '.join(DTYPES)}")
    return View(0, array.shape, array.dtype.name, info_of(buffer).device, None, _PLAIN)


def run_dispatch(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], rows: int) -> None:
    sent = buffer.dispatch(*arguments, num_worst_tokens=rows, stream=stream)
    recv_x, recv_idx, num_recv, per_expert, table, *recv_weights = results
    assert sent.num_recv_tokens is not None
    _copy_rows(stream, sent.recv_x, sent.num_recv_tokens, recv_x)
    backend = backend_of(buffer)
    _copy(backend, stream, (sent.recv_topk_idx, recv_idx), (sent.num_recv_tokens, num_recv))
    _copy(
        backend, stream, (sent.num_recv_tokens_per_expert, per_expert), *((sent.recv_topk_weights, out) for out in recv_weights)
    )
    backend.tables.save(sent.handle, table, stream)


def run_known_dispatch(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], *sizes: int) -> None:
    table, num_recv, x = arguments
    sent = buffer.dispatch(x, handle=backend_of(buffer).tables.load(table, *sizes), stream=stream)
    _copy_rows(stream, sent.recv_x, num_recv, results[0])


def run_combine(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], *sizes: int) -> None:
    table, x, *weights = arguments
    backend = backend_of(buffer)
    done = buffer.combine(x, backend.tables.load(table, *sizes), topk_weights=weights[0] if weights else None, stream=stream)
    _copy(backend, stream, *zip((done.x, done.topk_weights), results, strict=False))


def _copy_rows(stream: int | None, rows: View, num_kept: View, out: View) -> None:
    """Rows that arrived, and zeros behind: what lies there must not get into sums over all rows, as gradients of experts are."""
    if stream is not None:
        from ..jit import local_kernels

        local_kernels.zero_padding(stream, rows.ptr, out.ptr, num_kept.ptr, out.shape[0], out.row_bytes)
    else:
        kept = int(arrays.host_bytes(num_kept).view("int32")[0]) * out.row_bytes
        to = arrays.host_bytes(out)
        to[:kept], to[kept:] = arrays.host_bytes(rows)[:kept], 0


def _copy(backend: Backend, stream: int | None, *pairs: tuple[View | None, View]) -> None:
    for source, out in pairs:
        assert source is not None
        backend.copy(source.ptr, out, stream)
