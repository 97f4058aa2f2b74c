"""A call of a Buffer as a step of a compiled program: XLA calls back, and the callback launches the call on XLA's stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.buffer_callback import buffer_callback

from ..arrays import dlpack
from ..arrays.view import HOST, View
from ..buffer import Buffer, backend_of, info_of
from ..errors import EPError, EPInputError
from .arguments import NO_FRAMEWORK
from .device import check_device


class Combined(NamedTuple):
    """Rows added up over the ranks, at the tokens' source rank."""

    x: jax.Array
    """`[num_tokens, hidden]`, dtype of combine's `x`. Zero for tokens without experts."""
    token: jax.Array
    """Orders later calls after this one, `[1]` float32; see `after`."""


_callback_lock = threading.RLock()  # XLA may run callbacks of independent programs at once
_failures: list[BaseException] = []  # exceptions of callbacks, for `errors`


@contextmanager
def errors() -> Iterator[None]:
    """Raise the original exception of a call. JAX shows each exception of a callback as a `JaxRuntimeError` with its text.

    Wait for the results inside of the block, because JAX raises where a program waits.

    Example:
        >>> with errors():
        ...     jax.block_until_ready(step(parameters, batch))  # raises EPTimeoutError
    """
    _failures.clear()
    try:
        yield
    except EPError:
        raise
    except (RuntimeError, ValueError) as error:  # JAX raises one of them
        if not _failures:
            raise
        raise _failures.pop() from error


def call(
    buffer: Buffer,
    run: Callable[..., None],
    sizes: tuple[Any, ...],
    after: list[jax.Array],
    arguments: list[jax.Array],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
    may_be_captured: bool = False,
    gradient_of: str = "",
) -> list[jax.Array]:
    """Add a call to the program: `run(buffer, stream, arguments, results, *sizes)`. The call waits for the arrays `after`; the first one is
    a token. `shapes` are the shape and dtype of each result.

    If `may_be_captured`, XLA may capture the call in a CUDA graph, which it replays without calling back.

    Errors name the call with `gradient_of`, if this is its gradient. On the host backend, compiled programs keep such a call, even if
    nothing reads its results, because other ranks may read theirs.

    Return the token, then the results. The token is that of `after`: nothing reads it, but XLA sees that it comes out of the call.
    """
    token, *results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in [((1,), jnp.float32), *shapes]]
    made = callbacks_of(buffer)
    key = run, sizes, gradient_of, len(after), _forms(arguments), _forms(results)
    if key not in made:  # JAX compiles a call outside of jit again if the function is a new one
        made[key] = _callback(buffer, *key)
    aliases, all_results = {0: 0}, [token, *results]
    step = buffer_callback(
        made[key],
        all_results,
        input_output_aliases=aliases,
        command_buffer_compatible=may_be_captured,
        has_side_effect=bool(gradient_of) and buffer.backend == "host",  # XLA for GPUs makes such a call twice in a scan
    )
    outputs = _without_vmap(step)(*after, *arguments)
    # Without this barrier XLA fuses the call, in a scan on a GPU, with the step that stacks its results. XLA then makes the call twice.
    return jax.lax.optimization_barrier(outputs)


def _without_vmap(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same step of a program. It refuses `jax.vmap`: the other ranks would make another number of calls."""
    once = custom_vmap(step)

    def refuse(*_: Any) -> NoReturn:
        raise EPInputError("a call inside of jax.vmap; expected one call for the whole batch. Make its rows tokens of one call")

    once.def_vmap(refuse)
    return once


def callbacks_of(buffer: Buffer) -> dict[Any, Callable[..., None]]:
    """Return the callbacks of a Buffer. They lie in the Buffer, because they hold it and must not outlive it."""
    return vars(buffer).setdefault("jax_callbacks", {})


_Forms = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype name of arrays


def _forms(arrays: Sequence[Any]) -> _Forms:
    return tuple((array.shape, array.dtype.name) for array in arrays)


def _callback(
    buffer: Buffer,
    run: Callable[..., None],
    sizes: tuple[Any, ...],
    gradient_of: str,
    num_after: int,
    given: _Forms,
    results: _Forms,
) -> Callable[..., None]:
    """Return the function that XLA calls. It outlives the trace, so it must not hold arrays."""
    on_host, checked = buffer.backend == "host", False
    purpose = gradient_of and f"the gradient of {gradient_of}"

    def callback(ctx: Any, out: Any, *arguments: Any) -> None:
        nonlocal checked
        with _callback_lock:
            try:
                with backend_of(buffer).context:  # once, instead of in each call below
                    if not checked:
                        check_device(buffer, out[0])
                        checked = True
                    as_argument = _copied_view if on_host else _view
                    views = [as_argument(buffer, *pair) for pair in zip(arguments[num_after:], given, strict=True)]
                    outputs = [_view(buffer, *pair) for pair in zip(out[1:], results, strict=True)]
                    with backend_of(buffer).purposes.during(purpose):
                        run(buffer, None if on_host else ctx.stream, views, outputs, *sizes)
            except BaseException as error:
                if not _failures:
                    _failures.append(error)
                raise

    return callback


def _view(buffer: Buffer, array: Any, form: tuple[tuple[int, ...], str]) -> View:
    """Return a View of an array of XLA's. It is valid during the callback."""
    return View(dlpack.address(array.__dlpack__()), *form, info_of(buffer).device, None, NO_FRAMEWORK)


def _copied_view(buffer: Buffer, array: Any, form: tuple[tuple[int, ...], str]) -> View:
    """Return a View of a copy. After a time-out, MPI may still read an argument when XLA reuses its memory."""
    import numpy as np

    memory = np.asarray(array).copy()
    return View(memory.ctypes.data, *form, HOST, memory, NO_FRAMEWORK)
