"""Wrong arguments and unsupported names. An error comes before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from expect import raises

from deepep_rt import EPDestroyedError, EPInputError, EPUnavailableError

from .world import HIDDEN, World, deep_ep, layout_of, routing


def run_errors(world: World) -> None:
    """Make wrong calls in both modes, and check that right calls still work afterwards."""
    x = torch.ones((4, HIDDEN), dtype=torch.bfloat16, device=world.device)
    num_experts = 2 * world.num_ranks
    topk_idx = routing(world, 1, 4, 2, num_experts)
    with world.buffer(1) as buffer:
        layout = layout_of(buffer, topk_idx, num_experts)
        _check_wrong_dispatches(buffer, x, topk_idx, layout, num_experts)
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx)
        _check_wrong_handles(buffer, x, topk_idx, layout, recv_x, handle)
        with raises(EPInputError, "num_worst_tokens"):
            buffer.dispatch(x.repeat(40, 1), **layout, topk_idx=topk_idx.repeat(40, 1), num_worst_tokens=world.num_ranks)
        _check_unsupported_names(buffer, x, topk_idx, num_experts)
        combined, _, _ = buffer.combine(recv_x, handle)  # the errors have changed nothing
        assert torch.equal(combined, x * layout["is_token_in_rank"].sum(1, keepdim=True))
        _check_an_error_of_one_rank(world, buffer, x, topk_idx, layout, recv_x)
    with raises(EPDestroyedError, "destroyed"):
        buffer.dispatch(x, **layout, topk_idx=topk_idx)
    assert buffer.runtime is None
    with world.buffer(low_latency_mode=True) as buffer:
        with raises(EPInputError, "num_nvl_bytes"):
            buffer.dispatch(x, **layout, topk_idx=topk_idx)
        _check_low_latency_errors(world, buffer, x, topk_idx, num_experts)


def _check_wrong_dispatches(
    buffer: deep_ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, layout: dict[str, torch.Tensor], num_experts: int
) -> None:
    weights = torch.ones((4, 2), dtype=torch.float32, device=x.device)
    with raises(EPInputError, "async_finish"):
        buffer.get_dispatch_layout(topk_idx, num_experts)[-1].current_stream_wait()
    with raises(EPInputError, "topk_idx=<ndarray>", "torch.Tensor"):
        buffer.get_dispatch_layout(topk_idx.cpu().numpy(), num_experts)
    with raises(EPInputError, "x.shape="):
        buffer.dispatch(x[0], **layout, topk_idx=topk_idx)
    for wrong in (np.ones((4, HIDDEN), np.float32), (np.ones((4, HIDDEN), np.uint8), np.ones((4, 1), np.float32))):
        with raises(EPInputError, "x=<ndarray>", "torch.Tensor"):
            buffer.dispatch(wrong, **layout, topk_idx=topk_idx)
    with raises(EPInputError, "x is a torch.sparse_coo tensor"):
        buffer.dispatch(x.to_sparse(), **layout, topk_idx=topk_idx)
    with raises(EPInputError, "topk_idx=<ndarray>", "torch.Tensor"):
        buffer.dispatch(x, **layout, topk_idx=topk_idx.cpu().numpy())
    with raises(EPInputError, "topk_idx is a torch.sparse_coo tensor"):
        buffer.dispatch(x, **layout, topk_idx=topk_idx.to_sparse())
    with raises(EPInputError, "is_token_in_rank"):
        buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights)
    with raises(EPInputError, "topk_idx"):
        buffer.dispatch(x, **layout, topk_weights=weights)


def _check_wrong_handles(
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    layout: dict[str, torch.Tensor],
    recv_x: torch.Tensor,
    handle: Any,
) -> None:
    with raises(EPInputError, "handle"):
        buffer.dispatch(x, handle, topk_idx=topk_idx)
    with raises(EPInputError, "x=<ndarray>", "torch.Tensor"):
        buffer.combine(np.ones((4, HIDDEN), np.float32), handle)
    prefix, channels, recv_channels, source, in_rank, head = handle  # a program may unpack it like a tuple
    assert torch.equal(prefix, handle[0])
    assert torch.equal(source, handle[-3])
    assert in_rank is layout["is_token_in_rank"]
    assert len(handle[:2]) == 2
    for entry, name in (
        (channels, "channel_prefix_matrix"),
        (recv_channels, "recv_channel_prefix_matrix"),
        (head, "send_head"),
    ):
        with raises(EPUnavailableError, name):
            torch.sum(entry)
    with raises(EPInputError, "whole"):
        buffer.combine(recv_x, (None,) * 6)
    with raises(EPInputError, "whole"):
        buffer.dispatch(x, [None] * 6)


def _check_unsupported_names(buffer: deep_ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> None:
    for name in ("internode_dispatch", "internode_combine"):
        with raises(EPUnavailableError, name, "on one node"):
            getattr(buffer, name)(x, handle=None)
    with raises(EPUnavailableError, "get_local_buffer_tensor"):
        buffer.get_local_buffer_tensor(torch.uint8)
    with raises(EPUnavailableError, "runtime.intranode_dispatch"):
        buffer.runtime.intranode_dispatch(x)
    assert not hasattr(buffer.runtime, "intranode_dispatch")
    for call in (
        lambda: buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True),
        lambda: buffer.low_latency_dispatch(x, topk_idx, 4, num_experts),
        lambda: buffer.clean_low_latency_buffer(4, HIDDEN, num_experts),
    ):
        with raises(EPInputError, "low_latency_mode"):
            call()


def _check_an_error_of_one_rank(
    world: World,
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    layout: dict[str, torch.Tensor],
    recv_x: torch.Tensor,
) -> None:
    """One rank makes a wrong call, and then the right one, in which the others wait for it."""
    weights = world.ones(4, 2)
    if world.rank == 0:
        with raises(EPInputError, "topk_weights"):
            buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights[:2])
    for _ in range(3):
        again, _, _, counts, _, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights)
        assert torch.equal(again, recv_x)
        per_expert = layout["num_tokens_per_expert"].view(world.num_ranks, -1)
        assert counts == sum(world.gather(per_expert))[world.rank].tolist()


def _check_low_latency_errors(
    world: World, buffer: deep_ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int
) -> None:
    weights = world.ones(4, 2)
    with raises(EPInputError, "return_recv_hook"):
        buffer.low_latency_dispatch(x, topk_idx, 4, num_experts, async_finish=True, return_recv_hook=True)
    with raises(EPInputError, "x.shape="):
        buffer.low_latency_dispatch(x[0], topk_idx, 4, num_experts)
    with raises(EPInputError, "x=<ndarray>", "torch.Tensor"):
        buffer.low_latency_dispatch(np.ones((4, HIDDEN), np.float32), topk_idx, 4, num_experts)
    with raises(EPInputError, "topk_idx=<ndarray>", "torch.Tensor"):
        buffer.low_latency_dispatch(x, topk_idx.cpu().numpy(), 4, num_experts)
    with raises(EPInputError, "512"):
        buffer.low_latency_dispatch(x[:, :128].contiguous(), topk_idx, 4, num_experts, round_scale=True, use_ue8m0=True)
    packed, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, num_experts, use_fp8=False)
    with raises(EPInputError, "x=<ndarray>", "torch.Tensor"):
        buffer.low_latency_combine(np.ones((4, HIDDEN), np.float32), topk_idx, weights, handle)
    with raises(EPInputError, "whole"):
        buffer.low_latency_combine(packed, topk_idx, weights, tuple(handle))
    with raises(EPInputError, "whole"):
        buffer.get_next_low_latency_combine_buffer(tuple(handle))
    with raises(EPUnavailableError, "combine_wait_recv_cost_stats"):
        buffer.low_latency_combine(packed, topk_idx, weights, handle, combine_wait_recv_cost_stats=weights)
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(topk_idx[:, 0]),
        buffer.low_latency_clean_mask_buffer,
    ):
        with raises(EPInputError, "enable_shrink"):
            call()
    combined, _, _ = buffer.low_latency_combine(packed.clone(), topk_idx, weights, handle)
    assert torch.equal(combined, x * (topk_idx >= 0).sum(1, keepdim=True))
