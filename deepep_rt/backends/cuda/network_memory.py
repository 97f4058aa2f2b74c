"""Network memory: what kernels put to other nodes, and what arrives from there; with a relay, the relay too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...comm.communicator import Communicator
from ...comm.relay import Relay
from ...cuda import driver
from ...cuda.transport import SymmetricMemory
from ...jit.launch import Launcher
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
        config = layout.config
        if config.has_relay:
            self.base = self._pinned(self._size) - self._first
            self.ring = self._pinned(layout.ring_bytes)
        else:
            driver.fill(self.base + self._first, 0, self._size)
        if config.has_wire:
            self.ring = driver.allocate(layout.ring_bytes)
            resources.callback(driver.free, self.ring)
            driver.fill(self.ring, 0, layout.ring_bytes)
        values = np.zeros(1, structs.NetworkState.dtype({}))
        values["base"], values["ring"], values["ring_mask"] = self.base, self.ring, layout.num_ring_entries - 1
        peers = np.array(memory.network_peers, np.uint64)
        for name, array in (("network", values), ("network_peers", peers)):
            driver.copy_async(state + layout.local.offsets[name], array.ctypes.data, array.nbytes, 0)
        driver.synchronize(0)

    def start_relay(self) -> None:
        """Start the relay of the host, if there is one. Collective."""
        if not self._layout.config.has_relay:
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


class Wire:
    """Launches the kernel `wire` beside each kernel that puts, on a stream of its own. A capture of the other stream holds both.

    `launch` launches `wire` on a stream. `state` is the address of its WireState.
    """

    NUM_BLOCKS = 8

    def __init__(self, launch: Callable[[int], None], state: int, resources: ExitStack) -> None:
        self._launch, self._stop = launch, state + structs.offset(structs.WireState.dtype({}), "stop")
        self._stream = driver.acquire_stream()
        resources.callback(driver.release_stream, self._stream)
        self._one = driver.allocate(4)
        resources.callback(driver.free, self._one)
        driver.write_int32_now(self._one, 1)

    @contextmanager
    def carrying(self, stream: int) -> Iterator[None]:
        """Carry what a kernel puts. The block launches it on `stream`."""
        driver.wait_stream(self._stream, stream)
        self._launch(self._stream)
        yield
        driver.copy_async(self._stop, self._one, 4, stream)
        driver.wait_stream(stream, self._stream)


class WiredLauncher(Launcher):
    """A `Launcher` for a kernel that puts over the wire."""

    wire: Wire

    def launch(self, stream: int, num_blocks: int, argument_ptr: int) -> None:
        """See `Launcher.launch`."""
        with self.wire.carrying(stream):
            super().launch(stream, num_blocks, argument_ptr)


start_relay = Relay
"""Tests replace it by a network of their own."""
