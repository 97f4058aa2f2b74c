"""`nvshmem`: the environment variables at its start, and symmetric memory, without a GPU and without NVSHMEM."""

from __future__ import annotations

import logging
import os
import sys
import types

import numpy as np
import pytest
from fake_ranks import FakeRanks

from deepep_rt import EPConfigError, EPOutOfMemoryError, EPUnavailableError, NetworkOptions
from deepep_rt.cuda import nvshmem
from deepep_rt.cuda.transport import MemoryRequest

VARIABLES = NetworkOptions(
    nvshmem_remote_transport="ibrc", ibgda=True, service_level=3, nics=["mlx5_0:1", "mlx5_3:1"]
).environment()


class Nvshmem(types.ModuleType):
    """A fake `nvshmem.bindings` that records the variables of NVSHMEM at its start."""

    def __init__(self, running=False, my_pe=0, num_pes=4, addresses=None):
        super().__init__("nvshmem.bindings")
        self.variables_at_start, self.running, self.addresses = None, running, addresses or {}
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
        self.variables_at_unique_id = _variables()  # the bootstrap opens its socket in this call

    def set_attr_uniqueid_args(self, rank, size, uid, attributes):
        pass

    def hostlib_init_attr(self, flags, attributes):
        self.variables_at_start, self.running = _variables(), True

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
    """Return a function that replaces NVSHMEM by a fake one, which has not started."""

    def install(**settings):
        fake = Nvshmem(**settings)
        package = types.ModuleType("nvshmem")
        package.bindings = fake
        pathfinder = types.ModuleType("cuda.pathfinder")
        pathfinder.load_nvidia_dynamic_lib = lambda name: None
        monkeypatch.setitem(sys.modules, "nvshmem", package)
        monkeypatch.setitem(sys.modules, "nvshmem.bindings", fake)
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
        monkeypatch.setattr(nvshmem, "_runtime", None)
        monkeypatch.setattr(nvshmem, "_in_time", lambda comm, start: start())  # without a CUDA context
        return fake

    return install


def _pes(mine):
    """Return the values of four ranks of one runtime. All values but the PE are the same."""
    return [(pe, mine[1]) for pe in range(4)] if isinstance(mine, tuple) else list(range(4)) if type(mine) is int else [mine] * 4


# --- starting NVSHMEM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_variables_are_set_only_during_the_start(install, rank):
    fake = install(my_pe=rank)
    hosts = [[0, 1], [2, 3]]
    running = nvshmem.runtime(FakeRanks(rank=rank, hosts=hosts, gather=_pes), VARIABLES)
    assert fake.variables_at_start == VARIABLES
    assert rank or fake.variables_at_unique_id == VARIABLES
    assert _variables() == {}
    assert (running.my_pe, running.num_pes) == (rank, 4)


def test_variables_of_the_user_win(install, monkeypatch):
    monkeypatch.setenv("NVSHMEM_IB_SL", "7")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ucx")
    fake = install()
    nvshmem.runtime(FakeRanks(gather=_pes), VARIABLES)
    assert fake.variables_at_start == {**VARIABLES, "NVSHMEM_IB_SL": "7", "NVSHMEM_REMOTE_TRANSPORT": "ucx"}
    assert _variables() == {"NVSHMEM_IB_SL": "7", "NVSHMEM_REMOTE_TRANSPORT": "ucx"}


