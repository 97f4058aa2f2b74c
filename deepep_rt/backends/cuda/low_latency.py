"""The low-latency calls of the CUDA backend: one launch for a call, or one for its sending and one for its receiving half.

`LowLatencyKernels` has the parameters of the kernels and the memory of results. In `PreparedLowLatency`, they are bound once.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...arrays.dtypes import FP8_GROUP
from ...arrays.view import HOST, Framework, View
from ...comm.call_signature import Signature, pack
from ...cuda import driver
from ...cuda.slots import Slot, Slots
from ...errors import EPInputError, EPUnavailableError
from ...jit.launch import Launcher
from ...kernels.structs import LL_RECEIVE, LL_SEND
from ...kernels.table import low_latency_kernels
from ...kernels.tuning import has_fp8
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..base import Call, LowLatencyCombineInputs, LowLatencyDispatchInputs, LowLatencyPreparation
from ..hooks import Hook, HookQueue, Hooks, OwnHooks, check_hook_called, no_dispatch
from ..inputs import old_routing
from .monitor import whole_call
from .repeated_call import RepeatedCall, check_stream
from .runtime import CudaRuntime, address_of
from .stream_order import CallEnd

_Sent = TypeVar("_Sent")
_Result = TypeVar("_Result", LowLatencyDispatchResult, LowLatencyCombineResult)

_log = logging.getLogger("deepep_rt")

PHASES = {False: LL_SEND | LL_RECEIVE, True: LL_SEND}
"""The phases that a call launches, by whether it has a hook. The hook launches the rest."""


@dataclass(frozen=True)
class RowFormat:
    """Results of dispatch with one format of rows: their memory, offsets, widths and dtypes. Slots keep the memory for later calls."""

    memory: Slots
    x: int  # offsets
    scales: int
    width: int
    dtype: str
    num_scales: int  # of a row
    scale_dtype: str | None


def _converted_rows(runtime: CudaRuntime, use_fp8: bool, use_ue8m0: bool) -> RowFormat:
    """Return the format of rows of bfloat16, or of FP8 that the call converts them to."""
    parts, hidden = runtime.layout.low_latency_result(use_fp8=use_fp8, use_ue8m0=use_ue8m0), runtime.config.hidden
    memory, offsets = runtime.slots(parts.num_bytes), (parts.offsets["x"], parts.offsets["scales"])
    if not use_fp8:
        return RowFormat(memory, *offsets, hidden, "bfloat16", 0, None)
    return RowFormat(memory, *offsets, hidden, "float8_e4m3fn", hidden // FP8_GROUP, "uint8" if use_ue8m0 else "float32")


class LowLatencyKernels:
    """Parameters and memory of the low-latency kernels of a Buffer."""

    def __init__(self, runtime: CudaRuntime, archs: Sequence[str]) -> None:
        self._runtime, self._config = runtime, runtime.config
        config, layout = runtime.config, runtime.layout
        num_handles = layout.num_handles if config.low_latency else 0
        self.handles = runtime.slots(layout.low_latency_handle.num_bytes, num_handles, are_tables=True)
        self._formats = {
            (use_fp8, use_ue8m0): _converted_rows(runtime, use_fp8, use_ue8m0)
            for use_fp8, use_ue8m0 in ((False, False), (True, False), (True, True))
        }
        self.sums = runtime.slots(config.num_max_tokens_per_rank * config.hidden * 2)
        # Rows travel in one format. If the GPU of one rank cannot convert to FP8, no rank converts.
        self.archs_without_fp8 = {rank: arch for rank, arch in enumerate(archs) if not has_fp8(arch)}
        self._has_warned_of_fp8 = False
        # The same for every call: a rank with few tokens may receive many.
        self.num_blocks = min(config.low_latency_sms, driver.num_sms(runtime.device), max(2 * config.num_max_tokens_per_rank, 16))
        self._least_large_combine = [
            math.inf if config.has_network else config.least_large_combine(self.num_blocks, max(members, 1))
            for members in range(config.num_ranks + 1)
        ]

    @property
    def _num_members(self) -> int:
        return len(self._runtime.comm.numbers)

    def row_format(self, inputs: LowLatencyDispatchInputs) -> RowFormat:
        """Return the format of rows that a dispatch brings."""
        if not inputs.is_opaque:
            return self._formats[inputs.use_fp8, inputs.use_ue8m0]
        x, scales = inputs.x, inputs.x_scales
        rows = self._config.num_local_experts * self._config.worst_recv_tokens
        end_of_x = rows * x.row_bytes  # a multiple of 16
        num_bytes = end_of_x + rows * (scales.row_bytes if scales else 0)
        narrow, wide = self._formats[True, False].memory, self.bfloat16_rows
        memory = narrow if num_bytes <= narrow.num_bytes else wide
        given = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        return RowFormat(memory, 0, end_of_x, x.shape[1], x.dtype, *given)

    @property
    def bfloat16_rows(self) -> Slots:
        """Memory of results in bfloat16."""
        return self._formats[False, False].memory

    def check_fp8(self, inputs: LowLatencyDispatchInputs) -> None:
        """If a GPU cannot convert to FP8, change an FP8 dispatch to a bfloat16 dispatch, and warn once.

        Raise EPUnavailableError if the caller has already allocated memory for FP8 results.
        """
        if not (inputs.use_fp8 and self.archs_without_fp8):
            return
        rank, arch = next(iter(self.archs_without_fp8.items()))
        if inputs.into is not None:
            raise EPUnavailableError(
                f"use_fp8=True; rank {rank}'s {arch} cannot convert to FP8. Pass use_fp8=False on all ranks: rows travel as bfloat16"
            )
        if not self._has_warned_of_fp8:
            self._has_warned_of_fp8 = True
            _log.warning(
                "rank %d: rank %d's %s cannot convert to FP8: rows travel and arrive as bfloat16, without scales. Pass use_fp8=False on "
                "all ranks",
                self._runtime.rank,
                rank,
                arch,
            )
        inputs.use_fp8 = inputs.round_scale = inputs.use_ue8m0 = False

    def check_compression(self, compress: str | None) -> None:
        """Raise EPUnavailableError if the GPU of a rank cannot convert to the form of a combine's rows."""
        if compress == "fp8" and self.archs_without_fp8:
            rank, arch = next(iter(self.archs_without_fp8.items()))
            raise EPUnavailableError(
                f"compress='fp8'; expected GPUs with FP8 on all ranks, but rank {rank} has {arch}. Leave it out on all ranks"
            )

    def check_reduction(self, reduce_early: bool) -> None:
        """Raise EPInputError if GPUs refuse a combine that sends the row of each choice."""
        if not reduce_early and (self._config.on_timeout == "mask" or self._runtime.page.masked.any()):
            # Such rows lie by choice, not by sender. A row of a lost rank could pass for a row of another rank.
            raise EPInputError(
                "allow_multiple_reduction=False; expected True on GPUs with on_timeout='mask' or masked ranks. Leave it out"
            )

    def combine_name(self, num_tokens: int, reduce_early: bool, compress: str | None) -> str:
        """Return the name of the kernel that makes a combine."""
        is_large = num_tokens >= self._least_large_combine[self._num_members] and reduce_early
        name = "ll_combine_large" if is_large else "ll_combine"
        return f"{name}_{compress}" if compress else name

    def dispatch_params(
        self,
        inputs: LowLatencyDispatchInputs,
        arrays: Sequence[Any],
        format_: RowFormat,
        tables: int,
        results: tuple[int, int],
        with_hook: bool,
    ) -> dict[str, Any]:
        """Return the members of a dispatch's Params, from x, topk_idx, topk_weights and x_scales on the GPU.

        `tables` is the address of the handle's tables, and `results` are those of the rows and of their scales. With a hook, the launch
        only sends.
        """
        x, idx, weights, scales = arrays
        values = {
            "phases": PHASES[with_hook],
            "num_tokens": x.shape[0],
            "capacity": self._config.num_ranks * inputs.num_max_tokens,
            "x": x.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": address_of(weights),
            "handle": tables,
            "recv_x": results[0],
            "recv_scales": results[1],
            "recv_stats": inputs.recv_stats.ptr if inputs.recv_stats else 0,
            "wait_stats": inputs.wait_stats.ptr if inputs.wait_stats else 0,
            "call_signature": pack(inputs.signature(format_.dtype, format_.scale_dtype)),
            "idx_bytes": idx.itemsize,
            "check": self._config.check_inputs,
        }
        if not inputs.is_opaque:
            values["use_fp8"], values["round_scale"], values["use_ue8m0"] = inputs.use_fp8, inputs.round_scale, inputs.use_ue8m0
            return values
        scale_bytes = scales.row_bytes if scales else 0
        return values | {"row_bytes": x.row_bytes, "scale_bytes": scale_bytes, "x_scales": address_of(scales)}

    def dispatch_views(
        self,
        format_: RowFormat,
        capacity: int,
        results: tuple[int, int],
        memory: Any,
        tables: Any,
        framework: Framework,
        stream: int,
    ) -> Views:
        """Make the Views of a dispatch's results. `memory` owns the rows, and `tables` the counts."""
        experts, result = self._config.num_local_experts, self._runtime.result
        counts = tables.ptr + self._runtime.layout.low_latency_handle.offsets["num_recv_per_expert"]
        views: Views = {
            "num_recv_per_expert": result(counts, (experts,), "int32", tables, framework, stream),
            "x": result(results[0], (experts, capacity, format_.width), format_.dtype, memory, framework, stream),
        }
        if format_.scale_dtype:
            shape = experts, capacity, format_.num_scales
            views["scales"] = result(results[1], shape, format_.scale_dtype, memory, framework, stream)
        return views

    def combine_params(
        self,
        signature: Signature,
        num_tokens: int,
        arrays: tuple[int, View, View],
        tables: int,
        out: int,
        reduce_early: bool,
        has_weights: bool,
        with_hook: bool,
    ) -> dict[str, Any]:
        """Return the members of a combine's Params, from the address of `y`, and topk_idx and topk_weights on the GPU.

        `tables` and `out` are the addresses of the handle's tables and of the sums. `has_weights` says whether the dispatch sent the
        weights. With a hook, the launch only sends.
        """
        y, idx, weights = arrays
        return {
            "phases": PHASES[with_hook],
            "num_tokens": num_tokens,
            "y": y,
            "topk_idx": idx.ptr,
            "topk_weights": weights.ptr,
            "handle": tables,
            "out": out,
            "idx_bytes": idx.itemsize,
            "reduce_early": reduce_early,
            "has_weights": has_weights,
            "call_signature": pack(signature),
            "num_members": self._num_members,
        }


