"""Network memory: what kernels put to other nodes, and what arrives from there; with a relay, the relay too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from ...comm.communicator import Communicator
from ...comm.relay import Relay
from ...cuda import driver
from ...cuda.transport import SymmetricMemory
from ...kernels import structs
from ...kernels.layout import Layout


class NetworkMemory:
    """The network memory of one rank, and the relay that carries it. Collective.

    Its offsets are those of the last part of symmetric memory. With NVSHMEM, symmetric memory has it. A relay works on pinned host memory.

    The constructor clears it, and writes the NetworkState in the local memory at `state`. `resources` releases what it acquires.
    """

    def __init__(self, comm: Communicator, layout: Layout, memory: SymmetricMemory, state: int, resources: ExitStack) -> None:
        self._first, self._size = layout.network_start, layout.network_bytes
        self._comm, self._layout, self._resources = comm, layout, resources
        self.base, self.ring = memory.network_base, 0
        """Address of offset 0 of symmetric memory, for offsets of network memory; and the address of the ring of descriptors, or 0."""
        self._relay: Any = None
        self.wake: Callable[[], None] = _do_nothing
        """Wake the relay before kernels put something."""
        self._may_free = True
        if layout.config.has_relay:
            self.base = self._pinned(self._size) - self._first
            self.ring = self._pinned(layout.ring_bytes)
        else:
            driver.fill(self.base + self._first, 0, self._size)
        values = np.zeros(1, structs.NetworkState.dtype({}))
        values["base"], values["ring"], values["ring_mask"] = self.base, self.ring, layout.num_ring_entries - 1
        peers = np.array([0 if layout.config.has_relay else ptr for ptr in memory.network_peers], np.uint64)
        for name, array in (("network", values), ("network_peers", peers)):
            driver.copy_async(state + layout.local.offsets[name], array.ctypes.data, array.nbytes, 0)
        driver.synchronize(0)

    def start_relay(self) -> None:
        """Start the relay, if there is one. Collective."""
        if not self.ring:
            return
        descriptor, config = structs.Descriptor.dtype({}), self._layout.config
        self._resources.callback(self.close)  # before the memory is freed
        self._relay = start_relay(
            self._comm,
            self.base + self._first,
            self._size,
            self._first,
            self.ring,
            self._layout.num_ring_entries,
            descriptor,
            config.timeout_s,
            node_size=config.node_size,
            transport=config.transport,
        )
        self.wake = self._relay.wake

    def check(self) -> None:
        """Raise if a relay has failed. Call it while the host waits."""
        if self._relay is not None:
            self._relay.check()

    def progress(self) -> str:
        """Say what the relay has carried. Empty without a relay."""
        return "" if self._relay is None else self._relay.progress

    def close(self) -> None:
        """End the relay. Its memory is freed with the other resources, unless the relay may still use it."""
        relay, self._relay = self._relay, None
        if relay is not None:
            self._may_free = relay.close()

    def _pinned(self, num_bytes: int) -> int:
        ptr = driver.allocate_pinned(num_bytes)
        self._resources.callback(self._free, ptr)
        ctypes.memset(ptr, 0, num_bytes)
        return ptr

    def _free(self, ptr: int) -> None:
        if self._may_free:
            driver.free_pinned(ptr)


def _do_nothing() -> None: ...


start_relay = Relay
"""Tests replace it by a network of their own."""
