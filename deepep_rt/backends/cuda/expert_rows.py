"""Throughput calls of the CUDA backend with rows that lie expert by expert: a row for each (token, choice).

Rows travel by token, so each crosses a link once. This rank then copies them to the rows of their experts, and adds up the rows of a token
before a combine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.view import View
from ...comm.call_signature import pack
from ...errors import EPOutOfMemoryError
from ...jit.launch import launch_local, load_local
from ...kernels.regions import Map, align_up, arrange
from ...kernels.tuning import CHOICES_PER_BLOCK, MAX_POSITION_BLOCKS, TAIL_ROWS
from ...results import DispatchHandle, Views
from ..base import SCALE_COLUMN_ALIGNMENT, Call, CombineInputs, DispatchInputs
from .result_memory import ArrivingRows, CallMemory, combine_views
from .runtime import CudaRuntime, address_of
from .throughput import NodesThroughput, RowMover


@dataclass(frozen=True, eq=False)
class RowsByExpert:
    """The tables of a handle of `layout="expert"`."""

    by_token: DispatchHandle
    memory: Any  # the owner of the tables
    tables: dict[str, int]  # addresses of positions, offsets, ends, totals and sources: see the kernel expert_positions


class ExpertRows:
    """Dispatch and combine of rows by expert, by means of rows by token."""

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, memory: CallMemory) -> None:
        self._runtime, self._config, self._by_token = runtime, runtime.config, by_token
        self._memory = memory
        self._choice_sums = (
            NodeChoiceSums(runtime, by_token, memory) if isinstance(by_token, NodesThroughput) else ChoiceSums(runtime, by_token)
        )
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
        if known:
            handle = known
            _, make_views = self._by_token.send_rows(by_token, call)
        else:
            handle, make_views = self._send_with_new_routing(inputs, by_token, call)
        views = make_views()
        routing: RowsByExpert = handle.routing
        routing.memory.add_stream(stream)
        parts = self._result(handle.num_recv_rows, views, inputs.scales_by_column)
        try:
            memory = self._memory.allocate(parts.num_bytes, call, call.caller_stream)
        except EPOutOfMemoryError as error:
            error.call_made = True  # the rows by token have arrived, and the other ranks do not know of this error
            raise
        counts = views["num_recv_per_expert"]
        assert counts is not None
        with self._runtime.monitor.call_half(
            "a dispatch was interrupted between its rows by token and by expert", "kPhaseDispatchRows"
        ):
            self._launch_expand(handle, views, inputs, parts, memory.ptr, stream)
            self._runtime.order.record_end(call, (), (routing.memory,))
        formats = {name: view and (view.dtype, view.shape[1:]) for name, view in views.items()}
        make = functools.partial(self._views, formats, counts, handle, inputs.scales_by_column, parts, memory, call)
        return handle, make

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results."""
        stream, handle = call.stream, inputs.handle
        routing: RowsByExpert = handle.routing
        routing.memory.add_stream(stream)
        if inputs.reduce == "topk":
            return self._choice_sums.add_up(inputs, routing.by_token, routing.tables, call)
        order, num_topk = self._runtime.order, self._config.num_topk
        order.enqueue_waits(call)
        x, weights = self._runtime.on_device(stream, inputs.x, inputs.topk_weights)
        num_tokens, returns = routing.by_token.num_recv_rows, weights is not None and not inputs.weighted
        parts = arrange([("weights", num_tokens * num_topk * 4 if returns else 0), ("x", num_tokens * x.row_bytes)])
        memory = self._memory.allocate(parts.num_bytes, call)
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
            "choice": -1,
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
        self, inputs: DispatchInputs, by_token: DispatchInputs, call: Call
    ) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue the dispatch of the rows by token, and behind it the search of the rows of each expert. Return the handle of rows by
        expert.

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

        sent, make_views = self._by_token.send_rows(by_token, call, find_positions)
        counts = sent.num_recv_tokens_per_expert_list
        num_rows = worst
        if num_rows is None:
            assert counts is not None
            num_rows = sum(counts)
        routing = RowsByExpert(sent, memory, tables)
        return DispatchHandle(sent.num_tokens, num_rows, counts, sent.buffer_serial, routing, {}, layout="expert"), make_views

    def _launch_expand(
        self, handle: DispatchHandle, by_token: Views, inputs: DispatchInputs, parts: Map, base: int, stream: int
    ) -> None:
        routing: RowsByExpert = handle.routing
        x, scales, num_rows = by_token["x"], by_token.get("scales"), handle.num_recv_rows
        assert x is not None
        values = {
            "x": x.ptr,
            "scales": address_of(scales),
            "topk_weights": address_of(by_token.get("topk_weights")),
            "src_idx": address_of(by_token["src_idx"]),
            **{name: routing.tables[name] for name in ("positions", "offsets", "ends", "totals")},
            "out_x": base + parts.offsets["x"],
            "out_scales": base + parts.offsets["scales"],
            "out_weights": base + parts.offsets["topk_weights"],
            "out_src_idx": base + parts.offsets["src_idx"],
            "out_experts": base + parts.offsets["expert_idx"],
            "out_offsets": base + parts.offsets["expert_offsets"],
            "out_num_recv": base + parts.offsets["num_recv"],
            "row_bytes": x.row_bytes,
            "scale_words": scales.row_bytes // 4 if scales else 0,
            "scale_stride": align_up(num_rows, SCALE_COLUMN_ALIGNMENT) if inputs.scales_by_column else 0,
            "num_topk": self._config.num_topk,
            "num_experts": self._config.num_local_experts,
            "num_rows": num_rows,
            "zero_padding": inputs.zero_padding,
        }
        num_items = x.shape[0] + self._config.num_local_experts + -(-num_rows // TAIL_ROWS)
        launch_local("expand_rows", stream, values, num_items)

    def _result(self, num_rows: int, by_token: Views, scales_by_column: bool) -> Map:
        """Arrange the results of a dispatch."""
        x, scales, weights = by_token["x"], by_token.get("scales"), by_token.get("topk_weights")
        assert x is not None
        scale_rows = align_up(num_rows, SCALE_COLUMN_ALIGNMENT) if scales_by_column else num_rows
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
        formats: dict[str, Any],
        counts: View,
        handle: DispatchHandle,
        scales_by_column: bool,
        parts: Map,
        memory: Any,
        call: Call,
    ) -> Views:
        num_rows = handle.num_recv_rows
        dtype, row = formats["x"]
        shapes = {
            "x": (dtype, (num_rows, *row)),
            "src_idx": ("int32", (num_rows, 3)),
            "expert_idx": ("int32", (num_rows,)),
            "expert_offsets": ("int32", (self._config.num_local_experts + 1,)),
            "num_recv": ("int32", (1,)),
        }
        if formats.get("topk_weights"):
            shapes["topk_weights"] = "float32", (num_rows,)
        if formats.get("scales"):
            dtype, (num_scales,) = formats["scales"]
            by_column = num_scales, align_up(num_rows, SCALE_COLUMN_ALIGNMENT)
            shapes["scales"] = dtype, by_column if scales_by_column else (num_rows, num_scales)
        result, framework = self._runtime.result, counts.framework
        views: Views = {
            name: result(memory.ptr + parts.offsets[name], shape, dtype, memory, framework, call.stream)
            for name, (dtype, shape) in shapes.items()
        }
        views["num_recv_per_expert"] = counts
        return views


