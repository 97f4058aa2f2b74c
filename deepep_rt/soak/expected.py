"""Compute the expected results of a soak round at one rank from the choices of all ranks, without code of a backend.

NumPy computes positions on the host. Contents are computed on the device of the Buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import FP8_GROUP
from .arrays import Arrays

_LARGEST = np.float32(448)  # of e4m3fn
_LEAST = np.float32(1e-4)  # lower bound of a group's largest channel in dispatches
_LEAST_COMPRESSED = np.float32(2.0**-100)  # the same in combines


# --- positions ---------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Received rows of a rank: source rank and source token of each, `[n]` int64."""

    source: np.ndarray
    token: np.ndarray


class Routing:
    """The routing of one dispatch for one rank.

    For each rank, `choices` are `[tokens, topk]`, experts or -1, and `worst` is its `num_worst_tokens`. None: all rows fit.
    """

    def __init__(self, choices: Sequence[np.ndarray], rank: int, num_experts: int, worst: Sequence[int] | None = None) -> None:
        self.choices, self.rank, self.num_ranks = choices, rank, len(choices)
        self.local = num_experts // len(choices)
        self._worst = worst
        expert_ranks = [np.where(idx >= 0, idx // self.local, -1) for idx in choices]
        self._send_masks = [
            np.stack([(home == peer).any(axis=1) for peer in range(self.num_ranks)], axis=1) for home in expert_ranks
        ]  # for each source [tokens, ranks]

    @property
    def mine(self) -> np.ndarray:
        """Choices of this rank's tokens."""
        return self.choices[self.rank]

    @cached_property
    def num_sent_here(self) -> int:
        """Count the rows that are sent to this rank, including rows that do not fit."""
        return self.num_sent_to(self.rank)

    def num_sent_to(self, peer: int) -> int:
        """Count the rows that are sent to a rank, including rows that do not fit."""
        return int(sum(goes[:, peer].sum() for goes in self._send_masks))

    @cached_property
    def num_rows(self) -> int:
        """Count the rows of the result."""
        return self.num_sent_here if self._worst is None else self._worst[self.rank]

    @cached_property
    def kept(self) -> Rows:
        """List the rows that fit, in the order of the result."""
        tokens = [np.flatnonzero(goes[:, self.rank]) for goes in self._send_masks]
        source = np.repeat(np.arange(self.num_ranks), [len(t) for t in tokens])
        return Rows(source[: self.num_rows], np.concatenate(tokens)[: self.num_rows])

    @cached_property
    def num_per_expert(self) -> np.ndarray:
        """Count the choices of each local expert, including rows that do not fit."""
        every = np.concatenate([idx.reshape(-1) for idx in self.choices])
        first = self.rank * self.local
        return np.bincount(every[(every >= first) & (every < first + self.local)] - first, minlength=self.local)

    @cached_property
    def local_choices(self) -> np.ndarray:
        """List the local experts of each row of the result, `[num_rows, topk]`. Other choices are -1."""
        made = np.full((self.num_rows, self.mine.shape[1]), -1, np.int64)
        for source in range(self.num_ranks):
            at = np.flatnonzero(self.kept.source == source)
            idx = self.choices[source][self.kept.token[at]]
            is_here = (idx >= 0) & (idx // self.local == self.rank)
            made[at] = np.where(is_here, idx - self.rank * self.local, -1)
        return made

    def returned_by(self, peer: int) -> np.ndarray:
        """List the tokens of this rank that have a row at `peer`, ascending."""
        tokens = np.flatnonzero(self._send_masks[self.rank][:, peer])
        if self._worst is None:
            return tokens
        before = sum(int(goes[:, peer].sum()) for goes in self._send_masks[: self.rank])
        return tokens[: max(self._worst[peer] - before, 0)]


class Entries(NamedTuple):
    """Rows of a low-latency dispatch by expert, `[n]` int64 each: position and source."""

    expert: np.ndarray  # local
    row: np.ndarray  # of the expert
    source: np.ndarray
    token: np.ndarray
    choice: np.ndarray


class ExpertRouting:
    """The routing of one low-latency dispatch for one rank. A token may name an expert more than once.

    `choices` are as for `Routing`. An expert has room for `capacity` rows. Later ones are dropped.
    """

    def __init__(self, choices: Sequence[np.ndarray], rank: int, num_experts: int, capacity: int) -> None:
        self.choices, self.rank, self.num_ranks, self.capacity = choices, rank, len(choices), capacity
        self.local, self._num_experts = num_experts // len(choices), num_experts

    @property
    def mine(self) -> np.ndarray:
        """Choices of this rank's tokens."""
        return self.choices[self.rank]

    @cached_property
    def entries(self) -> Entries:
        """List the rows that fit, in the order of the result."""
        first = self.rank * self.local
        at = [np.nonzero((idx >= first) & (idx < first + self.local)) for idx in self.choices]
        source = np.repeat(np.arange(self.num_ranks), [len(token) for token, _ in at])
        token, choice = (np.concatenate(parts) for parts in zip(*at, strict=True))
        expert = np.concatenate([idx[where] for idx, where in zip(self.choices, at, strict=True)]) - first
        order = np.argsort(expert, kind="stable")
        expert = expert[order]
        row = np.arange(len(expert)) - np.searchsorted(expert, expert)
        fits = row < self.capacity
        return Entries(expert[fits], row[fits], source[order][fits], token[order][fits], choice[order][fits])

    @cached_property
    def num_per_expert(self) -> np.ndarray:
        """Count the rows of each local expert."""
        return np.bincount(self.entries.expert, minlength=self.local)

    @cached_property
    def fits(self) -> np.ndarray:
        """Tell which choices of this rank's tokens have a row, `[tokens, topk]` bool."""
        before = sum(np.bincount(idx[idx >= 0], minlength=self._num_experts) for idx in self.choices[: self.rank])
        found = np.zeros(self.mine.shape, bool)
        for expert in np.unique(self.mine[self.mine >= 0]):
            token, choice = np.nonzero(self.mine == expert)
            room = self.capacity - (before[expert] if self.rank else 0)  # type: ignore[index]
            found[token[: max(room, 0)], choice[: max(room, 0)]] = True
        return found


class ExpertRows(NamedTuple):
    """Received rows of a dispatch by expert, `[n]` int64 each: place and source."""

    position: np.ndarray
    expert: np.ndarray  # local
    source: np.ndarray
    token: np.ndarray
    choice: np.ndarray


class Received:
    """The rows by expert of one rank. `choices` are as for `Routing`. `worst` is `num_worst_tokens` of the rank. None: all rows fit."""

    def __init__(self, choices: list[np.ndarray], rank: int, num_experts: int, alignment: int, worst: int | None) -> None:
        self.routing = ExpertRouting(choices, rank, num_experts, sum(idx.size for idx in choices))
        self.counts = -(-self.routing.num_per_expert // alignment) * alignment
        self.all_offsets = np.concatenate([[0], np.cumsum(self.counts)])
        self.num_recv = int(self.all_offsets[-1])
        self.num_rows = self.num_recv if worst is None else worst
        self.has_list = worst is None

    @cached_property
    def kept(self) -> ExpertRows:
        """List the rows that fit."""
        entries = self.routing.entries
        position = self.all_offsets[entries.expert] + entries.row
        fits = position < self.num_rows
        return ExpertRows(
            position[fits], *(part[fits] for part in (entries.expert, entries.source, entries.token, entries.choice))
        )

    def has_row(self, source: int) -> np.ndarray:
        """Tell which choices of a source's tokens have a row here, `[tokens, topk]` bool."""
        found, mine = np.zeros(self.routing.choices[source].shape, bool), self.kept.source == source
        found[self.kept.token[mine], self.kept.choice[mine]] = True
        return found


# --- sums --------------------------------------------------------------------------------------------------------------------------


def summed(
    arrays: Arrays,
    routing: Routing,
    node_size: int,
    width: int,
    dtype: str,
    row: Callable[[int, np.ndarray], Any],
    biases: Sequence[Any] = (),
    compress: str | None = None,
    path: str = "hierarchical",
) -> Any:
    """Compute the sums of a combine: float32, each node in rank order, then the nodes, then the biases, rounded once.

    The sum of a node other than that of this rank is rounded before it is added, but for compressed rows of the direct path. `row` returns
    the rows of a rank for tokens of this rank. Rows and biases, which are of all tokens, are unsigned integers.

    `compress` is the form of rows on the way, those of this rank included. With several nodes, it is the form of the rounded sums of other
    nodes, or on the direct path of their rows. None: as they are.
    """
    has_nodes, is_direct = node_size < routing.num_ranks, compress is not None and path == "direct"
    total = arrays.xp.zeros((len(routing.mine), width), np.float32)
    for first in range(0, routing.num_ranks, node_size):
        node = arrays.xp.zeros(total.shape, np.float32)
        is_far = not first <= routing.rank < first + node_size
        form = compress if not has_nodes or (is_far and is_direct) else None
        for peer in range(first, first + node_size):
            tokens = routing.returned_by(peer)
            if len(tokens):
                rows = arrays.to_float32(row(peer, tokens), dtype)
                node[arrays.put(tokens)] += rows if form is None else after_compression(arrays, rows, form)
        if is_far and not is_direct:
            node = arrays.to_float32(arrays.from_float32(node, dtype), dtype)
            node = node if compress is None else after_compression(arrays, node, compress)
        total += node  # a node without a row adds 0, which changes no bit
    for bias in biases:
        total += arrays.to_float32(bias, dtype)
    return arrays.from_float32(total, dtype)


def weighted(
    arrays: Arrays,
    expert_ranks: np.ndarray,
    width: int,
    weights: Any,
    row: Callable[[int], Any],
    *,
    num_ranks: int,
    reduce_early: bool,
    compress: str | None = None,
) -> Any:
    """Compute the sums of a low-latency combine as bfloat16 in unsigned integers.

    `expert_ranks`, `[tokens, topk]`, is the rank that returns a row for a choice, or -1 if no row is added. `weights`, `[tokens, topk]`
    float32, are of this rank. `row` returns the rows of a choice for all tokens, as unsigned integers.

    With `reduce_early`, expert ranks add up their rows of a token and round the sum. `compress` is the form of these sums on the way. None:
    as they are.
    """
    xp, shape = arrays.xp, (len(expert_ranks), width)
    sums: dict[int, Any] = {peer: xp.zeros(shape, np.float32) for peer in (range(num_ranks) if reduce_early else [0])}
    for choice in range(expert_ranks.shape[1]):
        term = weights[:, choice, None] * arrays.to_float32(row(choice), "bfloat16")
        for peer, partial in sums.items():
            chosen = expert_ranks[:, choice] == peer if reduce_early else expert_ranks[:, choice] >= 0
            if chosen.any():
                partial += xp.where(arrays.put(chosen)[:, None], term, xp.float32(0))
    if not reduce_early:
        return arrays.from_float32(sums[0], "bfloat16")
    total = xp.zeros(shape, np.float32)
    for peer in range(num_ranks):
        rows = arrays.to_float32(arrays.from_float32(sums[peer], "bfloat16"), "bfloat16")
        total += rows if compress is None else after_compression(arrays, rows, compress)
    return arrays.from_float32(total, "bfloat16")


# --- formats of rows, to the bits that kernels and the host backend compute ----------------------------------------------------------


def to_fp8(arrays: Arrays, rows: Any, *, round_scale: bool, ue8m0: bool) -> tuple[Any, Any]:
    """Convert rows of finite bfloat16 to e4m3fn with a scale for each 128 channels, rounded to nearest, ties to even.

    `rows` are `[n, hidden]` uint16. `round_scale` rounds scales to powers of two. `ue8m0` returns scales as exponents.

    Return `[n, hidden]` uint8, and `[n, hidden // 128]` float32 or uint8.
    """
    xp = arrays.xp
    groups = arrays.to_float32(rows, "bfloat16").reshape(len(rows), rows.shape[1] // FP8_GROUP, FP8_GROUP)
    largest = xp.maximum(abs(groups).max(axis=2), _LEAST)
    scales, factors = largest / _LARGEST, _LARGEST / largest
    if round_scale:
        bits = scales.view(np.uint32)
        up = ((bits & xp.uint32(0x7FFFFF)) != 0).astype(np.uint32)
        scales = (((bits >> xp.uint32(23)) + up) << xp.uint32(23)).view(np.float32)
        factors = xp.float32(1) / scales
    codes = _e4m3_codes(arrays, abs(groups) * factors[:, :, None]).astype(np.uint8).reshape(rows.shape)
    codes |= (rows >> np.uint16(8) & np.uint16(0x80)).astype(np.uint8)
    if ue8m0:
        return codes, (scales.view(np.uint32) >> xp.uint32(23)).astype(np.uint8)
    return codes, scales


def after_compression(arrays: Arrays, rows: Any, form: str) -> Any:
    """Return finite rows, `[n, hidden]` float32 with `hidden` a multiple of 128, as a combine with `compress=form` adds them."""
    made = arrays.xp.zeros(rows.shape, np.float32)
    for part in arrays.chunks(len(rows), rows.nbytes // max(len(rows), 1)):  # a part needs several times its memory
        groups = rows[part].reshape(-1, FP8_GROUP)
        changed = _after_fp8(arrays, groups) if form == "fp8" else _after_log10(arrays, groups)
        made[part] = changed.reshape(rows[part].shape)
    return made


def _after_fp8(arrays: Arrays, groups: Any) -> Any:
    scales = _power_of_two(arrays, groups, most=1.75) * np.float32(2.0**-8)
    codes = _e4m3_codes(arrays, abs(groups) / scales).reshape(groups.shape)
    sizes = arrays.put(_e4m3_sizes())[codes] * scales
    return _with_signs(arrays, sizes.view(np.uint32), groups)


def _after_log10(arrays: Arrays, groups: Any) -> Any:
    """Round each size, in units in which the largest is at most 29.8, plus 2, to 8 significant bits, and take 2 away."""
    xp = arrays.xp
    scales = _power_of_two(arrays, groups, most=1.86328125) / np.float32(16)
    sums = abs(groups) / scales + np.float32(2)
    steps = (sums.view(np.uint32) & xp.uint32(0x7F800000)).view(np.float32) * np.float32(1 / 128)
    sizes = (xp.rint(sums / steps) * steps - np.float32(2)) * scales
    return _with_signs(arrays, sizes.view(np.uint32), groups)


def _power_of_two(arrays: Arrays, groups: Any, *, most: float) -> Any:
    """Return the least power of two of which the largest channel is at most `most` times, `[n, 1]`."""
    xp = arrays.xp
    largest = xp.maximum(abs(groups).max(axis=1), _LEAST_COMPRESSED)[:, None]
    powers = (largest.view(np.uint32) & xp.uint32(0x7F800000)).view(np.float32)
    return xp.where(largest / powers > np.float32(most), np.float32(2), np.float32(1)) * powers


def _with_signs(arrays: Arrays, sizes: Any, rows: Any) -> Any:
    """Combine the bits of positive float32 with the signs of rows."""
    return (sizes | rows.view(np.uint32) & arrays.xp.uint32(1 << 31)).view(np.float32)


def _e4m3_codes(arrays: Arrays, sizes: Any) -> Any:
    """Round positive numbers to e4m3fn, and return the codes, `[sizes.size]` int64."""
    middles = arrays.put(_middles())
    sizes = arrays.xp.minimum(sizes, _LARGEST).reshape(-1)
    codes = arrays.xp.searchsorted(middles, sizes)
    is_tie = middles[arrays.xp.minimum(codes, len(middles) - 1)] == sizes
    codes += is_tie & (codes % 2 == 1)
    return codes


def _e4m3_sizes() -> np.ndarray:
    """List the finite magnitudes of e4m3fn, ascending."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)).astype(np.float32)


def _middles() -> np.ndarray:
    """List the midpoints between adjacent magnitudes of e4m3fn, ascending."""
    sizes = _e4m3_sizes()
    return (sizes[1:] + sizes[:-1]) / np.float32(2)
