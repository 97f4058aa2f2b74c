"""The messages of a relay.

Small puts travel in records: a message holds many of them, with their bytes. Heartbeats, the end of a relay and its failure are messages of
other kinds. The bytes of a large put travel apart, straight into the place where they belong. `mpi_traffic` and `nixl_traffic` send
all this.
"""

from __future__ import annotations

import functools
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .relay_puts import Mirror, Put, PutRing, RelayPeers

MAX_INLINE_BYTES = 4 << 10  # larger puts travel apart
_MAX_PUTS_PER_TURN = 64  # so that a flood of small puts does not keep a turn from moving the bytes of large ones
# Messages on their way to a rank at once. A turn costs time for each, and more payloads would only keep small messages waiting. While
# these are on their way, further records gather into one message.
_MAX_MESSAGES, _MAX_PAYLOADS = 4, 8
_PUTS, _HEARTBEAT, _END, _FAILURE = range(4)
_HEADER = struct.Struct("=IIIxxxxQ")  # kind, source, number of records or bytes of the text, messages with puts so far
_RECORD = struct.Struct(
    "=QIIQQ"
)  # to, number of bytes, tag of the payload or 0, word, value; the bytes follow where the tag is 0
INLINE = 0
"""The tag of a record with its bytes. Others are those of payloads, which travel apart."""
_MAX_TEXT = 500


@dataclass
class Outbox:
    """What goes to one rank."""

    rank: int
    records: deque[bytes] = field(default_factory=deque)
    num_messages: int = 0  # with records, on their way
    num_payloads: int = 0  # on their way
    num_tags: int = 0  # given to payloads so far
    messages_sent: int = 0  # with records, so far
    waiting: deque[Put] = field(default_factory=deque)  # large puts, while too many payloads are on their way


