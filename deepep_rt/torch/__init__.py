"""PyTorch: `dispatch` and `combine` that gradients flow through, and the communicator of a process group.

The backward pass of `dispatch` is a combine along the same routing, and that of `combine` a dispatch: no counting, no waiting. Both
run on the stream on which the forward pass ran, as all of autograd does. They are collective like the calls of `Buffer`: every rank
runs the backward pass, through the same calls.
"""

from .autograd import Dispatched, Handle, combine, dispatch
from .process_group import communicator

__all__ = ["dispatch", "combine", "Dispatched", "Handle", "communicator"]
