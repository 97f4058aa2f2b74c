"""Ranks without MPI: a communicator over the key-value store of torch.distributed, for processes that mpirun did not start.

It has the methods of mpi4py's Intracomm that Buffers use. Values travel as data, not as pickles (`store_values`). A message is a key
that its receiver deletes; a collective leaves a key of each rank, which goes when a later one shows that all have read it. Nobody waits
inside of the store, where waits have limits of their own.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EPUnavailableError
from . import store_values
from .timed_collectives import TimedCollectives

_LONGEST_PAUSE_S = 2e-3
_PARTING_S = 10.0
_MOST_BYTES = 4 << 20  # of a value: a TCPStore drops clients that send more than twice as much
_ALLTOALL_TAG = 0


class StoreCommunicator(TimedCollectives):
    """The ranks of a group. All of them make one at the same time, and make the same calls.

    Args:
        store: With the methods `set`, `get`, `check` and `delete_key` of `torch.distributed.Store`.
        name: Begins all keys; the same on all ranks, and nobody else's.
        rank: The number of this process.
        size: How many there are.
        kept: Kept as long as this is: whoever holds the store shall not end it while it is used.
    """

    transport_name = "a store"
    outlives_owner = False

    def __init__(self, store: Any, name: str, rank: int, size: int, kept: Any = None) -> None:
        self._store, self._name, self.rank, self.size, self._kept = store, name, rank, size, kept
        self._num_duplicates = self._num_collectives = 0
        # Keys of this rank from collectives that some rank may not have read yet, and the numbers of the collectives.
        self._left: list[tuple[int, str]] = []
        self._left_after: list[tuple[int, str]] = []  # where they go when this is freed: to what this is a duplicate of
        self._sent: Counter[tuple[int, int]] = Counter()  # messages by peer and tag
        self._received: Counter[tuple[int, int]] = Counter()
        self._own: StoreCommunicator | None = None

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Dup(self) -> StoreCommunicator:
        """One that shares no messages with this one; nothing is sent for it."""
        return self._duplicate(self._kept)

    def _duplicate(self, kept: Any) -> StoreCommunicator:
        self._num_duplicates += 1
        made = StoreCommunicator(self._store, f"{self._name}.{self._num_duplicates}", self.rank, self.size, kept)
        made._left_after, made.timeout_s = self._left, self.timeout_s
        return made

    def begin_private_comm(self) -> tuple[StoreCommunicator, Request]:
        """A duplicate that is kept, and a request that is over."""
        if self._own is None:
            self._own = self.Dup()
        return self._own, Request(lambda: (True, None))

    def dup_for_process(self) -> StoreCommunicator:
        """A duplicate for as long as the process lives, which keeps no store alive that its owner has closed."""
        return self._duplicate(None)

    def retain(self, *held: Any) -> None:
        """Nothing goes on by itself here: what nobody waits for needs not be held on to."""

    def Free(self) -> None:
        """Part: whoever holds the store must not end while others look for their last keys there."""
        with suppress(EPUnavailableError):  # it has ended: all the others were there
            self._start_allgather(None).wait(_PARTING_S)
        self._left_after += [(0, key) for _, key in self._left]  # they go with its next collective

    def abandon(self) -> None:
        """Part without waiting for the others, who shall not wait for this rank either."""
        with suppress(EPUnavailableError):
            self._start_allgather(None)

    def ranks_on_host(self) -> list[int]:
        """The ranks on this host, ascending. Collective."""
        hosts = self.allgather(_host())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    # --- collectives -------------------------------------------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        """What each rank gives, in the order of ranks."""
        request = self._start_allgather(value)
        self._step(request, "gathering what each rank says")
        return request.result

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        array[...] = self.bcast(array, root)

    def Barrier(self) -> None:
        self.allgather(None)

    def Alltoall(self, outgoing: np.ndarray, incoming: np.ndarray) -> None:
        """Fill row r of `incoming` with the row of rank r that is meant for this rank."""
        requests = []
        for peer in range(self.size):
            self.Isend(outgoing[peer], peer, _ALLTOALL_TAG)
            requests.append(self.Irecv(incoming[peer], peer, _ALLTOALL_TAG))
        for request in requests:
            self._step(request, "an exchange of rows")

    def _step(self, request: Request, phase: str) -> None:
        self.finish(request, None, phase, "all ranks to make their part of it")

    def _missing_ranks(self, request: Request) -> list[int]:
        return request.missing()

    def Iallgather(self, mine: np.ndarray, all_: np.ndarray) -> Request:
        """Start to fill the rows of `all_` with the array of each rank."""

        def fill(values: list[Any]) -> None:
            all_[...] = np.stack(values)

        return self._start_allgather(mine, fill)

    def _start_allgather(self, value: Any, then: Callable[[list[Any]], None] = lambda values: None) -> Request:
        self._num_collectives = number = self._num_collectives + 1
        keys = [f"{self._name}/all/{number}/{rank}" for rank in range(self.size)]
        self._ask("set", keys[self.rank], store_values.pack(value))
        self._left.append((number, keys[self.rank]))

        def look() -> tuple[bool, Any]:
            if not self._ask("check", keys):
                return False, None
            values = []
            for key in keys:
                with self._believed(key):
                    values.append(store_values.unpack(self._ask("get", key)))
            # All ranks are in this collective, and so done with the ones before.
            for key in [key for earlier, key in self._left if earlier < number]:
                self._ask("delete_key", key)
            self._left[:] = [(later, key) for later, key in self._left if later >= number]
            with self._believed(keys[0]):
                then(values)
            return True, values

        return Request(look, lambda: [rank for rank, key in enumerate(keys) if not self._ask("check", [key])])

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
        """Start to receive one message into several arrays. From a rank, and under a tag, one at a time."""

        def look() -> tuple[bool, Any]:
            if not self.iprobe(source, tag):
                return False, None
            key = self._key(source, self.rank, tag, self._received[source, tag])
            data, start = self._receive(source, tag), 0
            with self._believed(key):
                if len(data) != sum(part.nbytes for part in parts):
                    raise ValueError(f"{len(data)} bytes")
            for part in parts:
                bits = np.frombuffer(data, np.uint8, part.nbytes, start)
                part[...] = bits.view(part.dtype).reshape(part.shape)
                start += part.nbytes
            return True, None

        return Request(look, lambda: [source])

    def isend(self, value: Any, dest: int, tag: int) -> Request:
        """Send an object. It is over when it was received."""
        key = self._send(store_values.pack(value), dest, tag)
        return Request(lambda: (not self._ask("check", [key]), None))

    def iprobe(self, source: int, tag: int) -> bool:
        """Whether there is a message."""
        return self._ask("check", [self._key(source, self.rank, tag, self._received[source, tag])])

    def recv(self, source: int, tag: int) -> Any:
        """The object that `iprobe` has found."""
        key = self._key(source, self.rank, tag, self._received[source, tag])
        with self._believed(key):
            return store_values.unpack(self._receive(source, tag))

    def _send(self, data: bytes, dest: int, tag: int) -> str:
        key = self._key(self.rank, dest, tag, self._sent[dest, tag])
        self._sent[dest, tag] += 1
        pieces = [data[start : start + _MOST_BYTES] for start in range(0, len(data), _MOST_BYTES)]
        for i, piece in enumerate(pieces):
            self._ask("set", f"{key}/{i}", piece)
        self._ask("set", key, str(len(pieces)).encode())  # last: who finds it finds all
        return key

    def _receive(self, source: int, tag: int) -> bytes:
        key = self._key(source, self.rank, tag, self._received[source, tag])
        self._received[source, tag] += 1
        with self._believed(key):
            keys = [f"{key}/{i}" for i in range(int(self._ask("get", key)))]
        data = b"".join(self._ask("get", piece) for piece in keys)
        for used in (*keys, key):
            self._ask("delete_key", used)
        return data

    def _key(self, source: int, dest: int, tag: int, number: int) -> str:
        return f"{self._name}/{source}>{dest}/{tag}/{number}"

    @contextmanager
    def _believed(self, key: str) -> Iterator[None]:
        """Around what reads a value that any process could have written."""
        try:
            yield
        except (ValueError, TypeError, OverflowError) as error:
            raise EPUnavailableError(
                f"rank {self.rank}: the store of torch.distributed holds something under {key} that no rank of this Buffer wrote "
                f"({type(error).__name__}). Does another program use the same store and port?"
            ) from error

    def _ask(self, method: str, *given: Any) -> Any:
        try:
            return getattr(self._store, method)(*given)
        except RuntimeError as error:
            raise EPUnavailableError(
                f"rank {self.rank}: the store of torch.distributed does not answer ({str(error).splitlines()[0]}). Did the process that "
                f"holds it, often rank 0, end?"
            ) from error


class Request:
    """Something that was started.

    Args:
        look: Whether it is done by now, and its result.
        missing: The ranks of which it lacks something.
    """

    def __init__(self, look: Callable[[], tuple[bool, Any]], missing: Callable[[], list[int]] = list) -> None:
        self._look, self._is_over, self.missing = look, False, missing
        self.result: Any = None

    def __bool__(self) -> bool:
        return not self._is_over

    def Test(self) -> bool:
        if not self._is_over:
            self._is_over, self.result = self._look()
        return self._is_over

    def Cancel(self) -> None:
        self._is_over = True

    def Free(self) -> None:
        """Nothing is held."""

    def wait(self, timeout_s: float = float("inf")) -> None:
        """Wait, without a limit or until the time is up."""
        end, pause = time.monotonic() + timeout_s, 1e-4
        while not self.Test() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _host() -> str:
    """What processes of one host, and no others, have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
