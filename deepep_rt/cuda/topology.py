"""The placement of ranks: hosts, NVLink groups, and the GPU of each rank."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter

from .. import _env
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..config import MAX_RANKS_PER_NODE, Config
from ..errors import EPConfigError
from .transport import SymmetricAllocator

_log = logging.getLogger("deepep_rt")


def placed(comm: Communicator, config: Config) -> Config:
    """Return a Config with the NVLink groups: the ranks of a host, or smaller groups that the caller requested. Collective.

    Raise EPConfigError on every rank, if the placement of ranks does not fit.
    """
    host = ranks_per_host(comm)
    if config.has_slots:
        return _placed_slots(comm, config, host)
    if config.ranks_per_node is None and host < config.num_ranks:
        config = dataclasses.replace(config, ranks_per_node=host)
    if host % config.node_size:
        raise EPConfigError(
            f"ranks_per_node={config.node_size}, but a host holds {host} ranks; expected a divisor of {host}. Change one of them."
        )
    if config.node_size > MAX_RANKS_PER_NODE:
        raise EPConfigError(
            f"ranks_per_node={config.node_size}; expected 1 to {MAX_RANKS_PER_NODE}, the ranks that NVLink connects. Set ranks_per_node."
        )
    return config


def _placed_slots(comm: Communicator, config: Config, host: int) -> Config:
    if host < comm.Get_size() or config.node_size < config.num_ranks:
        raise EPConfigError(
            f"max_ranks={config.num_ranks} with {comm.Get_size()} ranks, {host} on a host, and ranks_per_node={config.node_size}; expected "
            f"a Buffer with slots on one host. No transport between nodes lets ranks come and go: NVSHMEM and MPI have fixed worlds."
        )
    if config.num_ranks > MAX_RANKS_PER_NODE:
        raise EPConfigError(f"max_ranks={config.num_ranks}; expected 1 to {MAX_RANKS_PER_NODE}, the ranks that NVLink connects.")
    return config


def placed_on_hosts(comm: Communicator, config: Config) -> Config:
    """Return a Config whose nodes are the hosts, as `placed` does, for a backend that needs no NVLink. Collective.

    It serves any placement: if the hosts hold different numbers of ranks, or ranks in another order, all ranks are one node.
    """
    if config.ranks_per_node is not None or config.has_slots:
        return config
    try:
        host = ranks_per_host(comm)
    except EPConfigError as error:
        if comm.Get_rank() == 0:
            _log.warning("the host backend takes all ranks for one node; a Buffer on GPUs raises an error here: %s", error)
        return config
    return dataclasses.replace(config, ranks_per_node=host) if host < config.num_ranks else config


def ranks_per_host(comm: Communicator) -> int:
    """Return the number of ranks on each host. Collective.

    Raise EPConfigError on every rank, if hosts hold different numbers of ranks, or if the ranks of a host are not consecutive.
    """
    hosts = sorted(set(comm.allgather(tuple(comm.ranks_on_host()))))
    size = len(hosts[0])
    if any(len(ranks) != size or ranks[-1] - ranks[0] != size - 1 for ranks in hosts):
        shown = "; ".join(", ".join(map(str, ranks)) for ranks in hosts[:4]) + ("; ..." if len(hosts) > 4 else "")
        raise EPConfigError(
            f"{len(hosts)} hosts hold the ranks {shown}; expected the same number of consecutive ranks on every host. "
            f"Place ranks host by host: with 8 a host, mpirun --map-by ppr:8:node (Open MPI), mpirun -ppn 8 (MPICH) or "
            f"srun --ntasks-per-node=8 --distribution=block (Slurm)."
        )
    return size


def local_rank_of(comm: Communicator) -> int:
    """Return the number of this rank on its host, or of its slot. Collective."""
    rank, here = comm.Get_rank(), comm.ranks_on_host()
    return here.index(rank) if comm.numbers[rank] == rank else comm.numbers[rank]


def choose_device(comm: Communicator, local_rank: int, consensus: Consensus, allocator: SymmetricAllocator) -> int:
    """Make the GPU of this rank current and return its number: the caller's choice, or the host's GPU for `local_rank`. Collective.

    Raises:
        EPConfigError: on every rank, if ranks share a GPU without permission, or the allocator cannot start with this sharing.
        EPUnavailableError: if a rank's GPU cannot be used.
    """
    from . import driver  # programs on the host backend may lack CUDA's bindings

    rank = comm.Get_rank()
    with consensus.step():
        device = driver.use_device(local_rank)
        uuid = driver.device_uuid(device)
    found = comm.allgather((uuid, _env.share_gpus()))
    uuids = [uuid for uuid, _ in found]
    twins = [other for other, uuid in enumerate(uuids) if uuid == uuids[rank]]
    if len(set(uuids)) != len(uuids) and not all(share for _, share in found):
        raise EPConfigError(
            f"{len(uuids)} ranks share {len(set(uuids))} GPUs (on this one: ranks {twins}); expected one rank on each GPU. If the program "
            f"chooses devices (torch.cuda.set_device, cupy.cuda.Device), choose a different one in each rank. "
            f"To develop with more ranks than GPUs, slowly, set DEEPEP_RT_SHARE_GPUS=1."
        )
    allocator.check_sharing(list(Counter(uuids).values()))
    return device
