"""Dispatches with `signals=True`: a word for each tile of rows by expert tells a consumer that the tile is complete.

On one node, an ordinary dispatch sends the small arrays, and 16 bytes that hold the place of each row. Then expand_tiles sends the rows and
expands them as they arrive. Over several nodes, the words are written once all rows are here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...arrays.view import View
from ...comm.call_signature import pack
from ...config import ROW_ALIGNMENT, tile_rows_of
from ...cuda import driver
from ...jit.launch import launch_local, load_local
from ...results import DispatchHandle, DispatchResult
from ..base import Call, DispatchInputs
from ..inputs import most_recv_rows
from .result_memory import ArrivingRows, CallMemory
from .runtime import CudaRuntime, address_of
from .throughput import NodesThroughput, RowMover

_SENDING_SHARE = 3
"""One block in so many sends rows, before it expands rows as the others do."""

_TICKETS = 4, 4
"""The shape of the tickets: counters from which the blocks of a consumer take tiles in turn. Each is the first word of a row. All of
them start at 16 bytes, so Triton compiles one version.
"""

_HEAD_WORDS = 32
"""Words before those of the tiles, a line of memory: the tickets."""


@dataclass(frozen=True, slots=True)
class TileWords:
    """The memory of the tickets, of the words of the tiles, and of the kernels' counters. The first two begin with 0."""

    memory: Any
    num_tiles: int

    @property
    def words(self) -> int:
        """The address of the words."""
        address: int = self.memory.ptr
        return address + 4 * _HEAD_WORDS

    def arrays(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the address and the shape of each array of int32."""
        return {"tile_ready": (self.words, (self.num_tiles,)), "tickets": (self.memory.ptr, _TICKETS)}


class TileSignals:
    """The tiles of one dispatch. Make it before the dispatch is queued: work that the caller queues later then finds its words cleared."""

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, memory: CallMemory, inputs: DispatchInputs, call: Call) -> None:
        self._runtime, self._by_token, self._memory = runtime, by_token, memory
        self._inputs, self._call = inputs, call
        by_token.check_support()
        self._as_rows_arrive = not isinstance(by_token, NodesThroughput)
        if self._as_rows_arrive:  # later, an error would leave the other ranks waiting
            runtime.launcher("expand_tiles")
            load_local("prepare_tiles")
        known, config = inputs.handle, runtime.config
        alignment, worst = inputs.expert_alignment, inputs.num_worst_tokens
        self.tile_rows = known.tile_rows if known else tile_rows_of(alignment)
        most_rows = known.num_recv_rows if known else most_recv_rows(config, "expert", alignment) if worst is None else worst
        self._most_tiles = -(-most_rows // self.tile_rows)
        stream, caller = call.stream, call.caller_stream
        runtime.order.enqueue_waits(call)
        self._words = memory.allocate(4 * _HEAD_WORDS + 8 * self._most_tiles, call, caller)
        driver.fill_words(self._words.ptr, 0, _HEAD_WORDS + self._most_tiles, stream)
        call.words_cleared = runtime.order.event(call)
        if caller not in (None, stream):
            call.words_cleared.wait(caller)
        (self._x,) = runtime.on_device(stream, inputs.x)
        self._arriving_x = 0

    def by_token(self, inputs: DispatchInputs) -> DispatchInputs:
        """Return the arguments of the dispatch by token, from those that send whole rows."""
        if not self._as_rows_arrive:
            return inputs
        x = self._x
        # Of each row, 16 bytes travel. What they hold does not matter: the rows overwrite them.
        places = View(x.ptr, (x.shape[0], ROW_ALIGNMENT), "uint8", x.device, x.owner, x.framework)
        self._by_token_inputs = replace(inputs, x=places, rows=x)
        return self._by_token_inputs

    def note_place(self, rows: ArrivingRows) -> None:
        """Note where rows by token arrive. Called once the dispatch by token is queued."""
        self._arriving_x = rows.x

    def make_order(self, known: DispatchHandle | None) -> Any:
        """Return the memory of the order in which rows leave. A handle may have one."""
        if not self._as_rows_arrive:
            return None
        if known is not None and known.routing.order is not None:
            known.routing.order.add_stream(self._call.stream)
            return known.routing.order
        config = self._runtime.config
        return self._memory.allocate(8 * config.num_ranks * config.num_max_tokens_per_rank, self._call)

    def queue(self, handle: DispatchHandle, order: Any, tables: dict[str, int], out_x: int) -> TileWords:
        """Queue the kernels that move the rows, behind the one that expands the small arrays. Return the words."""
        runtime, config, inputs, stream = self._runtime, self._runtime.config, self._inputs, self._call.stream
        num_rows = handle.num_recv_rows
        made = TileWords(self._words, -(-num_rows // self.tile_rows))
        words = made.words
        if not self._as_rows_arrive:
            driver.fill_words(words, DispatchResult.signal, made.num_tiles, stream)
            return made
        known = inputs.handle
        x, (idx,) = self._x, runtime.on_device(stream, inputs.topk_idx)
        table, offsets = handle.routing.by_token.routing.ptr, runtime.layout.handle.offsets
        left = words + 4 * self._most_tiles
        values = {
            "topk_idx": address_of(idx),
            "num_rows": table + offsets["num_rows"],
            "send_list": table + offsets["send_list"],
            "order": order.ptr,
            "offsets": tables["offsets"],
            "ends": tables["ends"],
            "tile_left": left,
            "finds_order": known is None or known.routing.order is None,
            "idx_bytes": idx.itemsize if idx else 0,
            "num_tokens": x.shape[0],
            "num_topk": config.num_topk,
            "num_experts": config.num_local_experts,
            "num_ranks": config.num_ranks,
            "max_tokens": config.num_max_tokens_per_rank,
            "rank": runtime.rank,
            "num_expert_rows": num_rows,
            "tile_rows": self.tile_rows,
        }
        launch_local("prepare_tiles", stream, values, config.num_ranks + 1)
        num_blocks = max(2, self._by_token.num_sms)  # DispatchResult.num_sms
        params = {
            "row_bytes": x.row_bytes,
            "place_bytes": ROW_ALIGNMENT,
            "x": x.ptr,
            "handle": table,
            "order": order.ptr,
            "recv_x_offset": self._arriving_x - runtime.memory.ptr,
            "positions": tables["positions"],
            "offsets": tables["offsets"],
            "ends": tables["ends"],
            "out_x": out_x,
            "tile_left": left,
            "tile_ready": words,
            "num_rows": num_rows,
            "tile_rows": self.tile_rows,
            "zero_padding": inputs.zero_padding,
            "num_sending": 0 if config.num_ranks == 1 else max(1, num_blocks // _SENDING_SHARE),
            "follows_route": known is None,
            "call_signature": pack(self._by_token_inputs.signature),
        }
        runtime.launcher("expand_tiles")(stream, num_blocks, params)
        return made
