"""PyTorch: differentiable `dispatch` and `combine`, and the communicator of a process group.

The backward pass of `dispatch` is a combine along the same routing, and that of `combine` is a dispatch. Neither counts tokens or waits on
the host. Both run on the stream of the forward pass, as all of autograd does. They are collective like the calls of `Buffer`: every rank
has to run the backward pass, with the same calls.
"""

from .autograd import Dispatched, combine, dispatch
from .grouped import grouped_mlp, grouped_product
from .handles import Handle, TracedHandle
from .low_latency import LowLatencyDispatched, LowLatencyHandle, low_latency_combine, low_latency_dispatch
from .mlp import expert_mlp
from .process_group import communicator

__all__ = [
    "dispatch",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
    "expert_mlp",
    "grouped_mlp",
    "grouped_product",
    "Dispatched",
    "Handle",
    "TracedHandle",
    "LowLatencyDispatched",
    "LowLatencyHandle",
    "communicator",
]