_live: weakref.WeakSet[LowLatency] = weakref.WeakSet()
"""Objects of Buffers with low-latency calls that were not destroyed."""


def _update_overlap() -> None:
    """Let a low-latency kernel start while the kernel before it in its stream ends, but only if one Buffer has such kernels.

    Blocks that start early hold SMs. Ranks may launch the kernels of two Buffers in different orders. Then the early blocks of each Buffer
    could keep the other Buffer's kernels off the GPU forever.

    A CUDA graph keeps the setting of its capture. That is safe: a Buffer captures overlap only while it is alone, so two live Buffers
    never both have such graphs.
    """
    for calls in _live:
        calls.allow_overlap(len(_live) == 1)


class LowLatency:
    """Both low-latency calls, and the masks of ranks."""

    def __init__(self, runtime: CudaRuntime, archs: Sequence[str]) -> None:
        config = runtime.config
        self._runtime, self._order, self._monitor = runtime, runtime.order, runtime.monitor
        self._config, self._page = config, runtime.page
        self.kernels = LowLatencyKernels(runtime, archs)
        self._known_masked: set[int] = set()
        self._combine_buffer: Slot | None = None
        self.hooks = Hooks(config.num_slots, runtime.call_lock)
        if config.low_latency:
            self.clear_inboxes()
            runtime.load(low_latency_kernels(config))
            _live.add(self)
            _update_overlap()

    def close(self) -> None:
        """Let the kernels of another Buffer overlap, if it is the only one left."""
        _live.discard(self)
        _update_overlap()

    def allow_overlap(self, allowed: bool) -> None:
        """Set whether the next launches may start while the kernel before them ends."""
        self._runtime.allow_overlap(allowed)

    # --- masks -------------------------------------------------------------------------------------------------------------------

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from the calls from now on, or include it again."""
        self.hooks.check_none_open("masking or unmasking a rank")
        self._runtime.synchronize()
        if not masked:
            self.clear_inboxes()  # the rank may have sent half a row
        mask = self._runtime.state + self._runtime.layout.local.offsets["masked"] + 4 * rank
        driver.fill(mask, int(masked), 1)  # the low byte of an int32
        driver.synchronize(0)
        self._page.masked[rank] = masked
        (self._known_masked.add if masked else self._known_masked.discard)(rank)

    def masked_ranks(self) -> list[int]:
        """List the ranks that the calls exclude, ascending."""
        return self._page.masked.nonzero()[0].tolist()

    def clear_inboxes(self) -> None:
        """Mark every row of the inboxes as not arrived."""
        inboxes = self._runtime.layout.low_latency
        start = inboxes.offsets["messages"]
        driver.fill(self._runtime.address_of_region("low_latency") + start, 0xFF, inboxes.num_bytes - start)
        driver.synchronize(0)

    def begin_generation(self) -> None:
        """Forget open calls and masks: the members change."""
        self.hooks.drop_all()
        self._known_masked.clear()

    def warn_of_masked_ranks(self) -> None:
        """Warn, once for each, of ranks that kernels have masked."""
        for rank in set(self.masked_ranks()) - self._known_masked:
            self._known_masked.add(rank)
            _log.warning("rank %d: rank %d is masked: it was silent for %g s", self._runtime.rank, rank, self._config.timeout_s)

    # --- calls -------------------------------------------------------------------------------------------------------------------

    @whole_call("kPhaseLlRows")
    def dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """Send tokens to the ranks of their experts; receive them here, or in the hook."""
        stream, kernels = call.stream, self.kernels
        kernels.check_fp8(inputs)
        self.hooks.dispatch.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        arrays = self._runtime.on_device(stream, inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.x_scales)
        x, format_, capacity = arrays[0], kernels.row_format(inputs), self._config.num_ranks * inputs.num_max_tokens
        if (into := inputs.into) is None:
            memory: Any = format_.memory.acquire(stream, call.caller_stream, call.capture, call.follows)
            results = memory.ptr + format_.x, memory.ptr + format_.scales
            tables: Any = kernels.handles.acquire(stream, call.caller_stream, call.capture, call.follows)
        else:
            memory, tables = into, into.tables
            results = into.recv_x.ptr, into.recv_scales.ptr if into.recv_scales else 0
        values = kernels.dispatch_params(inputs, arrays, format_, tables.ptr, results, with_hook)
        make_views = functools.partial(kernels.dispatch_views, format_, capacity, results, memory, tables, x.framework, stream)
        end = call, (*arrays, inputs), (tables, memory), inputs.topk_idx, inputs.topk_weights, inputs.x_scales
        queue = self.hooks.dispatch if with_hook else None
        event, views, hook = self._run(dispatch_kernel(inputs), values, call, end, queue, make_views, inputs.x.device == HOST)
        routing, has_weights = (tables, hook.state if hook else None), inputs.topk_weights is not None
        handle = LowLatencyHandle(x.shape[0], self._runtime.info.serial, routing, has_weights, x.framework, capacity)
        return LowLatencyDispatchResult(handle, event, hook, views)

    @whole_call("kPhaseLlCombineRows")
    def combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """Send the experts' rows back to the tokens' ranks; add them up here, or in the hook."""
        stream, handle, kernels = call.stream, inputs.handle, self.kernels
        tables, hook_state = handle.routing
        check_hook_called(hook_state)
        if not inputs.reduce_early:
            kernels.check_reduction(False)
        if inputs.compress is not None:
            kernels.check_compression(inputs.compress)
        self.hooks.combine.check_can_start(with_hook)
        self._order.enqueue_waits(call)
        y, idx, weights = self._runtime.on_device(stream, inputs.y, inputs.topk_idx, inputs.topk_weights)
        num_tokens, given_out = handle.num_tokens, inputs.out
        if given_out is not None:
            owner, out = given_out.owner, given_out.ptr
        else:
            owner = kernels.sums.acquire(stream, call.caller_stream, call.capture, call.follows)
            out = owner.ptr
        arrays = y.ptr, idx, weights
        values = kernels.combine_params(
            inputs.signature, num_tokens, arrays, tables.ptr, out, inputs.reduce_early, handle.has_weights, with_hook
        )
        framework, shape = y.framework, (num_tokens, self._config.hidden)

        def make_views() -> Views:
            return {"x": given_out or self._runtime.result(out, shape, "bfloat16", owner, framework, stream)}

        kernel = kernels.combine_name(num_tokens, inputs.reduce_early, inputs.compress)
        given = inputs.topk_idx, inputs.topk_weights
        arguments = y, idx, weights, inputs.y, *given, given_out  # not the handle, which holds its tables
        end = call, arguments, (tables,) if given_out is not None else (tables, owner), *given
        queue = self.hooks.combine if with_hook else None
        is_host_caller = inputs.y.device == HOST
        event, views, hook = self._run(kernel, values, call, end, queue, make_views, is_host_caller, given_out)
        return LowLatencyCombineResult(event, hook, views)

    def combine_view(self, framework: Framework, capacity: int) -> View:
        """Return the memory of `Buffer.get_low_latency_combine_buffer`."""
        config, device = self._config, self._runtime.device
        shape = (config.num_local_experts, capacity, config.hidden)
        if self._combine_buffer is None:
            writer = framework.current_stream(device)  # 0 is a stream too
            memory = self.kernels.bfloat16_rows
            self._combine_buffer = memory.acquire(self._order.own_stream if writer is None else writer)
        return View(self._combine_buffer.ptr, shape, "bfloat16", device, self._combine_buffer, framework)

    def prepare(self, preparation: LowLatencyPreparation) -> PreparedLowLatency:
        """Prepare calls with these arguments, which lie in GPU memory."""
        return PreparedLowLatency(self._runtime, self.kernels, self.hooks, preparation, self.warn_of_masked_ranks)

    # --- launches ----------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        kernel: str,
        values: dict[str, Any],
        call: Call,
        end: tuple[Any, ...],
        queue: HookQueue | None,
        make_views: Callable[[], Views],
        is_host_caller: bool,
        given: View | None = None,
    ) -> tuple[Event, Callable[[], Views], Hook | None]:
        """Launch a call, or only its sending half if it has a hook, and so a `queue`. Return its end, a function that returns the results,
        and the hook.

        `end` are the arguments of `CallOrder.record_end`, with the call's arguments and memory. They live until the last launch. If the
        caller's arrays lie in host memory, results are copied there, now or by the hook. `given`, an array of the caller that is a result,
        is not copied.
        """
        if self._config.on_timeout == "mask":
            self.warn_of_masked_ranks()
        launch = self._runtime.launcher(kernel)
        if queue is not None:
            return self._send(launch, values, call, end, queue, make_views, is_host_caller, given)
        self._launch(launch, call.stream, values)
        self._order.record_end(*end)
        event = self._order.event(call)
        self._monitor.check_inputs()
        return event, self._runtime.for_caller(make_views, is_host_caller, call.stream, given), None

    def _launch(self, launch: Launcher, stream: int, values: dict[str, Any]) -> None:
        if self._runtime.network is not None:
            self._runtime.network.wake()  # both halves put something
        launch(stream, self.kernels.num_blocks, values)

    def _send(
        self,
        launch: Launcher,
        values: dict[str, Any],
        call: Call,
        end: tuple[Any, ...],
        queue: HookQueue,
        make_views: Callable[[], Views],
        is_host_caller: bool,
        given: View | None,
    ) -> tuple[Event, Callable[[], Views], Hook]:
        """Launch the sending half of a call, and make its hook."""
        stream = call.stream

        def send() -> tuple[CallEnd, Views]:
            self._launch(launch, stream, values)
            self._order.record_end(*end)
            return self._order.event(call), make_views()

        def receive() -> None:
            self._launch(launch, stream, {**values, "phases": LL_RECEIVE})
            self._order.record_end(*end)
            event.record_again()

        def copy() -> None:
            views.update(self._runtime.to_host(views, stream, given))

        (event, views), hook = launch_halves(self._runtime, call, queue, send, receive, copy if is_host_caller else None)
        return event, lambda: views, hook


def dispatch_kernel(inputs: LowLatencyDispatchInputs) -> str:
    """Return the name of the kernel that makes a dispatch."""
    return "ll_dispatch_opaque" if inputs.is_opaque else "ll_dispatch"


def launch_halves(
    runtime: CudaRuntime,
    call: Call,
    queue: HookQueue,
    send: Callable[[], _Sent],
    receive: Callable[[], None],
    copy: Callable[[], None] | None = None,
) -> tuple[_Sent, Hook]:
    """Launch the sending half of a call, and make the hook that launches the receiving half on the same stream.

    `send` and `receive` launch a half, and note its end. `copy` copies the results to host memory, if the caller's arrays lie there.
    """
    monitor, stream = runtime.monitor, call.stream

    def run_hook() -> None:
        monitor.check_peers()
        with monitor.call_half():
            runtime.order.enqueue_waits(call)
            receive()
        if copy is not None:
            copy()
        monitor.check()  # after the launch: other ranks wait for this half, whatever the input was

    with monitor.call_half():
        return send(), queue.append(run_hook, lambda: driver.capture_id(stream))


class PreparedLowLatency:
    """See `base.PreparedCalls`. All calls write to the same memory."""

    def __init__(
        self,
        runtime: CudaRuntime,
        kernels: LowLatencyKernels,
        hooks: Hooks,
        preparation: LowLatencyPreparation,
        warn_of_masked_ranks: Callable[[], None],
    ) -> None:
        given, with_hook, out = preparation.dispatch, preparation.with_hook, preparation.out
        x, idx, weights = given.x, given.topk_idx, given.topk_weights
        assert weights is not None
        check_stream(runtime, x, preparation.stream)
        kernels.check_fp8(given)
        kernels.check_reduction(preparation.reduce_early)
        kernels.check_compression(preparation.compress)
        self._kernels, self._hooks, self._own_hooks, self._with_hook = kernels, hooks, OwnHooks(hooks), with_hook
        self._reduce_early, self._monitor = preparation.reduce_early, runtime.monitor
        self._check_peers = self._monitor.check_peers
        self._warn = warn_of_masked_ranks if runtime.config.on_timeout == "mask" else None
        self._info, self._dispatched_in = runtime.info, -1  # the value of `info.since` in the last dispatch
        format_, capacity = kernels.row_format(given), runtime.config.num_ranks * given.num_max_tokens
        self._new_handle = new_handle = functools.partial(_new_handle, runtime.info.serial, x, capacity)

        with runtime.order.before_calls() as stream:
            memory, tables = format_.memory.acquire(stream), kernels.handles.acquire(stream)
            sums = kernels.sums.acquire(stream) if out is None else None
        self._tables = tables
        results = memory.ptr + format_.x, memory.ptr + format_.scales
        params = kernels.dispatch_params(given, (x, idx, weights, given.x_scales), format_, tables.ptr, results, with_hook)

        def make_sent(event: Event, stream: int) -> LowLatencyDispatchResult:
            views = functools.partial(kernels.dispatch_views, format_, capacity, results, memory, tables, x.framework, stream)
            return LowLatencyDispatchResult(new_handle(tables, None), event, None, views)

        self._dispatch = _RepeatedCall(
            runtime, dispatch_kernel(given), kernels.num_blocks, params, preparation, (memory, tables), hooks.dispatch, make_sent
        )
        num_tokens = x.shape[0]
        address = out.ptr if sums is None else sums.ptr  # type: ignore[union-attr]
        arrays = 0, idx, weights  # the address of y comes with the first combine
        params = kernels.combine_params(
            preparation.combine_signature, num_tokens, arrays, tables.ptr, address, preparation.reduce_early, True, with_hook
        )

        def make_back(event: Event, stream: int) -> LowLatencyCombineResult:
            def views() -> Views:
                shape = num_tokens, runtime.config.hidden
                return {"x": out or runtime.result(address, shape, "bfloat16", sums, x.framework, stream)}

            return LowLatencyCombineResult(event, None, views)

        own = (tables,) if sums is None else (tables, sums)
        name = kernels.combine_name(num_tokens, preparation.reduce_early, preparation.compress)
        self._combine = _RepeatedCall(runtime, name, kernels.num_blocks, params, preparation, own, hooks.combine, make_back)

    @whole_call("kPhaseLlRows")
    def dispatch(self) -> LowLatencyDispatchResult:
        """Launch the dispatch, or its sending half."""
        self._check_peers()
        if self._with_hook:
            self._own_hooks.check_can_dispatch()
        self._hooks.dispatch.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        self._dispatched_in = self._info.since
        if not self._with_hook:
            return self._dispatch.run()
        sent, hook = self._dispatch.send()
        self._own_hooks.dispatch = hook.state
        sent.handle = self._new_handle(self._tables, hook.state)
        return sent

    def set_rows(self, y: View) -> None:
        """Let later combines read `y`."""
        if y.device == HOST:
            raise EPInputError("y is in host memory; expected GPU memory in prepared calls whose x is there. Move the array")
        if self._with_hook:
            self._own_hooks.check_can_combine()  # the receiving half of a call gets the same rows as its sending half
        self._combine.set_rows(y)

    @whole_call("kPhaseLlCombineRows")
    def combine(self) -> LowLatencyCombineResult:
        """Launch the combine, or its sending half."""
        self._check_peers()
        if self._dispatched_in != self._info.since:
            raise no_dispatch() if self._dispatched_in < 0 else old_routing()
        if not self._reduce_early:
            self._kernels.check_reduction(False)
        if self._with_hook:
            check_hook_called(self._own_hooks.dispatch)
            self._own_hooks.check_can_combine()
        self._hooks.combine.check_can_start(self._with_hook)
        if self._warn is not None:
            self._warn()
        if not self._with_hook:
            return self._combine.run()
        back, hook = self._combine.send()
        self._own_hooks.combine = hook.state
        return back


def _new_handle(serial: int, x: View, capacity: int, tables: Slot, state: Any) -> LowLatencyHandle:
    return LowLatencyHandle(x.shape[0], serial, (tables, state), True, x.framework, capacity)


class _RepeatedCall(RepeatedCall[_Result]):
    """A dispatch or a combine, with a hook or without one. For `own` and `make_result`, see `RepeatedCall`."""

    def __init__(
        self,
        runtime: CudaRuntime,
        kernel: str,
        num_blocks: int,
        params: dict[str, Any],
        preparation: LowLatencyPreparation,
        own: tuple[Slot, ...],
        queue: HookQueue,
        make_result: Callable[[Event, int], _Result],
    ) -> None:
        given = preparation.dispatch
        super().__init__(runtime, Call(-1, None, preparation.async_finish, None, given.x.framework), preparation.stream, own)
        self._runtime, self._queue = runtime, queue
        self._with_hook, self._preparation = preparation.with_hook, preparation
        launcher = runtime.launcher(kernel)
        self.set_launch(launcher.prepare(num_blocks, params), make_result)
        self._launch_receiving = launcher.prepare(num_blocks, {**params, "phases": LL_RECEIVE})
        halves = (self.launch, self._launch_receiving) if preparation.with_hook else (self.launch,)
        self._set_address_of_rows = [half.member("y") for half in halves] if "y" in params else []
        self.set_arguments((given, preparation.out), given.topk_idx, given.topk_weights, given.x_scales)

    def set_rows(self, y: View) -> None:
        """Use other rows of the experts from now on. Only for a combine."""
        given = self._preparation.dispatch
        self.set_arguments((given, self._preparation.out, y), given.topk_idx, given.topk_weights, given.x_scales, y)
        for set_address in self._set_address_of_rows:
            set_address(y.ptr)

    def send(self) -> tuple[_Result, Hook]:
        """Launch the sending half, and make its hook."""
        self._begin()
        _, hook = launch_halves(self._runtime, self._call, self._queue, self._launch_sending, self._receive)
        # The prepared call must not keep the hook: if the caller drops it, the next call runs it.
        result: _Result = object.__new__(type(self._result))
        result.__dict__.update(self._result.__dict__)
        result.hook = hook
        return result, hook

    def _launch_sending(self) -> None:
        self.launch(self._call.stream)
        self._note_end()

    def _receive(self) -> None:
        if self._network is not None:
            self._network.wake()
        self._launch_receiving(self._call.stream)
        self._note_end()

    def _move(self) -> None:
        super()._move()
        if self._with_hook:  # each call has a result of its own, and all share these arrays
            for name in ("recv_x", "recv_x_scales", "num_recv_tokens_per_expert", "x"):
                getattr(self._result, name, None)
