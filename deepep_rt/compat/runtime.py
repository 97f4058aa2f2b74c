"""`Buffer.runtime` of DeepEP V1, with the methods that programs call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .base import BufferState, NoAttributeError


class Runtime:
    """The nodes of a Buffer's ranks. All other calls are methods of the Buffer.

    Example:
        >>> buffer.runtime.get_num_rdma_ranks()  # nodes
    """

    def __init__(self, state: BufferState) -> None:
        self._state = state

    def is_available(self) -> bool:
        """Return True: a new Buffer takes calls at once."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the ranks are on several nodes."""
        return self._state.num_nodes > 1

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self._state.num_nodes

    def get_rdma_rank(self) -> int:
        """Return the number of this rank's node."""
        return self._state.rank // self._state.ranks_per_node

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """Return the rank on the first node with the same local number as this one (`is_global`), or that node's number, 0."""
        return self._state.rank % self._state.ranks_per_node if is_global else 0

    def get_local_device_id(self) -> int:
        """Return the number of PyTorch's current GPU, or -1 without a GPU."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        """Return the stream that `Buffer.get_comm_stream` returns."""
        return self._state.comm_stream()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise NoAttributeError for any other name."""
            raise NoAttributeError(
                f"runtime.{name} is not a part of this library. Use the methods of the Buffer, which docs/coming-from-deepep.md lists."
            )
