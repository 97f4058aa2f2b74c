"""The low-latency mode: formats, hooks and calls in flight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from expect import raises

from deepep_rt import EPInputError

from .world import HIDDEN, World, deep_ep, difference, from_fp8, routing, to_fp8

FORMATS = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))
QUANTISED = (  # bytes of a row, their dtype, and the bytes of scales and their dtype
    (HIDDEN, torch.float8_e4m3fn, (HIDDEN // 32, torch.float32)),
    (HIDDEN, torch.float8_e4m3fn, (HIDDEN // 128, torch.int32)),
    (HIDDEN, torch.int8, None),
    (HIDDEN // 2, torch.uint8, (HIDDEN // 32, torch.uint8)),
    (HIDDEN // 2, torch.uint8, (HIDDEN // 16, torch.float8_e4m3fn)),
)
NO_FP8 = dict(use_fp8=False, round_scale=False, use_ue8m0=False)


def run_low_latency(world: World) -> None:
    """Dispatch and combine in all formats, with hooks and without."""
    rank, ranks, tokens = world.rank, world.num_ranks, 24
    num_experts, num_topk, num_tokens = 4 * ranks, 4, tokens - 3 * (rank % 4)
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, num_experts)
    x = torch.full((num_tokens, HIDDEN), rank + 1, dtype=torch.bfloat16, device=world.device)
    x[:, -128:] = torch.arange(num_tokens, device=world.device).to(torch.bfloat16)[:, None]  # the number of the token
    x_rand = world.random_rows(num_tokens, 1)
    topk_idx = routing(world, 2, num_tokens, num_topk, num_experts)
    weights = world.random_weights(num_tokens, num_topk, 3)
    with world.buffer(num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=num_experts // ranks) as buffer:
        buffer.clean_low_latency_buffer(tokens, HIDDEN, num_experts)
        for rows in (x, x_rand):
            for hooked in (False, True):
                for fp8, rounded, ue8m0 in FORMATS:
                    options = dict(use_fp8=fp8, round_scale=rounded, use_ue8m0=ue8m0)
                    RoundTrip(
                        world, buffer, rows, topk_idx, weights, tokens, num_experts, options, hooked, has_rank=rows is x
                    ).run()


def run_smaller_maxima(world: World) -> None:
    """One Buffer serves calls with each smaller number of tokens, in any order, also in handles that live on."""
    rank, ranks, most = world.rank, world.num_ranks, 32
    num_experts, num_topk = 4 * ranks, 4
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, ranks, num_experts)
    for num_bytes, numbers in ((hint, range(1, most + 1)), (0, (most, 5, 31, 1))):
        with world.buffer(num_rdma_bytes=num_bytes, low_latency_mode=True) as buffer:
            served = set()
            for tokens in numbers:
                x = world.random_rows(max(tokens - rank % 4, 0), tokens)
                topk_idx = routing(world, tokens, len(x), num_topk, num_experts)
                weights = world.random_weights(len(x), num_topk, tokens)
                trip = RoundTrip(world, buffer, x, topk_idx, weights, tokens, num_experts, hooked=tokens % 2 == 1)
                trip.run()
                served.add(trip.served)
            (one,) = served
            assert one.config.num_max_tokens_per_rank == most
    with world.buffer(low_latency_mode=True) as buffer:  # without a hint, it grows to the next power of two
        made = []
        for tokens in (3, 5, 8, 9, 4):
            x = world.random_rows(tokens, tokens)
            topk_idx = routing(world, tokens, tokens, num_topk, num_experts)
            trip = RoundTrip(world, buffer, x, topk_idx, world.random_weights(tokens, num_topk, tokens), tokens, num_experts)
            trip.run()
            made.append(trip.served.config.num_max_tokens_per_rank)
        assert made == [3, 8, 8, 16, 16], made
    with world.buffer(num_rdma_bytes=hint if rank else 0, low_latency_mode=True) as buffer:  # the least of all ranks counts
        x, topk_idx = world.random_rows(2, 1), routing(world, 1, 2, num_topk, num_experts)
        trip = RoundTrip(world, buffer, x, topk_idx, world.random_weights(2, num_topk, 1), 2, num_experts)
        trip.run()
        assert trip.served.config.num_max_tokens_per_rank == 2


def run_quantised_rows(world: World) -> None:
    """Rows that the program has quantised, with their scales, which arrive as they are."""
    rank, ranks, tokens = world.rank, world.num_ranks, 12
    num_experts, num_topk, each = 4 * ranks, 4, 4
    for number, (width, dtype, scales) in enumerate(QUANTISED):
        made = torch.Generator().manual_seed(10 * number + rank)
        num_tokens = tokens - 3 * (rank % 4)
        x = torch.randint(0, 256, (num_tokens, width), dtype=torch.uint8, generator=made).to(world.device)
        x[:, 0], x[:, 1] = rank, torch.arange(num_tokens, device=world.device)
        given = None
        if scales is not None:
            given = torch.randint(0, 255, (num_tokens, scales[0]), dtype=torch.uint8, generator=made).to(world.device)
            given[:, 0], given[:, 1] = x[:, 0], x[:, 1]
            given = given.view(scales[1])
        topk_idx = routing(world, number, num_tokens, num_topk, num_experts)
        weights = world.random_weights(num_tokens, num_topk, number)
        with world.buffer(low_latency_mode=True) as buffer:
            rows = x.view(dtype)
            sizes, how = (topk_idx, tokens, num_experts), dict(return_recv_hook=number % 2 == 1)
            if given is not None and given.dtype is torch.uint8:
                *packed, count, handle, _, hook = buffer.low_latency_dispatch_fp4(rows, given, *sizes, **how)
            else:
                x_of_call = rows if given is None else (rows, given)
                packed, count, handle, _, hook = buffer.low_latency_dispatch(x_of_call, *sizes, **how)
            if hook is not None:
                hook()
            recv_x, recv_scales = packed if given is not None else (packed, None)
            assert (recv_x.dtype, tuple(recv_x.shape)) == (dtype, (each, ranks * tokens, width))
            everyone, their_scales = world.gather(x), world.gather(x if given is None else given.view(torch.uint8).contiguous())
            for expert, total in enumerate(count.tolist()):
                got = recv_x.view(torch.uint8)[expert, :total]
                want = torch.stack([everyone[row[0]][row[1]] for row in got.tolist()]) if total else got
                assert torch.equal(got, want.to(got.device))
                if recv_scales is None:
                    continue
                assert recv_scales.dtype == scales[1]
                found = recv_scales[expert, :total].contiguous().view(torch.uint8)
                want = torch.stack([their_scales[row[0]][row[1]] for row in got.tolist()]) if total else found
                assert torch.equal(found, want.to(found.device))
                if recv_scales.itemsize == 4:
                    assert recv_scales.stride(1) == 1, "the columns are not contiguous"
            ones = torch.ones((each, ranks * tokens, HIDDEN), dtype=torch.bfloat16, device=world.device)
            back, _, _ = buffer.low_latency_combine(ones, topk_idx, weights, handle)
            assert back.shape == (num_tokens, HIDDEN)
            chosen = torch.where(topk_idx >= 0, weights, 0).sum(1)
            assert torch.allclose(back[:, 0].float(), chosen, rtol=0.02)


@dataclass
class RoundTrip:
    """A dispatch and its combines."""

    world: World
    buffer: deep_ep.Buffer
    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    max_tokens: int
    num_experts: int
    options: dict[str, Any] = field(default_factory=lambda: dict(NO_FP8))
    hooked: bool = False
    live: Collection[int] | None = None  # the ranks that take part; None: all
    has_rank: bool = False  # rows hold the number of their source rank

    def __post_init__(self) -> None:
        self.live = range(self.world.num_ranks) if self.live is None else self.live
        self.each = self.num_experts // self.world.num_ranks
        self.fp8 = self.options["use_fp8"]

    def run(self) -> None:
        received, count, handle = self._dispatch()
        self._check_rows(received, count, handle)
        is_row = torch.arange(received.shape[1], device=self.world.device)[None, :] < count[:, None]
        gemm = torch.where(is_row[..., None], received, torch.nan)  # rows past the counts may hold anything
        for zero_copy in (False, True):
            self._combine(gemm, handle, zero_copy)

    def _wait(self, hook: Any, event: Any) -> None:
        if self.hooked:
            hook()
        else:
            assert hook is None
            event.current_stream_wait()

    def _dispatch(self) -> tuple[torch.Tensor, torch.Tensor, Any]:
        ranks, each, options = self.world.num_ranks, self.each, self.options
        stats = torch.zeros(each, dtype=torch.int32, device=self.world.device)
        waits = torch.zeros(ranks, dtype=torch.int64, device=self.world.device)
        packed, count, handle, event, hook = self.buffer.low_latency_dispatch(
            self.x,
            self.topk_idx,
            self.max_tokens,
            self.num_experts,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waits,
            async_finish=not self.hooked,
            return_recv_hook=self.hooked,
            **options,
        )
        self._wait(hook, event)
        assert len(handle) == 5
        self.served = handle.buffer
        assert tuple(handle[2:]) == (self.max_tokens, HIDDEN, self.num_experts)
        assert count.dtype == torch.int32
        if self.fp8:
            assert packed[0].dtype == torch.float8_e4m3fn
            scales = packed[1]
            assert scales.shape == (each, ranks * self.max_tokens, HIDDEN // (512 if options["use_ue8m0"] else 128))
            assert scales.dtype == (torch.int32 if options["use_ue8m0"] else torch.float32)
            assert scales.stride()[1] == 1  # column-major
        received = from_fp8(packed) if self.fp8 else packed
        assert received.shape == (each, ranks * self.max_tokens, HIDDEN)
        assert stats.tolist() == count.tolist()
        assert (waits >= 0).all()
        return received, count, handle

    def _check_rows(self, received: torch.Tensor, count: torch.Tensor, handle: Any) -> None:
        world, rounded = self.world, self.options["round_scale"]
        everyone = world.gather(self.topk_idx)
        everyone = [idx if r in self.live else torch.full_like(idx, -1) for r, idx in enumerate(everyone)]
        rows = world.gather(from_fp8(to_fp8(self.x)) if self.fp8 and not rounded else self.x)
        low = (1 << 32) - 1
        for e in range(self.each):
            expected = [(idx == world.rank * self.each + e).nonzero()[:, 0] for idx in everyone]  # the tokens of each source
            valid, source_info, ranges = int(count[e]), handle[0][e], handle[1][e]
            assert valid == sum(len(tokens) for tokens in expected)
            assert valid == int((ranges & low).sum())
            assert source_info.dtype == torch.int32
            assert (source_info[valid:] == -1).all()
            for source, tokens in enumerate(expected):
                begin, length = int(ranges[source] >> 32), int(ranges[source] & low)
                assert length == len(tokens)
                assert sorted(source_info[begin : begin + length].tolist()) == tokens.tolist()
                got = received[e, begin : begin + length]
                if self.has_rank and not rounded:
                    assert ((got[:, : HIDDEN - 128].float() - (source + 1)).abs() < 0.04 * (source + 1)).all()
                sent = rows[source][source_info[begin : begin + length].long()]
                assert difference(got, sent) < (2e-3 if self.fp8 else 1e-12)  # a rounded scale leaves FP8 its 3 bits

    def _combine(self, gemm: torch.Tensor, handle: Any, zero_copy: bool) -> None:
        if zero_copy:
            self.buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = gemm
        out = torch.empty_like(self.x) if zero_copy else None
        combined, event, hook = self.buffer.low_latency_combine(
            torch.zeros_like(gemm) if zero_copy else gemm,  # with zero_copy, the call does not read it
            self.topk_idx,
            self.weights,
            handle,
            zero_copy=zero_copy,
            async_finish=not self.hooked,
            return_recv_hook=self.hooked,
            out=out,
        )
        self._wait(hook, event)
        assert out is None or combined is out
        assert not combined.isnan().any()
        live = torch.tensor(list(self.live or ()), device=self.world.device)
        lost = ~torch.isin(torch.div(self.topk_idx, self.each, rounding_mode="floor"), live)
        total = self.x.float() * self.weights.masked_fill(lost, 0).sum(1, keepdim=True)
        assert difference(combined, total) < (2e-3 if self.fp8 else 1e-5)


def run_two_in_flight(world: World) -> None:
    """Send two micro-batches before the hook of the first one receives."""
    tokens, num_experts = 16, 2 * world.num_ranks
    with world.buffer(low_latency_mode=True) as buffer:
        for fp8 in (False, True):
            batches = []
            for seed in (1, 2):
                x = world.random_rows(tokens, seed)
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
                back, _, receive = buffer.low_latency_combine(
                    y.contiguous(), idx, world.ones(*idx.shape), handle, use_logfmt=not fp8, return_recv_hook=True
                )
                backs.append((x, idx, back, receive))
            for x, idx, back, receive in backs:
                receive()
                assert difference(back, x.float() * (idx >= 0).sum(1, keepdim=True)) < 2e-3
