"""`provider`: what provides symmetric memory, without a GPU and without NVSHMEM. `tests/programs/heap.py` has real processes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import FakeRanks
from host_time import build_empty_driver
from launch import environment, python_on, run_command
from paths import PROGRAMS
from without import without

from deepep_rt import EPConfigError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError
from deepep_rt.config import Config
from deepep_rt.cuda import heap, networked_heap, nvshmem, provider, wire
from deepep_rt.cuda.provider import AutoAllocator, allocator_of, describe_ways
from deepep_rt.cuda.relay_memory import RelayAllocator
from deepep_rt.cuda.transport import MemoryRequest

REQUEST = MemoryRequest(64, 1.0)
MEMORY = SimpleNamespace(ptr=1)


def _memory(freed: list[int]) -> Any:
    return SimpleNamespace(all_free=lambda is_ok, limit_s: is_ok, free=lambda: freed.append(1))


def _config(node_size: int = 4, transport: str = "nvshmem") -> Config:
    sizes = dict(num_max_tokens_per_rank=8, hidden=256, num_topk=2, num_experts=8, timeout_s=1.0, check_inputs=False)
    return Config(num_ranks=4, ranks_per_node=node_size, transport=transport, **sizes)


def test_a_setting_holds_for_the_memory_of_a_host() -> None:
    """NVSHMEM's network needs a part that is NVSHMEM's."""
    for config, first, last in (
        (_config(), heap, nvshmem),
        (_config(2), networked_heap, nvshmem),
        (_config(2, "mpi"), heap, RelayAllocator),
        (_config(1, "mpi"), heap, RelayAllocator),
    ):
        assert allocator_of(config, "heap") is first
        auto: Any = allocator_of(config, "auto")
        assert auto._first is first
        for found in (auto._fallback, allocator_of(config, "nvshmem")):
            assert found is last or isinstance(found, RelayAllocator)


def test_the_wire_needs_virtual_memory() -> None:
    config = _config(2, "wire")
    assert allocator_of(config, "auto") is allocator_of(config, "heap") is wire
    with pytest.raises(EPConfigError, match="expected CUDA's virtual memory for transport='wire'"):
        allocator_of(config, "nvshmem")


def test_what_a_network_lacks_is_said_at_once(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVSHMEM is the network, no other memory can replace it."""
    _fail(monkeypatch, "check_available", EPUnavailableError("NVSHMEM is not installed"), networked_heap)
    for setting in ("auto", "heap"):
        with pytest.raises(EPUnavailableError, match=r"^NVSHMEM is not installed"):
            allocator_of(_config(2), setting).check_available()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let both kinds of memory work, and return the list of allocations."""
    tried: list[str] = []
    monkeypatch.setattr(heap, "check_available", lambda: None)
    monkeypatch.setattr(heap, "allocate", lambda comm, request: tried.append("heap") or MEMORY)
    monkeypatch.setattr(nvshmem, "check_available", lambda: tried.append("NVSHMEM is loaded"))
    monkeypatch.setattr(nvshmem, "allocate", lambda comm, request: tried.append("nvshmem") or MEMORY)
    monkeypatch.setattr(provider, "_warned", set())
    return tried


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, module: Any = heap) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, name, fail)


def test_virtual_memory_comes_first(tried: list[str]) -> None:
    """NVSHMEM is not even looked for, and may start with any number of ranks on a GPU."""
    allocator = AutoAllocator(heap, nvshmem)
    allocator.check_available()
    allocator.check_sharing([1, 2])
    assert allocator.allocate(FakeRanks(), REQUEST) is MEMORY
    assert allocator.allocate(FakeRanks(), REQUEST) is MEMORY
    assert tried == ["heap", "heap"]
    assert not allocator.is_shared(FakeRanks())


def test_nvshmem_comes_where_virtual_memory_fails(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 logs the reason once. A second allocation of the Buffer tries nothing again."""
    _fail(monkeypatch, "allocate", EPUnavailableError("sockets: EPERM."))
    with caplog.at_level(logging.WARNING, "deepep_rt"):
        for rank in (1, 0, 0):
            allocator = AutoAllocator(heap, nvshmem)
            allocator.allocate(FakeRanks(rank=rank), REQUEST)
    (record,) = caplog.records
    assert "NVSHMEM provides symmetric memory, and not CUDA's virtual memory, because" in record.getMessage()
    assert "sockets: EPERM." in record.getMessage()
    tried.clear()
    allocator.allocate(FakeRanks(), REQUEST)
    assert tried == ["nvshmem"]


