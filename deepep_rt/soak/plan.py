"""Draw the plan of a round from the seed: its calls, their options and routing.

All ranks draw the same plan without a message, and a failed round can be drawn again by its number.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from ..arrays.compressed_rows import LOW_LATENCY_CHANNELS
from ..arrays.dtypes import DTYPES, FP8_GROUP
from ..config import COMBINE_DTYPES, MAX_ROW_BYTES, ROW_ALIGNMENT
from .buffers import CHOICES, EXCLUDED, POOLS, ROUNDS, SLEEPS, BufferPlan, Draw, Options, Shape, buffer_of, compressions_of

_STREAM_MODES = ("plain", "plain", "async", "event", "stream")
_PAYLOADS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "int8")
_LONGEST_DELAY_S = 0.02
_LEAST_QUANTISED = 64  # bytes of a row whose message has room for scales too


@dataclass(frozen=True)
class Call:
    """A dispatch of the throughput mode and its combine."""

    is_repeat: bool  # with the handle of the first call
    dtype: str
    scale_words: int
    scale_dtype: str
    has_idx: bool
    has_weights: bool
    mode: str  # plain, async, event or stream
    combine_dtype: str
    combine_mode: str
    sums_weights: bool
    biases: int
    compress: str | None  # with reduce="rank"
    is_prepared: bool = False  # both calls of a repeat are prepared
    # Only of rows by expert:
    by_column: bool = False
    zero_padding: bool = False
    is_weighted: bool = False  # rows are multiplied by the weights
    reduce: str = "rank"


@dataclass(frozen=True)
class Step:
    """A low-latency dispatch and its combine."""

    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    early_weights: bool
    hook: bool
    combine_hook: bool
    stats: bool
    reduce_early: bool
    zero_copy: bool
    out: bool
    has_excluded: bool  # the combine leaves out some choices
    compress: str | None  # with reduce_early
    mode: str
    combine_mode: str
    is_prepared: bool = False  # both calls are prepared, with the options that they share
    is_quantised: bool = False  # rows are bytes that travel as they are, with scales
    has_fewer: bool = False  # num_max_tokens is the most that a rank has in the round


@dataclass(frozen=True)
class RoundPlan:
    """One round: calls of one mode with new data."""

    number: int
    kind: str  # throughput, expert_rows, low_latency or graph
    tokens: tuple[int, ...]  # of each rank
    pool_size: int  # experts that tokens choose from
    pool_rank: int  # the rank of these experts; -1: experts of all ranks
    skip: float  # share of the choices that are -1
    idx_dtype: str
    delays_s: tuple[float, ...]  # of each rank, before the round
    keep_rounds: int  # rounds after which kept results are checked again; 0: none is kept
    sleep: str = (
        ""  # what becomes of kept results while the Buffer sleeps before the round: keep or lose. Empty: it does not sleep
    )
    trims: bool = False  # the Buffer gives back free memory before the round
    worst: tuple[int, ...] | None = None  # num_worst_tokens of each rank
    alignment: int = 1
    calls: tuple[Call, ...] = ()
    steps: tuple[Step, ...] = ()


def round_of(options: Options, number: int) -> RoundPlan:
    """Draw the plan of one round."""
    buffer = buffer_of(options, number // options.rounds_per_buffer)
    draw = Draw(options.seed, ROUNDS, number)
    kind = "throughput"
    if buffer.shape.low_latency and draw.chance(0.6):
        kind = "graph" if buffer.has_graph and draw.chance(0.2) else "low_latency"
    elif draw.chance(0.35):
        kind = "expert_rows"
    pool_size, pool_rank = _pool(draw, options, buffer)
    before = Draw(options.seed, SLEEPS, number)
    sleep = before.one_of("keep", "lose") if before.chance(1 / options.sleep_every) else ""
    trims = before.chance(1 / options.sleep_every)
    if sleep and buffer.has_graph and before.chance(0.7):  # a graph of before shall find its memory again
        kind = "graph"
    common = dict(
        number=number,
        kind=kind,
        tokens=_tokens(draw, options.num_ranks, buffer.shape.tokens, kind),
        pool_size=pool_size,
        pool_rank=pool_rank,
        skip=draw.one_of(0.0, 0.0, 0.1, 0.5, 1.0) if draw.chance(0.5) else 0.0,
        idx_dtype=draw.one_of("int32", "int64"),
        delays_s=_delays(draw, options.num_ranks),
        keep_rounds=draw.number(1, 12) if draw.chance(0.3) else 0,
        sleep=sleep,
        trims=trims,
    )
    if kind == "graph":
        return RoundPlan(**{**common, "idx_dtype": "int64"})  # the graph reads the same arrays each time
    if kind == "low_latency":
        return RoundPlan(**common, steps=_steps(draw, options, buffer))
    most = options.num_ranks * buffer.shape.tokens * (buffer.shape.topk if kind == "expert_rows" else 1)
    worst = None
    if draw.chance(0.4):
        worst = (most,) * options.num_ranks
        if draw.chance(0.5):
            worst = tuple(draw.number(0, most) for _ in range(options.num_ranks))
    alignment = draw.one_of(1, 1, 4, 16, 128)
    calls = (_expert_calls if kind == "expert_rows" else _calls)(draw, options, buffer.shape)
    return RoundPlan(**common, worst=worst, alignment=alignment, calls=calls)


def experts_of(options: Options, plan: RoundPlan, step: int, rank: int) -> np.ndarray:
    """Draw the experts that the tokens of a rank choose, `[tokens, topk]` int64, -1 for none.

    Each `step` of a low-latency round has a routing. Otherwise it is 0. A token's experts differ unless the pool has fewer than `topk`.
    """
    buffer = buffer_of(options, plan.number // options.rounds_per_buffer)
    pool_rng = np.random.default_rng((options.seed, POOLS, plan.number, step))
    if plan.pool_rank < 0:
        pool = pool_rng.permutation(buffer.num_experts)[: plan.pool_size]
    else:
        pool = plan.pool_rank * buffer.shape.local_experts + pool_rng.permutation(buffer.shape.local_experts)
    rng = np.random.default_rng((options.seed, CHOICES, plan.number, step, rank))
    size, tokens = len(pool), plan.tokens[rank]
    first = rng.integers(0, size, tokens)
    stride = rng.choice(_strides(size), tokens)
    idx = pool[(first[:, None] + stride[:, None] * np.arange(buffer.shape.topk)) % size]
    return np.where(rng.random(idx.shape) < plan.skip, -1, idx)


def excluded_of(options: Options, plan: RoundPlan, step: int, rank: int, idx: np.ndarray) -> np.ndarray:
    """Draw the choices that a low-latency combine leaves out, `[tokens, topk]` bool.

    If ranks reduce early, all choices of a token at one rank are left out, or none.
    """
    if not plan.steps[step].has_excluded:
        return np.zeros(idx.shape, bool)
    rng = np.random.default_rng((options.seed, EXCLUDED, plan.number, step, rank))
    if not plan.steps[step].reduce_early:
        return (idx >= 0) & (rng.random(idx.shape) < 0.3)
    local = buffer_of(options, plan.number // options.rounds_per_buffer).shape.local_experts
    ranks = rng.random((len(idx), options.num_ranks)) < 0.3
    return (idx >= 0) & np.take_along_axis(ranks, np.maximum(idx, 0) // local, axis=1)


@functools.lru_cache
def _strides(size: int) -> list[int]:
    """List the strides through a ring of `size` experts that visit each expert once."""
    return [step for step in range(1, size + 1) if gcd(step, size) == 1]


def _pool(draw: Draw, options: Options, buffer: BufferPlan) -> tuple[int, int]:
    """Draw the size of the expert pool and its rank, which decide how skewed the routing is."""
    shape = buffer.shape
    how = draw.one_of("all", "all", "few", "one rank")
    if how == "one rank":
        return shape.local_experts, draw.number(0, options.num_ranks - 1)
    if how == "few":  # with fewer than topk, a token names some of them twice
        return min(buffer.num_experts, max(shape.topk + draw.number(-2, 2), 1)), -1
    return buffer.num_experts, -1


def _tokens(draw: Draw, num_ranks: int, most: int, kind: str) -> tuple[int, ...]:
    if kind == "graph":
        return (most,) * num_ranks
    how = draw.one_of("random", "random", "all", "few", "none", "one")
    if how == "all":
        return (most,) * num_ranks
    if how == "few":
        return tuple(draw.number(0, min(2, most)) for _ in range(num_ranks))
    if how == "none":  # on some ranks, sometimes on all
        return tuple(draw.one_of(0, draw.number(0, most)) for _ in range(num_ranks))
    if how == "one":
        full = draw.number(0, num_ranks - 1)
        return tuple(most if rank == full else draw.number(0, 1) for rank in range(num_ranks))
    return tuple(draw.number(0, most) for _ in range(num_ranks))


def _delays(draw: Draw, num_ranks: int) -> tuple[float, ...]:
    if draw.chance(0.8):
        return (0.0,) * num_ranks
    return tuple(_LONGEST_DELAY_S * float(draw.rng.random()) ** 4 if draw.chance(0.5) else 0.0 for _ in range(num_ranks))


def _fits(shape: Shape, dtype: str) -> bool:
    row_bytes = shape.hidden * DTYPES[dtype].itemsize
    width = min(shape.hidden * DTYPES[shape.dtype].itemsize, MAX_ROW_BYTES)
    return row_bytes <= width and row_bytes % ROW_ALIGNMENT == 0


def _calls(draw: Draw, options: Options, shape: Shape) -> tuple[Call, ...]:
    payloads = [dtype for dtype in _PAYLOADS if _fits(shape, dtype)]
    sums, forms = [dtype for dtype in COMBINE_DTYPES if _fits(shape, dtype)], compressions_of(options, shape)
    made = []
    for number in range(draw.one_of(1, 1, 2, 3)):
        has_idx = number == 0 or draw.chance(0.5)
        made.append(
            Call(
                is_repeat=number > 0,
                dtype=draw.one_of(*payloads),
                scale_words=draw.number(1, -(-shape.hidden // FP8_GROUP)) if draw.chance(0.4) else 0,
                scale_dtype=draw.one_of("float32", "int32"),
                has_idx=has_idx,
                has_weights=has_idx and draw.chance(0.7),
                mode=draw.one_of(*_STREAM_MODES),
                combine_dtype=draw.one_of(*sums),
                combine_mode=draw.one_of(*_STREAM_MODES),
                sums_weights=draw.chance(0.4),
                biases=draw.one_of(0, 0, 1, 2),
                compress=draw.one_of(*forms) if draw.chance(0.2) else None,
            )
        )
    return tuple(_prepared_call(call) if call.is_repeat and draw.chance(0.4) else call for call in made)


def _prepared_call(call: Call) -> Call:
    """Return a prepared call, whose dispatch and combine have the same stream. It waits for no event of the caller."""
    mode = "plain" if call.mode == "event" else call.mode
    return dataclasses.replace(call, mode=mode, combine_mode=mode, is_prepared=True)


def _expert_calls(draw: Draw, options: Options, shape: Shape) -> tuple[Call, ...]:
    payloads = [dtype for dtype in _PAYLOADS if _fits(shape, dtype)]
    sums, forms = [dtype for dtype in COMBINE_DTYPES if _fits(shape, dtype)], compressions_of(options, shape)
    made = []
    for number in range(draw.one_of(1, 1, 2)):
        drawn: dict[str, Any] = dict(
            dtype=draw.one_of(*payloads),
            scale_words=draw.number(1, -(-shape.hidden // FP8_GROUP)) if draw.chance(0.4) else 0,
            by_column=draw.chance(0.5),
            has_weights=draw.chance(0.7),
            zero_padding=draw.chance(0.5),
            mode=draw.one_of(*_STREAM_MODES),
            combine_dtype=draw.one_of(*sums),
            combine_mode=draw.one_of(*_STREAM_MODES),
            sums_weights=draw.chance(0.7),
            is_weighted=draw.chance(0.6),
            biases=int(draw.chance(0.3)),
            reduce=draw.one_of("rank", "topk"),
            compress=draw.one_of(*forms) if draw.chance(0.2) else None,
        )
        has_idx = number == 0 or drawn["has_weights"]
        made.append(Call(is_repeat=number > 0, scale_dtype="float32", has_idx=has_idx, **drawn))
    return tuple(made)


def _steps(draw: Draw, options: Options, buffer: BufferPlan) -> tuple[Step, ...]:
    shape, made = buffer.shape, []
    many = draw.number(2, min(3, shape.num_slots)) if shape.num_slots > 1 and draw.chance(0.4) else 1
    use_fp8 = options.has_fp8 and shape.hidden % FP8_GROUP == 0
    forms = compressions_of(options, shape) if shape.hidden % LOW_LATENCY_CHANNELS == 0 else [None]
    # GPUs support rows that are not reduced early only without masking.
    may_reduce_late = shape.on_timeout == "raise"
    for _ in range(many):
        fp8 = use_fp8 and draw.chance(0.6)
        ue8m0 = fp8 and draw.chance(0.3)
        zero_copy = draw.chance(0.3) and many == 1  # a Buffer has one such array
        early = not (may_reduce_late and draw.chance(0.4))
        made.append(
            Step(
                use_fp8=fp8,
                round_scale=fp8 and (ue8m0 or draw.chance(0.4)),
                use_ue8m0=ue8m0,
                early_weights=draw.chance(0.6),
                hook=many > 1 or draw.chance(0.4),
                combine_hook=many > 1 or draw.chance(0.4),
                stats=draw.chance(0.3),
                reduce_early=early,
                zero_copy=zero_copy,
                out=draw.chance(0.3),
                has_excluded=draw.chance(0.3),
                compress=draw.one_of(*forms) if early and draw.chance(0.3) else None,
                mode=draw.one_of("plain", "plain", "async", "stream"),
                combine_mode=draw.one_of("plain", "plain", "async", "stream"),
            )
        )
    made = [_prepared(step) if draw.chance(0.25) else step for step in made]
    may_be_quantised = shape.hidden % ROW_ALIGNMENT == 0 and shape.hidden >= _LEAST_QUANTISED
    return tuple(_quantised(step, may_be_quantised and draw.chance(0.25), draw.chance(0.3)) for step in made)


def _quantised(step: Step, is_quantised: bool, has_fewer: bool) -> Step:
    """Return a step with these two, without a conversion if rows are quantised."""
    changes: dict[str, Any] = dict(use_fp8=False, round_scale=False, use_ue8m0=False) if is_quantised else {}
    return dataclasses.replace(step, **changes, is_quantised=is_quantised, has_fewer=has_fewer)


def _prepared(step: Step) -> Step:
    """Return a step of prepared calls, whose dispatch and combine have the same hook, stream, weights and choices."""
    changes: dict[str, Any] = dict(combine_hook=step.hook, combine_mode=step.mode, early_weights=True, has_excluded=False)
    return dataclasses.replace(step, **changes, is_prepared=True)