class ChoiceSums:
    """Combine with `reduce="topk"` on one node: the rank of a token gets a row for each choice, and adds them up in their order.

    The bits do not depend on where experts live.
    """

    def __init__(self, runtime: CudaRuntime, by_token: RowMover) -> None:
        self._runtime, self._by_token = runtime, by_token
        layout, staging = runtime.layout, runtime.regions.offsets["landing"]
        self._window = layout.choice_window
        parts = layout.choice_staging(self._window).offsets
        self._regions = {
            "recv_x_offset": staging + parts["x"],
            "recv_topk_weights_offset": staging + parts["topk_weights"],
            "recv_masks_offset": staging + parts["masks"],
        }

    def add_up(self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call) -> Callable[[], Views]:
        """Launch a kernel for each window of tokens. Return the function that makes the results. `tables`: see `RowsByExpert`."""
        self._by_token.check_support()
        runtime, stream, num_tokens = self._runtime, call.stream, by_token.num_tokens
        runtime.order.enqueue_waits(call)
        x, weights, *biases = runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        returns = weights is not None and not inputs.weighted
        parts = runtime.layout.combined(num_tokens, x.row_bytes, returns)
        owner = self._by_token.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
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
            **{name: tables[name] for name in ("positions", "totals", "sources")},
            "out": out,
            "out_topk_weights": out_weights if returns else 0,
            **self._regions,
            "call_signature": 0,
        }
        launch = runtime.launcher("combine_choices", x.dtype)
        with runtime.monitor.call_half("a combine with reduce='topk' was interrupted between its windows", "kPhaseCombineRows"):
            for step, first in enumerate(range(0, runtime.config.num_max_tokens_per_rank, self._window), 1):
                signature = inputs.signature._replace(alignment_or_step=step)
                launch(stream, self._by_token.num_sms, {**values, "first_token": first, "call_signature": pack(signature)})
        given = inputs.topk_weights, *inputs.biases
        own = by_token.routing, inputs.handle.routing.memory
        runtime.order.record_end(call, (x, weights, biases, inputs.x, *given), own, *given)
        return combine_views(runtime, x, num_tokens, out, out_weights if returns else None, owner, stream)


