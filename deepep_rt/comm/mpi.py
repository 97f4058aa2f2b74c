"""A communicator over mpi4py, for ranks that an MPI launcher started.

MPI cannot give up a blocking collective, so all collectives are non-blocking inside. A rank that waits long in one tells the others with
`ARRIVAL_TAG`. So each rank knows at the time limit which ranks never arrived. On the caller's communicator, these messages occur only
while the ranks make their first Buffer there, and only after a wait of a second.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from .timed_collectives import TimedCollectives

ARRIVAL_TAG = 32767  # the largest tag that every MPI has

_retained: list[Any] = []  # requests and memory that MPI may still use


class MpiCommunicator(TimedCollectives, MPI.Intracomm):
    """The same communicator as the one it is made from. Its duplicates are of this class too."""

    transport_name = "MPI"
    outlives_owner = True
    is_abandoned = False  # collectives of it may be unfinished, so it is never freed
    _steps = 0  # number of collectives so far; the same on all ranks

    def begin_private_comm(self) -> tuple[MpiCommunicator, Any]:
        """Return the duplicate that belongs to this communicator, and the request after which it can be used.

        It is made once. A rank that gives up waiting leaves an unfinished `Idup`, and only another non-blocking collective could match it.
        """
        made: Any = self.Get_attr(_private_comm_key())
        if made is None:
            made = self.Idup()
            self.Set_attr(_private_comm_key(), made)
        self._receive_arrivals()  # of an earlier attempt, so that the caller does not find them
        return made

    def abandon_private_comm(self) -> None:
        """Let the next `begin_private_comm` make another one. All ranks call it."""
        made: Any = self.Get_attr(_private_comm_key())
        if made is not None:
            made[0].is_abandoned = True
            self.retain(made)
            self.Delete_attr(_private_comm_key())

    def Dup(self, info: Any = None) -> MpiCommunicator:
        made, request = self.Idup(info)
        self._finish_step(request, made, "a duplication of the communicator")
        made.timeout_s, made.heard = self.timeout_s, self.heard
        return made

    def dup_for_process(self) -> MpiCommunicator:
        """Make a duplicate that lives as long as the process."""
        return self.Dup()

    @property
    def relay_objection(self) -> str:
        """The reason why a relay cannot carry rows over this communicator; empty if one can."""
        if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            return ""
        return "an MPI that allows no calls of a second thread (no MPI_THREAD_MULTIPLE)"

    def sub_comm(self, ranks: Sequence[int]) -> MpiCommunicator:
        """Make a communicator of these ranks, in this order. Collective; each rank passes the ranks of its own group."""
        self.Barrier()  # MPI has no split that can be given up, so make sure first that all ranks are here
        made = MpiCommunicator(self.Split(ranks[0], ranks.index(self.Get_rank())))
        made.timeout_s, made.heard = self.timeout_s, self.heard
        return made

    def abandon(self) -> None:
        """Stop using the communicator. It stays allocated, because MPI frees a communicator on all ranks or on none."""

    def retain(self, *held: Any) -> None:
        """Keep requests that no caller waits for any more, and the memory that they use."""
        _retained.append(held)

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of each rank, in the order of ranks."""
        data, phase = np.frombuffer(pickle.dumps(value), np.uint8), "an allgather"
        sizes = np.zeros(self.Get_size(), np.int64)
        mine = np.array([data.size])
        self._finish_step(self.Iallgather(mine, sizes), (mine, sizes), phase)
        ends = np.cumsum(sizes)
        gathered = np.zeros(ends[-1], np.uint8)
        self._finish_step(self.Iallgatherv(data, [gathered, sizes, ends - sizes, MPI.BYTE]), (data, gathered), phase)
        return [pickle.loads(part.tobytes()) for part in np.split(gathered, ends[:-1])]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.Get_rank() == root else None)[root]

    def Bcast(self, array: Any, root: int = 0) -> None:
        array[...] = self.bcast(array, root)

    def Barrier(self) -> None:
        self._finish_step(self.Ibarrier(), None, "a barrier")

    def Alltoall(self, outgoing: Any, incoming: Any) -> None:
        """Send row r of `outgoing` to rank r, and fill row r of `incoming` with the row from rank r."""
        self._finish_step(self.Ialltoall(outgoing, incoming), (outgoing, incoming), "an all-to-all")

    def finish(self, request: Any, *arguments: Any, **options: Any) -> None:
        self._steps += 1
        super().finish(request, *arguments, **options)

    def _announce_arrival(self) -> None:
        for peer in self._peers():
            with suppress(MPI.Exception):  # MPI may know that the peer has ended
                self.retain(self.isend(self._steps, peer, ARRIVAL_TAG))

    def _missing_ranks(self, request: Any) -> list[int]:
        self._receive_arrivals()
        arrivals = self._arrivals()
        return [peer for peer in self._peers() if arrivals.get(peer, 0) < self._steps]

    def _receive_arrivals(self) -> None:
        arrivals = self._arrivals()
        for peer in self._peers():
            with suppress(MPI.Exception):
                while self.iprobe(peer, ARRIVAL_TAG):
                    arrivals[peer] = self.recv(source=peer, tag=ARRIVAL_TAG)

    def _arrivals(self) -> dict[int, int]:
        """Return, by rank, the last step that the rank has announced."""
        return self.__dict__.setdefault("_arrived", {})

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.Get_size()) if peer != self.Get_rank()]

    # --- messages ----------------------------------------------------------------------------------------------------------------

    def can_send(self) -> bool:
        """Return whether this thread may send messages now: MPI runs, and allows its calls."""
        return not MPI.Is_finalized() and (MPI.Is_thread_main() or MPI.Query_thread() >= MPI.THREAD_MULTIPLE)

    def send_parts(self, parts: Sequence[np.ndarray], dest: int, tag: int) -> Any:
        """Start to send several arrays as one message, without copying them together."""
        return _start(self.Isend, parts, dest, tag)

    def receive_parts(self, parts: Sequence[np.ndarray], source: int, tag: int) -> Any:
        """Start to receive one message into several arrays."""
        return _start(self.Irecv, parts, source, tag)


def _start(method: Callable[..., Any], parts: Sequence[np.ndarray], peer: int, tag: int) -> Any:
    blocks = [(part.nbytes, part.ctypes.data) for part in parts if part.nbytes]
    lengths, addresses = zip(*blocks, strict=True)
    datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
    request = method([MPI.BOTTOM, 1, datatype], peer, tag)
    datatype.Free()  # the pending request holds a reference to it
    return request


@functools.cache
def _private_comm_key() -> int:
    def free(comm: Any, key: int, made: Any) -> None:
        own, request = made
        if not own.is_abandoned and request.Test():
            own.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)
