"""What the ranks of a Buffer speak over: MPI, or a store where no MPI launcher started them.

Both kinds have the methods of mpi4py's Intracomm that Buffers use, and some of their own, under the same names.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from .. import _env
from ..errors import EPConfigError
from .store import StoreCommunicator

if TYPE_CHECKING:
    from .mpi import MpiCommunicator

Communicator: TypeAlias = Union["MpiCommunicator", StoreCommunicator]


def is_communicator(value: Any) -> bool:
    """Whether it is a communicator of mpi4py, of any kind, or one of ours."""
    mpi = sys.modules.get("mpi4py.MPI")  # loaded, if somebody has one of its communicators
    return isinstance(value, StoreCommunicator) or (mpi is not None and isinstance(value, mpi.Comm))


def communicator_of(comm: Any) -> Communicator:
    """What a caller gave, as a communicator of ours.

    Raises:
        EPConfigError: unless it is a communicator of one group, that this process belongs to.
    """
    if isinstance(comm, StoreCommunicator):
        return comm
    if not is_communicator(comm):
        raise EPConfigError(
            f"comm is a {type(comm).__name__}; expected an mpi4py communicator. For a torch.distributed process group there is "
            f"deepep_rt.torch.communicator(group)"
        )
    if not comm:
        raise EPConfigError("comm is MPI.COMM_NULL: this process is none of its ranks, and takes no part in the Buffer")
    if comm.Is_inter():
        raise EPConfigError(
            "comm is an intercommunicator, between two groups; pass one of all their ranks, which comm.Merge() makes"
        )
    from mpi4py import MPI

    if comm.Get_size() == 1 and _env.world_size() > 1 and MPI.COMM_WORLD.Get_size() == 1:
        warnings.warn(
            f"WORLD_SIZE is {_env.world_size()}, but MPI counts one process: torchrun, or whatever started the others, is no MPI "
            f"launcher. This Buffer has one rank; start the program with mpirun, or pass deepep_rt.torch.communicator()",
            stacklevel=3,
        )
    from .mpi import MpiCommunicator

    return MpiCommunicator(comm)
