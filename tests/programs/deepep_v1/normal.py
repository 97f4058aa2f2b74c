"""The normal mode: all ways to call dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from .world import HIDDEN, World, deep_ep, difference, from_fp8, routing, to_fp8, tokens_in_ranks


def run_normal(world: World, num_sms: int = 24) -> None:
    """Call dispatch and combine with all combinations of rows, top-k tensors, events and streams."""
    rank, ranks, tokens = world.rank, world.num_ranks, world.num_tokens + 3 * world.rank
    num_topk, num_experts = 4, 4 * ranks
    deep_ep.Buffer.set_num_sms(num_sms)
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    num_nvl_bytes = max(c.get_nvl_buffer_size_hint(2 * HIDDEN, ranks) for c in (config, deep_ep.Buffer.get_combine_config(ranks)))
    num_rdma_bytes = config.get_rdma_buffer_size_hint(2 * HIDDEN, ranks)
    x_rand = world.random_rows(tokens, 1)
    x_rank = torch.full((tokens, HIDDEN), rank, dtype=torch.bfloat16, device=world.device)
    weights = world.random_weights(tokens, num_topk, 2)
    topk_idx = routing(world, 3, tokens, num_topk, num_experts)
    in_rank = tokens_in_ranks(topk_idx, ranks, num_experts)
    with world.buffer(num_nvl_bytes, num_rdma_bytes) as buffer:
        layout = check_layout(world, buffer, topk_idx, num_experts, in_rank)
        for previous in (False, True):
            for asynchronous in (False, True):
                for x in (x_rand, x_rank, to_fp8(x_rank), (to_fp8(x_rand)[0], to_fp8(x_rand)[1].T.contiguous().T)):
                    for with_topk in (False, True):
                        options: dict[str, Any] = dict(config=config, async_finish=asynchronous)
                        given = layout | (dict(topk_idx=topk_idx, topk_weights=weights) if with_topk else {})
                        check_handle = partial(_check_handle, world, in_rank)
                        round_trip(world, buffer, x, given, options, check_handle, previous=previous)
        _check_alignment(buffer, x_rank, topk_idx, layout)
        _check_worst(world, buffer, x_rand, topk_idx, weights, layout, in_rank)
        _check_bias(buffer, x_rand, layout)


def check_layout(
    world: World, buffer: deep_ep.Buffer, topk_idx: torch.Tensor, num_experts: int, in_rank: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Check `get_dispatch_layout`, and return its results as arguments of `dispatch`."""
    per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    assert per_rdma_rank is None
    assert torch.equal(is_token_in_rank, in_rank)
    assert is_token_in_rank.dtype == torch.bool
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert per_rank.tolist() == [int(in_rank[:, r].sum()) for r in range(world.num_ranks)]
    assert per_expert.tolist() == [int((topk_idx == e).sum()) for e in range(num_experts)]
    *again, event = buffer.get_dispatch_layout(
        topk_idx, num_experts, previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True
    )
    with event:
        pass
    assert torch.equal(again[0], per_rank)
    assert torch.equal(again[2], per_expert)
    assert torch.equal(again[3], in_rank)
    return dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_token_in_rank)


def round_trip(
    world: World,
    buffer: deep_ep.Buffer,
    x: Any,
    given: dict[str, Any],
    options: dict[str, Any],
    check_handle: Callable[..., torch.Tensor],
    *,
    previous: bool,
    bias: tuple[torch.Tensor, ...] = (),
) -> None:
    """Dispatch and combine on the communication stream or in order. `check_handle` also returns the rows that arrive."""
    with_topk, source = "topk_idx" in given, from_fp8(x) if isinstance(x, tuple) else x
    in_rank = given["is_token_in_rank"]

    def call(method: Callable[..., Any], **arguments: Any) -> Any:
        if previous:
            arguments["previous_event"] = buffer.capture()
        *results, event = method(**arguments, **options)
        if options["async_finish"]:
            event.current_stream_wait()
        return results

    recv, recv_idx, recv_weights, counts, handle = call(buffer.dispatch, x=x, **given)
    assert isinstance(recv, tuple) == isinstance(x, tuple)
    recv_x = from_fp8(recv) if isinstance(recv, tuple) else recv
    expected = check_handle(handle, source)
    assert torch.equal(recv_x, expected)
    per_expert = sum(world.gather(given["num_tokens_per_expert"].view(world.num_ranks, -1)))
    assert counts == per_expert[world.rank].tolist()

    if with_topk:
        each = len(counts)
        assert ((recv_idx == -1) | ((recv_idx >= 0) & (recv_idx < each))).all()
        assert [int((recv_idx == e).sum()) for e in range(each)] == counts
        assert (recv_weights[recv_idx == -1] == 0).all()
    else:
        assert recv_idx is recv_weights is None
        recv_x, *others = call(buffer.dispatch, x=x, handle=handle)
        recv_x = from_fp8(recv_x) if isinstance(x, tuple) else recv_x
        assert others == [None] * 4
        assert torch.equal(recv_x, expected)

    more: dict[str, Any] = dict(topk_weights=recv_weights) if with_topk else {}
    combined, combined_weights = call(buffer.combine, x=recv_x, handle=handle, **more, **(dict(bias=bias) if bias else {}))
    assert combined.dtype == torch.bfloat16
    assert difference(combined, source.float() * in_rank.sum(1, keepdim=True) + sum(each.float() for each in bias)) < 1e-5
    if with_topk:
        assert torch.allclose(combined_weights, given["topk_weights"] * (given["topk_idx"] >= 0))
    else:
        assert combined_weights is None


