"""`topology`: the hosts of the ranks, and the GPU of each rank."""

from __future__ import annotations

import contextlib
import types

import pytest
from fake_ranks import FakeRanks

from deepep_rt import EPConfigError
from deepep_rt.config import Config
from deepep_rt.cuda import nvshmem, topology


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [([[0, 1, 2, 3]], 4), ([[0, 1], [2, 3]], 2), ([[2, 3], [0, 1]], 2), ([[0], [1], [2], [3]], 1)],
)
def test_ranks_per_host(hosts, expected):
    assert topology.ranks_per_host(FakeRanks(hosts=hosts, gather=_hosts_of(hosts))) == expected


@pytest.mark.parametrize("hosts", [[[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0, 3], [1, 2]]])
def test_ranks_not_in_order_of_hosts_are_refused(hosts):
    for rank in range(4):
        with pytest.raises(EPConfigError) as caught:
            topology.ranks_per_host(FakeRanks(rank=rank, hosts=hosts, gather=_hosts_of(hosts)))
        listed = "; ".join(", ".join(map(str, ranks)) for ranks in sorted(hosts))
        message = str(caught.value)
        assert all(word in message for word in (listed, "--map-by ppr:8:node", "--distribution=block")), message


@pytest.mark.parametrize(
    ("hosts", "asked", "found"),
    [([[0, 1, 2, 3]], None, None), ([[0, 1, 2, 3]], 2, 2), ([[0, 1], [2, 3]], None, 2), ([[0, 1], [2, 3]], 1, 1)],
)
def test_ranks_per_node_defaults_to_the_ranks_of_a_host(hosts, asked, found):
    ranks = FakeRanks(hosts=hosts, gather=_hosts_of(hosts))
    assert topology.placed(ranks, Config(4, 16, 128, 2, 4, ranks_per_node=asked)).ranks_per_node == found


@pytest.mark.parametrize(
    ("hosts", "asked", "found"),
    [
        ([[0, 1, 2, 3]], None, None),
        ([[0, 1], [2, 3]], None, 2),
        ([[0, 1], [2, 3]], 4, 4),
        ([[0, 1], [2, 3]], 1, 1),
        ([[0, 1, 2], [3]], None, None),
        ([[0, 2], [1, 3]], None, None),
    ],
)
def test_the_host_backend_serves_every_placement(hosts, asked, found, caplog):
    """It has the nodes of the CUDA backend where that one works, so that both give the same bits. Elsewhere it says so."""
    ranks = FakeRanks(hosts=hosts, gather=_hosts_of(hosts))
    assert topology.placed_on_hosts(ranks, Config(4, 16, 128, 2, 4, ranks_per_node=asked)).ranks_per_node == found
    has_no_nodes = len(hosts) > 1 and found is None
    assert ("one node; a Buffer on GPUs raises an error here: 2 hosts hold" in caplog.text) == has_no_nodes


def test_a_node_is_within_a_host():
    hosts = [[0, 1], [2, 3]]
    with pytest.raises(EPConfigError, match="a host holds 2 ranks"):
        topology.placed(FakeRanks(hosts=hosts, gather=_hosts_of(hosts)), Config(4, 16, 128, 2, 4, ranks_per_node=4))


def test_a_node_has_at_most_8_ranks():
    all_ranks = tuple(range(16))
    ranks = FakeRanks(16, hosts=[list(all_ranks)], gather=lambda mine: [all_ranks] * 16)
    with pytest.raises(EPConfigError, match="expected 1 to 8"):
        topology.placed(ranks, Config(16, 16, 128, 2, 16))
    assert topology.placed(ranks, Config(16, 16, 128, 2, 16, ranks_per_node=8)).node_size == 8


def _hosts_of(hosts):
    return lambda mine: [tuple(next(ranks for ranks in hosts if rank in ranks)) for rank in range(4)]


def _choose_device(monkeypatch, ranks):
    driver = pytest.importorskip("deepep_rt.cuda.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")
    monkeypatch.setattr(driver, "use_device", lambda number: number)
    monkeypatch.setattr(driver, "device_uuid", lambda number: f"GPU {number}")
    consensus = types.SimpleNamespace(step=contextlib.nullcontext)
    return topology.choose_device(ranks, topology.local_rank_of(ranks), consensus, nvshmem)


def test_ranks_of_a_host_take_its_gpus_in_order(monkeypatch):
    for rank, device in enumerate((0, 1, 0, 1)):
        ranks = FakeRanks(rank=rank, hosts=[[0, 1], [2, 3]], gather=lambda mine: [(f"GPU {i}", False) for i in "abcd"])
        assert _choose_device(monkeypatch, ranks) == device


@pytest.mark.parametrize("allowed", [(False, False), (True, False), (True, True)])
def test_ranks_that_share_a_gpu(monkeypatch, allowed):
    """All of them have to allow it."""
    ranks = FakeRanks(2, gather=lambda mine: [("the same", may) for may in allowed])
    if all(allowed):
        assert _choose_device(monkeypatch, ranks) == 0
    else:
        with pytest.raises(EPConfigError, match=r"2 ranks share 1 GPUs.*DEEPEP_RT_SHARE_GPUS=1"):
            _choose_device(monkeypatch, ranks)


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("gpus", ["aba", "abcb", "abab", "abc"])
def test_ranks_that_share_gpus_unevenly(monkeypatch, gpus, has_started):
    """NVSHMEM would not start. If it already runs over more ranks than those of the Buffer, it works."""
    ranks = FakeRanks(len(gpus), gather=lambda mine: [(uuid, True) for uuid in gpus])
    monkeypatch.setattr(nvshmem, "_runtime", "running" if has_started else None)
    if has_started or gpus in ("abab", "abc"):
        assert _choose_device(monkeypatch, ranks) == 0
    else:
        number = len(set(gpus))
        with pytest.raises(EPConfigError, match=rf"{len(gpus)} ranks on {number} GPUs: some share.*a multiple of {number} ranks"):
            _choose_device(monkeypatch, ranks)
