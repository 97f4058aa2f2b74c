"""Combine with `reduce="topk"`: the rank of a token gets a row for each choice, and adds them up in the order of the choices."""

from __future__ import annotations

from collections.abc import Callable

from ...comm.call_signature import pack
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs
from .result_memory import ResultMemory, combine_views
from .runtime import CudaRuntime, address_of


class ChoiceSums:
    """Sums of rows by expert whose bits do not depend on where experts live. For Buffers of one node.

    Args:
        runtime: The Buffer's memory and kernels.
        results: Memory for results.
    """

    def __init__(self, runtime: CudaRuntime, results: ResultMemory) -> None:
        self._runtime, self._results = runtime, results
        layout, staging = runtime.layout, runtime.regions.offsets["landing"]
        self._window = layout.choice_window
        parts = layout.choice_staging(self._window).offsets
        self._regions = {
            "recv_x_offset": staging + parts["x"],
            "recv_topk_weights_offset": staging + parts["topk_weights"],
            "recv_masks_offset": staging + parts["masks"],
        }

    def add_up(
        self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], num_sms: int, call: Call
    ) -> Callable[[], Views]:
        """Launch a kernel for each window of tokens. Return the function that makes the results.

        Args:
            inputs: Of the combine.
            by_token: The handle of the rows by token.
            tables: Addresses of the tables of the kernel expert_positions.
            num_sms: SMs for the kernels.
            call: How the call runs.
        """
        runtime, stream, num_tokens = self._runtime, call.stream, by_token.num_tokens
        runtime.order.enqueue_waits(call)
        x, weights, *biases = runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        returns = weights is not None and not inputs.weighted
        parts = runtime.layout.combined(num_tokens, x.row_bytes, returns)
        owner = self._results.allocate_sums(parts.num_bytes, call)
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
                launch(stream, num_sms, {**values, "first_token": first, "call_signature": pack(signature)})
        given = inputs.topk_weights, *inputs.biases
        own = by_token.routing, inputs.handle.routing.memory
        runtime.order.record_end(call, (x, weights, biases, inputs.x, *given), own, *given)
        return combine_views(runtime, x, num_tokens, out, out_weights if returns else None, owner, stream)
