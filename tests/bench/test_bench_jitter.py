"""Run `python -m deepep_rt bench jitter`, which writes a table of p50, p99 and maximum."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("ml_dtypes")

import numpy as np
from launch import run_bench

from deepep_rt.bench import jitter as bench_jitter


def test_a_run_writes_one_table(tmp_path):
    folder = tmp_path / "new"
    done = run_bench(2, "bench", "jitter", "--quick", "--hidden", "128", "--topk", "2", "--experts", "6", "--out", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["jitter.json", "jitter.md"]
    result = json.loads((folder / "jitter.json").read_text())
    assert (result["num_ranks"], result["settings"]["hidden"], result["settings"]["backend"]) == (2, 128, "host")
    assert {"date", "commit", "versions", "boundary"} <= set(result)
    assert [(row["experts"], row["tokens"]) for row in result["rows"]] == [(6, 8), (6, 32), (6, 128)]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in (folder / "jitter.md").read_text().splitlines()]
    table = [line for line in table if len(line) > 1]
    assert table[0] == ["experts", "tokens", "steps", "p50 us", "p99 us", "max us", "p99 / p50"]
    for row, line in zip(result["rows"], table[2:], strict=True):
        assert row["steps"] == 20
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["max_us"]
        ratio = f"{row['p99_us'] / row['p50_us']:.3f}"
        figures = [f"{row[name]:.1f}" for name in ("p50_us", "p99_us", "max_us")]
        assert line == [str(row["experts"]), str(row["tokens"]), "20", *figures, ratio]
    assert done.stdout.count("p99 / p50") == 1
    assert "jitter: 2 of 3 done" in done.stderr


@pytest.mark.parametrize(("num_ranks", "wanted"), [(8, (64, 128, 256, 512)), (6, (66, 132, 258, 516)), (1, (64, 128, 256, 512))])
def test_each_rank_gets_the_same_number_of_experts(num_ranks, wanted):
    experts = bench_jitter.experts_of(num_ranks)
    settings = bench_jitter.make_settings()
    assert experts == wanted
    assert (settings.tokens, settings.replays) == ((8, 32, 128), 10_000)
    assert bench_jitter.num_steps(settings, experts) == 12
    assert bench_jitter.experts_of(num_ranks, num_ranks) == (num_ranks,)
    assert bench_jitter.make_settings(quick=True).replays == 20


def test_summarise_computes_the_percentiles():
    row = bench_jitter.summarise(256, 8, np.array([*range(1, 100), 1000], np.float64))
    assert (row.steps, row.p50_us, row.max_us) == (100, 50.5, 1000.0)
    assert row.p99_us == pytest.approx(np.percentile([*range(1, 100), 1000], 99))
