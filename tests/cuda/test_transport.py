"""`transport` and `nics`: the transport between nodes, chosen from what all ranks find."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from memory_store import make_ranks, on_all, outcome

from deepep_rt import EPUnavailableError, NetworkOptions
from deepep_rt.cuda import nics, transport
from deepep_rt.cuda.transport import RankFacts, agree_on_transport, choose_transport

NO_NIC, NO_MPI, NO_NIXL = "no RDMA NIC", "a communicator over a store", "no NIXL (ModuleNotFoundError)"
GOOD = [RankFacts("a 1", "", "", ""), RankFacts("b 2", "", "", "")]
WITHOUT_NIC = [RankFacts("a 1", "", "", ""), RankFacts("b 2", NO_NIC, "", "")]
WITHOUT_MPI = [RankFacts("a 1", "", NO_MPI, NO_NIXL), RankFacts("b 2", "", NO_MPI, NO_NIXL)]
WITHOUT_NIXL = [RankFacts("a 1", NO_NIC, "", ""), RankFacts("b 2", NO_NIC, "", NO_NIXL)]
WITH_NIXL = [RankFacts("a 1", NO_NIC, NO_MPI, "")] * 2 + [RankFacts("b 2", "", "", "")]
WITHOUT_ALL = [RankFacts("a 1", NO_NIC, NO_MPI, NO_NIXL), RankFacts("b 2", NO_NIC, NO_MPI, NO_NIXL)]
ONE_HOST = [RankFacts("a 1", NO_NIC, NO_MPI, NO_NIXL)] * 2
WISH = [RankFacts("a 1", NO_NIC, "", NO_NIXL), RankFacts("b 2", "", "", "", "NVSHMEM_REMOTE_TRANSPORT=ucx")]


@pytest.mark.parametrize(
    ("asked", "facts", "chosen", "words"),
    [
        ("auto", GOOD, "nvshmem", "every host has a NIC"),
        ("auto", WITHOUT_MPI, "nvshmem", "every host has a NIC"),
        ("auto", ONE_HOST, "nvshmem", "all ranks are on one host"),
        ("auto", WITHOUT_NIC, "nixl", "rank 1 on b has no RDMA NIC"),
        ("auto", WITHOUT_NIXL, "mpi", "rank 0 on a has no RDMA NIC, and rank 1 on b has no NIXL"),
        ("auto", WITH_NIXL, "nixl", "rank 0 on a has no RDMA NIC"),
        ("auto", WISH, "nvshmem", "rank 1 on b has NVSHMEM_REMOTE_TRANSPORT=ucx"),
        ("mpi", WISH, "mpi", "was passed"),
        ("mpi", GOOD, "mpi", "was passed"),
        ("nixl", GOOD, "nixl", "was passed"),
        ("nvshmem", GOOD, "nvshmem", "was passed"),
        ("wire", ONE_HOST, "wire", "was passed"),
        ("nvshmem", ONE_HOST, "nvshmem", "was passed"),
        ("nvshmem", WISH, "nvshmem", "was passed"),
    ],
)
def test_the_choice_and_its_reason(asked: str, facts: list[RankFacts], chosen: str, words: str) -> None:
    choice = choose_transport(asked, facts)
    assert choice.name == chosen
    assert words in choice.reason


@pytest.mark.parametrize(
    ("asked", "facts", "words"),
    [
        (
            "auto",
            WITHOUT_ALL,
            r"transport='auto'.*rank 0 on a has no RDMA NIC.*no NIXL.*a store.*; expected .*nixl-cu12.*mpirun",
        ),
        ("nvshmem", WITHOUT_NIC, r"transport='nvshmem', but rank 1 on b has no RDMA NIC; expected .*Pass transport='nixl'"),
        (
            "nixl",
            WITHOUT_NIXL,
            r"transport='nixl', but rank 1 on b has no NIXL.*; expected NIXL .*Install nixl-cu12",
        ),
        ("wire", GOOD, r"transport='wire' is for tests and benches in one host.*; expected all ranks on one host"),
        ("mpi", WITHOUT_MPI, r"transport='mpi', but rank 0 on a has a communicator over a store; expected MPI.*mpirun"),
    ],
)
def test_a_transport_that_is_not_there(asked: str, facts: list[RankFacts], words: str) -> None:
    with pytest.raises(EPUnavailableError, match=words):
        choose_transport(asked, facts)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put each rank on a host of its own, and return the NICs of all hosts. There are none at first."""
    found: list[dict[str, Any]] = []
    counter = iter(range(100))
    monkeypatch.setattr(transport, "host_identity", lambda: f"host{next(counter)} boot")
    monkeypatch.setattr(transport, "list_nics", lambda: found)
    monkeypatch.setattr(transport, "_warned", set())
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT", raising=False)
    return found


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "nixl_objection", lambda: NO_NIXL)


