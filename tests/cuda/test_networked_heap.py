"""`networked_heap`: virtual memory of CUDA in a host, and NVSHMEM's for its network, without a GPU and without NVSHMEM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import FakeRanks

from deepep_rt import EPOutOfMemoryError, EPUnavailableError, NetworkOptions
from deepep_rt.cuda import heap, networked_heap, nvshmem
from deepep_rt.cuda.transport import MemoryRequest

REQUEST = MemoryRequest(1000, 1.0, 2, NetworkOptions(service_level=1), near_bytes=800, network_start=600)
"""The bytes from 600 to 800 are in both parts."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let both parts be memory that is none."""
    found = SimpleNamespace(requests=[], freed=[], heap=True, error=None)

    def near(comm: Any, request: MemoryRequest) -> Any:
        found.requests.append(("near", request.num_bytes))
        made = SimpleNamespace(ptr=5000, peers=[0, 5000], way="sockets", free=lambda: found.freed.append("near"))
        made.all_free = lambda is_ok, limit_s: is_ok
        made.heap = made if found.heap else None
        return made

    def far(comm: Any, request: MemoryRequest) -> Any:
        found.requests.append(("far", request.num_bytes, request.ranks_per_node, request.network))
        if found.error:
            raise found.error
        made = SimpleNamespace(ptr=9000, network_ids=[4, 5], consensus="of the runtime", free=lambda: found.freed.append("far"))
        made.network_peers = [0, 9000]
        made.all_free = lambda is_ok, limit_s: not is_ok
        return made

    monkeypatch.setattr(heap, "allocate", near)
    monkeypatch.setattr(nvshmem, "allocate", far)
    return found


def test_two_parts_with_the_offsets_of_one_region(parts: SimpleNamespace) -> None:
    memory = networked_heap.allocate(FakeRanks(2, rank=1), REQUEST)
    assert parts.requests == [("near", 800), ("far", 400, 1, REQUEST.network)]
    assert (memory.ptr, memory.peers, memory.way, memory.heap.ptr) == (5000, [0, 5000], "sockets", 5000)
    assert memory.network_base + 600 == 9000
    assert memory.network_peers == [0, memory.network_base]
    assert (memory.network_ids, memory.consensus, memory.is_local) == ([4, 5], "of the runtime", False)
    assert not memory.all_free(True, 1.0), "NVSHMEM's runtime may have more ranks than the Buffer"
    memory.free()
    assert parts.freed == ["near", "far"]


@pytest.mark.parametrize("kind", [EPOutOfMemoryError, EPUnavailableError])
def test_nothing_stays_where_nvshmem_fails(parts: SimpleNamespace, kind: type[Exception]) -> None:
    parts.error = kind("x")
    with pytest.raises(kind, match="x"):
        networked_heap.allocate(FakeRanks(2), REQUEST)
    assert parts.freed == ["near"]


def test_a_host_fails_alone(parts: SimpleNamespace) -> None:
    """The others raise too, and do not wait in NVSHMEM."""
    ranks = FakeRanks(2, gather=lambda mine: [mine, (False, "sockets: EPERM")])
    with pytest.raises(EPUnavailableError, match="rank 1: sockets: EPERM"):
        networked_heap.allocate(ranks, REQUEST)
    assert (parts.freed, [part for part, *_ in parts.requests]) == (["near"], ["near"])


def test_addresses_that_cannot_be_kept(parts: SimpleNamespace) -> None:
    parts.heap = False
    with pytest.raises(EPUnavailableError, match="way=ipc"):
        networked_heap.allocate(FakeRanks(2), REQUEST)
    assert parts.freed == ["near"]
