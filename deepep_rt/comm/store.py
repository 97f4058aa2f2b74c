"""A communicator over the key-value store of torch.distributed, for processes that mpirun did not start.

It has the methods of mpi4py's Intracomm that Buffers use. A message is a key, and its receiver deletes it. A collective leaves one key per
rank. These keys go when a later collective shows that all ranks have read them. No call blocks inside of the store, because waits have
their own limits.

Values travel as JSON. Any process that reaches the store's port can write to it. Reading a pickle would run its code. Reading these values
runs no code, and checks every part.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..errors import EPPeerError, EPUnavailableError
from .timed_collectives import TimedCollectives, wait_all

_DTYPE = re.compile(r"\|b1|[<>|][iuf][1248]")  # of arrays
_FREE_S = 10.0
_MAX_VALUE_BYTES = 4 << 20  # a TCPStore drops clients that send more than twice as much
_ALLTOALL_TAG = 0
_NO_MESSAGE = b"none"  # stands for a message that an exception stopped


def pack(value: Any) -> bytes:
    """Return a value as bytes: numbers, text, bytes, arrays, and lists, tuples and dicts of them. Raise TypeError for other types."""
    return json.dumps(_plain(value)).encode()


def unpack(data: bytes) -> Any:
    """Return the value that bytes stand for. Raise ValueError if `pack` did not make them."""
    try:
        return _value(json.loads(data))
    except RecursionError as error:
        raise ValueError("too many nested values") from error


def _plain(value: Any) -> Any:
    """Return a value as one that JSON can hold. A JSON object has one member, whose name is the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(
        f"value=<{type(value).__name__}>; expected numbers, text, bytes, arrays, or lists, tuples and dicts of them. Convert it."
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError("an object without one type")
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return _bytes(content)
    if kind == "array":
        return _array(content)
    if kind not in ("tuple", "dict") or not isinstance(content, list):
        raise ValueError("an object of another type")
    if kind == "tuple":
        return tuple(_value(item) for item in content)
    return {_key(key): _value(item) for key, item in map(_pair, content)}


def _pair(content: Any) -> tuple[Any, Any]:
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("a dict entry without a key and a value")
    return content[0], content[1]


def _key(plain: Any) -> Any:
    if not isinstance(plain, str | int):
        raise ValueError("a dict key of another type")
    return plain


def _bytes(content: Any) -> bytes:
    if not isinstance(content, str):
        raise ValueError("bytes of another type")
    return base64.b64decode(content, validate=True)


def _array(content: Any) -> np.ndarray:
    if not isinstance(content, list) or len(content) != 3:
        raise ValueError("an array without dtype, shape and bytes")
    dtype, shape, data = content[0], content[1], _bytes(content[2])
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError("an array of another dtype")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("an array without a shape")
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError("an array of another size")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


class StoreCommunicator(TimedCollectives):
    """The ranks of a group. All ranks make it at the same time, and make the same calls.

    Args:
        store: An object with the methods `set`, `get`, `check` and `delete_key` of `torch.distributed.Store`. If it has `multi_get`, as
            `has_extended_api` says, a collective takes one request instead of one for each rank.
        name: Prefix of all keys. It is the same on all ranks, and no other communicator has it.
        owner: An object that must live as long as this one, such as the owner of the store.
        numbers: The numbers of the ranks in a Buffer with slots. Default: they are the ranks.
    """

    transport_name = "a store"
    outlives_owner = False
    relay_objection = "a communicator over the store of torch.distributed, which carries no rows"

    def __init__(
        self, store: Any, name: str, rank: int, size: int, owner: Any = None, numbers: Sequence[int] | None = None
    ) -> None:
        self._store, self._name, self.rank, self.size, self._owner = store, name, rank, size, owner
        self.numbers = range(size) if numbers is None else tuple(numbers)
        self._num_duplicates = self._num_collectives = 0
        # Collectives whose keys of this rank may not be read yet: (number of the collective, key).
        self._unread: list[tuple[int, str]] = []
        self._unread_of_origin: list[tuple[int, str]] = []  # of the communicator that this one duplicates
        self._sent: Counter[tuple[int, int]] = Counter()  # messages by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._num_pieces: dict[tuple[int, int], bytes] = {}  # of the next message by peer and tag, as the store has it
        self._private_comm: StoreCommunicator | None = None
        self._unread_of_channels: list[tuple[int, str]] = []
        self.last_channel = 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Dup(self) -> StoreCommunicator:
        """Make a communicator that shares no messages with this one. It needs no message."""
        return self._duplicate(self._owner)

    def _duplicate(self, owner: Any) -> StoreCommunicator:
        self._num_duplicates += 1
        made = StoreCommunicator(self._store, f"{self._name}.{self._num_duplicates}", self.rank, self.size, owner, self.numbers)
        made._unread_of_origin, made.timeout_s, made.heard = self._unread, self.timeout_s, self.heard
        return made

    def sub_comm(self, ranks: Sequence[int]) -> StoreCommunicator:
        """Make a communicator of these ranks, in this order. All ranks call this; each passes the ranks of its own group."""
        self._num_duplicates += 1
        name = f"{self._name}.{self._num_duplicates}.{ranks[0]}"
        numbers = [self.numbers[rank] for rank in ranks]
        made = StoreCommunicator(self._store, name, ranks.index(self.rank), len(ranks), self._owner, numbers)
        made.timeout_s, made.heard = self.timeout_s, self.heard
        return made

    def begin_private_comm(self) -> tuple[StoreCommunicator, Request]:
        """Return the duplicate that belongs to this communicator, and a complete request."""
        if self._private_comm is None:  # its name must not depend on the number of duplicates
            name = f"{self._name}.0"
            self._private_comm = StoreCommunicator(self._store, name, self.rank, self.size, self._owner, self.numbers)
        return self._private_comm, Request(lambda: (True, None))

    def free_channel(self, least: int) -> int:
        """Return the number of the next channel: a store has names for any number of them."""
        self.last_channel = max(self.last_channel, least)
        return least

    def open_channel(self, number: int) -> StoreCommunicator:
        """Make the communicator of a channel. All ranks have agreed on its number."""
        name = f"{self._name}/{number}"
        made = StoreCommunicator(self._store, name, self.rank, self.size, self._owner, self.numbers)
        # Its first collective shows that all ranks have left the earlier channels, and deletes their keys.
        self._unread_of_channels[:] = [(0, key) for _, key in self._unread_of_channels]
        made._unread = self._unread_of_channels
        return made

    def release(self) -> None:
        """Do nothing: the next channel deletes the last keys of this one."""

    def dup_for_process(self) -> StoreCommunicator:
        """Make a duplicate that may live as long as the process. It does not keep the owner of the store alive, and hears of no rank."""
        made = self._duplicate(None)
        made.heard = None
        return made

    def retain(self, *held: Any) -> None:
        """Keep nothing: the store copies values, so no request uses memory of the caller."""

    def Free(self) -> None:
        """Wait until all ranks have arrived: the store must not end while a rank still reads from it."""
        with suppress(EPUnavailableError, EPPeerError):  # it has ended, after all other ranks arrived; or a rank has left
            wait_all([self._start_allgather(None)], _FREE_S, self.heard)
        self._unread_of_origin += [(0, key) for _, key in self._unread]  # its next collective deletes them

    def abandon(self) -> None:
        """Stop using the communicator. No rank waits for another one."""
        with suppress(EPUnavailableError):
            self._start_allgather(None)

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of each rank, in the order of ranks."""
        request = self._start_allgather(value)
        self._finish_step(request, "an allgather")
        return request.result

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        array[...] = self.bcast(array if self.rank == root else None, root)

    def Barrier(self) -> None:
        self.allgather(None)

    def Alltoall(self, outgoing: np.ndarray, incoming: np.ndarray) -> None:
        """Send row r of `outgoing` to rank r, and fill row r of `incoming` with the row from rank r."""
        requests = []
        for peer in range(self.size):
            self.Isend(outgoing[peer], peer, _ALLTOALL_TAG)
            requests.append(self.Irecv(incoming[peer], peer, _ALLTOALL_TAG))
        for request in requests:
            self._finish_step(request, "an all-to-all")

    def Iallgather(self, mine: np.ndarray, all_ranks: np.ndarray) -> Request:
        """Start to fill the rows of `all_ranks` with the array of each rank."""

        def fill(values: list[Any]) -> None:
            all_ranks[...] = np.stack(values)

        return self._start_allgather(mine, fill)

    def _start_allgather(self, value: Any, then: Callable[[list[Any]], None] = lambda values: None) -> Request:
        self._num_collectives = number = self._num_collectives + 1
        keys = [f"{self._name}/all/{number}/{rank}" for rank in range(self.size)]
        self._ask("set", keys[self.rank], pack(value))
        self._unread.append((number, keys[self.rank]))

        def poll() -> tuple[bool, Any]:
            if not self._ask("check", keys):
                return False, None
            values = []
            for key, data in zip(keys, self._get_all(keys), strict=True):
                with self._checked(key):
                    values.append(unpack(data))
            # All ranks have joined this collective, so they have read the keys of earlier ones.
            for key in [key for earlier, key in self._unread if earlier < number]:
                self._ask("delete_key", key)
            self._unread[:] = [(later, key) for later, key in self._unread if later >= number]
            with self._checked(keys[0]):
                then(values)
            return True, values

        return Request(poll, lambda: [rank for rank, key in enumerate(keys) if not self._ask("check", [key])])

    def _get_all(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys, in one request if the store can do that."""
        if getattr(self._store, "has_extended_api", bool)():
            return self._ask("multi_get", keys)
        return [self._ask("get", key) for key in keys]

    # --- messages ----------------------------------------------------------------------------------------------------------------

    def Isend(self, array: np.ndarray, dest: int, tag: int) -> Request:
        return self.send_parts([array], dest, tag)

    def Irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        return self.receive_parts([array], source, tag)

    def send_parts(self, parts: Sequence[np.ndarray], dest: int, tag: int) -> Request:
        """Send several arrays as one message."""
        self._send(b"".join(part.tobytes() for part in parts), dest, tag)
        return Request(lambda: (True, None))

    def receive_parts(self, parts: Sequence[np.ndarray], source: int, tag: int) -> Request:
        """Start to receive one message into several arrays. There may be one such request per source and tag."""

        def poll() -> tuple[bool, Any]:
            if not self.iprobe(source, tag):
                return False, None
            key = self._key(source, self.rank, tag, self._received[source, tag])
            data, start = self._receive(source, tag), 0
            with self._checked(key):
                if len(data) != sum(part.nbytes for part in parts):
                    raise ValueError(f"{len(data)} bytes")
            for part in parts:
                bits = np.frombuffer(data, np.uint8, part.nbytes, start)
                part[...] = bits.view(part.dtype).reshape(part.shape)
                start += part.nbytes
            return True, None

        return Request(poll, lambda: [source])

    def isend(self, value: Any, dest: int, tag: int) -> Request:
        """Send an object. The request is complete when the object was received."""
        key = self._send(pack(value), dest, tag)
        return Request(lambda: (not self._ask("check", [key]), None))

    def iprobe(self, source: int, tag: int) -> bool:
        """Return whether a message has arrived."""
        while self._ask("check", [key := self._key(source, self.rank, tag, self._received[source, tag])]):
            if (source, tag) not in self._num_pieces:
                self._num_pieces[source, tag] = self._ask("get", key)
            if self._num_pieces[source, tag] != _NO_MESSAGE:
                return True
            self._receive(source, tag)
        return False

    def recv(self, source: int, tag: int) -> Any:
        """Receive an object that `iprobe` has found."""
        key = self._key(source, self.rank, tag, self._received[source, tag])
        with self._checked(key):
            return unpack(self._receive(source, tag))

    def _send(self, data: bytes, dest: int, tag: int) -> str:
        key = self._key(self.rank, dest, tag, self._sent[dest, tag])
        self._sent[dest, tag] += 1
        pieces = [data[start : start + _MAX_VALUE_BYTES] for start in range(0, len(data), _MAX_VALUE_BYTES)]
        try:
            for i, piece in enumerate(pieces):
                self._ask("set", f"{key}/{i}", piece)
            self._ask("set", key, str(len(pieces)).encode())  # last, so that all pieces are there when a receiver finds it
        except BaseException:
            self._ask("set", key, _NO_MESSAGE)  # the receiver counts messages too
            raise
        return key

    def _receive(self, source: int, tag: int) -> bytes:
        key = self._key(source, self.rank, tag, self._received[source, tag])
        self._received[source, tag] += 1
        num_pieces = self._num_pieces.pop((source, tag), None) or self._ask("get", key)
        with self._checked(key):
            keys = [f"{key}/{i}" for i in range(0 if num_pieces == _NO_MESSAGE else int(num_pieces))]
        data = b"".join(self._ask("get", piece) for piece in keys)
        with suppress(EPUnavailableError):  # the store may end as soon as the sender sees that its message was read
            for used in (*keys, key):
                self._ask("delete_key", used)
        return data

    def _key(self, source: int, dest: int, tag: int, number: int) -> str:
        return f"{self._name}/{source}>{dest}/{tag}/{number}"

    @contextmanager
    def _checked(self, key: str) -> Iterator[None]:
        """Turn errors of the block into one about a wrong value under `key`: any process could have written it."""
        try:
            yield
        except (ValueError, TypeError, OverflowError) as error:
            raise EPUnavailableError(
                f"rank {self.rank}: the store of torch.distributed holds a value under {key} that no rank of this Buffer wrote "
                f"({type(error).__name__}); expected a store for this program alone. Check whether another program uses the same port."
            ) from error

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise EPUnavailableError(
                f"rank {self.rank}: the store of torch.distributed does not answer ({str(error).splitlines()[0]}); expected the process "
                f"that holds it to run. Check whether that process, often rank 0, has ended."
            ) from error


class Request:
    """A message or a collective that was started. `poll` returns whether it is complete, and its result."""

    def __init__(self, poll: Callable[[], tuple[bool, Any]], missing_ranks: Callable[[], list[int]] = list) -> None:
        self._poll, self._is_over, self.missing_ranks = poll, False, missing_ranks
        self.result: Any = None

    def __bool__(self) -> bool:
        return not self._is_over

    def Test(self) -> bool:
        if not self._is_over:
            self._is_over, self.result = self._poll()
        return self._is_over

    def Cancel(self) -> None:
        self._is_over = True
