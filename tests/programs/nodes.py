"""Dispatch and combine over declared nodes: roundings between nodes, and the most rows of a dispatch."""

from __future__ import annotations

import numpy as np
import oracle
from expect import raises
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, same_bits

from deepep_rt import EPInputError, EPOutOfMemoryError


def check_sums_of_other_nodes_are_rounded(comm: MPI.Intracomm) -> None:
    """Each rank of two nodes adds 1 or 2**-9 in bfloat16, whose steps at 1 are 2**-7."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    near = 2.0**-9 * (ranks // 2)  # of the token's own node, whose first rank adds 1 to the tokens of the other node
    far = 1 + 2.0**-9 * (ranks // 2 - 1)
    rounded_once = np.array([near + far]).astype("bfloat16")
    wanted = np.array([near + float(np.array([far]).astype("bfloat16")[0])]).astype("bfloat16")
    assert (wanted == rounded_once).all() == (ranks != 4), "of two nodes of two, the roundings show"
    idx = np.arange(ranks, dtype=np.int32)[None]  # the token goes to every rank
    settings = dict(num_experts=ranks, num_topk=ranks, dtype="bfloat16")
    with make_buffer(comm, **settings, ranks_per_node=ranks // 2) as buffer:
        sent = buffer.dispatch(np.zeros((1, 32), "bfloat16"), idx)
        is_far = sent.recv_src_idx[:, 0] // (ranks // 2) != rank // (ranks // 2)
        y = np.where(is_far & (rank % (ranks // 2) == 0), 1, 2.0**-9).astype("bfloat16")[:, None].repeat(32, 1)
        out = buffer.combine(y, sent.handle).x
        assert (out == wanted).all(), (out[0, 0], wanted)


def check_too_many_rows(comm: MPI.Intracomm) -> None:
    """All ranks raise, and the Buffer stays usable."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    many = inputs_of_all(comm, 1, lambda rank: 5, hidden=32, num_topk=4, num_experts=experts, pattern="one_rank")
    few = inputs_of_all(comm, 2, lambda rank: 1, hidden=32, num_topk=4, num_experts=experts)
    x, idx = many[rank].x, many[rank].topk_idx
    room = 5 * ranks - 1
    with make_buffer(comm, num_experts=experts, ranks_per_node=1, num_max_recv_tokens=room) as buffer:
        assert buffer.config.num_max_recv_tokens == room
        for _ in range(2):
            with raises(EPOutOfMemoryError, f"num_max_recv_tokens={room}; expected at least {5 * ranks}", f"rank {ranks - 1}"):
                buffer.dispatch(x, idx)
            sent = buffer.dispatch(few[rank].x, few[rank].topk_idx, few[rank].topk_weights)
            oracle.check_dispatch(sent, oracle.expected_dispatch(rank, few, experts))
        with raises(EPInputError, f"num_worst_tokens={room + 1}", f"from 0 to {room}", "num_max_recv_tokens"):
            buffer.dispatch(x, idx, num_worst_tokens=room + 1)
        worst = [room] * ranks
        sent = buffer.dispatch(x, idx, many[rank].topk_weights, num_worst_tokens=room)
        oracle.check_dispatch(sent, oracle.expected_dispatch(rank, many, experts, num_worst_tokens=room), has_counts=False)
        y = [oracle.expected_dispatch(r, many, experts, num_worst_tokens=room).x for r in range(ranks)]
        oracle.check_sums(buffer.combine(y[rank], sent.handle), rank, many, y, experts, node_size=1, all_worst=worst)
    with make_buffer(comm, num_experts=experts, ranks_per_node=1, num_max_recv_tokens=room + 1) as buffer:
        assert len(buffer.dispatch(x, idx).recv_x) == (room + 1) * (rank == ranks - 1)
    with make_buffer(comm, num_experts=experts, ranks_per_node=ranks, num_max_recv_tokens=1) as buffer:
        assert buffer.config.num_max_recv_tokens == 64 * ranks, "on one node, there is room for all rows"
        assert len(buffer.dispatch(x, idx).recv_x) == (room + 1) * (rank == ranks - 1)


def check_low_latency_does_not_depend_on_nodes(comm: MPI.Intracomm) -> None:
    """Low-latency calls add up all rows in rank order, and have room for all of them."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(comm, 3, lambda rank: 8, hidden=256, num_topk=4, num_experts=experts, dtype="bfloat16")
    mine, bits = inputs[rank], []
    settings = dict(num_experts=experts, hidden=256, dtype="bfloat16", low_latency=True, num_max_tokens_per_rank=8)
    for limit in ({"ranks_per_node": ranks}, {"ranks_per_node": ranks // 2, "num_max_recv_tokens": 1}):
        with make_buffer(comm, **settings, **limit) as buffer:
            sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False)
            bits.append(buffer.low_latency_combine(sent.recv_x, mine.topk_idx, mine.topk_weights, sent.handle).x)
    assert same_bits(*bits)


if __name__ == "__main__":
    main(__name__)
