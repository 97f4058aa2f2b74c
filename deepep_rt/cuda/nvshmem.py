"""The one NVSHMEM runtime of a process, and symmetric memory: started with a unique ID that MPI carries, seen from this rank's GPU."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _env
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..comm.rendezvous import timed_allgather
from ..errors import EPConfigError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from ..network import NetworkOptions

_log = logging.getLogger("deepep_rt")


@dataclass(frozen=True)
class Runtime:
    """The NVSHMEM of this process. There is one; the first Buffer starts it over its communicator, unless somebody else did before."""

    comm: Communicator | None  # a duplicate of that communicator; None when somebody else started NVSHMEM
    my_pe: int
    num_pes: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what it was asked to start with


_runtime: Runtime | None = None
_lost_start = ""  # why NVSHMEM cannot be started any more

_STARTING = "the start of NVSHMEM"
_START_S, _ROLL_CALL_S, _REMINDER_S = 300.0, 10.0, 30.0


def has_started() -> bool:
    """Whether a Buffer of this process has started NVSHMEM, or found it running."""
    return _runtime is not None


def load() -> Any:
    """NVSHMEM's Python bindings, with its host library.

    Raises:
        EPUnavailableError: if either is missing, or NVSHMEM's start did not end in time before.
    """
    if _lost_start:
        raise EPUnavailableError(_lost_start)
    try:
        import nvshmem.bindings as nvshmem
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")  # the bindings only find a library that is loaded, or on the system's path
    except (ImportError, RuntimeError) as error:
        raise EPUnavailableError(
            f"NVSHMEM or nvshmem4py is not installed ({error}); pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]'"
        ) from error
    return nvshmem


def init_device_library(library: int) -> None:
    """Give a loaded library (CUlibrary) the address of NVSHMEM's state. Its kernels use NVSHMEM's device functions."""
    load().culibrary_init(library)


def runtime(comm: Communicator, environment: Mapping[str, str] | None = None) -> Runtime:
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
    nvshmem = load()
    if _runtime is None:
        if int(nvshmem.init_status()) >= int(nvshmem.Init_status.STATUS_IS_INITIALIZED):
            _runtime = Runtime(None, nvshmem.my_pe(), nvshmem.n_pes())
        else:
            _runtime = _start(comm, nvshmem, environment or {})
    elif _runtime.comm and not _runtime.comm.outlives_owner and comm.Get_size() == _runtime.num_pes:
        _runtime = dataclasses.replace(_runtime, comm=comm.dup_for_process())  # the store of the one before may be gone
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


def _without_proxy() -> dict[str, str]:
    """Keeps NVSHMEM from starting its thread for the network where there is none.

    The thread would spin for nothing. And where CUDA's runtime is loaded (with CuPy, say) after its driver has started, CUDA is taken down
    before the thread when the process ends: the thread, still polling, brings it down with a segmentation fault.
    """
    return {"NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"} if _env.nvshmem_transport() == "none" else {}


def _start(comm: Communicator, nvshmem: Any, environment: Mapping[str, str]) -> Runtime:
    rank, size, num_here = comm.Get_rank(), comm.Get_size(), len(comm.ranks_on_host())
    # One host: no network transport is looked for, whatever the host has. What was asked for wins, and the user's own setting over that.
    default = {"NVSHMEM_REMOTE_TRANSPORT": "none"} if num_here == size else {}
    with _env.overridden({**default, **environment}), _env.overridden(_without_proxy()):
        uid = nvshmem.uniqueid()
        if rank == 0:
            nvshmem.get_uniqueid(uid.ptr)
        comm.Bcast(uid._data.view(np.int8), root=0)
        attributes = nvshmem.InitAttr()
        nvshmem.set_attr_uniqueid_args(rank, size, uid.ptr, attributes.ptr)
        try:
            _in_time(comm, lambda: nvshmem.hostlib_init_attr(nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr))
        except EPUnavailableError as error:
            raise EPUnavailableError(f"{error}{_about_hidden_gpus(rank, _num_gpus(), num_here)}") from error.__cause__
    return Runtime(comm.dup_for_process(), nvshmem.my_pe(), nvshmem.n_pes(), dict(environment))


def _in_time(comm: Communicator, start: Callable[[], None]) -> None:
    """Run NVSHMEM's start, which waits for all ranks without a limit, in a thread that can be left behind.

    Raises:
        EPTimeoutError: if it does not end in time; it names the ranks that do not wait for it any more.
        EPUnavailableError: if it fails.
    """
    from . import driver  # ranks that work in host memory need no CUDA

    global _lost_start
    context, failed, begin = driver.CurrentContext(), [], time.monotonic()

    def run() -> None:
        try:
            with context:
                start()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="NVSHMEM's start")
    _lost_start = (
        "NVSHMEM's start did not end in time in an earlier attempt; expected a process without one. Start the program again"
    )
    thread.start()
    while thread.is_alive() and (waited_s := time.monotonic() - begin) < _START_S:
        thread.join(min(_REMINDER_S, _START_S - waited_s))
        if thread.is_alive():
            warnings.warn(
                f"rank {comm.Get_rank()} waits for NVSHMEM's start, {time.monotonic() - begin:.0f} s by now", stacklevel=2
            )
    if thread.is_alive():
        hint = "all ranks to start it. NVSHMEM_DEBUG=INFO lets it tell more"
        present = np.zeros((comm.Get_size(), 1))
        comm.finish(comm.Iallgather(np.ones(1), present), present, _STARTING, hint, _ROLL_CALL_S, waited_s=_START_S)
        raise EPTimeoutError(
            f"rank {comm.Get_rank()}: {_STARTING} did not end within {_START_S:g} s, and all ranks wait in it; expected a network between "
            f"them. See its messages (NVSHMEM_DEBUG=INFO), and NetworkOptions.bootstrap_interface",
            rank=comm.Get_rank(),
            peer=-1,
            phase=_STARTING,
        )
    _lost_start = ""
    if failed:
        raise EPUnavailableError(f"NVSHMEM did not start ({failed[0]}); expected it to. Its messages above say why") from failed[
            0
        ]


def _num_gpus() -> int:
    from . import driver  # who works in host memory needs no CUDA

    return driver.num_devices()


def _about_hidden_gpus(rank: int, num_gpus: int, num_here: int) -> str:
    """More of an error, on a rank that sees fewer GPUs than its host has ranks."""
    if num_gpus >= num_here or _env.share_gpus():
        return ""
    return (
        f". Rank {rank} sees {num_gpus} GPUs, and its host holds {num_here} ranks; expected at least {num_here}. Give all ranks of a host "
        f"the same CUDA_VISIBLE_DEVICES; neighbours-hidden in docs/when-it-does-not-work.md tells how"
    )


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
        comm: Communicator,
        num_bytes: int,
        timeout_s: float,
        ranks_per_node: int | None = None,
        network: NetworkOptions | None = None,
    ) -> None:
        nvshmem = self._nvshmem = load()
        self._runtime = runtime(comm, network.environment() if network else None)
        self.consensus: Consensus | None = None  # of the runtime, where they are more than those of the Buffer
        if self._runtime.comm is not None:
            _check_same_size(self._runtime.comm, num_bytes, timeout_s)
            if comm.Get_size() < self._runtime.num_pes:
                self.consensus = Consensus(self._runtime.comm)
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
            hidden = comm.allgather(_about_hidden_gpus(rank, _num_gpus(), len(comm.ranks_on_host())))[at]
            raise EPUnavailableError(
                f"no direct path from the GPU of rank {at} to those of ranks {peers}; peer access (NVLink or PCIe) is needed {where}"
                f"{hidden}"
            )

    @property
    def is_of_several_buffers(self) -> bool:
        """Whether ranks outside of `comm` have made one of theirs with it."""
        return self.consensus is not None

    def all_free(self, sound: bool, timeout_s: float) -> bool:
        """Whether all ranks free it now: those of the Buffer, as they agreed, and those outside. NVSHMEM would wait for all of them."""
        return sound if self.consensus is None else self.consensus.all_ok(sound, "destroy the Buffers of their groups", timeout_s)

    def free(self) -> None:
        """Collective, like the allocation."""
        self._nvshmem.free(self.ptr)
        if self.consensus is not None:
            self.consensus.free()


def _check_same_size(comm: Communicator, num_bytes: int, timeout_s: float) -> None:
    """NVSHMEM would wait without a limit for ranks that do not come."""
    hint = "ranks outside of this Buffer's communicator to make one of the same size at the same time"
    sizes = {size for (size,) in timed_allgather(comm, (num_bytes,), timeout_s, "the allocation of symmetric memory", hint)}
    if len(sizes) != 1:
        raise EPConfigError(
            f"symmetric memory must have one size on all ranks of the NVSHMEM runtime, got {sorted(sizes)} bytes; let all groups of ranks "
            f"make Buffers of as many ranks and the same sizes"
        )
