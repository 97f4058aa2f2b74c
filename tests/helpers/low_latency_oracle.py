"""Work out the results of the low-latency calls from the inputs of all ranks, by plain loops over tokens.

Like `oracle`, this code is independent of `deepep_rt`, but for compressed rows, which tests/arrays checks alone. It converts to FP8 with
`ml_dtypes`. The order of all sums is documented, so results are compared bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from oracle import RankInputs, rounded

from deepep_rt.arrays.compressed_rows import compress as compressed
from deepep_rt.arrays.compressed_rows import expand

GROUP = 128


@dataclass
class Arrived:
    """The expected result of low_latency_dispatch on one rank, for each local expert.

    Attributes:
        x: `[rows, hidden]` for each expert, bfloat16 or float8_e4m3fn, or rows as they were sent.
        scales: `[rows, hidden // 128]` for each expert, or None.
        entries: (source rank, source token, choice) of each row of each expert.
    """

    x: list[np.ndarray]
    scales: list[np.ndarray] | None
    entries: list[list[tuple[int, int, int]]]


def to_fp8(x: np.ndarray, round_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Convert bfloat16 rows to FP8 with float32 scales."""
    codes = np.zeros(x.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((x.shape[0], x.shape[1] // GROUP), np.float32)
    with np.errstate(all="ignore"):
        for row in range(x.shape[0]):
            for group in range(x.shape[1] // GROUP):
                channels = slice(group * GROUP, (group + 1) * GROUP)
                values = x[row, channels].astype(np.float32)
                amax = np.abs(values[~np.isnan(values)]).max(initial=np.float32(1e-4))
                scale, inverse = amax / np.float32(448), np.float32(448) / amax
                if round_scale:
                    scale = _next_power_of_two(scale)
                    inverse = np.float32(1) / scale
                scaled = values * inverse
                rounded = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
                rounded[np.isnan(scaled)] = 0x7F
                codes[row, channels] = rounded.view(ml_dtypes.float8_e4m3fn)
                scales[row, group] = scale
    return codes, scales


def to_ue8m0(scales: np.ndarray) -> np.ndarray:
    """Return the exponents of scales that are powers of two."""
    return scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


def _next_power_of_two(value: np.float32) -> np.float32:
    if np.isinf(value):
        return value
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2**exponent, mantissa from 0.5 up to 1
    return np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))


def expected_dispatch(
    rank: int,
    all_inputs: Sequence[RankInputs],
    num_experts: int,
    *,
    fp8: bool = False,
    round_scale: bool = False,
    ue8m0: bool = False,
    live: Collection[int] | None = None,
) -> Arrived:
    """Work out what rank `rank` receives if each rank r passes `all_inputs[r]` to low_latency_dispatch.

    x is bfloat16. Rows of other dtypes arrive as they are, with their scales.

    `live`: the ranks that are not masked, rank `rank` included; None: all.
    """
    live = range(len(all_inputs)) if live is None else live
    entries = _entries_of(rank, all_inputs, num_experts // len(all_inputs), live)
    rows = [inputs.x for inputs in all_inputs]
    if not fp8:
        scales = [inputs.scales for inputs in all_inputs]
        arrived = None if scales[0] is None else [_gather(scales, found) for found in entries]
        return Arrived([_gather(rows, found) for found in entries], arrived, entries)
    converted = [to_fp8(x, round_scale or ue8m0) for x in rows]
    scales = [scale for _, scale in converted]
    if ue8m0:
        scales = [to_ue8m0(scale) for scale in scales]
    return Arrived(
        [_gather([x for x, _ in converted], found) for found in entries], [_gather(scales, found) for found in entries], entries
    )


def _gather(arrays: Sequence[np.ndarray], entries: Sequence[tuple[int, int, int]]) -> np.ndarray:
    made = np.zeros((len(entries), arrays[0].shape[1]), arrays[0].dtype)
    for row, (source, token, _) in enumerate(entries):
        made[row] = arrays[source][token]
    return made


def expected_combine(
    rank: int,
    all_inputs: Sequence[RankInputs],
    all_y: Sequence[np.ndarray],
    num_experts: int,
    *,
    reduce_early: bool,
    live: Collection[int] | None = None,
    answering: Collection[int] | None = None,
    named: np.ndarray | None = None,
    compress: str | None = None,
    received: Mapping[int, Collection[int]] | None = None,
) -> np.ndarray:
    """Work out what rank `rank` gets back, `[num_tokens, hidden]` bfloat16.

    Args:
        rank: The rank of the tokens.
        all_inputs: What all ranks dispatched, with weights.
        all_y: For each rank, its argument of low_latency_combine, `[num_local_experts, rows, hidden]` bfloat16.
        num_experts: Experts over all ranks.
        reduce_early: `allow_multiple_reduction`.
        live: The ranks that are not masked in the dispatch, rank `rank` included; None: all.
        answering: The ranks that are not masked in the combine; None: as in the dispatch.
        named: `[num_tokens, num_topk]` bool, the choices that combine names; with `reduce_early`, all or none of one rank. None: all.
        compress: The form of rows on the way.
        received: The ranks whose rows a rank has got in the dispatch, where that is not the same for all. Default: `live`.
    """
    mine, num_ranks, received = all_inputs[rank], len(all_inputs), received or {}
    live = range(num_ranks) if live is None else live
    answering = live if answering is None else [peer for peer in live if peer in answering]
    each = num_experts // num_ranks
    expert_slot: dict[tuple[int, int], tuple[int, int, int]] = {}  # (token, choice) -> expert rank, local expert, row
    for peer in answering:
        for expert, entries in enumerate(_entries_of(peer, all_inputs, each, received.get(peer, live))):
            for row, (source, token, k) in enumerate(entries):
                if source == rank:
                    expert_slot[token, k] = peer, expert, row
    hidden = all_y[rank].shape[2]
    out = np.zeros((len(mine.topk_idx), hidden), ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        for token in range(len(mine.topk_idx)):
            sums: dict[int, np.ndarray] = {}
            for k in range(mine.topk_idx.shape[1]):
                if (token, k) not in expert_slot or not (named is None or named[token, k]):
                    continue
                peer, expert, row = expert_slot[token, k]
                if row >= all_y[peer].shape[1]:  # the row was dropped
                    continue
                term = mine.topk_weights[token, k] * all_y[peer][expert, row].astype(np.float32)
                where = peer if reduce_early else 0
                sums[where] = sums.get(where, np.zeros(hidden, np.float32)) + term
            if reduce_early:
                total = np.zeros(hidden, np.float32)
                for peer in sorted(sums):
                    row = rounded(sums[peer], ml_dtypes.bfloat16).astype(np.float32)
                    total = total + (row if compress is None else expand(compressed(row[None], compress), hidden, compress)[0])
                out[token] = rounded(total, ml_dtypes.bfloat16)
            elif sums:
                out[token] = rounded(sums[0], ml_dtypes.bfloat16)
    return out


def _entries_of(
    peer: int, all_inputs: Sequence[RankInputs], each: int, live: Collection[int]
) -> list[list[tuple[int, int, int]]]:
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(each)]
    for source, inputs in enumerate(all_inputs):
        if source not in live:
            continue
        for token, choices in enumerate(inputs.topk_idx.tolist()):
            for k, expert in enumerate(choices):
                if expert // each == peer and expert >= 0:
                    found[expert % each].append((source, token, k))
    return found


_NUM_DRAWN = 2**18 - 5  # a prime, so that values which repeat lie in other channels


@functools.cache
def _drawn(special: bool) -> np.ndarray:
    """Draw values once. Drawing all outputs anew takes longer than the calls that the programs check."""
    rng = np.random.default_rng([9, special])
    y = rng.standard_normal(_NUM_DRAWN, np.float32)
    if special:
        y[rng.random(_NUM_DRAWN) < 0.3] = -0.0
        for value in (np.inf, -np.inf, np.nan, 1e38, -1e38):
            y[rng.random(_NUM_DRAWN) < 0.01] = value
    return y.astype(ml_dtypes.bfloat16)


def outputs(seed: int, rank: int, shape: tuple[int, int, int], *, special: bool = False) -> np.ndarray:
    """Make outputs of the experts of one rank: random values from a random start. `special` mixes -0.0, infinities and NaN in."""
    start = int(np.random.default_rng([seed, rank, 9]).integers(_NUM_DRAWN))
    return np.resize(np.roll(_drawn(special), -start), shape)


def check_dispatch(result: object, expected: Arrived) -> None:
    """Compare a `LowLatencyDispatchResult` of NumPy arrays with `expected`, bit for bit, in its defined part."""
    counts, room = np.asarray(result.num_recv_tokens_per_expert), result.recv_x.shape[1]
    assert counts.dtype == np.int32, counts.dtype
    assert counts.tolist() == [min(len(found), room) for found in expected.entries], counts
    assert (result.recv_x_scales is None) == (expected.scales is None)
    for name, got, wanted in (("recv_x", result.recv_x, expected.x), ("recv_x_scales", result.recv_x_scales, expected.scales)):
        for expert, all_rows in enumerate(wanted or []):
            rows = all_rows[:room]
            assert got.dtype == rows.dtype, (name, got.dtype, rows.dtype)
            same = got[expert, : len(rows)].view(np.uint8) == rows.view(np.uint8)
            if not same.all():
                row = int(np.argwhere(~same)[0][0])
                source = expected.entries[expert][row]
                raise AssertionError(
                    f"{name}[{expert}, {row}] of (source, token, choice) {source}: {got[expert, row]} != {rows[row]}"
                )
