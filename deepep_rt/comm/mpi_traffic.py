"""The messages of a relay over MPI.

The bytes of a large put follow its record in a message of their own, which the receiver takes straight into its place. The record names the
tag of that message, so large puts may overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from ..errors import EPUnavailableError
from .communicator import MEETING_TAG
from .relay_puts import Mirror, Put, PutRing, RelayPeers
from .relay_traffic import Outbox, RelayTraffic

_MAX_RECEIVES, _MAX_RECEIVES_PER_RANK = 64, 4  # posted at any time; at least one for each rank
_RECORDS_TAG, _FIRST_PAYLOAD_TAG = 1, 2
_NUM_PAYLOAD_TAGS = MEETING_TAG - _FIRST_PAYLOAD_TAG


class MpiTraffic(RelayTraffic):
    """See `RelayTraffic`. `comm` is an `MpiCommunicator`; a duplicate of it carries the messages. Collective.

    Raises:
        EPUnavailableError: if `comm` is of another kind, or MPI does not allow several threads. The ranks agree on
            `comm.relay_objection` before.
    """

    message_bytes = 16 << 10

    def __init__(self, comm: Any, ring: PutRing, mirror: Mirror, peers: RelayPeers) -> None:
        if comm.relay_objection:
            raise EPUnavailableError(
                f"rank {comm.Get_rank()} has {comm.relay_objection}; expected MPI with MPI_THREAD_MULTIPLE, which the relay of "
                f"transport='mpi' needs. Start the program with mpirun, pass an mpi4py communicator, and leave mpi4py.rc.thread_level "
                f"at 'multiple'."
            )
        super().__init__(comm.Get_rank(), comm.Get_size(), ring, mirror, peers)
        self._comm = comm.Dup()
        num_ranks = comm.Get_size()
        # Each receive names its source: with MPICH 5.0.2, receives from any source missed messages that came over TCP.
        count = max(1, min(_MAX_RECEIVES_PER_RANK, _MAX_RECEIVES // num_ranks))
        sources = [source for source in range(num_ranks) for _ in range(count)]
        self._buffers = [memoryview(bytearray(self.message_bytes)) for _ in sources]
        self._receives = [
            self._comm.raw.Recv_init([buffer, MPI.BYTE], *self._comm.at(source, _RECORDS_TAG))
            for buffer, source in zip(self._buffers, sources, strict=True)
        ]
        MPI.Prequest.Startall(self._receives)
        # One Testsome a turn looks at all requests: the posted receives, then those of `_then`, with what each completion calls.
        self._requests: list[Any] = list(self._receives)
        self._then: list[Callable[[], None] | None] = [None] * len(self._receives)
        self._incoming: dict[int, Any] = {}  # receives of payloads that have not arrived
        self._num_receives = 0

    # --- a turn ------------------------------------------------------------------------------------------------------------------

    def move(self) -> bool:
        completed = MPI.Request.Testsome(self._requests)
        if completed:
            self._finish(completed)
        return bool(completed)

    @property
    def is_sending(self) -> bool:
        return len(self._requests) > len(self._receives)

    @property
    def num_incoming(self) -> int:
        return len(self._incoming)

    @property
    def num_outgoing(self) -> int:
        return len(self._requests) - len(self._receives) - len(self._incoming)

    def _finish(self, completed: Sequence[int]) -> None:
        num_receives = len(self._receives)
        arrived = [i for i in completed if i < num_receives]
        for i in arrived:
            self.read_message(self._buffers[i])
        if arrived:
            MPI.Prequest.Startall([self._receives[i] for i in arrived])
        done = [i for i in completed if i >= num_receives]
        if done:
            then = [self._then[i] for i in done]
            for i in reversed(done if len(done) == 1 else sorted(done)):  # the last one takes the place of the one that is done
                self._requests[i], self._then[i] = self._requests[-1], self._then[-1]
                self._requests.pop(), self._then.pop()
            for call in then:
                if call is not None:
                    call()

    def _watch(self, request: Any, then: Callable[[], None] | None = None) -> None:
        self._requests.append(request)
        self._then.append(then)

    # --- messages and payloads ---------------------------------------------------------------------------------------------------

    def post(self, rank: int, message: bytes, then: Callable[[], None] | None = None) -> None:
        self._watch(self._isend(message, rank, _RECORDS_TAG), then)

    def _isend(self, content: bytes | memoryview, rank: int, tag: int) -> Any:
        return self._comm.raw.Isend([content, MPI.BYTE], *self._comm.at(rank, tag))

    def send_payload(self, box: Outbox, put: Put, sent: Callable[[], None]) -> None:
        tag = _FIRST_PAYLOAD_TAG + box.num_tags % _NUM_PAYLOAD_TAGS
        box.num_tags += 1
        self.add_record(box, put, tag)
        self._watch(self._isend(self._mirror.part(put.from_, put.num_bytes), box.rank, tag), sent)

    def receive_payload(self, put: Put, tag: int) -> None:
        number = self._num_receives = self._num_receives + 1

        def arrived() -> None:
            del self._incoming[number]
            self._peers.heard(put.rank)
            self.received(put)

        self._incoming[number] = self._comm.raw.Irecv([self.target(put), MPI.BYTE], *self._comm.at(put.rank, tag))
        self._watch(self._incoming[number], arrived)

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Take back all receives that no message has matched."""
        for request in (*self._receives, *self._incoming.values()):
            with suppress(MPI.Exception):  # a failure may have left a receive that was not started again
                request.Cancel()

    def is_finished(self) -> bool:
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        for request in self._receives:
            if request:
                request.Free()
        return True

    def leave(self, is_sound: bool) -> None:
        if is_sound:
            self._comm.Free()
        else:
            self._comm.retain(self)
            self._comm.abandon()
