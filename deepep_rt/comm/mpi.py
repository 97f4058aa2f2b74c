"""Ranks that an MPI launcher started: mpi4py's communicator, and what Buffers want of one beyond its methods (see `communicator`).

A communicator's collectives are non-blocking ones inside, because MPI cannot give up a blocking one. A rank that waits long in one sends
the others a word under `ARRIVAL_TAG`. So each rank knows, when the time is up, which ranks never came. On a communicator of the caller's,
that happens only while Buffers find each other there for the first time, and only after a second of waiting.
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

ARRIVAL_TAG = 32767  # the largest that every MPI has

_unfinished: list[Any] = []  # what MPI may still read, or write to

_HINT = "all ranks to make their part of it"


class MpiCommunicator(TimedCollectives, MPI.Intracomm):
    """The same communicator as the one it is made from; its duplicates are of this kind too."""

    transport_name = "MPI"
    outlives_owner = True
    _steps = 0  # collective steps so far; the same on all ranks

    def begin_private_comm(self) -> tuple[MpiCommunicator, Any]:
        """A duplicate, made once and kept with the communicator, and the request that is over when it can be used.

        Kept: whoever gives up waiting for the others leaves half of an `Idup` behind, which only other non-blocking collectives could meet.
        """
        made: Any = self.Get_attr(_key_of_own())
        if made is None:
            made = self.Idup()
            self.Set_attr(_key_of_own(), made)
        self._hear_arrivals()  # of an earlier attempt, which the caller shall not find
        return made

    def Dup(self, info: Any = None) -> MpiCommunicator:
        made, request = self.Idup(info)
        self._step(request, made, "duplicating a communicator")
        made.timeout_s = self.timeout_s
        return made

    def dup_for_process(self) -> MpiCommunicator:
        """A duplicate for as long as the process lives."""
        return self.Dup()

    def abandon(self) -> None:
        """Part without waiting for the others: MPI's communicators are freed by all ranks or by none."""

    def retain(self, *held: Any) -> None:
        """Hold on to requests that nobody waits for any more, and to what they use."""
        _unfinished.append(held)

    def ranks_on_host(self) -> list[int]:
        """The ranks on this host, ascending. Collective."""
        self.Barrier()  # all ranks are here: MPI has no split that can be given up
        host = MpiCommunicator(self.Split_type(MPI.COMM_TYPE_SHARED))
        host.timeout_s = self.timeout_s
        ranks = host.allgather(self.Get_rank())
        host.Free()
        return sorted(ranks)

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """What each rank gives, in the order of ranks."""
        data, phase = np.frombuffer(pickle.dumps(value), np.uint8), "gathering what each rank says"
        sizes = np.zeros(self.Get_size(), np.int64)
        mine = np.array([data.size])
        self._step(self.Iallgather(mine, sizes), (mine, sizes), phase)
        ends = np.cumsum(sizes)
        gathered = np.zeros(ends[-1], np.uint8)
        self._step(self.Iallgatherv(data, [gathered, sizes, ends - sizes, MPI.BYTE]), (data, gathered), phase)
        return [pickle.loads(part.tobytes()) for part in np.split(gathered, ends[:-1])]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.Get_rank() == root else None)[root]

    def Bcast(self, array: Any, root: int = 0) -> None:
        array[...] = self.bcast(array, root)

    def Barrier(self) -> None:
        self._step(self.Ibarrier(), None, "a barrier")

    def Alltoall(self, outgoing: Any, incoming: Any) -> None:
        """Fill row r of `incoming` with the row of rank r that is meant for this rank."""
        self._step(self.Ialltoall(outgoing, incoming), (outgoing, incoming), "an exchange of rows")

    def _step(self, request: Any, held: Any, phase: str) -> None:
        self.finish(request, held, phase, _HINT)

    def finish(self, request: Any, *given: Any, **options: Any) -> None:
        self._steps += 1
        super().finish(request, *given, **options)

    def _announce_arrival(self) -> None:
        for peer in self._peers():
            with suppress(MPI.Exception):  # MPI may know that it has ended
                self.retain(self.isend(self._steps, peer, ARRIVAL_TAG))

    def _missing_ranks(self, request: Any) -> list[int]:
        self._hear_arrivals()
        arrivals = self._arrivals()
        return [peer for peer in self._peers() if arrivals.get(peer, 0) < self._steps]

    def _hear_arrivals(self) -> None:
        arrivals = self._arrivals()
        for peer in self._peers():
            with suppress(MPI.Exception):
                while self.iprobe(peer, ARRIVAL_TAG):
                    arrivals[peer] = self.recv(source=peer, tag=ARRIVAL_TAG)

    def _arrivals(self) -> dict[int, int]:
        """By rank, the step in which it was when it last told."""
        return self.__dict__.setdefault("_arrived", {})

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.Get_size()) if peer != self.Get_rank()]

    # --- messages ----------------------------------------------------------------------------------------------------------------

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
