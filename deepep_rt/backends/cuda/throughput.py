"""The throughput calls of the CUDA backend: dispatch and combine of rows by token, on one node and over several.

`ThroughputCalls` chooses the layout of the rows. In `PreparedThroughput`, memory, parameters and results are bound once.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from ...arrays.compressed_rows import compressed_row_bytes
from ...arrays.view import HOST, Framework, View
from ...comm.call_signature import pack
from ...comm.consensus import agree_on_measurement
from ...config import MAX_NODES, MAX_RANKS_PER_NODE, MAX_ROUTE_BLOCKS, ROUTE_THREADS, rows_per_copy
from ...cuda.pool import Block
from ...errors import EPInputError, EPOutOfMemoryError, EPUnavailableError
from ...jit.launch import Launcher, PreparedLaunch
from ...kernels.nodes_layout import NodesLayout
from ...kernels.regions import Map
from ...kernels.table import throughput_kernels
from ...results import CombineResult, DispatchHandle, DispatchResult, Event, Views
from ..base import Call, CombineInputs, DispatchInputs, ThroughputPreparation
from ..overflow import too_many_rows
from .fp8_rows import Fp8Rows
from .link_rates import copy_ceilings, far_bandwidth, far_latency
from .monitor import whole_call
from .network_memory import NetworkMemory
from .repeated_call import RepeatedCall, check_stream
from .result_memory import ArrivedRows, Growing, OnLaunch, Reservation, ResultMemory, arriving_rows, combine_views
from .runtime import CudaRuntime, address_of

_MAX_MEASURED_BYTES = 1 << 30


def _counts_in_capture() -> EPInputError:
    return EPInputError(
        "num_worst_tokens=None in a CUDA graph capture, where the host cannot wait for counts; expected a number of rows. Pass "
        "num_worst_tokens=, or handle="
    )


def _growing(runtime: CudaRuntime) -> Growing | None:
    memory = runtime.memory.heap
    if memory is None or not memory.can_grow:
        return None
    monitor = runtime.monitor  # its notice is another one in each generation
    return Growing(memory, runtime.config.timeout_s, lambda: monitor.failure_notice.heard("more memory for results"))


def receive_window(offset: int, parts: Mapping[str, int], capacity: int) -> dict[str, int]:
    """Return where the rows of a dispatch arrive, as members of Params. The result lies at `offset` of symmetric memory, and `parts` are
    offsets in it.
    """
    return {
        "recv_x_offset": offset + parts["x"],
        "recv_scales_offset": offset + parts["scales"],
        "recv_topk_idx_offset": offset + parts["topk_idx"],
        "recv_topk_weights_offset": offset + parts["topk_weights"],
        "recv_src_idx_offset": offset + parts["src_idx"],
        "capacity": capacity,
    }


class RowMover(ABC):
    """Moves rows by token between ranks, as kernel launches: `Throughput` on one node, `NodesThroughput` on several.

    If the pool is full, `copy_when_full` lets results be copied out of symmetric memory, instead of an error. `unavailable` says why this
    Buffer cannot make throughput calls, or is empty.
    """

    _suffix = ""
    """Of the kernels' names."""
    _rows_phase = "kPhaseDispatchRows"
    """Of an interrupted dispatch."""
    _waits_when_full = False
    """A dispatch waits for its counts before it needs memory for its rows, if the pool is full."""
    _waits_always = False
    """It does so always, because its memory grows by what the counts tell."""
    _network: NetworkMemory | None = None
    """Over several nodes: wakes before kernels put something to other nodes."""

    def __init__(self, runtime: CudaRuntime, copy_when_full: bool, unavailable: str) -> None:
        config, layout = runtime.config, runtime.layout
        self.num_sms = config.num_sms
        """SMs of the next calls."""
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._layout, self._unavailable = config, layout, unavailable
        self._handles = runtime.slots(layout.handle.num_bytes, layout.num_handles, are_tables=True)
        self.most_rows = config.num_max_recv_tokens
        """The most rows that a dispatch may bring to this rank."""
        self._counts_offsets, self._landing = layout.counts.offsets, runtime.regions.offsets["landing"]
        self.counts = runtime.slots(layout.counts.num_bytes, layout.num_handles, are_tables=True)
        """Memory for the counts of dispatches with a handle."""
        self.results = ResultMemory(
            runtime.memory.ptr,
            runtime.regions,
            config.num_slots,
            runtime.order,
            runtime.stream_pool,
            copy_when_full,
            counts_use=config.statistics,
            growing=_growing(runtime),
        )
        self._route_kernel, self._dispatch_kernel, self._combine_kernel = (
            f"{name}{self._suffix}" for name in ("route", "dispatch", "combine")
        )
        if not unavailable:
            runtime.load(throughput_kernels(config))

    def check_support(self) -> None:
        """Raise EPUnavailableError if this Buffer cannot make throughput calls."""
        if self._unavailable:
            raise EPUnavailableError(self._unavailable)

    def send_rows(
        self, inputs: DispatchInputs, call: Call, on_launch: OnLaunch | None = None
    ) -> tuple[DispatchHandle, ArrivedRows]:
        """Launch the routing, unless a handle gives it, and the dispatch of rows. Wait for the counts if only they tell the size.

        Over several nodes, wait before the launch of the dispatch if the pool has no room for `num_max_recv_tokens` rows, or grows.
        `on_launch` runs right after the launch of the dispatch: before the host waits for counts, if it can.

        Return the handle and the results.
        """
        if self._unavailable:
            self.check_support()
        known, stream = inputs.handle, call.stream
        reader = call.caller_stream if inputs.layout == "token" else None  # rows by expert are copied out of these rows
        self._order.enqueue_waits(call)
        needs_counts = known is None and inputs.num_worst_tokens is None
        if needs_counts and call.capture is not None:
            raise _counts_in_capture()
        arrays = self._runtime.on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.scales)
        x, idx, _, scales = arrays
        row_bytes = (inputs.rows or x).row_bytes
        sizes = row_bytes, scales.row_bytes if scales else 0, idx.itemsize if idx else 0, idx is not None
        counts_list = None
        capacity = self._config.num_max_recv_tokens if inputs.num_worst_tokens is None else inputs.num_worst_tokens
        if known is not None:
            capacity, tables, counts_list = known.num_recv_rows, known.routing, known.num_recv_tokens_per_expert_list
        parts = self._layout.result(capacity, *sizes)
        # Without counts to wait for, a rank without room raises here, and makes no call at all.
        reserved = None
        if not (needs_counts and self._waits_always):
            reserve = self.results.reserve_in_pool if needs_counts and self._waits_when_full else self.results.reserve
            reserved = reserve(parts.num_bytes, call, reader)
        # Counts have memory of their own: a caller that keeps them must not keep the rows.
        counts_owner = (self._handles if known is None else self.counts).acquire(
            stream, call.caller_stream, call.capture, call.follows
        )
        counts = counts_owner.ptr
        if known is None:
            tables = counts_owner
            counts += self._layout.handle.offsets["counts"]
        num_recv, has_room, signature = None, True, pack(inputs.signature)
        window = {} if reserved is None else receive_window(reserved.offset, parts.offsets, capacity)
        with self.launching_rows():
            if known is None:
                self._launch_route(inputs, idx, tables.ptr, window, signature, needs_counts, stream)
            if reserved is None:
                self._order.record_end(call, (*arrays, inputs.topk_idx), (tables,), inputs.topk_idx)  # an error may end the wait
                num_recv, counts_list = self._monitor.await_counts()
                capacity, parts, reserved, has_room = self._reserve_arrived(num_recv, sizes, call, reader)
                window = receive_window(reserved.offset, parts.offsets, capacity)
            launch, params = self.dispatch_launch(signature, arrays, tables.ptr, counts, window, known is None, needs_counts)
            if self._network is not None:
                self._network.wake()
            launch(stream, self.num_sms, params)
            if on_launch is not None and has_room:  # before the end of the call is recorded
                first, idx_bytes = self._runtime.memory.ptr + reserved.offset, idx.itemsize if idx else 0
                on_launch(arriving_rows(first, parts.offsets, tables.ptr, self._layout.handle.offsets, capacity, idx_bytes))
            given = inputs.topk_idx, inputs.topk_weights, inputs.scales
            self._order.record_end(call, (*arrays, inputs.x, *given), (tables, counts_owner), *given)
            if needs_counts and num_recv is None:
                num_recv, counts_list = self._monitor.await_counts()
        if num_recv is not None:
            if num_recv > self.most_rows or not has_room:
                self._runtime.synchronize()  # raises what the kernels of all ranks report
                raise too_many_rows(self._runtime.rank, num_recv, self._config.num_max_recv_tokens, grows=self._waits_always)
            capacity = num_recv
        owner, base = self.results.keep(reserved, parts.offsets["x"] + capacity * row_bytes, call, reader)
        arrived = ArrivedRows(
            self._runtime, arrays, parts.offsets, capacity, rows=(base, owner), counts=(counts, counts_owner), stream=stream
        )
        handle = known or DispatchHandle(x.shape[0], capacity, counts_list, self._runtime.info.serial, tables, {})
        return handle, arrived

    def launching_rows(self) -> AbstractContextManager[None]:
        """Enter around the launches of a dispatch; see `Monitor.call_half`."""
        return self._monitor.call_half("a dispatch was interrupted between its counts and its rows", self._rows_phase)

    def _reserve_arrived(
        self, num_recv: int, sizes: tuple[int, int, int, bool], call: Call, reader: int | None
    ) -> tuple[int, Map, Reservation, bool]:
        """Reserve memory for the rows that the counts announce. Return its rows, parts and place, and whether there is room."""
        capacity = num_recv if num_recv <= self.most_rows else 0
        parts = self._layout.result(capacity, *sizes)
        if not capacity:
            return 0, parts, self.results.no_rows(), True
        try:
            self._prepare_combine(num_recv, call.stream)
            return capacity, parts, self.results.reserve(parts.num_bytes, call, reader), True
        except EPOutOfMemoryError:  # the other ranks wait for this rank: the kernel tells them
            return 0, self._layout.result(0, *sizes), self.results.no_rows(), False

    def _launch_route(
        self,
        inputs: DispatchInputs,
        idx: View,
        tables: int,
        window: Mapping[str, int],
        signature: int,
        needs_counts: bool,
        stream: int,
    ) -> None:
        """Launch the routing, as early as possible: the GPU may have nothing else to do. `window` is empty if it is not known yet."""
        if needs_counts:
            self._runtime.page.expect_counts()
        if self._network is not None:
            self._network.wake()
        num_blocks = max(min(-(-idx.shape[0] // ROUTE_THREADS), MAX_ROUTE_BLOCKS, self.num_sms), 1)
        self._runtime.launcher(self._route_kernel)(
            stream,
            num_blocks,
            {
                "num_tokens": idx.shape[0],
                "topk_idx": idx.ptr,
                "handle": tables,
                "idx_bytes": idx.itemsize,
                "expert_alignment": inputs.expert_alignment,
                "check": self._config.check_inputs,
                "to_host": needs_counts,
                **self._route_params(window, signature),
            },
        )

    def dispatch_launch(
        self,
        signature: int,
        arrays: Sequence[Any],
        tables: int,
        counts: int,
        window: Mapping[str, int],
        is_new: bool = False,
        needs_counts: bool = False,
    ) -> tuple[Launcher, dict[str, Any]]:
        """Return the dispatch kernel and its Params, from x, topk_idx, topk_weights and scales on the GPU.

        `tables` and `counts` are addresses, of the handle's tables and of the caller's counts. See `receive_window` for `window`. If
        `is_new`, the call launches its routing before. If `needs_counts`, the host waits for the counts.
        """
        x, idx, weights, scales = arrays
        sizes = row_bytes, scale_bytes, idx_bytes, _ = (
            x.row_bytes,
            scales.row_bytes if scales else 0,
            idx.itemsize if idx else 0,
            weights is not None,
        )
        params = {
            "row_bytes": row_bytes,
            "x": x.ptr,
            "scales": address_of(scales),
            "topk_idx": address_of(idx),
            "topk_weights": address_of(weights),
            "handle": tables,
            **window,
            "num_recv": counts + self._counts_offsets["num_recv"],
            "num_recv_per_expert": counts + self._counts_offsets["num_recv_per_expert"],
            "scale_bytes": scale_bytes,
            "idx_bytes": idx_bytes,
        }
        self._add_dispatch_params(params, sizes, is_new, needs_counts)
        params["call_signature"] = signature
        return self._runtime.launcher(self._dispatch_kernel), params

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Launch one kernel: rows, or sums of a node's rows, arrive at the tokens' ranks, which add them up. Return the function that makes
        the results.
        """
        if self._unavailable:
            self.check_support()
        stream, handle = call.stream, inputs.handle
        self._order.enqueue_waits(call)
        arrays = x, weights, *biases = self._runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        parts = self._layout.combined(handle.num_tokens, x.row_bytes, weights is not None)
        owner = self.results.allocate_sums(parts.num_bytes, call)
        out, out_weights = owner.ptr + parts.offsets["x"], owner.ptr + parts.offsets["topk_weights"]
        launch, params = self.combine_launch(inputs, arrays, out, out_weights)
        if self._network is not None:
            self._network.wake()
        launch(stream, self.num_sms, params)
        given = inputs.topk_weights, *inputs.biases
        self._order.record_end(call, (x, weights, biases, inputs.x, *given), (handle.routing,), *given)
        shown = out, out_weights if weights is not None else None
        return combine_views(self._runtime, x, handle.num_tokens, *shown, owner, stream)

    def combine_launch(
        self, inputs: CombineInputs, arrays: Sequence[Any], out: int, out_weights: int, kernel: str = ""
    ) -> tuple[Launcher, dict[str, Any]]:
        """Return the combine kernel and its Params, from the rows, the weights and the biases on the GPU, and the addresses of the sums.

        `kernel` is one that sends rows in the same form. The caller adds what else it needs.
        """
        x, weights, *biases = arrays
        handle = inputs.handle
        params = {
            "num_tokens": handle.num_tokens,
            "y": x.ptr,
            "topk_weights": address_of(weights),
            "bias_0": address_of(biases[0]) if biases else 0,
            "bias_1": address_of(biases[1]) if len(biases) > 1 else 0,
            "handle": handle.routing.ptr,
            "out": out,
            "out_topk_weights": out_weights if weights is not None else 0,
        }
        kernel, sent_bytes = kernel or self._combine_kernel, x.row_bytes
        if inputs.compress:
            kernel, sent_bytes = f"{kernel}_{inputs.compress}", compressed_row_bytes(self._config.hidden, inputs.compress)
        self._add_combine_params(params, x.row_bytes, sent_bytes, handle.num_recv_rows, pack(inputs.signature))
        return self._runtime.launcher(kernel, x.dtype), params

    def memory_for_rows(self, num_bytes: int, call: Call) -> Block | None:
        """Allocate memory whose rows `add_up` need not copy. None: there is no room, or it makes no difference."""
        return None

    def rows_setter(self, launch: PreparedLaunch, row_bytes: int, capacity: int) -> Callable[[int], None]:
        """Return a function that lets later launches of a prepared combine read other rows. It gets their address."""
        return launch.member("y")

    @abstractmethod
    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """Measure how fast rows and copies reach the other ranks; see `Buffer.copy_ceilings`."""

    def _route_params(self, window: Mapping[str, int], signature: int) -> dict[str, int]:
        """Return the last Params of the routing: those of its dispatch that it tells the peers."""
        return {}

    @abstractmethod
    def _prepare_combine(self, num_rows: int, stream: int) -> None:
        """Take memory for a combine of so many rows. Raise EPOutOfMemoryError if there is none."""

    @abstractmethod
    def _add_dispatch_params(
        self, params: dict[str, int], sizes: tuple[int, int, int, bool], is_new: bool, needs_counts: bool
    ) -> None:
        """Add Params of this class's dispatch kernel, in order: a merge of dicts would take longer.

        `sizes` are the bytes of a row, of its scales and of an index, and whether there are weights.
        """

    @abstractmethod
    def _add_combine_params(
        self,
        params: dict[str, int],
        row_bytes: int,
        sent_bytes: int,
        capacity: int,
        signature: int,
    ) -> None:
        """Add the rest of the Params of this class's combine kernel, in order; see `_add_dispatch_params`."""


class Throughput(RowMover):
    """Dispatch and combine over symmetric memory: rows go straight to the memory of other ranks. See `RowMover`."""

    def __init__(self, runtime: CudaRuntime, copy_when_full: bool) -> None:
        has_peer_access = runtime.config.num_ranks <= MAX_RANKS_PER_NODE and all(runtime.memory.peers)
        unavailable = (
            f"some ranks of this Buffer have no direct access to each other; expected up to {MAX_RANKS_PER_NODE} ranks over NVLink or PCIe "
            f"for dispatch and combine. Use the low-latency calls"
        )
        super().__init__(runtime, copy_when_full, "" if has_peer_access else unavailable)

    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """Measure how fast rows and copies reach the other ranks; see `Buffer.copy_ceilings`."""
        self.check_support()
        if len(self._runtime.comm.numbers) < self._config.num_ranks:
            raise EPUnavailableError(
                f"copy_ceilings while slots have no process, and members={tuple(self._runtime.comm.numbers)}; expected a process in each. "
                f"Measure before ranks leave, or with another Buffer"
            )
        return copy_ceilings(self._runtime, self.num_sms, row_bytes, num_rows, iterations)

    def _route_params(self, window: Mapping[str, int], signature: int) -> dict[str, int]:
        return {**window, "call_signature": signature}

    def _prepare_combine(self, num_rows: int, stream: int) -> None:
        pass  # there is room for all rows that can arrive

    def _add_dispatch_params(
        self, params: dict[str, int], sizes: tuple[int, int, int, bool], is_new: bool, needs_counts: bool
    ) -> None:
        params["rows_per_copy"] = rows_per_copy(sizes[0], self._runtime.dispatch_copy_bytes)
        params["follows_route"], params["to_host"] = is_new, needs_counts

    def _add_combine_params(
        self,
        params: dict[str, int],
        row_bytes: int,
        sent_bytes: int,
        capacity: int,
        signature: int,
    ) -> None:
        staging = self._layout.staging(sent_bytes).offsets
        params["recv_x_offset"] = self._landing + staging["x"]
        params["recv_topk_weights_offset"] = self._landing + staging["topk_weights"]
        params["capacity"], params["call_signature"] = capacity, signature


class NodesThroughput(RowMover):
    """Dispatch and combine over symmetric memory of each node, and network memory between nodes. See `RowMover`.

    Each node adds up its rows of a token, and the token's rank adds up the sums of the nodes.
    """

    _suffix, _rows_phase, _waits_when_full = "_nodes", "kPhaseNodeRows", True
    _network: NetworkMemory

    def __init__(self, runtime: CudaRuntime, nodes: NodesLayout, copy_when_full: bool) -> None:
        num_nodes = runtime.config.num_nodes
        unavailable = (
            f"this Buffer has {num_nodes} nodes; expected at most {MAX_NODES} for dispatch and combine. Use the low-latency calls, or "
            f"fewer nodes"
        )
        super().__init__(runtime, copy_when_full, "" if num_nodes <= MAX_NODES else unavailable)
        assert runtime.network is not None
        self._nodes, self._network = nodes, runtime.network
        self._exposed: list[tuple[int, Block]] = []
        """Memory that combines expose more rows in: the rows that fit, and the block. A graph or a prepared call may use each of them."""
        if self.results.grows:
            self._waits_always, self.most_rows, runtime.page.memory_grows = True, runtime.config.worst_recv_tokens, True

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

    def _prepare_combine(self, num_rows: int, stream: int) -> None:
        """Take memory to expose the rows in, if they are more than the Buffer has room for. It stays with the Buffer: after a combine, slow
        peers may still read there.
        """
        if num_rows > max([self._config.num_max_recv_tokens, *(rows for rows, _ in self._exposed)]):
            num_rows = min(2 * num_rows, self.most_rows)
            parts = self._nodes.exposed(num_rows, self._config.row_bytes)
            self._exposed.append((num_rows, self.results.reserve_for_repeats(parts.num_bytes, stream)))

    def _add_dispatch_params(
        self, params: dict[str, int], sizes: tuple[int, int, int, bool], is_new: bool, needs_counts: bool
    ) -> None:
        chunk = self._nodes.chunk(*sizes)
        params["refuses_more"], params["repeats"] = needs_counts, not is_new
        params["chunk_tokens"] = chunk.num_tokens
        for name in ("topk_idx", "weights", "scales", "rows"):
            params[f"chunk_{name}"] = chunk.offsets[name]

    def _add_combine_params(
        self,
        params: dict[str, int],
        row_bytes: int,
        sent_bytes: int,
        capacity: int,
        signature: int,
    ) -> None:
        has_weights = params["topk_weights"] != 0
        exposed, exposed_weights = self._exposed_offsets(params["y"], row_bytes, capacity)
        params.update(
            exposed_offset=exposed,
            exposed_weights_offset=exposed_weights,
            capacity=capacity,
            call_signature=signature,
            chunk_tokens=self._nodes.chunk(sent_bytes, 0, 0, has_weights).num_tokens,
            sum_stride=self._nodes.sum_stride(sent_bytes, with_weights=has_weights),
        )

    def _exposed_offsets(self, y: int, row_bytes: int, capacity: int) -> tuple[int, int]:
        """Return where a combine exposes its rows and their weights. Rows in the pool stay where they are: the node's ranks reach them."""
        exposed, first = self._nodes.staging(row_bytes).offsets, self._landing
        if capacity > self._config.num_max_recv_tokens:
            first = next(self.results.offset_of(block) for rows, block in self._exposed if rows >= capacity)
            exposed = self._nodes.exposed(capacity, row_bytes).offsets
        in_place = self.results.offset_in_pool(y, capacity * row_bytes) if self._config.node_size > 1 else None
        return first + exposed["exposed"] if in_place is None else in_place, first + exposed["exposed_weights"]

    def memory_for_rows(self, num_bytes: int, call: Call) -> Block | None:
        """See `RowMover.memory_for_rows`. A captured graph would keep its part of the pool."""
        if self._config.node_size == 1 or call.capture is not None:
            return None
        return self.results.pool.allocate(num_bytes, call.stream)

    def rows_setter(self, launch: PreparedLaunch, row_bytes: int, capacity: int) -> Callable[[int], None]:
        """See `RowMover.rows_setter`."""
        set_y, set_exposed = launch.member("y"), launch.member("exposed_offset")

        def set_rows(y: int) -> None:
            set_y(y)
            set_exposed(self._exposed_offsets(y, row_bytes, capacity)[0])

        return set_rows


class Rows(Protocol):
    """Moves rows in one layout, as `RowMover` does by token."""

    def send_rows(self, inputs: DispatchInputs, call: Call) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue a dispatch. Return its handle, and the function that makes its results."""

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results."""


class ThroughputCalls:
    """Dispatch and combine, in both layouts of rows."""

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, by_expert: Rows, fp8_rows: Fp8Rows) -> None:
        self._runtime, self._by_token, self._monitor = runtime, by_token, runtime.monitor
        self._by_expert, self._fp8_rows = by_expert, fp8_rows
        self._epochs = ("nodes", "nodes") if runtime.config.has_network else ("dispatch", "combine")
        self._dispatches, self._combines = map(runtime.launches, self._epochs)

    @whole_call("kPhaseDispatchRows")
    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """See `Buffer.dispatch`."""
        is_host_caller = inputs.x.device == HOST
        if inputs.use_fp8:
            inputs = self._fp8_rows.converted(inputs, call)
        before = self._dispatches[0]
        handle, make_views = (self._by_token if inputs.layout == "token" else self._by_expert).send_rows(inputs, call)
        self._runtime.purposes.note_launches(self._epochs[0], before + 1, self._dispatches[0])
        self._monitor.check_inputs()
        views = self._runtime.for_caller(make_views, is_host_caller, call.stream)
        num_sms = max(2, self._by_token.num_sms) if inputs.signals else 0
        return DispatchResult(handle, self._runtime.order.event(call), views, num_sms, call.words_cleared)

    @whole_call("kPhaseCombineRows")
    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """See `Buffer.combine`."""
        if inputs.compress == "fp8":
            self._fp8_rows.check_support("compress='fp8'")
        before = self._combines[0]
        make_views = (self._by_token if inputs.handle.layout == "token" else self._by_expert).add_up(inputs, call)
        self._runtime.purposes.note_launches(self._epochs[1], before + 1, self._combines[0])
        self._monitor.check_inputs()
        views = self._runtime.for_caller(make_views, inputs.x.device == HOST, call.stream)
        return CombineResult(self._runtime.order.event(call), views)

    def prepare(self, preparation: ThroughputPreparation) -> PreparedThroughput:
        """Prepare calls with these arguments, which lie in GPU memory, and a handle of `layout="token"`."""
        if preparation.compress == "fp8":
            self._fp8_rows.check_support("compress='fp8'")
        return PreparedThroughput(self._runtime, self._by_token, preparation)


class PreparedThroughput:
    """See `base.PreparedCalls`. All calls write to the same memory, over any number of nodes.

    Peers write the rows of each dispatch to the same block of symmetric memory. The kernel of the call tells them its address after all
    earlier work of its stream, so readers on that stream are done.

    Raise EPOutOfMemoryError if the pool is full.
    """

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, preparation: ThroughputPreparation) -> None:
        by_token.check_support()
        given, config, layout = preparation.dispatch, runtime.config, runtime.layout
        x, idx, weights, scales = arrays = given.x, given.topk_idx, given.topk_weights, given.scales
        handle = given.handle
        assert handle is not None
        check_stream(runtime, x, preparation.stream)
        num_rows, results = handle.num_recv_rows, by_token.results
        scale_bytes, idx_bytes = scales.row_bytes if scales else 0, idx.itemsize if idx else 0
        parts = layout.result(num_rows, x.row_bytes, scale_bytes, idx_bytes, idx is not None)
        # The rows of combines may have any dtype that fits the Buffer. With memory for the widest, no combine allocates.
        most_sums = layout.combined(handle.num_tokens, config.row_bytes, preparation.y_weights is not None)
        with runtime.order.before_calls() as stream:
            rows, counts = results.reserve_for_repeats(parts.num_bytes, stream), by_token.counts.acquire(stream)
            self._sums = results.allocate_sums(most_sums.num_bytes, Call(stream, None, False, None))
        self._runtime, self._by_token, self._given = runtime, by_token, preparation
        self._monitor, tables = runtime.monitor, handle.routing
        self._check_peers = self._monitor.check_peers

        def new_call() -> Call:
            return Call(-1, None, preparation.async_finish, None, x.framework)

        make_views = functools.partial(
            ArrivedRows, runtime, arrays, parts.offsets, num_rows, rows=(rows.ptr, rows), counts=(counts.ptr, counts)
        )

        def make_sent(event: Event, stream: int) -> DispatchResult:
            return DispatchResult(handle, event, make_views(stream=stream))

        window = receive_window(results.offset_of(rows), parts.offsets, num_rows)
        launcher, params = by_token.dispatch_launch(pack(given.signature), arrays, tables.ptr, counts.ptr, window)
        self._dispatch: RepeatedCall[DispatchResult] = RepeatedCall(
            runtime, new_call(), preparation.stream, (rows, counts, tables)
        )
        self._dispatch.set_launch(launcher.prepare(by_token.num_sms, params), make_sent)
        self._dispatch.set_arguments((given,), idx, weights, scales)
        self._combine: RepeatedCall[CombineResult] = RepeatedCall(runtime, new_call(), preparation.stream, (self._sums, tables))
        self._format: tuple[str, Framework] | None = None  # of the rows of combines

    @whole_call("kPhaseDispatchRows")
    def dispatch(self) -> DispatchResult:
        """Launch the dispatch."""
        self._check_peers()
        self._dispatch.launch.num_blocks = self._by_token.num_sms  # the program may have changed it
        return self._dispatch.run()

    def set_rows(self, y: View) -> None:
        """Let later combines read `y`."""
        if y.device == HOST:
            raise EPInputError("y is in host memory; expected GPU memory in prepared calls whose x is there. Move the array")
        if (y.dtype, y.framework) != self._format:
            self._bind(y)
        self._combine.set_arguments((self._given, y), y, self._given.y_weights, *self._given.biases)
        self._set_address_of_rows(y.ptr)

    @whole_call("kPhaseCombineRows")
    def combine(self) -> CombineResult:
        """Launch the combine."""
        self._check_peers()
        self._combine.launch.num_blocks = self._by_token.num_sms
        return self._combine.run()

    def _bind(self, y: View) -> None:
        """Prepare the launch and the results for rows of this dtype and library."""
        given, sums = self._given, self._sums
        inputs, weights = given.combine(y), given.y_weights
        handle = inputs.handle
        parts = self._runtime.layout.combined(handle.num_tokens, y.row_bytes, weights is not None).offsets
        out, out_weights = sums.ptr + parts["x"], sums.ptr + parts["topk_weights"]
        launcher, params = self._by_token.combine_launch(inputs, (y, weights, *given.biases), out, out_weights)
        launch = launcher.prepare(self._by_token.num_sms, params)
        shown = out, out_weights if weights is not None else None
        of_rows = replace(y, owner=None)  # the results have the dtype and the library of y, and do not hold y
        make_views = functools.partial(combine_views, self._runtime, of_rows, handle.num_tokens, *shown, sums)
        self._combine.set_launch(launch, lambda event, stream: CombineResult(event, make_views(stream)))
        self._set_address_of_rows = self._by_token.rows_setter(launch, y.row_bytes, handle.num_recv_rows)
        self._format = y.dtype, y.framework
