"""The normal mode between nodes: the calls of DeepEP's program for several nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from expect import raises

from deepep_rt import EPInputError

from .growth import grow
from .normal import round_trip
from .world import HIDDEN, World, deep_ep, difference, layout_of, routing, to_fp8, tokens_in_ranks


def run_internode(world: World, ranks_per_node: int) -> None:
    """Make the calls with rows of both kinds, with and without expert numbers, in order and on the communication stream."""
    rank, ranks, tokens = world.rank, world.num_ranks, world.num_tokens + 3 * world.rank
    num_topk, num_experts = 4, 4 * ranks
    config = deep_ep.Config(24, 8, 512, 16, 128)
    num_bytes = config.get_nvl_buffer_size_hint(2 * HIDDEN, ranks), config.get_rdma_buffer_size_hint(2 * HIDDEN, ranks)
    x_rand = world.random_rows(tokens, 1)
    x_fp8, scales = to_fp8(torch.full((tokens, HIDDEN), rank, dtype=torch.bfloat16, device=world.device))
    weights = world.random_weights(tokens, num_topk, 2)
    topk_idx = routing(world, 3, tokens, num_topk, num_experts)
    in_rank = tokens_in_ranks(topk_idx, ranks, num_experts)
    with world.buffer(*num_bytes, num_qps_per_rank=24) as buffer:
        _check_runtime(buffer, rank, ranks, ranks_per_node)
        layout = _check_layout(buffer, topk_idx, num_experts, in_rank, ranks_per_node)
        for with_events in (False, True):
            for x in (x_rand, (x_fp8, scales.T.contiguous().T)):
                for with_topk in (False, True):
                    given = layout | (dict(topk_idx=topk_idx, topk_weights=weights) if with_topk else {})
                    bias = torch.ones_like(x_rand), world.random_rows(tokens, 4)
                    options = dict(config=config, async_finish=with_events)
                    check_handle = partial(_check_handle, world, in_rank, ranks_per_node)
                    round_trip(world, buffer, x, given, options, check_handle, previous=with_events, bias=bias)
        if rank == 0:  # it makes a wrong call, and then the right one, in which the others wait for it
            with raises(EPInputError, "topk_weights"):
                buffer.dispatch(x_rand, **layout, topk_idx=topk_idx, topk_weights=weights[:2])
        _check_worst(world, buffer, x_rand, layout | dict(topk_idx=topk_idx, topk_weights=weights))
        _check_calls_by_their_own_names(buffer, x_rand, layout | dict(topk_idx=topk_idx), config)
        with raises(EPInputError, "num_tokens_per_rdma_rank=None"):
            buffer.dispatch(x_rand, topk_idx=topk_idx, **{**layout, "num_tokens_per_rdma_rank": None})


def _check_runtime(buffer: deep_ep.Buffer, rank: int, ranks: int, ranks_per_node: int) -> None:
    runtime = buffer.runtime
    assert (runtime.is_available(), runtime.is_internode_available()) == (True, True)
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (ranks // ranks_per_node, rank // ranks_per_node)
    assert [runtime.get_root_rdma_rank(is_global) for is_global in (True, False)] == [rank % ranks_per_node, 0]


def _check_layout(
    buffer: deep_ep.Buffer, topk_idx: torch.Tensor, num_experts: int, in_rank: torch.Tensor, ranks_per_node: int
) -> dict[str, torch.Tensor]:
    """Check `get_dispatch_layout`, and return its results as arguments of `dispatch`."""
    layout = layout_of(buffer, topk_idx, num_experts)
    assert torch.equal(layout["is_token_in_rank"], in_rank)
    assert layout["num_tokens_per_rank"].tolist() == in_rank.sum(0).tolist()
    assert layout["num_tokens_per_expert"].tolist() == [int((topk_idx == e).sum()) for e in range(num_experts)]
    nodes = in_rank.split(ranks_per_node, dim=1)
    assert layout["num_tokens_per_rdma_rank"].tolist() == [int(node.any(1).sum()) for node in nodes]
    assert layout["num_tokens_per_rdma_rank"].dtype == torch.int32
    return layout


def _check_handle(world: World, in_rank: torch.Tensor, ranks_per_node: int, handle: Any, source: torch.Tensor) -> torch.Tensor:
    """Check the entries of a handle, and return the rows that arrive: in the order of ranks, then tokens."""
    rank, everywhere = world.rank, world.gather(in_rank)
    counts = torch.tensor([int(sent[:, rank].sum()) for sent in everywhere])
    assert len(handle) == 10
    assert torch.equal(handle[0], in_rank)
    prefix, meta = handle[-4], handle[-3]
    assert prefix.dtype == torch.int32
    assert prefix.tolist() == counts.cumsum(0).tolist()
    assert (meta.shape, meta.dtype) == ((int(counts.sum()), 8), torch.uint8)
    node, bits = meta.cpu().view(torch.int32).T
    assert node.tolist() == (torch.arange(world.num_ranks) // ranks_per_node).repeat_interleave(counts).tolist()
    assert (bits == 1 << rank % ranks_per_node).all()
    return torch.cat([rows[sent[:, rank]] for rows, sent in zip(world.gather(source), everywhere, strict=True)])


def _check_worst(world: World, buffer: deep_ep.Buffer, x: torch.Tensor, given: dict[str, Any]) -> None:
    """Check results of fixed shape, for which the host does not wait."""
    worst = world.num_ranks * (world.num_tokens + 3 * world.num_ranks)
    known, known_idx, known_weights, *_ = buffer.dispatch(x, **given)
    recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(x, **given, num_worst_tokens=worst)
    assert (counts, len(recv_x), len(recv_idx), len(recv_weights)) == ([], worst, worst, worst)
    num_recv = int(handle[-4][-1])
    assert num_recv == len(known)
    node, bits = handle[-3].cpu().view(torch.int32).T
    assert [(node >= 0).tolist(), (bits > 0).tolist()] == [[True] * num_recv + [False] * (worst - num_recv)] * 2
    for result, expected in ((recv_x, known), (recv_idx, known_idx), (recv_weights, known_weights)):
        assert torch.equal(result[:num_recv], expected)
    assert (recv_idx[num_recv:] == -1).all()
    combined, _, _ = buffer.combine(recv_x, handle)
    assert difference(combined, x.float() * given["is_token_in_rank"].sum(1, keepdim=True)) < 1e-5


def _check_calls_by_their_own_names(
    buffer: deep_ep.Buffer, x: torch.Tensor, given: dict[str, Any], config: deep_ep.Config
) -> None:
    """Call `internode_dispatch` and `internode_combine`, also with the entries of a handle in a tuple."""
    expected, *_, handle, _ = buffer.dispatch(x, **given)
    recv_x, *_, again, _ = buffer.internode_dispatch(x, **given, config=config)
    assert torch.equal(recv_x, expected)
    repeated, *_ = buffer.internode_dispatch(x, tuple(again), config=config)
    assert torch.equal(repeated, expected)
    sums = [buffer.combine(recv_x, handle)[0], buffer.internode_combine(recv_x, list(again), config=config)[0]]
    assert torch.equal(*sums)


def run_internode_growth(world: World) -> None:
    """Change the number of tokens between ranks and calls, and send all tokens to one rank. Earlier results stay valid."""
    num_experts = 8 * world.num_ranks
    steps = [(7, 1, num_experts), (0, 0, num_experts), (5, 140, num_experts), (250, 0, 8), (600, 3, 8), (1, 0, num_experts)]
    with world.buffer(1, 1) as buffer:
        held = grow(world, buffer, steps, 8, 1, lambda handle: handle[-4][-1], skip=0)
        most = max(len(recv_x) / handle.buffer.config.num_max_sent_rows for _, _, recv_x, _, handle in held)
        assert world.rank or world.num_ranks == 2 or most > 2, "the rows of one step need more room than a Buffer has at first"
