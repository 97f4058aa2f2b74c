"""Low-latency calls over several nodes, on the CPU. The network carries puts in pieces, late and in any order (network.cpp)."""

from __future__ import annotations

import pytest

from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LOW_LATENCY, LowLatencyRound, low_latency_rounds, overlapped_rounds, seeds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

TWO_BY_ONE = dict(**LOW_LATENCY, ranks_per_node=1, num_slots=2)
TWO_BY_TWO = {**LOW_LATENCY, "num_experts": 8, "ranks_per_node": 2}
FOUR_BY_ONE = {**LOW_LATENCY, "num_experts": 8, "ranks_per_node": 1}


def options_of(seed):
    return dict(num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1)


@pytest.mark.parametrize("seed", seeds(3))
def test_two_nodes(seed):
    with Machine(2, seed, **options_of(seed)) as machine:
        low_latency_rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 4)
        assert machine.put_bytes > 0


@pytest.mark.parametrize("seed", seeds(2))
def test_open_hooks(seed):
    with Machine(2, seed, **options_of(seed)) as machine:
        overlapped_rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 6)


@pytest.mark.parametrize("seed", seeds(2))
def test_nodes_of_two_ranks(seed):
    with Machine(4, seed, **options_of(seed)) as machine:
        low_latency_rounds(machine, machine.buffers(**TWO_BY_TWO), seed, 3)


@pytest.mark.parametrize("seed", seeds(3))
def test_headers_that_arrive_in_parts(seed):
    """Half a word of a header may arrive before the other half."""
    with Machine(4, seed, **options_of(seed)) as machine:
        low_latency_rounds(machine, machine.buffers(**FOUR_BY_ONE), seed, 2)


@pytest.mark.parametrize("seed", seeds(1))
def test_lost_node_is_masked(seed):
    """The other nodes go on without it, in this call and in the next ones."""
    with Machine(3, seed) as machine:
        buffers = machine.buffers(**{**FOUR_BY_ONE, "num_experts": 6}, on_timeout="mask")
        LowLatencyRound(machine, buffers, seed, reduce=True).all()
        machine.run()
        machine.cut(source=1)
        machine.cut(target=1)
        rounds = [LowLatencyRound(machine, buffers, seed + i, calling=[0, 2], reduce=True).all() for i in (1, 2)]
        machine.run()
        for made in rounds:
            made.check(live=[0, 2])
        assert [buffers[r].query_masked_ranks() for r in (0, 2)] == [[1], [1]]
