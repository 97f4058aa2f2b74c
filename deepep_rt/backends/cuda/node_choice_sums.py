"""Combine with `reduce="topk"` over several nodes: a combine of rows by token for each choice, whose results this rank adds up."""

from __future__ import annotations

from collections.abc import Callable

from ...arrays.view import View
from ...jit.launch import launch_local, load_local
from ...kernels.regions import arrange
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs
from .result_memory import CallMemory, ResultMemory, combine_views
from .runtime import CudaRuntime, address_of

LaunchChoice = Callable[[CombineInputs, int, dict[str, int], dict[str, int], int], None]
"""Launches a combine over nodes. Arguments: inputs, number of rows, the first Params, the Params of the choice, and the stream."""


class NodeChoiceSums:
    """Sums of rows by expert whose bits do not depend on where experts live. For Buffers of several nodes.

    For each choice, `y` by token has the row of this choice, or zeros. One rank has the row of a (token, choice), so the combine of these
    rows adds zeros to it and rounds nothing. Over the links go `num_topk` times the bytes of a combine with `reduce="rank"`.

    Args:
        runtime: The Buffer's memory and kernels.
        results: Memory for results.
    """

    def __init__(self, runtime: CudaRuntime, results: ResultMemory) -> None:
        self._runtime, self._results = runtime, results
        self._memory = CallMemory(runtime)

    def add_up(
        self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call, launch: LaunchChoice
    ) -> Callable[[], Views]:
        """Launch three kernels for each choice. Return the function that makes the results.

        Args:
            inputs: Of the combine.
            by_token: The handle of the rows by token.
            tables: Addresses of the tables of the kernel expert_positions.
            call: How the call runs.
            launch: Launches a combine over nodes.
        """
        runtime, stream, config = self._runtime, call.stream, self._runtime.config
        runtime.order.enqueue_waits(call)
        x, weights, *biases = runtime.on_device(stream, inputs.x, inputs.topk_weights, *inputs.biases)
        num_tokens, num_rows, num_topk = by_token.num_tokens, by_token.num_recv_rows, config.num_topk
        returns = weights is not None and not inputs.weighted
        parts = runtime.layout.combined(num_tokens, x.row_bytes, returns)
        owner = self._results.allocate_sums(parts.num_bytes, call)
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
                launch(inputs, num_rows, params, of_choice, stream)
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
