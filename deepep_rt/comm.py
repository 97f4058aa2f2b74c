"""MPI and NVSHMEM: agreement between the ranks, the one NVSHMEM runtime of a process, symmetric memory and peer addresses."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _env
from .config import Config
from .errors import EPConfigError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger("deepep_rt")


def agree(comm: Intracomm, config: Config, backend: str, on_exhausted: str) -> str:
    """Compare the settings of all ranks, and choose one backend for all of them.

    Returns:
        "cuda" or "host".

    Raises:
        EPConfigError: on every rank, if a setting differs; names it, and who has which value.
        EPUnavailableError: on every rank, if "cuda" was asked for and a rank has no GPU.
    """
    mine = {**dataclasses.asdict(config), "backend": backend, "on_exhausted": on_exhausted}
    missing = None if backend == "host" else _why_no_gpu()
    settings, reasons = zip(*comm.allgather((mine, missing)), strict=True)
    different = [name for name in mine if any(theirs[name] != settings[0][name] for theirs in settings)]
    if different:
        rows = "; ".join(f"{name}: " + ", ".join(f"rank {r} {s[name]!r}" for r, s in enumerate(settings)) for name in different)
        raise EPConfigError(f"the ranks disagree on the configuration of a Buffer; give all of them the same. {rows}")
    without = {rank: reason for rank, reason in enumerate(reasons) if reason}
    if backend == "cuda" and without:
        rank, reason = next(iter(without.items()))
        raise EPUnavailableError(f"backend='cuda', but rank {rank} cannot use a GPU: {reason}")
    if backend == "auto":
        if without and len(without) < len(reasons):
            raise EPUnavailableError(
                f"some ranks have a GPU and some have none (without: {sorted(without)}, {next(iter(without.values()))}); "
                f"give every rank a GPU, or choose backend='host'"
            )
        return "host" if without else "cuda"
    return backend


def _why_no_gpu() -> str | None:
    """The reason why this process cannot use a GPU, or None."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error}); pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]'"
    try:
        status, *count = driver.cuInit(0)
        if status == driver.CUresult.CUDA_SUCCESS:
            status, *count = driver.cuDeviceGetCount()
    except Exception as error:  # without a driver the binding raises from whatever it tried last
        return f"no CUDA driver ({error})"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"the CUDA driver says {status.name}"
    return None if count[0] else "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES?)"
