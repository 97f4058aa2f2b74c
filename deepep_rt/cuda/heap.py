"""Symmetric memory of one host without NVSHMEM: virtual memory of CUDA that the ranks share through file descriptors.

Each rank reserves one range of addresses with a slot for every rank. It maps its own physical memory and that of its peers there. Physical
memory lives until its last mapping is gone, so a rank frees its region alone: a peer that still writes there reaches memory that it
keeps alive itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from ..comm import descriptors
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus
from ..errors import EPError, EPOutOfMemoryError, EPUnavailableError
from .transport import MemoryRequest

_T = TypeVar("_T")


def check_available() -> None:
    """Raise EPUnavailableError if the current GPU's driver cannot share virtual memory."""
    from . import driver, virtual_memory  # programs on the host backend may lack CUDA's bindings

    if not virtual_memory.is_supported(driver.current_device()):
        raise EPUnavailableError(
            "the CUDA driver shares no virtual memory of this GPU; expected a driver with descriptors of memory. Set "
            "DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem."
        )
    virtual_memory.granularity(driver.current_device())  # ranks allocate together, and this may fail on one of them alone


def check_sharing(ranks_per_gpu: Sequence[int]) -> None:
    """Any number of ranks may share a GPU."""


def is_shared(comm: Communicator) -> bool:
    """No rank outside of `comm` takes part."""
    return False


class HeapMemory:
    """A region of such memory on each rank; see `transport.SymmetricMemory`. Ranks of other hosts have the address 0.

    Raises:
        EPOutOfMemoryError: on every rank, if a GPU has too little memory.
        EPUnavailableError: on every rank, if ranks cannot share memory, or have no direct path to each other.
        EPTimeoutError: if a rank does not come.
    """

    consensus: Consensus | None = None
    is_local = True
    way = "sockets"

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        from . import driver, virtual_memory  # programs on the host backend may lack CUDA's bindings

        self._device, self._num_bytes = driver.current_device(), request.num_bytes
        self._unit = virtual_memory.granularity(self._device)
        self._range, self._mappings = ExitStack(), ExitStack()
        self._addresses: list[int] = []
        try:
            here = self._attach(comm, request.timeout_s)
        except BaseException:
            self.free()
            raise
        address_of = dict(zip(here, self._addresses, strict=True))
        self.ptr = address_of[comm.Get_rank()]
        self.peers: Sequence[int] = [address_of.get(peer, 0) for peer in range(comm.Get_size())]
        self.network_ids: Sequence[int] = range(comm.Get_size())

    def _attach(self, comm: Communicator, timeout_s: float) -> list[int]:
        """Map fresh memory of all ranks of this host, at the addresses of before if there were some. Return these ranks. Collective."""
        here = comm.ranks_on_host()
        if len(here) == comm.Get_size():
            self._share(comm, timeout_s, here)
            return here
        group = comm.sub_comm(here)
        try:
            self._share(group, timeout_s, here)
        except BaseException:
            group.abandon()
            raise
        group.Free()
        return here

    def _share(self, group: Communicator, timeout_s: float, here: Sequence[int]) -> None:
        """Create, exchange and map the memory of the ranks of a group, which are the ranks `here` of the Buffer."""
        from . import virtual_memory

        unit = max(group.allgather(self._unit))
        size = -(-self._num_bytes // unit) * unit
        with ExitStack() as handles:
            own, mine = _agreed(group, functools.partial(_create, size, self._device, handles))
            theirs = _exchange(group, mine, timeout_s)
            handles.callback(descriptors.close_all, theirs)

            def attach() -> bool:
                if not self._addresses:
                    base = virtual_memory.reserve(size * len(theirs), unit)
                    self._range.callback(virtual_memory.free_range, base, size * len(theirs))
                    self._addresses = [base + peer * size for peer in range(len(theirs))]
                for peer, descriptor in enumerate(theirs):
                    memory = own
                    if descriptor >= 0:
                        memory = virtual_memory.import_from(descriptor)
                        handles.callback(virtual_memory.release, memory)
                    try:
                        virtual_memory.map_at(self._addresses[peer], size, memory, self._device)
                    except EPUnavailableError as error:
                        raise EPUnavailableError(
                            f"no direct path from the GPU of rank {here[group.Get_rank()]} to that of rank {here[peer]} ({error}); "
                            f"expected peer access (NVLink or PCIe) between all GPUs of a host"
                        ) from error
                    self._mappings.callback(virtual_memory.unmap, self._addresses[peer], size)
                return True

            _agreed(group, attach)

    def sleep(self) -> None:
        """Unmap the memory of all ranks. The addresses stay. No work of the GPU may use them until `wake`."""
        self._mappings.close()

    def wake(self, comm: Communicator, timeout_s: float) -> None:
        """Map fresh memory at the same addresses. Collective. After an error, which is that of all ranks, the memory sleeps."""
        try:
            self._attach(comm, timeout_s)
        except BaseException:
            self._mappings.close()
            raise

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return `is_ok`: a rank frees its region alone."""
        return is_ok

    def free(self) -> None:
        """Unmap the regions of all ranks, and give up the memory of this one. No work of the GPU may use them any more."""
        self._mappings.close()
        self._range.close()


allocate = HeapMemory


def _agreed(group: Communicator, step: Callable[[], _T]) -> _T:
    """Make a step. Raise on every rank if it fails on one: the same kind of error with the same text."""
    result, error = None, None
    try:
        result = step()
    except EPError as found:
        error = found
    told = group.allgather(None if error is None else (isinstance(error, EPOutOfMemoryError), str(error)))
    for is_memory, text in filter(None, told):
        raise (EPOutOfMemoryError if is_memory else EPUnavailableError)(text) from error
    assert result is not None
    return result


def _create(size: int, device: int, handles: ExitStack) -> tuple[int, int]:
    """Create this rank's physical memory. Return its handle and a descriptor of it."""
    from . import virtual_memory

    try:
        own = virtual_memory.create(size, device)
    except EPOutOfMemoryError as error:
        raise EPOutOfMemoryError(
            f"a GPU has no {size / 1e9:.2f} GB of memory for a Buffer ({error}). See Buffer.size_hint."
        ) from error
    handles.callback(virtual_memory.release, own)
    descriptor = virtual_memory.export(own)
    handles.callback(descriptors.close_all, [descriptor])
    return own, descriptor


def _exchange(group: Communicator, mine: int, timeout_s: float) -> list[int]:
    """Exchange descriptors in the first way that works between all ranks."""
    failed: list[str] = []
    for way in descriptors.WAYS:
        try:
            return descriptors.exchange(group, mine, way, timeout_s)
        except EPUnavailableError as error:
            failed.append(f"{way}: {error}")
    raise EPUnavailableError(f"no way to pass memory between the ranks of this host works. {'. '.join(failed)}.")
