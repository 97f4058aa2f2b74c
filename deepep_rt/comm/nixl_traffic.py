"""The messages of a relay over agents of NIXL, which need no MPI: RDMA, EFA, TCP or shared memory, as UCX finds them.

NIXL promises no order between transfers. A transfer is done once all its bytes are at their place: only then does NIXL itself send a
notification that belongs to it. So a large put is one transfer to its last place, and its record travels with the next message once the
transfer is done. Notifications of transfers would be slower: each is a message, and the next transfer is done only after it.
All messages are notifications without a transfer. NIXL does not say when those have arrived. So each relay confirms the ends of the others,
and leaves once its own end is confirmed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from .. import _env
from ..errors import EPUnavailableError
from .communicator import Communicator
from .relay_puts import Mirror, Put, PutRing, RelayPeers
from .relay_traffic import Outbox, RelayTraffic

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_IN_PLACE = 1  # the tag of a record whose bytes came before it
_MAX_TRANSFERS = 16384  # that are kept for later puts between the same places: to make one takes 30 us, to start it 3
_CONFIRMATION = struct.Struct("=I")  # the source; all other messages are longer
_LINGER_S = 1.0  # for confirmations, after everything has arrived
_LAST_WORDS_S = 0.2  # for messages of a relay that fails


def load_nixl() -> Any:
    """Return NIXL's module. Raise ImportError if none of its packages can be imported."""
    installed = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
    if not installed:
        raise ModuleNotFoundError(f"no module {' or '.join(_PACKAGES)}")
    return importlib.import_module(f"{installed[0]}._api")


def nixl_objection() -> str:
    """Return the reason why this process cannot use NIXL, as an object of "the rank has"; an empty text if it can."""
    try:
        load_nixl()
    except Exception as error:
        return f"no NIXL ({type(error).__name__}: {error})"
    return ""


def no_agent(rank: str, cause: str) -> EPUnavailableError:
    """Make the error about a rank that has no agent."""
    return EPUnavailableError(
        f"transport='nixl', but {rank} cannot make an agent of NIXL: {cause}; expected NIXL with its UCX plugin, and memory that it can "
        f"register. Check the package there, UCX_TLS and the limit of locked memory (ulimit -l), or pass transport='mpi'."
    )


def no_connection(rank: str, cause: str) -> EPUnavailableError:
    """Make the error about a rank that does not reach another one. `cause` names that one."""
    return EPUnavailableError(
        f"transport='nixl', but {rank} does not reach {cause}; expected a network that both have. Set UCX_TLS and UCX_NET_DEVICES to "
        f"the same networks on all hosts, look for a firewall between them, or pass transport='mpi'."
    )


def unreached(rank: str, why: str) -> str:
    """Return the words for the agent of a rank that this one does not reach, with the networks that UCX may use here."""
    devices = _env.ucx_net_devices()
    return f"the agent of {rank}{f' over {devices}' if devices else ''}: {why}"


def silence(limit_s: float) -> str:
    """Return the words for an agent that does not answer."""
    return f"no answer within {limit_s:g} s, half of timeout_s"


class _Address(NamedTuple):
    """What a rank tells the others: the error that it has, or its agent and the address of its memory."""

    error: str
    metadata: bytes = b""
    first_byte: int = 0


class _Transfer(NamedTuple):
    """A put that NIXL carries."""

    handle: Any
    places: tuple[int, int, int, int]  # the rank, from, to, and the bytes
    then: Callable[[], None]


