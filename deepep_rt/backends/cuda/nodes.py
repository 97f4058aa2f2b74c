"""The throughput calls of the CUDA backend over several nodes: dispatch and combine through flows between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...arrays.compressed_rows import compressed_row_bytes
from ...arrays.view import View
from ...comm.call_signature import Signature, pack
from ...comm.consensus import agree_on_measurement
from ...config import COMBINE_DTYPES, MAX_NODES, MAX_ROUTE_BLOCKS, ROUTE_THREADS
from ...errors import EPInputError, EPOutOfMemoryError, EPUnavailableError
from ...jit.launch import Launcher
from ...kernels.nodes_layout import NodesLayout
from ...kernels.regions import Map
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs, DispatchInputs
from ..overflow import too_many_rows
from .link_rates import far_bandwidth, far_latency
from .node_choice_sums import NodeChoiceSums, NodeSums
from .result_memory import ResultMemory
from .result_views import arriving_rows, combine_views, dispatch_views
from .row_mover import OnLaunch
from .runtime import CudaRuntime, address_of

_MAX_MEASURED_BYTES = 1 << 30


class NodesThroughput:
    """Dispatch and combine as kernel launches over symmetric memory of each node, and network memory between nodes.

    Args:
        runtime: The Buffer's memory and kernels.
        nodes: The layout of these calls.
        copy_when_full: Copy results out of symmetric memory when the pool is full, instead of raising.
    """

    def __init__(self, runtime: CudaRuntime, nodes: NodesLayout, copy_when_full: bool) -> None:
        config, layout = runtime.config, runtime.layout
        self.num_sms = config.num_sms
        """SMs of the next calls."""
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._layout, self._nodes = config, layout, nodes
        assert runtime.network is not None
        self._network = runtime.network
        self._handles = runtime.slots(layout.handle.num_bytes, layout.num_handles)
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
        self._choice_sums = NodeChoiceSums(runtime, self.results)
        if config.num_nodes <= MAX_NODES:
            combine = [("combine_nodes", config.dtype)] if config.dtype in COMBINE_DTYPES else []
            runtime.load([("route_nodes", None), ("dispatch_nodes", None), *combine])

    def send_rows(
        self, inputs: DispatchInputs, call: Call, on_launch: OnLaunch | None = None
    ) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Launch the routing, unless a handle gives it, and the dispatch of rows by token. Wait for the counts if only they tell the size:
        before the launch of the dispatch if the pool has no room for `num_max_recv_tokens` rows.
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
        scale_bytes, idx_bytes = scales.row_bytes if scales else 0, idx.itemsize if idx else 0

        def parts_of(num_rows: int) -> Map:
            return self._layout.result(num_rows, x.row_bytes, scale_bytes, idx_bytes, idx is not None)

        most, counts_list = self._config.num_max_recv_tokens, None
        capacity = most if inputs.num_worst_tokens is None else inputs.num_worst_tokens
        if known is not None:
            capacity, tables, counts_list = known.num_recv_rows, known.routing, known.num_recv_tokens_per_expert_list
        parts = parts_of(capacity)
        # Without counts to wait for, a rank without room raises here, and makes no call at all.
        reserve = self.results.reserve_in_pool if needs_counts else self.results.reserve
        reserved = reserve(parts.num_bytes, call, reader)
        if known is None:
            counts_owner = tables = self._handles.acquire(stream, call.caller_stream, call.capture, call.follows)
            counts = tables.ptr + self._layout.handle.offsets["counts"]
        else:
            counts_owner = self.counts.acquire(stream, call.caller_stream, call.capture, call.follows)
            counts = counts_owner.ptr
        num_recv, has_room = None, True
        with self._monitor.call_half("a dispatch was interrupted between its counts and its rows", "kPhaseNodeRows"):
            if known is None:
                self._launch_route(idx, tables.ptr, inputs.expert_alignment, needs_counts, stream)
            if reserved is None:
                self._order.record_end(call, (*arrays, inputs.topk_idx), (tables,), inputs.topk_idx)  # an error may end the wait
                num_recv, counts_list = self._monitor.await_counts()
                capacity = num_recv if num_recv <= most else 0
                try:
                    reserved = (
                        self.results.reserve(parts_of(capacity).num_bytes, call, reader) if capacity else self.results.no_rows()
                    )
                except EPOutOfMemoryError:  # the other ranks wait for this rank: the kernel tells them
                    capacity, has_room, reserved = 0, False, self.results.no_rows()
                parts = parts_of(capacity)
            place = reserved.offset, parts.offsets, capacity, counts
            launch, params = self.dispatch_launch(inputs.signature, arrays, tables.ptr, *place)
            params["refuses_more"], params["repeats"] = needs_counts, known is not None
            self._network.wake()
            launch(stream, self.num_sms, params)
            if known is None and on_launch is not None and has_room:
                first = self._runtime.memory.ptr + reserved.offset
                on_launch(arriving_rows(first, parts.offsets, tables.ptr, self._layout.handle.offsets, capacity, idx_bytes))
            given = inputs.topk_idx, inputs.topk_weights, inputs.scales
            self._order.record_end(call, (*arrays, inputs.x, *given), (tables, counts_owner), *given)
            if needs_counts and num_recv is None:
                num_recv, counts_list = self._monitor.await_counts()
        if num_recv is not None:
            if num_recv > most or not has_room:
                self._runtime.synchronize()  # raises what the kernels of all ranks report
                raise too_many_rows(self._runtime.rank, num_recv, most)
            capacity = num_recv
        owner, base = self.results.keep(reserved, parts.offsets["x"] + capacity * x.row_bytes, call, reader)
        make_views = dispatch_views(
            self._runtime, arrays, parts.offsets, capacity, rows=(base, owner), counts=(counts, counts_owner), stream=stream
        )
        handle = known or DispatchHandle(x.shape[0], capacity, counts_list, self._runtime.info.serial, tables, {})
        return handle, make_views

    def _launch_route(self, idx: View, tables: int, expert_alignment: int, needs_counts: bool, stream: int) -> None:
        if needs_counts:
            self._runtime.page.expect_counts()
        self._network.wake()
        num_blocks = min(-(-idx.shape[0] // ROUTE_THREADS), MAX_ROUTE_BLOCKS, self.num_sms)
        self._runtime.launcher("route_nodes")(
            stream,
            max(num_blocks, 1),
            {
                "num_tokens": idx.shape[0],
                "topk_idx": idx.ptr,
                "handle": tables,
                "idx_bytes": idx.itemsize,
                "expert_alignment": expert_alignment,
                "check": self._config.check_inputs,
                "to_host": needs_counts,
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
        scale_bytes, idx_bytes = scales.row_bytes if scales else 0, idx.itemsize if idx else 0
        chunk = self._nodes.chunk(x.row_bytes, scale_bytes, idx_bytes, weights is not None)
        counts_offsets = self._layout.counts.offsets
        return self._runtime.launcher("dispatch_nodes"), {
            "row_bytes": x.row_bytes,
            "x": x.ptr,
            "scales": address_of(scales),
            "topk_idx": address_of(idx),
            "topk_weights": address_of(weights),
            "handle": tables,
            **{f"recv_{name}_offset": offset + parts[name] for name in ("x", "scales", "topk_idx", "topk_weights", "src_idx")},
            "capacity": capacity,
            "num_recv": counts + counts_offsets["num_recv"],
            "num_recv_per_expert": counts + counts_offsets["num_recv_per_expert"],
            "scale_bytes": scale_bytes,
            "idx_bytes": idx_bytes,
            "refuses_more": False,  # only a call that waits for counts sets it
            "repeats": True,  # only a call that launches the routing clears it
            "chunk_tokens": chunk.num_tokens,
            **{f"chunk_{name}": chunk.offsets[name] for name in ("topk_idx", "weights", "scales", "rows")},
            "call_signature": pack(signature),
        }

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Launch one kernel: each node adds up its rows of a token, and the token's rank adds up the sums of the nodes."""
        self.check_support()
        stream, handle = call.stream, inputs.handle
        self._order.enqueue_waits(call)
        arrays = x, weights, *biases = self._runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        parts = self._layout.combined(handle.num_tokens, x.row_bytes, weights is not None)
        owner = self.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        launch, params = self.combine_launch(inputs, arrays, out, out_weights)
        self._network.wake()
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
        sums = NodeSums(
            y=x.ptr,
            topk_weights=address_of(weights),
            out=out,
            out_topk_weights=out_weights if weights is not None else 0,
            biases=(address_of(biases[0]) if biases else 0, address_of(biases[1]) if len(biases) > 1 else 0),
        )
        return self._combine_launch(inputs, sums, inputs.handle)

    def add_up_choices(
        self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call
    ) -> Callable[[], Views]:
        """Launch a combine for each choice; see `NodeChoiceSums`."""
        self.check_support()
        return self._choice_sums.add_up(inputs, by_token, tables, call, self._launch_combine)

    def _launch_combine(self, inputs: CombineInputs, sums: NodeSums, by_token: DispatchHandle, stream: int) -> None:
        launch, params = self._combine_launch(inputs, sums, by_token)
        self._network.wake()
        launch(stream, self.num_sms, params)

    def _combine_launch(self, inputs: CombineInputs, sums: NodeSums, by_token: DispatchHandle) -> tuple[Launcher, dict[str, Any]]:
        """Return the combine kernel for rows by token, and its Params. `inputs` are those of the whole call, which all ranks must agree
        on.
        """
        dtype, row_bytes = inputs.x.dtype, inputs.x.row_bytes
        staging = {
            name: self._runtime.regions.offsets["landing"] + at for name, at in self._nodes.staging(row_bytes).offsets.items()
        }
        kernel, sent_bytes = "combine_nodes", row_bytes
        if inputs.compress:
            kernel, sent_bytes = f"combine_nodes_{inputs.compress}", compressed_row_bytes(self._config.hidden, inputs.compress)
        chunk, base = self._nodes.chunk(sent_bytes, 0, 0, sums.topk_weights != 0), self._runtime.memory.ptr
        return self._runtime.launcher(kernel, dtype), {
            "num_tokens": by_token.num_tokens,
            "y": sums.y,
            "topk_weights": sums.topk_weights,
            "bias_0": sums.biases[0],
            "bias_1": sums.biases[1],
            "handle": by_token.routing.ptr,
            "out": sums.out,
            "out_topk_weights": sums.out_topk_weights,
            "exposed_offset": staging["exposed"],
            "exposed_weights_offset": staging["exposed_weights"],
            "sums": base + staging["sums"],
            "sum_weights": base + staging["sum_weights"],
            "capacity": by_token.num_recv_rows,
            "call_signature": pack(inputs.signature._replace(alignment_or_step=max(sums.choice, 0) + 1)),
            "chunk_tokens": chunk.num_tokens,
            "chunk_weights": chunk.offsets["weights"],
            "chunk_rows": chunk.offsets["rows"],
            "choice": sums.choice,
            "expert_offsets": sums.expert_offsets,
            "expert_ends": sums.expert_ends,
        }

    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """Measure the bytes a second that each rank puts to other nodes while all ranks do; see `Buffer.copy_ceilings`."""
        self.check_support()
        runtime, config = self._runtime, self._config
        met = agree_on_measurement(runtime.comm, config.timeout_s, row_bytes=row_bytes, num_rows=num_rows, iterations=iterations)
        met.release()
        num_bytes = min(iterations * num_rows * row_bytes * (config.num_ranks - config.node_size), _MAX_MEASURED_BYTES)
        return {"puts to other nodes": far_bandwidth(runtime, num_bytes, self.num_sms)}

    def far_latency(self) -> float:
        """Measure the seconds that a word takes to another node. Collective."""
        self.check_support()
        return far_latency(self._runtime)

    def check_support(self) -> None:
        """Raise EPUnavailableError if this Buffer cannot make throughput calls."""
        if self._config.num_nodes > MAX_NODES:
            raise EPUnavailableError(
                f"this Buffer has {self._config.num_nodes} nodes; expected at most {MAX_NODES} for dispatch and combine. Use the "
                f"low-latency calls, or fewer nodes"
            )
