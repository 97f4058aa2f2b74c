"""`EventHandle` and `EventOverlap` of DeepEP V1, points in the work of a stream of PyTorch, and the stream on which a call runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from .._checks import flag, instance
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


def _event_of(given: EventHandle | EventOverlap | None, name: str) -> Any:
    """Return PyTorch's event, or None. Raise EPInputError unless `given` is an event of this module, or None."""
    if isinstance(given, EventOverlap):
        given = given.event
    if given is None:
        return None
    return instance(given, name, EventHandle, "Pass the result of capture() or of an earlier call, or None.").event


class CallStream:
    """The stream of one call: the caller's current stream or, with `async_finish`, the communication stream.

    The constructor makes that stream wait for `previous`, or else for the caller's current stream. Tensors on the CPU have no streams.
    """

    def __init__(
        self,
        like: torch.Tensor,
        comm_stream: Callable[[], Any],
        previous: EventHandle | EventOverlap | None = None,
        async_finish: bool = False,
        before_epilogue: EventHandle | EventOverlap | None = None,
    ) -> None:
        self._async, self._stream = flag(async_finish, "async_finish"), None
        self.previous_event: Any = None
        """The `previous_event` for the call of `deepep_rt.Buffer`. It is None if the call runs on the caller's stream."""
        event, other = _event_of(previous, "previous_event"), _event_of(before_epilogue, "previous_event_before_epilogue")
        if not like.is_cuda:
            return
        self._caller = torch.cuda.current_stream()
        self._stream = self._caller
        if self._async:
            self._stream = comm_stream()
            self.previous_event = event = event or self._caller.record_event()
        for earlier in (event, other):
            if earlier is not None:
                self._stream.wait_event(earlier)

    @property
    def options(self) -> dict[str, Any]:
        """More arguments for a call of `deepep_rt.Buffer`."""
        return {"async_finish": True, "stream": self._stream} if self._async and self._stream is not None else {}

    def current(self) -> AbstractContextManager[Any]:
        """Make the stream of the call PyTorch's current stream in a `with` block."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record_use(self, *tensors: torch.Tensor | None) -> None:
        """Tell PyTorch's allocator that both streams use these tensors."""
        if self._stream is not None and self._stream != self._caller:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)
                    tensor.record_stream(self._caller)

    def finish(self, *tensors: torch.Tensor | None) -> EventOverlap:
        """Return the event of the call. It keeps the tensors alive."""
        if not self._async:
            return EventOverlap(None)
        with self.current():
            return EventOverlap(EventHandle(), tuple(tensor for tensor in tensors if tensor is not None))
