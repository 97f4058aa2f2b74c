"""Measure between ranks with `doctor --network`, and compare with what to expect of links."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, found_text, levels, program
from doctor_machines import SIZES, link, machine, measured, set_facts, set_gpus, set_nic, set_nvml, set_paths, set_threads
from launch import python_on, run_checks
from paths import ROOT
from without import starting_with

from deepep_rt import _env
from deepep_rt.comm.nixl_traffic import nixl_objection
from deepep_rt.description import BufferDescription, LinkRates
from deepep_rt.doctor import addresses, network_facts, network_rates, report, runner, screen
from deepep_rt.doctor.links import LINK_KINDS, nic_kind, tcp_kind
from deepep_rt.doctor.report import findings
from deepep_rt.errors import EPUnavailableError


def test_four_ranks_as_two_nodes() -> None:
    run_checks(4, "network_rates")


@pytest.mark.full
def test_two_ranks_as_declared_by_the_environment(doctor: Doctor) -> None:
    command = [*python_on(2), *program("--network", "--backend", "host")[1:]]
    done = doctor.run(command, DEEPEP_RT_RANKS_PER_NODE="1", COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Rates between ranks" in done.stdout
    assert re.search(r"^far, MPI +1 ", done.stdout, re.MULTILINE)
    assert not re.search(r"^near, MPI", done.stdout, re.MULTILINE)
    assert "2 GB/s, below 5 us (shared memory between processes of a host, through MPI)" in done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_processes_of_torchrun(doctor: Doctor, tmp_path: Path) -> None:
    """They have no MPI. Relays over NIXL need none."""
    command = [sys.executable, *TORCHRUN, *program("--network", "--ranks-per-node", "1", "--backend", "host", "--json")[1:]]
    answer = doctor.json(command=command, **starting_with(tmp_path, "import sys\nsys.modules['mpi4py.MPI'] = None\n"))
    assert levels(answer)["no-mpi4py"] == "note"
    assert [report["rank"] for report in answer["ranks"]] == [0, 1]
    assert "other-launcher" not in levels(answer)
    assert answer["network"]["links"] == []
    if (objection := nixl_objection()) == "":
        ((link_,),) = (answer["network"]["relay"]["links"],)
        assert link_["ranks"] == [0, 1]
        assert min(link_["us"], link_["gb_s"], link_["back_gb_s"]) > 0
    else:
        assert objection in found_text(answer, "relay-not-measured")
    text = doctor.run([sys.executable, *TORCHRUN, *program("--network", "--backend", "host")[1:]], COLUMNS="200").stdout
    assert "2 ranks, started by torchrun" in text
    assert "No rates between ranks: without MPI, doctor measures between nodes and between GPUs." in text


def set_launcher(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set variables of launchers, and no others."""
    others = ("OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
    for name in [name for name in os.environ if name.startswith(others)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_processes_of_torchrun_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has no part in that."""
    alone, asked = {"facts": {}, "failures": {}}, []

    def gather(mine: Any, network: Any) -> Any:
        asked.append(network.without_mpi)
        return 0, [{**mine, **runner.ALONE}], "its process ended with status 1: no store", None

    monkeypatch.setattr(report, "run_probes", lambda: alone)
    monkeypatch.setattr(report, "gather", gather)
    set_launcher(monkeypatch, WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    job, prints = report.examine({}, None, "host", measure_network=True)
    assert prints
    assert asked == [True]
    assert job.mpi_failure is None
    assert job.network == {"failure": "the processes of torchrun did not meet: its process ended with status 1: no store"}


@pytest.mark.parametrize(
    ("variables", "is_met"),
    [
        (dict(WORLD_SIZE="2", RANK="1", MASTER_ADDR="a", MASTER_PORT="1"), True),
        (dict(WORLD_SIZE="1", RANK="0", MASTER_ADDR="a", MASTER_PORT="1"), False),
        (dict(WORLD_SIZE="2", RANK="1"), False),
        (dict(WORLD_SIZE="2", RANK="1", MASTER_ADDR="a", MASTER_PORT="1", PMI_RANK="1", PMI_SIZE="2"), False),
        # srun has started torchrun, once on each host
        (
            dict(WORLD_SIZE="2", RANK="1", MASTER_ADDR="a", MASTER_PORT="1", PMI_RANK="0", PMI_SIZE="1", TORCHELASTIC_RUN_ID="x"),
            True,
        ),
    ],
)
def test_who_meets_without_mpi(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_met: bool) -> None:
    set_launcher(monkeypatch, **variables)
    assert _env.meets_without_mpi() == is_met


def test_a_part_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import sys, time\nif '--gather' in sys.orig_argv:\n    import deepep_rt.doctor.network_rates as rates\n"
    code += "    rates.measure = lambda *_, announce, **__: (announce('far, rank 0 with rank 1'), time.sleep(1000))\n"
    monkeypatch.setenv("PYTHONPATH", starting_with(tmp_path, code)["PYTHONPATH"])
    rank, reports, failure, network = runner.gather({"facts": {}, "failures": {}}, 4, runner.NetworkRequest(limit_s=1))
    assert (rank, len(reports), failure) == (0, 1, None)
    assert reports[0]["mpi_threads"] == "multiple"
    assert network == {"failure": "did not end within 5 s, in this part: far, rank 0 with rank 1"}


# --- which pairs -------------------------------------------------------------------------------------------------------------------


def test_pairs_and_rounds() -> None:
    """Two nodes have one pair, three have a ring. In a round each rank has one part."""
    nodes = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert network_rates._near_pairs(nodes) == ([(0, 1), (3, 4), (6, 7)], [(0, 1), (3, 4), (6, 7)])
    first, every = network_rates._far_pairs(nodes)
    assert first == [(0, 3), (3, 6), (6, 0)]
    assert len(every) == 9
    for each in network_rates._rounds(every):
        assert len({rank for pair in each for rank in pair}) == 2 * len(each)
    assert network_rates._far_pairs(nodes[:2])[0] == [(0, 3)]
    assert network_rates._far_pairs(nodes[:1]) == ([], [])
    assert runner.nodes_of([{"rank": rank, "group": rank // 3 * 3} for rank in range(9)], None) == nodes
    assert runner.nodes_of([{"rank": rank, "group": 0} for rank in range(4)], 3) == [[0, 1, 2, 3]], "no divisor"


class OneRank:
    """Imitate a communicator of one rank whose node has another one."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def sub_comm(self, ranks: Any) -> OneRank:
        return self

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def Free(self) -> None:
        pass


def test_rates_between_gpus_come_from_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepep_rt.buffer

    class Measured:
        def __init__(self, *arguments: Any, **sizes: Any) -> None:
            assert sizes["backend"] == "cuda"
            assert sizes["ranks_per_node"] == 2
            self.num_experts, self.network = sizes["num_experts"], sizes.get("network")

        def __enter__(self) -> Measured:
            return self

        def __exit__(self, *_: object) -> None: ...

        def copy_ceiling(self) -> float:
            return 4.3e10 if self.network else 3.3e11

        def describe(self) -> BufferDescription:
            measured = LinkRates(3e11, 2e-6, 4e10, 9e-6)
            return BufferDescription("cuda", 4, 2, ("a",) * 4, ("",) * 4, transport=self.network.transport, measured=measured)

    comm: Any = OneRank()
    monkeypatch.setattr(deepep_rt.buffer, "Buffer", Measured)
    assert network_rates.measure_gpus(comm, [[0, 1]], "auto") == {"near": {"0": 330.0}}
    assert network_rates.measure_gpus(comm, [[0, 1], [2, 3]], "mpi") == {
        "far": {"gb_s": 43.0, "transport": "mpi", "near_us": pytest.approx(2), "us": pytest.approx(9)},
        "near": {"0": 330.0},
    }
    assert "different numbers" in network_rates.measure_gpus(comm, [[0, 1], [2]], "auto")["reason"]

    def unavailable(*_: Any, **__: Any) -> None:
        raise EPUnavailableError("no memory")

    monkeypatch.setattr(deepep_rt.buffer, "Buffer", unavailable)
    assert network_rates.measure_gpus(comm, [[0, 1]], "auto") == {"reason": "rank 0: no memory"}


# --- what to expect ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nic", "link_layer", "gbit", "kind"),
    [
        ("mlx5_0", "InfiniBand", 400, "ib-ndr"),
        ("mlx5_0", "InfiniBand", 200, "ib-hdr"),
        ("mlx5_0", "Ethernet", 100, "roce-100"),
        ("mlx5_0", "Ethernet", 40, "roce-100"),
        ("irdma0", "Ethernet", 200, "roce-200"),
        ("rdmap16s27", "Unspecified", 100, "efa-100"),
        ("efa_0", "", 200, "efa-200"),
        ("cxi0", "Ethernet", 200, "slingshot"),
        ("mlx5_0", "", 400, None),
        ("mlx5_0", "InfiniBand", 0, None),
    ],
)
def test_kinds_of_nics(nic: str, link_layer: str, gbit: float, kind: str | None) -> None:
    found = nic_kind(nic, link_layer, gbit)
    assert (found and found.name) == kind


def test_kinds_of_ethernet() -> None:
    assert [kind.name for speed in (1, 10, 25, 50, 100, 400) if (kind := tcp_kind(speed))] == [
        "tcp-1", "tcp-10", "tcp-25", "tcp-25", "tcp-100", "tcp-100",
    ]  # fmt: skip


def test_hosts_are_as_fast_as_the_slowest_of_them() -> None:
    job = machine(16)
    assert network_facts.far_kind(job) == LINK_KINDS["ib-ndr"]
    job.reports[8]["facts"]["network"]["nics"][0]["ports"][0]["rate"] = "200 Gb/sec (4X HDR)"
    assert network_facts.far_kind(job) == LINK_KINDS["ib-hdr"]
    set_nic(usable=False)(job)
    assert network_facts.far_kind(job) == LINK_KINDS["tcp-100"], "NICs that cannot be opened do not count"
    job.reports[8]["facts"]["network"]["interfaces"] = []
    assert network_facts.far_kind(job) is None


def test_gpus_with_fewer_links_are_expected_to_be_slower() -> None:
    job = machine(8, network=measured(ranks=8))
    kind = network_facts.gpu_kind(job)
    assert kind is not None
    assert kind.gb_s == 450
    assert 320 < kind.expected_gb_s < 340, "339 GB/s were measured between 8 H200s"
    set_paths("NV8")(job)
    assert network_facts.gpu_kind(job).gb_s == 200  # type: ignore[union-attr]
    set_paths("SYS")(job)
    assert network_facts.gpu_kind(job) == LINK_KINDS["pcie5"]
    set_gpus(arch="sm_80")(job)
    assert network_facts.gpu_kind(job) == LINK_KINDS["pcie4"]
    set_nvml(uuid="x")(job)
    assert network_facts.gpu_kind(machine(1, network=measured(ranks=1, per_node=1))) is None


def test_declared_nodes_of_one_host_are_linked_by_its_memory() -> None:
    job = machine(8, network=measured(link("far", 0, 4, 3.0), link("far", 4, 0, 5.0), per_node=4, ranks=8))
    (found,) = network_facts.link_summaries(job)
    assert found.kind == LINK_KINDS["host-memory"]
    assert (found.num_pairs, found.gb_s, found.slowest) == (2, 4.0, ((0, 4), 3.0))


def test_rates_of_relays_over_nixl() -> None:
    """Nothing says what they should reach, so they are not judged."""
    links = [{"ranks": [0, 8], "us": 30.0, "gb_s": 1.5, "back_gb_s": 1.2}]
    job = machine(16, network=measured(relay={"links": links}))
    (found,) = network_facts.link_summaries(job)
    assert (found.where, found.medium, found.us, found.gb_s, found.kind) == ("far", "a relay over NIXL", 30.0, 1.2, None)
    assert findings(job) == []


def test_rates_between_gpus_of_different_nodes() -> None:
    gpus = {"near": {"0": 330.0, "1": 331.0}, "far": {"gb_s": 44.0, "transport": "nvshmem", "near_us": 2.0, "us": 9.0}}
    near, far = network_facts.link_summaries(machine(16, network=measured(gpus=gpus)))
    assert (near.us, far.us, far.medium, far.kind) == (2.0, 9.0, "GPU over nvshmem", LINK_KINDS["ib-ndr"])
    one_host = machine(8, network=measured(gpus={"far": {"gb_s": 3.0, "transport": "mpi"}}, per_node=4, ranks=8))
    (relay,) = network_facts.link_summaries(one_host)
    assert (relay.us, relay.kind) == (None, LINK_KINDS["host-memory"])
    gpus["far"]["transport"] = "nvshmem"
    declared = network_facts.link_summaries(machine(8, network=measured(gpus=gpus, per_node=4, ranks=8)))
    assert [found.kind.about for found in declared if found.kind] == ["18 NVLinks"] * 2
    alone = machine(1, network=measured(ranks=1, per_node=1))
    set_facts("network", nics=[])(alone)
    assert network_facts.link_summaries(alone) == []


# --- transports --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "faults", "shown"),
    [
        (dict(ranks=8), [], "none needed: all ranks are one node"),
        (dict(ranks=8, sizes={**SIZES, "ranks_per_node": 4}), [], "nvshmem: all ranks are on one host"),
        (dict(ranks=16), [], "nvshmem: every host has a NIC that NVSHMEM can use"),
        (
            dict(ranks=16),
            [set_nic(usable=False)],
            "nixl: rank 0 on host0 has NICs that this user may not open in /dev/infiniband (mlx5_0)",
        ),
        (
            dict(ranks=16),
            [set_facts("network", nics=[]), set_facts("nixl", error="no NIXL (x)")],
            "mpi: rank 0 on host0 has no RDMA NIC, and rank 0 on host0 has no NIXL (x)",
        ),
        (dict(ranks=16, transport="nixl"), [], "nixl: transport='nixl' was passed"),
        (dict(ranks=16, transport="mpi"), [], "mpi: transport='mpi' was passed"),
        (
            dict(ranks=16, transport="mpi"),
            [set_threads("single")],
            "none can work: transport='mpi', but rank 0 on host0 has an MPI",
        ),
        (dict(ranks=16, backend="host"), [], "none needed: the host backend sends its messages itself"),
    ],
)
def test_the_transport_and_its_reason_are_shown(options: dict[str, Any], faults: list[Any], shown: str) -> None:
    job = machine(**options)
    for fault in faults:
        fault(job)
    rows = dict(screen._fact_rows(job, job.reports[0]))
    assert rows["Transport"].startswith(shown)
    document = report.as_json(job, [])["transport"]
    name, _, reason = shown.partition(": ")
    if name == "none needed":
        assert document is None
    elif name == "none can work":
        assert document["error"].startswith(reason)
    else:
        assert document == {"name": name, "reason": reason}


