"""`network` and how NVSHMEM is started: which variables it sees and who set them, without a GPU and without NVSHMEM."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import logging
import mmap
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from deepep_rt import EPConfigError, EPOutOfMemoryError, EPUnavailableError, NetworkOptions
from deepep_rt.backends import agreement
from deepep_rt.config import Config
from deepep_rt.cuda import nvshmem as symmetric
from deepep_rt.cuda import topology as placement
from deepep_rt.network import TRANSPORTS

ALL = NetworkOptions(
    transport="ibrc",
    ibgda=True,
    service_level=3,
    connections_per_peer=8,
    queue_depth=2048,
    nics=["mlx5_0:1", "mlx5_3:1"],
    bootstrap_interface="eth0",
)


class Ranks:
    """One rank's communicator, as far as the package uses it. `gather` gives what all ranks would give, from what this one gives."""

    def __init__(self, size=4, rank=0, hosts=None, gather=None):
        self.size, self.rank, self.hosts = size, rank, hosts or [list(range(size))]
        self.gather = gather or (lambda mine: [mine] * size)

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Dup(self):
        return self

    def Free(self):
        pass

    def Bcast(self, array, root):
        pass

    def dup_for_process(self):
        return self

    outlives_owner = True

    def ranks_on_host(self):
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    def allgather(self, mine):
        return self.gather(mine)


class Nvshmem(types.ModuleType):
    """`nvshmem.bindings`: notes the variables of NVSHMEM that it sees when it is started."""

    def __init__(self, running=False, my_pe=0, num_pes=4, addresses=None):
        super().__init__("nvshmem.bindings")
        self.seen, self.running, self.addresses = None, running, addresses or {}
        self.my_pe, self.n_pes = lambda: my_pe, lambda: num_pes

    Init_status = types.SimpleNamespace(STATUS_IS_INITIALIZED=2)
    Flags = types.SimpleNamespace(INIT_WITH_UNIQUEID=8)

    def init_status(self):
        return 2 if self.running else 0

    def uniqueid(self):
        return types.SimpleNamespace(ptr=1, _data=np.zeros(128, np.uint8))

    def InitAttr(self):
        return types.SimpleNamespace(ptr=2)

    def get_uniqueid(self, uid):
        self.at_uid = _variables()  # the bootstrap opens its socket here

    def set_attr_uniqueid_args(self, rank, size, uid, attributes):
        pass

    def hostlib_init_attr(self, flags, attributes):
        self.seen, self.running = _variables(), True

    def malloc(self, num_bytes):
        return 4096

    def ptr(self, address, pe):
        return self.addresses.get(pe, address + pe)