def test_a_rank_on_which_it_works_takes_nvshmem_too(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share memory for themselves, so one may fail alone."""
    freed: list[int] = []
    monkeypatch.setattr(
        heap,
        "allocate",
        lambda comm, request: _memory(freed),
    )
    ranks = FakeRanks(gather=lambda mine: [None, None, (False, "sockets: EPERM."), None] if mine is None else [mine] * 4)
    assert AutoAllocator(heap, nvshmem).allocate(ranks, REQUEST) is MEMORY
    assert (freed, tried) == ([1], ["NVSHMEM is loaded", "nvshmem"])


def test_too_little_memory_is_no_reason_for_nvshmem(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the same error, also where another host has failed for another reason."""
    freed: list[int] = []
    monkeypatch.setattr(
        heap,
        "allocate",
        lambda comm, request: _memory(freed),
    )
    told = [None, (False, "sockets: EPERM."), (True, "a GPU has no 8 GB"), None]
    with pytest.raises(EPOutOfMemoryError, match="a GPU has no 8 GB"):
        AutoAllocator(heap, nvshmem).allocate(FakeRanks(gather=lambda mine: told if mine is None else [mine] * 4), REQUEST)
    assert (freed, tried) == ([1], [])


def test_nothing_stays_where_a_rank_is_silent(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(
        heap,
        "allocate",
        lambda comm, request: _memory(freed),
    )

    def gather(mine: Any) -> list[Any]:
        if mine is None:
            raise EPTimeoutError("rank 1 is silent", rank=0, peer=1, phase="x")
        return [mine] * 4

    with pytest.raises(EPTimeoutError, match="rank 1 is silent"):
        AutoAllocator(heap, nvshmem).allocate(FakeRanks(gather=gather), REQUEST)
    assert freed == [1]


@pytest.mark.parametrize("what", ["missing", "sharing", "start"])
def test_without_any_memory_the_error_has_both_reasons(tried: list[str], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    _fail(monkeypatch, "allocate", EPUnavailableError("sockets: EPERM."))
    allocator = AutoAllocator(heap, nvshmem)
    if what == "sharing":
        monkeypatch.setattr(nvshmem, "_runtime", None)
        allocator.check_sharing([1, 2])
        expected = "EPERM. NVSHMEM: rank 0: 3 ranks on 2 GPUs"
    elif what == "start":
        _fail(monkeypatch, "allocate", EPUnavailableError("NVSHMEM did not start."), nvshmem)
        expected = r"NVSHMEM did not start\. NVSHMEM was to provide the memory, because sockets: EPERM"
    else:
        _fail(monkeypatch, "check_available", EPUnavailableError("NVSHMEM is not installed"), nvshmem)
        expected = r"neither CUDA's virtual memory nor NVSHMEM .*EPERM. NVSHMEM: rank 0: NVSHMEM is not installed"
    with pytest.raises(EPUnavailableError, match=expected):
        allocator.allocate(FakeRanks(), REQUEST)


def test_ranks_outside_of_the_buffer(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the choice, NVSHMEM may still have to allocate with them."""
    monkeypatch.setattr(nvshmem, "_runtime", SimpleNamespace(num_pes=8))
    allocator = AutoAllocator(heap, nvshmem)
    assert allocator.is_shared(FakeRanks())
    allocator.allocate(FakeRanks(), REQUEST)
    assert not allocator.is_shared(FakeRanks())


def test_ways_of_several_hosts() -> None:
    assert describe_ways(["sockets", "sockets"]) == "CUDA virtual memory, shared by descriptors over sockets"
    assert describe_ways(["fabric", "nvshmem"]) == "CUDA virtual memory, shared by handles of a fabric; NVSHMEM"


def test_buffers_where_nvshmem_is_not_installed(tmp_path: Path) -> None:
    (driver := tmp_path / "driver").mkdir()
    build_empty_driver(str(driver))
    blocked = without(tmp_path, "nvshmem")["PYTHONPATH"]
    found = environment(LD_LIBRARY_PATH=str(driver), DEEPEP_RT_SHARE_GPUS="1", DEEPEP_RT_CACHE_DIR=str(tmp_path / "cache"))
    found["PYTHONPATH"] = os.pathsep.join([blocked, found["PYTHONPATH"]])
    printed, _ = run_command(*python_on(2, PROGRAMS / "without_nvshmem.py"), **found)
    assert printed.count(": passed") == 2