def _check_handle(world: World, in_rank: torch.Tensor, handle: Any, source: torch.Tensor) -> torch.Tensor:
    """Check the entries of a handle, and return the rows that arrive: in the order of ranks, then tokens."""
    rank, everywhere = world.rank, world.gather(in_rank)
    expected = torch.cat([rows[sent[:, rank]] for rows, sent in zip(world.gather(source), everywhere, strict=True)])
    prefix = handle[0]
    assert prefix.dtype == torch.int32
    assert torch.equal(prefix.long(), torch.stack([sent.sum(0) for sent in everywhere]).cumsum(0))
    assert prefix[-1, rank].item() == len(expected)
    assert handle[3].tolist() == torch.cat([sent[:, rank].nonzero().flatten() for sent in everywhere]).tolist()
    assert torch.equal(handle[4], in_rank)
    assert len(handle) == 6
    return expected


def _check_alignment(buffer: deep_ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, layout: dict[str, Any]) -> None:
    for more in ({}, {"topk_idx": topk_idx}):
        _, _, _, counts, _, _ = buffer.dispatch(x, **layout, **more, expert_alignment=1)
        _, _, _, aligned, _, _ = buffer.dispatch(x, **layout, **more, expert_alignment=16)
        assert aligned == [-(-count // 16) * 16 for count in counts]


def _check_worst(
    world: World,
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    layout: dict[str, Any],
    in_rank: torch.Tensor,
) -> None:
    """Check results of fixed shape, for which the host does not wait."""
    worst = 2 * world.num_ranks * (world.num_tokens + 3 * world.num_ranks)
    known, *_ = buffer.dispatch(x, **layout)
    for more in ({}, {"topk_idx": topk_idx, "topk_weights": weights}):
        recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(x, **layout, **more, num_worst_tokens=worst)
        assert counts == []
        assert recv_x.shape == (worst, HIDDEN)
        num_recv = int(handle[0][-1, world.rank])
        assert torch.equal(recv_x[:num_recv], known)
        if more:
            assert (recv_idx[num_recv:] == -1).all()
        combined, _, _ = buffer.combine(recv_x, handle)
        assert difference(combined, x.float() * in_rank.sum(1, keepdim=True)) < 1e-5


def _check_bias(buffer: deep_ep.Buffer, x: torch.Tensor, layout: dict[str, Any]) -> None:
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    plain, _, _ = buffer.combine(recv_x, handle)
    one, _, _ = buffer.combine(recv_x, handle, bias=x)
    two, _, _ = buffer.combine(recv_x, handle, None, (x, x))
    assert difference(one, plain.float() + x) < 1e-5
    assert difference(two, plain.float() + 2 * x.float()) < 1e-5


def run_ranks_only(world: World) -> None:
    """Dispatch tokens that name ranks and no experts. Some of them name no rank."""
    ranks = world.num_ranks
    with world.buffer(1) as buffer:
        for dtype in (torch.bfloat16, torch.float32):
            tokens = 20 + world.rank
            x = torch.randn((tokens, 64), device=world.device, generator=world.generator(1)).to(dtype)
            in_rank = world.random_weights(tokens, ranks, 2) < 0.5
            per_expert = torch.arange(3 * ranks, dtype=torch.int32, device=world.device) + world.rank
            per_rank = in_rank.sum(0, dtype=torch.int32)
            recv_x, idx, weights, counts, handle, event = buffer.dispatch(
                x, None, per_rank, None, in_rank, per_expert, expert_alignment=4
            )
            assert idx is weights is None
            assert event.event is None
            everywhere = world.gather(in_rank)
            expected = torch.cat([rows[sent[:, world.rank]] for rows, sent in zip(world.gather(x), everywhere, strict=True)])
            assert torch.equal(recv_x, expected)
            sums = np.arange(3 * ranks) * ranks + sum(range(ranks))
            of_this_rank = sums.reshape(ranks, 3)[world.rank]
            assert counts == (-(-of_this_rank // 4) * 4).tolist()
            combined, _, _ = buffer.combine(recv_x, handle)
            assert combined.dtype == dtype
            assert difference(combined, x.float() * in_rank.sum(1, keepdim=True)) < 1e-5
