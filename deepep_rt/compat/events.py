"""`EventHandle` and `EventOverlap` of DeepEP V1: points in the work of a stream of PyTorch."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from ..errors import EPInputError


class EventHandle:
    """The work that the current stream of PyTorch holds now. Without a GPU, that work has always finished.

    Example:
        >>> EventHandle().current_stream_wait()
    """

    def __init__(self) -> None:
        self.event: Any = None
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this event. The host does not wait."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream())


class EventOverlap:
    """An event that a call returns, or after which a call starts. At the end of a `with` block, the current stream waits for it.

    Args:
        event: The event. A call without `async_finish` returns None here.
        extra_tensors: Tensors that this object keeps alive.

    Example:
        >>> recv_x, *_, event = buffer.dispatch(x, ..., async_finish=True)
        >>> with event:
        ...     shared_experts(x)  # in the meantime
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event. The host does not wait.

        Raises:
            EPInputError: Without an event.
        """
        if self.event is None:
            raise EPInputError("event=None; expected the event of a call with async_finish=True. Do not wait for other calls.")
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
