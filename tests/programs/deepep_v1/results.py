"""Results in PyTorch's memory, and results without gradients."""

from __future__ import annotations

import warnings
from typing import Any

from expect import raises

from .normal import check_layout
from .world import HIDDEN, World, deep_ep, difference, from_fp8, layout_of, routing, to_fp8, tokens_in_ranks


def run_copied_results(world: World) -> None:
    """Free results in PyTorch's memory while they are held, as Megatron-LM's overlapped schedule does."""
    num_experts = 4 * world.num_ranks
    x = world.random_rows(world.num_tokens, 9)
    idx = routing(world, 9, world.num_tokens, 4, num_experts)
    in_rank = tokens_in_ranks(idx, world.num_ranks, num_experts)
    weights = world.ones(*idx.shape)
    with world.buffer(int(1e8)) as buffer:
        layout = check_layout(world, buffer, idx, num_experts, in_rank)
        with raises(RuntimeError, "resiz"):  # results in the Buffer's memory cannot be resized
            buffer.dispatch(x, **layout, topk_idx=idx)[0].untyped_storage().resize_(0)
        deep_ep.Buffer.copies_results = True
        try:
            for is_async in (False, True):
                event: Any
                pair, recv_idx, recv_weights, _, handle, event = buffer.dispatch(
                    to_fp8(x), **layout, topk_idx=idx, topk_weights=weights, async_finish=is_async
                )
                rows, *_, again = buffer.dispatch(x, handle=handle, async_finish=is_async)
                with event, again:  # at the end the current stream waits
                    pass
                assert difference(from_fp8(pair), rows) < 1e-3
                combined, sums, event = buffer.combine(rows, handle, topk_weights=recv_weights, async_finish=is_async)
                with event:
                    pass
                assert difference(combined, x.float() * in_rank.sum(1, keepdim=True)) < 1e-5
                for result in (*pair, recv_idx, recv_weights, rows, combined, sums):
                    result.untyped_storage().resize_(0)
        finally:
            deep_ep.Buffer.copies_results = False


def run_gradients(world: World) -> None:
    """Pass tensors that require a gradient. The calls give none and do not warn: DeepEP's programs compute their own."""
    num_experts = 2 * world.num_ranks
    x, topk_idx = world.random_rows(4, 1), routing(world, 1, 4, 2, num_experts)
    weights, scales = world.ones(4, 2), world.ones(4, HIDDEN // 128)
    tensors = [t.requires_grad_() for t in (x, weights, scales)]
    with world.buffer(int(1e7), low_latency_mode=True) as buffer, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*requires a gradient")
        layout = layout_of(buffer, topk_idx, num_experts)
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout)
        buffer.dispatch((x, scales), handle=handle)
        recv_x, recv_weights = recv_x.clone().requires_grad_(), recv_weights.clone().requires_grad_()
        for bias in (x, (x, x)):
            combined, sums, _ = buffer.combine(recv_x, handle, recv_weights, bias=bias)
            tensors += [combined, sums]
        packed, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, num_experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(packed.clone().requires_grad_(), topk_idx, weights, handle)
        assert [t.requires_grad for t in (*tensors, combined)] == [True] * 3 + [False] * 5
