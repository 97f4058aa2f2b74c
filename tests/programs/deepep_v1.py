"""A program of the kind that people wrote against DeepEP V1, with the checks that they make. Only the import is another one.

It runs on the host backend (`tests/programs/compat.py`) and on GPUs (`tests/gpu/test_compat_on_gpus.py`): `World` says on which device, and
whether Buffers are made from a process group of `torch.distributed` or from a communicator.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from expect import raises
from process_group import in_reverse
from torch.utils.checkpoint import checkpoint

import deepep_rt.compat as deep_ep
from deepep_rt import EPDestroyedError, EPInputError, EPUnavailableError
from deepep_rt.torch import communicator

if TYPE_CHECKING:
    from mpi4py import MPI

HIDDEN = 1024


@dataclass
class World:
    """Where the program runs."""

    comm: MPI.Intracomm  # the ranks, in the order of `group`
    device: str
    group: Any = None  # a process group of them
    num_tokens: int = 60

    @property
    def rank(self) -> int:
        return self.comm.Get_rank()

    @property
    def num_ranks(self) -> int:
        return self.comm.Get_size()

    @contextmanager
    def buffer(self, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any) -> Iterator[deep_ep.Buffer]:
        ranks = {"comm": self.comm} if self.group is None else {}
        made = deep_ep.Buffer(self.group, num_nvl_bytes, num_rdma_bytes, **ranks, explicitly_destroy=True, **options)
        assert (made.rank, made.group_size) == (self.rank, self.num_ranks)
        yield made
        made.destroy()

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * seed + self.rank)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of each rank, of any number of rows."""
        bits = tensor.cpu().contiguous()
        return [
            torch.from_numpy(rows).view(tensor.dtype).to(tensor.device)
            for rows in self.comm.allgather(bits.view(torch.uint8).numpy())
        ]


@contextmanager
def world_of_a_group(comm: MPI.Intracomm, device: str) -> Iterator[World]:
    """A gloo group of the ranks of `comm`."""
    with in_reverse(comm):
        yield World(communicator(), device, dist.group.WORLD)


@contextmanager
def settings_of_deepep_tests(device: str) -> Iterator[None]:
    """New tensors are bfloat16 and on the GPU, unless they are told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """How unlike two tensors are: 0 for the same, about half the mean square error relative to the mean square."""
    a, b = a.double(), b.double()
    norm = (a * a + b * b).sum()
    return 0.0 if norm == 0 else float(1 - 2 * (a * b).sum() / norm)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().view(x.shape[0], -1, 128)
    scales = groups.abs().amax(2).clamp(min=1e-4) / 448
    return (groups / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def from_fp8(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, scales = pair
    if scales.dtype == torch.int32:  # four exponents
        scales = (scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    return (x.float().view(*x.shape[:-1], -1, 128) * scales[..., None]).view(x.shape).to(torch.bfloat16)


def routing(world: World, seed: int, num_tokens: int, num_topk: int, num_experts: int, skip: float = 0.1) -> torch.Tensor:
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32, device=world.device, generator=world.generator(seed))
    chosen = scores.topk(num_topk, dim=1)[1]
    skipped = torch.rand(chosen.shape, dtype=torch.float32, device=world.device, generator=world.generator(seed + 1)) < skip
    return chosen.masked_fill(skipped, -1).to(deep_ep.topk_idx_t)


def goes_to(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> torch.Tensor:
    """`[num_tokens, num_ranks]`: by plain comparison with each rank's experts."""
    each = num_experts // num_ranks
    return torch.stack([((topk_idx >= r * each) & (topk_idx < (r + 1) * each)).any(1) for r in range(num_ranks)], 1)


# --- the normal mode -----------------------------------------------------------------------------------------------------------------


