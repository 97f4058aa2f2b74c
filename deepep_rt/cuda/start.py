"""Start CUDA in a thread, while Python does what a first Buffer needs no GPU for: imports, exchanges between ranks, and reading kernels.

The thread changes only when CUDA starts. Callers that need CUDA wait for the thread, and then make the calls of the start again. These
return at once, or they fail as they would without the thread. So nothing here raises.

The import of the package starts nothing: a program may still fork then, or choose the GPUs that it sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_thread: threading.Thread | None = None


def begin_driver() -> None:
    """Begin to start the driver, unless it runs."""
    with suppress(Exception):  # no bindings, or no driver: the errors have several types
        from cuda.bindings import driver

        if driver.cuCtxGetCurrent()[0] == driver.CUresult.CUDA_ERROR_NOT_INITIALIZED:
            _begin(lambda: driver.cuInit(0))


def begin_context(local_rank: int) -> int | None:
    """Begin to make the context that `driver.use_device` makes current. The driver has started.

    Return the number of the GPU. Return None if a context is current, or if the GPU has one.
    """
    with suppress(Exception):  # a call failed, so that a result is None
        from cuda.bindings import driver

        if int(driver.cuCtxGetCurrent()[1]) == 0:
            ordinal = local_rank % driver.cuDeviceGetCount()[1]
            device = int(driver.cuDeviceGet(ordinal)[1])
            if not driver.cuDevicePrimaryCtxGetState(device)[2]:
                _begin(lambda: driver.cuDevicePrimaryCtxRetain(device))
                return ordinal
    return None


def wait() -> None:
    """Wait for what has begun."""
    if _thread is not None:
        _thread.join()


def _begin(step: Callable[[], object]) -> None:
    """Run a call of the driver in the thread. The bindings let other threads of Python run meanwhile."""
    global _thread
    wait()
    # Python waits for this thread when it exits: the driver would crash if the process ended in the middle of its start.
    thread = threading.Thread(target=step, name="deepep_rt's start of CUDA")
    thread.start()  # it fails if the process may have no more threads
    _thread = thread
