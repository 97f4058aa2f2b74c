"""PyTorch: the communicator of a process group."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .errors import EPConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_communicators: weakref.WeakKeyDictionary[Any, Intracomm] = weakref.WeakKeyDictionary()  # by process group


def communicator(group: Any = None) -> Intracomm:
    """The MPI communicator of the ranks of a `torch.distributed` process group, in the order of the group. `Buffer` wants one.

    The processes have to be started by mpirun (or Slurm), also when `torch.distributed` is initialised. The first call with a group is
    collective over it; later ones return the same communicator. With an NCCL group, choose the GPU (`torch.cuda.set_device`) before.

    Args:
        group: A process group of any backend. None: the default group if `torch.distributed` is initialised, otherwise all processes
            that mpirun started.

    Returns:
        An mpi4py communicator.

    Raises:
        EPConfigError: if this process is not in the group, or the group's processes were not started by one mpirun.

    Example:
        >>> torch.distributed.init_process_group("nccl", rank=comm_world.rank, world_size=comm_world.size)
        >>> buffer = Buffer(communicator(expert_group), num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    """
    from mpi4py import MPI

    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return MPI.COMM_WORLD
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise EPConfigError("this process is not in the group; only its members have a communicator of it")
    comm = _communicators.get(group)
    if comm is None or comm == MPI.COMM_NULL:  # its user freed it
        size = dist.get_world_size(group)
        found: list[Any] = [None] * size
        dist.all_gather_object(found, (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()), group)
        ranks, sizes = zip(*found, strict=True)
        if len(set(ranks)) != size or len(set(sizes)) != 1:
            raise EPConfigError(
                f"the {size} processes of this group were not started by one mpirun: MPI counts {list(sizes)} processes where they are, "
                f"and their ranks are {list(ranks)}. Start all of them with mpirun -n N python ... (torchrun does not start MPI), "
                f"with the mpirun of the MPI that mpi4py uses"
            )
        comm = _communicators[group] = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks))
    return comm