def _variables():
    return {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in _variables():
        monkeypatch.delenv(name)


@pytest.fixture
def install(monkeypatch):
    """Puts a fake NVSHMEM in the place of the real one, in a process that has not started any."""

    def put(**settings):
        fake = Nvshmem(**settings)
        package = types.ModuleType("nvshmem")
        package.bindings = fake
        pathfinder = types.ModuleType("cuda.pathfinder")
        pathfinder.load_nvidia_dynamic_lib = lambda name: None
        monkeypatch.setitem(sys.modules, "nvshmem", package)
        monkeypatch.setitem(sys.modules, "nvshmem.bindings", fake)
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
        monkeypatch.setattr(symmetric, "_runtime", None)
        monkeypatch.setattr(symmetric, "_in_time", lambda comm, start: start())  # in which context: no driver is needed here
        return fake

    return put


def _pes(mine):
    """Four ranks of one runtime; anything but the rank's own number of a PE is the same everywhere."""
    return [(pe, mine[1]) for pe in range(4)] if isinstance(mine, tuple) else list(range(4)) if type(mine) is int else [mine] * 4


# --- the options -----------------------------------------------------------------------------------------------------------------


def test_environment():
    assert NetworkOptions().environment() == {}
    assert ALL.environment() == {
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IB_SL": "3",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": "8",
        "NVSHMEM_QP_DEPTH": "2048",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1,mlx5_3:1:1",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth0",
    }
    assert NetworkOptions(service_level=np.int64(3)).environment() == {"NVSHMEM_IB_SL": "3"}
    assert NetworkOptions(ibgda=False, service_level=0).environment() == {"NVSHMEM_IB_ENABLE_IBGDA": "0", "NVSHMEM_IB_SL": "0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transport": "ibgda"}, ["transport='ibgda'", "'ibrc' or 'ibdevx'"]),
        ({"ibgda": "yes"}, ["ibgda='yes'"]),
        ({"service_level": 16}, ["service_level=16", "0 to 15"]),
        ({"service_level": -1}, ["service_level=-1"]),
        ({"service_level": True}, ["service_level=True"]),
        ({"connections_per_peer": -1}, ["connections_per_peer=-1"]),
        ({"connections_per_peer": 2.0}, ["connections_per_peer=2.0", "whole number"]),
        ({"queue_depth": 127}, ["queue_depth=127", "128 to 32768"]),
        ({"queue_depth": 32769}, ["queue_depth=32769"]),
        ({"nics": []}, ["nics=[]"]),
        ({"nics": "mlx5_0:1"}, ["nics='mlx5_0:1'", "['mlx5_0:1', 'mlx5_1:1']"]),
        ({"nics": ["mlx5_0"]}, ["nics=['mlx5_0']"]),
        ({"nics": ["mlx5_0:1:1"]}, ["nics=['mlx5_0:1:1']"]),
        ({"bootstrap_interface": ""}, ["bootstrap_interface=''", "eth0"]),
    ],
)
def test_bad_values_are_named(change, words):
    with pytest.raises(EPConfigError) as caught:
        NetworkOptions(**change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL.service_level = 1


def test_every_option_is_documented():
    for field in dataclasses.fields(NetworkOptions):
        assert f"\n    {field.name}: " in inspect.getdoc(NetworkOptions)
    assert all(name in NetworkOptions.__doc__ for name in ALL.environment())


def test_the_installed_nvshmem_knows_every_variable():
    """A variable that a newer NVSHMEM renames would be ignored without a word."""
    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    if spec is None:
        pytest.skip("NVSHMEM is not installed")
    libraries = [*Path(next(iter(spec.submodule_search_locations))).glob("lib/*.so*")]
    wanted = {name.removeprefix("NVSHMEM_").encode() for name in ALL.environment()}
    for path in libraries:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            wanted -= {name for name in wanted if content.find(b"\0" + name + b"\0") >= 0}
    assert libraries
    assert not wanted
    loaded = {path.name.split(".")[0] for path in libraries}
    assert {f"nvshmem_transport_{name}" for name in TRANSPORTS if name not in ("none", "gpunetio")} <= loaded


# --- starting NVSHMEM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_variables_are_there_when_nvshmem_starts_and_gone_afterwards(install, rank):
    fake = install(my_pe=rank)
    hosts = [[0, 1], [2, 3]]
    running = symmetric.runtime(Ranks(rank=rank, hosts=hosts, gather=_pes), ALL.environment())
    assert fake.seen == ALL.environment()
    assert rank or fake.at_uid == ALL.environment()
    assert _variables() == {}
    assert (running.my_pe, running.num_pes) == (rank, 4)


def test_the_users_own_variables_win(install, monkeypatch):
    monkeypatch.setenv("NVSHMEM_IB_SL", "7")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ucx")
    fake = install()
    symmetric.runtime(Ranks(gather=_pes), ALL.environment())
    assert fake.seen == {**ALL.environment(), "NVSHMEM_IB_SL": "7", "NVSHMEM_REMOTE_TRANSPORT": "ucx"}
    assert _variables() == {"NVSHMEM_IB_SL": "7", "NVSHMEM_REMOTE_TRANSPORT": "ucx"}


def test_no_network_is_looked_for_on_one_host(install):
    fake = install()
    symmetric.runtime(Ranks(gather=_pes))
    assert fake.seen == {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"}
    assert _variables() == {}


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_network_on_one_host_has_its_thread(install, monkeypatch, by_variable):
    """A transport that was asked for may need NVSHMEM's proxy thread."""
    fake = install()
    if by_variable:
        monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ucx")
    symmetric.runtime(Ranks(gather=_pes), NetworkOptions(transport=None if by_variable else "ucx").environment())
    assert fake.seen == {"NVSHMEM_REMOTE_TRANSPORT": "ucx"}


def test_with_several_hosts_the_transport_is_nvshmems_choice(install):
    fake = install()
    symmetric.runtime(Ranks(hosts=[[0, 1, 2], [3]], gather=_pes))
    assert fake.seen == {}


def test_variables_are_gone_after_a_failed_start(install):
    fake = install()
    fake.hostlib_init_attr = lambda flags, attributes: 1 / 0
    with pytest.raises(ZeroDivisionError):
        symmetric.runtime(Ranks(gather=_pes), ALL.environment())
    assert _variables() == {}


def test_options_that_come_too_late_are_named(install, caplog):
    install()
    ranks = Ranks(gather=_pes)
    with caplog.at_level(logging.WARNING, "deepep_rt"):
        first = symmetric.runtime(ranks, NetworkOptions(service_level=3, ibgda=True).environment())
        assert symmetric.runtime(ranks) is first
        assert symmetric.runtime(ranks, NetworkOptions(service_level=3).environment()) is first
        assert not caplog.records
        symmetric.runtime(ranks, NetworkOptions(service_level=4, ibgda=True, queue_depth=256).environment())
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "NVSHMEM_IB_SL=4, NVSHMEM_QP_DEPTH=256" in message
    assert "earlier Buffer" in message
    assert "IBGDA" not in message


def test_options_for_an_nvshmem_of_somebody_else_are_named(install, caplog):
    fake = install(running=True)
    with caplog.at_level(logging.WARNING, "deepep_rt"):
        symmetric.runtime(Ranks(gather=_pes), NetworkOptions(service_level=3).environment())
    assert fake.seen is None
    assert "somebody else" in caplog.text
    assert "NVSHMEM_IB_SL=3" in caplog.text


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([(0, 1)] * 4, id="each rank its own"),
        pytest.param([(0, 2), (1, 2), (0, 2), (1, 2)], id="two of two"),
        pytest.param([(0, 4), (1, 4), (2, 8), (3, 8)], id="of different sizes"),
    ],
)
def test_ranks_of_different_runtimes_are_refused(install, members):
    """Numbers of PEs mean something within a runtime only: rows would go to the wrong ranks."""
    my_pe, num_pes = members[0]
    install(running=True, my_pe=my_pe, num_pes=num_pes)
    with pytest.raises(EPConfigError, match=r"different NVSHMEM runtimes; make the first Buffer over all of them"):
        symmetric.runtime(Ranks(gather=lambda mine: members))


