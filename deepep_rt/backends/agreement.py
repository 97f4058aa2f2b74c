"""Agreement between ranks on the settings and the backend of a Buffer."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress
from numbers import Real
from typing import Any

from ..comm.communicator import Communicator
from ..comm.rendezvous import private_comm, timed_allgather
from ..config import MAX_TIMEOUT_S, Config
from ..errors import EPConfigError, EPTimeoutError, EPUnavailableError
from ..jit import build as jit
from ..network import NetworkOptions

_log = logging.getLogger("deepep_rt")

_MAKING = "the making of a Buffer", "all ranks of its communicator to make it at the same time"
_MAKING_S = 300.0
_PATIENCE_S = 30.0  # of a rank whose own time limit is what is wrong


def agree(comm: Communicator, config: Config, backend: str, on_exhausted: str, network: NetworkOptions | None = None) -> str:
    """Compare the settings of all ranks, and choose one backend for all of them.

    Returns:
        "cuda" or "host".

    Raises:
        EPConfigError: on every rank, if a setting differs, or is wrong on some; names it, and who has which value.
        EPUnavailableError: on every rank, if "cuda" was asked for and a rank has no GPU, or a CUDA driver does not start.
        EPTimeoutError: if a rank does not come at all.
    """
    mine = {**dataclasses.asdict(config), "backend": backend, "on_exhausted": on_exhausted}
    mine |= (network or NetworkOptions()).common()
    missing = None if backend == "host" else why_no_gpu()
    said = _exchanged(comm, config.timeout_s, (mine, missing))
    for rank, wrong in enumerate(said):
        if isinstance(wrong, str):
            raise EPConfigError(f"rank {rank} asks for a Buffer that there cannot be: {wrong}")
    settings, reasons = zip(*said, strict=True)
    different = [name for name in mine if any(theirs[name] != settings[0][name] for theirs in settings)]
    if different:
        rows = "; ".join(f"{name}: " + ", ".join(f"rank {r} {s[name]!r}" for r, s in enumerate(settings)) for name in different)
        raise EPConfigError(f"the ranks disagree on the configuration of a Buffer; give all of them the same. {rows}")
    without = {rank: reason for rank, reason in enumerate(reasons) if reason}
    if backend == "cuda" and without:
        rank, reason = next(iter(without.items()))
        raise EPUnavailableError(f"backend='cuda', but rank {rank} cannot use a GPU: {reason}")
    if backend == "auto":
        broken = [rank for rank, reason in without.items() if reason.startswith(_BROKEN)]
        if broken:
            raise EPUnavailableError(
                f"backend='auto', but on rank {broken[0]} {without[broken[0]]}; python -m deepep_rt doctor says more. To do without GPUs, "
                f"choose backend='host'"
            )
        if without and len(without) < len(reasons):
            raise EPUnavailableError(
                f"some ranks have a GPU and some have none (without: {sorted(without)}, {next(iter(without.values()))}); "
                f"give every rank a GPU, or choose backend='host'"
            )
        return "host" if without else "cuda"
    return backend


def refuse(comm: Communicator, error: EPConfigError, timeout_s: float | None) -> None:
    """Let the others know what is wrong with this rank's settings, before they wait for it in vain."""
    limit_s = timeout_s if isinstance(timeout_s, Real) and 0 < timeout_s <= MAX_TIMEOUT_S else _PATIENCE_S
    with suppress(EPTimeoutError):  # nobody there: what is wrong is worth more than that
        _exchanged(comm, limit_s, str(error))


def _exchanged(comm: Communicator, timeout_s: float, mine: Any) -> list[Any]:
    """What all ranks say who make a Buffer now."""
    comm = private(comm, timeout_s)
    timed_allgather(comm, (), timeout_s, *_MAKING)
    return comm.allgather(mine)


def private(comm: Communicator, timeout_s: float) -> Communicator:
    """A communicator of the library's own over the ranks of a Buffer that is made, whose collectives end in time."""
    return private_comm(comm, timeout_s, *_MAKING)


def making_limit_s(timeout_s: float) -> float:
    """After how many seconds a silent rank is given up while a Buffer is made: ranks load libraries and start GPUs at different speeds."""
    return max(timeout_s, _MAKING_S)


def announce(comm: Communicator, backend: str, transport: str, num_bytes: int) -> None:
    """Log, on rank 0, what a Buffer that was just made consists of; the kernels are those of this process so far."""
    if comm.Get_rank() == 0:
        _log.info(
            "Buffer of %d ranks: %s, %s, %.2f GB a rank, kernels: %d from the cache and %d compiled",
            comm.Get_size(), backend, transport, num_bytes / 1e9, jit.stats.hits, jit.stats.misses,
        )  # fmt: skip


_BROKEN = "the CUDA driver fails:"  # how the reason begins where there ought to be a GPU


def why_no_gpu() -> str | None:
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
        nothing = status.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")
        return f"{'the CUDA driver says' if nothing else _BROKEN} {status.name}"
    return None if count[0] else "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES?)"