def test_nvshmem_looks_for_no_network_on_one_host(install):
    fake = install()
    nvshmem.runtime(FakeRanks(gather=_pes))
    assert fake.variables_at_start == {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"}
    assert _variables() == {}


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_network_on_one_host_keeps_its_thread(install, monkeypatch, by_variable):
    """A chosen transport may need NVSHMEM's proxy thread."""
    fake = install()
    if by_variable:
        monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ucx")
    nvshmem.runtime(FakeRanks(gather=_pes), NetworkOptions(nvshmem_remote_transport=None if by_variable else "ucx").environment())
    assert fake.variables_at_start == {"NVSHMEM_REMOTE_TRANSPORT": "ucx"}


def test_nvshmem_chooses_the_transport_between_hosts(install):
    fake = install()
    nvshmem.runtime(FakeRanks(hosts=[[0, 1, 2], [3]], gather=_pes))
    assert fake.variables_at_start == {}


def test_variables_are_removed_after_a_failed_start(install):
    fake = install()
    fake.hostlib_init_attr = lambda flags, attributes: 1 / 0
    with pytest.raises(ZeroDivisionError):
        nvshmem.runtime(FakeRanks(gather=_pes), VARIABLES)
    assert _variables() == {}


def test_a_warning_names_options_after_the_start(install, caplog):
    install()
    ranks = FakeRanks(gather=_pes)
    with caplog.at_level(logging.WARNING, "deepep_rt"):
        first = nvshmem.runtime(ranks, NetworkOptions(service_level=3, ibgda=True).environment())
        assert nvshmem.runtime(ranks) is first
        assert nvshmem.runtime(ranks, NetworkOptions(service_level=3).environment()) is first
        assert not caplog.records
        nvshmem.runtime(ranks, NetworkOptions(service_level=4, ibgda=True, queue_depth=256).environment())
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "NVSHMEM_IB_SL=4, NVSHMEM_QP_DEPTH=256" in message
    assert "earlier Buffer" in message
    assert "IBGDA" not in message


def test_a_warning_names_options_for_a_foreign_runtime(install, caplog):
    fake = install(running=True)
    with caplog.at_level(logging.WARNING, "deepep_rt"):
        nvshmem.runtime(FakeRanks(gather=_pes), NetworkOptions(service_level=3).environment())
    assert fake.variables_at_start is None
    assert "the program started it" in caplog.text
    assert "NVSHMEM_IB_SL=3" in caplog.text


@pytest.mark.parametrize(
    "members",
    [
        pytest.param([(0, 1)] * 4, id="one runtime per rank"),
        pytest.param([(0, 2), (1, 2), (0, 2), (1, 2)], id="two runtimes of two ranks"),
        pytest.param([(0, 4), (1, 4), (2, 8), (3, 8)], id="runtimes of different sizes"),
    ],
)
def test_ranks_of_different_runtimes_are_refused(install, members):
    """A PE is a number within one runtime. With another runtime, rows would go to the wrong ranks."""
    my_pe, num_pes = members[0]
    install(running=True, my_pe=my_pe, num_pes=num_pes)
    with pytest.raises(EPConfigError, match=r"different NVSHMEM runtimes; .*Make the first Buffer over all ranks"):
        nvshmem.runtime(FakeRanks(gather=lambda mine: members))


def test_a_foreign_runtime_must_have_the_same_ranks(install):
    """Its other processes would have to allocate too, but take no part in the Buffer."""
    install(running=True, num_pes=8)
    with pytest.raises(EPConfigError, match=r"the program started NVSHMEM over 8 processes.*this one has 4 ranks"):
        nvshmem.runtime(FakeRanks(gather=lambda mine: [(pe, 8) for pe in range(4)]))


def test_the_librarys_runtime_may_be_larger(install):
    install(num_pes=8)
    assert nvshmem.runtime(FakeRanks(gather=lambda mine: [(pe, 8) for pe in range(4)])).num_pes == 8


def test_a_runtime_outlives_the_store_of_its_start(install):
    """Its owner may close the store. Then the runtime uses the one of the next Buffer over all ranks."""

    class OverStore(FakeRanks):
        outlives_owner = False

    install()
    first, second = OverStore(gather=_pes), OverStore(gather=_pes)
    assert nvshmem.runtime(first).comm is first
    assert nvshmem.runtime(second).comm is second
    some = OverStore(2, gather=lambda mine: [(0, 4), (1, 4)])
    assert nvshmem.runtime(some).comm is second


# --- symmetric memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrived(monkeypatch):
    monkeypatch.setattr(nvshmem, "timed_allgather", lambda *arguments: [arguments[1]])


def test_scale_out_ranks_need_no_direct_path(install, arrived):
    install(my_pe=1, addresses={2: 0, 3: 0})
    ranks = FakeRanks(rank=1, hosts=[[0, 1], [2, 3]], gather=_pes)
    memory = nvshmem.allocate(ranks, MemoryRequest(64, 1.0, 2, NetworkOptions(service_level=1)))
    assert memory.peers == [4096, 4096, 0, 0]
    assert memory.network_ids == [0, 1, 2, 3]
    assert sys.modules["nvshmem.bindings"].variables_at_start == {"NVSHMEM_IB_SL": "1"}


def test_scale_up_ranks_need_a_direct_path(install, arrived, monkeypatch):
    monkeypatch.setattr(nvshmem, "_num_gpus", lambda: 4)
    install(my_pe=1, addresses={0: 0, 2: 0})
    with pytest.raises(EPUnavailableError, match=r"to those of ranks \[0\]; .* in each group of ranks_per_node=2"):
        nvshmem.allocate(FakeRanks(rank=1, gather=_pes), MemoryRequest(64, 1.0, 2))
    with pytest.raises(EPUnavailableError, match=r"to those of ranks \[0, 2\]; .* between all GPUs of a Buffer"):
        nvshmem.allocate(FakeRanks(rank=1, gather=_pes), MemoryRequest(64, 1.0))


@pytest.mark.parametrize(("num_gpus", "is_told"), [(1, True), (3, True), (4, False)])
def test_the_error_tells_of_hidden_gpus(install, arrived, monkeypatch, num_gpus, is_told):
    """Ray, for example, makes one GPU visible to each worker."""
    hint = f"Rank 1 sees {num_gpus} GPUs, and its host holds 4 ranks; expected at least 4. Give all ranks of a host the same CUDA_VISIBLE"
    monkeypatch.setattr(nvshmem, "_num_gpus", lambda: num_gpus)
    fake = install(my_pe=1, addresses={0: 0, 2: 0})
    with pytest.raises(EPUnavailableError, match=r"no direct path from the GPU of rank 1 to those of ranks \[0, 2\]") as caught:
        nvshmem.allocate(
            FakeRanks(rank=1, gather=lambda mine: [[], mine, [], []] if isinstance(mine, list) else _pes(mine)),
            MemoryRequest(64, 1.0),
        )
    assert (hint in str(caught.value)) == is_told

    def refuse(flags, attributes):
        raise EPUnavailableError("NVSHMEM did not start (Status code 7).")  # as from the thread of the start

    fake = install()
    fake.hostlib_init_attr = refuse
    with pytest.raises(EPUnavailableError, match=r"NVSHMEM did not start \(Status code 7\)") as caught:
        nvshmem.runtime(FakeRanks(rank=1, gather=_pes))
    assert (hint in str(caught.value)) == is_told


def test_symmetric_memory_has_one_size(install, monkeypatch):
    """NVSHMEM does not check it, and addresses of other ranks would be wrong."""
    install()
    monkeypatch.setattr(nvshmem, "timed_allgather", lambda *arguments: [[size] for size in [64, 64, 128, 64]])
    with pytest.raises(EPConfigError, match=r"one size on all ranks.*\[64, 128\] bytes"):
        nvshmem.allocate(FakeRanks(gather=_pes), MemoryRequest(64, 1.0))


def test_the_runtime_hears_of_the_ranks_of_a_buffer_only_while_it_allocates(install, monkeypatch):
    """The runtime lives as long as the process. What it heard for longer would keep the first Buffer, and its store, alive."""
    install()
    ranks, heard = FakeRanks(gather=_pes), []
    ranks.heard = lambda: None
    own, of_runtime = ranks.heard, FakeRanks(gather=_pes)
    monkeypatch.setattr(ranks, "dup_for_process", lambda: of_runtime)
    monkeypatch.setattr(nvshmem, "timed_allgather", lambda comm, values, *_: heard.append(comm.heard) or [values])
    nvshmem.allocate(ranks, MemoryRequest(64, 1.0))
    assert (heard, of_runtime.heard) == ([own], None)


def test_a_rank_without_memory_fails_all_ranks(install, arrived):
    install()
    with pytest.raises(EPOutOfMemoryError, match=r"could not allocate .* on every rank"):
        nvshmem.allocate(
            FakeRanks(gather=lambda mine: [True, True, False, True] if mine is True else _pes(mine)), MemoryRequest(64, 1.0)
        )
