"""The throughput calls of the CUDA backend: dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...arrays.compressed_rows import compressed_row_bytes
from ...arrays.view import View
from ...comm.call_signature import Signature, pack
from ...config import COMBINE_DTYPES, MAX_RANKS_PER_NODE, MAX_ROUTE_BLOCKS, ROUTE_THREADS, rows_per_copy
from ...errors import EPInputError, EPUnavailableError
from ...jit.launch import Launcher
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs, DispatchInputs
from .choice_sums import ChoiceSums
from .copy_ceilings import copy_ceilings
from .result_memory import ResultMemory
from .result_views import arriving_rows, combine_views, dispatch_views
from .row_mover import OnLaunch
from .runtime import CudaRuntime, address_of

_PUBLISHED = (
    "recv_x_offset",
    "recv_scales_offset",
    "recv_topk_idx_offset",
    "recv_topk_weights_offset",
    "recv_src_idx_offset",
    "capacity",
    "call_signature",
)
"""Params of a dispatch that its routing tells the peers."""


class Throughput:
    """Dispatch and combine as kernel launches over symmetric memory.

    Args:
        runtime: The Buffer's memory and kernels.
        copy_when_full: Copy results out of symmetric memory when the pool is full, instead of raising.
    """

    def __init__(self, runtime: CudaRuntime, copy_when_full: bool) -> None:
        config, layout = runtime.config, runtime.layout
        self.num_sms = config.num_sms
        """SMs of the next calls."""
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._layout, self._regions = config, layout, runtime.regions
        self._handles = runtime.slots(layout.handle.num_bytes, layout.num_handles)
        self._counts_offsets = layout.counts.offsets
        self.counts = runtime.slots(layout.counts.num_bytes, layout.num_handles)
        self.results = ResultMemory(
            runtime.memory.ptr,
            runtime.regions,
            config.num_slots,
            runtime.order,
            runtime.stream_pool,
            copy_when_full,
            counts_use=config.statistics,
        )
        self._choice_sums = ChoiceSums(runtime, self.results)
        self._has_peer_access = config.num_ranks <= MAX_RANKS_PER_NODE and all(runtime.memory.peers)
        if self._has_peer_access:
            combine = [("combine", config.dtype)] if config.dtype in COMBINE_DTYPES else []
            runtime.load([("route", None), ("dispatch", None), *combine])

    def send_rows(
        self, inputs: DispatchInputs, call: Call, on_launch: OnLaunch | None = None
    ) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Launch the routing, unless a handle gives it, and the dispatch of rows by token. Wait for the counts if only they tell
        the size.
        """
        self.check_support()
        known, stream = inputs.handle, call.stream
        reader = call.caller_stream if inputs.layout == "token" else None  # rows by expert are copied out of these rows
        self._order.enqueue_waits(call)
        needs_counts = known is None and inputs.num_worst_tokens is None
        if needs_counts and call.capture is not None:
            raise EPInputError(
                "num_worst_tokens=None in a CUDA graph capture, where the host cannot wait for counts; expected a number of rows. Pass "
                "num_worst_tokens=, or handle="
            )
        arrays = self._runtime.on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.scales)
        x, idx, _, scales = arrays
        row_bytes, scale_bytes = x.row_bytes, scales.row_bytes if scales else 0
        # Counts have memory of their own: a caller that keeps them must not keep the rows.
        if known is None:
            capacity = self._config.num_max_recv_tokens if inputs.num_worst_tokens is None else inputs.num_worst_tokens
            counts_owner = tables = self._handles.acquire(stream, call.caller_stream, call.capture, call.follows)
            counts = tables.ptr + self._layout.handle.offsets["counts"]
        else:
            capacity, tables = known.num_recv_rows, known.routing
            counts_owner = self.counts.acquire(stream, call.caller_stream, call.capture, call.follows)
            counts = counts_owner.ptr
        parts = self._layout.result(capacity, row_bytes, scale_bytes, idx.itemsize if idx else 0, idx is not None)
        reserved = self.results.reserve(parts.num_bytes, call, reader)
        place = tables.ptr, reserved.offset, parts.offsets, capacity, counts
        launch, params = self.dispatch_launch(inputs.signature, arrays, *place)
        params["follows_route"], params["to_host"] = known is None, needs_counts
        num_rows, counts_list = capacity, known.num_recv_tokens_per_expert_list if known else None
        with self._monitor.call_half("a dispatch was interrupted between its counts and its rows", "kPhaseDispatchRows"):
            if known is None:
                self._launch_route(inputs, idx, params, needs_counts, stream)
            launch(stream, self.num_sms, params)
            if known is None and on_launch is not None:  # before the end of the call is recorded, and before the host waits
                first = self._runtime.memory.ptr + reserved.offset
                on_launch(arriving_rows(first, parts.offsets, tables.ptr, self._layout.handle.offsets, capacity, idx.itemsize))
            given = inputs.topk_idx, inputs.topk_weights, inputs.scales
            self._order.record_end(call, (*arrays, inputs.x, *given), (tables, counts_owner), *given)
            if needs_counts:
                num_rows, counts_list = self._monitor.await_counts()
        owner, base = self.results.keep(reserved, parts.offsets["x"] + num_rows * row_bytes, call, reader)
        make_views = dispatch_views(
            self._runtime, arrays, parts.offsets, num_rows, rows=(base, owner), counts=(counts, counts_owner), stream=stream
        )
        handle = known or DispatchHandle(x.shape[0], num_rows, counts_list, self._runtime.info.serial, tables, {})
        return handle, make_views

    def _launch_route(
        self, inputs: DispatchInputs, idx: View, dispatch: Mapping[str, int], needs_counts: bool, stream: int
    ) -> None:
        """Launch the routing of a dispatch with these Params. It tells the peers where that dispatch receives rows."""
        if needs_counts:
            self._runtime.page.expect_counts()
        counting = max(min(-(-idx.shape[0] // ROUTE_THREADS), MAX_ROUTE_BLOCKS, self.num_sms - 1), 1)
        self._runtime.launcher("route")(
            stream,
            counting + 1,  # block 0 publishes the receive windows
            {
                "num_tokens": idx.shape[0],
                "topk_idx": idx.ptr,
                "handle": dispatch["handle"],
                "idx_bytes": idx.itemsize,
                "expert_alignment": inputs.expert_alignment,
                "check": self._config.check_inputs,
                "to_host": needs_counts,
                **{name: dispatch[name] for name in _PUBLISHED},
            },
        )

    def dispatch_launch(
        self,
        signature: Signature,
        arrays: Sequence[Any],
        tables: int,
        offset: int,
        parts: Mapping[str, int],
        capacity: int,
        counts: int,
    ) -> tuple[Launcher, dict[str, Any]]:
        """See `RowMover.dispatch_launch`."""
        x, idx, weights, scales = arrays
        row_bytes, scale_bytes = x.row_bytes, scales.row_bytes if scales else 0
        return self._runtime.launcher("dispatch"), {
            "row_bytes": row_bytes,
            "x": x.ptr,
            "scales": address_of(scales),
            "topk_idx": address_of(idx),
            "topk_weights": address_of(weights),
            "handle": tables,
            "recv_x_offset": offset + parts["x"],
            "recv_scales_offset": offset + parts["scales"],
            "recv_topk_idx_offset": offset + parts["topk_idx"],
            "recv_topk_weights_offset": offset + parts["topk_weights"],
            "recv_src_idx_offset": offset + parts["src_idx"],
            "capacity": capacity,
            "num_recv": counts + self._counts_offsets["num_recv"],
            "num_recv_per_expert": counts + self._counts_offsets["num_recv_per_expert"],
            "scale_bytes": scale_bytes,
            "idx_bytes": idx.itemsize if idx else 0,
            "rows_per_copy": rows_per_copy(row_bytes, self._runtime.dispatch_copy_bytes),
            "follows_route": False,  # only a call that launches the routing sets these two
            "to_host": False,
            "call_signature": pack(signature),
        }

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Launch one kernel: rows arrive in the staging region of the tokens' ranks, which add them up."""
        self.check_support()
        stream, handle = call.stream, inputs.handle
        self._order.enqueue_waits(call)
        arrays = x, weights, *biases = self._runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        parts = self._layout.combined(handle.num_tokens, x.row_bytes, weights is not None)
        owner = self.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        launch, params = self.combine_launch(inputs, arrays, out, out_weights)
        launch(stream, self.num_sms, params)
        given = inputs.topk_weights, *inputs.biases
        self._order.record_end(call, (x, weights, biases, inputs.x, *given), (handle.routing,), *given)
        shown = out, out_weights if weights is not None else None
        return combine_views(self._runtime, x, handle.num_tokens, *shown, owner, stream)

    def combine_launch(
        self, inputs: CombineInputs, arrays: Sequence[Any], out: int, out_weights: int
    ) -> tuple[Launcher, dict[str, Any]]:
        """See `RowMover.combine_launch`."""
        x, weights, *biases = arrays
        kernel, staged_bytes = "combine", x.row_bytes
        if inputs.compress:
            kernel, staged_bytes = f"combine_{inputs.compress}", compressed_row_bytes(self._config.hidden, inputs.compress)
        staging = self._layout.staging(staged_bytes).offsets
        staging_offset = self._regions.offsets["landing"]
        return self._runtime.launcher(kernel, x.dtype), {
            "num_tokens": inputs.handle.num_tokens,
            "y": x.ptr,
            "topk_weights": address_of(weights),
            "bias_0": address_of(biases[0]) if biases else 0,
            "bias_1": address_of(biases[1]) if len(biases) > 1 else 0,
            "handle": inputs.handle.routing.ptr,
            "out": out,
            "out_topk_weights": out_weights,
            "recv_x_offset": staging_offset + staging["x"],
            "recv_topk_weights_offset": staging_offset + staging["topk_weights"],
            "capacity": inputs.handle.num_recv_rows,
            "call_signature": pack(inputs.signature),
        }

    def add_up_choices(
        self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call
    ) -> Callable[[], Views]:
        """Launch one kernel for each window of tokens; see `ChoiceSums`."""
        self.check_support()
        return self._choice_sums.add_up(inputs, by_token, tables, self.num_sms, call)

    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """Measure how fast rows and copies reach the other ranks; see `Buffer.copy_ceilings`."""
        self.check_support()
        return copy_ceilings(self._runtime, self.num_sms, row_bytes, num_rows, iterations)

    def check_support(self) -> None:
        """Raise EPUnavailableError if this Buffer cannot make throughput calls."""
        if not self._has_peer_access:
            raise EPUnavailableError(
                f"some ranks of this Buffer have no direct access to each other; expected up to {MAX_RANKS_PER_NODE} ranks over NVLink or "
                f"PCIe for dispatch and combine. Use the low-latency calls"
            )
