"""Arrays in host memory: copied to the GPU for a call there, and its results back."""

from __future__ import annotations

from dataclasses import replace

from ...arrays.host_memory import Result
from ...arrays.view import HOST, View
from ...cuda import driver
from ...cuda.stream_memory import StreamPool
from ...errors import EPInputError, EPOutOfMemoryError
from ...results import Views


def to_device(device: int, stream: int, pool: StreamPool, *views: View | None) -> list[View | None]:
    """The same arrays in GPU memory: those of host memory are copied."""
    staged = []
    for view in views:
        if view is not None and view.device == HOST:
            if driver.is_capturing(stream):
                raise EPInputError(
                    "an array is in host memory, which each replay of the CUDA graph would read anew; inside of a capture, pass arrays on "
                    "the GPU"
                )
            memory = pool.allocate(view.nbytes, stream)
            driver.copy_async(memory.ptr, view.ptr, view.nbytes, stream)
            view = replace(view, ptr=memory.ptr, device=device, owner=(memory, view.owner))
        staged.append(view)
    return staged


def to_host(views: Views, stream: int, given: View | None = None) -> Views:
    """Copies in host memory, but of what the caller gave to be written to (`given`). The host waits for them."""
    copied: Views = {}
    for name, view in views.items():
        if view is not None and view is not given:
            try:
                copy = Result(view.shape, view.dtype)
            except MemoryError as error:
                told = EPOutOfMemoryError(
                    f"host memory does not suffice for {name} {list(view.shape)} ({error}); expected room for the results of a call with "
                    f"arrays in host memory. Pass arrays on the GPU, or fewer tokens."
                )
                told.call_made = True
                raise told from error
            driver.copy_async(copy.ptr, view.ptr, view.nbytes, stream)
            view = copy.view(view.framework)
        copied[name] = view
    driver.synchronize(stream)
    return copied
