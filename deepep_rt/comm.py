"""Agreement between ranks, through MPI: on settings and a backend, on who is still there, and on what all do together or not at all."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import jit
from .config import Config
from .errors import EPConfigError, EPTimeoutError, EPUnavailableError
from .network import NetworkOptions

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger("deepep_rt")


def meet(comm: Intracomm, value: int, timeout_s: float, phase: str, hint: str) -> list[int]:
    """Gather a number from all ranks, but do not wait longer than `timeout_s` for one that does not come.

    Raises:
        EPTimeoutError: if not all came.
    """
    request, values = _start_to_gather(comm, value)
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            _unfinished.append((request, values))
            raise EPTimeoutError(
                f"rank {comm.Get_rank()} waited {timeout_s:g} s in {phase}, and not all {comm.Get_size()} ranks came: {hint}. "
                f"Raise timeout_s (DEEPEP_RT_TIMEOUT_S) if they are only slow",
                rank=comm.Get_rank(),
                peer=-1,
                phase=phase,
            )
        time.sleep(1e-4)
    return values.tolist()


_unfinished: list[Any] = []  # MPI may still write to these arrays


def _start_to_gather(comm: Intracomm, value: int) -> tuple[Any, Any]:
    import numpy as np

    values = np.zeros(comm.Get_size(), np.int64)
    return comm.Iallgather(np.array([value], np.int64), values), values


class AllOrNone:
    """What all ranks do together, or none: the parts of making a Buffer, and freeing symmetric memory.

    A rank that cannot - an error threw it out, or it leaves others out - says so and goes its way, and is not asked again. The others wait
    until all have come or said so.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm.Dup()  # of its own: who goes early says so in the middle of anything

    def holds(self, sound: bool, timeout_s: float | None = None) -> bool:
        """Whether all ranks are here and sound, as this one is or is not.

        Args:
            sound: Whether this one is.
            timeout_s: After how long a silent rank is taken for lost, where that is so; otherwise it is waited for.
        """
        if not sound:
            _unfinished.append(_start_to_gather(self._comm, 1))
            return False
        # A rank that comes too late finds everybody's word all the same; nobody answers it the second time.
        rounds = 1 if timeout_s is None else 2
        try:
            return not any(any(meet(self._comm, 0, timeout_s or math.inf, "", "")) for _ in range(rounds))
        except EPTimeoutError:
            return False

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of making something, in which ranks may fail one by one. Who does raises its error, and the others are not left waiting.

        Raises:
            EPUnavailableError: where another rank failed.
        """
        made = False
        try:
            yield
            made = True
        finally:
            all_made = self.holds(made)
        if not all_made:
            raise EPUnavailableError("another rank could not make its part of this Buffer; what it raised tells why")

    def free(self) -> None:
        self._comm.Free()


def agree(comm: Intracomm, config: Config, backend: str, on_exhausted: str, network: NetworkOptions | None = None) -> str:
    """Compare the settings of all ranks, and choose one backend for all of them.

    Returns:
        "cuda" or "host".

    Raises:
        EPConfigError: on every rank, if a setting differs; names it, and who has which value.
        EPUnavailableError: on every rank, if "cuda" was asked for and a rank has no GPU, or a CUDA driver does not start.
        EPTimeoutError: if a rank does not come at all.
    """
    meet(comm, 0, config.timeout_s, "the making of a Buffer", "all ranks of its communicator have to make it at the same time")
    mine = {**dataclasses.asdict(config), "backend": backend, "on_exhausted": on_exhausted}
    mine |= (network or NetworkOptions()).common()
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


def announce(comm: Intracomm, backend: str, transport: str, num_bytes: int) -> None:
    """Log, on rank 0, what a Buffer that was just made consists of; the kernels are those of this process so far."""
    if comm.Get_rank() == 0:
        _log.info(
            "Buffer of %d ranks: %s, %s, %.2f GB a rank, kernels: %d from the cache and %d compiled",
            comm.Get_size(), backend, transport, num_bytes / 1e9, jit.stats.hits, jit.stats.misses,
        )  # fmt: skip


_BROKEN = "the CUDA driver fails:"  # how the reason begins where there ought to be a GPU


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
        nothing = status.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")
        return f"{'the CUDA driver says' if nothing else _BROKEN} {status.name}"
    return None if count[0] else "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES?)"
