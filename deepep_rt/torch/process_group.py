"""How the ranks of a process group of torch.distributed find each other: through MPI if it started them, or else over a store."""

from __future__ import annotations

import multiprocessing
import sys
import uuid
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import _env
from ..comm.convert import is_communicator
from ..comm.store import StoreCommunicator
from ..errors import EPConfigError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_communicators: weakref.WeakKeyDictionary[Any, Intracomm] = weakref.WeakKeyDictionary()  # by process group


def communicator(group: Any = None) -> Intracomm:
    """A communicator of the ranks of a `torch.distributed` process group, in the order of the group. `Buffer` wants one.

    Where mpirun (or Slurm) started the processes it is MPI's. Otherwise - torchrun, `torch.multiprocessing.spawn`, the workers of an
    inference server - it speaks over the store of `torch.distributed`, has the methods that Buffers need, and no MPI is loaded.

    The first call with a group is collective over it; later ones return the same communicator. With an NCCL group, choose the GPU
    (`torch.cuda.set_device`) before.

    Args:
        group: A process group of any backend. None: the default group if `torch.distributed` is initialised, otherwise all processes
            that mpirun started. A communicator is returned as it is.

    Returns:
        An mpi4py communicator, or what stands for one.

    Raises:
        EPConfigError: if this process is not in the group, or it is neither a group nor a communicator.

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
            raise EPConfigError("this process is not in the group; only its members have a communicator of it")
        raise EPConfigError(
            f"group is a {type(group).__name__}; expected a process group of torch.distributed, or an mpi4py communicator"
        )
    if not _communicators.get(group):  # none yet, or its user freed it
        _communicators[group] = _from_mpi(group) or _from_store(group)
    return _communicators[group]


def _from_mpi(group: Any) -> Intracomm | None:
    """The MPI communicator of a group, in its order; None where one mpirun did not start all of it. Collective over the group."""
    ranks: tuple[int, ...] = ()
    # First what the launcher says: in a process that it did not start, MPI may hang, or end the process.
    for asked in (_place_from_launcher, _place_from_mpi):
        said = _gathered(asked(), group)
        if None in said:
            return None
        ranks, sizes = zip(*said, strict=True)
        if len(set(ranks)) != len(ranks) or len(set(sizes)) != 1:
            return None
    from mpi4py import MPI

    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks))


def _from_store(group: Any) -> Any:
    """A communicator of a group over the store of torch.distributed. Collective over the group."""
    store = _store_of(group)
    name = _gathered(uuid.uuid4().hex, group)[0]
    # A client of its own, where this PyTorch can make one: others may wait inside of the store, and let nobody else in meanwhile.
    client = store.clone() if hasattr(store, "clone") else store
    return StoreCommunicator(client, f"deepep_rt/{name}", group.rank(), group.size(), owner=store)


def _store_of(group: Any) -> Any:
    """The store that all ranks of the group reach."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        return dist.distributed_c10d._get_default_store()
    if not hasattr(group, "get_group_store"):
        raise EPConfigError(
            "group was made without torch.distributed.new_group, and this PyTorch does not tell its store; expected one of new_group. "
            "Make it so, or install a newer PyTorch"
        )
    return group.get_group_store()  # made by hand, as vLLM makes the groups of its data-parallel engines


def _place_from_launcher() -> tuple[int, int] | None:
    """Rank and size, of all that mpirun started."""
    if "mpi4py.MPI" in sys.modules:
        return _place_from_mpi()
    if dist.is_torchelastic_launched() or multiprocessing.parent_process() is not None:
        return None  # what mpirun started is this process's parent, whose variables it has
    found = _env.launch()
    return (found.rank, found.size) if found else None


def _place_from_mpi() -> tuple[int, int] | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # as mpi4py says that it finds no library
        return None
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def _gathered(value: Any, group: Any) -> list[Any]:
    """What each rank of the group gives."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group)
    return found
