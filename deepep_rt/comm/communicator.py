"""The methods that Buffers need of a communicator: those of mpi4py's Intracomm, and a few more.

`mpi.MpiCommunicator` and `store.StoreCommunicator` have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import EPPeerError, EPTimeoutError

NUM_TAGS = 256
"""Messages have tags from 0 to 255. The two last ones are those of collectives and meetings."""
COLLECTIVE_TAG, MEETING_TAG = NUM_TAGS - 1, NUM_TAGS - 2


class Request(Protocol):
    """A message that was started."""

    def Test(self) -> bool:
        """Return whether it is complete."""

    def Cancel(self) -> None: ...


class CollectiveRequest(Protocol):
    """A collective that was started."""

    def Test(self) -> bool:
        """Return whether it is complete."""

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not arrived, as far as this rank knows."""


class Communicator(Protocol):
    """The ranks of a group. All ranks call its collectives in the same order."""

    transport_name: str
    """The transport of the messages, for the log."""
    outlives_owner: bool
    """Whether the transport lives as long as the process."""
    timeout_s: float
    """The limit of its collectives. A duplicate has the same."""
    heard: Callable[[], EPPeerError | None] | None
    """Waits of collectives call it often, and raise what it returns. A duplicate has the same, but for one for the process."""

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each rank in its Buffer, for messages and notices. It differs from the rank in a Buffer with slots."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...

    def Dup(self) -> Communicator:
        """Make a communicator of the same ranks that shares no messages with this one."""

    def Free(self) -> None: ...

    def release(self) -> None:
        """End the use of a communicator of a `meet`, after the last step that all ranks have made. This waits for no rank."""

    def abandon(self) -> None:
        """Stop using the communicator without waiting for the other ranks."""

    def begin_private_comm(self) -> tuple[Communicator, CollectiveRequest]:
        """Return the one duplicate that the library keeps for meetings, and the request after which it can be used."""

    @property
    def last_channel(self) -> int:
        """The largest number of a channel that this rank has proposed or opened."""

    def free_channel(self, least: int) -> int:
        """Return the smallest number of a channel from `least` that this rank can open."""

    def open_channel(self, number: int) -> Communicator:
        """Make the communicator of a channel. All ranks have agreed on its number."""

    def meet(self, timeout_s: float, phase: str, hint: str) -> Communicator:
        """Wait until all ranks are here, and return a communicator for their next steps; see `TimedCollectives.meet`."""

    def dup_for_process(self) -> Communicator:
        """Make a duplicate that lives as long as the process."""

    def retain(self, *held: Any) -> None:
        """Keep requests that no caller waits for any more, and the memory that they use."""

    @property
    def relay_objection(self) -> str:
        """The reason why a relay cannot carry rows over this communicator, as an object of "the rank has"; empty if one can."""

    def sub_comm(self, ranks: Sequence[int]) -> Communicator:
        """Make a communicator of these ranks, in this order. Collective; each rank passes the ranks of its own group."""

    def ranks_on_host(self) -> list[int]:
        """Return the ranks on this host, ascending. Collective."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the value of each rank, in the order of ranks."""

    def bcast(self, value: Any, /, root: int = 0) -> Any: ...
    def Bcast(self, array: np.ndarray, /, root: int = 0) -> None: ...
    def Barrier(self) -> None: ...

    def Alltoall(self, outgoing: np.ndarray, incoming: np.ndarray, /) -> None:
        """Send row r of `outgoing` to rank r, and fill row r of `incoming` with the row from rank r."""

    def Iallgather(self, mine: np.ndarray, all_ranks: np.ndarray, /) -> CollectiveRequest:
        """Start to fill the rows of `all_ranks` with the array of each rank."""

    def finish(
        self, request: CollectiveRequest, phase: str, hint: str, timeout_s: float | None = None, waited_s: float = 0.0
    ) -> None:
        """Wait for a collective, see `TimedCollectives.finish`."""

    def timeout_error(self, missing: Sequence[int], phase: str, hint: str, timeout_s: float) -> EPTimeoutError:
        """Make the error about ranks that did not arrive."""

    def Isend(self, array: np.ndarray, /, dest: int, tag: int) -> Request: ...
    def Irecv(self, array: np.ndarray, /, source: int, tag: int) -> Request: ...

    def send_parts(self, parts: Sequence[np.ndarray], dest: int, tag: int) -> Request:
        """Start to send several arrays as one message."""

    def receive_parts(self, parts: Sequence[np.ndarray], source: int, tag: int) -> Request:
        """Start to receive one message into several arrays."""

    def can_send(self) -> bool:
        """Return whether this thread may send messages now."""

    def isend(self, value: Any, /, dest: int, tag: int) -> Request:
        """Start to send an object."""

    def iprobe(self, source: int, tag: int) -> bool:
        """Return whether a message has arrived."""

    def recv(self, *, source: int, tag: int) -> Any:
        """Receive an object that `iprobe` has found."""
