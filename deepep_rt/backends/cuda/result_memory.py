"""Memory for results of the throughput calls: for the rows of a dispatch, while they arrive and later, and for the sums of combine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...cuda import driver
from ...cuda.captured_graph import CapturedGraph
from ...cuda.pool import Block, Pool
from ...cuda.stream_tracking import StreamMemory, StreamPool
from ...errors import EPOutOfMemoryError
from ...kernels.regions import Map
from ...statistics import PoolUse
from ..base import Call
from .stream_order import CallOrder

_log = logging.getLogger("deepep_rt")


@dataclass(frozen=True)
class Reservation:
    """Memory that peers write the rows of a dispatch to: an offset in symmetric memory, and the block there. The shared region has none."""

    offset: int
    block: Block | None


class ResultMemory:
    """Pools in symmetric memory, and other memory for results that do not fit there.

    Args:
        base: Address of the Buffer's symmetric memory.
        regions: The regions of that memory.
        num_slots: Results of each kind that fit at once.
        order: The order of the Buffer's calls.
        stream_pool: Gives the other memory.
        copy_when_full: If the pool is full, copy results of dispatch to other memory instead of raising.
        counts_use: Note the most bytes in use.
    """

    def __init__(
        self,
        base: int,
        regions: Map,
        num_slots: int,
        order: CallOrder,
        stream_pool: StreamPool,
        copy_when_full: bool,
        counts_use: bool = False,
    ) -> None:
        self._counts_use, self._most_bytes_in_use, self._num_copies = counts_use, 0, 0
        self._base, self._offsets, self._stream_pool = base, regions.offsets, stream_pool
        self._order, self._copy_when_full, self._has_logged_copies = order, copy_when_full, False
        self.pool, self._sums = (
            Pool(base + regions.offsets[name], regions.sizes[name], cell=regions.sizes[name] // num_slots)
            for name in ("pool", "sums")
        )

    def reserve(self, num_bytes: int, call: Call, reader: int | None) -> Reservation:
        """Reserve memory that peers write the rows of a dispatch to.

        Args:
            num_bytes: At most.
            call: The dispatch.
            reader: The caller's stream, if the caller gets the rows.

        Raises:
            EPOutOfMemoryError: if the pool is full, and results may not or cannot be copied.
        """
        reserved = self.reserve_in_pool(num_bytes, call, reader)
        if reserved is not None:
            return reserved
        if not self._copy_when_full:
            raise EPOutOfMemoryError(f"{self._no_room(num_bytes)}, or with on_exhausted='copy'")
        self._check_can_allocate(call.stream)
        self._num_copies += 1
        if not self._has_logged_copies:
            self._has_logged_copies = True
            _log.info(
                "the pool is full: results of dispatch are copied until earlier results are dropped; raise num_slots for room"
            )
        return Reservation(self._offsets["landing"], None)

    def reserve_in_pool(self, num_bytes: int, call: Call, reader: int | None) -> Reservation | None:
        """Reserve memory of the pool that peers write the rows of a dispatch to. None if the pool is full."""
        block = self._allocate(num_bytes, call.stream, reader, call.capture)
        return None if block is None else Reservation(self.offset_of(block), block)

    def reserve_for_repeats(self, num_bytes: int, stream: int) -> Block:
        """Reserve memory that peers write the rows of each dispatch of a prepared call to.

        Raises:
            EPOutOfMemoryError: if the pool is full.
        """
        block = self._allocate(num_bytes, stream, None, None)
        if block is None:
            raise EPOutOfMemoryError(self._no_room(num_bytes))
        return block

    def offset_of(self, block: Block) -> int:
        """The offset of a block in symmetric memory."""
        return self._offsets["pool"] + block.offset

    @property
    def use(self) -> PoolUse:
        """How much of the pool of dispatch is in use."""
        return PoolUse(self.pool.used_bytes, self._most_bytes_in_use, self.pool.num_bytes, self._num_copies)

    def no_rows(self) -> Reservation:
        """Return the place of a result that gets no rows. It needs no room in the pool."""
        return Reservation(self._offsets["landing"], None)

    def keep(self, reserved: Reservation, num_bytes: int, call: Call, reader: int | None) -> tuple[Any, int]:
        """Keep the result of a launched dispatch: trim its block to what arrived, or copy it out of the shared region.

        Args:
            reserved: Where the rows arrive.
            num_bytes: Of what arrived.
            call: The dispatch.
            reader: As of `reserve`.

        Returns:
            The owner of the memory, and its address.
        """
        if reserved.block is not None:
            reserved.block.trim(num_bytes)
            return reserved.block, reserved.block.ptr
        try:
            copy = self._stream_pool.allocate(num_bytes, call.stream, reader)
        except EPOutOfMemoryError as error:
            error.call_made = True  # the rows have arrived, and the other ranks do not know of this error
            raise
        driver.copy_async(copy.ptr, self._base + reserved.offset, num_bytes, call.stream)
        self._order.move_end(call)  # the next call writes to the shared region, and has to wait for the copy
        return copy, copy.ptr

    def allocate_sums(self, num_bytes: int, call: Call) -> Block | StreamMemory:
        """Allocate memory for the sums of a combine.

        Sums need no symmetric memory, so they do not use the pool of dispatch. A capture cannot allocate: only there they use it too.
        """
        for pool in (self._sums,) if call.capture is None else (self._sums, self.pool):
            block = pool.allocate(num_bytes, call.stream, call.caller_stream, call.capture)
            if block is not None:
                return block
        self._check_can_allocate(call.stream)
        return self._stream_pool.allocate(num_bytes, call.stream, call.caller_stream)

    def _allocate(self, num_bytes: int, stream: int, reader: int | None, graph: CapturedGraph | None) -> Block | None:
        block = self.pool.allocate(num_bytes, stream, reader, graph)
        if block is not None and self._counts_use:
            self._most_bytes_in_use = max(self._most_bytes_in_use, self.pool.used_bytes)
        return block

    def _no_room(self, num_bytes: int) -> str:
        return (
            f"no room for a result of {num_bytes / 1e6:.0f} MB ({self.pool.free_bytes / 1e6:.0f} MB of the pool are free). Drop earlier "
            f"results, make the Buffer with a larger num_slots"
        )

    def _check_can_allocate(self, stream: int) -> None:
        if driver.is_capturing(stream):
            raise EPOutOfMemoryError(
                f"the pool is full ({self.pool.free_bytes / 1e6:.0f} MB free), and a captured CUDA graph cannot allocate; expected room "
                f"in the pool. Drop earlier results, or make the Buffer with a larger num_slots"
            )
