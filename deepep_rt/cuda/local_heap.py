"""Memory of one GPU that gives its pages back while a Buffer sleeps: virtual memory of CUDA that no other process maps.

Addresses stay, so captured graphs and prepared calls find their memory again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..errors import EPOutOfMemoryError
from ..kernels.regions import align_up
from . import driver, virtual_memory


@dataclass(frozen=True)
class _Chunk:
    address: int
    num_bytes: int


class LocalHeap:
    """Parts of chunks of memory. They are freed together: `free` frees all of them."""

    def __init__(self) -> None:
        self._device = driver.current_device()
        self._unit = virtual_memory.granularity(self._device)
        self._chunks: list[_Chunk] = []
        self._next = self._end = 0  # the free part of a chunk
        self._ranges, self._mappings, self._is_mapped = ExitStack(), ExitStack(), True

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory. In the capture of a graph this works too, and the memory is not part of the graph.

        Raise EPOutOfMemoryError if the GPU has too little.
        """
        num_bytes = align_up(max(num_bytes, 1))
        if self._end - self._next < num_bytes:
            chunk = self._new_chunk(align_up(num_bytes, self._unit))
            if chunk.num_bytes - num_bytes <= self._end - self._next:  # keep the larger rest
                return chunk.address
            self._next, self._end = chunk.address, chunk.address + chunk.num_bytes
        self._next += num_bytes
        return self._next - num_bytes

    def _new_chunk(self, num_bytes: int) -> _Chunk:
        with driver.relaxed_capture_mode():
            chunk = _Chunk(virtual_memory.reserve(num_bytes, self._unit), num_bytes)
            try:
                self._map(chunk)
            except BaseException:
                virtual_memory.free_range(chunk.address, num_bytes)
                raise
        self._ranges.callback(virtual_memory.free_range, chunk.address, num_bytes)
        self._chunks.append(chunk)
        return chunk

    def _map(self, chunk: _Chunk) -> None:
        memory = virtual_memory.create(chunk.num_bytes, self._device)
        try:
            virtual_memory.map_at(chunk.address, chunk.num_bytes, memory, self._device)
        finally:
            virtual_memory.release(memory)  # the mapping keeps it
        self._mappings.callback(virtual_memory.unmap, chunk.address, chunk.num_bytes)

    @property
    def is_mapped(self) -> bool:
        """Whether it has memory: it does not sleep."""
        return self._is_mapped

    def sleep(self) -> None:
        """Give the memory back to the GPU. The addresses stay. No work of the GPU may use them until `wake`."""
        self._mappings.close()
        self._is_mapped = False

    def wake(self) -> None:
        """Map fresh memory. Raise EPOutOfMemoryError if the GPU has too little; the heap still sleeps then."""
        try:
            self._is_mapped = True
            for chunk in self._chunks:
                self._map(chunk)
        except BaseException:
            self.sleep()
            raise

    def free(self) -> None:
        """Give up all of it."""
        self._mappings.close()
        self._ranges.close()


class SavedMemory:
    """A copy of parts of GPU memory, each an address and a number of bytes, in host memory.

    Raise EPOutOfMemoryError if the host has too little.
    """

    def __init__(self, parts: Iterable[tuple[int, int]]) -> None:
        self._parts: list[tuple[int, np.ndarray]] = []
        self.add(parts)

    def add(self, parts: Iterable[tuple[int, int]]) -> None:
        """Copy more parts."""
        for address, num_bytes in parts:
            try:
                copy = np.empty(num_bytes, np.uint8)
            except MemoryError as error:
                raise EPOutOfMemoryError(
                    f"host memory does not suffice to keep {num_bytes / 1e6:.0f} MB of GPU memory ({error}); expected room for results. "
                    f"Drop results, or call sleep() with keep_results=False"
                ) from error
            driver.copy_async(copy.ctypes.data, address, num_bytes, 0)
            self._parts.append((address, copy))
        driver.synchronize(0)

    def restore(self) -> None:
        """Copy everything back to its place."""
        for address, copy in self._parts:
            driver.copy_async(address, copy.ctypes.data, copy.nbytes, 0)
        driver.synchronize(0)
