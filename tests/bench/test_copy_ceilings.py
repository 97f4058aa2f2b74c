"""The copy ceiling of a result by method, and NCCL's all-to-all next to it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("rich")

from deepep_rt.bench import nccl, report, results
from deepep_rt.bench.results import Row, ceiling_note, document, read

SETTINGS = {"backend": "cuda", "hidden": 128, "topk": 2, "experts": 4}
DESCRIBED = {"num_ranks": 2, "machine": "a GPU", "boundary": "events", "deepep_rt": "0", "settings": SETTINGS}
ROW = Row(nccl.WORK, 16, 24, 10.0, 5.0, 2.5, 3.0, 256)


def made(ceilings: dict[int, dict[str, float]]) -> dict[str, Any]:
    return document([ROW], ceilings, DESCRIBED, "0123456789abcdef")


def test_the_ceiling_is_the_largest_of_all_methods() -> None:
    result = made({8: {"kernel": 2e11, "copy engines": 3.9e11}, 24: {"kernel": 3e11, "copy engines": 3.8e11}})
    results.check_result(result | {"copy_ceiling_gb_s": {**result["copy_ceiling_gb_s"], "by_sms": {"8": 200.0, "24": 300.0}}})
    assert result["copy_ceiling_gb_s"] == {
        "by_sms": {8: 200.0, 24: 300.0},
        "by_method": {"kernel": 300.0, "copy engines": 390.0},
        "used": 390.0,
    }
    assert "390 GB/s remote (kernel 300, copy engines 390)" in report.throughput_table(result).caption


def test_results_without_methods_stay_readable() -> None:
    result = read(ROOT / "bench/results/h200x4_2026-11-22.json")
    assert ceiling_note(result).endswith("GB/s remote")
    assert ceiling_note(made({8: {"messages": 2e9}})) == "2 GB/s remote"


def test_the_row_of_nccl_is_in_the_table() -> None:
    (cells,) = report.throughput_table(made({24: {"kernel": 1e10}})).rows
    assert cells == ["nccl_all_to_all", "16", "24", "10.0", "5", "2.5", "25.0", "3.0"]


@pytest.mark.parametrize(("rows", "ranks", "wanted"), [(8.0, 2, 4), (8.9, 2, 4), (21673.0, 8, 2709), (0.0, 4, 1)])
def test_ranks_get_equal_shares(rows: float, ranks: int, wanted: int) -> None:
    assert nccl.rows_for_each_peer(rows, ranks) == wanted


def _torch(num_gpus: int, has_nccl: bool) -> Any:
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: has_nccl)
    cuda = SimpleNamespace(is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus)
    return SimpleNamespace(__version__="9.9", cuda=cuda, distributed=distributed)


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (None, "torch cannot be imported"),
        (_torch(0, True), "torch 9.9 finds no GPU"),
        (_torch(2, False), "torch 9.9 has no NCCL"),
        (_torch(1, True), "2 ranks share 1 GPUs; expected a GPU for each rank"),
        (_torch(2, True), None),
    ],
)
def test_what_is_missing_is_named(torch: Any, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = nccl._why_not(2, True)
    assert words in reason if words else reason == ""
    assert reason == "" or reason.endswith("eave --nccl out")