def test_a_runtime_of_somebody_else_has_to_fit(install):
    """Its other processes would have to allocate too, and cannot be asked."""
    install(running=True, num_pes=8)
    with pytest.raises(EPConfigError, match=r"started by somebody else, over 8 processes.*this one has 4 ranks"):
        symmetric.runtime(Ranks(gather=lambda mine: [(pe, 8) for pe in range(4)]))


def test_a_runtime_of_our_own_may_be_larger(install):
    install(num_pes=8)
    assert symmetric.runtime(Ranks(gather=lambda mine: [(pe, 8) for pe in range(4)])).num_pes == 8


def test_a_runtime_outlasts_the_store_that_it_was_started_over(install):
    """Whoever holds the store may close it: the next Buffer over all ranks lends its own."""

    class OverStore(Ranks):
        outlives_owner = False

    install()
    first, second = OverStore(gather=_pes), OverStore(gather=_pes)
    assert symmetric.runtime(first).comm is first
    assert symmetric.runtime(second).comm is second
    some = OverStore(2, gather=lambda mine: [(0, 4), (1, 4)])
    assert symmetric.runtime(some).comm is second


# --- symmetric memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompt(monkeypatch):
    monkeypatch.setattr(symmetric, "timed_allgather", lambda *arguments: [arguments[1]])


def test_far_ranks_need_no_direct_path(install, prompt):
    install(my_pe=1, addresses={2: 0, 3: 0})
    ranks = Ranks(rank=1, hosts=[[0, 1], [2, 3]], gather=_pes)
    memory = symmetric.SymmetricMemory(ranks, 64, 1.0, ranks_per_node=2, network=NetworkOptions(service_level=1))
    assert memory.peers == [4096, 4096, 0, 0]
    assert memory.pes == [0, 1, 2, 3]
    assert sys.modules["nvshmem.bindings"].seen == {"NVSHMEM_IB_SL": "1"}


def test_near_ranks_do(install, prompt, monkeypatch):
    monkeypatch.setattr(symmetric, "_num_gpus", lambda: 4)
    install(my_pe=1, addresses={0: 0, 2: 0})
    with pytest.raises(EPUnavailableError, match=r"to those of ranks \[0\]; .* in each group of ranks_per_node=2"):
        symmetric.SymmetricMemory(Ranks(rank=1, gather=_pes), 64, 1.0, ranks_per_node=2)
    with pytest.raises(EPUnavailableError, match=r"to those of ranks \[0, 2\]; .* between all GPUs of a Buffer"):
        symmetric.SymmetricMemory(Ranks(rank=1, gather=_pes), 64, 1.0)


