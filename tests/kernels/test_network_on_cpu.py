"""Low-latency calls over several nodes, on the CPU. The network carries puts in pieces, late and in any order (network.cpp)."""

from __future__ import annotations

import pytest
from scenario_table import OPAQUE

from deepep_rt import EPTimeoutError
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import (
    LOW_LATENCY,
    LowLatencyRound,
    broken,
    compressed_low_latency_rounds,
    fails,
    low_latency_rounds,
    opaque_rounds,
    overlapped_rounds,
    seeds,
)

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

TWO_BY_ONE = dict(**LOW_LATENCY, ranks_per_node=1, num_slots=2)
TWO_BY_TWO = {**LOW_LATENCY, "num_experts": 8, "ranks_per_node": 2}
FOUR_BY_ONE = {**LOW_LATENCY, "num_experts": 8, "ranks_per_node": 1}


def options_of(seed):
    return dict(num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1)


TRANSPORTS = pytest.mark.parametrize("transport", ["nvshmem", "mpi"])


@TRANSPORTS
@pytest.mark.parametrize("seed", seeds(2))
def test_two_nodes(transport, seed):
    with Machine(2, seed, transport=transport, **options_of(seed)) as machine:
        low_latency_rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 4)
        assert machine.put_bytes > 0


@TRANSPORTS
def test_compressed_rows(transport):
    with Machine(2, 1, transport=transport, weak_memory=transport == "mpi") as machine:
        compressed_low_latency_rounds(machine, machine.buffers(**{**TWO_BY_ONE, "hidden": 512}), 1, 5)
        assert machine.put_bytes > 0


@TRANSPORTS
@pytest.mark.parametrize("seed", seeds(len(OPAQUE)))
def test_quantised_rows(transport, seed):
    with Machine(2, seed, transport=transport, weak_memory=transport == "mpi") as machine:
        opaque_rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 4)
        assert "ll_dispatch_opaque" in machine.launched
        assert machine.put_bytes > 0


@TRANSPORTS
@pytest.mark.parametrize("seed", seeds(2))
def test_open_hooks(transport, seed):
    with Machine(2, seed, transport=transport, **options_of(seed)) as machine:
        overlapped_rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 6)


def rounds_where_puts_wrap_around(machine, seed):
    """The number of the put that passes 2**32 changes with the seed, so that some seeds hit a row that is awaited.

    Tokens have several rows on a rank, which share staging memory.
    """
    machine.first_put = 2**32 - 6 - seed
    sizes = {**TWO_BY_ONE, "num_topk": 4, "num_max_tokens_per_rank": 8}
    low_latency_rounds(machine, machine.buffers(**sizes), seed, 2, reduce=False, hooks=False)


@pytest.mark.parametrize("seed", seeds(2))
def test_numbers_of_puts_wrap_around(seed):
    with Machine(2, seed, transport="mpi", weak_memory=True) as machine:
        rounds_where_puts_wrap_around(machine, seed)


@TRANSPORTS
@pytest.mark.parametrize("seed", seeds(1))
def test_nodes_of_two_ranks(transport, seed):
    with Machine(4, seed, transport=transport, **options_of(seed + (transport == "mpi"))) as machine:
        low_latency_rounds(machine, machine.buffers(**TWO_BY_TWO), seed, 3)


@pytest.mark.parametrize("seed", seeds(2))
def test_headers_that_arrive_in_parts(seed):
    """Half a word of a header may arrive before the other half."""
    with Machine(4, seed, **options_of(seed)) as machine:
        low_latency_rounds(machine, machine.buffers(**FOUR_BY_ONE), seed, 2)


@TRANSPORTS
@pytest.mark.parametrize("seed", seeds(1))
def test_lost_node_is_masked(transport, seed):
    """The other nodes go on without it, in this call and in the next ones."""
    with Machine(3, seed, transport=transport) as machine:
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


def test_lost_node_is_named():
    with Machine(2, 0, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_ONE)
        LowLatencyRound(machine, buffers, 1, hooks=False).all()
        machine.run()
        machine.cut(source=1)
        LowLatencyRound(machine, buffers, 2, hooks=False).all()
        machine.run()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            buffers[0].check()


# --- broken kernels -------------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "rounds"),
    [
        pytest.param(
            "common/network.cuh",
            r"st_release_sys\(&entry->sequence",
            "st_relaxed_sys(&entry->sequence",
            overlapped_rounds,
            id="no-release",
        ),
        pytest.param(
            "low_latency/ll_dispatch_receive.cuh",
            r"if \(lane == 0\) ok = wait_epoch\(p, at<const u64>\(mine, flag_offset",
            "if (false) ok = wait_epoch(p, at<const u64>(mine, flag_offset",
            low_latency_rounds,  # overlapped rounds show it in a few seeds only, and late
            id="no-wait-for-the-word",
        ),
        pytest.param(
            "low_latency/ll_opaque_rows.cuh",
            r" \+ 4 \* \(\(all_vecs\(p\) \+ kKeyedVecs - 1\) / kKeyedVecs\)",
            "",
            opaque_rounds,
            id="keys-stay-behind",
        ),
    ],
)
def test_broken_kernels_fail(tmp_path, file, pattern, replacement, rounds):
    folder = broken(tmp_path, file, pattern, replacement)
    options = dict(transport="mpi", weak_memory=True)
    assert fails(folder, lambda machine, seed: rounds(machine, machine.buffers(**TWO_BY_ONE), seed, 8), **options)


@pytest.mark.full
def test_an_answer_of_an_older_put_is_noticed(tmp_path):
    folder = broken(tmp_path, "common/network.cuh", r"if \(is_awaited\) st_relaxed_sys\(&entry->sent, sequence - 1\);", "")
    assert fails(folder, rounds_where_puts_wrap_around, transport="mpi", weak_memory=True)
