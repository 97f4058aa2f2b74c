"""Memory of what the throughput calls hand out: where a dispatch lands, what keeps its result then, and room for the sums of combine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...cuda import driver
from ...cuda.pool import Block, Pool
from ...cuda.stream_memory import StreamMemory, StreamPool
from ...errors import EPOutOfMemoryError
from ...kernels.layout import Map
from ..calls import Call
from .stream_order import CallOrder

_log = logging.getLogger("deepep_rt")


@dataclass(frozen=True)
class Place:
    """Where a dispatch lands: an offset in symmetric memory, and what keeps it (nothing for the shared landing region)."""

    offset: int
    block: Block | None


class ResultMemory:
    """Pools in symmetric memory, and memory outside of them for what finds no room there.

    Args:
        base: Address of the Buffer's symmetric memory.
        regions: What lies where in it.
        num_slots: Results of each kind that fit at once.
        order: Of the Buffer's calls.
        outside: Where to find other memory.
        copy_when_full: Copy results of dispatch there when the pool is full, instead of raising.
    """

    def __init__(
        self, base: int, regions: Map, num_slots: int, order: CallOrder, outside: StreamPool, copy_when_full: bool
    ) -> None:
        self._base, self._offsets, self._outside = base, regions.offsets, outside
        self._order, self._copy_when_full, self._has_copied = order, copy_when_full, False
        self.pool, self._sums = (
            Pool(base + regions.offsets[name], regions.sizes[name], cell=regions.sizes[name] // num_slots)
            for name in ("pool", "sums")
        )

    def place(self, num_bytes: int, call: Call) -> Place:
        """Where the rows of a dispatch land that brings at most so many bytes."""
        block = self.pool.allocate(num_bytes, call.stream, call.caller_stream)
        if block is not None:
            return Place(self._offsets["pool"] + block.offset, block)
        if not self._copy_when_full:
            raise EPOutOfMemoryError(
                f"no room for a result of {num_bytes / 1e6:.0f} MB ({self.pool.free_bytes / 1e6:.0f} MB of the pool are free); drop "
                f"earlier results, make the Buffer with a larger num_slots, or with on_exhausted='copy'"
            )
        self._refuse_when_fixed(call.stream)
        if not self._has_copied:
            self._has_copied = True
            _log.info("a pool is full: results of dispatch are copied, until others are dropped; num_slots says how many fit")
        return Place(self._offsets["landing"], None)

    def keep(self, place: Place, num_bytes: int, call: Call) -> tuple[Any, int]:
        """What keeps the result of a launched dispatch, and its address: the block, cut to what arrived, or a copy of it."""
        if place.block is not None:
            place.block.trim(num_bytes)
            return place.block, place.block.ptr
        try:
            copy = self._outside.allocate(num_bytes, call.stream, call.caller_stream)
        except EPOutOfMemoryError as error:
            error.call_made = True  # the rows have come: the other ranks know nothing of this
            raise
        driver.copy_async(copy.ptr, self._base + place.offset, num_bytes, call.stream)
        self._order.extend(call)  # the next call's rows land there
        return copy, copy.ptr

    def for_sums(self, num_bytes: int, call: Call) -> Block | StreamMemory:
        """Memory for what a combine adds up. It may lie anywhere; only in captures it takes room from dispatches, whose rows may not."""
        for pool in (self._sums,) if call.capture is None else (self._sums, self.pool):
            block = pool.allocate(num_bytes, call.stream, call.caller_stream)
            if block is not None:
                return block
        self._refuse_when_fixed(call.stream)
        return self._outside.allocate(num_bytes, call.stream, call.caller_stream)

    def _refuse_when_fixed(self, stream: int) -> None:
        if driver.is_capturing(stream):
            raise EPOutOfMemoryError(
                f"the pool is full ({self.pool.free_bytes / 1e6:.0f} MB free) and nothing can be allocated while a CUDA graph is "
                f"captured; drop earlier results, or make the Buffer with a larger num_slots"
            )
