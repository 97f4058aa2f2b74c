"""The relays of Buffers with several nodes: the network of the machine takes the descriptors from their rings (network.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from deepep_rt import Buffer
from deepep_rt.kernels import structs

from .gpus import Gpus


def connect(gpus: Gpus, allocation: int, buffers: list[Buffer], first_put: int) -> None:
    """Let the network carry what kernels write to the rings.

    Args:
        gpus: The GPUs.
        allocation: A number that no symmetric memory has.
        buffers: The Buffers of all ranks, in order.
        first_put: The number of the first put of each rank.
    """
    for rank, buffer in enumerate(buffers):
        backend: Any = buffer._backend
        network, layout = backend.runtime.network, backend.runtime.layout
        start, entry_bytes = layout.network_start, structs.Descriptor.size({})
        memory = network.base + start, layout.network_bytes
        gpus.relay(allocation, rank, memory, start, (network.ring, layout.num_ring_entries), entry_bytes, first_put)
        _begin_at(first_put, network.ring, layout.num_ring_entries, backend.runtime.state + layout.local.offsets["network"])


def _begin_at(first_put: int, ring: int, num_entries: int, network_state: int) -> None:
    """Number the next put `first_put`, and leave the ring as the puts before it."""
    entries, state = structs.Descriptor.dtype({}), structs.NetworkState.dtype({})
    sequences = np.frombuffer(memory_at(ring, num_entries * entries.itemsize), entries)["sequence"]
    for put in range(max(0, first_put - num_entries), first_put):
        sequences[put % num_entries] = (put + 1) % 2**32
    np.frombuffer(memory_at(network_state, state.itemsize), state)["next"] = first_put


def memory_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * num_bytes).from_address(address)
