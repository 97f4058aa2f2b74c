"""`NixlTraffic` with agents of a simulated NIXL, which end transfers when a test says so. With NIXL itself: test_relay.py."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import limits
import numpy as np
import pytest
from memory_store import make_ranks, on_all, outcome

from deepep_rt import EPUnavailableError
from deepep_rt.comm import nixl_traffic
from deepep_rt.comm.nixl_traffic import NixlTraffic
from deepep_rt.comm.relay_puts import Mirror, PutRing, RelayPeers
from deepep_rt.kernels import structs

DESCRIPTOR = structs.Descriptor.dtype({})
PUT_BYTES, NUM_PUTS = 8 << 10, 1024


class Disconnected(Exception): ...


class Handle:
    """A transfer. It ends when the network is quick, or at the first look after it was posted."""

    def __init__(self, source: int, target: int, num_bytes: int, peer: str) -> None:
        self.places, self.peer, self.is_released = (target, source, num_bytes), peer, False

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True


class Agent:
    """An agent of a process. All are in `agents`, by name."""

    def __init__(self, agents: dict[str, Agent], name: str, _: Any) -> None:
        logging.getLogger("nixl").info("Initialized NIXL agent: %s", name)
        self.agents, self.name, self.is_quick = agents, name, False
        self.notifications: list[bytes] = []
        self.posted: set[Handle] = set()
        self.num_messages = 0
        agents[name] = self

    def register_memory(self, descriptions: Any, kind: str) -> Any:
        assert kind == "DRAM"
        return descriptions

    def deregister_memory(self, _: Any) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.agents:
            raise RuntimeError("NIXL_ERR_BACKEND")
        return metadata

    def get_xfer_descs(self, descriptions: Any, _: str) -> Any:
        return descriptions

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> Handle:
        assert operation == "WRITE"
        ((source, num_bytes, _),), ((target, _, _),) = here, there
        return Handle(source, target, num_bytes, peer)

    def transfer(self, handle: Handle) -> str:
        assert handle not in self.posted, "a transfer that runs is posted again"
        self.posted.add(handle)
        return self.check_xfer_state(handle) if self.is_quick else "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self._check(handle.peer)
        ctypes.memmove(*handle.places)
        self.posted.remove(handle)
        return "DONE"

    def send_notif(self, peer: str, message: bytes) -> None:
        self._check(peer)
        self.num_messages += 1
        self.agents[peer].notifications.append(message)

    def _check(self, peer: str) -> None:
        if peer not in self.agents:
            raise Disconnected("NIXL_ERR_REMOTE_DISCONNECT")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived, self.notifications = self.notifications, []
        return {"anyone": arrived[::-1]}  # in any order


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Agent]:
    agents: dict[str, Agent] = {}
    bindings = dict.fromkeys(("nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError"), Disconnected)
    module = SimpleNamespace(
        nixl_agent=lambda *given: Agent(agents, *given), nixl_agent_config=dict, nixlBind=SimpleNamespace(**bindings)
    )
    monkeypatch.setattr(nixl_traffic, "load_nixl", lambda: module)
    return agents


class Rank:
    """The memory of a rank, its ring and its traffic."""

    def __init__(self, comm: Any, timeout_s: float = 10.0) -> None:
        self.memory, self.ring = np.zeros(2 * NUM_PUTS * PUT_BYTES // 8 + 64, np.uint64), np.zeros(NUM_PUTS, DESCRIPTOR)
        self.peers = RelayPeers(comm.Get_rank(), comm.Get_size(), timeout_s, 0.0, node_size=1)
        mirror = Mirror(self.memory.ctypes.data, self.memory.nbytes, 0)
        self.traffic = NixlTraffic(comm, PutRing(self.ring.ctypes.data, NUM_PUTS, DESCRIPTOR), mirror, self.peers)

    def put(self, number: int, **members: int) -> None:
        for name, value in {**members, "sequence": number + 1}.items():
            self.ring[number][name] = value


@pytest.fixture
def ranks(nixl: dict[str, Agent]) -> list[Rank]:
    made: list[Rank] = on_all(make_ranks(2), Rank)
    return made


def test_many_large_puts_wait_their_turn(ranks: list[Rank]) -> None:
    """A network that is quick at last ends hundreds of them in one turn. Words come after the bytes of their own puts."""
    first, second = ranks
    data = first.memory[:-64].view(np.uint8)[: NUM_PUTS * PUT_BYTES]
    data[:] = np.random.default_rng(1).integers(1, 256, data.size, np.uint8)
    word = second.memory.nbytes - 512
    for number in range(NUM_PUTS):
        place = dict(to=(NUM_PUTS + number) * PUT_BYTES, word=word + 8 * (number % 64))
        first.put(number, **{"from": number * PUT_BYTES}, num_bytes=PUT_BYTES, value=number, rank=1, is_awaited=1, **place)
    turns = 0
    while not first.traffic.all_sent:
        first.traffic.turn()
        turns += 1
        first.traffic._agent.is_quick = turns > 20
    second.traffic.turn()
    assert np.array_equal(second.memory[:-64].view(np.uint8)[NUM_PUTS * PUT_BYTES :], data)
    assert second.traffic.puts_received == NUM_PUTS
    assert first.ring["sent"].tolist() == list(range(1, NUM_PUTS + 1))
    assert first.traffic._agent.num_messages <= turns, "puts that end together share a message"


def test_transfers_between_the_same_places_are_made_once(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are kept. They are released when there are too many."""
    first, second = ranks
    monkeypatch.setattr(nixl_traffic, "_MAX_TRANSFERS", 4)
    made: list[Handle] = []
    initialize = first.traffic._agent.initialize_xfer
    monkeypatch.setattr(first.traffic._agent, "initialize_xfer", lambda *given: made.append(initialize(*given)) or made[-1])
    for number, place in enumerate([0, 1, 0, 1, 2, 3, 4, 0]):
        places = {"from": 0, "to": place * PUT_BYTES}
        first.put(number, num_bytes=PUT_BYTES, word=second.memory.nbytes - 8, value=number, rank=1, **places)
        while not first.traffic.all_sent:
            first.traffic.turn()
    assert len(made) == 6
    assert [handle.is_released for handle in made] == [True] * 4 + [False] * 2
    first.traffic.cancel()
    assert all(handle.is_released for handle in made)


