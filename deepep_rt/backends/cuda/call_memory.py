"""Memory that calls need besides the Buffer's own."""

from __future__ import annotations

from ...cuda.slots import Slot, Slots
from ...cuda.stream_tracking import StreamMemory
from ..base import Call
from .runtime import CudaRuntime


class CallMemory:
    """Memory of any size for work on the stream of a call.

    Args:
        runtime: The Buffer's memory.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._slots: dict[int, Slots] = {}

    def allocate(self, num_bytes: int, call: Call, reader: int | None = None) -> StreamMemory | Slot:
        """Allocate memory for the call, and for `reader`, the stream of a caller who gets it. A capture takes memory that stays with the
        Buffer.
        """
        if call.capture is None:
            return self._runtime.stream_pool.allocate(num_bytes, call.stream, reader)
        num_bytes = max(num_bytes, 1)
        if num_bytes not in self._slots:
            self._slots[num_bytes] = self._runtime.slots(num_bytes)
        return self._slots[num_bytes].acquire(call.stream, reader, call.capture)
