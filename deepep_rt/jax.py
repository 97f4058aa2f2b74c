"""Dispatch and combine inside `jax.jit`, `jax.grad` and `jax.lax.scan`: functions of arrays whose gradients are each other.

A call becomes a callback (`jax.experimental.buffer_callback`) that launches on XLA's own stream, in the order of the program; nothing is
compiled for it and the host waits for nothing (on the host backend, the callback is the call). Its results are copied from the buffer's
memory to XLA's on that stream. Rows are all `num_worst_tokens` long, so a copy reads and writes that many of them.

**Order.** All ranks have to make the same calls in the same order. XLA runs what does not depend on each other in an order of its own, so
calls have to depend on each other: every call takes a token and gives one. `combine` takes that of its `dispatch`, the layers of a
model follow each other anyway, and so do their gradients, in reverse. Calls that do *not* depend on each other (two micro-batches) are put
in order with `after=`; their gradients are then in the reverse order.

**Nothing is kept.** The routing is an array (`Handle`) among the others, so `jax.checkpoint`, `jax.lax.scan` and running a compiled
function again just work.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.buffer_callback import buffer_callback

from . import _env, arrays, dlpack, tables
from .arrays import HOST, Framework, View
from .errors import EPError, EPInputError, EPUnavailableError
from .inputs import combine_inputs, dispatch_inputs
from .results import DispatchHandle

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from .buffer import Buffer

_PLAIN = Framework()  # results stay Views: a callback must not make JAX arrays
_one_at_a_time = threading.RLock()  # XLA may run callbacks of independent programs at once
_failures: list[BaseException] = []  # what callbacks raised, for `errors`


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "num_recv_tokens", "token"],
    meta_fields=["num_tokens", "num_recv_rows", "buffer"],
)
@dataclass(frozen=True)
class Handle:
    """The routing of a `dispatch`, for its `combine`: a pytree of arrays that may go wherever arrays go."""

    tables: jax.Array
    """The buffer's own tables, `[n]` int32."""
    num_recv_tokens: jax.Array
    """Rows that arrived, `[1]` int32; may be more than there was room for."""
    token: jax.Array
    """Orders later calls after the dispatch, `[1]` float32; see `after`."""
    num_tokens: int
    """Tokens that this rank dispatched."""
    num_recv_rows: int
    """Rows of `recv_x`."""
    buffer: int
    """Number of the Buffer in this process."""


class Dispatched(NamedTuple):
    """What arrived at this rank, in the order (source rank, source token), in `num_worst_tokens` rows; the rest is padding."""

    recv_x: jax.Array
    """Rows, `[num_worst_tokens, hidden]`, dtype of `x`; padding is zero."""
    recv_topk_idx: jax.Array
    """Local expert numbers, `[num_worst_tokens, num_topk]` int32; -1 where the expert lives on another rank, and in padding."""
    recv_topk_weights: jax.Array | None
    """Weights, `[num_worst_tokens, num_topk]` float32; 0 where the expert lives on another rank, and in padding."""
    num_recv_tokens_per_expert: jax.Array
    """Received tokens of each local expert, `[num_local_experts]` int32."""
    handle: Handle


class Combined(NamedTuple):
    """Rows added up over the ranks, back at the tokens' own rank."""

    x: jax.Array
    """`[num_tokens, hidden]`, dtype of combine's `x`; zero for tokens that went nowhere."""
    token: jax.Array
    """Orders later calls after this one, `[1]` float32; see `after`."""


