"""Buffers of the normal mode that grow with their calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepep_rt.compat import buffer_cache

from .world import HIDDEN, World, deep_ep, difference, layout_of, routing

# Tokens of each rank, and more tokens of one rank, in each step.
STEPS = [(7, 1), (0, 0), (128, 0), (5, 140), (250, 0), (0, 600), (600, 3), (1, 0)]


@contextmanager
def _recorded() -> Iterator[tuple[list[int], list[tuple[int, ...]]]]:
    """Record the token limits of new Buffers, and the messages before them."""
    made: list[int] = []
    messages: list[tuple[int, ...]] = []
    make, gather = buffer_cache.Buffer, buffer_cache.timed_allgather
    buffer_cache.Buffer = lambda *args, **kwargs: made.append(kwargs["num_max_tokens_per_rank"]) or make(*args, **kwargs)  # type: ignore
    buffer_cache.timed_allgather = lambda *args: messages.append(args[1]) or gather(*args)  # type: ignore
    try:
        yield made, messages
    finally:
        buffer_cache.Buffer, buffer_cache.timed_allgather = make, gather  # type: ignore


def run_growth(world: World) -> None:
    """Change the number of tokens between ranks and calls. Memory grows without messages, and earlier results stay valid."""
    with _recorded() as (made, messages):
        with world.buffer(1) as buffer:
            num_experts = 2 * world.num_ranks
            steps = [(*step, num_experts) for step in STEPS]
            grow(world, buffer, steps, 2, 2, lambda handle: handle[0][-1, world.rank])
            gc.collect()  # the Buffer is destroyed after all its results
        assert made == [128, 256, 1024]
        assert len(messages) == 1
        made.clear()
        topk_idx = routing(world, 1, 1, 2, 2 * world.num_ranks)
        config = deep_ep.Config(16, 6, 256)
        with world.buffer(config.get_nvl_buffer_size_hint(2 * HIDDEN, world.num_ranks)) as buffer:
            layout = layout_of(buffer, topk_idx, 2 * world.num_ranks)
            buffer.dispatch(world.random_rows(1, 1), **layout, topk_idx=topk_idx)
        assert made == [2048], "the bytes are enough for more tokens than the call has"


def grow(
    world: World,
    buffer: deep_ep.Buffer,
    steps: Sequence[tuple[int, int, int]],
    num_local_experts: int,
    num_topk: int,
    num_rows: Callable[[Any], Any],
    **how: float,
) -> list[tuple[Any, ...]]:
    """Dispatch in steps, combine at the end, and return what the steps gave.

    A step has tokens of each rank, more tokens of one rank, and experts to choose from. `num_rows` reads the number of rows from a handle.
    """
    held = []
    for step, (tokens, more, num_chosen) in enumerate(steps):
        if world.rank == step % world.num_ranks:  # another rank has more tokens in each step
            tokens += more
        x = world.random_rows(tokens, step)
        topk_idx = routing(world, step, tokens, num_topk, num_chosen, **how)
        layout = layout_of(buffer, topk_idx, num_local_experts * world.num_ranks)
        recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx)
        assert recv_x.shape[0] == num_rows(handle)
        assert [int((recv_idx == e).sum()) for e in range(num_local_experts)] == counts
        held.append((x, layout["is_token_in_rank"], recv_x, recv_x.clone(), handle))
    for x, in_rank, recv_x, expected, handle in held:  # some of them lie in Buffers that were too small later
        assert torch.equal(recv_x, expected)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert difference(combined, x.float() * in_rank.sum(1, keepdim=True)) < 1e-5
        again, *_ = buffer.dispatch(x, handle=handle)
        assert torch.equal(again, expected)
    return held
