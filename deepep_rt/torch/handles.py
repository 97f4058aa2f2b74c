"""Handles of differentiable calls. Each ties the backward pass of a combine to that of its dispatch."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import EPInputError
from ..results import DispatchHandle

_STEP = 2.0**-50  # so small that programs that compare the results of two runs take the handles for equal
_MOST_NUMBERS = 8  # of calls of a kind with one handle, for errors
_keys = itertools.count(1)
_handles: weakref.WeakValueDictionary[int, _HandleArray] = weakref.WeakValueDictionary()  # by key


def backward_pass() -> int:
    """Return the number of the current backward pass, or -1 outside of a backward pass."""
    return torch._C._current_graph_task_id()


TIE = torch.zeros(1, dtype=torch.float64, requires_grad=True, device="cpu")
"""An input of each call. With gradients enabled, every call has a backward pass on all ranks, whatever needs a gradient there."""


class Link:
    """Ties a combine to its dispatch by a tensor without elements.

    If the experts of a rank got no row, nothing else may connect the two. The backward pass of that rank would then leave out the dispatch,
    and the other ranks would wait for it.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._pass = backward_pass()

    def of_this_graph(self) -> Any:
        """Return the tensor, or `TIE` if the graph of the dispatch cannot be a part of that of a combine which is made now.

        Autograd may have freed it after a backward pass. Or only the combine is computed again in a backward pass
        (`checkpoint(use_reentrant=True)`): it gets another backward pass, which must not continue into that of the dispatch.
        """
        if self.tensor.grad_fn is not None and _is_freed(self.tensor.grad_fn):
            self.tensor = TIE
        return self.tensor if self.tensor.requires_grad and self._pass == backward_pass() else TIE


def _is_freed(node: Any) -> bool:
    """Return whether a backward pass has freed what a node of a graph has saved."""
    try:
        node._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


@dataclass(eq=False)
class Handle(DispatchHandle):
    """The routing of a dispatch, for `combine` of `deepep_rt.torch` and for every call of `Buffer` that takes a handle."""

    # Internal fields:
    without_link: DispatchHandle = field(repr=False)  # the graph holds this one, because the link would hold the graph
    link: Link = field(repr=False)

    def detach(self) -> DispatchHandle:
        """Return the routing alone. The backward pass of a combine with it does not run that of the dispatch.

        Use it for a backward pass in pieces: the program gives the gradient of `recv_x` to the dispatch later, on all ranks.

        Returns:
            A handle for `combine`.

        Example:
            >>> rows = sent.recv_x.detach().requires_grad_()
            >>> combine(buffer, experts(rows), sent.handle.detach()).backward(gradient)
            >>> sent.recv_x.backward(rows.grad)  # a combine, along the same routing
        """
        return self.without_link


def unlinked(handle: Any) -> Any:
    """Return the routing alone, of a `Handle` or another handle."""
    return handle.without_link if isinstance(handle, Handle) else handle


class _HandleArray(np.ndarray):
    """The memory of a handle's tensor. The handle lives as long as this memory."""

    handle: DispatchHandle
    numbers: dict[str, deque[int]]


def tensor_of(handle: DispatchHandle, number: int) -> Tensor:
    """Return a tensor that leads to the handle of dispatch call `number`, `[1]` float64 on the CPU."""
    key = next(_keys)
    array = np.full(1, key * _STEP).view(_HandleArray)
    array.handle, array.numbers = handle, {kind: deque(maxlen=_MOST_NUMBERS) for kind in ("dispatch", "combine")}
    array.numbers["dispatch"].append(number)
    _handles[key] = array
    return torch.from_numpy(array)


def handle_of(tensor: Tensor) -> tuple[DispatchHandle, dict[str, deque[int]]]:
    """Return the handle that the tensor leads to, and the numbers of its latest calls by kind."""
    array = _handles.get(round(tensor.item() / _STEP))
    if array is None:
        raise EPInputError("the handle of this call is gone; expected that of a dispatch whose results live. Keep its handle.")
    return array.handle, array.numbers


@dataclass
class TracedHandle:
    """The routing of a dispatch in a function that `torch.compile` compiles."""

    tensor: Any
    """Leads to the handle, `[1]` float64 on the CPU."""
    num_tokens: int
    """Tokens that this rank dispatched."""
    num_recv_rows: int
    """Rows of `recv_x`."""
    layout: str
    """The order of the rows: "token" or "expert"."""
    counts: tuple[Any, ...]
    """`num_recv_tokens`, `num_recv_tokens_per_expert` and `expert_offsets`."""
    num_recv_tokens_per_expert_list: None = None
    """A graph does not know the counts. Use `expert_offsets` or `num_recv_tokens_per_expert`."""


def check_traced(handle: Any) -> None:
    """Check that a handle comes from a compiled dispatch."""
    if not isinstance(handle, TracedHandle):
        raise EPInputError(
            "handle comes from outside of this compiled function; expected a dispatch inside. Compile both calls together"
        )