def run_normal(world: World, num_sms: int = 24) -> None:
    """All ways to call dispatch and combine."""
    rank, ranks, tokens = world.rank, world.num_ranks, world.num_tokens + 3 * world.rank
    num_topk, num_experts = 4, 4 * ranks
    deep_ep.Buffer.set_num_sms(num_sms)
    config = deep_ep.Buffer.get_dispatch_config(ranks)
    num_nvl_bytes = max(c.get_nvl_buffer_size_hint(2 * HIDDEN, ranks) for c in (config, deep_ep.Buffer.get_combine_config(ranks)))
    num_rdma_bytes = config.get_rdma_buffer_size_hint(2 * HIDDEN, ranks)
    x_rand = torch.randn((tokens, HIDDEN), device=world.device, generator=world.generator(1)).to(torch.bfloat16)
    x_rank = torch.full((tokens, HIDDEN), rank, dtype=torch.bfloat16, device=world.device)
    weights = torch.rand((tokens, num_topk), dtype=torch.float32, device=world.device, generator=world.generator(2))
    topk_idx = routing(world, 3, tokens, num_topk, num_experts)
    goes = goes_to(topk_idx, ranks, num_experts)
    with world.buffer(num_nvl_bytes, num_rdma_bytes) as buffer:
        layout = _check_layout(world, buffer, topk_idx, num_experts, goes)
        for previous in (False, True):
            for asynchronous in (False, True):
                for x in (x_rand, x_rank, to_fp8(x_rank), (to_fp8(x_rand)[0], to_fp8(x_rand)[1].T.contiguous().T)):
                    for with_topk in (False, True):
                        options: dict[str, Any] = dict(config=config, async_finish=asynchronous)
                        given = layout | (dict(topk_idx=topk_idx, topk_weights=weights) if with_topk else {})
                        _round_trip(world, buffer, x, given, goes, options, previous)
        _check_alignment(world, buffer, x_rank, topk_idx, layout)
        _check_worst(world, buffer, x_rand, topk_idx, weights, layout, goes)
        _check_bias(world, buffer, x_rand, layout, goes)


def _check_layout(
    world: World, buffer: deep_ep.Buffer, topk_idx: torch.Tensor, num_experts: int, goes: torch.Tensor
) -> dict[str, torch.Tensor]:
    per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    assert per_rdma_rank is None
    assert torch.equal(is_token_in_rank, goes)
    assert is_token_in_rank.dtype == torch.bool
    assert per_rank.dtype == per_expert.dtype == torch.int32
    assert per_rank.tolist() == [int(goes[:, r].sum()) for r in range(world.num_ranks)]
    assert per_expert.tolist() == [int((topk_idx == e).sum()) for e in range(num_experts)]
    *again, event = buffer.get_dispatch_layout(
        topk_idx, num_experts, previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True
    )
    with event:
        pass
    assert torch.equal(again[0], per_rank)
    assert torch.equal(again[2], per_expert)
    assert torch.equal(again[3], goes)
    return dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_token_in_rank)


def _round_trip(
    world: World,
    buffer: deep_ep.Buffer,
    x: Any,
    given: dict[str, Any],
    goes: torch.Tensor,
    options: dict[str, Any],
    previous: bool,
) -> None:
    rank, with_topk = world.rank, "topk_idx" in given
    source = from_fp8(x) if isinstance(x, tuple) else x

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

    # Rows come in the order of ranks and tokens; the handle tells how many come from whom, and which they are.
    everywhere = world.gather(goes)
    expected = torch.cat([rows[there[:, rank]] for rows, there in zip(world.gather(source), everywhere, strict=True)])
    assert torch.equal(recv_x, expected)
    prefix = handle[0]
    assert prefix.dtype == torch.int32
    sums = torch.stack([there.sum(0) for there in everywhere]).cumsum(0)
    assert torch.equal(prefix.long(), sums)
    assert prefix[-1, rank].item() == recv_x.shape[0]
    assert handle[3].tolist() == torch.cat([there[:, rank].nonzero().flatten() for there in everywhere]).tolist()
    assert torch.equal(handle[4], goes)
    assert len(handle) == 6
    per_expert = sum(world.gather(given["num_tokens_per_expert"].view(world.num_ranks, -1)))
    assert counts == per_expert[rank].tolist()

    if with_topk:
        each = len(counts)
        assert ((recv_idx == -1) | ((recv_idx >= 0) & (recv_idx < each))).all()
        assert [int((recv_idx == e).sum()) for e in range(each)] == counts
        assert (recv_weights[recv_idx == -1] == 0).all()
    else:
        assert recv_idx is recv_weights is None
        recv_x, nothing, none, no_counts, no_handle = call(buffer.dispatch, x=x, handle=handle)
        recv_x = from_fp8(recv_x) if isinstance(x, tuple) else recv_x
        assert nothing is none is no_counts is no_handle is None
        assert torch.equal(recv_x, expected)

    more = dict(topk_weights=recv_weights) if with_topk else {}
    combined, combined_weights = call(buffer.combine, x=recv_x, handle=handle, **more)
    assert combined.dtype == torch.bfloat16
    assert difference(combined, source.float() * goes.sum(1, keepdim=True)) < 1e-5
    if with_topk:
        chosen = given["topk_idx"] >= 0
        assert torch.allclose(combined_weights, given["topk_weights"] * chosen)
    else:
        assert combined_weights is None


def _check_alignment(
    world: World, buffer: deep_ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, layout: dict[str, Any]
) -> None:
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
    goes: torch.Tensor,
) -> None:
    """Fixed shapes: the host is told nothing."""
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
        assert difference(combined, x.float() * goes.sum(1, keepdim=True)) < 1e-5


