"""Prepared throughput calls of the CUDA backend: memory, parameters and results are bound once, and a call only launches."""

from __future__ import annotations

import functools
from dataclasses import replace

from ...arrays.view import HOST, Framework, View
from ...comm.call_signature import pack
from ...errors import EPInputError
from ...results import CombineResult, DispatchResult, Event
from ..base import Call, ThroughputPreparation
from .monitor import whole_call
from .repeated_call import RepeatedCall, check_stream
from .result_memory import combine_views, dispatch_views
from .runtime import CudaRuntime
from .throughput import RowMover, receive_window


class PreparedThroughput:
    """See `base.PreparedCalls`. All calls write to the same memory, over any number of nodes.

    Peers write the rows of each dispatch to the same block of symmetric memory. The kernel of the call tells them its address after all
    earlier work of its stream, so readers on that stream are done.

    Args:
        runtime: The Buffer's memory and kernels.
        by_token: Moves rows by token.
        preparation: The arguments of the calls.

    Raises:
        EPInputError: If the library of `x` has no current stream, and the program has chosen none.
        EPOutOfMemoryError: If the pool is full.
        EPUnavailableError: If this Buffer cannot make throughput calls.
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
            dispatch_views, runtime, arrays, parts.offsets, num_rows, rows=(rows.ptr, rows), counts=(counts.ptr, counts)
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
        self._set_address_of_rows, self._format = launch.member("y"), (y.dtype, y.framework)
