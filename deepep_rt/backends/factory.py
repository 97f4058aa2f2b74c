"""Makes the backend of a Buffer: ranks agree on settings, and all choose the same one."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import weakref

from ..comm.communicator import Communicator
from ..comm.failure_notice import making
from ..comm.liveness import ENDED, LivenessWatch, own_identity
from ..config import Config
from ..cuda import start
from ..cuda.topology import local_rank_of, placed, placed_on_hosts
from ..network import Choice, NetworkOptions
from .agreement import agree, creation_comm, creation_timeout_s
from .base import Backend
from .path_choice import agree_on_path, describe, usual_rates


def make_backend(
    comm: Communicator, config: Config, backend: str, serial: int, on_exhausted: str, network: NetworkOptions | None
) -> tuple[Backend, LivenessWatch | None]:
    """Agree with all ranks on one backend, and make it. Collective. Its own `info.config` also says which ranks share a node.

    Return it, and what tells it of processes that end. The members of a Buffer with slots do that themselves.

    Raises:
        EPConfigError: On every rank, if settings differ or cannot be met.
        EPUnavailableError: On every rank, if "cuda" was asked for and a rank has no GPU, or if no transport to other nodes can work.
        EPTimeoutError: If a rank does not come.
        EPPeerError: If another rank fails.
    """
    met = creation_comm(comm, config.timeout_s)
    with making(comm, met, "the making of a Buffer") as notices:
        backend = agree(met, config, backend, on_exhausted, network)
        met.timeout_s = creation_timeout_s(config.timeout_s)
        mine = platform.node(), f"{platform.node()}-{os.getpid()}-{serial}", own_identity()
        hosts, names, identities = zip(*met.allgather(mine), strict=True)
        made = _make(met, config, backend, serial, on_exhausted, network, hosts)
        made.shared_name = names[0]
        if made.call_lock.notice is not None:
            notices.append(made.call_lock.notice)
    met.release()
    others = {rank: identity for rank, identity in enumerate(identities) if rank != comm.Get_rank()}
    watches = others and not config.has_slots
    return made, LivenessWatch(others, None, functools.partial(_lose, weakref.ref(made))) if watches else None


def _lose(backend: weakref.ref[Backend], rank: int) -> None:
    """Run in the thread of a watch. It does not keep the backend, which must not end in that thread."""
    if (made := backend()) is not None:
        made.lose(rank, ENDED)


def _make(
    comm: Communicator,
    config: Config,
    backend: str,
    serial: int,
    on_exhausted: str,
    network: NetworkOptions | None,
    hosts: tuple[str, ...],
) -> Backend:
    if backend == "host":
        return _host_backend(comm, placed_on_hosts(comm, config), serial, hosts)
    local_rank = local_rank_of(comm)
    starting = start.begin_context(local_rank)
    # The CUDA backend loads CUDA's bindings, which machines without a GPU may lack.
    from ..cuda.transport import agree_on_transport
    from ..jit.launch import drop_read
    from .cuda.backend import CudaBackend
    from .cuda.runtime import read_kernels

    config, transport = placed(comm, config), Choice("", "")
    if config.has_network:
        transport = agree_on_transport(comm, network)
        config = dataclasses.replace(config, transport=transport.name)
    elif starting is not None:
        read_kernels(config, starting)
    try:
        return CudaBackend(
            comm,
            config,
            serial,
            local_rank=local_rank,
            copy_when_full=on_exhausted == "copy",
            network=network,
            hosts=hosts,
            transport=transport,
        )
    finally:
        drop_read()


def _host_backend(comm: Communicator, config: Config, serial: int, hosts: tuple[str, ...]) -> Backend:
    from .host.backend import HostBackend
    from .host.statistics import measure_links

    transport = Choice(comm.transport_name, "the host backend sends messages")
    path = None
    if config.has_network:
        topology = {"backend": "host", "transport": transport.name, "ranks_per_node": config.node_size, "hosts": list(hosts)}
        path = agree_on_path(comm, config, topology, usual_rates("mpi", len(set(hosts))), measure_links)
        config = dataclasses.replace(config, path=path.choice.name)
    return HostBackend(comm, config, serial, describe("host", config, hosts, ("",) * config.num_ranks, transport, path))
