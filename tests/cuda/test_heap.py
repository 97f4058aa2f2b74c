"""Symmetric memory of CUDA's virtual memory: real processes share it on a machine without a GPU."""

from __future__ import annotations

import pytest
from launch import run_checks

pytest.importorskip("cuda.bindings.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(13, marks=pytest.mark.full)])  # a queue of a socket holds 10 messages
def test_ranks_share_memory(num_ranks: int) -> None:
    run_checks(num_ranks, "heap")
