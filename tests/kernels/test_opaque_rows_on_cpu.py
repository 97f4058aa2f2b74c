"""Quantised rows that are hard to send: words that look like empty memory, and groups of words that exclude many keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scenario_table import FORMATS

from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LOW_LATENCY, LowLatencyRound

EMPTY, GROUP = 0xFFFFFFFF, 128  # words that share a key


def hard_group(rng: np.random.Generator, words: np.ndarray) -> None:
    """Fill the words of a group. A key that makes one of them EMPTY is excluded."""
    number = np.arange(len(words), dtype=np.uint32)
    match rng.integers(8):
        case 0:
            words[:] = EMPTY
        case 1:
            words[:] = ~number  # excludes the keys from 0 on
        case 2:
            words[:] = np.uint32(rng.integers(1 << 32)) ^ number
            words[-1] = EMPTY
        case 3:
            words[rng.random(len(words)) < 0.3] = EMPTY
        case 4:
            words[:] = EMPTY - 1 - number % 130
        case 5:
            words[0] = EMPTY - 1 - rng.integers(256)
            words[rng.integers(len(words))] = EMPTY
        case 6:
            words[:] = 0
            words[-1] = EMPTY


def hard_rows(rng: np.random.Generator, num_rows: int, num_bytes: int) -> np.ndarray:
    """Draw rows of bytes."""
    made = rng.integers(0, 256, (num_rows, num_bytes), np.uint8)
    for row in made:
        words = row[: num_bytes // 4 * 4].view(np.uint32)
        for first in range(0, len(words), GROUP):
            hard_group(rng, words[first : first + GROUP])
    made[rng.random(num_rows) < 0.2] = 0xFF
    return made


SIZES = {  # hidden, bytes of a row, bytes of its scales, low_latency_sms
    "one group": (256, 496, 0, 2),
    "whole groups": (1024, 1536, 128, 2),
    "word scales": (1024, 1024, 56, 2),
    "byte scales": (1024, 1008, 91, 2),
    "scales in a group of their own": (1024, 512, 341, 1),
    "long": (8192, 8192, 224, 2),
}
MODES: dict[str, dict[str, Any]] = {"raise": {}, "mask": {"on_timeout": "mask"}, "network": {"ranks_per_node": 1}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
@pytest.mark.parametrize("size", SIZES)
def test_hard_rows(size: str, seed: int, mode: str) -> None:
    hidden, num_bytes, num_scales, sms = SIZES[size]

    def change(one: Any, rank: int, ranks: int, each: int) -> None:
        rng = np.random.default_rng([seed, rank, len(one.x)])
        one.x = hard_rows(rng, len(one.x), num_bytes)
        one.scales = hard_rows(rng, len(one.x), num_scales) if num_scales else None

    network = {"transport": "mpi"} if mode == "network" else {}
    with Machine(2, seed, weak_memory=seed % 4 != 1, **network) as machine:
        buffers = machine.buffers(**{**LOW_LATENCY, "hidden": hidden, "low_latency_sms": sms}, **MODES[mode])
        opaque = {"options": FORMATS[0], "dtype": "uint8", "changed": change}
        rounds = []
        for i in range(6 if hidden < 4096 else 3):
            kind = {"format": {"use_fp8": False}} if i % 4 == 2 else opaque  # other rows leave the memory empty, too
            more = {"reduce": True} if mode == "mask" else {}
            rounds.append(LowLatencyRound(machine, buffers, 100 * seed + i, **more, **kind).all())
        machine.run()
        for made in rounds:
            made.check()
        assert "ll_dispatch_opaque" in machine.launched
