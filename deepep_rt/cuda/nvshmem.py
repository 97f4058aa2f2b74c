"""NVSHMEM: the one runtime of a process, and symmetric memory in it. The first Buffer starts it, with a unique ID sent over its ranks."""

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
from .._install import pip_install_cuda
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus, timed_allgather
from ..errors import EPConfigError, EPOutOfMemoryError, EPPeerError, EPTimeoutError, EPUnavailableError
from .transport import MemoryRequest

_log = logging.getLogger("deepep_rt")


@dataclass(frozen=True)
class Runtime:
    """The NVSHMEM runtime of this process. The first Buffer starts it over its communicator, unless the program started it before."""

    comm: Communicator | None  # a duplicate of that communicator; None if the program started NVSHMEM
    my_pe: int
    num_pes: int
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the variables of its start


_runtime: Runtime | None = None
_lost_start = ""  # the error of an earlier start that did not end

_OTHER_MEMORY = " Inside one node, virtual memory of CUDA has no such limit: see DEEPEP_RT_SYMMETRIC_MEMORY in docs/running.md."
_STARTING = "the start of NVSHMEM"
_START_S, _ROLL_CALL_S, _REMINDER_S = 300.0, 10.0, 30.0


def check_available() -> None:
    """Raise EPUnavailableError if NVSHMEM is not installed, or if an earlier start did not end."""
    load()


def check_sharing(ranks_per_gpu: Sequence[int]) -> None:
    """Raise EPConfigError if only some ranks share their GPU, unless NVSHMEM runs already.

    An NVSHMEM rank decides from its own GPU whether GPUs are shared, and creates other teams then. Ranks that decide differently wait
    forever for each other.
    """
    if min(ranks_per_gpu) == 1 < max(ranks_per_gpu) and _runtime is None:
        num_gpus = len(ranks_per_gpu)
        raise EPConfigError(
            f"{sum(ranks_per_gpu)} ranks on {num_gpus} GPUs: some share one and others do not; expected the same number of ranks on each, "
            f"for NVSHMEM. Start a multiple of {num_gpus} ranks, or show them fewer GPUs with CUDA_VISIBLE_DEVICES.{_OTHER_MEMORY}"
        )


def is_shared(comm: Communicator) -> bool:
    """Return whether ranks outside of `comm` have to allocate at the same time: whether NVSHMEM runs over more ranks."""
    return _runtime is not None and comm.Get_size() < _runtime.num_pes


def load() -> Any:
    """Load NVSHMEM's Python bindings and its host library.

    Raise EPUnavailableError if either is missing, or if an earlier start did not end.
    """
    if _lost_start:
        raise EPUnavailableError(_lost_start)
    try:
        import nvshmem.bindings as nvshmem
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("nvshmem_host")  # the bindings find it only if it is loaded or on the system's path
    except (ImportError, RuntimeError) as error:
        raise EPUnavailableError(f"NVSHMEM or nvshmem4py is not installed ({error}). Run {pip_install_cuda()}.") from error
    return nvshmem


def init_device_library(library: int) -> None:
    """Give a loaded library (CUlibrary) the address of NVSHMEM's state. Its kernels use NVSHMEM's device functions."""
    load().culibrary_init(library)


