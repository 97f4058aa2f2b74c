"""`path_choice`: the path between nodes, from measured or usual rates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from memory_store import make_ranks, on_all, outcome

from deepep_rt import EPConfigError, LinkRates
from deepep_rt.backends import path_choice
from deepep_rt.backends.path_choice import AgreedPath, agree_on_path, call_times, choose_path, usual_rates
from deepep_rt.config import Config

RATES = LinkRates(100e9, 10e-6, 50e9, 20e-6)
TOPOLOGY = {"transport": "mpi", "hosts": ["a", "b"], "ranks_per_node": 8}


def _config(**changes: Any) -> Config:
    sizes = dict(num_ranks=16, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256, ranks_per_node=8)
    return Config(**{**sizes, "timeout_s": 1.0, "check_inputs": False, **changes})


def test_times_of_both_paths() -> None:
    """With one expert a token and 4 ranks as 2x2: half the tokens go to the far node, and a quarter to each rank."""
    config = _config(num_ranks=4, ranks_per_node=2, num_topk=1, num_experts=4, num_max_tokens_per_rank=1000, hidden=512)
    times = call_times(config, LinkRates(1024e3, 0.25, 1024e3, 0.5))  # a row has 1024 bytes, so all rows take a second
    assert times == pytest.approx({"hierarchical": 0.75 + 1.0, "direct": 0.5 + 0.5})


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        (RATES, "hierarchical"),  # rows for several ranks of a node share their way over the network
        (dataclasses.replace(RATES, near_bytes_per_s=5e9), "direct"),  # passing rows on is slower than the network
        (dataclasses.replace(RATES, far_bytes_per_s=1e9), "hierarchical"),
    ],
)
def test_the_faster_path_is_chosen(rates: LinkRates, chosen: str) -> None:
    choice = choose_path(_config(), rates, "measured now")
    assert choice.name == chosen
    assert "us hierarchical, " in choice.reason
    assert choice.reason.endswith("(measured now)")


def test_a_small_difference_leaves_the_hierarchical_path() -> None:
    """With one token, only latencies count: the hierarchical path has one more."""
    config = _config(num_max_tokens_per_rank=1)
    for near_latency_s, chosen in ((1e-6, "hierarchical"), (3e-6, "direct")):
        rates = LinkRates(1e15, near_latency_s, 1e15, 20e-6)
        choice = choose_path(config, rates, "measured now")
        assert choice.name == chosen
        assert ("less than 10% faster" in choice.reason) == (chosen == "hierarchical")


@pytest.mark.parametrize("path", ["hierarchical", "direct"])
def test_a_path_of_the_caller_is_taken(path: str) -> None:
    assert choose_path(_config(path=path), RATES, "") == (path, f"path={path!r} was passed")


def test_nodes_of_one_rank_have_one_path() -> None:
    assert choose_path(_config(ranks_per_node=1), RATES, "").name == "hierarchical"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of saved rates, which does not exist yet."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DEEPEP_RT_REMEASURE", raising=False)
    return tmp_path / "links"


def _agree(measured: list[LinkRates], **changes: Any) -> AgreedPath:
    """Let three ranks of a Buffer of 2x8 agree. `measured` has the results of the measurements that they may make."""

    def agree(comm: Any) -> AgreedPath:
        mine = iter(measured)
        return agree_on_path(comm, _config(**changes), TOPOLOGY, usual_rates("mpi", 2), lambda comm, config: next(mine))

    first, *others = on_all(make_ranks(), agree)
    assert others == [first, first]
    return first


def test_rates_are_measured_once_for_a_topology(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _agree([RATES]).measured == RATES
    (file,) = folder.iterdir()
    again = _agree([])
    assert again.measured == RATES
    assert "measured earlier" in again.choice.reason
    monkeypatch.setenv("DEEPEP_RT_REMEASURE", "1")
    slow_near = dataclasses.replace(RATES, near_bytes_per_s=5e9)
    assert _agree([slow_near]).choice.name == "direct"
    monkeypatch.delenv("DEEPEP_RT_REMEASURE")
    assert _agree([]).measured == slow_near
    assert [*folder.iterdir()] == [file]


def test_nothing_is_measured_for_a_path_of_the_caller(folder: Path) -> None:
    assert _agree([], path="direct") == AgreedPath(choose_path(_config(path="direct"), RATES, ""))
    assert not folder.exists()


def test_without_a_measurement_usual_rates_decide(folder: Path) -> None:
    found = on_all(make_ranks(), lambda comm: agree_on_path(comm, _config(), TOPOLOGY, usual_rates("nvshmem", 2), None))
    assert found == [found[0]] * 3
    assert found[0].measured is None
    assert "nothing was measured" in found[0].choice.reason


def test_usual_rates_follow_the_kind_of_link() -> None:
    ndr, hdr, relay = usual_rates("nvshmem", 2), usual_rates("nvshmem", 2, 25e9), usual_rates("mpi", 2, 25e9)
    assert hdr.far_bytes_per_s == pytest.approx(21.5e9)
    assert hdr == dataclasses.replace(ndr, far_bytes_per_s=hdr.far_bytes_per_s)
    assert relay.far_bytes_per_s < usual_rates("mpi", 1).far_bytes_per_s < hdr.far_bytes_per_s
    one_host = usual_rates("nvshmem", 1, 25e9)
    assert one_host.far_bytes_per_s == one_host.near_bytes_per_s


def test_a_wrong_variable_on_rank_0_is_an_error_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_REMEASURE", "perhaps")
    usual = usual_rates("mpi", 2)
    for error in on_all(
        make_ranks(), lambda comm: outcome(lambda: agree_on_path(comm, _config(), TOPOLOGY, usual, lambda *_: usual))
    ):
        assert isinstance(error, EPConfigError)
        assert "rank 0 cannot make this Buffer: DEEPEP_RT_REMEASURE='perhaps'" in str(error)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1}', "[" * 100_000]
    + [
        json.dumps({"format": version, "topology": topology, "rates": rates})
        for version, topology, rates in (
            (0, TOPOLOGY, dataclasses.asdict(RATES)),
            (1, {**TOPOLOGY, "hosts": ["a", "c"]}, dataclasses.asdict(RATES)),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "near_latency_s": -1.0}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "far_latency_s": float("nan")}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "far_latency_s": "fast"}),
            (1, TOPOLOGY, {"near_latency_s": 1.0}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "far_bytes_per_s": 10**400}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "far_bytes_per_s": 1e300}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "near_bytes_per_s": True}),
            (1, TOPOLOGY, {**dataclasses.asdict(RATES), "more": 1.0}),
            (True, TOPOLOGY, dataclasses.asdict(RATES)),
        )
    ],
)
def test_other_files_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path_choice.save_rates(TOPOLOGY, RATES)
    assert path_choice.load_rates(TOPOLOGY) == RATES
    (file,) = folder.iterdir()
    file.write_text(text)
    assert path_choice.load_rates(TOPOLOGY) is None
    assert f"{file} is ignored: it is not one that this version wrote" in caplog.text
