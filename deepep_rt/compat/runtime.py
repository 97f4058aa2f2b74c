"""`Buffer.runtime` of DeepEP V1, as far as programs read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .base import Calls, NoAttributeError


class Runtime:
    """The place of a Buffer's rank. The calls are methods of the Buffer.

    Args:
        buffer: The Buffer.

    Example:
        >>> buffer.runtime.get_num_rdma_ranks()  # hosts
    """

    def __init__(self, buffer: Calls) -> None:
        self._buffer = buffer

    def is_available(self) -> bool:
        """True: a Buffer serves calls as soon as it is made."""
        return True

    def is_internode_available(self) -> bool:
        """False: the normal mode stays in one host."""
        return False

    def get_num_rdma_ranks(self) -> int:
        """The number of hosts."""
        return self._buffer.group_size // self._buffer._ranks_per_host

    def get_rdma_rank(self) -> int:
        """The number of this rank's host."""
        return self._buffer.rank // self._buffer._ranks_per_host

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """The rank on the first host with the same number on its host as this one (`is_global`), or 0, the number of that host."""
        return self._buffer.rank % self._buffer._ranks_per_host if is_global else 0

    def get_local_device_id(self) -> int:
        """The number of PyTorch's current GPU; -1 without a GPU."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        """As `Buffer.get_comm_stream`."""
        return self._buffer.get_comm_stream()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say of any other name that it is not here."""
            raise NoAttributeError(
                f"runtime.{name} is not a part of this library; use the methods of the Buffer. docs/coming-from-deepep.md lists them"
            )