def dispatch(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None = None,
    *,
    num_worst_tokens: int | None = None,
    after: jax.Array | None = None,
) -> Dispatched:
    """Send each token to the ranks that hold its experts, once to each rank. See `Buffer.dispatch`.

    Differentiable in `x` and `topk_weights`: the gradient is a combine along the same routing.

    Args:
        buffer: The Buffer, on the GPU that JAX computes on (`use_gpu_of_rank`), or on the host backend where JAX computes on the CPU.
        x: `[num_tokens, hidden]`, at least one row; for gradients bfloat16, float16 or float32.
        topk_idx: `[num_tokens, num_topk]` int32 (or int64, which becomes int32), expert numbers; -1 skips.
        topk_weights: `[num_tokens, num_topk]` float32, or None.
        num_worst_tokens: Rows of the result, whatever arrives; default and most: `num_ranks * num_max_tokens_per_rank`. Rows past it are
            dropped (their tokens lack these experts, and so do their gradients), and count in `handle.num_recv_tokens`.
        after: The `token` of a call that this one comes after on all ranks, where nothing else of it depends on that call.

    Returns:
        What arrived at this rank, in the order (source rank, source token): see `Dispatched`.

    Raises:
        EPInputError: while it is traced, if a shape or dtype is wrong.
        EPUnavailableError: if MPI may not be called from XLA's threads (host backend).

    Example:
        >>> sent = dispatch(buffer, x, topk_idx, topk_weights)
        >>> y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        >>> out = combine(buffer, y, sent.handle).x
    """
    _check_threads(buffer)
    config = buffer.config
    rows = config.num_max_recv_tokens if num_worst_tokens is None else num_worst_tokens
    x, topk_idx = jnp.asarray(x), jnp.asarray(topk_idx)
    if topk_idx.dtype == jnp.int64:
        topk_idx = topk_idx.astype(jnp.int32)
    weights = None if topk_weights is None else jnp.asarray(topk_weights)
    rows_, idx_, weights_ = (None if array is None else _traced(buffer, array) for array in (x, topk_idx, weights))
    dispatch_inputs(buffer._site, None, rows_, idx_, weights_, None, None, rows, 1)
    if not x.shape[0]:
        raise EPInputError("x has no rows, and XLA runs nothing for the sake of none; pass one whose topk_idx are all -1")
    return _dispatch(buffer, rows, x, topk_idx, weights, _token(after))


def combine(buffer: Buffer, x: jax.Array, handle: Handle, *, after: jax.Array | None = None) -> Combined:
    """Send rows back to the ranks of their tokens and add up the rows of each token there, in float32. See `Buffer.combine`.

    Differentiable in `x`: the gradient is a dispatch along the same routing.

    Args:
        buffer: The Buffer of the dispatch.
        x: `[num_worst_tokens, hidden]` bfloat16, float16 or float32, in the order of `recv_x`; padding is not read.
        handle: The handle of the dispatch that brought the tokens.
        after: As in `dispatch`; default: the token of `handle`.

    Returns:
        `x` `[num_tokens, hidden]`, dtype of `x`, and the `token` of the call.

    Raises:
        EPInputError: while it is traced, if a shape or dtype is wrong.

    Example:
        >>> out = combine(buffer, y, sent.handle).x
    """
    x = jnp.asarray(x)
    if not isinstance(handle, Handle):
        raise EPInputError(f"handle is a {type(handle).__name__}; expected the .handle of deepep_rt.jax.dispatch")
    return _combine(buffer, x, handle, _token(handle.token if after is None else after))


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


