"""Run soak on GPUs: rounds with and without graphs pass, and one wrong byte is found."""

from __future__ import annotations

import json

import pytest

from deepep_rt import soak
from deepep_rt.soak.session import Session

pytestmark = pytest.mark.gpu


def sizes(comm):
    return dict(hidden=2048, topk=4, experts=8 * comm.size, tokens=256, low_latency_tokens=32, rounds_per_buffer=60)


def test_rounds_pass(comm):
    document = soak.run(soak.Asked(rounds=300, seed=1, backend="cuda", sizes=sizes(comm), progress_s=5))
    if comm.rank:
        assert document is None
        return
    assert document["status"] == "passed", json.dumps(document["mismatches"], indent=1)
    assert (document["rounds"], document["buffers"]) == (300, 5)
    for call, times in document["calls"].items():
        assert 0 < times["p50_us"] <= times["p99_us"] <= times["max_us"], call


@pytest.mark.parametrize("ranks", ["1 a node", "2 nodes"])
def test_rounds_on_several_nodes_pass(comm, ranks):
    if comm.size % 2:
        pytest.skip("an odd number of ranks")
    on_nodes = {**sizes(comm), "ranks_per_node": 1 if ranks == "1 a node" else comm.size // 2}
    document = soak.run(soak.Asked(rounds=180, seed=3, backend="cuda", sizes=on_nodes, progress_s=5))
    assert document is None or document["status"] == "passed", json.dumps(document["mismatches"], indent=1)


def test_shapes_of_a_real_run_pass(comm):
    """Run the default shapes: rows of 7168 and of odd sizes, 4096 tokens, time-outs that mask."""
    document = soak.run(soak.Asked(rounds=150, seed=0, backend="cuda", sizes={"rounds_per_buffer": 25}, timeout_s=120))
    if document is not None:
        assert document["status"] == "passed", json.dumps(document["mismatches"], indent=1)
        assert document["buffers"] == 6


@pytest.mark.parametrize("call", ["dispatch", "combine", "low_latency_dispatch", "low_latency_combine"])
def test_a_wrong_byte_is_found(comm, monkeypatch, call):
    timed = Session.timed

    def damaged(session, name, mode, make, **options):
        result = timed(session, name, mode, make, **options)
        is_here = name == call and comm.rank == comm.size - 1 and getattr(result, "hook", None) is None
        array = getattr(result, "recv_x" if "dispatch" in name else "x") if is_here else None
        if array is not None and array.nbytes:
            session.arrays.raw(array)[:1] ^= 0x10
        return result

    monkeypatch.setattr(Session, "timed", damaged)
    document = soak.run(soak.Asked(rounds=200, seed=2, backend="cuda", sizes=sizes(comm)))
    if document is not None:
        assert document["status"] == "mismatch"
        first = document["mismatches"][0]
        assert (first["rank"], first["first_byte"] % (2 * 2048)) == (comm.size - 1, 0)
        assert call in first["call"]