class NixlTraffic(RelayTraffic):
    """See `RelayTraffic`. Collective.

    Raises:
        EPUnavailableError: on all ranks, if one cannot make an agent, cannot register its memory, or does not reach another one.
    """

    message_bytes = 8 << 10  # longer ones take UCX several times as long

    def __init__(self, comm: Communicator, ring: PutRing, mirror: Mirror, peers: RelayPeers) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), ring, mirror, peers)
        try:
            self._nixl = load_nixl()
            self._agent = self._make_agent()
            self._memory = self._agent.register_memory([(mirror.address, mirror.num_bytes, 0, "")], "DRAM")
            mine = _Address("", self._agent.get_agent_metadata(), mirror.address)
        except Exception as error:  # of any kind that NIXL has
            mine = _Address(f"{type(error).__name__}: {error}")
        self._addresses = [_Address(*found) for found in comm.allgather(tuple(mine))]
        for rank, address in enumerate(self._addresses):
            if address.error:
                raise no_agent(peers.describe(rank), address.error)
        self._names: dict[int, Any] = {}
        for rank, why in enumerate(comm.allgather(self._connect(peers))):
            if why:
                raise no_connection(peers.describe(rank), why)
        bindings = self._nixl.nixlBind
        self._losses = (bindings.nixlRemoteDisconnectError, bindings.nixlBackendError, bindings.nixlCancelledError)
        self._idle: dict[tuple[int, int, int, int], list[Any]] = {}  # transfers that run no more, by their places
        self._num_made = 0
        self._running = [deque[_Transfer]() for _ in self._addresses]  # by rank, in the order of their starts
        self._done: list[_Transfer] = []  # whose ends this rank has not noted
        self._lost: dict[int, str] = {}  # why, by rank
        self._unconfirmed = set(peers.ranks)
        self._linger_until: float | None = None

    def _connect(self, peers: RelayPeers) -> str:
        """Meet the agents of the other ranks. Return the reason why one cannot be reached, or an empty text.

        If nothing answers, as behind a firewall, UCX waits for two minutes, and nothing can interrupt it. Meanwhile the other ranks wait
        for this one. So it takes half of the limit at most.
        """
        found, limit_s = list[str](), peers.timeout_s / 2
        meeting = threading.Thread(target=lambda: found.append(self._meet_agents(peers)), name="deepep_rt agents", daemon=True)
        meeting.start()
        meeting.join(limit_s)
        if found:
            return found[0]
        silent = next((rank for rank in peers.ranks if rank not in self._names), peers.ranks[-1])
        return unreached(peers.describe(silent), silence(limit_s))

    def _meet_agents(self, peers: RelayPeers) -> str:
        for rank in peers.ranks:
            try:
                name = self._agent.add_remote_agent(self._addresses[rank].metadata)
            except Exception as error:  # of any kind that NIXL has
                return unreached(peers.describe(rank), f"{type(error).__name__}: {error}")
            self._names[rank] = name.decode() if isinstance(name, bytes) else name
        return ""

    def _make_agent(self) -> Any:
        config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        log = logging.getLogger("nixl")
        level = log.level
        log.setLevel(logging.WARNING)  # it tells the standard output of each agent
        try:
            return self._nixl.nixl_agent(f"deepep_rt {os.urandom(8).hex()}", config)
        finally:
            log.setLevel(level)

    # --- messages and payloads ---------------------------------------------------------------------------------------------------

    def post(self, rank: int, message: bytes, then: Callable[[], None] | None = None) -> None:
        if rank not in self._lost:
            try:
                self._agent.send_notif(self._names[rank], message)
            except self._losses as error:
                self._lost[rank] = str(error)
        if then is not None:
            then()

    def send_payload(self, box: Outbox, put: Put, sent: Callable[[], None]) -> None:
        rank = box.rank
        if rank in self._lost:
            return
        places = (rank, put.from_, put.to, put.num_bytes)
        idle = self._idle.get(places)
        try:
            handle = idle.pop() if idle else self._transfer(self._names[rank], places)
            state = self._agent.transfer(handle)
        except self._losses as error:
            self._lost[rank] = str(error)
            return

        def arrived() -> None:
            self.add_record(box, put, _IN_PLACE)
            sent()

        # A call of `arrived` starts further puts, so `move` makes it.
        (self._done if state == "DONE" else self._running[rank]).append(_Transfer(handle, places, arrived))

    def _transfer(self, name: Any, places: tuple[int, int, int, int]) -> Any:
        rank, from_, to, num_bytes = places
        self._mirror.part(from_, num_bytes), self._mirror.part(to, num_bytes)  # all ranks have memory of the same size
        if self._num_made >= _MAX_TRANSFERS:
            self._release_idle()
        self._num_made += 1
        describe, first = self._agent.get_xfer_descs, self._mirror.first
        here = describe([(self._mirror.address + from_ - first, num_bytes, 0)], "DRAM")
        there = describe([(self._addresses[rank].first_byte + to - first, num_bytes, 0)], "DRAM")
        return self._agent.initialize_xfer("WRITE", here, there, name)

    def _release_idle(self) -> None:
        for handles in self._idle.values():
            for handle in handles:
                handle.release()
                self._num_made -= 1
        self._idle.clear()

    def receive_payload(self, put: Put, tag: int) -> None:
        self.received(put)  # the bytes came before this message

    # --- a turn ------------------------------------------------------------------------------------------------------------------

    def move(self) -> bool:
        for rank, running in enumerate(self._running):
            if running:
                self._look_at(rank, running)
        done, self._done = self._done, []
        for transfer in done:
            self._idle.setdefault(transfer.places, []).append(transfer.handle)
            transfer.then()
        moved = bool(done)
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                moved = True
                self._read(memoryview(message))
        for rank, cause in self._lost.items():
            if rank not in self._peers.ended:
                self._peers.failed(rank, f"the connection was lost ({cause})")
        return moved

    def _look_at(self, rank: int, running: deque[_Transfer]) -> None:
        """Note which transfers to a rank are done. A look takes time, and they end about in the order of their starts."""
        try:
            while running and (state := self._agent.check_xfer_state(running[0].handle)) != "PROC":
                transfer = running.popleft()
                if state == "DONE":
                    self._done.append(transfer)
                else:
                    self._lost[rank] = f"a transfer ended with {state}"
        except self._losses as error:
            self._lost[rank] = str(error)
        if rank in self._lost:
            running.clear()

    def _read(self, message: memoryview) -> None:
        if len(message) == _CONFIRMATION.size:
            self._unconfirmed.discard(*_CONFIRMATION.unpack(message))
            return
        ended = set(self._peers.ended)
        self.read_message(message)
        for rank in self._peers.ended - ended:
            self.post(rank, _CONFIRMATION.pack(self._rank))

    @property
    def is_sending(self) -> bool:
        now = time.monotonic()
        if self._linger_until is None and self.all_received:
            self._linger_until = now + _LINGER_S
        waits = self._linger_until is None or now < self._linger_until
        return self.num_outgoing > 0 or (waits and not self._all_confirmed)

    @property
    def _all_confirmed(self) -> bool:
        return self._unconfirmed <= self._lost.keys()

    @property
    def num_incoming(self) -> int:
        return 0

    @property
    def num_outgoing(self) -> int:
        return sum(map(len, self._running)) + len(self._done)

    # --- the end -----------------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        end = time.monotonic() + _LAST_WORDS_S
        while not self._all_confirmed and time.monotonic() < end:  # the last message may still need an answer of its receiver
            with suppress(Exception):
                self._agent.get_new_notifs()
            time.sleep(1e-3)
        self._release_idle()

    def is_finished(self) -> bool:
        for running in self._running:
            for transfer in list(running):
                with suppress(Exception):  # NIXL does not release what it cannot stop
                    transfer.handle.release()
                    running.remove(transfer)
        if any(self._running):
            return False
        self._agent.deregister_memory(self._memory)
        return True

    def leave(self, is_sound: bool) -> None:
        if is_sound:
            self._agent = None
        else:  # the end of an agent waits for its peers, without a limit; so it lives as long as the process, and longer than Python
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
