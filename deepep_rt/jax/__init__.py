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

from .autodiff import Dispatched, Handle, checkpoint, combine, dispatch
from .callbacks import Combined, errors
from .device import use_gpu_of_rank
from .low_latency import LowLatencyDispatched, LowLatencyHandle, low_latency_combine, low_latency_dispatch

__all__ = [
    "Combined",
    "Dispatched",
    "Handle",
    "LowLatencyDispatched",
    "LowLatencyHandle",
    "checkpoint",
    "combine",
    "dispatch",
    "errors",
    "low_latency_combine",
    "low_latency_dispatch",
    "use_gpu_of_rank",
]
