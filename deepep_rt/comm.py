"""Agreement between ranks, through MPI: on settings and a backend, on who is still there, and on what all do together or not at all."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _env, jit
from .config import Config
from .errors import EPConfigError, EPTimeoutError, EPUnavailableError
from .network import NetworkOptions

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger("deepep_rt")


_ARRIVING, _ARRIVED = 1, 2


def meet(comm: Intracomm, value: int, timeout_s: float, phase: str, hint: str) -> list[int]:
    """Gather a number from all ranks, but do not wait longer than `timeout_s` for one that does not come.

    A rank that comes too late finds the words of those who have given up, and must not go on alone. So all say again that they have heard
    all, until all say so at once.

    Raises:
        EPTimeoutError: if not all came.
    """
    said, values = _ARRIVING, np.zeros((comm.Get_size(), 2), np.int64)
    while True:
        request = comm.Iallgather(np.array([said, value], np.int64), values)
        _await(comm, [request], values, timeout_s, phase, hint)
        if (values[:, 0] == _ARRIVED).all():
            return values[:, 1].tolist()
        said = _ARRIVED


def _await(comm: Intracomm, requests: Sequence[Any], held: Any, timeout_s: float, phase: str, hint: str) -> None:
    """Wait for requests, which use what is `held`, or raise EPTimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not all(request.Test() for request in requests):
        if time.monotonic() > deadline:
            _unfinished.append((requests, held))
            raise EPTimeoutError(
                f"rank {comm.Get_rank()} waited {timeout_s:g} s in {phase}, and not all {comm.Get_size()} ranks came: {hint}. "
                f"Raise timeout_s (DEEPEP_RT_TIMEOUT_S) if they are only slow",
                rank=comm.Get_rank(),
                peer=-1,
                phase=phase,
            )
        time.sleep(1e-4)


_unfinished: list[Any] = []  # what MPI may still write to


def _own(comm: Intracomm, timeout_s: float, phase: str, hint: str) -> Intracomm:
    """A communicator of ours over the same ranks, made once and kept with theirs.

    Whoever gives up leaves half of a collective behind. On the caller's communicator, that would be taken for one of the caller's. (What is
    left there is half of an `Idup`, which only other non-blocking collectives could meet.)
    """
    made: Any = comm.Get_attr(_key_of_own())
    if made is None:
        made = comm.Idup()
        comm.Set_attr(_key_of_own(), made)
    own, request = made
    _await(comm, [request], made, timeout_s, phase, hint)
    return own


@functools.cache
def _key_of_own() -> int:
    from mpi4py import MPI

    def free(comm: Any, key: int, made: Any) -> None:
        own, request = made
        if request.Test():
            own.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)


