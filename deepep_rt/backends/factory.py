"""Makes the backend of a Buffer: ranks agree on settings, and all choose the same one."""

from __future__ import annotations

import dataclasses

from ..comm.communicator import Communicator
from ..config import Config
from ..network import NetworkOptions
from .agreement import agree, creation_comm, creation_timeout_s
from .base import Backend


def make_backend(
    comm: Communicator, config: Config, backend: str, serial: int, on_exhausted: str, network: NetworkOptions | None
) -> Backend:
    """Agree with all ranks on one backend, and make it. Collective.

    Args:
        comm: The ranks of the Buffer.
        config: The sizes. On GPUs, the backend's own `info.config` also says which ranks share a node.
        backend: "auto", "cuda" or "host".
        serial: The Buffer's number in this process.
        on_exhausted: "copy" or "error".
        network: What NVSHMEM starts with, or None.

    Raises:
        EPConfigError: On every rank, if settings differ or cannot be met.
        EPUnavailableError: On every rank, if "cuda" was asked for and a rank has no GPU, or if no transport to other nodes can work.
        EPTimeoutError: If a rank does not come.
    """
    backend = agree(comm, config, backend, on_exhausted, network)
    comm = creation_comm(comm, creation_timeout_s(config.timeout_s))
    # The CUDA backend loads CUDA's bindings, which machines without a GPU may lack.
    if backend == "host":
        from .host.backend import HostBackend

        return HostBackend(comm, config, serial)
    from ..cuda.topology import placed
    from ..cuda.transport import agree_on_transport
    from .cuda.backend import CudaBackend

    config = placed(comm, config)
    if config.has_network:
        config = dataclasses.replace(config, transport=agree_on_transport(comm, network).name)
    return CudaBackend(comm, config, serial, copy_when_full=on_exhausted == "copy", network=network)