@pytest.mark.parametrize(("num_gpus", "is_told"), [(1, True), (3, True), (4, False)])
def test_gpus_that_a_rank_does_not_see_are_named(install, prompt, monkeypatch, num_gpus, is_told):
    """Ray shows each worker one GPU."""
    hint = f"Rank 1 sees {num_gpus} GPUs, and its host holds 4 ranks; expected at least 4. Give all ranks of a host the same CUDA_VISIBLE"
    monkeypatch.setattr(symmetric, "_num_gpus", lambda: num_gpus)
    fake = install(my_pe=1, addresses={0: 0, 2: 0})
    with pytest.raises(EPUnavailableError, match=r"no direct path from the GPU of rank 1 to those of ranks \[0, 2\]") as caught:
        symmetric.SymmetricMemory(
            Ranks(rank=1, gather=lambda mine: [[], mine, [], []] if isinstance(mine, list) else _pes(mine)), 64, 1.0
        )
    assert (hint in str(caught.value)) == is_told

    def refuse(flags, attributes):
        raise EPUnavailableError("NVSHMEM did not start (Status code 7)")  # as the thread of its start would say

    fake = install()
    fake.hostlib_init_attr = refuse
    with pytest.raises(EPUnavailableError, match=r"NVSHMEM did not start \(Status code 7\)") as caught:
        symmetric.runtime(Ranks(rank=1, gather=_pes))
    assert (hint in str(caught.value)) == is_told


def test_symmetric_memory_has_one_size(install, monkeypatch):
    """NVSHMEM would not say so, and addresses of other ranks would be wrong."""
    install()
    monkeypatch.setattr(symmetric, "timed_allgather", lambda *arguments: [[size] for size in [64, 64, 128, 64]])
    with pytest.raises(EPConfigError, match=r"one size on all ranks.*\[64, 128\] bytes"):
        symmetric.SymmetricMemory(Ranks(gather=_pes), 64, 1.0)


def test_a_rank_without_memory(install, prompt):
    """All of them hear of it."""
    install()
    with pytest.raises(EPOutOfMemoryError, match=r"could not allocate .* on every rank"):
        symmetric.SymmetricMemory(Ranks(gather=lambda mine: [True, True, False, True] if mine is True else _pes(mine)), 64, 1.0)


# --- who is where ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([[0, 1, 2, 3]], 4), ([[0, 1], [2, 3]], 2), ([[2, 3], [0, 1]], 2), ([[0], [1], [2], [3]], 1)],
)
def test_ranks_per_host(hosts, expected):
    assert placement.ranks_per_host(Ranks(hosts=hosts, gather=_hosts_of(hosts))) == expected


@pytest.mark.parametrize("hosts", [[[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0, 3], [1, 2]]])
def test_ranks_that_are_not_placed_host_by_host(hosts):
    for rank in range(4):
        with pytest.raises(EPConfigError) as caught:
            placement.ranks_per_host(Ranks(rank=rank, hosts=hosts, gather=_hosts_of(hosts)))
        shown = "; ".join(", ".join(map(str, ranks)) for ranks in sorted(hosts))
        message = str(caught.value)
        assert all(word in message for word in (shown, "--map-by ppr:8:node", "--distribution=block")), message


@pytest.mark.parametrize(
    ("hosts", "asked", "found"),
    [([[0, 1, 2, 3]], None, None), ([[0, 1, 2, 3]], 2, 2), ([[0, 1], [2, 3]], None, 2), ([[0, 1], [2, 3]], 1, 1)],
)
def test_the_ranks_of_a_host_are_a_node_unless_less_is_asked_for(hosts, asked, found):
    ranks = Ranks(hosts=hosts, gather=_hosts_of(hosts))
    assert placement.placed(ranks, Config(4, 16, 128, 2, 4, ranks_per_node=asked)).ranks_per_node == found


def test_a_node_does_not_reach_over_hosts():
    hosts = [[0, 1], [2, 3]]
    with pytest.raises(EPConfigError, match="a host holds 2 ranks"):
        placement.placed(Ranks(hosts=hosts, gather=_hosts_of(hosts)), Config(4, 16, 128, 2, 4, ranks_per_node=4))


