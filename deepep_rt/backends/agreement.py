"""Let the ranks of a new Buffer agree on its settings and its backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

from .._install import pip_install_cuda
from ..comm.communicator import Communicator
from ..comm.failure_notice import making
from ..comm.process_end import describe
from ..config import MAX_TIMEOUT_S, Config
from ..cuda import start
from ..errors import EPConfigError, EPTimeoutError, EPUnavailableError
from ..jit import build
from ..network import NetworkOptions

_log = logging.getLogger("deepep_rt")

_CREATION = "the making of a Buffer", "all ranks of its communicator to make it at the same time"
_CREATION_TIMEOUT_S = 300.0
_REPORT_TIMEOUT_S = 30.0  # of a rank whose own timeout_s is wrong
_DRIVER_FAILS = "the CUDA driver fails:"  # begins the reason if a GPU is there and does not work


def agree(comm: Communicator, config: Config, backend: str, on_exhausted: str, network: NetworkOptions | None = None) -> str:
    """Compare the settings of all ranks, and choose "cuda" or "host" for all of them. `comm` is what `creation_comm` returned.

    Raises:
        EPConfigError: on every rank, if a setting differs between ranks, or is wrong on one. It names the setting, ranks and values.
        EPUnavailableError: on every rank, if "cuda" was asked for and a rank has no GPU, or if a CUDA driver does not start.
        EPTimeoutError: if a rank does not say its settings.
    """
    settings = {**config.settings(), "backend": backend, "on_exhausted": on_exhausted}
    settings |= (network or NetworkOptions()).common()
    reason = None if backend == "host" else why_no_gpu()
    gathered = comm.allgather((settings, reason))
    for rank, error in enumerate(gathered):
        if isinstance(error, str):
            raise EPConfigError(f"rank {rank} cannot make this Buffer: {error}")
    all_settings, reasons = zip(*gathered, strict=True)
    _check_same(all_settings)
    return _choose_backend(backend, {rank: reason for rank, reason in enumerate(reasons) if reason}, len(reasons))


def _check_same(settings: Sequence[dict[str, Any]]) -> None:
    """Raise EPConfigError if a setting differs between ranks."""
    different = [name for name in settings[0] if any(theirs[name] != settings[0][name] for theirs in settings)]
    if different:
        rows = "; ".join(f"{name}: " + ", ".join(f"rank {r} {s[name]!r}" for r, s in enumerate(settings)) for name in different)
        raise EPConfigError(
            f"the ranks disagree on the settings of a Buffer: {rows}; expected the same on all ranks. Pass the same settings on each rank"
        )


def _choose_backend(backend: str, reasons: dict[int, str], num_ranks: int) -> str:
    """Choose "cuda" or "host". `reasons` has the ranks without a usable GPU. Raise EPUnavailableError if one is needed."""
    if backend == "cuda" and reasons:
        rank, reason = next(iter(reasons.items()))
        raise EPUnavailableError(f"backend='cuda', but rank {rank} cannot use a GPU: {reason}")
    if backend == "auto":
        broken = [rank for rank, reason in reasons.items() if reason.startswith(_DRIVER_FAILS)]
        if broken:
            raise EPUnavailableError(
                f"backend='auto', but on rank {broken[0]} {reasons[broken[0]]}; expected a driver that starts. Run python -m deepep_rt "
                f"doctor to find the cause, or pass backend='host' to use no GPU"
            )
        if reasons and len(reasons) < num_ranks:
            raise EPUnavailableError(
                f"some ranks have a GPU and some have none (without: {sorted(reasons)}, {next(iter(reasons.values()))}); expected a GPU on "
                f"every rank or on none. Give every rank a GPU, or pass backend='host'"
            )
        return "host" if reasons else "cuda"
    return backend


def report_wrong_setting(comm: Communicator, error: Exception, timeout_s: float | None) -> None:
    """Tell the other ranks which setting is wrong on this rank, so that they do not wait for it."""
    limit_s = timeout_s if isinstance(timeout_s, Real) and 0 < timeout_s <= MAX_TIMEOUT_S else _REPORT_TIMEOUT_S
    with suppress(EPTimeoutError, type(error)):  # the caller needs the error about the setting more than others
        met = creation_comm(comm, limit_s)
        with making(comm, met, _CREATION[0]):
            met.allgather(str(error) if isinstance(error, EPConfigError) else describe(error))
            raise error  # as the other ranks do


def creation_comm(comm: Communicator, timeout_s: float) -> Communicator:
    """Wait for all ranks of a new Buffer, and make a communicator for its making. Its collectives have a time limit."""
    return comm.meet(timeout_s, *_CREATION)


def creation_timeout_s(timeout_s: float) -> float:
    """The time limit while a Buffer is made. It is long, because ranks load libraries and start GPUs at different speeds."""
    return max(timeout_s, _CREATION_TIMEOUT_S)


def announce(comm: Communicator, backend: str, transport: str, num_bytes: int) -> None:
    """Log a new Buffer on rank 0. The numbers of kernels are those of this process so far."""
    if comm.Get_rank() == 0:
        _log.info(
            "Buffer of %d ranks: %s, %s, %.2f GB a rank, kernels: %d from the cache and %d compiled",
            comm.Get_size(), backend, transport, num_bytes / 1e9, build.stats.hits, build.stats.misses,
        )  # fmt: skip


def why_no_gpu() -> str | None:
    """Return the reason why this process cannot use a GPU, or None."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error}). Run {pip_install_cuda()}"
    start.wait()
    try:
        status, *count = driver.cuInit(0)
        if status == driver.CUresult.CUDA_SUCCESS:
            status, *count = driver.cuDeviceGetCount()
    except Exception as error:  # without a driver, the type of the binding's error depends on its version
        return f"no CUDA driver ({error})"
    if status != driver.CUresult.CUDA_SUCCESS:
        has_no_gpu = status.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")
        return f"{'the CUDA driver says' if has_no_gpu else _DRIVER_FAILS} {status.name}"
    return None if count[0] else "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES?)"
