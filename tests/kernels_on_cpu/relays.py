"""The relays of Buffers with several nodes: the network of the machine takes the descriptors from their rings (network.cpp)."""

from __future__ import annotations

from typing import Any

from deepep_rt import Buffer
from deepep_rt.kernels import structs

from .gpus import Gpus


def connect(gpus: Gpus, allocation: int, buffers: list[Buffer]) -> None:
    """Let the network carry what kernels write to the rings.

    Args:
        gpus: The GPUs.
        allocation: A number that no symmetric memory has.
        buffers: The Buffers of all ranks, in order.
    """
    for rank, buffer in enumerate(buffers):
        backend: Any = buffer._backend
        network, layout = backend.runtime.network, backend.runtime.layout
        start, entry_bytes = layout.network_start, structs.Descriptor.size({})
        memory = network.base + start, layout.symmetric.num_bytes - start
        gpus.relay(allocation, rank, memory, start, (network.ring, layout.num_ring_entries), entry_bytes)
