"""Ranks that low-latency calls exclude. The runs need a short DEEPEP_RT_TIMEOUT_S."""

from __future__ import annotations

from collections.abc import Collection

import torch
from expect import raises

from deepep_rt import EPInputError, EPUnavailableError

from .low_latency import RoundTrip
from .world import HIDDEN, World, deep_ep, difference, routing


def _check_status(buffer: deep_ep.Buffer, world: World, live: Collection[int]) -> None:
    """Check that the mask names all ranks but `live`."""
    status = torch.empty(world.num_ranks, dtype=torch.int32, device=world.device)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(r not in live) for r in range(world.num_ranks)]


def run_masks(world: World) -> None:
    """Exclude a rank by a call, include it again, and let a time-out exclude it."""
    rank, ranks, tokens, num_experts = world.rank, world.num_ranks, 8, 2 * world.num_ranks
    last = ranks - 1
    live = [last] if rank == last else [r for r in range(ranks) if r != last]
    x, topk_idx, weights = world.random_rows(tokens, 1), routing(world, 2, tokens, 2, num_experts), world.ones(tokens, 2)
    with world.buffer(low_latency_mode=True, enable_shrink=True) as buffer:

        def step(live: Collection[int], hooked: bool = False) -> None:
            RoundTrip(world, buffer, x, topk_idx, weights, tokens, num_experts, hooked=hooked, live=live).run()
            _check_status(buffer, world, live)

        def set_masks(*mask: bool) -> None:
            for r in range(ranks):
                if r not in live:
                    buffer.low_latency_update_mask_buffer(r, *mask)

        set_masks(True)  # the Buffer has no memory yet
        step(live)
        world.comm.Barrier()
        _check_local_buffer_tensor(buffer)
        buffer.low_latency_clean_mask_buffer()
        world.comm.Barrier()
        step(range(ranks), hooked=True)
        set_masks(True)
        step(live, hooked=True)
        world.comm.Barrier()
        set_masks()
        world.comm.Barrier()
        step(range(ranks))
        with raises(EPInputError, "rank_to_mask"):
            buffer.low_latency_update_mask_buffer(rank, True)

        if rank == last:  # it makes no call, so a time-out excludes it
            set_masks(True)
        else:
            packed, count, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, num_experts, use_fp8=False)
            combined, _, _ = buffer.low_latency_combine(packed.clone(), topk_idx, weights, handle)
            assert not combined.isnan().any()
            assert count.shape == (2,)
        _check_status(buffer, world, live)
        world.comm.Barrier()


def _check_local_buffer_tensor(buffer: deep_ep.Buffer) -> None:
    """VLLM sets this memory to zero before ranks come back."""
    for dtype, size in ((torch.int8, None), (torch.float32, torch.Size([2, 0]))):
        memory = buffer.get_local_buffer_tensor(dtype, size, use_rdma_buffer=True).zero_()
        assert (memory.dtype, memory.shape) == (dtype, size or (0,))
    with raises(EPUnavailableError, "no elements"):
        buffer.get_local_buffer_tensor(torch.int8, torch.Size([1]), use_rdma_buffer=True)
    with raises(EPInputError, "dtype='int8'"):
        buffer.get_local_buffer_tensor("int8", use_rdma_buffer=True)


def run_lost_ranks(world: World) -> None:
    """Lose a rank before its first call, or later. The others wait for it once, and it waits for none of them."""
    rank, ranks, tokens, num_experts = world.rank, world.num_ranks, 8, 8 * world.num_ranks
    last = ranks - 1
    x = world.random_rows(tokens, 1)
    for lost_at_once, topk in ((True, 6), (False, 8)):  # the memory that the constructor takes serves both
        topk_idx = routing(world, 2, tokens, topk, num_experts)
        weights = torch.rand(topk_idx.shape, dtype=torch.float32, device=world.device)
        deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, num_experts)
        with world.buffer(low_latency_mode=True, enable_shrink=True) as buffer:

            def step(live: Collection[int], topk_idx: torch.Tensor = topk_idx, weights: torch.Tensor = weights) -> None:
                packed, _, handle, event, _ = buffer.low_latency_dispatch(
                    x, topk_idx, tokens, num_experts, use_fp8=False, async_finish=True
                )
                event.current_stream_wait()
                _check_status(buffer, world, live)  # this waits for the call
                lost = torch.isin(topk_idx // 8, torch.tensor([r for r in range(ranks) if r not in live], device=world.device))
                kept = topk_idx.masked_fill(lost, -1)
                combined, _, _ = buffer.low_latency_combine(packed.clone(), kept, weights, handle)
                assert difference(combined, x.float() * weights.masked_fill(kept == -1, 0).sum(1, keepdim=True)) < 1e-5

            if not lost_at_once:
                step(range(ranks))
            if rank != last:  # the last rank leaves without a message
                if not lost_at_once:
                    buffer.clean_low_latency_buffer(tokens, HIDDEN, num_experts)
                _check_status(buffer, world, range(ranks) if lost_at_once else range(last))
                step(range(last))
        world.comm.Barrier()
