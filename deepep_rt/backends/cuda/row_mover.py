"""The interface of the classes that move rows by token between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...results import DispatchHandle, Views
from ..calls import Call, CombineInputs, DispatchInputs
from .result_memory import ResultMemory


class RowMover(Protocol):
    """Moves rows by token between ranks: `Throughput` on one node, `NodesThroughput` on several."""

    results: ResultMemory

    def send_rows(self, inputs: DispatchInputs, call: Call) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue a dispatch. Return its handle, and the function that makes its results."""

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
