"""Where ranks are: which of them share a host, and which GPU each takes."""

from __future__ import annotations

import dataclasses
from collections import Counter

from .. import _env
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..config import MAX_RANKS_PER_NODE, Config
from ..errors import EPConfigError
from . import nvshmem as symmetric


def placed(comm: Communicator, config: Config) -> Config:
    """Settle which ranks reach each other over NVLink: those of a host, or the smaller groups that were asked for. Collective.

    Raises:
        EPConfigError: on every rank, if ranks are not where they have to be.
    """
    host = ranks_per_host(comm)
    if config.ranks_per_node is None and host < config.num_ranks:
        config = dataclasses.replace(config, ranks_per_node=host)
    if host % config.node_size:
        raise EPConfigError(f"ranks_per_node is {config.node_size}, but a host holds {host} ranks; expected a divisor of that")
    if config.node_size > MAX_RANKS_PER_NODE:
        raise EPConfigError(
            f"{config.node_size} ranks are to reach each other over NVLink; expected 1 to {MAX_RANKS_PER_NODE}. Set ranks_per_node"
        )
    return config


def ranks_per_host(comm: Communicator) -> int:
    """The number of ranks on each host. Collective.

    Raises:
        EPConfigError: on every rank, if the hosts hold different numbers of ranks, or ranks that do not follow each other.
    """
    hosts = sorted(set(comm.allgather(tuple(comm.ranks_on_host()))))
    size = len(hosts[0])
    if any(len(ranks) != size or ranks[-1] - ranks[0] != size - 1 for ranks in hosts):
        shown = "; ".join(", ".join(map(str, ranks)) for ranks in hosts[:4]) + ("; ..." if len(hosts) > 4 else "")
        raise EPConfigError(
            f"every host has to hold the same number of ranks, one after the other; {len(hosts)} hosts hold the ranks {shown}. "
            f"Place ranks host by host: with 8 a host, mpirun --map-by ppr:8:node (Open MPI), mpirun -ppn 8 (MPICH) or "
            f"srun --ntasks-per-node=8 --distribution=block (Slurm)"
        )
    return size


def choose_device(comm: Communicator, consensus: Consensus) -> int:
    """The GPU of this rank, which becomes the current one: the one that the caller chose, or the rank's of its host. Collective.

    Raises:
        EPConfigError: on every rank, if ranks share a GPU and were not told that they may, or some do while others have one to themselves.
        EPUnavailableError: if a rank's GPU cannot be used.
    """
    from . import driver  # who works in host memory needs no CUDA

    rank, here = comm.Get_rank(), comm.ranks_on_host()
    with consensus.step():
        device = driver.use_device(here.index(rank))
        uuid = driver.device_uuid(device)
    found = comm.allgather((uuid, _env.share_gpus()))
    uuids = [uuid for uuid, _ in found]
    twins = [other for other, uuid in enumerate(uuids) if uuid == uuids[rank]]
    if len(set(uuids)) != len(uuids) and not all(share for _, share in found):
        raise EPConfigError(
            f"{len(uuids)} ranks share {len(set(uuids))} GPUs (on this one: ranks {twins}); start one rank a GPU, and if you choose "
            f"devices yourself (torch.cuda.set_device, cupy.cuda.Device), choose a different one in each rank. "
            f"To develop for more ranks than there are GPUs, slowly, set DEEPEP_RT_SHARE_GPUS=1"
        )
    sharing = Counter(uuids).values()
    # A rank of NVSHMEM takes GPUs for shared if its own one is, and makes other teams then: where only some do, all wait for ever.
    if min(sharing) == 1 < max(sharing) and not symmetric.has_started():
        raise EPConfigError(
            f"{len(uuids)} ranks on {len(sharing)} GPUs: some share one and others have one to themselves, which NVSHMEM cannot start "
            f"with; start a multiple of {len(sharing)} ranks, or show them fewer GPUs with CUDA_VISIBLE_DEVICES"
        )
    return device