def test_the_words_for_missing_threads_are_those_of_the_communicator() -> None:
    text = (ROOT / "deepep_rt/comm/mpi.py").read_text()
    assert network_facts.NO_THREADS in text


def test_an_unknown_transport_is_refused(doctor: Doctor) -> None:
    done = doctor.run(program("--transport", "pigeon"))
    assert done.returncode == 1
    assert "--transport='pigeon'; expected auto, nvshmem, nixl or mpi" in done.stderr


def test_nodes_that_the_environment_declares() -> None:
    job = machine(8)
    assert not network_facts.has_several_nodes(job)
    set_facts("settings", variables={"DEEPEP_RT_RANKS_PER_NODE": "4"})(job)
    assert network_facts.has_several_nodes(job)
    assert job.config().num_nodes == 2
    assert findings(job) == []
    set_facts("settings", variables={"DEEPEP_RT_RANKS_PER_NODE": "16"})(job)
    assert job.config().num_nodes == 1, "a Buffer of fewer ranks is one node"
    set_facts("settings", variables={"DEEPEP_RT_RANKS_PER_NODE": "3"})(job)
    assert "ranks_per_node=3; expected a divisor" in findings(job)[0].what
    set_facts("settings", variables={"DEEPEP_RT_RANKS_PER_NODE": "many"})(job)
    assert not network_facts.has_several_nodes(job)


# --- addresses ---------------------------------------------------------------------------------------------------------------------


def test_addresses_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("eth0", "192.0.2.7/24"), ("lo", "127.0.0.2/8"), ("docker0", "172.17.0.1/16"), ("ib0", "fd00::2/64")}
    monkeypatch.setattr(addresses, "_addresses", lambda: known)
    for name, speed in (("eth0", "25000\n"), ("ib0", "-1\n")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "speed").write_text(speed)
    assert addresses.interfaces(tmp_path) == [
        {"name": "eth0", "address": "192.0.2.7/24", "speed_mbit": 25000},
        {"name": "ib0", "address": "fd00::2/64", "speed_mbit": None},
    ]
    monkeypatch.undo()
    names = {name for _, name in socket.if_nameindex()}
    assert {each["name"] for each in addresses.interfaces()} <= names
    assert addresses.own_addresses("localhost")
    assert addresses.own_addresses("no-such-host.invalid") == []
