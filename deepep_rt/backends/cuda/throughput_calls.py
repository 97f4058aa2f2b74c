"""The throughput calls of the CUDA backend, in both layouts of rows and over any number of nodes."""

from __future__ import annotations

from ...arrays.view import HOST
from ...results import CombineResult, DispatchResult
from ..calls import Call, CombineInputs, DispatchInputs
from .expert_rows import ExpertRows
from .row_mover import RowMover
from .runtime import CudaRuntime


class ThroughputCalls:
    """Dispatch and combine.

    Args:
        runtime: The Buffer's memory and kernels.
        by_token: Moves rows by token.
    """

    def __init__(self, runtime: CudaRuntime, by_token: RowMover) -> None:
        self._runtime, self._by_token = runtime, by_token
        self._by_expert = ExpertRows(runtime, by_token)

    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """See `Buffer.dispatch`."""
        handle, make_views = (self._by_token if inputs.layout == "token" else self._by_expert).send_rows(inputs, call)
        self._runtime.monitor.check_inputs()
        views = self._runtime.for_caller(make_views, inputs.x.device == HOST, call.stream)
        return DispatchResult(handle, self._runtime.order.event(call), views)

    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """See `Buffer.combine`."""
        make_views = (self._by_token if inputs.handle.layout == "token" else self._by_expert).add_up(inputs, call)
        self._runtime.monitor.check_inputs()
        views = self._runtime.for_caller(make_views, inputs.x.device == HOST, call.stream)
        return CombineResult(self._runtime.order.event(call), views)
