"""A communicator over mpi4py, for ranks that an MPI launcher started.

MPI cannot give up a collective, has few communicators (MPICH 2,048 in a process), and frees one only on all ranks together. So the library
makes one duplicate of each communicator of the program, and sends only messages over it. An `MpiCommunicator` is a channel of that
duplicate: a range of tags. Its collectives are messages between all pairs of ranks, so each rank knows which ranks have not arrived. A rank
that leaves a channel in the middle of a step never uses its tags again.

Only the duplication needs collectives of MPI, on the program's communicator. Non-blocking ones can stay unfinished. The ranks send no
messages there: MPICH 5 cannot finalize a process to which an unread message was sent over MPI_COMM_WORLD.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import EPUnavailableError
from .communicator import COLLECTIVE_TAG, NUM_TAGS
from .timed_collectives import TimedCollectives

_unfinished: set[Any] = set()  # messages and duplications that MPI may still work on, with their memory
_retained: list[Any] = []  # what others keep for MPI


class MpiCommunicator(TimedCollectives):
    """The ranks of a communicator of mpi4py, which carries no message of the library. All of them make the same calls."""

    transport_name = "MPI"
    outlives_owner = True

    def __init__(self, comm: MPI.Comm) -> None:
        self._origin = MPI.Intracomm(comm)
        self._duplicate, self._number = _duplicate_of(self._origin), 0
        self._rank, self._members = comm.Get_rank(), list(range(comm.Get_size()))

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._members)

    def begin_private_comm(self) -> tuple[MpiCommunicator, Any]:
        """Return a communicator that the library keeps for meetings, and the request after which it can be used."""
        if self._number == 0:
            self._duplicate.begin(self._origin)
            return self._duplicate.first_channel(self), self._duplicate
        return self, self._duplicate

    def Dup(self) -> MpiCommunicator:
        return self.open_channel(self._agree_on_channel())

    def dup_for_process(self) -> MpiCommunicator:
        """Make a duplicate that lives as long as the process. It hears of no rank."""
        made = self.Dup()
        made.heard = None
        return made

    def sub_comm(self, ranks: Sequence[int]) -> MpiCommunicator:
        """Make a communicator of these ranks, in this order. Collective; each rank passes the ranks of its own group."""
        made = self.Dup()
        made._rank, made._members = ranks.index(self._rank), [self._members[rank] for rank in ranks]
        return made

    @property
    def relay_objection(self) -> str:
        """The reason why a relay cannot carry rows over this communicator; empty if one can."""
        if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
            return ""
        return "an MPI that allows no calls of a second thread (no MPI_THREAD_MULTIPLE)"

    def Free(self) -> None:
        """Give the tags back. All ranks do this; none waits for another one."""
        self.release()

    def release(self) -> None:
        """Give the tags back, after the last step that all ranks have made."""
        self._duplicate.close(self._number)

    def abandon(self) -> None:
        """Stop using the communicator. Its tags stay in use, because messages to other ranks may be on their way."""

    def retain(self, *held: Any) -> None:
        """Keep requests that no caller waits for any more, and the memory that they use."""
        _retained.append(held)

    # --- channels ----------------------------------------------------------------------------------------------------------------

    @property
    def last_channel(self) -> int:
        """The largest number of a channel that this rank has proposed or opened."""
        return self._duplicate.last

    def free_channel(self, least: int) -> int:
        """Return the smallest number from `least` on whose tags this rank does not use. Raise EPUnavailableError if all tags are in use."""
        return self._duplicate.next(least)

    def open_channel(self, number: int) -> MpiCommunicator:
        """Make the communicator of a channel. All ranks have agreed on its number."""
        self._duplicate.open(number)
        made = MpiCommunicator.__new__(MpiCommunicator)
        made.__dict__ |= {**self.__dict__, "_number": number}
        made.__dict__.pop("meeting", None)  # it has its own
        return made

    def _agree_on_channel(self) -> int:
        number, numbers = self.free_channel(self.last_channel + 1), np.zeros((self.Get_size(), 1), np.int64)
        while True:
            self._finish_step(self.Iallgather(np.array([number]), numbers), "a duplication of the communicator")
            if (numbers == number).all():
                return number
            number = self.free_channel(int(numbers.max()))

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of each rank, in the order of ranks."""
        data, phase = np.frombuffer(pickle.dumps(value), np.uint8), "an allgather"
        sizes = np.zeros((self.Get_size(), 1), np.int64)
        self._finish_step(self.Iallgather(np.array([data.size]), sizes), phase)
        gathered = [np.zeros(size, np.uint8) for size in sizes[:, 0]]
        self._finish_step(self._exchange([data] * len(gathered), gathered), phase)
        return [pickle.loads(part.tobytes()) for part in gathered]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.Get_rank() == root else None)[root]

    def Bcast(self, array: Any, root: int = 0) -> None:
        array[...] = self.bcast(array, root)

    def Barrier(self) -> None:
        self._finish_step(self.Iallgather(np.zeros(1, np.uint8), np.zeros((self.Get_size(), 1), np.uint8)), "a barrier")

    def Alltoall(self, outgoing: Any, incoming: Any) -> None:
        """Send row r of `outgoing` to rank r, and fill row r of `incoming` with the row from rank r."""
        self._finish_step(self._exchange(outgoing, incoming), "an all-to-all")

    def Iallgather(self, mine: np.ndarray, all_ranks: Any) -> _Exchange:
        """Start to fill the rows of `all_ranks` with the array of each rank."""
        return self._exchange([mine] * self.Get_size(), all_ranks)

    def _exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> _Exchange:
        """Start to send array r of `outgoing` to rank r, and to fill array r of `incoming` with the array from rank r."""
        peers = [peer for peer in range(self.Get_size()) if peer != self._rank]
        incoming[self._rank][...] = outgoing[self._rank]
        receives = [(peer, self.Irecv(incoming[peer], peer, COLLECTIVE_TAG)) for peer in peers]
        return _Exchange(receives + [(peer, self.Isend(outgoing[peer], peer, COLLECTIVE_TAG)) for peer in peers])

    # --- messages ----------------------------------------------------------------------------------------------------------------

    def can_send(self) -> bool:
        """Return whether this thread may send messages now: MPI runs, and allows its calls."""
        return not MPI.Is_finalized() and (MPI.Is_thread_main() or MPI.Query_thread() >= MPI.THREAD_MULTIPLE)

    def Isend(self, array: Any, dest: int, tag: int) -> _Message:
        return _Message(array, self.raw.Isend, array, *self.at(dest, tag))

    def Irecv(self, array: Any, source: int, tag: int) -> _Message:
        return _Message(array, self.raw.Irecv, array, *self.at(source, tag))

    def send_parts(self, parts: Sequence[np.ndarray], dest: int, tag: int) -> _Message:
        """Start to send several arrays as one message, without copying them together."""
        return _Message(parts, _start_parts, self.raw.Isend, parts, *self.at(dest, tag))

    def receive_parts(self, parts: Sequence[np.ndarray], source: int, tag: int) -> _Message:
        """Start to receive one message into several arrays."""
        return _Message(parts, _start_parts, self.raw.Irecv, parts, *self.at(source, tag))

    def isend(self, value: Any, dest: int, tag: int) -> _Message:
        """Start to send an object."""
        return self.Isend([pickle.dumps(value), MPI.BYTE], dest, tag)

    def iprobe(self, source: int, tag: int) -> bool:
        """Return whether a message has arrived."""
        raw, place = self.raw, self.at(source, tag)
        return bool(raw.iprobe(*place) or raw.iprobe(*place))  # Open MPI looks first, and takes what has arrived then

    def recv(self, *, source: int, tag: int) -> Any:
        """Receive an object that `iprobe` has found. Objects are short, so MPI has their bytes already."""
        return self.raw.recv(None, *self.at(source, tag))

    @property
    def raw(self) -> Any:
        """The duplicate, for messages of requests that the caller keeps. Its ranks and tags are those that `at` returns."""
        if not self._duplicate.is_made:
            self._duplicate.begin(self._origin)
            self._finish_step(self._duplicate, "a duplication of the communicator")
        return self._duplicate.made

    def at(self, rank: int, tag: int) -> tuple[int, int]:
        """Return the rank and the tag in the duplicate."""
        if not 0 <= tag < NUM_TAGS:
            raise ValueError(f"tag={tag}; expected 0 to {NUM_TAGS - 1}")
        return self._members[rank], self._duplicate.first_tag(self._number) + tag