class AllOrNone:
    """What all ranks do together, or none: the parts of making a Buffer, and freeing symmetric memory.

    A rank that cannot - an error threw it out, or it leaves others out - says so and goes its way, and is not asked again. The others wait
    until all have come or said so.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm.Dup()  # of its own: who goes early says so in the middle of anything
        self._round = 0

    def holds(self, sound: bool, timeout_s: float | None = None) -> bool:
        """Whether all ranks are here and sound, as this one is or is not.

        Args:
            sound: Whether this one is.
            timeout_s: After how long a silent rank is taken for lost, where that is so; otherwise it is waited for.
        """
        # A rank that comes too late finds everybody's word all the same; nobody answers it the second time.
        times = 1 if timeout_s is None else 2
        return all(self._hear_all(sound, timeout_s or math.inf) for _ in range(times))

    def _hear_all(self, sound: bool, timeout_s: float) -> bool:
        """Tell every rank, and hear of all whether they are sound too. Who is not hears nobody.

        Small messages from rank to rank: a collective would need whoever has gone to pass on what the others say.
        """
        self._round += 1
        peers = [peer for peer in range(self._comm.Get_size()) if peer != self._comm.Get_rank()]
        word, words = np.array([sound]), np.zeros(len(peers), bool)
        requests = [self._comm.Isend(word, peer, self._round) for peer in peers]
        if not sound:
            _unfinished.append((requests, word))
            return False
        requests += [self._comm.Irecv(words[i : i + 1], peer, self._round) for i, peer in enumerate(peers)]
        try:
            _await(self._comm, requests, (word, words), timeout_s, "", "")
        except EPTimeoutError:
            return False
        return bool(words.all())

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


LAST_WORDS_TAG = 3
_LISTENING_PERIOD_S = 0.02
_GRACE_S = 0.2  # for what a rank sent before it left


class LastWords:
    """What a rank that an error throws out of its Buffer tells the others: they need not wait for it until the time is up.

    Args:
        comm: The ranks. Nobody else sends messages with `LAST_WORDS_TAG` over it.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._heard: dict[int, tuple[float, str]] = {}  # by rank: when, and what
        self._listen_at = 0.0

    def say(self, error: BaseException) -> None:
        """Tell all others why this rank leaves; nobody has to listen."""
        text = f"{type(error).__name__}: {error}".encode()[:500]
        for peer in range(self._comm.Get_size()):
            if peer != self._comm.Get_rank():
                _unfinished.append((self._comm.Isend(text, peer, LAST_WORDS_TAG), text))

    def gone(self) -> list[int]:
        """The ranks from which nothing comes any more. To be asked often by who waits."""
        if (now := time.monotonic()) >= self._listen_at:
            self._listen_at = now + _LISTENING_PERIOD_S
            from mpi4py import MPI

            status = MPI.Status()
            while self._comm.Iprobe(MPI.ANY_SOURCE, LAST_WORDS_TAG, status):
                text = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv(text, status.Get_source(), LAST_WORDS_TAG)
                self._heard[status.Get_source()] = now, text.decode(errors="replace")
        return [rank for rank, (when, _) in self._heard.items() if now > when + _GRACE_S]

    def error(self, peer: int, phase: str, call_idx: int = 0) -> EPTimeoutError:
        """For who waits for a rank that has left."""
        rank = self._comm.Get_rank()
        return EPTimeoutError(
            f"rank {rank} waits for rank {peer} in vain ({phase}): an error threw it out of its Buffer. There: {self._heard[peer][1]}",
            rank=rank,
            peer=peer,
            phase=phase,
            call_idx=call_idx,
        )


def check_communicator(comm: Any) -> None:
    """Raise EPConfigError unless it is a communicator that this process belongs to; warn of a launcher that is not MPI's."""
    if not hasattr(comm, "Get_size"):
        raise EPConfigError(
            f"comm is a {type(comm).__name__}; expected an mpi4py communicator. For a torch.distributed process group there is "
            f"deepep_rt.torch.communicator(group)"
        )
    if not comm:
        raise EPConfigError("comm is MPI.COMM_NULL: this process is none of its ranks, and takes no part in the Buffer")
    if comm.Get_size() == 1 and _env.world_size() > 1:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == 1:
            warnings.warn(
                f"WORLD_SIZE is {_env.world_size()}, but MPI counts one process: torchrun, or whatever started the others, is no MPI "
                f"launcher. This Buffer has one rank; start the program with mpirun",
                stacklevel=3,
            )


def agree(comm: Intracomm, config: Config, backend: str, on_exhausted: str, network: NetworkOptions | None = None) -> str:
    """Compare the settings of all ranks, and choose one backend for all of them.

    Returns:
        "cuda" or "host".

    Raises:
        EPConfigError: on every rank, if a setting differs; names it, and who has which value.
        EPUnavailableError: on every rank, if "cuda" was asked for and a rank has no GPU, or a CUDA driver does not start.
        EPTimeoutError: if a rank does not come at all.
    """
    when = config.timeout_s, "the making of a Buffer", "all ranks of its communicator have to make it at the same time"
    comm = _own(comm, *when)
    meet(comm, 0, *when)
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
