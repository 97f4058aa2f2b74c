"""What the kernels of low-latency calls get: the members of their Params, their grid, and the memory of their results."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from ...arrays.dtypes import FP8_GROUP
from ...arrays.view import Framework, View
from ...comm.call_signature import Signature, pack
from ...cuda import driver
from ...errors import EPInputError, EPUnavailableError
from ...kernels.structs import LL_RECEIVE, LL_SEND
from ...kernels.tuning import has_fp8
from ...results import Views
from ..base import LowLatencyDispatchInputs
from .runtime import CudaRuntime, address_of

_log = logging.getLogger("deepep_rt")

PHASES = {False: LL_SEND | LL_RECEIVE, True: LL_SEND}
"""The phases that a call launches, by whether it has a hook. The hook launches the rest."""


class RowFormat:
    """Results of dispatch with one format of rows: their memory, offsets and dtypes. Slots keep the memory for later calls."""

    def __init__(self, runtime: CudaRuntime, use_fp8: bool, use_ue8m0: bool) -> None:
        parts = runtime.layout.low_latency_result(use_fp8=use_fp8, use_ue8m0=use_ue8m0)
        self.memory = runtime.slots(parts.num_bytes)
        self.x, self.scales = parts.offsets["x"], parts.offsets["scales"]
        self.dtype = "float8_e4m3fn" if use_fp8 else "bfloat16"
        self.scale_dtype = None if not use_fp8 else "uint8" if use_ue8m0 else "float32"


class LowLatencyKernels:
    """Parameters and memory of the low-latency kernels of a Buffer.

    Args:
        runtime: The Buffer's memory and kernels.
        archs: The target of each rank's GPU.
    """

    def __init__(self, runtime: CudaRuntime, archs: Sequence[str]) -> None:
        self._runtime, self._config = runtime, runtime.config
        config, layout = runtime.config, runtime.layout
        self.handles = runtime.slots(layout.low_latency_handle.num_bytes, layout.num_handles if config.low_latency else 0)
        self._formats = {
            (use_fp8, use_ue8m0): RowFormat(runtime, use_fp8, use_ue8m0)
            for use_fp8, use_ue8m0 in ((False, False), (True, False), (True, True))
        }
        self.sums = runtime.slots(config.num_max_tokens_per_rank * config.hidden * 2)
        # Rows travel in one format. If the GPU of one rank cannot convert to FP8, no rank converts.
        self.archs_without_fp8 = {rank: arch for rank, arch in enumerate(archs) if not has_fp8(arch)}
        self._has_warned_of_fp8 = False
        # The same for every call: a rank with few tokens may receive many.
        self.num_blocks = min(config.low_latency_sms, driver.num_sms(runtime.device), max(2 * config.num_max_tokens_per_rank, 16))
        self._least_large_combine = math.inf if config.has_network else config.least_large_combine(self.num_blocks)

    def row_format(self, use_fp8: bool = False, use_ue8m0: bool = False) -> RowFormat:
        """Return the format of rows that a dispatch with these options brings."""
        return self._formats[use_fp8, use_ue8m0]

    def check_fp8(self, inputs: LowLatencyDispatchInputs) -> None:
        """If a GPU cannot convert to FP8, change an FP8 dispatch to a bfloat16 dispatch, and warn once.

        Raises:
            EPUnavailableError: if the caller has already allocated memory for FP8 results.
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
        name = "ll_combine_large" if num_tokens >= self._least_large_combine and reduce_early else "ll_combine"
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
        """Return the members of a dispatch's Params.

        Args:
            inputs: The arguments of the call.
            arrays: Its x, topk_idx and topk_weights on the GPU.
            format_: The format of rows.
            tables: Address of the handle's tables.
            results: Addresses of the rows and of their scales.
            with_hook: Whether the launch only sends.
        """
        x, idx, weights = arrays
        return {
            "phases": PHASES[with_hook],
            "num_tokens": x.shape[0],
            "x": x.ptr,
            "topk_idx": idx.ptr,
            "topk_weights": address_of(weights),
            "handle": tables,
            "recv_x": results[0],
            "recv_scales": results[1],
            "recv_stats": inputs.recv_stats.ptr if inputs.recv_stats else 0,
            "wait_stats": inputs.wait_stats.ptr if inputs.wait_stats else 0,
            "idx_bytes": idx.itemsize,
            "use_fp8": inputs.use_fp8,
            "round_scale": inputs.round_scale,
            "use_ue8m0": inputs.use_ue8m0,
            "check": self._config.check_inputs,
            "call_signature": pack(inputs.signature(format_.dtype, format_.scale_dtype)),
        }

    def dispatch_views(
        self, format_: RowFormat, results: tuple[int, int], memory: Any, tables: Any, framework: Framework, stream: int
    ) -> Views:
        """Make the Views of a dispatch's results. `memory` owns the rows, and `tables` the counts."""
        config, result = self._config, self._runtime.result
        experts, rows, hidden = config.num_local_experts, config.worst_recv_tokens, config.hidden
        counts = tables.ptr + self._runtime.layout.low_latency_handle.offsets["num_recv_per_expert"]
        views: Views = {
            "num_recv_per_expert": result(counts, (experts,), "int32", tables, framework, stream),
            "x": result(results[0], (experts, rows, hidden), format_.dtype, memory, framework, stream),
        }
        if format_.scale_dtype:
            shape = experts, rows, hidden // FP8_GROUP
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
        """Return the members of a combine's Params.

        Args:
            signature: What all ranks must agree on.
            num_tokens: Tokens of this rank.
            arrays: The address of `y`, and topk_idx and topk_weights on the GPU.
            tables: Address of the handle's tables.
            out: Address of the sums.
            reduce_early: Whether ranks add up the rows of their experts.
            has_weights: Whether the dispatch sent the weights.
            with_hook: Whether the launch only sends.
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
        }