class RelayTraffic(ABC):
    """Sends the puts of one rank's ring, and brings those of its peers into memory. One thread uses it.

    A class derived from those that send can be a bad network: `send` sees each put of this rank, `target` says where bytes that travel with
    their record arrive at the receiver, `complete` sees a put there with all its bytes, and `turn` runs all the time.
    """

    message_bytes: int
    """The most bytes of a message."""

    def __init__(self, rank: int, num_ranks: int, ring: PutRing, mirror: Mirror, peers: RelayPeers) -> None:
        self._rank, self._ring, self._mirror, self._peers = rank, ring, mirror, peers
        self._outboxes = [Outbox(rank) for rank in range(num_ranks)]
        self._with_records: dict[int, Outbox] = {}  # by rank
        self._messages_received = [0] * num_ranks
        self._messages_at_end: dict[int, int] = {}
        self._heartbeats = set[int]()  # the ranks to which one is on its way
        self.puts_sent = self.bytes_sent = self.puts_received = self.bytes_received = 0

    # --- what derived classes send -----------------------------------------------------------------------------------------------

    @abstractmethod
    def post(self, rank: int, message: bytes, then: Callable[[], None] | None = None) -> None:
        """Start to send a message to a rank, and call `then` once it has left."""

    @abstractmethod
    def send_payload(self, box: Outbox, put: Put, sent: Callable[[], None]) -> None:
        """Start to send a large put, and call `sent` once its bytes may change."""

    @abstractmethod
    def receive_payload(self, put: Put, tag: int) -> None:
        """Receive the bytes of a large put whose record has arrived, and call `received` once all are there."""

    @abstractmethod
    def move(self) -> bool:
        """Let messages move, read those that have arrived with `read_message`, and return whether there was anything."""

    @property
    @abstractmethod
    def is_sending(self) -> bool:
        """Whether bytes are on their way."""

    @property
    @abstractmethod
    def num_incoming(self) -> int:
        """Large puts of other ranks whose bytes have not arrived."""

    @property
    @abstractmethod
    def num_outgoing(self) -> int:
        """Messages to other ranks that are not finished."""

    @abstractmethod
    def cancel(self) -> None:
        """Take back what has not started."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Return whether nothing uses the memory any more. Only after `cancel`."""

    @abstractmethod
    def leave(self, is_sound: bool) -> None:
        """Give up the connections. `is_sound`: all ranks have ended, and no message is on its way."""

    # --- a turn ------------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Send what is in the ring, receive what has arrived, and return whether there was anything."""
        puts = self._ring.take(_MAX_PUTS_PER_TURN)
        for put in puts:
            self.send(put)
        moved = self.move()
        for box in list(self._with_records.values()):  # those of puts, and of payloads that have moved
            self._send_records(box)
        return moved or bool(puts)

    @property
    def all_sent(self) -> bool:
        """Whether all puts that the ring holds have left this rank."""
        return not (self._ring.is_next_complete() or self._with_records or self.num_outgoing)

    @property
    def all_received(self) -> bool:
        """Whether everything has arrived from the relays that ended."""
        here = all(self._messages_received[rank] == count for rank, count in self._messages_at_end.items())
        return here and not self.num_incoming

    # --- sending -----------------------------------------------------------------------------------------------------------------

    def send(self, put: Put) -> None:
        """Send a put of this rank."""
        if not 0 <= put.rank < len(self._outboxes):
            raise ValueError(f"a put names rank {put.rank}; expected 0 to {len(self._outboxes) - 1}")
        self.puts_sent += 1
        self.bytes_sent += put.num_bytes
        box = self._outboxes[put.rank]
        if put.num_bytes <= MAX_INLINE_BYTES:
            self.add_record(box, put, INLINE, bytes(self._mirror.part(put.from_, put.num_bytes)) if put.num_bytes else b"")
            self._ring.mark_sent(put)
        elif box.num_payloads < _MAX_PAYLOADS:
            self._send_payload(box, put)
        else:
            box.waiting.append(put)

    def _send_payload(self, box: Outbox, put: Put) -> None:
        box.num_payloads += 1

        def sent() -> None:
            box.num_payloads -= 1
            self._ring.mark_sent(put)
            if box.waiting:
                self._send_payload(box, box.waiting.popleft())

        self.send_payload(box, put, sent)

    def add_record(self, box: Outbox, put: Put, tag: int, content: bytes = b"") -> None:
        """Let the record of a put travel with the next message. `content`: its bytes, if the tag is INLINE."""
        box.records.append(_RECORD.pack(put.to, put.num_bytes, tag, put.word, put.value) + content)
        self._with_records[box.rank] = box

    def _send_records(self, box: Outbox) -> None:
        """Send records to a rank, as few messages as possible."""

        def sent() -> None:
            box.num_messages -= 1

        while box.records and box.num_messages < _MAX_MESSAGES:
            records, room = [box.records.popleft()], self.message_bytes - _HEADER.size
            room -= len(records[0])
            while box.records and len(box.records[0]) <= room:
                records.append(box.records.popleft())
                room -= len(records[-1])
            box.num_messages += 1
            self.post(box.rank, self.message_of_puts(box, records), sent)
        if not box.records:
            del self._with_records[box.rank]

    def message_of_puts(self, box: Outbox, records: Sequence[bytes]) -> bytes:
        """Return a message with records, and count it."""
        box.messages_sent += 1
        return self._message(box.rank, _PUTS, len(records), b"".join(records))

    def _message(self, rank: int, kind: int, count: int = 0, content: bytes = b"") -> bytes:
        return _HEADER.pack(kind, self._rank, count, self._outboxes[rank].messages_sent) + content

    def send_heartbeats(self) -> None:
        """Tell all ranks that this relay runs."""
        for rank in self._peers.ranks:
            if rank not in self._heartbeats:
                self._heartbeats.add(rank)
                self.post(rank, self._message(rank, _HEARTBEAT), functools.partial(self._heartbeats.discard, rank))

    def send_end(self) -> None:
        """Tell all ranks that this rank sends no put any more."""
        for rank in self._peers.ranks:
            self.post(rank, self._message(rank, _END))

    def send_failure(self, cause: str) -> None:
        """Tell all ranks why this relay cannot go on."""
        text = cause.encode()[:_MAX_TEXT]
        for rank in self._peers.ranks:
            self.post(rank, self._message(rank, _FAILURE, len(text), text))

    # --- receiving ---------------------------------------------------------------------------------------------------------------

    def target(self, put: Put) -> memoryview:
        """Return the memory that takes the bytes of a put from another rank, which travel with its record or follow it."""
        return self._mirror.part(put.to, put.num_bytes)

    def complete(self, put: Put) -> None:
        """Write the word of a put from another rank, whose bytes are all in their target."""
        self._mirror.store(put.word, put.value)

    def read_message(self, message: memoryview) -> None:
        """Do what a message from another rank says."""
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
            if tag != INLINE:
                self.receive_payload(put, tag)
                continue
            if num_bytes:
                self.target(put)[:] = message[start : start + num_bytes]
                start += num_bytes
            self.received(put)

    def received(self, put: Put) -> None:
        """Note a put of another rank, whose bytes are all there."""
        self.puts_received += 1
        self.bytes_received += put.num_bytes
        self.complete(put)
