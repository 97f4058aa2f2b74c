"""MPI and NVSHMEM: agreement between the ranks, the one NVSHMEM runtime of a process, symmetric memory and peer addresses."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _env, jit
from .config import MAX_RANKS_PER_NODE, Config
from .errors import EPConfigError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
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
    """What all ranks do together, or none: ending the making of a Buffer, and freeing symmetric memory.

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


def placed(comm: Intracomm, config: Config) -> Config:
    """Settle which ranks reach each other over NVLink: those of a host, or the smaller groups that were asked for. Collective.

    Raises:
        EPConfigError: on every rank, if ranks are not where they have to be.
    """
    host = ranks_per_host(comm)
    if config.ranks_per_node is None and host < config.num_ranks:
        config = dataclasses.replace(config, ranks_per_node=host)
    if host % config.node_size:
        raise EPConfigError(f"ranks_per_node is {config.node_size}, but a host holds {host} ranks; expected a divisor of that")
    if config.node_size > MAX_RANKS_PER_NODE:
        raise EPConfigError(
            f"{config.node_size} ranks are to reach each other over NVLink; expected 1 to {MAX_RANKS_PER_NODE}. Set ranks_per_node"
        )
    return config


def ranks_per_host(comm: Intracomm) -> int:
    """The number of ranks on each host. Collective.

    Raises:
        EPConfigError: on every rank, if the hosts hold different numbers of ranks, or ranks that do not follow each other.
    """
    hosts = sorted(set(comm.allgather(tuple(_ranks_here(comm)))))
    size = len(hosts[0])
    if any(len(ranks) != size or ranks[-1] - ranks[0] != size - 1 for ranks in hosts):
        shown = "; ".join(", ".join(map(str, ranks)) for ranks in hosts[:4]) + ("; ..." if len(hosts) > 4 else "")
        raise EPConfigError(
            f"every host has to hold the same number of ranks, one after the other; {len(hosts)} hosts hold the ranks {shown}. "
            f"Place ranks host by host: with 8 a host, mpirun --map-by ppr:8:node (Open MPI), mpirun -ppn 8 (MPICH) or "
            f"srun --ntasks-per-node=8 --distribution=block (Slurm)"
        )
    return size


