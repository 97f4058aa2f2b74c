"""Combines with `y_ready`: rows by expert go back while a product on other SMs still writes the rows of later tiles.

One kernel waits for the word of each tile, adds up this rank's rows of a token, and sends the sum. The sums have the bits of an ordinary
combine. Other ranks may make ordinary combines in the same call.

There is no such kernel for several nodes, for compressed rows and for a row of each choice. A kernel then waits for all words, and an
ordinary combine follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...config import rows_per_copy
from ...jit.launch import launch_local, load_local
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs
from .result_memory import CallMemory, combine_views
from .runtime import CudaRuntime, address_of
from .throughput import RowMover


class TileSums:
    """Combines of rows by expert whose tiles are written meanwhile."""

    _kernel = "combine_tiles"
    _kernel_for_all = "await_tiles"

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, memory: CallMemory) -> None:
        self._runtime, self._by_token, self._memory = runtime, by_token, memory

    def adds_up(self, inputs: CombineInputs) -> bool:
        """Return whether there is a kernel whose rows leave tile by tile."""
        return not self._runtime.config.has_network and inputs.reduce == "rank" and inputs.compress is None

    def await_all(self, inputs: CombineInputs, call: Call) -> None:
        """Queue a kernel that waits for the words of all tiles. The kernels of an ordinary combine follow."""
        runtime = self._runtime
        self._by_token.check_support()
        launch = runtime.launcher(self._kernel_for_all)
        runtime.page.waits_for_tiles = True
        runtime.order.enqueue_waits(call)
        (words,) = runtime.on_device(call.stream, inputs.y_ready)
        launch(call.stream, 1, {"tile_ready": words.ptr, "num_tiles": words.shape[0]})
        runtime.order.record_end(call, words, (), inputs.y_ready)

    def add_up(
        self, inputs: CombineInputs, handle: DispatchHandle, tables: dict[str, int], tables_owner: Any, call: Call
    ) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results. `handle` is that of the rows by token."""
        runtime, stream = self._runtime, call.stream
        self._by_token.check_support()
        runtime.launcher(self._kernel, inputs.x.dtype)  # without the kernel, this raises before anything is queued
        load_local("order_chunks")
        runtime.page.waits_for_tiles = True
        runtime.order.enqueue_waits(call)
        given = inputs.x, inputs.y_ready, inputs.topk_weights, *inputs.biases
        x, words, weights, *biases = runtime.on_device(stream, *given)
        assert x is not None
        assert words is not None
        returned = None if inputs.weighted else weights
        order = self._memory.allocate(4 * runtime.config.num_ranks * runtime.layout.constants["kMaxCombineChunks"], call)
        parts = runtime.layout.combined(handle.num_tokens, x.row_bytes, returned is not None)
        owner = self._by_token.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        self._queue_order(handle, tables, order.ptr, x.row_bytes, x.shape[0], stream)
        by_token = replace(inputs, handle=handle, topk_weights=returned, y_ready=None)
        launch, params = self._by_token.combine_launch(by_token, (x, returned, *biases), out, out_weights, self._kernel)
        params["positions"], params["expert_weights"] = tables["positions"], address_of(weights)
        params["order"], params["tile_ready"], params["tile_rows"] = order.ptr, words.ptr, inputs.handle.tile_rows
        launch(stream, self._by_token.num_sms, params)
        runtime.order.record_end(call, (x, words, weights, biases), (handle.routing, tables_owner, order), *given)
        return combine_views(runtime, x, handle.num_tokens, out, None if returned is None else out_weights, owner, stream)

    def _queue_order(
        self, handle: DispatchHandle, tables: dict[str, int], order: int, row_bytes: int, num_rows: int, stream: int
    ) -> None:
        """Queue the kernel that finds the order in which chunks leave."""
        runtime, config = self._runtime, self._runtime.config
        values = {
            "positions": tables["positions"],
            "num_rows": handle.routing.ptr + runtime.layout.handle.offsets["num_rows"],
            "order": order,
            "num_topk": config.num_topk,
            "num_ranks": config.num_ranks,
            "rank": runtime.rank,
            "capacity": handle.num_recv_rows,
            "max_chunks": runtime.layout.constants["kMaxCombineChunks"],
            "chunk_rows": rows_per_copy(row_bytes),
            "num_expert_rows": num_rows,
        }
        launch_local("order_chunks", stream, values, config.num_ranks)
