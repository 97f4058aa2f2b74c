"""Symmetric memory of one host without NVSHMEM: virtual memory of CUDA that the ranks share; see `sharing` for the ways.

Each rank reserves one range of addresses with a slot for every rank. It maps its own physical memory and that of its peers there. Physical
memory lives until its last mapping is gone, so a rank frees its region alone: a peer that still writes there reaches memory that it
keeps alive itself.

A slot has room for all memory of a GPU, and only a part of it is mapped. A rank that needs more maps a segment behind it, and asks its
peers to map it too. They do so in a thread, whatever their programs do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress

from .. import _env
from ..comm import descriptors
from ..comm.communicator import Communicator
from ..comm.consensus import Consensus, agreed
from ..comm.mailbox import Mailbox
from ..errors import EPOutOfMemoryError, EPPeerError, EPUnavailableError
from ..kernels.regions import align_up
from . import sharing
from .transport import MemoryRequest

_MAP, _UNMAP = 1, 2  # what a rank asks its peers to do with a segment
Heard = Callable[[], EPPeerError | None]
"""Returns the error of a peer that has left."""


def _nothing_heard() -> None: ...


def check_available() -> None:
    """Raise nothing: `allocate` tries each way to share memory, on all ranks together."""


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
    way = ""
    """The way in which the ranks passed the memory, of `_env.MEMORY_WAYS`."""

    def __init__(self, comm: Communicator, request: MemoryRequest) -> None:
        from . import driver, virtual_memory  # programs on the host backend may lack CUDA's bindings

        self._device, self._num_bytes = driver.current_device(), request.num_bytes
        self._unit = virtual_memory.granularity(self._device)
        self._context = driver.CurrentContext()
        self._range, self._mappings, self._is_mapped = ExitStack(), ExitStack(), False
        self._num_slots = request.num_slots
        self._addresses: list[int] = []  # of the ranks of this host, or of all slots
        self._places: Sequence[int] = []  # the index in them, by rank of the host's group
        self._size = self._stride = 0  # of what is mapped at first, and of a slot
        self._segments: dict[int, int] = {}  # those of this rank: offset and bytes
        self._mapped: dict[int, int] = {}  # segments of all ranks: address and bytes
        self._mapping = threading.Lock()  # the thread of the mailbox maps too
        self._mailbox: Mailbox | None = None
        try:
            here = self._attach(comm, request.timeout_s)
        except BaseException:
            self.free()
            raise
        address_of = dict(zip(here, [self._addresses[place] for place in self._places], strict=True))
        self.ptr = self.network_base = address_of[comm.Get_rank()]
        self.peers: Sequence[int] = self._addresses
        if self._num_slots is None:
            self.peers = [address_of.get(peer, 0) for peer in range(comm.Get_size())]
        self.network_ids: Sequence[int] = range(len(self.peers))
        self.network_peers: Sequence[int] = [0] * len(self.peers)  # a relay carries what crosses the network

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

        self._places = range(len(here)) if self._num_slots is None else group.numbers
        ways = sharing.ways_of(group, _env.memory_way(), self.way)
        if self._num_slots is not None:
            ways = [way for way in ways if way != sharing.IPC]  # its addresses are the driver's
        room = virtual_memory.device_bytes(self._device)
        unit, room = map(max, zip(*group.allgather((self._unit, room)), strict=True))
        self._unit = unit
        self._size = size = align_up(self._num_bytes, unit)
        if not self._addresses:
            self._stride = size + align_up(room, unit)
        shared = sharing.share(group, here, size, self._device, ways, timeout_s)
        self.way = shared.way
        if shared.way == sharing.IPC:
            self._keep_addresses(group, shared)
            return
        with closing(shared):

            def attach() -> None:
                if not self._addresses:
                    self._reserve(self._num_slots or len(here))
                for peer, memory in enumerate(shared.memories):
                    address = self._addresses[self._places[peer]]
                    try:
                        virtual_memory.map_at(address, size, memory, self._device)
                    except EPUnavailableError as error:
                        raise EPUnavailableError(
                            f"no direct path from the GPU of rank {here[group.Get_rank()]} to that of rank {here[peer]} ({error}); "
                            f"expected peer access (NVLink or PCIe) between all GPUs of a host"
                        ) from error
                    self._mappings.callback(virtual_memory.unmap, address, size)

            agreed(group, attach, here)
        self._is_mapped = True
        if self._mailbox is None and shared.way in descriptors.WAYS:
            self._mailbox = Mailbox(group, self._map_or_unmap, shared.way, timeout_s)

    def _reserve(self, num_ranks: int) -> None:
        """Reserve the addresses of all slots. If there are too few, slots have no room to grow."""
        from . import virtual_memory

        try:
            base = virtual_memory.reserve(num_ranks * self._stride, self._unit)
        except EPOutOfMemoryError:  # the process may have a limit
            self._stride = self._size
            base = virtual_memory.reserve(num_ranks * self._stride, self._unit)
        self._range.callback(virtual_memory.free_range, base, num_ranks * self._stride)
        self._addresses = [base + peer * self._stride for peer in range(num_ranks)]

    def _keep_addresses(self, group: Communicator, shared: sharing.Shared) -> None:
        """Use memory at addresses that the driver chose. A rank may free its own after all peers have closed it."""
        self._mappings.push(shared.imported)
        self._range.push(shared.own)
        self._addresses, self._places = shared.memories, range(len(shared.memories))
        self.is_local = False
        self.consensus = Consensus(group)

    @property
    def heap(self) -> HeapMemory | None:
        """This memory, unless the driver chose its addresses."""
        return self if self.is_local else None

    @property
    def is_mapped(self) -> bool:
        """Whether it has memory: it does not sleep."""
        return self._is_mapped

    @property
    def can_grow(self) -> bool:
        """Whether the ranks can pass more memory to each other, and this one has addresses for it."""
        return self._mailbox is not None and self._size < self._stride

    def grow(self, num_bytes: int, timeout_s: float, heard: Heard = _nothing_heard) -> tuple[int, int]:
        """Map a segment for this rank, on all ranks of the host. Return its offset in the region, and its bytes. Not collective.

        Raises:
            EPOutOfMemoryError: if the GPU has too little memory, or a peer cannot map it.
            EPPeerError: if `heard` returns it.
        """
        if self._mailbox is None:
            raise EPOutOfMemoryError(
                f"way={self.way}: ranks cannot pass more memory between calls; expected a way with descriptors. Give the ranks of a host a "
                f"common network namespace, or a folder for sockets with DEEPEP_RT_SOCKET_DIR."
            )
        size, offset = align_up(num_bytes, self._unit), self._size
        for begin, held in sorted(self._segments.items()):
            if offset + size <= begin:
                break
            offset = begin + held
        if offset + size > self._stride:
            raise EPOutOfMemoryError(
                f"{size / 1e6:.0f} MB more do not fit the address room of a Buffer; expected fewer results at once"
            )
        self._map_segment(offset, size, timeout_s, heard)
        return offset, size

    def shrink(self, offset: int, timeout_s: float) -> None:
        """Give up a segment. No work of any GPU may use it any more."""
        size = self._segments.pop(offset)
        self._unmap_segment(self.ptr + offset)
        self._tell(_UNMAP, offset, size, timeout_s)

    def _map_segment(self, offset: int, size: int, timeout_s: float, heard: Heard) -> None:
        from . import driver

        with ExitStack() as handles, driver.relaxed_capture_mode():
            own, mine = sharing.create(size, self._device, handles, handles)
            assert isinstance(mine, int)
            self._map(self.ptr + offset, size, own)
            try:
                assert self._mailbox is not None
                self._mailbox.ask([_MAP, offset, size], mine, timeout_s, heard)
            except BaseException as error:
                self._unmap_segment(self.ptr + offset)
                self._tell(_UNMAP, offset, size, 0.0)
                if isinstance(error, EPUnavailableError):
                    raise EPOutOfMemoryError(f"a Buffer cannot grow by {size / 1e6:.0f} MB: {error}") from error
                raise
        self._segments[offset] = size

    def _tell(self, step: int, offset: int, size: int, timeout_s: float) -> None:
        """Ask the peers for a step that none of them has to wait for. One that is gone has no memory either."""
        with suppress(EPUnavailableError):
            assert self._mailbox is not None
            self._mailbox.ask([step, offset, size], -1, timeout_s)

    def _map_or_unmap(self, peer: int, numbers: Sequence[int], descriptor: int) -> None:
        """Do what a peer asks for. This runs in the thread of the mailbox."""
        from . import driver, virtual_memory

        step, offset, size = numbers
        if not (self._size <= offset <= offset + size <= self._stride) or offset % self._unit or size % self._unit:
            raise EPUnavailableError(f"a segment of {size} bytes at {offset} is not in a slot")
        address = self._addresses[self._places[peer]] + offset
        with self._context, driver.relaxed_capture_mode():
            if step == _UNMAP:
                self._unmap_segment(address)
                return
            memory = virtual_memory.import_from(descriptor)
            try:
                self._map(address, size, memory)
            finally:
                virtual_memory.release(memory)

    def _map(self, address: int, size: int, memory: int) -> None:
        from . import virtual_memory

        with self._mapping:
            virtual_memory.map_at(address, size, memory, self._device)
            self._mapped[address] = size

    def _unmap_segment(self, address: int) -> None:
        from . import virtual_memory

        with self._mapping:
            if size := self._mapped.pop(address, 0):
                virtual_memory.unmap(address, size)

    def _unmap_all(self) -> None:
        self._is_mapped = False
        for address in list(self._mapped):
            self._unmap_segment(address)
        self._mappings.close()

    def sleep(self) -> None:
        """Unmap the memory of all ranks. The addresses stay. No work of the GPU may use them until `wake`."""
        self._unmap_all()

    def wake(self, comm: Communicator, timeout_s: float) -> None:
        """Map fresh memory at the same addresses. Collective. After an error, which is that of all ranks, the memory sleeps."""

        def map_segments() -> None:
            for offset, size in self._segments.items():
                self._map_segment(offset, size, timeout_s, comm.heard or _nothing_heard)

        try:
            self._attach(comm, timeout_s)
            agreed(comm, map_segments)
        except BaseException:
            self._unmap_all()
            raise

    def replace(self, comm: Communicator, timeout_s: float) -> None:
        """Take fresh memory at the same addresses, with other members. Collective over them. After an error the memory sleeps.

        No work of this GPU may use it. A process that is no member any more still has the memory of before, and no way to this one.
        """
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        self.sleep()
        self.wake(comm, timeout_s)

    def all_free(self, is_ok: bool, timeout_s: float) -> bool:
        """Return whether this rank may free its region: `is_ok`, because it does so alone, except with the way "ipc"."""
        if self.consensus is None:
            return is_ok
        if is_ok:
            self._mappings.close()
        are_ok = self.consensus.all_ok(is_ok, "close the memory of each other", timeout_s)
        if are_ok:  # otherwise a rank may be gone, and freeing would wait for it
            self.consensus.free()
            self.consensus = None
        return are_ok

    def free(self) -> None:
        """Unmap the regions of all ranks, and give up the memory of this one. No work of the GPU may use them any more."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._unmap_all()
        self._range.close()


allocate = HeapMemory
