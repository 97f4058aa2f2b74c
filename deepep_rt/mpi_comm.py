"""Ranks that an MPI launcher started: mpi4py's communicator, and what Buffers want of one beyond its methods (see `communicator`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

_unfinished: list[Any] = []  # what MPI may still read, or write to


class MpiCommunicator(MPI.Intracomm):
    """The same communicator as the one it is made from; its duplicates are of this kind too."""

    carrier = "MPI"
    outlasts_its_owner = True

    def begin_own(self) -> tuple[MpiCommunicator, Any]:
        """A duplicate, made once and kept with the communicator, and the request that is over when it can be used.

        Kept: whoever gives up waiting for the others leaves half of an `Idup` behind, which only other non-blocking collectives could meet.
        """
        made: Any = self.Get_attr(_key_of_own())
        if made is None:
            made = self.Idup()
            self.Set_attr(_key_of_own(), made)
        return made

    def lasting(self) -> MpiCommunicator:
        """A duplicate for as long as the process lives."""
        return self.Dup()

    def leave(self) -> None:
        """Part without waiting for the others: MPI's communicators are freed by all ranks or by none."""

    def keep(self, *held: Any) -> None:
        """Hold on to requests that nobody waits for any more, and to what they use."""
        _unfinished.append(held)

    def ranks_here(self) -> list[int]:
        """The ranks on this host, ascending. Collective."""
        host = self.Split_type(MPI.COMM_TYPE_SHARED)
        ranks = host.allgather(self.Get_rank())
        host.Free()
        return sorted(ranks)

    def send_parts(self, parts: Sequence[np.ndarray], dest: int, tag: int) -> Any:
        """Start to send several arrays as one message, without packing them."""
        return _start(self.Isend, parts, dest, tag)

    def receive_parts(self, parts: Sequence[np.ndarray], source: int, tag: int) -> Any:
        """Start to receive one message into several arrays."""
        return _start(self.Irecv, parts, source, tag)


def _start(method: Callable[..., Any], parts: Sequence[np.ndarray], peer: int, tag: int) -> Any:
    blocks = [(part.nbytes, part.ctypes.data) for part in parts if part.nbytes]
    lengths, addresses = zip(*blocks, strict=True)
    datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
    request = method([MPI.BOTTOM, 1, datatype], peer, tag)
    datatype.Free()  # the pending request holds on to it
    return request


@functools.cache
def _key_of_own() -> int:
    def free(comm: Any, key: int, made: Any) -> None:
        own, request = made
        if request.Test():
            own.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)
