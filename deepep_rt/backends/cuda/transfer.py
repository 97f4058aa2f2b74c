"""Copies between host memory and the GPU, for callers whose arrays lie in host memory."""

from __future__ import annotations

from dataclasses import replace

from ...arrays.host_memory import Result
from ...arrays.view import HOST, View
from ...cuda import driver
from ...cuda.stream_tracking import StreamPool
from ...errors import EPInputError, EPOutOfMemoryError
from ...results import Views


def to_device(device: int, stream: int, pool: StreamPool, *views: View | None) -> list[View | None]:
    """Return the same arrays in GPU memory; copy those that lie in host memory.

    Raises:
        EPInputError: if a CUDA graph captures the stream.
    """
    staged = []
    for view in views:
        if view is not None and view.device == HOST:
            if driver.is_capturing(stream):
                raise EPInputError(
                    "an array is in host memory, and each replay of the CUDA graph would read it again; expected arrays on the GPU in a "
                    "capture. Copy the array to the GPU before"
                )
            memory = pool.allocate(view.nbytes, stream)
            driver.copy_async(memory.ptr, view.ptr, view.nbytes, stream)
            view = replace(view, ptr=memory.ptr, device=device, owner=(memory, view.owner))
        staged.append(view)
    return staged


def to_host(views: Views, stream: int, given: View | None = None) -> Views:
    """Copy results to host memory, and wait on the host for the copies.

    Args:
        views: The results.
        stream: The stream of the call.
        given: An array of the caller that is a result; it is not copied.

    Raises:
        EPOutOfMemoryError: if the host has too little memory. The call was made.
    """
    copied: Views = {}
    for name, view in views.items():
        if view is not None and view is not given:
            try:
                copy = Result(view.shape, view.dtype)
            except MemoryError as error:
                memory_error = EPOutOfMemoryError(
                    f"host memory does not suffice for {name} {list(view.shape)} ({error}); expected room for the results of a call with "
                    f"arrays in host memory. Pass arrays on the GPU, or fewer tokens."
                )
                memory_error.call_made = True
                raise memory_error from error
            driver.copy_async(copy.ptr, view.ptr, view.nbytes, stream)
            view = copy.view(view.framework)
        copied[name] = view
    driver.synchronize(stream)
    return copied