def test_a_peer_that_is_lost_fails_alone(nixl: dict[str, Agent]) -> None:
    """Puts to the others go on. A peer that has ended is no failure."""
    one, two, three = on_all(make_ranks(3), Rank)
    del nixl[three.traffic._agent.name]
    for number, rank in enumerate((2, 1, 2, 1)):
        word = two.memory.nbytes - 8 * (number + 1)
        one.put(number, num_bytes=PUT_BYTES * (number > 1), word=word, value=9, rank=rank, **{"from": 0, "to": 0})
    for _ in range(4):
        one.traffic.turn()
        two.traffic.turn()
    assert two.memory[-4:].tolist() == [9, 0, 9, 0]
    assert "the relay of rank 2 on node 2 failed: the connection was lost (NIXL_ERR_REMOTE_DISCONNECT)" in str(one.peers.error())
    assert two.peers.error() is None, "it has sent nothing to that rank"
    two.peers.ended.add(2)
    two.traffic.send_heartbeats()
    two.traffic.turn()
    assert not two.peers.any_failed


def test_ends_are_confirmed(ranks: list[Rank]) -> None:
    """A rank stays until the other one has its end."""
    first, second = ranks
    for one in ranks:
        one.traffic.send_end()
    first.traffic.turn()
    assert first.traffic.is_sending
    second.traffic.turn()
    first.traffic.turn()
    second.traffic.turn()
    assert not first.traffic.is_sending
    assert not second.traffic.is_sending


def test_agents_are_made_in_silence(nixl: dict[str, Agent], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nixl"):
        on_all(make_ranks(2), Rank)
        assert not caplog.records
        assert logging.getLogger("nixl").level == logging.INFO


def test_all_ranks_learn_that_one_has_no_agent(nixl: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(3)
    make = NixlTraffic._make_agent

    def fail(traffic: NixlTraffic) -> Any:
        if traffic._rank == 1:
            raise MemoryError("mine")
        return make(traffic)

    monkeypatch.setattr(NixlTraffic, "_make_agent", fail)
    for error in on_all(ranks, lambda comm: outcome(lambda: Rank(comm))):
        assert isinstance(error, EPUnavailableError)
        assert "rank 1 on node 1 cannot make an agent of NIXL: MemoryError: mine; expected" in str(error)


def test_all_ranks_learn_that_two_have_no_network(nixl: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "get_agent_metadata", lambda agent: b"elsewhere" if len(nixl) == 3 else agent.name.encode())
    for error in on_all(make_ranks(3), lambda comm: outcome(lambda: Rank(comm))):
        assert isinstance(error, EPUnavailableError)
        assert "does not reach the agent of rank" in str(error)


def test_all_ranks_learn_that_a_connection_gets_no_answer(nixl: dict[str, Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall drops the packets of rank 1 to rank 2. NIXL waits two minutes for them, and half of the limit is 0.2 s."""
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    may_answer, met, limit_s = threading.Event(), Agent.add_remote_agent, 0.2

    def meet(agent: Agent, metadata: bytes) -> bytes:
        names = list(nixl)
        if (agent.name, metadata.decode()) == (names[1], names[2]):
            may_answer.wait()
        return met(agent, metadata)

    monkeypatch.setattr(Agent, "add_remote_agent", meet)
    monkeypatch.setattr(nixl_traffic.NixlTraffic, "_make_agent", in_order(nixl))
    start = time.monotonic()
    for error in on_all(make_ranks(3), lambda comm: outcome(lambda: Rank(comm, 2 * limit_s))):
        assert isinstance(error, EPUnavailableError)
        assert str(error).startswith(
            "transport='nixl', but rank 1 on node 1 does not reach the agent of rank 2 on node 2 over eth1: no answer within 0.2 s, half "
            "of timeout_s; expected a network that both have. "
        )
    assert time.monotonic() - start < limits.seconds(10 * limit_s)
    may_answer.set()


def in_order(agents: dict[str, Agent]) -> Any:
    """Return a `_make_agent` with which the agents come in the order of the ranks."""
    make = NixlTraffic._make_agent

    def make_after_lower_ranks(traffic: NixlTraffic) -> Any:
        while len(agents) < traffic._rank:
            time.sleep(1e-3)
        return make(traffic)

    return make_after_lower_ranks