@pytest.mark.usefixtures("without_nixl")
def test_ranks_agree_over_a_store(hosts: list[dict[str, Any]]) -> None:
    """A store carries no rows. Without a NIC and NIXL, all ranks raise the same."""
    ranks = make_ranks()
    for error in on_all(ranks, lambda comm: outcome(lambda: agree_on_transport(comm, None))):
        assert isinstance(error, EPUnavailableError)
        assert "rank 0 on host0 has no NIXL (ModuleNotFoundError), and rank 0 on host0 has" in str(error)
    hosts.append({"name": "mlx5_0", "usable": True, "ports": [{"state": "ACTIVE"}]})
    assert [choice.name for choice in on_all(ranks, lambda comm: agree_on_transport(comm, None))] == ["nvshmem"] * 3


@pytest.mark.usefixtures("without_nixl")
def test_the_log_says_once_why_nvshmem_is_not_used(
    hosts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make_ranks()
    monkeypatch.setattr(type(ranks[0]), "relay_objection", "")
    monkeypatch.setattr(transport, "host_identity", iter([f"host{i} boot" for i in (0, 0, 1) * 3]).__next__)
    with caplog.at_level(logging.INFO, "deepep_rt"):
        for options in (None, NetworkOptions(), NetworkOptions(transport="mpi")):
            assert [choice.name for choice in on_all(ranks, lambda comm, o=options: agree_on_transport(comm, o))] == ["mpi"] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "because rank 0 on host" in record.getMessage()
    assert "no RDMA NIC" in record.getMessage()


@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize(("remote", "wish"), [("ucx", "NVSHMEM_REMOTE_TRANSPORT=ucx"), ("none", "")])
def test_settings_of_nvshmem_count_as_a_wish(
    hosts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, by_variable: bool, remote: str, wish: str
) -> None:
    """The value "none" forbids NVSHMEM every network."""
    hosts.append({"name": "mlx5_0", "usable": True, "ports": [{"state": "ACTIVE"}]})
    if by_variable:
        monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", remote)
    options = NetworkOptions(nvshmem_remote_transport=None if by_variable else remote)
    facts = transport.find_facts(make_ranks()[0], options)
    assert facts.wish == wish
    assert facts.no_nic == ("" if wish else "NVSHMEM_REMOTE_TRANSPORT=none")


def test_the_line_rate_of_active_ports() -> None:
    def nic(state: str, rate: str, usable: bool = True) -> dict[str, Any]:
        return {"name": "mlx5_0", "usable": usable, "ports": [{"state": state, "rate": rate}]}

    slow, fast = nic("ACTIVE", "100 Gb/sec (4X EDR)"), nic("ACTIVE", "400 Gb/sec (4X NDR)")
    assert nics.line_rate([slow, fast]) == 50e9
    others = [nic("DOWN", "800 Gb/sec (4X XDR)"), nic("ACTIVE", "800 Gb/sec", usable=False), nic("ACTIVE", "")]
    assert nics.line_rate([slow, *others]) == 12.5e9
    assert nics.line_rate(others) == 0


def test_nics_that_nvshmem_can_use(tmp_path: Path) -> None:
    def add(name: str, state: str, verbs: str) -> list[dict[str, Any]]:
        folder = tmp_path / "sys/class/infiniband" / name
        for path, text in (("ports/1/state", state), (f"device/infiniband_verbs/{verbs}/dev", "231:192")):
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text(text)
        return nics.list_nics(tmp_path)

    assert nics.nvshmem_objection(nics.list_nics(tmp_path)) == "no RDMA NIC"
    device = tmp_path / "dev/infiniband/uverbs0"
    assert "may not open in /dev/infiniband (rdmap0)" in nics.nvshmem_objection(add("rdmap0", "4: ACTIVE", "uverbs0"))
    device.parent.mkdir(parents=True)
    device.write_text("")
    assert "EFA NICs only (rdmap0)" in nics.nvshmem_objection(nics.list_nics(tmp_path))
    device.with_name("uverbs1").write_text("")
    assert "EFA NICs only" in nics.nvshmem_objection(add("mlx5_0", "1: DOWN", "uverbs1"))
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE")
    assert nics.nvshmem_objection(nics.list_nics(tmp_path)) == ""
    for name in ("rdmap0", "mlx5_0"):
        (tmp_path / f"sys/class/infiniband/{name}/ports/1/state").write_text("2: INIT")
    assert nics.nvshmem_objection(nics.list_nics(tmp_path)) == "NICs without an active port (mlx5_0, rdmap0)"
