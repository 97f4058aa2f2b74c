"""Dispatch and combine inside `jax.jit`, `jax.grad` and `jax.lax.scan`. The gradient of each is the other.

XLA makes a call through a callback (`jax.experimental.buffer_callback`). The callback launches the kernels on XLA's stream, in the order of
the program. XLA compiles nothing for it, and the host does not wait. On the host backend, the callback itself moves the rows. The callback
copies the results from the Buffer's memory to XLA's on that stream. A copy reads and writes `num_worst_tokens` rows.

**Order.** All ranks have to make the same calls in the same order. XLA chooses the order of steps that do not depend on each other.
Therefore every call takes a token and returns one. `combine` takes the token of its `dispatch`. The layers of a model depend on each
other, and so do their gradients, in reverse order. If two calls do not depend on each other (two micro-batches), order them with `after=`.
Their gradients then have the reverse order.

**No state.** The routing is an array of the `Handle`. A program may therefore use `jax.checkpoint` and `jax.lax.scan`, and may run a
compiled function again.
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
