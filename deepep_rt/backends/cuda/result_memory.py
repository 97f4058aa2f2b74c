"""Memory for results of the throughput calls, and views of it: the rows of a dispatch, while they arrive and later, and sums of combine.

`CallMemory` is memory that calls need besides the Buffer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...arrays.view import Framework, View
from ...cuda import driver
from ...cuda.captured_graph import CapturedGraph
from ...cuda.pool import Block, Pool
from ...cuda.slots import Slot, Slots
from ...cuda.stream_tracking import StreamMemory, StreamPool
from ...errors import EPOutOfMemoryError
from ...kernels.regions import Map
from ...results import Views
from ...statistics import PoolUse
from ..base import Call
from .runtime import CudaRuntime
from .stream_order import CallOrder

if TYPE_CHECKING:
    from ...cuda.heap import Heard
    from ...cuda.transport import VirtualMemory

_log = logging.getLogger("deepep_rt")


@dataclass(slots=True)  # not frozen: each dispatch makes one
class Reservation:
    """Memory that peers write the rows of a dispatch to: an offset in symmetric memory, and the block there. The shared region has none."""

    offset: int
    block: Block | None


@dataclass(frozen=True)
class Growing:
    """Memory that a rank adds to its region of symmetric memory."""

    memory: VirtualMemory
    timeout_s: float
    heard: Heard  # of a peer that has left

    def add(self, num_bytes: int) -> tuple[int, int]:
        """Return an offset and the bytes there. Raise EPOutOfMemoryError if there is too little."""
        return self.memory.grow(num_bytes, self.timeout_s, self.heard)

    def remove(self, offset: int) -> None:
        """Give it up."""
        self.memory.shrink(offset, self.timeout_s)


class ResultMemory:
    """Pools in symmetric memory, and other memory for results that do not fit there.

    `base` is the address of symmetric memory. `num_slots` results of each kind fit at once. If the pool is full, `copy_when_full`
    lets it grow in `growing`, or else results of dispatch be copied to memory of `stream_pool`, instead of an error. `counts_use` notes the
    most bytes in use.
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
        growing: Growing | None = None,
    ) -> None:
        self._growing = growing if copy_when_full else None
        self._segments: list[tuple[int, int]] = []  # that the pool has grown by: offset and bytes
        self._counts_use, self._most_bytes_in_use, self._num_copies = counts_use, 0, 0
        self._base, self._offsets, self._stream_pool = base, regions.offsets, stream_pool
        self._landing_bytes, self._pool_bytes = regions.sizes["landing"], regions.sizes["pool"]
        self._order, self._copy_when_full, self._has_logged_copies = order, copy_when_full, False
        self.pool, self._sums = (
            Pool(base + regions.offsets[name], regions.sizes[name], cell=regions.sizes[name] // num_slots)
            for name in ("pool", "sums")
        )

    @property
    def grows(self) -> bool:
        """Whether the pool grows when it is full."""
        return self._growing is not None

    def reserve(self, num_bytes: int, call: Call, reader: int | None) -> Reservation:
        """Reserve memory that peers write the rows of a dispatch to, at most `num_bytes`. `reader` is the caller's stream, if the caller
        gets the rows.

        Raise EPOutOfMemoryError if the pool is full, and results may not or cannot be copied.
        """
        reserved = self.reserve_in_pool(num_bytes, call, reader)
        if reserved is not None:
            return reserved
        if not self._copy_when_full:
            raise EPOutOfMemoryError(f"{self._no_room(num_bytes)}, or with on_exhausted='copy'")
        if num_bytes > self._landing_bytes:  # only a pool that grows has room for such a result
            raise EPOutOfMemoryError(self._no_room(num_bytes))
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
        """Reserve memory that peers write the rows of each dispatch of a prepared call to. Raise EPOutOfMemoryError if the pool is full."""
        block = self._allocate(num_bytes, stream, None, None)
        if block is None:
            raise EPOutOfMemoryError(self._no_room(num_bytes))
        return block

    def offset_of(self, block: Block) -> int:
        """The offset of a block in symmetric memory."""
        return self._offsets["pool"] + block.offset

    def offset_in_pool(self, ptr: int, num_bytes: int) -> int | None:
        """Return the offset in symmetric memory of bytes that lie in the pool. None: they lie elsewhere."""
        begin = ptr - self._base
        for first, size in ((self._offsets["pool"], self._pool_bytes), *self._segments):
            if first <= begin and begin + num_bytes <= first + size:
                return begin
        return None

    @property
    def use(self) -> PoolUse:
        """How much of the pool of dispatch is in use."""
        return PoolUse(self.pool.used_bytes, self._most_bytes_in_use, self.pool.num_bytes, self._num_copies)

    def in_use(self) -> list[tuple[int, int]]:
        """Return the parts of the pools that the program or a captured graph holds: the address and the bytes of each."""
        return [*self.pool.in_use(), *self._sums.in_use()]

    def no_rows(self) -> Reservation:
        """Return the place of a result that gets no rows. It needs no room in the pool."""
        return Reservation(self._offsets["landing"], None)

    def keep(self, reserved: Reservation, num_bytes: int, call: Call, reader: int | None) -> tuple[Any, int]:
        """Keep the result of a launched dispatch: trim its block to the bytes that arrived, or copy them out of the shared region.

        Return the owner of the memory, and its address.
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
        block = self._sums.allocate(num_bytes, call.stream, call.caller_stream, call.capture)
        if block is None and call.capture is not None:
            block = self._allocate(num_bytes, call.stream, call.caller_stream, call.capture)
        if block is not None:
            return block
        self._check_can_allocate(call.stream)
        return self._stream_pool.allocate(num_bytes, call.stream, call.caller_stream)

    def _allocate(self, num_bytes: int, stream: int, reader: int | None, graph: CapturedGraph | None) -> Block | None:
        block = self.pool.allocate(num_bytes, stream, reader, graph)
        if block is None and self._grow(num_bytes):
            block = self.pool.allocate(num_bytes, stream, reader, graph)
        if block is not None and self._counts_use:
            self._most_bytes_in_use = max(self._most_bytes_in_use, self.pool.used_bytes)
        return block

    def _grow(self, num_bytes: int) -> bool:
        """Add memory to the pool. Return whether that worked."""
        if self._growing is None:
            return False
        try:
            offset, size = self._growing.add(num_bytes)
        except EPOutOfMemoryError as error:
            _log.info("the pool of results is full, and does not grow: %s", error)
            return False
        _log.info("the pool of results is full: it grows by %.0f MB", size / 1e6)
        self._segments.append((offset, size))
        begin = offset - self._offsets["pool"]
        self.pool.add(begin, begin + size)
        return True

    def shrink(self) -> int:
        """Give back the memory that the pool has grown by and that is free. No work of a GPU may use it. Return its bytes."""
        num_bytes = 0
        for offset, size in self._segments.copy():
            begin = offset - self._offsets["pool"]
            if self._growing is not None and self.pool.remove(begin, begin + size):
                self._growing.remove(offset)
                self._segments.remove((offset, size))
                num_bytes += size
        return num_bytes

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


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """Addresses of what a launched routing and its dispatch write. Work behind it on its stream may read there."""

    x: int
    topk_idx: int
    src_idx: int
    num_recv: int
    num_recv_per_expert: int
    capacity: int  # rows that fit
    idx_bytes: int


OnLaunch = Callable[[ArrivingRows], None]
"""Launches more kernels behind a dispatch. It may not fail for a reason of one rank: the other ranks have made the call."""


class ArrivedRows:
    """The results of a dispatch by token, and where they lie. Call it for Views of them.

    Results have the dtypes and shapes of `arrays` (x, topk_idx, topk_weights, scales), but for the number of rows. `rows` and `counts` are
    an address each, with the owner of the memory there. `offsets` count from the address in `rows`.
    """

    __slots__ = ("_formats", "_framework", "_offsets", "_runtime", "_stream", "counts", "num_rows", "rows")

    def __init__(
        self,
        runtime: CudaRuntime,
        arrays: Sequence[Any],
        offsets: dict[str, int],
        num_rows: int,
        *,
        rows: tuple[int, Any],
        counts: tuple[int, Any],
        stream: int,
    ) -> None:
        self._runtime, self._offsets, self._stream = runtime, offsets, stream
        self.num_rows, self.rows, self.counts = num_rows, rows, counts
        self._framework = arrays[0].framework
        # This does not hold the arguments: the caller may drop them before it reads the results.
        self._formats = [(view.dtype, view.shape) if view else None for view in arrays]

    def address(self, name: str) -> int:
        """Return where an array of the result lies: "x", "topk_idx", "topk_weights", "scales" or "src_idx". The call has to have it."""
        return self.rows[0] + self._offsets[name]

    def __call__(self) -> Views:
        result, num_rows, stream, framework = self._runtime.result, self.num_rows, self._stream, self._framework
        named = zip(("x", "topk_idx", "topk_weights", "scales"), self._formats, strict=True)
        results = {name: (format_[0], (num_rows, *format_[1][1:])) for name, format_ in named if format_}
        results["src_idx"] = "int32", (num_rows, 2)
        base, owner = self.rows
        views: Views = {
            name: result(base + self._offsets[name], shape, dtype, owner, framework, stream)
            for name, (dtype, shape) in results.items()
        }
        for name in ("num_recv", "num_recv_per_expert"):
            views[name] = counts_view(self._runtime, name, self.counts, framework, stream)
        return views


def counts_view(runtime: CudaRuntime, name: str, counts: tuple[int, Any], framework: Framework, stream: int | None) -> View:
    """Make the View of "num_recv" or "num_recv_per_expert". `counts` are an address and the owner of the memory there."""
    base, owner = counts
    shape = (1,) if name == "num_recv" else (runtime.config.num_local_experts,)
    return runtime.result(base + runtime.layout.counts.offsets[name], shape, "int32", owner, framework, stream)


def arriving_rows(
    first: int, offsets: dict[str, int], tables: int, table_offsets: dict[str, int], capacity: int, idx_bytes: int
) -> ArrivingRows:
    """Say where a dispatch with a new routing writes: at `first`, while the results arrive, and in the handle's tables at `tables`.

    The counts are those of the handle. The routing writes them before the host gets them. A dispatch that fails after that does not write
    the caller's counts, and the rows of the result are as many as the host knows.
    """
    return ArrivingRows(
        x=first + offsets["x"],
        topk_idx=first + offsets["topk_idx"],
        src_idx=first + offsets["src_idx"],
        num_recv=tables + table_offsets["num_recv"],
        num_recv_per_expert=tables + table_offsets["num_recv_per_expert"],
        capacity=capacity,
        idx_bytes=idx_bytes,
    )


def combine_views(
    runtime: CudaRuntime, x: View, num_tokens: int, out: int, out_weights: int | None, owner: Any, stream: int
) -> Callable[[], Views]:
    """Return the function that makes the results of a combine, with the dtype and framework of `x`.

    `owner` owns the memory at the addresses `out` and `out_weights`, those of the rows and of the summed weights.
    """
    dtype, framework, config = x.dtype, x.framework, runtime.config

    def make_views() -> Views:
        result = runtime.result
        views: Views = {"x": result(out, (num_tokens, config.hidden), dtype, owner, framework, stream)}
        if out_weights is not None:
            shape = num_tokens, config.num_topk
            views["topk_weights"] = result(out_weights, shape, "float32", owner, framework, stream)
        return views

    return make_views


class CallMemory:
    """Memory of any size for work on the stream of a call."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._slots: dict[int, Slots] = {}

    def allocate(self, num_bytes: int, call: Call, reader: int | None = None) -> StreamMemory | Slot:
        """Allocate memory for the call, and for `reader`, the stream of a caller who gets it. A capture takes memory that stays with the
        Buffer.
        """
        if call.capture is None:
            return self._runtime.stream_pool.allocate(num_bytes, call.stream, reader)
        num_bytes = max(num_bytes, 1)
        if num_bytes not in self._slots:
            self._slots[num_bytes] = self._runtime.slots(num_bytes, are_tables=True)  # also those of rows by expert
        return self._slots[num_bytes].acquire(call.stream, reader, call.capture)
