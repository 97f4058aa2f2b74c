"""The throughput calls of the CUDA backend, in both layouts of rows and over any number of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays.view import HOST
from ...results import CombineResult, DispatchResult
from ..base import Call, CombineInputs, DispatchInputs, ThroughputPreparation
from .expert_rows import ExpertRows
from .fp8_rows import Fp8Rows
from .monitor import whole_call
from .prepared_throughput import PreparedThroughput
from .result_memory import CallMemory
from .runtime import CudaRuntime
from .throughput import RowMover


class ThroughputCalls:
    """Dispatch and combine.

    Args:
        runtime: The Buffer's memory and kernels.
        by_token: Moves rows by token.
        archs: The target of each rank's GPU.
    """

    def __init__(self, runtime: CudaRuntime, by_token: RowMover, archs: Sequence[str]) -> None:
        memory = CallMemory(runtime)
        self._runtime, self._by_token, self._monitor = runtime, by_token, runtime.monitor
        self._by_expert = ExpertRows(runtime, by_token, memory)
        self._fp8_rows = Fp8Rows(runtime, memory, archs)
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
        return DispatchResult(handle, self._runtime.order.event(call), views)

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
