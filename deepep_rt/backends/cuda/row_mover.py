"""The interface of the classes that move rows by token between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...comm.call_signature import Signature
from ...cuda.slots import Slots
from ...jit.launch import Launcher
from ...results import DispatchHandle, Views
from ..base import Call, CombineInputs, DispatchInputs
from .result_memory import ResultMemory


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """Addresses of what a launched routing and its dispatch write. Work behind it on its stream may read there."""

    topk_idx: int
    src_idx: int
    num_recv: int
    num_recv_per_expert: int
    capacity: int  # rows that fit
    idx_bytes: int


OnLaunch = Callable[[ArrivingRows], None]
"""Launches more kernels behind a dispatch. It may not fail for a reason of one rank: the other ranks have made the call."""


class RowMover(Protocol):
    """Moves rows by token between ranks: `Throughput` on one node, `NodesThroughput` on several."""

    results: ResultMemory
    counts: Slots
    """Memory for the counts of dispatches with a handle."""
    num_sms: int
    """SMs of the next calls."""

    def check_support(self) -> None:
        """Raise EPUnavailableError if this Buffer cannot make throughput calls."""

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
        """Return the dispatch kernel and its Params.

        Args:
            signature: Of the call.
            arrays: x, topk_idx, topk_weights and scales on the GPU.
            tables: Address of the handle's tables.
            offset: Of the result in symmetric memory.
            parts: Offsets in the result.
            capacity: Rows that fit.
            counts: Address of the caller's counts.
        """

    def combine_launch(
        self, inputs: CombineInputs, arrays: Sequence[Any], out: int, out_weights: int
    ) -> tuple[Launcher, dict[str, Any]]:
        """Return the combine kernel for rows by token, and its Params.

        Args:
            inputs: Of the combine.
            arrays: Its x, topk_weights and biases on the GPU.
            out: Address of the sums.
            out_weights: Address of the sums of the weights.
        """

    def send_rows(
        self, inputs: DispatchInputs, call: Call, on_launch: OnLaunch | None = None
    ) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue a dispatch. Return its handle, and the function that makes its results.

        Args:
            inputs: Of the dispatch.
            call: How the call runs.
            on_launch: Runs right after the launch of the dispatch, if the routing is new: before the host waits for counts, if it can.
        """

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results."""

    def add_up_choices(
        self, inputs: CombineInputs, by_token: DispatchHandle, tables: dict[str, int], call: Call
    ) -> Callable[[], Views]:
        """Queue a combine of rows by expert with `reduce="topk"`. Return the function that makes its results.

        Args:
            inputs: Of the combine.
            by_token: The handle of the rows by token.
            tables: Addresses of the tables of the kernel expert_positions.
            call: How the call runs.
        """
