"""Throughput calls of the CUDA backend with rows that lie expert by expert: a row for each (token, choice).

Rows travel by token, so each crosses a link once. This rank then copies them to the rows of their experts, and adds up the rows of a token
before a combine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.view import Framework, View
from ...comm.call_signature import pack
from ...config import tile_rows_of
from ...errors import EPOutOfMemoryError
from ...jit.launch import launch_local, load_local
from ...kernels.regions import Map, align_up, arrange
from ...kernels.structs import ChoiceRow
from ...kernels.tuning import CHOICES_PER_BLOCK, MAX_POSITION_BLOCKS, TAIL_ROWS
from ...results import DispatchHandle, Views
from ..base import SCALE_COLUMN_ALIGNMENT, Call, CombineInputs, DispatchInputs
from .result_memory import ArrivedRows, ArrivingRows, CallMemory, combine_views, counts_view
from .runtime import CudaRuntime, address_of
from .throughput import NodesThroughput, RowMover
from .tile_signals import TileSignals, TileWords
from .tile_sums import TileSums


@dataclass(frozen=True, eq=False)
class RowsByExpert:
    """The tables of a handle of `layout="expert"`."""

    by_token: DispatchHandle
    memory: Any  # the owner of the tables
    tables: dict[str, int]  # addresses of positions, offsets, ends, totals and sources: see the kernel expert_positions
    order: Any = None  # with signals: the owner of the order in which rows leave (prepare_tiles)


class ExpertRows:
    """Dispatch and combine of rows by expert, by means of rows by token."""

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, memory: CallMemory) -> None:
        self._runtime, self._config, self._by_token = runtime, runtime.config, by_token
        self._memory = memory
        kind = NodeChoiceSums if isinstance(by_token, NodesThroughput) else ChoiceSums
        self._choice_sums, self._tile_sums = kind(runtime, by_token, memory), TileSums(runtime, by_token, memory)
        self._tables = runtime.layout.expert_tables(self._config.num_max_recv_tokens)
        self._tables_of_counted = runtime.layout.expert_tables(by_token.most_rows)  # of a dispatch whose rows the host counts
        local = runtime.layout.local.offsets
        self._has_kernels = False
        self._progress = {
            "progress": runtime.state + local["position_progress"],
            "block_counts": runtime.state + local["position_counts"],
        }

    def send_rows(self, inputs: DispatchInputs, call: Call) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue a dispatch. Return its handle, and the function that makes its results."""
        known, stream = inputs.handle, call.stream
        worst = None if known or inputs.num_worst_tokens is None else self._config.num_max_recv_tokens
        by_token = replace(inputs, handle=known and known.routing.by_token, num_worst_tokens=worst)
        tiles = order = None
        if inputs.signals:
            tiles = TileSignals(self._runtime, self._by_token, self._memory, inputs, call)
            by_token, order = tiles.by_token(by_token), tiles.make_order(known)
        if known:
            handle = known
            _, arrived = self._by_token.send_rows(by_token, call, tiles.note_place if tiles else None)
        else:
            handle, arrived = self._send_with_new_routing(inputs, by_token, call, tiles, order)
        # From here to the launches the GPU may have nothing to do, so this part makes nothing that a caller may never read.
        half = self._runtime.monitor.call_half(
            "a dispatch was interrupted between its rows by token and by expert", "kPhaseDispatchRows"
        )
        routing: RowsByExpert = handle.routing
        routing.memory.add_stream(stream)
        parts = self._result(handle.num_recv_rows, inputs)
        with half if tiles is not None else nullcontext():  # the other ranks wait for the rows, which `tiles` sends
            try:
                memory = self._memory.allocate(parts.num_bytes, call, call.caller_stream)
            except EPOutOfMemoryError as error:
                error.call_made = tiles is None  # the rows by token have arrived, and the other ranks do not know of this error
                raise
        words = None
        with half:
            self._launch_expand(handle, arrived, inputs, parts.offsets, memory.ptr, stream)
            if tiles is None:
                self._runtime.order.record_end(call, (), (routing.memory,))
            else:
                words = tiles.queue(handle, order, routing.tables, memory.ptr + parts.offsets["x"])
                own = (routing.memory,) if order is None else (routing.memory, order)
                self._runtime.order.record_end(call, (inputs.x, inputs.topk_idx), own, inputs.x, inputs.topk_idx)
        make_views = functools.partial(
            self._views,
            handle.num_recv_rows,
            formats=[(view.dtype, view.shape) if view else None for view in (inputs.x, inputs.topk_weights, inputs.scales)],
            framework=inputs.x.framework,
            scales_by_column=inputs.scales_by_column,
            offsets=parts.offsets,
            memory=memory,
            counts=arrived.counts,
            stream=stream,
            words=words,
        )
        return handle, make_views

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results."""
        stream, handle = call.stream, inputs.handle
        routing: RowsByExpert = handle.routing
        routing.memory.add_stream(stream)
        if inputs.y_ready is not None and handle.num_recv_rows:
            if self._tile_sums.adds_up(inputs):
                return self._tile_sums.add_up(inputs, routing.by_token, routing.tables, routing.memory, call)
            self._tile_sums.await_all(inputs, call)
        if inputs.reduce == "topk":
            return self._choice_sums.add_up(inputs, routing.by_token, routing.tables, call)
        order, num_topk = self._runtime.order, self._config.num_topk
        order.enqueue_waits(call)
        x, weights = self._runtime.on_device(stream, inputs.x, inputs.topk_weights)
        num_tokens, returns = routing.by_token.num_recv_rows, weights is not None and not inputs.weighted
        parts = arrange([("weights", num_tokens * num_topk * 4 if returns else 0), ("x", num_tokens * x.row_bytes)])
        memory = self._by_token.memory_for_rows(parts.num_bytes, call) or self._memory.allocate(parts.num_bytes, call)
        out, out_weights = memory.ptr + parts.offsets["x"], memory.ptr + parts.offsets["weights"]
        values = {
            "x": x.ptr,
            "weights": address_of(weights),
            "positions": routing.tables["positions"],
            "totals": routing.tables["totals"],
            "out": out,
            "out_weights": out_weights if returns else 0,
            "row_bytes": x.row_bytes,
            "num_topk": num_topk,
        }
        launch_local("sum_expert_rows", stream, values, num_tokens, x.dtype)
        owner = memory, x, weights, inputs.x, inputs.topk_weights
        sums = View(out, (num_tokens, self._config.hidden), x.dtype, self._runtime.device, owner, x.framework)
        returned = (
            View(out_weights, (num_tokens, num_topk), "float32", self._runtime.device, owner, x.framework) if returns else None
        )
        by_token = replace(inputs, x=sums, handle=routing.by_token, topk_weights=returned)
        make_views = self._by_token.add_up(by_token, call)
        order.record_end(call, owner, (routing.memory,), inputs.topk_weights)
        return make_views

    def _send_with_new_routing(
        self, inputs: DispatchInputs, by_token: DispatchInputs, call: Call, tiles: TileSignals | None, order: Any
    ) -> tuple[DispatchHandle, ArrivedRows]:
        """Queue the dispatch of the rows by token, and behind it the search of the rows of each expert. Return the handle of rows by
        expert, and the rows by token.

        The tables have room for the most rows by token, so the search needs no count on the host. It is therefore queued before the host
        waits for counts, if the dispatch is. The memory of the tables is allocated before any launch: without room this rank makes no call.
        """
        if not self._has_kernels:
            # Between the launch of the dispatch and its counts, an error would leave the counts for the next call.
            load_local("expert_positions", "expand_rows")
            self._has_kernels = True
        self._runtime.order.enqueue_waits(call)  # memory in a capture is other memory, and this tells whether there is one
        worst = inputs.num_worst_tokens
        parts = self._tables_of_counted if worst is None else self._tables
        memory = self._memory.allocate(parts.num_bytes, call)
        tables = {name: memory.ptr + offset for name, offset in parts.offsets.items()}

        def find_positions(rows: ArrivingRows) -> None:
            if tiles is not None:
                tiles.note_place(rows)
            values = {
                "topk_idx": rows.topk_idx,
                "src_idx": rows.src_idx,
                "num_recv": rows.num_recv,
                "num_per_expert": rows.num_recv_per_expert,
                **tables,
                **self._progress,
                "idx_bytes": rows.idx_bytes,
                "num_topk": self._config.num_topk,
                "num_experts": self._config.num_local_experts,
                "alignment": inputs.expert_alignment,
                "capacity": rows.capacity,
                "num_rows": -1 if worst is None else worst,
            }
            num_blocks = -(-rows.capacity * self._config.num_topk // CHOICES_PER_BLOCK)
            launch_local("expert_positions", call.stream, values, max(1, min(num_blocks, MAX_POSITION_BLOCKS)))

        sent, arrived = self._by_token.send_rows(by_token, call, find_positions)
        counts = sent.num_recv_tokens_per_expert_list
        num_rows = worst
        if num_rows is None:
            assert counts is not None
            num_rows = sum(counts)
        routing = RowsByExpert(sent, memory, tables, order)
        tile_rows = tile_rows_of(inputs.expert_alignment)
        handle = DispatchHandle(
            sent.num_tokens, num_rows, counts, sent.buffer_serial, routing, {}, layout="expert", tile_rows=tile_rows
        )
        return handle, arrived

    def _launch_expand(
        self,
        handle: DispatchHandle,
        arrived: ArrivedRows,
        inputs: DispatchInputs,
        offsets: dict[str, int],
        base: int,
        stream: int,
    ) -> None:
        tables, x, scales, num_rows = handle.routing.tables, inputs.x, inputs.scales, handle.num_recv_rows
        values = {
            "x": arrived.address("x"),
            "scales": arrived.address("scales") if scales else 0,
            "topk_weights": arrived.address("topk_weights") if inputs.topk_weights else 0,
            "src_idx": arrived.address("src_idx"),
            **{name: tables[name] for name in ("positions", "offsets", "ends", "totals")},
            "out_x": base + offsets["x"],
            "out_scales": base + offsets["scales"],
            "out_weights": base + offsets["topk_weights"],
            "out_src_idx": base + offsets["src_idx"],
            "out_experts": base + offsets["expert_idx"],
            "out_offsets": base + offsets["expert_offsets"],
            "out_num_recv": base + offsets["num_recv"],
            "row_bytes": 0 if inputs.signals and not isinstance(self._by_token, NodesThroughput) else x.row_bytes,
            "scale_words": scales.row_bytes // 4 if scales else 0,
            "scale_stride": align_up(num_rows, SCALE_COLUMN_ALIGNMENT) if inputs.scales_by_column else 0,
            "num_topk": self._config.num_topk,
            "num_experts": self._config.num_local_experts,
            "num_rows": num_rows,
            "zero_padding": inputs.zero_padding,
        }
        num_items = arrived.num_rows + self._config.num_local_experts + -(-num_rows // TAIL_ROWS)
        launch_local("expand_rows", stream, values, num_items)

    def _result(self, num_rows: int, inputs: DispatchInputs) -> Map:
        """Arrange the results of a dispatch."""
        x, scales, weights = inputs.x, inputs.scales, inputs.topk_weights
        scale_rows = align_up(num_rows, SCALE_COLUMN_ALIGNMENT) if inputs.scales_by_column else num_rows
        return arrange(
            [
                ("expert_offsets", 4 * (self._config.num_local_experts + 1)),
                ("num_recv", 4),
                ("expert_idx", 4 * num_rows),
                ("topk_weights", 4 * num_rows if weights else 0),
                ("src_idx", 12 * num_rows),
                ("scales", scales.row_bytes * scale_rows if scales else 0),
                ("x", x.row_bytes * num_rows),
            ]
        )

    def _views(
        self,
        num_rows: int,
        *,
        formats: Sequence[tuple[str, tuple[int, ...]] | None],
        framework: Framework,
        scales_by_column: bool,
        offsets: dict[str, int],
        memory: Any,
        counts: tuple[int, Any],
        stream: int,
        words: TileWords | None,
    ) -> Views:
        """Make the results. `formats` are dtypes and shapes of x, topk_weights and scales. `words` are those of the tiles, with signals."""
        x, weights, scales = formats
        assert x is not None
        shapes = {
            "x": (x[0], (num_rows, *x[1][1:])),
            "src_idx": ("int32", (num_rows, 3)),
            "expert_idx": ("int32", (num_rows,)),
            "expert_offsets": ("int32", (self._config.num_local_experts + 1,)),
            "num_recv": ("int32", (1,)),
        }
        if weights:
            shapes["topk_weights"] = "float32", (num_rows,)
        if scales:
            dtype, (_, num_scales) = scales
            by_column = num_scales, align_up(num_rows, SCALE_COLUMN_ALIGNMENT)
            shapes["scales"] = dtype, by_column if scales_by_column else (num_rows, num_scales)
        # A consumer of tiles must not wait for the end of the call.
        result, filling_stream = self._runtime.result, stream if words is None else None
        views: Views = {
            name: result(memory.ptr + offsets[name], shape, dtype, memory, framework, filling_stream)
            for name, (dtype, shape) in shapes.items()
        }
        views["num_recv_per_expert"] = counts_view(self._runtime, "num_recv_per_expert", counts, framework, filling_stream)
        if words is not None:
            for name, (ptr, shape) in words.arrays().items():
                views[name] = result(ptr, shape, "int32", words.memory, framework, None)
        return views


class ChoiceSums:
    """Combine with `reduce="topk"`: the rank of a token gets a row for each choice, and adds them up in their order.

    The bits do not depend on where experts live.
    """

    _kernel = "combine_choices"

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, memory: CallMemory) -> None:
        self._runtime, self._by_token, self._memory = runtime, by_token, memory
        self._window = runtime.layout.choice_window
        staging, parts = runtime.regions.offsets["landing"], runtime.layout.choice_staging(self._window).offsets
        self._staging = {name: staging + offset for name, offset in parts.items()}

    def add_up(self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call) -> Callable[[], Views]:
        """Launch the kernels of each window of tokens. Return the function that makes the results. `tables`: see `RowsByExpert`."""
        self._by_token.check_support()
        runtime, stream, num_tokens = self._runtime, call.stream, by_token.num_tokens
        runtime.order.enqueue_waits(call)
        x, weights, *biases = runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        returns = weights is not None and not inputs.weighted
        parts = runtime.layout.combined(num_tokens, x.row_bytes, returns)
        owner = self._by_token.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        rows, more, prepare, work = self._rows(inputs.handle.num_recv_rows, x, weights, tables, call)
        values = {
            "num_tokens": num_tokens,
            "first_token": 0,
            "window_tokens": self._window,
            "is_weighted": inputs.weighted,
            "y": x.ptr,
            "topk_weights": address_of(weights),
            "bias_0": address_of(biases[0]) if biases else 0,
            "bias_1": address_of(biases[1]) if len(biases) > 1 else 0,
            "handle": by_token.routing.ptr,
            **rows,
            "out": out,
            "out_topk_weights": out_weights if returns else 0,
            "recv_x_offset": self._staging["x"],
            "recv_topk_weights_offset": self._staging["topk_weights"],
            **more,
            "call_signature": 0,
        }
        launch = runtime.launcher(self._kernel, x.dtype)
        with runtime.monitor.call_half("a combine with reduce='topk' was interrupted between its windows", "kPhaseCombineRows"):
            for step, first in enumerate(range(0, runtime.config.num_max_tokens_per_rank, self._window), 1):
                signature = inputs.signature._replace(alignment_or_step=step)
                prepare(first)
                launch(stream, self._by_token.num_sms, {**values, "first_token": first, "call_signature": pack(signature)})
        given = inputs.topk_weights, *inputs.biases
        own = by_token.routing, inputs.handle.routing.memory
        runtime.order.record_end(call, (x, weights, biases, inputs.x, work, *given), own, *given)
        return combine_views(runtime, x, num_tokens, out, out_weights if returns else None, owner, stream)

    def _rows(
        self, num_rows: int, x: View, weights: View | None, tables: dict[str, int], call: Call
    ) -> tuple[dict[str, int], dict[str, int], Callable[[int], None], Any]:
        """Return two parts of the kernel's Params, the function that runs before each launch, and the owner of memory that the call needs.

        `num_rows` counts the rows by expert. The function gets the first token of the window.
        """
        rows = {name: tables[name] for name in ("positions", "totals", "sources")}
        return rows, {"recv_masks_offset": self._staging["masks"]}, lambda first: None, None


class NodeChoiceSums(ChoiceSums):
    """The same over several nodes. The rows of each rank's window come from a list, which a kernel writes before."""

    _kernel = "combine_choices_nodes"

    def _rows(
        self, num_rows: int, x: View, weights: View | None, tables: dict[str, int], call: Call
    ) -> tuple[dict[str, int], dict[str, int], Callable[[int], None], Any]:
        runtime, config, nodes = self._runtime, self._runtime.config, self._runtime.layout.nodes
        assert nodes is not None
        assert runtime.network is not None
        network = runtime.network
        chunk = nodes.chunk(x.row_bytes, 0 if weights is None else 4, 0, False)
        parts = arrange([("rows", num_rows * ChoiceRow.size({})), ("first", (config.num_ranks + 1) * 4)])
        memory = self._memory.allocate(parts.num_bytes, call)
        rows, first_rows = memory.ptr + parts.offsets["rows"], memory.ptr + parts.offsets["first"]
        load_local("list_choices")  # another rank may have made its last launch before this one fails for want of a kernel

        def list_rows(first: int) -> None:
            values = {
                **{name: tables[name] for name in ("positions", "totals", "sources")},
                "weights": address_of(weights),
                "rows": rows,
                "first": first_rows,
                "num_topk": config.num_topk,
                "num_ranks": config.num_ranks,
                "first_token": first,
                "window_tokens": self._window,
            }
            launch_local("list_choices", call.stream, values, 1)
            network.wake()

        form = {
            "chunk_tokens": chunk.num_tokens,
            "chunk_weights": chunk.offsets["scales"],
            "chunk_rows": chunk.offsets["rows"],
        }
        return {"rows": rows, "first_rows": first_rows}, form, list_rows, memory
