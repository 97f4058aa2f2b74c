"""Hold docs/several-nodes.md to the library: its errors, its choice of a path, and the model's."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from paths import ROOT

pytest.importorskip("rich", reason="rich comes with deepep_rt[cli]")

import model

from deepep_rt.backends.agreement import _check_same
from deepep_rt.backends.overflow import too_many_rows
from deepep_rt.backends.path_choice import call_times, choose_path
from deepep_rt.comm.nixl_traffic import nixl_objection, no_agent, no_connection, silence, unreached
from deepep_rt.comm.relay_puts import RelayPeers
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.config import Config
from deepep_rt.cuda.nics import nvshmem_objection
from deepep_rt.cuda.topology import placed
from deepep_rt.cuda.transport import RankFacts, choose_transport
from deepep_rt.description import LinkRates
from deepep_rt.errors import EPError

PAGE = (ROOT / "docs/several-nodes.md").read_text()
FAULTS = dict(re.findall(r"^\| ([^|]+) \| (`EP\w+`: .+) \|$", PAGE.partition("## Faults")[2].partition("\n## ")[0], re.MULTILINE))
"""The table of faults: each with the error's type and the beginning of its message."""


class Hosts:
    """Imitate rank 0 of a communicator over hosts."""

    def __init__(self, *hosts: list[int]) -> None:
        self._hosts = hosts

    def ranks_on_host(self) -> list[int]:
        return self._hosts[0]

    def allgather(self, value: Any) -> list[Any]:
        return [tuple(next(host for host in self._hosts if rank in host)) for rank in range(sum(map(len, self._hosts)))]


def config(ranks: int, **more: Any) -> Config:
    return Config(ranks, 8, 64, 2, 8 * ranks, timeout_s=300.0, check_inputs=False, **more)


def facts(host: str, no_nic: str = "", no_mpi: str = "", no_nixl: str = "") -> RankFacts:
    return RankFacts(f"{host} id", no_nic, no_mpi, no_nixl)


def relay_error(failure: str) -> None:
    """Raise what rank 0 learns of the relay of rank 3: after 225 s without a message, or about its failure."""
    peers = RelayPeers(0, 4, 300.0, 0.0, node_size=2)
    for turn in range(1, 100):
        peers.heartbeat_is_due(37.5 / 8 * turn)
        for rank in (1, 2) if turn > 50 else (1, 2, 3):
            peers.heard(rank)
    if failure:
        peers.failed(3, failure)
    error = peers.error()
    assert error is not None
    raise error


def missing_nixl() -> str:
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        return nixl_objection()


def fail(error: EPError) -> None:
    raise error


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(EPError) as caught:
        call()
    return f"`{type(caught.value).__name__}`: {caught.value}"


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("hosts hold different numbers", lambda: placed(Hosts([0, 2], [1, 3]), config(4))),  # type: ignore[arg-type]
        ("`ranks_per_node` does not fit", lambda: placed(Hosts([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]), config(12, ranks_per_node=3))),  # type: ignore[arg-type]
        ("ranks pass different paths", lambda: _check_same([{"path": "hierarchical"}, {"path": "direct"}])),
        ("no NIC for", lambda: choose_transport("nvshmem", [facts("node1"), facts("node2", nvshmem_objection([]))])),
        ("no MPI for", lambda: choose_transport("mpi", [facts("node1", "", StoreCommunicator.relay_objection)])),
        ("no NIXL for", lambda: choose_transport("nixl", [facts("node1", no_nixl=missing_nixl())])),
        ("NIXL cannot make", lambda: fail(no_agent("rank 3 on node 1", "nixlBackendError: NIXL_ERR_BACKEND"))),
        (
            "ranks have no network of NIXL",
            lambda: fail(no_connection("rank 0 on node 0", unreached("rank 1 on node 1", "nixlBackendError: NIXL_ERR_BACKEND"))),
        ),
        ("a firewall", lambda: fail(no_connection("rank 1 on node 1", unreached("rank 0 on node 0", silence(150))))),
        ("a process is killed", lambda: relay_error("the connection was lost (NIXL_ERR_REMOTE_DISCONNECT)")),
        ("a relay fails", lambda: relay_error("MemoryError")),
    ],
)  # fmt: skip
def test_errors_of_the_page_are_those_of_the_library(
    monkeypatch: pytest.MonkeyPatch, fault: str, call: Callable[[], Any]
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # the error would name them
    (shown,) = (message for name, message in FAULTS.items() if name.startswith(fault))
    assert raised(call).startswith(shown.removesuffix("."))


def test_silent_relays_and_full_results() -> None:
    (shown,) = (message for name, message in FAULTS.items() if name.startswith("too many rows"))
    assert str(too_many_rows(0, 32, 20)).startswith(shown.partition(": ")[2].removesuffix("."))
    (shown,) = (message for name, message in FAULTS.items() if name.startswith("a relay is silent"))
    seconds = r"for [\d.]+ s;"
    assert re.sub(seconds, "", raised(lambda: relay_error(""))).startswith(re.sub(seconds, "", shown).removesuffix("."))
    assert "225 s" in shown, "three quarters of the limit"


def test_the_page_names_every_fault_once() -> None:
    assert len(FAULTS) == 14


# --- the path ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_size", [1, 4, 8])
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_the_model_and_the_choice_of_a_path_agree(nodes: int, node_size: int) -> None:
    """Both have the same formulas: equal links give equal times, and the same path."""
    rates = LinkRates(near_bytes_per_s=100e9, near_latency_s=30e-6, far_bytes_per_s=40e9, far_latency_s=50e-6)
    link = model.Link(100, 30)
    machine = model.Machine(link, link, model.Link(40, 50), node_size)
    for tokens in (8, 4096):
        sizes = Config(
            nodes * node_size, tokens, 1024, 8, 256, ranks_per_node=node_size, timeout_s=1.0, check_inputs=False, path="auto"
        )
        work = model.Work(tokens=tokens, hidden=1024, topk=8, experts=256, groups=None)
        estimates = {path: model.throughput(work, machine, nodes, "combine", path) for path in ("hierarchical", "direct")}
        times = call_times(sizes, rates)
        assert {path: 1e6 * seconds for path, seconds in times.items()} == pytest.approx(
            {path: estimate.us for path, estimate in estimates.items()}
        )
        if node_size > 1:
            assert choose_path(sizes, rates, "").name == model.better_path(*estimates.values())
