"""The interface of the classes that move rows by token between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...results import DispatchHandle, Views
from ..calls import Call, CombineInputs, DispatchInputs


class RowMover(Protocol):
    """Moves rows by token between ranks: `Throughput` on one node, `NodesThroughput` on several."""

    def send_rows(self, inputs: DispatchInputs, call: Call) -> tuple[DispatchHandle, Callable[[], Views]]:
        """Queue a dispatch. Return its handle, and the function that makes its results."""

    def add_up(self, inputs: CombineInputs, call: Call) -> Callable[[], Views]:
        """Queue a combine. Return the function that makes its results."""
