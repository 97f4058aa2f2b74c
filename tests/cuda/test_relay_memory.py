"""`relay_memory`: memory over the ranks of one host, without a GPU and without NVSHMEM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import FakeRanks

from deepep_rt import EPConfigError, EPTimeoutError, EPUnavailableError, NetworkOptions
from deepep_rt.cuda import nvshmem
from deepep_rt.cuda.relay_memory import RelayAllocator
from deepep_rt.cuda.transport import MemoryRequest

HOSTS = [[0, 1], [2, 3]]


def _allocate(monkeypatch: pytest.MonkeyPatch, allocate: Any) -> Any:
    monkeypatch.setattr(nvshmem, "allocate", allocate)
    return RelayAllocator(2).allocate(
        FakeRanks(4, rank=3, hosts=HOSTS), MemoryRequest(64, 1.0, 2, NetworkOptions(service_level=1))
    )


def test_nvshmem_allocates_over_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []

    def allocate(comm: Any, request: MemoryRequest) -> Any:
        assert (comm.Get_size(), comm.Get_rank(), request) == (2, 1, MemoryRequest(64, 1.0, 2))
        memory = dict(ptr=20, peers=[10, 20], consensus=None, free=lambda: freed.append(20))
        return SimpleNamespace(**memory, all_free=lambda is_ok, timeout_s: not is_ok)

    memory = _allocate(monkeypatch, allocate)
    assert (memory.ptr, memory.peers, list(memory.network_ids)) == (20, [0, 0, 10, 20], [0, 1, 2, 3])
    assert memory.way == "nvshmem"
    assert not memory.all_free(True, 1.0), "NVSHMEM's runtime may have more ranks than the Buffer"
    memory.free()
    assert freed == [20]


@pytest.mark.parametrize(
    "error",
    [
        EPUnavailableError("no direct path from the GPU of rank 0"),
        EPTimeoutError("rank 0 waited for rank 1", rank=0, peer=1, phase="the start"),
    ],
)
def test_errors_say_which_ranks_a_host_holds(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> Any:
        raise error

    with pytest.raises(type(error), match=f"among ranks 2, 3, numbered from 0 here: {error}") as caught:
        _allocate(monkeypatch, fail)
    if isinstance(caught.value, EPTimeoutError):
        assert (caught.value.rank, caught.value.peer, caught.value.phase) == (2, 3, "the start")


def test_nodes_of_one_rank_do_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("deepep_rt.cuda.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    freed: list[int] = []
    monkeypatch.setattr(driver, "allocate", lambda num_bytes: 4096)
    monkeypatch.setattr(driver, "free", freed.append)
    monkeypatch.setattr(nvshmem, "load", lambda: pytest.fail("NVSHMEM was loaded"))
    allocator = RelayAllocator(1)
    allocator.check_available()
    allocator.check_sharing([1, 2])
    memory = allocator.allocate(FakeRanks(4, rank=1, hosts=HOSTS), MemoryRequest(64, 1.0, 1))
    assert (memory.ptr, memory.peers, memory.consensus, memory.way) == (4096, [0, 4096, 0, 0], None, "driver")
    assert memory.all_free(True, 1.0)
    assert not memory.all_free(False, 1.0)
    memory.free()
    assert freed == [4096]
    with pytest.raises(EPConfigError, match="some share one"):
        RelayAllocator(2).check_sharing([1, 2])


@pytest.mark.parametrize(("num_pes", "is_shared"), [(2, False), (4, True)])
def test_other_buffers_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch, num_pes: int, is_shared: bool) -> None:
    """NVSHMEM runs over one host, so only its ranks count."""
    ranks = FakeRanks(4, rank=1, hosts=HOSTS)
    assert not RelayAllocator(2).is_shared(ranks)
    monkeypatch.setattr(nvshmem, "_runtime", SimpleNamespace(num_pes=num_pes))
    assert RelayAllocator(2).is_shared(ranks) == is_shared
    assert not RelayAllocator(1).is_shared(ranks)