def _ranks_here(comm: Intracomm) -> list[int]:
    """The ranks on this host, ascending. Collective."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = host.allgather(comm.Get_rank())
    host.Free()
    return sorted(ranks)


@dataclass(frozen=True)
class Runtime:
    """The NVSHMEM of this process. There is one; the first Buffer starts it over its communicator, unless somebody else did before."""

    comm: Any  # a duplicate of that communicator; None when somebody else started NVSHMEM
    my_pe: int
    num_pes: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what it was asked to start with


_runtime: Runtime | None = None


def runtime(comm: Intracomm, environment: Mapping[str, str] | None = None) -> Runtime:
    """Find NVSHMEM running, or start it: rank 0 makes the unique ID and MPI broadcasts it. Collective over `comm`.

    Args:
        comm: The ranks.
        environment: Variables to start NVSHMEM with, unless the user has set them. Where it runs already, those that it was not started
            with are named in a warning.

    Raises:
        EPUnavailableError: if nvshmem4py is missing.
        EPConfigError: if the running NVSHMEM does not hold the ranks of `comm`.
    """
    global _runtime
    try:
        import nvshmem.bindings as nvshmem
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")  # the bindings only find a library that is loaded, or on the system's path
    except (ImportError, RuntimeError) as error:
        raise EPUnavailableError(
            f"NVSHMEM or nvshmem4py is not installed ({error}); pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]'"
        ) from error
    if _runtime is None:
        if int(nvshmem.init_status()) >= int(nvshmem.Init_status.STATUS_IS_INITIALIZED):
            _runtime = Runtime(None, nvshmem.my_pe(), nvshmem.n_pes())
        else:
            _runtime = _start(comm, nvshmem, environment or {})
    late = [f"{name}={value}" for name, value in (environment or {}).items() if _runtime.environment.get(name) != value]
    if late and comm.Get_rank() == 0:
        whose = "somebody else started it" if _runtime.comm is None else "an earlier Buffer started it"
        _log.warning("NVSHMEM runs already (%s); without effect for this Buffer: %s", whose, ", ".join(late))
    members = comm.allgather((_runtime.my_pe, _runtime.num_pes))
    pes = {pe for pe, _ in members}
    if len(pes) != len(members) or len({total for _, total in members}) != 1:
        raise EPConfigError(
            "the ranks of this Buffer belong to different NVSHMEM runtimes; make the first Buffer over all of them"
        )
    if _runtime.comm is None and _runtime.num_pes != len(members):
        raise EPConfigError(
            f"NVSHMEM was started by somebody else, over {_runtime.num_pes} processes; it can only serve a Buffer over all of them, "
            f"and this one has {len(members)} ranks"
        )
    return _runtime


def _start(comm: Intracomm, nvshmem: Any, environment: Mapping[str, str]) -> Runtime:
    import numpy as np

    rank, size = comm.Get_rank(), comm.Get_size()
    # One host: no network transport is looked for, whatever the host has. What was asked for wins, and the user's own setting over that.
    default = {"NVSHMEM_REMOTE_TRANSPORT": "none"} if len(_ranks_here(comm)) == size else {}
    with _env.overridden({**default, **environment}):
        uid = nvshmem.uniqueid()
        if rank == 0:
            nvshmem.get_uniqueid(uid.ptr)
        comm.Bcast(uid._data.view(np.int8), root=0)
        attributes = nvshmem.InitAttr()
        nvshmem.set_attr_uniqueid_args(rank, size, uid.ptr, attributes.ptr)
        nvshmem.hostlib_init_attr(nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
    return Runtime(comm.Dup(), nvshmem.my_pe(), nvshmem.n_pes(), dict(environment))


class SymmetricMemory:
    """A piece of symmetric memory and its address in each rank of a Buffer, as seen from this rank's GPU.

    NVSHMEM allocates over its whole runtime. A Buffer over fewer ranks therefore needs all ranks of the runtime to make one of the same
    size at the same time (each in its own group, say); where they do not, they are told so after `timeout_s`.

    Args:
        comm: The ranks of the Buffer.
        num_bytes: Size on each rank.
        timeout_s: How long ranks outside of `comm` may be late.
        ranks_per_node: Consecutive ranks that must reach each other directly; default: all of `comm`. In `peers`, the address in a rank of
            another group is 0 where there is no direct path.
        network: What NVSHMEM is started with, if it is started here.

    Raises:
        EPUnavailableError: if NVSHMEM is missing, or ranks of a group have no direct path to each other.
        EPOutOfMemoryError: if a rank has too little memory.
        EPConfigError: if ranks of the runtime ask for different sizes.
        EPTimeoutError: if a rank of the runtime does not come.
    """

    def __init__(
        self,
        comm: Intracomm,
        num_bytes: int,
        timeout_s: float,
        ranks_per_node: int | None = None,
        network: NetworkOptions | None = None,
    ) -> None:
        import nvshmem.bindings as nvshmem

        self._nvshmem, self._runtime = nvshmem, runtime(comm, network.environment() if network else None)
        if self._runtime.comm is not None:
            self._check_same_size(num_bytes, timeout_s)
        self.ptr = nvshmem.malloc(num_bytes)
        if not all(comm.allgather(bool(self.ptr))):
            raise EPOutOfMemoryError(f"NVSHMEM could not allocate {num_bytes / 1e9:.2f} GB on every rank; see Buffer.size_hint")
        pes = comm.allgather(self._runtime.my_pe)
        self.peers = [self.ptr if pe == self._runtime.my_pe else nvshmem.ptr(self.ptr, pe) for pe in pes]
        self.pes: Sequence[int] = pes
        rank, node = comm.Get_rank(), ranks_per_node or comm.Get_size()
        unreachable = [peer for peer, address in enumerate(self.peers) if not address and peer // node == rank // node]
        failed = {at: peers for at, peers in enumerate(comm.allgather(unreachable)) if peers}
        if failed:
            at, peers = next(iter(failed.items()))
            where = "between all GPUs of a Buffer" if node == comm.Get_size() else f"in each group of ranks_per_node={node}"
            raise EPUnavailableError(
                f"no direct path from the GPU of rank {at} to those of ranks {peers}; peer access (NVLink or PCIe) is needed {where}"
            )

    def free(self) -> None:
        """Collective, like the allocation."""
        self._nvshmem.free(self.ptr)

    def _check_same_size(self, num_bytes: int, timeout_s: float) -> None:
        """NVSHMEM would wait without a limit for ranks that do not come."""
        hint = "ranks outside of this Buffer's communicator have to make one of the same size at the same time"
        sizes = set(meet(self._runtime.comm, num_bytes, timeout_s, "the allocation of symmetric memory", hint))
        if len(sizes) != 1:
            raise EPConfigError(f"symmetric memory must have one size on all ranks of the NVSHMEM runtime, got {sorted(sizes)}")
