"""How the ranks of a process group of torch.distributed find each other: through MPI if it started them, or else over a store."""

from __future__ import annotations

import multiprocessing
import sys
import uuid
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import _env
from .store_comm import StoreCommunicator

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def from_mpi(group: Any) -> Intracomm | None:
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


def from_store(group: Any) -> Any:
    """A communicator of a group over the store of torch.distributed. Collective over the group."""
    store = dist.distributed_c10d._get_default_store()
    name = _gathered(uuid.uuid4().hex, group)[0]
    # A client of its own, where this PyTorch can make one: others may wait inside of the store, and let nobody else in meanwhile.
    client = store.clone() if hasattr(store, "clone") else store
    return StoreCommunicator(client, f"deepep_rt/{name}", dist.get_rank(group), dist.get_world_size(group), kept=store)


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
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group)
    return found
