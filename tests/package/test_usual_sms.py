"""The usual number of SMs against all others that were measured, in the results of `bench/results`."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from paths import ROOT

from deepep_rt.config import Config, usual_sms

RESULTS = ROOT / "bench/results"
CALLS = [f"dispatch_{rows}_{routing}" for rows in ("bf16", "fp8") for routing in ("known", "unknown", "worst")] + ["combine_bf16"]
PROMISE = {1: 0.0, 2: 0.03, 4: 0.04, 8: 0.02}
"""By number of ranks: the part of its time that each call takes longer at most than with the best number of SMs from 8 to 64."""

# The newest result of each machine. Noise is not left out: two runs of a number of SMs differ by 1 to 3 %.
FILES = [
    "h100x1_2026-11-24.json",
    "h100x2_2026-11-26.json",
    "h200x2_2026-11-28.json",
    "h100x4_2026-11-26.json",
    "h200x4_2026-11-22.json",
    "h200x8_2026-11-22.json",
]


def _times(file: str) -> tuple[int, dict[tuple[str, int], dict[int, float]]]:
    """Return the number of ranks, and the microseconds by call and tokens, and by SMs."""
    result = json.loads((RESULTS / file).read_text())
    times: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in result["rows"]:
        if row["work"] in CALLS and 8 <= row["sms"] <= 64:
            times[row["work"], row["tokens"]][row["sms"]] = row["us"]
    return result["num_ranks"], times


@pytest.mark.parametrize("file", FILES)
def test_the_usual_number_is_almost_the_best(file: str) -> None:
    num_ranks, times = _times(file)
    usual, promise = usual_sms(num_ranks), PROMISE[num_ranks]
    assert {call for call, _ in times} == set(CALLS)
    lost = {call: by_sms[usual] / min(by_sms.values()) - 1 for call, by_sms in times.items()}
    assert max(lost.values()) <= promise, {call: f"{100 * part:.1f} %" for call, part in lost.items() if part > promise}


def test_one_rank_has_more() -> None:
    assert [usual_sms(num_ranks) for num_ranks in range(1, 9)] == [64] + 7 * [24]
    assert usual_sms(16, 2) == usual_sms(2, 2) == 24
    sizes = dict(num_max_tokens_per_rank=64, hidden=256, num_topk=4, num_experts=32)
    assert Config(num_ranks=1, **sizes, leaves_sms=True).num_sms == 64
    assert Config(num_ranks=4, **sizes, leaves_sms=True).num_sms == 24
    assert Config(num_ranks=1, **sizes, num_sms=20).num_sms == 20