def _check_bias(world: World, buffer: deep_ep.Buffer, x: torch.Tensor, layout: dict[str, Any], goes: torch.Tensor) -> None:
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    plain, _, _ = buffer.combine(recv_x, handle)
    one, _, _ = buffer.combine(recv_x, handle, bias=x)
    two, _, _ = buffer.combine(recv_x, handle, None, (x, x))
    assert difference(one, plain.float() + x) < 1e-5
    assert difference(two, plain.float() + 2 * x.float()) < 1e-5


def run_growth(world: World) -> None:
    """The number of tokens differs between ranks and calls; memory grows without messages, and what is held stays valid."""
    from deepep_rt.compat import buffer_cache as compat_memory

    made, met = [], []
    make, meet = compat_memory.Buffer, compat_memory.timed_allgather
    compat_memory.Buffer = lambda *args, **kwargs: made.append(kwargs["num_max_tokens_per_rank"]) or make(*args, **kwargs)  # type: ignore
    compat_memory.timed_allgather = lambda *args: met.append(args[1]) or meet(*args)  # type: ignore
    num_experts, held = 2 * world.num_ranks, []
    try:
        with world.buffer(1) as buffer:
            for step, (base, extra) in enumerate([(7, 1), (0, 0), (128, 0), (5, 140), (250, 0), (0, 600), (600, 3), (1, 0)]):
                # One rank alone has many tokens, another one each time.
                tokens = base + (extra if world.rank == step % world.num_ranks else 0)
                x = torch.randn((tokens, HIDDEN), device=world.device, generator=world.generator(step)).to(torch.bfloat16)
                topk_idx = routing(world, step, tokens, 2, num_experts)
                per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
                recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(
                    x,
                    num_tokens_per_rank=per_rank,
                    num_tokens_per_expert=per_expert,
                    is_token_in_rank=goes,
                    topk_idx=topk_idx,
                )
                assert recv_x.shape[0] == handle[0][-1, world.rank]
                assert [int((recv_idx == e).sum()) for e in range(2)] == counts
                held.append((x, goes, recv_x, recv_x.clone(), handle))
            for x_, goes, recv_x, copy, handle in held:  # also those of memory that was outgrown
                assert torch.equal(recv_x, copy)
                combined, _, _ = buffer.combine(recv_x, handle)
                assert difference(combined, x_.float() * goes.sum(1, keepdim=True)) < 1e-5
                again, *_ = buffer.dispatch(x_, handle=handle)
                assert torch.equal(again, copy)
            assert made == [128, 256, 1024]
            assert len(met) == 1
            met.clear()
            made.clear()
            config = deep_ep.Config(16, 6, 256)
            with world.buffer(config.get_nvl_buffer_size_hint(2 * HIDDEN, world.num_ranks)) as roomy:
                per_rank, _, per_expert, goes, _ = roomy.get_dispatch_layout(topk_idx, num_experts)
                layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=goes)
                roomy.dispatch(x, **layout, topk_idx=topk_idx)
            assert made == [2048]  # what the bytes are enough for, though one token would have done
            held.clear()
            del recv_x, copy, handle, again, recv_idx
            gc.collect()
    finally:
        compat_memory.Buffer, compat_memory.timed_allgather = make, meet  # type: ignore