def checkpoint(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a layer again for its gradient instead of keeping what it computed, calls included; `jax.checkpoint` in good order.

    XLA may start what `jax.checkpoint` computes again at any time, also before the gradients of the layers above: on the CPU, ranks then
    make their calls in different orders. Here the layer's first call waits for the gradient. `jax.checkpoint` is in order inside of
    `jax.lax.scan`, and with a policy that keeps what calls return (they have the names "deepep_rt.dispatch" and "deepep_rt.combine").

    Args:
        layer: `layer(*arrays, after)` gives `after` to its first call. What it is to be differentiated in has to be among the arguments.

    Returns:
        `layer(*arrays, after=None)`.

    Example:
        >>> def layer(parameters, x, after):
        ...     sent = dispatch(buffer, x, *router(parameters, x), after=after)
        ...     return x + combine(buffer, experts(parameters, sent), sent.handle).x
        >>> loss = lambda parameters, x: (checkpoint(layer)(parameters, x) ** 2).sum()
    """

    def once(after: jax.Array, *arguments: Any) -> Any:
        return layer(*arguments, after)

    def forward(after: jax.Array, *arguments: Any) -> tuple[Any, Any]:
        out = once(after, *arguments)
        return out, (arguments, _sum(out))

    def backward(kept: Any, gradient: Any) -> tuple[Any, ...]:
        arguments, done = kept
        # The barrier is there so that XLA does not keep what it shall compute again.
        after, arguments = jax.lax.optimization_barrier((done + _sum(gradient), arguments))
        _, pull = jax.vjp(once, after, *arguments)
        return tuple(pull(gradient))

    run = jax.custom_vjp(once)
    run.defvjp(forward, backward)
    return lambda *arguments, after=None: run(_token(after), *arguments)


def use_gpu_of_rank(comm: Intracomm) -> jax.Device:
    """Let JAX compute on the GPU of this rank, on which a Buffer of this process is then made too; where there is none, on the CPU.

    Call it first of all. It shows JAX that GPU alone, and CUDA that GPU as the first of all: the kernels write to the memory of the others.

    Args:
        comm: An mpi4py communicator; the GPU is the one with the number of this rank among those of the same host.

    Returns:
        The device.

    Raises:
        EPUnavailableError: if CUDA was started before in this process, and the rank's GPU is not the first there.

    Example:
        >>> use_gpu_of_rank(MPI.COMM_WORLD)
    """
    node = comm.Split_type(_mpi().COMM_TYPE_SHARED)
    local_rank = node.Get_rank()
    node.Free()
    if not (count := _count_gpus()):
        return jax.local_devices()[0]
    from . import driver

    if not driver.has_started():
        _env.put_gpu_first(local_rank % count, count)
        local_rank = 0
    if ordinal := driver.use_device(local_rank):
        raise EPUnavailableError(
            f"CUDA was started before, with the GPU of this rank as number {ordinal}, and JAX 0.11 fails on any but the first that it "
            f"sees; call use_gpu_of_rank before anything starts CUDA (PyTorch, CuPy)"
        )
    jax.config.update("jax_cuda_visible_devices", "0")
    device = jax.local_devices()[0]
    driver.make_current(0)  # JAX has made another one current while it started
    return device


def _dispatch_once(
    buffer: Buffer, rows: int, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, after: jax.Array
) -> Dispatched:
    config = buffer.config
    topk = (rows, config.num_topk)
    shapes = [((rows, config.hidden), x.dtype), (topk, jnp.int32), ((1,), jnp.int32), ((config.num_local_experts,), jnp.int32)]
    shapes += [((tables.num_words(config, buffer.backend),), jnp.int32)]
    given = [x, topk_idx]
    if topk_weights is not None:
        given, shapes = [*given, topk_weights], [*shapes, (topk, jnp.float32)]

    token, recv_x, recv_idx, num_recv, per_expert, table, *recv_weights = _named(
        "deepep_rt.dispatch", _call(buffer, _run_dispatch, (rows,), [after], given, shapes)
    )
    handle = Handle(table, num_recv, token, x.shape[0], rows, buffer._site.serial)
    return Dispatched(_without_padding(recv_x, num_recv), recv_idx, recv_weights[0] if recv_weights else None, per_expert, handle)


def _dispatch_forward(buffer: Buffer, rows: int, *arguments: Any) -> tuple[Dispatched, Any]:
    sent = _dispatch_once(buffer, rows, *arguments)  # not `_dispatch`, whose inside policies do not see, nor the names there
    return sent, (sent.handle, sent.recv_topk_idx)


def _dispatch_backward(buffer: Buffer, rows: int, kept: Any, gradient: Dispatched) -> tuple[Any, ...]:
    """Rows go back and are added up; a weight's gradient is where its expert is, the other ranks' zeros were no copies of it."""
    handle, recv_idx = kept
    weights = gradient.recv_topk_weights
    if weights is not None:
        weights = jnp.where(recv_idx >= 0, weights, 0)
    token, x, *weights = _send_back(buffer, gradient.recv_x, weights, handle, gradient.handle.token)
    return x, None, *(weights or [None]), token


_dispatch = jax.custom_vjp(_dispatch_once, nondiff_argnums=(0, 1))
_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _combine_once(buffer: Buffer, x: jax.Array, handle: Handle, after: jax.Array) -> Combined:
    token, out = _named("deepep_rt.combine", _send_back(buffer, x, None, handle, after))
    return Combined(out, token)


def _combine_forward(buffer: Buffer, x: jax.Array, handle: Handle, after: jax.Array) -> tuple[Combined, Any]:
    out = _combine_once(buffer, x, handle, after)
    return out, (handle, out.token)


def _combine_backward(buffer: Buffer, kept: Any, gradient: Combined) -> tuple[Any, ...]:
    """Each row gets the gradient of its token. A combine that was computed again for the sake of gradients comes before."""
    handle, done = kept

    shapes = [((handle.num_recv_rows, buffer.config.hidden), gradient.x.dtype)]
    token, rows = _call(buffer, _run_known_dispatch, _sizes(handle), [gradient.token, done], [handle.tables, gradient.x], shapes)
    return _without_padding(rows, handle.num_recv_tokens), None, token


_combine = jax.custom_vjp(_combine_once, nondiff_argnums=(0,))
_combine.defvjp(_combine_forward, _combine_backward)


def _send_back(buffer: Buffer, x: jax.Array, weights: jax.Array | None, handle: Handle, after: jax.Array) -> list[jax.Array]:
    """Combine rows, and weights if there are any: the token, and what they add up to."""
    config, tokens = buffer.config, handle.num_tokens
    known = DispatchHandle(*_sizes(handle), None, handle.buffer, None, {})
    seen = [None if array is None else _traced(buffer, array) for array in (x, weights)]
    combine_inputs(buffer._site, None, seen[0], known, seen[1], None)

    shapes = [((tokens, config.hidden), x.dtype)] + ([] if weights is None else [((tokens, config.num_topk), jnp.float32)])
    given = [handle.tables, x] + ([] if weights is None else [weights])
    return _call(buffer, _run_combine, _sizes(handle), [after], given, shapes)


def _sizes(handle: Handle) -> tuple[int, int]:
    return handle.num_tokens, handle.num_recv_rows


def _run_dispatch(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], rows: int) -> None:
    sent = buffer.dispatch(*arguments, num_worst_tokens=rows, stream=stream)
    recv_x, recv_idx, num_recv, per_expert, table, *recv_weights = results
    _copy(stream, (sent.recv_x, recv_x), (sent.recv_topk_idx, recv_idx), (sent.num_recv_tokens, num_recv))
    _copy(stream, (sent.num_recv_tokens_per_expert, per_expert), *((sent.recv_topk_weights, out) for out in recv_weights))
    tables.save(sent.handle, buffer.config, table, stream)


def _run_known_dispatch(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], *sizes: int) -> None:
    table, x = arguments
    _copy(stream, (buffer.dispatch(x, handle=tables.load(buffer._site, table, *sizes), stream=stream).recv_x, results[0]))


def _run_combine(buffer: Buffer, stream: int | None, arguments: list[View], results: list[View], *sizes: int) -> None:
    table, x, *weights = arguments
    handle = tables.load(buffer._site, table, *sizes)
    done = buffer.combine(x, handle, topk_weights=weights[0] if weights else None, stream=stream)
    _copy(stream, *zip((done.x, done.topk_weights), results, strict=False))


def _call(
    buffer: Buffer,
    run: Callable[..., None],
    sizes: tuple[int, ...],
    after: list[jax.Array],
    given: list[jax.Array],
    shapes: Sequence[tuple[tuple[int, ...], Any]],
) -> list[jax.Array]:
    """Put a call into the program: `run(buffer, stream, arguments, results, *sizes)`, after what `after` depends on.

    The first result is the token. It is the first of `after`, which nobody looks at: XLA only sees that it comes out of the call.
    """
    made: dict[Any, Callable[..., None]] = vars(buffer).setdefault("_jax_callbacks", {})
    if (
        key := (run, sizes, len(after))
    ) not in made:  # the same function each time, or JAX would compile calls outside of jit again
        made[key] = _callback(buffer, *key)
    token, *results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in [((1,), jnp.float32), *shapes]]
    return buffer_callback(made[key], [token, *results], input_output_aliases={0: 0})(*after, *given)


def _callback(buffer: Buffer, run: Callable[..., None], sizes: tuple[int, ...], num_after: int) -> Callable[..., None]:
    """What XLA calls. It outlives the trace, so it must not hold arrays."""
    on_host, checked = buffer.backend == "host", False

    def callback(ctx: Any, out: Any, *arguments: Any) -> None:
        nonlocal checked
        with _one_at_a_time:
            try:
                backend = buffer._live()
                with backend.context:
                    if not checked:
                        _check_device(buffer, out[0])
                        checked = True
                    look = _copy_of if on_host else _look
                    given, results = (
                        [look(buffer, array) for array in arguments[num_after:]],
                        [_look(buffer, array) for array in out[1:]],
                    )
                    run(buffer, None if on_host else ctx.stream, given, results, *sizes)
            except BaseException as error:
                if not _failures:
                    _failures.append(error)
                raise

    return callback


def _look(buffer: Buffer, array: Any) -> View:
    """An array of XLA's, while the callback runs."""
    ptr, shape, *_ = dlpack.parse(array.__dlpack__())
    return View(ptr, shape, array.dtype.name, buffer._site.device, None, _PLAIN)


def _copy_of(buffer: Buffer, array: Any) -> View:
    """A copy of an argument: after a time-out, MPI may still read it when XLA has given its memory to somebody else."""
    import numpy as np

    memory = np.asarray(array).copy()
    return View(memory.ctypes.data, memory.shape, memory.dtype.name, HOST, memory, _PLAIN)


def _copy(stream: int | None, *pairs: tuple[View | None, View]) -> None:
    for source, out in pairs:
        assert source is not None
        tables.copy(source.ptr, out, stream)


def _traced(buffer: Buffer, array: jax.Array) -> View:
    """Stands for an array whose address is not known yet, so that its shape and dtype are checked by those who check all others."""
    if array.dtype.name not in arrays.DTYPES:
        raise EPInputError(f"dtype {array.dtype.name} is not supported; expected one of {', '.join(arrays.DTYPES)}")
    return View(0, array.shape, array.dtype.name, buffer._site.device, None, _PLAIN)


def _sum(tree: Any) -> jax.Array:
    """A token that depends on every element of a tree of arrays."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((leaf.sum(dtype=jnp.float32) for leaf in leaves), start=jnp.zeros(1, jnp.float32))


def _named(name: str, results: list[jax.Array]) -> list[jax.Array]:
    """Results that policies of `jax.checkpoint` can name."""
    return [checkpoint_name(result, name) for result in results]


def _token(after: Any) -> jax.Array:
    if after is None:
        return jnp.zeros(1, jnp.float32)
    if getattr(after, "shape", None) != (1,) or after.dtype != jnp.float32:
        raise EPInputError(f"after is {getattr(after, 'aval', after)!s}; expected the token of an earlier call, or of its handle")
    return after


def _without_padding(rows: jax.Array, num_recv: jax.Array) -> jax.Array:
    """Zero where nothing arrived: what lies there must not get into sums over all rows, as gradients of experts are."""
    return jnp.where((jnp.arange(rows.shape[0]) < num_recv)[:, None], rows, jnp.zeros((), rows.dtype))


def _check_threads(buffer: Buffer) -> None:
    if buffer.backend == "host" and _mpi().Query_thread() < _mpi().THREAD_SERIALIZED:
        raise EPUnavailableError(
            "JAX calls back from threads of its own, but this MPI was started for one thread; start it with MPI_THREAD_MULTIPLE "
            "(mpi4py does, unless mpi4py.rc.thread_level says otherwise)"
        )


def _check_device(buffer: Buffer, array: Any) -> None:
    """JAX has to compute where the Buffer is."""
    kind, _ = array.__dlpack_device__()
    if (kind == dlpack.CPU) != (buffer.backend == "host"):
        where = "the CPU" if kind == dlpack.CPU else "a GPU"
        raise EPInputError(
            f"JAX computes on {where}, but this Buffer has backend={buffer.backend!r}; make it with "
            f"backend={'host' if kind == dlpack.CPU else 'cuda'!r}, or let JAX use the other (JAX_PLATFORMS)"
        )
    if kind != dlpack.CPU:
        from cuda.bindings import driver as cuda

        from .driver import ok

        ptr = dlpack.parse(array.__dlpack__())[0]
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = int(ok(cuda.cuPointerGetAttribute(attribute, ptr)))
        if device != buffer._site.device:
            raise EPInputError(
                f"JAX computes on GPU {device}, but this Buffer is on GPU {buffer._site.device}; call use_gpu_of_rank before JAX is used"
            )


def _count_gpus() -> int:
    """Asked in a process of its own: CUDA does not start here before it is decided which GPUs it sees."""
    code = "from cuda.bindings import driver; driver.cuInit(0); print(driver.cuDeviceGetCount()[1])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    return int(said) if said.strip().isdigit() else 0  # no bindings, no driver, or no GPU


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
