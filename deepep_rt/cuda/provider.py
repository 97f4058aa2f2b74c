"""The choice of what provides the symmetric memory of a Buffer: CUDA's virtual memory, NVSHMEM, or the driver's memory of each rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from ..comm.communicator import Communicator
from ..config import Config
from ..errors import EPConfigError, EPError, EPOutOfMemoryError, EPUnavailableError
from . import nvshmem
from .relay_memory import RelayAllocator
from .transport import MemoryRequest, SymmetricAllocator, SymmetricMemory

_WAYS = {
    "nvshmem": "NVSHMEM",
    "driver": "CUDA driver, not shared",
    "sockets": "CUDA virtual memory, shared by descriptors over sockets",
    "files": "CUDA virtual memory, shared by descriptors over socket files",
    "pidfd": "CUDA virtual memory, shared by descriptors that ranks copy from each other's processes",
    "fabric": "CUDA virtual memory, shared by handles of a fabric",
    "ipc": "CUDA driver, shared by cudaIpc",
}
_log = logging.getLogger("deepep_rt")
_warned: set[str] = set()


def allocator_of(config: Config, setting: str) -> SymmetricAllocator:
    """Return what provides the symmetric memory of a Buffer. `setting` is `_env.symmetric_memory()`.

    What crosses a network of NVSHMEM has to be in NVSHMEM's memory.
    """
    if config.has_slots or config.has_wire:  # the memory of NVSHMEM belongs to all processes that started it
        from . import heap, wire

        if setting == "nvshmem":
            what = "a Buffer with slots (max_ranks)" if config.has_slots else "transport='wire'"
            raise EPConfigError(f"DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem; expected CUDA's virtual memory for {what}. Unset it.")
        return heap if config.has_slots else wire
    with_nvshmem: SymmetricAllocator = RelayAllocator(config.node_size) if config.has_relay else nvshmem
    if setting == "nvshmem":
        return with_nvshmem
    from . import heap, networked_heap  # they need sockets, whose module takes milliseconds to load

    with_heap: SymmetricAllocator = networked_heap if config.has_network and not config.has_relay else heap
    name = "the driver of each GPU" if config.has_relay and config.node_size == 1 else "NVSHMEM"
    return AutoAllocator(with_heap, with_nvshmem, name) if setting == "auto" else with_heap


def describe_ways(ways: Iterable[str]) -> str:
    """Describe who provides symmetric memory and how ranks share it, from each rank's `SymmetricMemory.way`."""
    return "; ".join(dict.fromkeys(_WAYS[way] for way in ways))


class AutoAllocator:
    """Allocate virtual memory of CUDA, or else of NVSHMEM; see `transport.SymmetricAllocator`. The first allocation decides for all ranks.

    Args:
        first: Provides virtual memory.
        fallback: Provides other memory, mostly of NVSHMEM. It is neither loaded nor started before `first` has failed.
        name: What `fallback` is, for messages.
    """

    def __init__(self, first: SymmetricAllocator, fallback: SymmetricAllocator, name: str = "NVSHMEM") -> None:
        self._first, self._fallback, self._name = first, fallback, name
        self._chosen: SymmetricAllocator | None = None
        self._ranks_per_gpu: Sequence[int] = (1,)

    def check_available(self) -> None:
        """Raise EPUnavailableError if this process lacks what `first` needs. `allocate` tries the rest, on all ranks together."""
        self._first.check_available()

    def check_sharing(self, ranks_per_gpu: Sequence[int]) -> None:
        """Raise EPConfigError if so many ranks cannot share a GPU. Keep the numbers for NVSHMEM."""
        self._first.check_sharing(ranks_per_gpu)
        self._ranks_per_gpu = ranks_per_gpu

    def is_shared(self, comm: Communicator) -> bool:
        """Return whether ranks outside of `comm` may have to allocate at the same time. Collective."""
        return (self._chosen or self._fallback).is_shared(comm)

    def allocate(self, comm: Communicator, request: MemoryRequest) -> SymmetricMemory:
        """Allocate a region. Collective.

        Raises:
            EPOutOfMemoryError: on every rank, if a GPU has too little memory.
            EPUnavailableError: if neither kind of memory works. The error has the reasons of both.
            EPTimeoutError: if a rank does not come.
        """
        if self._chosen is not None:
            return self._chosen.allocate(comm, request)
        memory, no_heap = self._try_first(comm, request)
        if memory is not None:
            self._chosen = self._first
            return memory
        self._fall_back(comm, no_heap)
        try:
            memory = self._fallback.allocate(comm, request)
        except EPUnavailableError as error:
            raise EPUnavailableError(
                f"{str(error).rstrip('.')}. {self._name} was to provide the memory, because {no_heap}"
            ) from error
        self._chosen = self._fallback
        return memory

    def _try_first(self, comm: Communicator, request: MemoryRequest) -> tuple[SymmetricMemory | None, str]:
        """Allocate virtual memory on all ranks, or return why that does not work. Collective. A host may fail alone."""
        memory: SymmetricMemory | None = None
        failure: EPError | None = None
        try:
            memory = self._first.allocate(comm, request)
        except (EPUnavailableError, EPOutOfMemoryError) as error:
            failure = error
        try:
            told = comm.allgather(None if failure is None else (isinstance(failure, EPOutOfMemoryError), str(failure)))
        except BaseException:
            if memory is not None:
                memory.free()
            raise
        failed = sorted(filter(None, told), key=lambda found: not found[0])  # NVSHMEM would find no more memory
        if not failed:
            return memory, ""
        if memory is not None and memory.all_free(True, request.timeout_s):
            memory.free()
        is_memory, text = failed[0]
        if is_memory:
            raise EPOutOfMemoryError(text) from failure
        return None, text

    def _fall_back(self, comm: Communicator, no_heap: str) -> None:
        """Check on all ranks that NVSHMEM can provide the memory. Collective."""
        no_nvshmem = _first_problem(
            comm, lambda: self._fallback.check_sharing(self._ranks_per_gpu), self._fallback.check_available
        )
        if no_nvshmem:
            raise EPUnavailableError(
                f"neither CUDA's virtual memory nor {self._name} can provide symmetric memory; expected one of them. Virtual memory: "
                f"{no_heap.rstrip('.')}. {self._name}: {no_nvshmem}"
            )
        if comm.Get_rank() == 0 and no_heap not in _warned:
            _warned.add(no_heap)
            _log.warning("%s provides symmetric memory, and not CUDA's virtual memory, because %s", self._name, no_heap)


def _first_problem(comm: Communicator, *checks: Callable[[], None]) -> str:
    """Return the first error of the checks on any rank, with its rank, or an empty text. Collective."""
    mine = ""
    try:
        for check in checks:
            check()
    except EPError as error:
        mine = str(error)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(mine)) if text), "")
