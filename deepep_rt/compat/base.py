"""What the calls of both modes of DeepEP V1's Buffer have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .._checks import instance
from ..arrays.frameworks import not_dense
from ..errors import EPDestroyedError, EPInputError, EPUnavailableError
from ..results import MAKE_ANOTHER, SharedByCopies

if TYPE_CHECKING:
    Tensors: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class NoAttributeError(EPUnavailableError, AttributeError):
    """Names what is missing; `hasattr` takes it for its answer."""


class Calls(SharedByCopies):
    """A Buffer as its calls see it."""

    _instead = MAKE_ANOTHER
    rank: int
    group_size: int
    _ranks_per_host: int
    _comm_stream: Any = None
    _destroyed = False

    def get_comm_stream(self) -> Any:
        """The `torch.cuda.Stream` on which calls with `async_finish` run.

        Raises:
            EPUnavailableError: without a GPU.
        """
        if self._comm_stream is None:
            if not torch.cuda.is_available():
                raise EPUnavailableError("get_comm_stream: there is no GPU, and so there are no streams")
            self._comm_stream = torch.cuda.Stream(priority=-1)  # its few blocks get their SMs before those of other work
        return self._comm_stream

    def _check_live(self) -> None:
        if self._destroyed:
            raise EPDestroyedError("this Buffer was destroyed; make a new one")


def backend_of(x: torch.Tensor) -> str:
    """The backend of `deepep_rt.Buffer` for such a tensor."""
    return "cuda" if x.is_cuda else "host"


def without_gradient(x: Any) -> Any:
    """A tensor that asks for no gradient: DeepEP's calls give none, and its programs compute their own."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


def check_tensor(x: Any, name: str) -> None:
    """Raise EPInputError unless it is one of PyTorch's, and dense."""
    instance(x, name, torch.Tensor, "Make one of a NumPy array with torch.from_numpy.")
    if x.layout is not torch.strided or x.is_nested:
        raise not_dense(x, name)


def check_rows(x: Any) -> None:
    """Raise EPInputError unless there is a hidden size to be read."""
    check_tensor(x, "x")
    if x.dim() != 2:
        raise EPInputError(f"x has shape {list(x.shape)}; expected [num_tokens, hidden]")


def check_handle(handle: Any, kind: type, source: str) -> None:
    """Raise EPInputError unless the handle is one of ours."""
    if not isinstance(handle, kind):
        raise EPInputError(f"handle is a {type(handle).__name__}; pass what {source} returned as its handle, whole")
