"""Compile several kernels at the same time, for a Buffer that finds none of them in the cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from ..errors import EPError
from ..kernels.source import Constants
from ..kernels.table import Kernel
from . import build

_log = logging.getLogger("deepep_rt")

_MOST_THREADS = 8


def most_threads() -> int:
    """Return how many kernels this process compiles at a time."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def build_together(requests: Sequence[tuple[Kernel, Constants]], arch: str) -> None:
    """Compile kernels into the disk cache, as many at a time as this process has cores, up to eight.

    It saves time only: `build` finds the kernels afterwards. A kernel that does not compile raises there and not here.

    Args:
        requests: The kernels with the results of `kernel_constants`.
        arch: Target, as in `build`.
    """
    # PTX that is linked needs the CUDA context of the calling thread.
    possible = [
        (kernel, constants) for kernel, constants in requests if arch.startswith("sm_") or not kernel.links_nvshmem(constants)
    ]
    threads = min(most_threads(), len(possible))
    if threads < 2:
        return
    pool = ThreadPoolExecutor(threads)
    try:
        wait([pool.submit(_build, kernel, constants, arch) for kernel, constants in possible])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, compile no further kernel


def _build(kernel: Kernel, constants: Constants, arch: str) -> None:
    try:
        build.build(kernel, constants, arch)
    except EPError as error:
        _log.debug("%s for %s: %s", kernel.name, arch, error)