class _Message:
    """A message that MPI sends or receives: what `start` returns for the arguments.

    It and its memory are kept until MPI has finished, also if an exception drops the caller's.
    """

    def __init__(self, memory: Any, start: Callable[..., Any], *arguments: Any) -> None:
        self._memory, self._request, self._is_over = memory, None, False
        _unfinished.add(self)  # first: a signal handler may raise as soon as MPI has the address
        self._request = start(*arguments)

    def __bool__(self) -> bool:
        return not self._is_over

    def Test(self) -> bool:
        if not self._is_over and self._request is not None and self._request.Test():
            self._is_over, self._memory = True, None
            _unfinished.discard(self)
        return self._is_over

    def Cancel(self) -> None:
        if not self.Test() and self._request is not None:
            self._request.Cancel()


class _Exchange:
    """A collective: messages from and to the other ranks, each with the number of that rank."""

    def __init__(self, messages: list[tuple[int, _Message]]) -> None:
        self._messages = messages

    def Test(self) -> bool:
        self._messages = [(peer, message) for peer, message in self._messages if not message.Test()]
        return not self._messages

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not arrived, or left before they took their message."""
        return sorted({peer for peer, message in self._messages if not message.Test()})


def _start_parts(method: Callable[..., Any], parts: Sequence[np.ndarray], peer: int, tag: int) -> Any:
    blocks = [(part.nbytes, part.ctypes.data) for part in parts if part.nbytes]
    lengths, addresses = zip(*blocks, strict=True)
    datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
    request = method([MPI.BOTTOM, 1, datatype], peer, tag)
    datatype.Free()  # the pending request holds a reference to it
    return request


class _Duplicate:
    """The duplicate of a communicator of the program, as a request, and its channels.

    A rank that gives up leaves the duplication unfinished. It is started once, so a later attempt of all ranks completes it. A scatter from
    each rank, of one byte, tells the others that this rank has arrived.
    """

    def __init__(self) -> None:
        self.is_made, self.last = False, 0
        self.made: Any = None
        self._arrivals: list[Any] = []
        self._memory: list[Any] = []
        self._num_channels = (int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) + 1) // NUM_TAGS
        self._in_use = {0}  # the tags of channels, by their number modulo `_num_channels`
        self._first: MpiCommunicator | None = None

    def begin(self, comm: MPI.Intracomm) -> None:
        """Start the duplication, once."""
        if self._arrivals:
            return
        rank, size = comm.Get_rank(), comm.Get_size()
        ones, received = np.ones(size, np.uint8), np.zeros((size, 1), np.uint8)
        mine = [ones, (np.ones(size, int), np.arange(size)), MPI.BYTE]
        self._memory.append((ones, received, mine))
        _unfinished.add(self)
        scatters = map(comm.Iscatterv, [mine if root == rank else None for root in range(size)], received, range(size))
        with self._naming_the_cause():
            # In one call of C no signal handler runs. A rank that lost count of its collectives could never complete them.
            self._arrivals.extend(itertools.chain(scatters, map(MPI.Intracomm.Idup, [comm])))

    def first_channel(self, root: MpiCommunicator) -> MpiCommunicator:
        """Return the communicator of channel 0."""
        if self._first is None:
            self._first = root.open_channel(0)
        return self._first

    def Test(self) -> bool:
        if not self.is_made and self._arrivals:
            self.made, request = self._arrivals[-1]
            with self._naming_the_cause():
                self.is_made = all(each.Test() for each in (*self._arrivals[:-1], request))
            if self.is_made:
                _unfinished.discard(self)
        return self.is_made

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not started the duplication."""
        return [rank for rank, arrival in enumerate(self._arrivals[:-1]) if not arrival.Test()]

    @contextmanager
    def _naming_the_cause(self) -> Iterator[None]:
        """Turn errors of MPI in the block into one that names their usual cause."""
        try:
            yield
        except MPI.Exception as error:
            self._arrivals.clear()  # the next attempt of all ranks starts again
            raise EPUnavailableError(
                f"MPI cannot duplicate the communicator ({' '.join(str(error).split())}); expected a free communicator. MPI has few "
                f"(MPICH 2,048 in a process). Free those that the program made (comm.Free()), and make Buffers over one that it keeps."
            ) from error

    # --- channels ----------------------------------------------------------------------------------------------------------------

    def next(self, least: int) -> int:
        """See `MpiCommunicator.free_channel`."""
        for number in range(least, least + self._num_channels):
            if number % self._num_channels not in self._in_use:
                self.last = max(self.last, number)
                return number
        raise EPUnavailableError(
            f"all {self._num_channels} ranges of message tags of this communicator are in use, by Buffers that the program holds, dropped "
            f"without destroy(), or left by an exception; expected a free one. Make fewer Buffers, or make them over a new communicator "
            f"(comm.Dup())."
        )

    def open(self, number: int) -> None:
        """Take the tags of a channel."""
        self._in_use.add(number % self._num_channels)
        self.last = max(self.last, number)
        for message in list(_unfinished):  # given up earlier; MPI may have finished since
            message.Test()

    def close(self, number: int) -> None:
        """Give the tags of a channel back."""
        if number:
            self._in_use.discard(number % self._num_channels)

    def first_tag(self, number: int) -> int:
        """Return the first tag of a channel."""
        return number % self._num_channels * NUM_TAGS

    def free(self) -> None:
        """Free the duplicate, unless channels are in use."""
        if self.is_made and self._in_use == {0}:
            with suppress(MPI.Exception):  # MPICH refuses if an unread message arrived, such as that of a rank that gave up
                self.made.Free()


def _duplicate_of(comm: MPI.Intracomm) -> _Duplicate:
    found: Any = comm.Get_attr(_duplicate_key())
    if found is None:
        found = _Duplicate()
        comm.Set_attr(_duplicate_key(), found)
    return found


@functools.cache
def _duplicate_key() -> int:
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, duplicate: duplicate.free())
