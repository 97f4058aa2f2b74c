"""Make the library's communicator from the one that a caller passes."""

from __future__ import annotations

import sys
import warnings
from typing import Any, cast

from .. import _env
from .._checks import argument_error
from ..errors import EPConfigError
from .communicator import Communicator
from .timed_collectives import TimedCollectives


def is_communicator(value: Any) -> bool:
    """Return whether `value` is a communicator of mpi4py, of any kind, or one of this library."""
    mpi = sys.modules.get("mpi4py.MPI")  # a program that has one of its communicators has loaded it
    return isinstance(value, TimedCollectives) or (mpi is not None and isinstance(value, mpi.Comm))


def communicator_of(comm: Any) -> Communicator:
    """Return the library's communicator over the ranks of `comm`.

    Raise EPConfigError if `comm` is not a communicator of one group, or this process is not in the group.
    """
    if isinstance(comm, TimedCollectives):
        return cast(Communicator, comm)
    if not is_communicator(comm):
        remedy = "For a process group of torch.distributed, pass deepep_rt.torch.communicator(group)."
        raise argument_error(comm, "comm", "an mpi4py communicator", remedy, EPConfigError)
    if not comm:
        raise EPConfigError("comm=MPI.COMM_NULL; expected a communicator of this process. Make the Buffer only on its ranks.")
    if comm.Is_inter():
        raise EPConfigError("comm=<intercommunicator>; expected a communicator of one group. Pass comm.Merge().")
    from mpi4py import MPI

    if comm.Get_size() == 1 and _env.world_size() > 1 and MPI.COMM_WORLD.Get_size() == 1:
        warnings.warn(
            f"WORLD_SIZE={_env.world_size()}, but MPI counts one process, so this Buffer has one rank. Start the program with mpirun, "
            f"or pass deepep_rt.torch.communicator()",
            stacklevel=3,
        )
    from .mpi import MpiCommunicator

    return comm if isinstance(comm, MpiCommunicator) else MpiCommunicator(comm)