def runtime(comm: Communicator, environment: Mapping[str, str] | None = None) -> Runtime:
    """Return the running NVSHMEM, or start it: rank 0 makes the unique ID and broadcasts it. Collective over `comm`.

    `environment` has variables for its start, unless the user has set them. If it runs already with others, a warning names them.

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
        _runtime = dataclasses.replace(_runtime, comm=comm.dup_for_process())  # the store of the earlier communicator may be gone
    late = [f"{name}={value}" for name, value in (environment or {}).items() if _runtime.environment.get(name) != value]
    if late and comm.Get_rank() == 0:
        whose = "the program started it" if _runtime.comm is None else "an earlier Buffer started it"
        _log.warning("NVSHMEM runs already (%s); this Buffer cannot apply: %s", whose, ", ".join(late))
    members = comm.allgather((_runtime.my_pe, _runtime.num_pes))
    pes = {pe for pe, _ in members}
    if len(pes) != len(members) or len({total for _, total in members}) != 1:
        raise EPConfigError(
            f"the ranks of this Buffer belong to different NVSHMEM runtimes; expected one runtime. Make the first Buffer over all ranks, "
            f"and all Buffers with one transport.{_OTHER_MEMORY}"
        )
    if _runtime.comm is None and _runtime.num_pes != len(members):
        raise EPConfigError(
            f"the program started NVSHMEM over {_runtime.num_pes} processes; expected a Buffer over all of them, but this one has "
            f"{len(members)} ranks. Make it over all processes.{_OTHER_MEMORY}"
        )
    return _runtime


def _without_proxy() -> dict[str, str]:
    """Return the variable that stops NVSHMEM from starting its network thread when there is no network.

    The thread would poll without a purpose. It may also crash at the end of the process: if CUDA's runtime is loaded after the driver
    started, as by CuPy, CUDA ends before the thread does, and the thread then causes a segmentation fault.
    """
    return {"NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"} if _env.nvshmem_transport() == "none" else {}


def _start(comm: Communicator, nvshmem: Any, environment: Mapping[str, str]) -> Runtime:
    rank, size, num_here = comm.Get_rank(), comm.Get_size(), len(comm.ranks_on_host())
    # On one host NVSHMEM searches for no network. The Buffer's options override this default, and the user's variables override both.
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
            raise EPUnavailableError(f"{error}{_hidden_gpus_hint(rank, _num_gpus(), num_here)}") from error.__cause__
    return Runtime(comm.dup_for_process(), nvshmem.my_pe(), nvshmem.n_pes(), dict(environment))


def _in_time(comm: Communicator, start: Callable[[], None]) -> None:
    """Run NVSHMEM's start in a thread. The start waits for all ranks without a limit, so the thread may never end.

    Raise EPTimeoutError, which names the missing ranks, if the start does not end in time, and EPUnavailableError if it fails.
    """
    from . import driver  # programs on the host backend may lack CUDA's bindings

    global _lost_start
    context, failed, begin = driver.CurrentContext(), [], time.monotonic()

    def run() -> None:
        try:
            with context:
                start()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="NVSHMEM's start")
    _lost_start = "NVSHMEM's start did not end in time in an earlier attempt; expected a new process. Start the program again."
    thread.start()
    while thread.is_alive() and (waited_s := time.monotonic() - begin) < _START_S:
        thread.join(min(_REMINDER_S, _START_S - waited_s))
        if thread.is_alive():
            warnings.warn(f"rank {comm.Get_rank()} has waited {time.monotonic() - begin:.0f} s for NVSHMEM's start", stacklevel=2)
    if thread.is_alive():
        hint = "all ranks to start it. Set NVSHMEM_DEBUG=INFO for more messages"
        present = np.zeros((comm.Get_size(), 1))
        comm.finish(comm.Iallgather(np.ones(1), present), _STARTING, hint, _ROLL_CALL_S, waited_s=_START_S)
        raise EPTimeoutError(
            f"rank {comm.Get_rank()}: {_STARTING} did not end within {_START_S:g} s, and all ranks wait in it; expected a network between "
            f"them. See its messages (NVSHMEM_DEBUG=INFO), and NetworkOptions.bootstrap_interface.",
            rank=comm.Get_rank(),
            peer=-1,
            phase=_STARTING,
        )
    _lost_start = ""
    if failed:
        raise EPUnavailableError(f"NVSHMEM did not start ({failed[0]}). See its messages above.") from failed[0]


def _num_gpus() -> int:
    from . import driver  # programs on the host backend may lack CUDA's bindings

    return driver.num_devices()


def _hidden_gpus_hint(rank: int, num_gpus: int, num_here: int) -> str:
    """Return a hint for an error if a rank sees fewer GPUs than its host has ranks; otherwise an empty text."""
    if num_gpus >= num_here or _env.share_gpus():
        return ""
    return (
        f" Rank {rank} sees {num_gpus} GPUs, and its host holds {num_here} ranks; expected at least {num_here}. Give all ranks of a host "
        f"the same CUDA_VISIBLE_DEVICES; see neighbours-hidden in docs/when-it-does-not-work.md.{_OTHER_MEMORY}"
    )


class NvshmemMemory:
    """A region of NVSHMEM's symmetric memory; see `transport.SymmetricMemory`.

    NVSHMEM allocates over its whole runtime. If the Buffer has fewer ranks, all other ranks of the runtime have to allocate the same size
    at the same time, for Buffers of their own.

    Raises:
        EPUnavailableError: if NVSHMEM is missing, or ranks of a group have no direct path to each other.
        EPOutOfMemoryError: if a rank has too little memory.
        EPConfigError: if ranks of the runtime ask for different sizes.
        EPTimeoutError: if a rank of the runtime does not come.
    """

    is_local = False
    heap = None
    way = "nvshmem"

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        nvshmem, num_bytes = load(), request.num_bytes
        self._nvshmem, self._runtime = nvshmem, runtime(comm, request.network.environment() if request.network else None)
        self.consensus: Consensus | None = None  # over the runtime, if it has more ranks than the Buffer
        if self._runtime.comm is not None:
            _check_same_size(self._runtime.comm, comm.heard, num_bytes, request.timeout_s)
            if comm.Get_size() < self._runtime.num_pes:
                self.consensus = Consensus(self._runtime.comm)
        self.ptr = nvshmem.malloc(num_bytes)
        if not all(comm.allgather(bool(self.ptr))):
            raise EPOutOfMemoryError(f"NVSHMEM could not allocate {num_bytes / 1e9:.2f} GB on every rank. See Buffer.size_hint.")
        self.network_base = self.ptr
        pes = comm.allgather(self._runtime.my_pe)
        self.peers = [self.ptr if pe == self._runtime.my_pe else nvshmem.ptr(self.ptr, pe) for pe in pes]
        self.network_peers, self.network_ids = self.peers, pes
        rank, node = comm.Get_rank(), request.ranks_per_node or comm.Get_size()
        unreachable = [peer for peer, address in enumerate(self.peers) if not address and peer // node == rank // node]
        failed = {at: peers for at, peers in enumerate(comm.allgather(unreachable)) if peers}
        if failed:
            at, peers = next(iter(failed.items()))
            where = "between all GPUs of a Buffer" if node == comm.Get_size() else f"in each group of ranks_per_node={node}"
            hidden = comm.allgather(_hidden_gpus_hint(rank, _num_gpus(), len(comm.ranks_on_host())))[at]
            raise EPUnavailableError(
                f"no direct path from the GPU of rank {at} to those of ranks {peers}; expected peer access (NVLink or PCIe) {where}."
                f"{hidden}"
            )

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether all ranks of the runtime free the region now. NVSHMEM would wait for all of them without a limit."""
        return is_ok if self.consensus is None else self.consensus.all_ok(is_ok, "destroy the Buffers of their groups", timeout_s)

    def free(self) -> None:
        """Free the region. Collective over the runtime."""
        self._nvshmem.free(self.ptr)
        if self.consensus is not None:
            self.consensus.free()


def _check_same_size(
    comm: Communicator, heard: Callable[[], EPPeerError | None] | None, num_bytes: int, timeout_s: float
) -> None:
    """Check the sizes of all ranks, with a limit. NVSHMEM would wait without a limit for a missing rank.

    `comm` is that of the runtime. `heard` is what the ranks of the Buffer hear of each other, only for this step: it refers to the Buffer.
    """
    hint = "ranks outside of this Buffer's communicator to make one of the same size at the same time"
    comm.heard = heard
    try:
        sizes = {size for (size,) in timed_allgather(comm, (num_bytes,), timeout_s, "the allocation of symmetric memory", hint)}
    finally:
        comm.heard = None
    if len(sizes) != 1:
        raise EPConfigError(
            f"symmetric memory must have one size on all ranks of the NVSHMEM runtime, got {sorted(sizes)} bytes. Make the Buffers of all "
            f"groups with the same sizes and numbers of ranks.{_OTHER_MEMORY}"
        )


allocate = NvshmemMemory