class NodeChoiceSums:
    """Combine with `reduce="topk"` over several nodes: a combine of rows by token for each choice, whose results this rank adds up.

    For each choice, `y` by token has the row of this choice, or zeros. One rank has the row of a (token, choice), so the combine of these
    rows adds zeros to it and rounds nothing. Over the links go `num_topk` times the bytes of a combine with `reduce="rank"`.
    """

    def __init__(self, runtime: CudaRuntime, by_token: NodesThroughput, memory: CallMemory) -> None:
        self._runtime, self._by_token, self._memory = runtime, by_token, memory

    def add_up(self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call) -> Callable[[], Views]:
        """Launch three kernels for each choice. Return the function that makes the results. `tables`: see `RowsByExpert`."""
        self._by_token.check_support()
        runtime, stream, config = self._runtime, call.stream, self._runtime.config
        runtime.order.enqueue_waits(call)
        x, weights, *biases = runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        num_tokens, num_rows, num_topk = by_token.num_tokens, by_token.num_recv_rows, config.num_topk
        returns = weights is not None and not inputs.weighted
        parts = runtime.layout.combined(num_tokens, x.row_bytes, returns)
        owner = self._by_token.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        weight_bytes = 0 if weights is None else num_topk * 4
        work = arrange(
            [
                ("weights_by_token", num_rows * weight_bytes),
                ("weights", num_tokens * weight_bytes if inputs.weighted else 0),
                ("rows_by_token", num_rows * x.row_bytes),
                ("rows", num_tokens * x.row_bytes),
                ("sums", num_tokens * config.hidden * 4 if num_topk > 1 else 0),
            ]
        )
        memory = self._memory.allocate(work.num_bytes, call)
        at = {name: memory.ptr + offset for name, offset in work.offsets.items()}
        token_weights = 0 if weights is None else at["weights"] if inputs.weighted else out_weights
        # Another rank may have made its last launch for a choice before this one. So no launch may fail for want of a kernel.
        load_local("sum_expert_rows", "add_choice", dtype=x.dtype)
        runtime.launcher("combine_nodes", x.dtype)
        with runtime.monitor.call_half("a combine with reduce='topk' was interrupted between its choices", "kPhaseNodeSums"):
            for choice in range(num_topk):
                sends_weights = choice == 0 and weights is not None
                self._select(x, weights if sends_weights else None, tables, at, choice, num_rows, stream)
                params = {
                    "num_tokens": num_tokens,
                    "y": at["rows_by_token"],
                    "topk_weights": at["weights_by_token"] if sends_weights else 0,
                    "bias_0": 0,
                    "bias_1": 0,
                    "handle": by_token.routing.ptr,
                    "out": at["rows"],
                    "out_topk_weights": token_weights,  # for all choices, because a launch that fails fills them with NaN
                }
                of_choice = {"choice": choice, "expert_offsets": tables["offsets"], "expert_ends": tables["ends"]}
                self._by_token.launch_choice(inputs, num_rows, params, of_choice, stream)
                is_last = choice == num_topk - 1
                values = {
                    "x": at["rows"],
                    "weights": token_weights if inputs.weighted else 0,
                    "sums": at["sums"],
                    "bias_0": address_of(biases[0]) if biases else 0,
                    "bias_1": address_of(biases[1]) if len(biases) > 1 else 0,
                    "out": out if is_last else 0,
                    "num_tokens": num_tokens,
                    "row_bytes": x.row_bytes,
                    "num_topk": num_topk,
                    "choice": choice,
                }
                launch_local("add_choice", stream, values, num_tokens, x.dtype)
        given = inputs.topk_weights, *inputs.biases
        own = by_token.routing, inputs.handle.routing.memory
        runtime.order.record_end(call, (x, weights, biases, inputs.x, memory, *given), own, *given)
        return combine_views(runtime, x, num_tokens, out, out_weights if returns else None, owner, stream)

    def _select(
        self, x: View, weights: View | None, tables: dict[str, int], at: dict[str, int], choice: int, num_rows: int, stream: int
    ) -> None:
        """Launch the copy of the rows of a choice to rows by token, and of all weights if there are any."""
        values = {
            "x": x.ptr,
            "weights": address_of(weights),
            "positions": tables["positions"],
            "totals": tables["totals"],
            "out": at["rows_by_token"],
            "out_weights": 0 if weights is None else at["weights_by_token"],
            "row_bytes": x.row_bytes,
            "num_topk": self._runtime.config.num_topk,
            "choice": choice,
        }
        launch_local("sum_expert_rows", stream, values, num_rows, x.dtype)
