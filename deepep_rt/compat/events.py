"""`EventHandle` and `EventOverlap` of DeepEP V1: points in the work of a stream of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from .._checks import flag, instance
from ..errors import EPInputError


class EventHandle:
    """The work that the current stream of PyTorch holds now. Without a GPU, work has always finished.

    Example:
        >>> EventHandle().current_stream_wait()
    """

    def __init__(self) -> None:
        self.event: Any = None
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this; the host does not wait."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream())


class EventOverlap:
    """An event that a call returns, or that one is given to start after; `with` it, the current stream waits for it at the end.

    Args:
        event: The event; None in what a call without `async_finish` returns.
        extra_tensors: Tensors to be kept as long as this object.

    Example:
        >>> recv_x, *_, event = buffer.dispatch(x, ..., async_finish=True)
        >>> with event:
        ...     shared_experts(x)  # in the meantime
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event; the host does not wait.

        Raises:
            EPInputError: if there is none.
        """
        if self.event is None:
            raise EPInputError(
                "this call was made without async_finish=True, so that it has no event: there is nothing to wait for"
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class Placement:
    """The stream that a call runs on: the caller's current one, or, with `async_finish`, the communication stream.

    Making it orders that stream after `previous`, or else after the caller's current one.

    Args:
        like: A tensor of the call; on the CPU there are no streams.
        comm_stream: Gives the communication stream.
        previous: What the call shall start after.
        async_finish: Whether the caller's stream goes on without waiting.
    """

    def __init__(
        self, like: torch.Tensor, comm_stream: Callable[[], Any], previous: EventOverlap | None = None, async_finish: bool = False
    ) -> None:
        self._async, self._stream = flag(async_finish, "async_finish"), None
        self.event: Any = None
        """What `deepep_rt.Buffer` is to take as its `previous_event`; None where the call runs on the caller's stream."""
        if previous is not None:
            instance(previous, "previous_event", EventOverlap, "Pass what capture() or an earlier call returned, or None.")
        if not like.is_cuda:
            return
        self._caller = torch.cuda.current_stream()
        self._stream = self._caller
        event = getattr(getattr(previous, "event", None), "event", None)
        if self._async:
            self._stream = comm_stream()
            self.event = event = event or self._caller.record_event()
        if event is not None:
            self._stream.wait_event(event)

    @property
    def options(self) -> dict[str, Any]:
        """More arguments for a call of `deepep_rt.Buffer`."""
        return {"async_finish": True, "stream": self._stream} if self._async and self._stream is not None else {}

    def here(self) -> AbstractContextManager[Any]:
        """`with` it, PyTorch works on the stream of the call."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def share(self, *tensors: torch.Tensor) -> None:
        """Tell PyTorch's allocator of tensors that were made on one of the two streams and are used on the other."""
        if self._stream is not None and self._stream != self._caller:
            for tensor in tensors:
                tensor.record_stream(self._stream)
                tensor.record_stream(self._caller)

    def finish(self, *tensors: torch.Tensor | None) -> EventOverlap:
        """The event of the call, which keeps some tensors."""
        if not self._async:
            return EventOverlap(None)
        with self.here():
            return EventOverlap(EventHandle(), tuple(tensor for tensor in tensors if tensor is not None))