def test_nvlink_connects_so_many_ranks_at_most():
    everyone = tuple(range(16))
    ranks = Ranks(16, hosts=[list(everyone)], gather=lambda mine: [everyone] * 16)
    with pytest.raises(EPConfigError, match="expected 1 to 8"):
        placement.placed(ranks, Config(16, 16, 128, 2, 16))
    assert placement.placed(ranks, Config(16, 16, 128, 2, 16, ranks_per_node=8)).node_size == 8


def _hosts_of(hosts):
    return lambda mine: [tuple(next(ranks for ranks in hosts if rank in ranks)) for rank in range(4)]


def _choose_device(monkeypatch, ranks):
    driver = pytest.importorskip("deepep_rt.cuda.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    monkeypatch.setattr(driver, "use_device", lambda number: number)
    monkeypatch.setattr(driver, "device_uuid", lambda number: f"GPU {number}")
    return placement.choose_device(ranks, types.SimpleNamespace(step=contextlib.nullcontext))


def test_ranks_of_a_host_take_its_gpus_in_order(monkeypatch):
    for rank, device in enumerate((0, 1, 0, 1)):
        ranks = Ranks(rank=rank, hosts=[[0, 1], [2, 3]], gather=lambda mine: [(f"GPU {i}", False) for i in "abcd"])
        assert _choose_device(monkeypatch, ranks) == device


@pytest.mark.parametrize("allowed", [(False, False), (True, False), (True, True)])
def test_ranks_that_share_a_gpu(monkeypatch, allowed):
    """Only where all of them were told that they may."""
    ranks = Ranks(2, gather=lambda mine: [("the same", may) for may in allowed])
    if all(allowed):
        assert _choose_device(monkeypatch, ranks) == 0
    else:
        with pytest.raises(EPConfigError, match=r"2 ranks share 1 GPUs.*DEEPEP_RT_SHARE_GPUS=1"):
            _choose_device(monkeypatch, ranks)


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("gpus", ["aba", "abcb", "abab", "abc"])
def test_ranks_that_share_gpus_unevenly(monkeypatch, gpus, has_started):
    """NVSHMEM would never start. Where it runs, over more ranks than those of the Buffer, there is nothing to fear."""
    ranks = Ranks(len(gpus), gather=lambda mine: [(uuid, True) for uuid in gpus])
    monkeypatch.setattr(symmetric, "_runtime", "running" if has_started else None)
    if has_started or gpus in ("abab", "abc"):
        assert _choose_device(monkeypatch, ranks) == 0
    else:
        number = len(set(gpus))
        with pytest.raises(EPConfigError, match=rf"{len(gpus)} ranks on {number} GPUs: some share.*a multiple of {number} ranks"):
            _choose_device(monkeypatch, ranks)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(("name", "value"), [("backend", "auto"), ("on_exhausted", "error"), ("num_slots", 3)])
def test_one_rank_that_is_told_something_else(monkeypatch, name, value, odd):
    monkeypatch.setattr(agreement, "timed_allgather", lambda *arguments: [])
    monkeypatch.setattr(agreement, "private_comm", lambda communicator, *_: communicator)
    config = Config(3, 16, 128, 2, 6)
    usual = {**dataclasses.asdict(config), **NetworkOptions().common(), "backend": "host", "on_exhausted": "copy"}
    everyone = [(usual | {name: value} if rank == odd else usual, None) for rank in range(3)]
    with pytest.raises(EPConfigError, match=rf"disagree.*{name}: .*rank {odd} {value!r}"):
        agreement.agree(Ranks(3, gather=lambda mine: everyone), config, "host", "copy")


def test_ranks_have_to_agree_on_what_both_ends_of_a_connection_have(monkeypatch):
    monkeypatch.setattr(agreement, "timed_allgather", lambda *arguments: [])
    monkeypatch.setattr(agreement, "private_comm", lambda communicator, *_: communicator)
    config = Config(2, 16, 128, 2, 4)

    def agree(mine, theirs):
        other = {**dataclasses.asdict(config), "backend": "host", "on_exhausted": "copy", **theirs.common()}
        return agreement.agree(Ranks(2, gather=lambda given: [given, (other, None)]), config, "host", "copy", mine)

    assert agree(None, NetworkOptions(nics=["mlx5_0:1"], bootstrap_interface="eth0")) == "host"
    with pytest.raises(EPConfigError, match=r"service_level: rank 0 None, rank 1 3; connections_per_peer: rank 0 4, rank 1 None"):
        agree(NetworkOptions(connections_per_peer=4), NetworkOptions(service_level=3))
