"""The messages of a relay over MPI.

Small puts travel in records: a message holds many of them, with their bytes. The bytes of a large put follow its record in a message of
their own, which the receiver takes straight into the place where they belong. The record names the tag of that message, so large puts may
overtake each other. Heartbeats, the end of a relay and its failure are messages of other kinds.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from .communicator import MEETING_TAG
from .relay_puts import Mirror, Put, PutRing, RelayPeers

MAX_INLINE_BYTES = 4 << 10  # larger puts have a message of their own
_MESSAGE_BYTES = 16 << 10
_MAX_RECEIVES, _MAX_RECEIVES_PER_RANK = 64, 4  # posted at any time; at least one for each rank
_MAX_PUTS_PER_TURN = 64  # so that a flood of small puts does not keep a turn from moving the bytes of large ones
# Messages on their way to a rank at once. A turn costs time for each, and more payloads would only keep small messages waiting. While
# these are on their way, further records gather into one message.
_MAX_MESSAGES, _MAX_PAYLOADS = 4, 8
_RECORDS_TAG, _FIRST_PAYLOAD_TAG = 1, 2
_NUM_PAYLOAD_TAGS = MEETING_TAG - _FIRST_PAYLOAD_TAG
_PUTS, _HEARTBEAT, _END, _FAILURE = range(4)
_HEADER = struct.Struct("=IIIxxxxQ")  # kind, source, number of records or bytes of the text, messages with puts so far
_RECORD = struct.Struct(
    "=QIIQQ"
)  # to, number of bytes, tag of the payload or 0, word, value; the bytes follow where the tag is 0
_MAX_TEXT = 500


@dataclass
class _Outbox:
    """What goes to one rank."""

    rank: int
    records: deque[bytes] = field(default_factory=deque)
    num_messages: int = 0  # with records, on their way
    num_payloads: int = 0  # on their way
    num_tags: int = 0  # used for payloads so far
    messages_sent: int = 0  # with records, so far
    waiting: deque[Put] = field(default_factory=deque)  # large puts, while too many payloads are on their way


class RelayTraffic:
    """Sends the puts of one rank's ring, and brings those of its peers into memory. One thread uses it.

    A class derived from this one can be a bad network: `send` sees each put of this rank, `target` says where its bytes arrive at the
    receiver, `complete` sees it there with all its bytes, and `turn` runs all the time.

    `comm` is an `MpiCommunicator` that carries no other messages.
    """

    def __init__(self, comm: Any, ring: PutRing, mirror: Mirror, peers: RelayPeers) -> None:
        self._comm, self._ring, self._mirror, self._peers = comm, ring, mirror, peers
        self._rank, num_ranks = comm.Get_rank(), comm.Get_size()
        # Each receive names its source: with MPICH 5.0.2, receives from any source missed messages that came over TCP.
        count = max(1, min(_MAX_RECEIVES_PER_RANK, _MAX_RECEIVES // num_ranks))
        sources = [source for source in range(num_ranks) for _ in range(count)]
        self._buffers = [memoryview(bytearray(_MESSAGE_BYTES)) for _ in sources]
        self._receives = [
            comm.raw.Recv_init([buffer, MPI.BYTE], *comm.at(source, _RECORDS_TAG))
            for buffer, source in zip(self._buffers, sources, strict=True)
        ]
        MPI.Prequest.Startall(self._receives)
        # One Testsome a turn looks at all requests: the posted receives, then those of `_then`, with what each completion calls.
        self._requests: list[Any] = list(self._receives)
        self._then: list[Callable[[], None] | None] = [None] * len(self._receives)
        self._outboxes = [_Outbox(rank) for rank in range(num_ranks)]
        self._with_records: dict[int, _Outbox] = {}  # by rank
        self._messages_received = [0] * num_ranks
        self._messages_at_end: dict[int, int] = {}
        self._incoming: dict[int, Any] = {}  # receives of payloads that have not arrived
        self._num_receives = 0
        self._heartbeats: dict[int, Any] = {}
        self.puts_sent = self.bytes_sent = self.puts_received = self.bytes_received = 0

    # --- a turn ------------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Send what is in the ring, receive what has arrived, and return whether there was anything."""
        puts = self._ring.take(_MAX_PUTS_PER_TURN)
        for put in puts:
            self.send(put)
        for box in list(self._with_records.values()):
            self._send_records(box)
        completed = MPI.Request.Testsome(self._requests)
        if completed:
            self._finish(completed)
        return bool(puts or completed)

    @property
    def is_sending(self) -> bool:
        """Whether bytes are on their way."""
        return len(self._requests) > len(self._receives)

    @property
    def all_sent(self) -> bool:
        """Whether all puts that the ring holds have left this rank."""
        return not (self._ring.is_next_complete() or self._with_records or self.num_outgoing)

    @property
    def all_received(self) -> bool:
        """Whether everything has arrived from the relays that ended."""
        here = all(self._messages_received[rank] == count for rank, count in self._messages_at_end.items())
        return here and not self._incoming

    @property
    def num_incoming(self) -> int:
        """Large puts of other ranks whose bytes have not arrived."""
        return len(self._incoming)

    @property
    def num_outgoing(self) -> int:
        """Messages to other ranks that MPI has not finished."""
        return len(self._requests) - len(self._receives) - len(self._incoming)

    def _finish(self, completed: Sequence[int]) -> None:
        num_receives = len(self._receives)
        arrived = [i for i in completed if i < num_receives]
        for i in arrived:
            self._read_message(self._buffers[i])
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

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def send(self, put: Put) -> None:
        """Send a put of this rank."""
        if not 0 <= put.rank < len(self._outboxes):
            raise ValueError(f"a put names rank {put.rank}; expected 0 to {len(self._outboxes) - 1}")
        self.puts_sent += 1
        self.bytes_sent += put.num_bytes
        box = self._outboxes[put.rank]
        if put.num_bytes <= MAX_INLINE_BYTES:
            self._add_record(box, put, 0, bytes(self._mirror.part(put.from_, put.num_bytes)) if put.num_bytes else b"")
            self._ring.mark_sent(put)
        elif box.num_payloads < _MAX_PAYLOADS:
            self._send_payload(box, put)
        else:
            box.waiting.append(put)

    def _send_payload(self, box: _Outbox, put: Put) -> None:
        tag = _FIRST_PAYLOAD_TAG + box.num_tags % _NUM_PAYLOAD_TAGS
        box.num_tags += 1
        box.num_payloads += 1
        self._add_record(box, put, tag, b"")

        def sent() -> None:
            box.num_payloads -= 1
            self._ring.mark_sent(put)
            if box.waiting:
                self._send_payload(box, box.waiting.popleft())

        self._watch(self._isend(self._mirror.part(put.from_, put.num_bytes), box.rank, tag), sent)

    def _add_record(self, box: _Outbox, put: Put, tag: int, content: bytes) -> None:
        box.records.append(_RECORD.pack(put.to, put.num_bytes, tag, put.word, put.value) + content)
        self._with_records[box.rank] = box

    def _send_records(self, box: _Outbox) -> None:
        """Send records to a rank, as few messages as possible."""

        def sent() -> None:
            box.num_messages -= 1

        while box.records and box.num_messages < _MAX_MESSAGES:
            records, room = [box.records.popleft()], _MESSAGE_BYTES - _HEADER.size
            room -= len(records[0])
            while box.records and len(box.records[0]) <= room:
                records.append(box.records.popleft())
                room -= len(records[-1])
            box.num_messages += 1
            box.messages_sent += 1
            self._watch(self._send_message(box.rank, _PUTS, len(records), b"".join(records)), sent)
        if not box.records:
            del self._with_records[box.rank]

    def _send_message(self, rank: int, kind: int, count: int = 0, content: bytes = b"") -> Any:
        message = _HEADER.pack(kind, self._rank, count, self._outboxes[rank].messages_sent) + content
        return self._isend(message, rank, _RECORDS_TAG)

    def _isend(self, content: bytes | memoryview, rank: int, tag: int) -> Any:
        return self._comm.raw.Isend([content, MPI.BYTE], *self._comm.at(rank, tag))

    def send_heartbeats(self) -> None:
        """Tell all ranks that this relay runs."""
        for rank in self._peers.ranks:
            if not self._heartbeats.get(rank):  # a request that is complete counts as false
                self._heartbeats[rank] = self._send_message(rank, _HEARTBEAT)
                self._watch(self._heartbeats[rank])

    def send_end(self) -> None:
        """Tell all ranks that this rank sends no put any more."""
        for rank in self._peers.ranks:
            self._watch(self._send_message(rank, _END))

    def send_failure(self, cause: str) -> None:
        """Tell all ranks why this relay cannot go on."""
        text = cause.encode()[:_MAX_TEXT]
        for rank in self._peers.ranks:
            self._watch(self._send_message(rank, _FAILURE, len(text), text))

    # --- receiving ---------------------------------------------------------------------------------------------------------------

    def target(self, put: Put) -> memoryview:
        """Return the memory that takes the bytes of a put from another rank."""
        return self._mirror.part(put.to, put.num_bytes)

    def complete(self, put: Put) -> None:
        """Write the word of a put from another rank, whose bytes are all in their target."""
        self._mirror.store(put.word, put.value)

    def _read_message(self, message: memoryview) -> None:
        kind, source, count, messages = _HEADER.unpack_from(message)
        self._peers.heard(source)
        if kind == _PUTS:
            self._messages_received[source] += 1
            self._read_records(source, message, count)
        elif kind == _END:
            self._messages_at_end[source] = messages
            self._peers.ended.add(source)
        elif kind == _FAILURE:
            text = bytes(message[_HEADER.size : _HEADER.size + count])
            self._peers.failed(source, text.decode(errors="replace"))

    def _read_records(self, source: int, message: memoryview, count: int) -> None:
        start = _HEADER.size
        for _ in range(count):
            to, num_bytes, tag, word, value = _RECORD.unpack_from(message, start)
            start += _RECORD.size
            put = Put(source, to, 0, num_bytes, word, value)
            if tag:
                self._receive_payload(put, tag)
                continue
            if num_bytes:
                self.target(put)[:] = message[start : start + num_bytes]
                start += num_bytes
            self._received(put)

    def _receive_payload(self, put: Put, tag: int) -> None:
        number = self._num_receives = self._num_receives + 1

        def arrived() -> None:
            del self._incoming[number]
            self._peers.heard(put.rank)
            self._received(put)

        self._incoming[number] = self._comm.raw.Irecv([self.target(put), MPI.BYTE], *self._comm.at(put.rank, tag))
        self._watch(self._incoming[number], arrived)

    def _received(self, put: Put) -> None:
        self.puts_received += 1
        self.bytes_received += put.num_bytes
        self.complete(put)

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Take back all receives that no message has matched."""
        for request in (*self._receives, *self._incoming.values()):
            with suppress(MPI.Exception):  # a failure may have left a receive that was not started again
                request.Cancel()

    def is_finished(self) -> bool:
        """Return whether MPI uses none of the memory any more. Only after `cancel`."""
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        for request in self._receives:
            if request:
                request.Free()
        return True
