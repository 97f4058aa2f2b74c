"""Ways to share GPU memory between the ranks of a host: create it, pass a handle of it to the peers, and import theirs.

All ranks choose the first way with which all of them have made these steps. Attributes of the driver do not count: they say yes where the
steps are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from .._env import MEMORY_WAYS
from ..comm import descriptors
from ..comm.communicator import Communicator
from ..comm.consensus import agreed
from ..errors import EPConfigError, EPOutOfMemoryError, EPUnavailableError

IPC, _FABRIC = "ipc", "fabric"
_HANDLE_BYTES = 64  # of both kinds
_KEPT = tuple(way for way in MEMORY_WAYS if way != IPC)  # of virtual memory, whose addresses the caller chooses


@dataclass
class Shared:
    """Memory of all ranks. The caller closes `imported` before `own`."""

    way: str
    memories: list[int]
    """A handle of each rank's memory for `virtual_memory`; with the way "ipc", an address of it."""
    imported: ExitStack = field(default_factory=ExitStack)
    """Gives up what the peers gave to this rank."""
    own: ExitStack = field(default_factory=ExitStack)
    """Gives up the memory of this rank. With the way "ipc", all peers must have closed theirs."""

    def close(self) -> None:
        self.imported.close()
        self.own.close()


def ways_of(group: Communicator, forced: str, before: str = "") -> Sequence[str]:
    """Return the ways to try, in their order. Collective.

    Args:
        group: The ranks of a host.
        forced: The only way to try, `_env.memory_way()`. Empty: all of them.
        before: The way of memory that slept on this rank. It is the first, and its addresses stay. Ranks that had none take that of others.
    """
    told, held = zip(*group.allgather((forced, before)), strict=True)
    before = next(filter(None, held), "")
    if len(set(told)) > 1:
        raise EPConfigError(
            f"DEEPEP_RT_SYMMETRIC_MEMORY forces the ways {', '.join(way or 'none' for way in told)} on the ranks of a host; expected the "
            f"same on all ranks. Set it for all of them."
        )
    if forced and not (before and forced == IPC):
        return (forced,)
    return sorted(_KEPT, key=lambda way: way != before) if before else MEMORY_WAYS


def share(group: Communicator, here: Sequence[int], num_bytes: int, device: int, ways: Sequence[str], timeout_s: float) -> Shared:
    """Create memory on each rank, and share it in the first of the ways that works. Collective.

    Args:
        group: The ranks of a host.
        here: Their numbers in messages.
        num_bytes: A multiple of the granularity of all ranks.
        device: This rank's GPU.
        ways: The result of `ways_of`.
        timeout_s: The limit for the exchange of descriptors.

    Raises:
        EPOutOfMemoryError: on every rank, if a GPU has too little memory.
        EPUnavailableError: on every rank, if no way works. It names each with its reason.
        EPTimeoutError: if a rank does not come.
    """
    failed = []
    for way in ways:
        shared = Shared(way, [])
        try:
            if way == IPC:
                _share_addresses(group, here, num_bytes, shared)
            else:
                _share_handles(group, here, num_bytes, device, timeout_s, shared)
        except EPUnavailableError as error:
            shared.close()
            failed.append(f"{way}: {error}")
        except BaseException:
            shared.close()
            raise
        else:
            return shared
    reasons = " ".join(text if text.endswith(".") else f"{text}." for text in failed)
    if tuple(ways) == MEMORY_WAYS:
        raise EPUnavailableError(f"no way to pass memory between the ranks of this host works; expected one of these. {reasons}")
    raise EPUnavailableError(
        f"memory cannot pass between the ranks of this host by {', '.join(ways)}; expected a way that works. {reasons} "
        f"DEEPEP_RT_SYMMETRIC_MEMORY=heap lets the library choose a way for new Buffers."
    )


def create(num_bytes: int, device: int, held: ExitStack, exported: ExitStack, is_fabric: bool = False) -> tuple[int, int | bytes]:
    """Create physical memory. Return its handle, and what other processes import: a descriptor, or 64 bytes of a fabric.

    `held` releases the memory, and `exported` closes the descriptor.
    """
    from . import virtual_memory  # programs on the host backend may lack CUDA's bindings

    try:
        own = virtual_memory.create(num_bytes, device, is_fabric)
    except EPOutOfMemoryError as error:
        raise _no_memory(num_bytes, error) from error
    held.callback(virtual_memory.release, own)
    handle = virtual_memory.export(own, is_fabric)
    if isinstance(handle, int):
        exported.callback(descriptors.close_all, [handle])
    return own, handle


def _no_memory(num_bytes: int, error: EPOutOfMemoryError) -> EPOutOfMemoryError:
    return EPOutOfMemoryError(f"the GPU has no {num_bytes / 1e9:.2f} GB of memory for a Buffer ({error}). See Buffer.size_hint.")


def _share_handles(
    group: Communicator, here: Sequence[int], num_bytes: int, device: int, timeout_s: float, shared: Shared
) -> None:
    """Share virtual memory by descriptors, or by handles of a fabric."""
    from . import virtual_memory

    rank, is_fabric = group.Get_rank(), shared.way == _FABRIC
    with ExitStack() as passed:
        make = functools.partial(create, num_bytes, device, shared.own, passed, is_fabric)
        own, mine = agreed(group, make, here)
        theirs: Sequence[int | bytes]
        if isinstance(mine, bytes):
            theirs = group.allgather(mine)
        else:
            theirs = found = descriptors.exchange(group, mine, shared.way, timeout_s)
            passed.callback(descriptors.close_all, found)

        def import_all() -> list[int]:
            memories = []
            for peer, handle in enumerate(theirs):
                if peer == rank:
                    memories.append(own)
                    continue
                memories.append(virtual_memory.import_from(_checked(handle, here[peer]) if is_fabric else handle))
                shared.imported.callback(virtual_memory.release, memories[-1])
            return memories

        shared.memories = agreed(group, import_all, here)


def _share_addresses(group: Communicator, here: Sequence[int], num_bytes: int, shared: Shared) -> None:
    """Share ordinary memory by CUDA's handles for other processes."""
    from . import ipc

    def make() -> tuple[int, bytes]:
        try:
            address = ipc.allocate(num_bytes)
        except EPOutOfMemoryError as error:
            raise _no_memory(num_bytes, error) from error
        shared.own.callback(ipc.free, address)
        return address, ipc.export(address)

    own, mine = agreed(group, make, here)
    theirs = group.allgather(mine)

    def open_all() -> list[int]:
        addresses = []
        for peer, handle in enumerate(theirs):
            if peer == group.Get_rank():
                addresses.append(own)
                continue
            addresses.append(ipc.open_from(_checked(handle, here[peer])))
            shared.imported.callback(ipc.close, addresses[-1])
        return addresses

    try:
        shared.memories = agreed(group, open_all, here)
    except (EPUnavailableError, EPOutOfMemoryError):
        shared.imported.close()
        group.Barrier()  # no rank may free memory that a peer has open
        raise


def _checked(handle: object, peer: int) -> bytes:
    """Return the bytes of a handle. A store may hold anything, and the driver would read 64 bytes."""
    if not isinstance(handle, bytes) or len(handle) != _HANDLE_BYTES:
        raise EPUnavailableError(f"rank {peer} told no valid handle; expected ranks of one version of this library")
    return handle
