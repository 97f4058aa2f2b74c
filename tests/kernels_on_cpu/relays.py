"""Network memory of Buffers with several nodes, and the relays that carry puts between them (network.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

from deepep_rt import Buffer
from deepep_rt.kernels import structs

from .device_arrays import array_at
from .gpus import Gpus


def connect(gpus: Gpus, allocation: int, buffers: list[Buffer]) -> None:
    """Give the Buffers of all ranks network memory: pinned memory and a ring for a relay, or their symmetric memory.

    Args:
        gpus: The GPUs.
        allocation: A number that no symmetric memory has.
        buffers: The Buffers of all ranks, in order.
    """
    for rank, buffer in enumerate(buffers):
        backend: Any = buffer._backend
        runtime, layout = backend.runtime, backend.runtime.layout
        dtype = structs.NetworkState.dtype({})
        raw = array_at(runtime.state + layout.local.offsets["network"], (dtype.itemsize,), "uint8", runtime)
        state = raw.view(dtype)[0]
        if not buffer.config.has_relay:
            raw.view(dtype)["base"] = runtime.memory.ptr
            continue
        start, num_bytes = layout.network_start, layout.symmetric.num_bytes - layout.network_start
        entries, entry_bytes = layout.num_ring_entries, structs.Descriptor.size({})
        if not state["ring"]:
            mirror, ring = gpus.allocate(num_bytes), gpus.allocate(entries * entry_bytes)
            ctypes.memset(mirror, 0, num_bytes)
            ctypes.memset(ring, 0, entries * entry_bytes)
            raw.view(dtype)[0] = mirror - start, ring, entries - 1, 0
        gpus.relay(
            allocation, rank, (int(state["base"]) + start, num_bytes), start, (int(state["ring"]), int(state["ring_mask"]) + 1)
        )
