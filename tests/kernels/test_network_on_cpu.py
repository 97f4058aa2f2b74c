"""Low-latency calls over several nodes, on the CPU. The network carries puts in pieces, late and in any order (network.cpp)."""

from __future__ import annotations

import pytest

from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LOW_LATENCY, low_latency_rounds, seeds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")


@pytest.mark.parametrize("seed", seeds(3))
def test_two_nodes(seed: int) -> None:
    with Machine(2, seed, num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1) as machine:
        low_latency_rounds(machine, machine.buffers(**LOW_LATENCY, ranks_per_node=1), seed, 4)
        assert machine.put_bytes > 0