def run_ranks_only(world: World) -> None:
    """Tokens that name ranks and no experts, some of them none."""
    with world.buffer(1) as buffer:
        for dtype in (torch.bfloat16, torch.float32):
            tokens = 20 + world.rank
            x = torch.randn((tokens, 64), device=world.device, generator=world.generator(1)).to(dtype)
            goes = (
                torch.rand((tokens, world.num_ranks), dtype=torch.float32, device=world.device, generator=world.generator(2))
                < 0.5
            )
            per_expert = torch.arange(3 * world.num_ranks, dtype=torch.int32, device=world.device) + world.rank
            per_rank = goes.sum(0, dtype=torch.int32)
            recv_x, idx, weights, counts, handle, event = buffer.dispatch(
                x, None, per_rank, None, goes, per_expert, expert_alignment=4
            )
            assert idx is weights is None
            assert event.event is None
            everywhere = world.gather(goes)
            wanted = torch.cat([rows[there[:, world.rank]] for rows, there in zip(world.gather(x), everywhere, strict=True)])
            assert torch.equal(recv_x, wanted)
            sums = np.arange(3 * world.num_ranks) * world.num_ranks + sum(range(world.num_ranks))
            mine = sums.reshape(world.num_ranks, 3)[world.rank]
            assert counts == (-(-mine // 4) * 4).tolist()
            combined, _, _ = buffer.combine(recv_x, handle)
            assert combined.dtype == dtype
            assert difference(combined, x.float() * goes.sum(1, keepdim=True)) < 1e-5


# --- the low-latency mode ------------------------------------------------------------------------------------------------------------


def run_low_latency(world: World) -> None:
    """All formats, with hooks and without, held side by side with a second call in flight."""
    rank, ranks, tokens = world.rank, world.num_ranks, 24
    num_experts, num_topk, mine = 4 * ranks, 4, tokens - 3 * (rank % 4)
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, num_experts)
    x = torch.full((mine, HIDDEN), rank + 1, dtype=torch.bfloat16, device=world.device)
    x[:, -128:] = torch.arange(mine, device=world.device).to(torch.bfloat16)[:, None]  # tells which token it is
    x_rand = torch.randn((mine, HIDDEN), device=world.device, generator=world.generator(1)).to(torch.bfloat16)
    topk_idx = routing(world, 2, mine, num_topk, num_experts)
    weights = torch.rand((mine, num_topk), dtype=torch.float32, device=world.device, generator=world.generator(3))
    with world.buffer(num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=num_experts // ranks) as buffer:
        buffer.clean_low_latency_buffer(tokens, HIDDEN, num_experts)
        for current in (x, x_rand):
            for hooked in (False, True):
                for fp8, rounded, ue8m0 in ((False, False, False), (True, False, False), (True, True, False), (True, True, True)):
                    options = dict(use_fp8=fp8, round_scale=rounded, use_ue8m0=ue8m0)
                    _low_latency_trip(
                        world, buffer, current, current is x, topk_idx, weights, tokens, num_experts, options, hooked
                    )


def _low_latency_trip(
    world: World,
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    tells_token: bool,
    topk_idx: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
    num_experts: int,
    options: dict[str, Any],
    hooked: bool,
    live: Collection[int] | None = None,
) -> None:
    """A dispatch and its combine; `live` are the ranks that this one should have to do with."""
    rank, ranks = world.rank, world.num_ranks
    live = range(ranks) if live is None else live
    each, fp8 = num_experts // ranks, options["use_fp8"]
    stats = torch.zeros(each, dtype=torch.int32, device=world.device)
    waits = torch.zeros(ranks, dtype=torch.int64, device=world.device)
    packed, count, handle, event, hook = buffer.low_latency_dispatch(
        x,
        topk_idx,
        tokens,
        num_experts,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
        async_finish=not hooked,
        return_recv_hook=hooked,
        **options,
    )
    if hooked:
        hook()
    else:
        assert hook is None
        event.current_stream_wait()
    assert len(handle) == 5
    assert tuple(handle[2:]) == (tokens, HIDDEN, num_experts)
    assert count.dtype == torch.int32
    if fp8:
        assert packed[0].dtype == torch.float8_e4m3fn
        scales = packed[1]
        assert scales.shape == (each, ranks * tokens, HIDDEN // (512 if options["use_ue8m0"] else 128))
        assert scales.dtype == (torch.int32 if options["use_ue8m0"] else torch.float32)
        assert scales.stride()[1] == 1  # column-major
    received = from_fp8(packed) if fp8 else packed
    assert received.shape == (each, ranks * tokens, HIDDEN)
    assert stats.tolist() == count.tolist()
    assert (waits >= 0).all()

    everyone = [idx if r in live else torch.full_like(idx, -1) for r, idx in enumerate(world.gather(topk_idx))]
    rows = world.gather(from_fp8(to_fp8(x)) if fp8 and not options["round_scale"] else x)
    low = (1 << 32) - 1
    for e in range(each):
        wanted = [(idx == rank * each + e).nonzero()[:, 0] for idx in everyone]  # the tokens of each source
        valid, source_info, ranges = int(count[e]), handle[0][e], handle[1][e]
        assert valid == sum(len(part) for part in wanted)
        assert valid == int((ranges & low).sum())
        assert source_info.dtype == torch.int32
        assert (source_info[valid:] == -1).all()
        for source, part in enumerate(wanted):
            begin, length = int(ranges[source] >> 32), int(ranges[source] & low)
            assert length == len(part)
            assert sorted(source_info[begin : begin + length].tolist()) == part.tolist()
            got = received[e, begin : begin + length]
            if tells_token and not options["round_scale"]:
                assert ((got[:, : HIDDEN - 128].float() - (source + 1)).abs() < 0.04 * (source + 1)).all()
            sent = rows[source][source_info[begin : begin + length].long()]
            assert difference(got, sent) < (2e-3 if fp8 else 1e-12)  # a rounded scale leaves FP8 its 3 bits

    gemm = torch.where(
        (torch.arange(ranks * tokens, device=world.device)[None, :] < count[:, None])[..., None], received, torch.nan
    )  # what is not a row may be anything
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = gemm
        out = torch.empty_like(x) if zero_copy else None
        combined, event, hook = buffer.low_latency_combine(
            torch.zeros_like(gemm) if zero_copy else gemm,  # not looked at
            topk_idx,
            weights,
            handle,
            zero_copy=zero_copy,
            async_finish=not hooked,
            return_recv_hook=hooked,
            out=out,
        )
        if hooked:
            hook()
        else:
            event.current_stream_wait()
        assert out is None or combined is out
        assert not combined.isnan().any()
        lost = ~torch.isin(torch.div(topk_idx, each, rounding_mode="floor"), torch.tensor(list(live), device=world.device))
        total = x.float() * weights.masked_fill(lost, 0).sum(1, keepdim=True)
        assert difference(combined, total) < (2e-3 if fp8 else 1e-5)


def run_two_in_flight(world: World) -> None:
    """Two micro-batches: both are sent before the first one is received."""
    tokens, num_experts = 16, 2 * world.num_ranks
    with world.buffer(low_latency_mode=True) as buffer:
        for fp8 in (False, True):
            batches = []
            for seed in (1, 2):
                x = torch.randn((tokens, HIDDEN), device=world.device, generator=world.generator(seed)).to(torch.bfloat16)
                idx = routing(world, seed, tokens, 2, num_experts)
                sent = buffer.low_latency_dispatch(x, idx, tokens, num_experts, use_fp8=fp8, return_recv_hook=True)
                with raises(EPInputError, "hook"):
                    sent[2][0]
                batches.append((x, idx, *sent))
            backs = []
            for x, idx, packed, count, handle, _, hook in batches:
                hook()
                assert int((handle[1] & 0xFFFFFFFF).sum()) == int(count.sum())
                y = from_fp8(packed) if fp8 else packed
                weights = torch.ones(idx.shape, dtype=torch.float32, device=world.device)
                back, _, receive = buffer.low_latency_combine(y.contiguous(), idx, weights, handle, return_recv_hook=True)
                backs.append((x, idx, back, receive))
            for x, idx, back, receive in backs:
                receive()
                assert difference(back, x.float() * (idx >= 0).sum(1, keepdim=True)) < 2e-3


def run_masks(world: World) -> None:
    """A rank is left out by hand, comes back, and is left out for being silent. Wants a short DEEPEP_RT_TIMEOUT_S."""
    rank, ranks, tokens, num_experts = world.rank, world.num_ranks, 8, 2 * world.num_ranks
    last = ranks - 1
    others = [r for r in range(ranks) if r != last]
    live = [last] if rank == last else others
    x = torch.randn((tokens, HIDDEN), device=world.device, generator=world.generator(1)).to(torch.bfloat16)
    topk_idx, weights = (
        routing(world, 2, tokens, 2, num_experts),
        torch.ones((tokens, 2), dtype=torch.float32, device=world.device),
    )
    status = torch.empty(ranks, dtype=torch.int32, device=world.device)
    with world.buffer(low_latency_mode=True, enable_shrink=True) as buffer:

        def step(live: Collection[int], hooked: bool = False) -> None:
            options = dict(use_fp8=False, round_scale=False, use_ue8m0=False)
            _low_latency_trip(world, buffer, x, False, topk_idx, weights, tokens, num_experts, options, hooked, live)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [int(r not in live) for r in range(ranks)]

        def leave_out() -> None:
            for r in range(ranks):
                if r not in live:
                    buffer.low_latency_update_mask_buffer(r, True)

        leave_out()  # before there is any memory
        step(live)
        world.comm.Barrier()
        for dtype, size in ((torch.int8, None), (torch.float32, torch.Size([2, 0]))):  # as vLLM does before ranks come back
            memory = buffer.get_local_buffer_tensor(dtype, size, use_rdma_buffer=True).zero_()
            assert (memory.dtype, memory.shape) == (dtype, size or (0,))
        with raises(EPUnavailableError, "no elements"):
            buffer.get_local_buffer_tensor(torch.int8, torch.Size([1]), use_rdma_buffer=True)
        with raises(EPInputError, "dtype='int8'"):
            buffer.get_local_buffer_tensor("int8", use_rdma_buffer=True)
        buffer.low_latency_clean_mask_buffer()
        world.comm.Barrier()
        step(range(ranks), hooked=True)
        leave_out()
        step(live, hooked=True)
        world.comm.Barrier()
        for r in range(ranks):
            if r not in live:
                buffer.low_latency_update_mask_buffer(r)
        world.comm.Barrier()
        step(range(ranks))
        with raises(EPInputError, "rank_to_mask"):
            buffer.low_latency_update_mask_buffer(rank, True)

        if rank == last:  # it stays away, and does not know that the others have gone on
            leave_out()
        else:
            packed, count, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, num_experts, use_fp8=False)
            combined, _, _ = buffer.low_latency_combine(packed.clone(), topk_idx, weights, handle)
            assert not combined.isnan().any()
            assert count.shape == (2,)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(r not in live) for r in range(ranks)]
        world.comm.Barrier()


def run_lost_ranks(world: World) -> None:
    """A rank is lost before its first call, or later: nobody waits for it twice, nor it for them. Wants a short DEEPEP_RT_TIMEOUT_S."""
    rank, ranks, tokens, num_experts = world.rank, world.num_ranks, 8, 8 * world.num_ranks
    last = ranks - 1
    x = torch.randn((tokens, HIDDEN), device=world.device, generator=world.generator(1)).to(torch.bfloat16)
    status = torch.empty(ranks, dtype=torch.int32, device=world.device)
    for lost_at_once, topk in ((True, 6), (False, 8)):  # what is made ahead serves both
        topk_idx = routing(world, 2, tokens, topk, num_experts)
        weights = torch.rand(topk_idx.shape, dtype=torch.float32, device=world.device)
        deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, num_experts)
        with world.buffer(low_latency_mode=True, enable_shrink=True) as buffer:

            def step(live: Collection[int], topk_idx: torch.Tensor = topk_idx, weights: torch.Tensor = weights) -> None:
                packed, _, handle, event, _ = buffer.low_latency_dispatch(
                    x, topk_idx, tokens, num_experts, use_fp8=False, async_finish=True
                )
                event.current_stream_wait()
                buffer.low_latency_query_mask_buffer(status)  # the call may not have ended
                assert status.tolist() == [int(r not in live) for r in range(ranks)]
                lost = torch.isin(topk_idx // 8, torch.tensor([r for r in range(ranks) if r not in live], device=world.device))
                kept = topk_idx.masked_fill(lost, -1)
                combined, _, _ = buffer.low_latency_combine(packed.clone(), kept, weights, handle)
                assert difference(combined, x.float() * weights.masked_fill(kept == -1, 0).sum(1, keepdim=True)) < 1e-5

            if not lost_at_once:
                step(range(ranks))
            if rank != last:  # it goes without a word
                if not lost_at_once:
                    buffer.clean_low_latency_buffer(tokens, HIDDEN, num_experts)
                buffer.low_latency_query_mask_buffer(status)
                assert int(status.sum()) == (0 if lost_at_once else 1)
                step(range(last))
        world.comm.Barrier()


# --- the rest ------------------------------------------------------------------------------------------------------------------------


class _ThereAndBack(torch.autograd.Function):
    """A caller that keeps the entries of a handle in autograd's hands, and gives them back as a tuple."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, layout: dict[str, Any], topk_idx: torch.Tensor
    ) -> torch.Tensor:
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(recv_x, tuple(handle))[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        entries = ctx.saved_tensors  # asked for once, as checkpoints want it
        rows, *_ = ctx.buffer.dispatch(grads[0].contiguous(), handle=entries)
        return ctx.buffer.combine(rows, list(entries))[0], None, None, None


class _AlongHandle(torch.autograd.Function):
    """A caller that hands the entries of a handle from function to function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, *handle: Any) -> torch.Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(buffer.dispatch(x, handle=handle)[0], handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        entries = ctx.saved_tensors
        rows, *_ = ctx.buffer.dispatch(grads[0].contiguous(), handle=entries)
        return ctx.buffer.combine(rows, entries)[0], *[None] * (1 + len(entries))


def _moved_by_hand(saved: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(saved, device="cpu").copy_(saved)


def _moved_back(moved: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(moved.shape, dtype=moved.dtype, device=device).copy_(moved)


def run_handles_taken_apart(world: World) -> None:
    """Also where hooks take saved tensors elsewhere, or the forward pass is repeated for the backward pass."""
    with world.buffer(int(1e7)) as buffer:
        num_experts = 4 * world.num_ranks
        rows = torch.randn((6, HIDDEN), device=world.device, generator=world.generator(5)).to(torch.bfloat16)
        topk_idx = routing(world, 5, 6, 2, num_experts)
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=goes)
        copies = goes.sum(1, keepdim=True)

        def there_and_back(x: torch.Tensor) -> torch.Tensor:
            return _ThereAndBack.apply(x, buffer, layout, topk_idx)

        def repeated(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(there_and_back, x, use_reentrant=False)

        def there_and_back_by(x: torch.Tensor, *handle: Any) -> torch.Tensor:
            return _AlongHandle.apply(x, buffer, *handle)

        def repeated_with_entries(x: torch.Tensor) -> torch.Tensor:
            handle = buffer.dispatch(rows, topk_idx=topk_idx, **layout)[4]
            return checkpoint(there_and_back_by, x, *handle, use_reentrant=True)

        hooks = torch.autograd.graph.saved_tensors_hooks
        for run, saving in (
            (there_and_back, nullcontext()),
            (repeated, nullcontext()),
            (repeated_with_entries, nullcontext()),
            (there_and_back, torch.autograd.graph.save_on_cpu()),
            (there_and_back, torch.autograd.graph.save_on_cpu(pin_memory=True)),
            (there_and_back, hooks(_moved_by_hand, partial(_moved_back, device=world.device))),
            (there_and_back, hooks(torch.Tensor.detach, torch.clone)),
            (repeated, torch.autograd.graph.save_on_cpu()),
        ):
            x = rows.clone().requires_grad_()
            with saving:
                out = run(x)
            assert torch.equal(out, rows * copies)
            gc.collect()
            out.sum().backward()
            assert torch.equal(x.grad, copies.expand_as(x).to(x.dtype))
        _check_entries_that_are_not_here(buffer.dispatch(rows, topk_idx=topk_idx, **layout)[4])


def _check_entries_that_are_not_here(handle: Any) -> None:
    """They can be looked at and copied, and say what they are when they are used."""
    for entry, name in (
        (handle[1], "channel_prefix_matrix"),
        (handle[2], "recv_channel_prefix_matrix"),
        (handle[5], "send_head"),
    ):
        assert (entry.shape, entry.size(), entry.dim(), entry.numel(), entry.nbytes) == ((0,), (0,), 1, 0, 0)
        assert (entry.dtype, entry.device.type, entry.layout, entry.is_contiguous()) == (torch.int32, "cpu", torch.strided, True)
        assert (entry.requires_grad, entry.is_leaf, entry.grad_fn, entry._base, entry.is_sparse) == (
            False,
            True,
            None,
            None,
            False,
        )
        for copied in (entry.detach(), entry.clone(), entry.cpu(), entry.to("cpu", copy=True), entry.contiguous(), entry.data):
            for again in (copied, copy.copy(copied), copy.deepcopy(copied), copied.requires_grad_(False)):
                assert (again.handle, again.entry) == (handle, name)
        for use in (
            lambda a: a[0],
            len,
            torch.sum,
            lambda a: a + 1,
            lambda a: torch.cat([a, a]),
            lambda a: a.T,
            lambda a: a.tolist(),
        ):
            with raises(EPUnavailableError, name):
                use(entry)


def run_copied_results(world: World) -> None:
    """Results in PyTorch's own memory may be freed while they are held, as Megatron-LM's overlapped schedule does."""
    num_experts = 4 * world.num_ranks
    x = torch.randn(world.num_tokens, HIDDEN, generator=world.generator(9), device=world.device).to(torch.bfloat16)
    idx = routing(world, 9, world.num_tokens, 4, num_experts)
    goes = goes_to(idx, world.num_ranks, num_experts)
    weights = torch.ones(idx.shape, dtype=torch.float32, device=world.device)
    with world.buffer(int(1e8)) as buffer:
        layout = _check_layout(world, buffer, idx, num_experts, goes)
        with raises(RuntimeError, "resiz"):  # why there is a choice
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
                assert difference(combined, x.float() * goes.sum(1, keepdim=True)) < 1e-5
                for result in (*pair, recv_idx, recv_weights, rows, combined, sums):
                    result.untyped_storage().resize_(0)
        finally:
            deep_ep.Buffer.copies_results = False


def run_gradients(world: World) -> None:
    """DeepEP's calls give no gradient, and say nothing of one that is asked for: its programs compute their own."""
    num_experts = 2 * world.num_ranks
    x = torch.randn((4, HIDDEN), device=world.device, generator=world.generator(1)).to(torch.bfloat16)
    topk_idx = routing(world, 1, 4, 2, num_experts)
    weights, scales = (torch.ones((4, n), dtype=torch.float32, device=world.device) for n in (2, HIDDEN // 128))
    tensors = [t.requires_grad_() for t in (x, weights, scales)]
    with world.buffer(int(1e7), low_latency_mode=True) as buffer, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*requires a gradient")
        per_rank, _, per_expert, goes, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=goes)
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout)
        buffer.dispatch((x, scales), handle=handle)
        recv_x, recv_weights = recv_x.clone().requires_grad_(), recv_weights.clone().requires_grad_()
        for bias in (x, (x, x)):
            combined, sums, _ = buffer.combine(recv_x, handle, recv_weights, bias=bias)
            tensors += [combined, sums]
        packed, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 4, num_experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(packed.clone().requires_grad_(), topk_idx, weights, handle)
        assert [t.requires_grad for t in (*tensors, combined)] == [True] * 3 + [False] * 5


def run_refusals(world: World) -> None:
    """What is not here says so by its name, and what is wrong is found before anything is sent."""
    x = torch.ones((4, HIDDEN), dtype=torch.bfloat16, device=world.device)
    num_experts = 2 * world.num_ranks
    topk_idx = routing(world, 1, 4, 2, num_experts)
    weights = torch.ones((4, 2), dtype=torch.float32, device=world.device)
    with world.buffer(1) as buffer:
        per_rank, _, per_expert, goes, event = buffer.get_dispatch_layout(topk_idx, num_experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=goes)
        with raises(EPInputError, "async_finish"):
            event.current_stream_wait()
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
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx)
        with raises(EPInputError, "handle"):
            buffer.dispatch(x, handle, topk_idx=topk_idx)
        with raises(EPInputError, "topk_idx=<ndarray>", "torch.Tensor"):
            buffer.get_dispatch_layout(topk_idx.cpu().numpy(), num_experts)
        with raises(EPInputError, "x=<ndarray>", "torch.Tensor"):
            buffer.combine(np.ones((4, HIDDEN), np.float32), handle)
        prefix, channels, recv_channels, source, given, head = handle  # it can be taken apart like a tuple
        assert torch.equal(prefix, handle[0])
        assert torch.equal(source, handle[-3])
        assert given is goes
        assert len(handle[:2]) == 2
        for absent, name in (
            (channels, "channel_prefix_matrix"),
            (recv_channels, "recv_channel_prefix_matrix"),
            (head, "send_head"),
        ):
            with raises(EPUnavailableError, name):
                torch.sum(absent)
        with raises(EPInputError, "num_worst_tokens"):
            buffer.dispatch(x.repeat(40, 1), **layout, topk_idx=topk_idx.repeat(40, 1), num_worst_tokens=world.num_ranks)
        for name in ("internode_dispatch", "internode_combine"):
            with raises(EPUnavailableError, name):
                getattr(buffer, name)(x)
        with raises(EPUnavailableError, "get_local_buffer_tensor"):
            buffer.get_local_buffer_tensor(torch.uint8)
        with raises(EPUnavailableError, "runtime.intranode_dispatch"):
            buffer.runtime.intranode_dispatch(x)
        with raises(EPInputError, "low_latency_mode"):
            buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        with raises(EPInputError, "low_latency_mode"):
            buffer.low_latency_dispatch(x, topk_idx, 4, num_experts)
        with raises(EPInputError, "low_latency_mode"):
            buffer.clean_low_latency_buffer(4, HIDDEN, num_experts)
        with raises(EPInputError, "whole"):
            buffer.combine(recv_x, (None,) * 6)
        assert not hasattr(buffer.runtime, "intranode_dispatch")
        with raises(EPInputError, "whole"):
            buffer.dispatch(x, [None] * 6)
        combined, _, _ = buffer.combine(recv_x, handle)  # and all of that did no harm
        assert torch.equal(combined, x * goes.sum(1, keepdim=True))
        if world.rank == 0:  # one rank alone is wrong, and does it again
            with raises(EPInputError, "topk_weights"):
                buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights[:2])
        for _ in range(3):
            again, _, _, counts, handle, _ = buffer.dispatch(x, **layout, topk_idx=topk_idx, topk_weights=weights)
            assert torch.equal(again, recv_x)
            assert counts == sum(world.gather(per_expert.view(world.num_ranks, -1)))[world.rank].tolist()
    with raises(EPDestroyedError, "destroyed"):
        buffer.dispatch(x, **layout, topk_idx=topk_idx)
    assert buffer.runtime is None

    with world.buffer(low_latency_mode=True) as buffer:
        with raises(EPInputError, "num_nvl_bytes"):
            buffer.dispatch(x, **layout, topk_idx=topk_idx)
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
        with raises(EPUnavailableError, "use_logfmt"):
            buffer.low_latency_combine(packed, topk_idx, weights, handle, use_logfmt=True)
        with raises(EPUnavailableError, "combine_wait_recv_cost_stats"):
            buffer.low_latency_combine(packed, topk_idx, weights, handle, combine_wait_recv_cost_stats=weights)
        for call in (
            lambda: buffer.low_latency_update_mask_buffer(0, True),
            lambda: buffer.low_latency_query_mask_buffer(per_rank),
            buffer.low_latency_clean_mask_buffer,
        ):
            with raises(EPInputError, "enable_shrink"):
                call()
        combined, _, _ = buffer.low_latency_combine(packed.clone(), topk_idx, weights, handle)
        assert torch.equal(combined, x * (topk_idx >= 0).sum(1, keepdim=True))
