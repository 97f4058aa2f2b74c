"""The `deepep_rt.Buffer`s with slots that serve one Buffer of nixl_ep. A call makes, joins or changes the Buffer that it needs.

nixl_ep connects and disconnects each rank from each other one. The ranks of a `deepep_rt.Buffer` change together. So `connect` and
`disconnect` only note what the program wants. The next call of a Buffer makes its members equal to that: all ranks make that call, so all
of them change there. A process that joins makes its Buffer in its first call, when it knows the sizes.

The program's store may be another one at each change, and may end with its process. It only carries the address of a store server of this
library, which the first ranks start. That server ends with its last client.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _env
from ..buffer import Buffer
from ..comm.store import StoreCommunicator
from ..comm.store_client import StoreClient
from ..comm.store_server import start_in_background
from ..errors import EPConfigError, EPEvictedError, EPInputError, EPTimeoutError, EPUnavailableError
from .buffer_cache import Shape, _BuffersByShape, check_not_capturing
from .config import low_latency_bytes

CONNECT_S = 300.0
"""How long a call waits for ranks that connect, as nixl_ep does."""
_NAME = "deepep_rt/nixl_ep"  # begins all keys
_PAUSE_S = 2e-3
_BARRIER_HIDDEN = 8  # of the Buffer whose calls are barriers; rows of nixl_ep are longer
_PROBE_S = 5.0  # for a server on this host


@dataclass
class _Known:
    """What this process knows of the members of one Buffer."""

    connections: dict[int, int] = field(default_factory=dict)
    """The number of the connection to each member. A rank that connects again has another one: its process is new."""
    left_out: dict[int, int] = field(default_factory=dict)
    """The connections that have ended without the program: their processes were lost."""
    settled: int = -1
    """The version of the connections that the members are equal to."""


class SlotBuffers(_BuffersByShape):
    """The Buffers of one rank, by the sizes of their calls. Any thread may connect and disconnect.

    Args:
        rank: The slot of this process.
        num_ranks: The slots.
        num_local_experts: Experts of a rank.
        num_bytes: The memory of a rank, as `low_latency_bytes` counts. It decides how many tokens fit.
        timeout_s: The limit of a call's waits.
    """

    def __init__(self, rank: int, num_ranks: int, num_local_experts: int, num_bytes: int, timeout_s: float) -> None:
        super().__init__()
        self._rank, self._num_ranks, self._num_local_experts = rank, num_ranks, num_local_experts
        self._num_bytes, self._timeout_s = num_bytes, timeout_s
        self._connected, self._active, self._version = {rank: 0}, {rank}, 0
        self._num_connections = 0
        self._lock = threading.RLock()  # of the connections
        self._known: dict[Shape, _Known] = {}
        self._place = ""  # the address of the server
        self._store: StoreClient | None = None
        self._given: Any = None  # the store of the program

    # --- what the program wants --------------------------------------------------------------------------------------------------

    def find_silent_ranks(self, num_tokens: int, hidden: int, num_experts: int) -> None:
        """Mask the active ranks that do not make this call."""
        self.barrier()

    @property
    def rank_bound(self) -> int:
        """The number after that of the last active rank."""
        return max(self._active) + 1

    def connect(self, ranks: Collection[int], activate: bool, store: Any) -> None:
        """Let ranks be members from the next call on, or with `activate=False`, after `set_mask(rank, False)`."""
        with self._lock:
            for rank in ranks:
                if rank not in self._connected:
                    self._num_connections += 1
                    self._connected[rank] = self._num_connections
            if activate:
                self._active.update(ranks)
                self._version += 1
        self.tell_place(store)

    def disconnect(self, ranks: Collection[int]) -> None:
        """Let ranks be members no more, from the next call on."""
        with self._lock:
            for rank in ranks:
                del self._connected[rank]
                self._active.discard(rank)
            self._version += 1

    def is_connected(self, rank: int) -> bool:
        """Return whether a rank is connected, as this one always is."""
        return rank in self._connected

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a connected rank from the calls, or include it."""
        if rank == self._rank:
            return
        with self._lock:
            (self._active.discard if masked else self._active.add)(rank)
            self._version += 1
        for shape, buffer in self._current.items():
            self._mask(buffer, self._known[shape], rank, masked)

    def _mask(self, buffer: Buffer, known: _Known, rank: int, masked: bool) -> None:
        """Mask a member, or unmask it. A rank that has connected again is none yet."""
        is_member = rank in buffer.members and known.connections.get(rank) == self._connected.get(rank)
        if is_member and masked != (rank in buffer.query_masked_ranks()):
            (buffer.mask_rank if masked else buffer.unmask_rank)(rank)

    def masked_ranks(self) -> list[int]:
        """List the ranks that calls exclude, ascending: not connected, not active, silent or lost."""
        with self._lock:
            masked = set(range(self._num_ranks)) - self._active
            connected = dict(self._connected)
        for shape, buffer in self._current.items():
            known = self._known[shape]
            silent = set(buffer.query_masked_ranks()) & set(buffer.members)
            masked |= {rank for rank in silent if known.connections.get(rank) == connected.get(rank)}
            masked |= {rank for rank, number in known.left_out.items() if connected.get(rank) == number}
        return sorted(masked)

    # --- the Buffers -------------------------------------------------------------------------------------------------------------

    def buffer_for(self, num_tokens: int, hidden: int, num_topk: int, num_experts: int, backend: str) -> Buffer:
        """Return the Buffer for calls of these sizes, with the members that the program wants. Collective if they change.

        Raises:
            EPInputError: If `num_tokens` do not fit in the memory, or a CUDA graph is captured and the members have to change.
            EPTimeoutError: If a rank does not come.
            EPEvictedError: If the others have left this process out, and it has not connected all of them again. The next call joins.
        """
        shape = Shape(hidden, num_topk, num_experts, "bfloat16", backend)
        buffer = self._current.get(shape)
        room = self._room(shape) if buffer is None else buffer.config.num_max_tokens_per_rank
        if num_tokens > room:
            raise EPInputError(
                f"num_max_dispatch_tokens_per_rank={num_tokens}; expected at most {room}, because num_rdma_bytes={self._num_bytes} has "
                f"room for as many with hidden={hidden}. Pass the result of get_rdma_size_hint to update_memory_buffers."
            )
        return self._settled(shape, room)

    def barrier(self) -> None:
        """Wait for all active ranks, on the GPU. It is a call without tokens of a small Buffer."""
        backend, device = ("cuda", "cuda") if torch.cuda.is_available() else ("host", "cpu")
        shape = Shape(_BARRIER_HIDDEN, 1, self._num_ranks * self._num_local_experts, "bfloat16", backend)
        x = torch.empty((0, _BARRIER_HIDDEN), dtype=torch.bfloat16, device=device)
        self._settled(shape, 1).low_latency_dispatch(x, torch.empty((0, 1), dtype=torch.int64, device=device), use_fp8=False)

    def _settled(self, shape: Shape, room: int) -> Buffer:
        """Return the Buffer of a shape after its members have changed."""
        buffer = self._current.get(shape)
        if buffer is not None and self._known[shape].settled == self._version:
            return buffer
        check_not_capturing(shape.backend)
        with self._lock:
            version, connected, active = self._version, dict(self._connected), set(self._active)
        if buffer is None:
            buffer = self._begin(shape, room, active)
            members = {rank: connected[rank] for rank in buffer.members if rank in connected}
            self._current[shape], self._known[shape] = buffer, _Known(members)
        known = self._known[shape]
        try:
            self._change(buffer, known, connected, active)
        except EPEvictedError:
            del self._current[shape], self._known[shape]
            buffer.destroy(in_touch=False)
            if any(rank != self._rank and connected.get(rank) == number for rank, number in known.connections.items()):
                raise
            return self._settled(shape, room)  # the program has connected all of them again
        for rank in set(connected) - active:
            self._mask(buffer, known, rank, True)
        known.settled = version
        return buffer

    def _change(self, buffer: Buffer, known: _Known, connected: dict[int, int], active: set[int]) -> None:
        """Make the members equal to the ranks that are connected and active."""
        if lost := [
            rank for rank in buffer.members if rank in known.connections and known.connections[rank] != connected.get(rank)
        ]:
            buffer.shrink(lost)
        end = time.monotonic() + CONNECT_S
        while True:
            members = set(buffer.members)
            known.left_out.update({rank: number for rank, number in known.connections.items() if rank not in members})
            known.connections = {
                rank: known.connections.get(rank, connected[rank]) for rank in buffer.members if rank in connected
            }
            missing = [rank for rank in active if rank not in members and known.left_out.get(rank) != connected[rank]]
            if not missing:
                return
            if time.monotonic() > end:
                raise self._late(missing)
            if not buffer.admit():
                time.sleep(_PAUSE_S)

    def _room(self, shape: Shape) -> int:
        """Return the tokens of a rank that fit in the memory. It is the same on all ranks, whichever call makes the Buffer."""

        def fits(tokens: int) -> bool:
            try:
                return low_latency_bytes(tokens, shape.hidden, self._num_ranks, shape.num_experts) <= self._num_bytes
            except EPConfigError:  # no Buffer has room for so many
                return False

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _begin(self, shape: Shape, num_tokens: int, active: set[int]) -> Buffer:
        """Make the Buffer of a shape with the other active ranks, or join theirs."""
        store = self._find_store(active)
        name = f"{_NAME}/{shape.hidden}-{shape.num_topk}-{shape.backend}"
        sizes: dict[str, Any] = dict(
            num_max_tokens_per_rank=num_tokens,
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            dtype=shape.dtype,
            backend=shape.backend,
            low_latency=True,
            on_timeout="mask",
            timeout_s=self._timeout_s,
            max_ranks=self._num_ranks,
            rendezvous=f"{self._place}/{shape.hidden}-{shape.num_topk}-{shape.backend}",
        )
        founders, token = self._founders(active), secrets.token_hex(8)
        store.set(f"{name}/first/{self._rank}", json.dumps([sorted(active), token]))
        if self._rank in founders and (meeting := self._meet(store, name, active)):
            comm = StoreCommunicator(store, f"{name}/start/{meeting}", founders.index(self._rank), len(founders))
            comm.timeout_s = CONNECT_S
            buffer = Buffer(comm, **sizes)
            store.set(f"{name}/made", "1")
            return buffer
        return Buffer.join(slot=self._rank, limit_s=CONNECT_S, **sizes)

    def _founders(self, active: set[int]) -> list[int]:
        """Return the ranks that make a Buffer together. The others join it, because a new Buffer has its ranks in the slots from 0 on."""
        founders: list[int] = []
        while len(founders) in active:
            founders.append(len(founders))
        if not founders:
            raise EPUnavailableError(
                "rank 0 is not connected; expected it for the first call of these sizes. Connect it, or make this call before it leaves."
            )
        return founders

    def _meet(self, store: StoreClient, name: str, active: set[int]) -> str:
        """Wait for the other active ranks, and return a name for their meeting. Return an empty one if they have made the Buffer before."""
        ranks = sorted(active)
        keys = [f"{name}/first/{rank}" for rank in ranks]
        for _ in self._waiting(lambda: [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]):
            if store.check([f"{name}/made"]):
                return ""
            if store.check(keys):
                found = [json.loads(value) for value in store.multi_get(keys)]
                if all(theirs == ranks for theirs, _ in found):
                    return "-".join(each for _, each in found)
        raise AssertionError

    def _waiting(self, missing: Callable[[], list[int]]) -> Iterator[None]:
        """Yield again and again. After CONNECT_S, raise EPTimeoutError about the ranks that `missing` returns."""
        end = time.monotonic() + CONNECT_S
        while time.monotonic() < end:
            yield
            time.sleep(_PAUSE_S)
        raise self._late(missing())

    def _late(self, ranks: list[int]) -> EPTimeoutError:
        return EPTimeoutError(
            f"rank {self._rank} waited {CONNECT_S:g} s for ranks {sorted(ranks)}; expected them to connect and to make the same call. "
            f"Check that they run, that connect_ranks names the same ranks everywhere, and disconnect those that are lost.",
            rank=self._rank,
            peer=min(ranks, default=-1),
            phase="connect_ranks",
        )

    # --- the store ---------------------------------------------------------------------------------------------------------------

    def tell_place(self, store: Any) -> None:
        """Write the address of the server to the program's store, for processes that join."""
        if store is None:
            return
        self._given = store
        if self._place:
            store.set(f"{_NAME}/place", self._place)

    def _find_store(self, active: set[int]) -> StoreClient:
        """Connect to the server that the ranks have in common. The first of the first ranks starts it."""
        if self._store is not None:
            return self._store
        given, ranks, dead = self._given, sorted(active), ""
        if given is None:
            raise EPUnavailableError(
                "tcp_store_group=None; expected a store of torch.distributed, because this library does not use etcd. Pass one to the "
                "constructor, or to set_tcp_store_group before connect_ranks."
            )
        given.set(f"{_NAME}/waiting/{self._rank}", json.dumps(ranks))
        keys = [f"{_NAME}/waiting/{rank}" for rank in ranks]
        for _ in self._waiting(lambda: [rank for rank, key in zip(ranks, keys, strict=True) if not given.check([key])]):
            if given.check([f"{_NAME}/place"]) and (place := given.get(f"{_NAME}/place").decode()) != dead:
                if self._connect_to(place):
                    break
                dead = place  # of ranks that have all ended
            elif self._rank == ranks[0] and given.check(keys) and all(json.loads(given.get(key)) == ranks for key in keys):
                host, port = start_in_background(_env.store_token())
                self._connect_to(f"{host}:{port}")
                given.set(f"{_NAME}/place", self._place)
                break
        given.delete_key(f"{_NAME}/waiting/{self._rank}")
        assert self._store is not None
        return self._store

    def _connect_to(self, place: str) -> bool:
        host, _, port = place.rpartition(":")
        if not _listens(host, int(port)):
            return False
        self._store = StoreClient(host, int(port), _env.store_token(), min(self._timeout_s, 30.0))
        self._place = place
        return True

    def destroy(self) -> None:
        """Destroy all Buffers. The other ranks lose this one, and need not take part."""
        with ExitStack() as stack:
            if self._store is not None:
                stack.callback(self._store.close)
            for buffer in self.living:
                stack.callback(buffer.destroy, in_touch=False)


def _listens(host: str, port: int) -> bool:
    """Return whether a server runs there. A StoreClient would wait for one that has ended."""
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError:
        return False
    return True
