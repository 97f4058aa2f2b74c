"""Make a communicator of a process group of torch.distributed: over MPI if mpirun started the ranks, otherwise over a store."""

from __future__ import annotations

import multiprocessing
import sys
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import _env
from .._checks import argument_error
from ..comm.convert import is_communicator
from ..comm.store import StoreCommunicator
from ..errors import EPConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_communicators: weakref.WeakKeyDictionary[Any, Intracomm] = weakref.WeakKeyDictionary()  # by process group


def communicator(group: Any = None) -> Intracomm:
    """Make a communicator for a `Buffer`, with the ranks of a `torch.distributed` process group in the order of the group.

    If mpirun or Slurm started the processes, it is a communicator of MPI. Otherwise (torchrun, `torch.multiprocessing.spawn`, workers of an
    inference server) it uses the store of `torch.distributed`, and does not load MPI. It then has only the methods that Buffers need.

    The first call with a group is collective over the group. Later calls return the same communicator. With an NCCL group, choose the GPU
    (`torch.cuda.set_device`) before.

    Args:
        group: A process group of any backend. None: the default group if `torch.distributed` is initialised, otherwise all processes
            that mpirun started. A communicator is returned as it is.

    Returns:
        An mpi4py communicator, or an object with the same methods.

    Raises:
        EPConfigError: If this process is not in the group, or `group` is neither a group nor a communicator.

    Example:
        >>> torch.distributed.init_process_group("nccl")
        >>> buffer = Buffer(communicator(expert_group), num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    """
    if is_communicator(group):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            from mpi4py import MPI

            return MPI.COMM_WORLD
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise EPConfigError("this process is not in the group; expected a member. Call it only on the ranks of the group.")
        expected = "a process group of torch.distributed, or an mpi4py communicator"
        raise argument_error(group, "group", expected, "Pass one of them.", EPConfigError)
    if not _communicators.get(group):  # none yet, or the program freed it
        _communicators[group] = mpi_communicator(group) or _store_communicator(group)
    return _communicators[group]


def mpi_communicator(group: Any) -> Intracomm | None:
    """Make an MPI communicator of a group, in its order. None if one mpirun did not start all of it. Collective over the group."""
    ranks: tuple[int, ...] = ()
    # The launcher's variables come first. In a process that mpirun did not start, MPI may hang, or end the process.
    for rank_and_size in (_rank_and_size_from_launcher, rank_and_size_from_mpi):
        found = gather(rank_and_size(), group)
        if None in found:
            return None
        ranks, sizes = zip(*found, strict=True)
        if len(set(ranks)) != len(ranks) or len(set(sizes)) != 1:
            return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks))


def _store_communicator(group: Any) -> Any:
    """Make a communicator of a group over the store of torch.distributed. Collective over the group."""
    store = _store_of(group)
    name = gather(uuid.uuid4().hex, group)[0]
    # A separate client, if this PyTorch can make one. A thread that waits in the store keeps other threads from using the same client.
    client = store.clone() if hasattr(store, "clone") else store
    return StoreCommunicator(client, f"deepep_rt/{name}", group.rank(), group.size(), owner=store)


def _store_of(group: Any) -> Any:
    """Return the store that all ranks of the group reach."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        return dist.distributed_c10d._get_default_store()
    if not hasattr(group, "get_group_store"):
        raise EPConfigError(
            "this PyTorch does not give the store of this group; expected a group of torch.distributed.new_group. "
            "Make the group with new_group, or install a newer PyTorch."
        )
    return group.get_group_store()  # vLLM makes the groups of its data-parallel engines without new_group


def _rank_and_size_from_launcher() -> tuple[int, int] | None:
    """Return this process's rank and the number of processes that mpirun started."""
    if "mpi4py.MPI" in sys.modules:
        return rank_and_size_from_mpi()
    if dist.is_torchelastic_launched() or multiprocessing.parent_process() is not None:
        return None  # the variables of mpirun are inherited from the parent process, which mpirun started
    found = _env.launch()
    return (found.rank, found.size) if found else None


def rank_and_size_from_mpi() -> tuple[int, int] | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # mpi4py raises either if it finds no library
        return None
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def gather(value: Any, group: Any) -> list[Any]:
    """Return the value of each rank of the group. Collective over the group."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found
