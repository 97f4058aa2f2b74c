"""Throughput calls of the host backend with rows that lie expert by expert: a row for each (token, choice)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...arrays.host_memory import Result, from_float32, rows_of, to_float32, values_of
from ...arrays.view import View
from ...config import Config, tile_rows_of
from ...results import DispatchHandle, DispatchResult, Views
from ..base import SCALE_COLUMN_ALIGNMENT, CombineInputs, DispatchInputs
from ..overflow import OverflowLog
from .throughput import Throughput


@dataclass(frozen=True, eq=False)
class RowsByExpert:
    """Where the rows of a dispatch by token lie expert by expert."""

    by_token: DispatchHandle
    positions: np.ndarray  # [rows by token, num_topk] the row of each choice; -1: none
    offsets: np.ndarray  # [num_local_experts + 1] the first row of each expert
    ends: np.ndarray  # [num_local_experts] the end of an expert's rows without padding
    num_recv: int  # rows with their padding, dropped ones too


class ExpertRows:
    """Dispatch and combine of rows by expert, by means of rows by token."""

    def __init__(self, config: Config, throughput: Throughput, overflow: OverflowLog) -> None:
        self._config, self._throughput, self._overflow = config, throughput, overflow

    def dispatch(self, inputs: DispatchInputs) -> tuple[DispatchHandle, Views]:
        """Send rows to the ranks of their experts, and copy them to each of their experts there."""
        known = inputs.handle
        worst = None if known or inputs.num_worst_tokens is None else self._config.num_max_recv_tokens
        by_token = replace(inputs, handle=known and known.routing.by_token, num_worst_tokens=worst)
        sent, views = self._throughput.dispatch(by_token)
        handle = known or self._new_handle(inputs, sent, views)
        return handle, self._expanded(handle, views, inputs)

    def combine(self, inputs: CombineInputs) -> Views:
        """Add up this rank's rows of each token in the order of the token's choices, and combine the sums."""
        if inputs.reduce == "topk":
            return self._sum_of_choices(inputs)
        routing: RowsByExpert = inputs.handle.routing
        num_rows, num_topk = routing.positions.shape
        rows = to_float32(rows_of(inputs.x), inputs.x.dtype)
        weights = None if inputs.topk_weights is None else values_of(inputs.topk_weights).reshape(-1)
        sums = np.zeros((num_rows, self._config.hidden), np.float32)
        returned = np.zeros((num_rows, num_topk), np.float32)
        with np.errstate(all="ignore"):  # an inf - inf stands in the caller's numbers
            for choice in range(num_topk):
                (token,) = np.nonzero(routing.positions[:, choice] >= 0)
                row = routing.positions[token, choice]
                terms = rows[row]
                if weights is not None:
                    returned[token, choice] = weights[row]
                    terms = weights[row, None] * terms if inputs.weighted else terms
                sums[token] += terms
            y = Result(sums.shape, inputs.x.dtype)
            from_float32(sums, inputs.x.dtype, y.rows)
        back: View | None = None
        if weights is not None and not inputs.weighted:
            result = Result(returned.shape, "float32")
            result.values[...] = returned
            back = result.view(inputs.x.framework)
        by_token = replace(inputs, x=y.view(inputs.x.framework), handle=routing.by_token, topk_weights=back)
        return self._throughput.combine(by_token)

    def _sum_of_choices(self, inputs: CombineInputs) -> Views:
        """Send the row of each choice to the rank of its token, and add them up there in the order of the choices."""
        routing: RowsByExpert = inputs.handle.routing
        num_rows, num_topk = routing.positions.shape
        num_tokens, hidden, dtype = routing.by_token.num_tokens, self._config.hidden, inputs.x.dtype
        entries = np.nonzero(routing.positions >= 0)
        of_entries = routing.positions[entries]
        rows = np.zeros((num_rows, num_topk, inputs.x.row_bytes), np.uint8)
        weights = np.zeros((num_rows, num_topk), np.float32)
        rows[entries] = rows_of(inputs.x)[of_entries]
        if inputs.topk_weights is not None:
            weights[entries] = values_of(inputs.topk_weights).reshape(-1)[of_entries]
        is_sent = (routing.positions >= 0).astype(np.uint8)
        by_token = replace(inputs, handle=routing.by_token)
        given = [rows.reshape(num_rows, num_topk * inputs.x.row_bytes), weights.view(np.uint8), is_sent]
        sent, parts, lost = self._throughput.return_rows(by_token, given)

        rows = np.zeros((num_tokens, num_topk, inputs.x.row_bytes), np.uint8)
        weights = np.zeros((num_tokens, num_topk), np.float32)
        has_row = np.zeros((num_tokens, num_topk), bool)
        for peer, (tokens, arrived) in enumerate(zip(sent.sent_tokens, parts, strict=True)):
            if peer in lost:
                continue
            row, choice = np.nonzero(arrived[2])
            target = tokens[row], choice
            rows[target] = arrived[0].reshape(len(tokens), num_topk, inputs.x.row_bytes)[row, choice]
            weights[target] = np.ascontiguousarray(arrived[1]).view(np.float32)[row, choice]
            has_row[target] = True
        if self._throughput.statistics is not None:
            self._throughput.statistics.add_rows(int(is_sent.sum()), int(has_row.sum()), inputs.x.row_bytes)
        total = np.zeros((num_tokens, hidden), np.float32)
        with np.errstate(all="ignore"):  # an inf - inf stands in the caller's numbers
            for k in range(num_topk):
                (has_choice,) = np.nonzero(has_row[:, k])
                terms = to_float32(np.ascontiguousarray(rows[has_choice, k]), dtype)
                total[has_choice] += weights[has_choice, k, None] * terms if inputs.weighted else terms
            for bias in inputs.biases:
                total += to_float32(rows_of(bias), dtype)
            out = Result(total.shape, dtype)
            from_float32(total, dtype, out.rows)
        views: Views = {"x": out.view(inputs.x.framework), "topk_weights": None}
        if inputs.topk_weights is not None and not inputs.weighted:
            returned = Result(weights.shape, "float32")
            returned.values[...] = weights
            views["topk_weights"] = returned.view(inputs.x.framework)
        return views

    def _new_handle(self, inputs: DispatchInputs, by_token: DispatchHandle, views: Views) -> DispatchHandle:
        idx, counts = views["topk_idx"], views["num_recv_per_expert"]
        assert idx is not None
        assert counts is not None
        offsets = np.concatenate([[0], np.cumsum(values_of(counts).reshape(-1), dtype=np.int64)])
        num_recv = int(offsets[-1])
        num_rows = num_recv if inputs.num_worst_tokens is None else inputs.num_worst_tokens
        if num_recv > num_rows:
            self._overflow.warn_of_rows(num_recv, num_rows)
        positions = _positions(values_of(idx), offsets, num_rows)
        chosen = values_of(idx)[values_of(idx) >= 0]
        ends = offsets[:-1] + np.bincount(chosen, minlength=self._config.num_local_experts)
        routing = RowsByExpert(by_token, positions, np.minimum(offsets, num_rows), np.minimum(ends, num_rows), num_recv)
        counts_list = by_token.num_recv_tokens_per_expert_list
        tile_rows = tile_rows_of(inputs.expert_alignment)
        return DispatchHandle(
            by_token.num_tokens, num_rows, counts_list, by_token.buffer_serial, routing, {}, layout="expert", tile_rows=tile_rows
        )

    def _expanded(self, handle: DispatchHandle, by_token: Views, inputs: DispatchInputs) -> Views:
        """Return the results of a call. Its rows by token are `by_token`."""
        routing: RowsByExpert = handle.routing
        num_rows, framework = handle.num_recv_rows, inputs.x.framework
        token, choice = np.nonzero(routing.positions >= 0)
        row = routing.positions[token, choice]

        def expanded(view: View) -> Result:
            result = Result((num_rows, *view.shape[1:]), view.dtype, fill=0)
            result.rows[row] = rows_of(view)[token]
            return result

        experts = np.full(num_rows, -1, np.int32)
        for expert, (first, end) in enumerate(zip(routing.offsets, routing.ends, strict=False)):
            experts[first:end] = expert
        x, scales, weights, src_idx = (by_token.get(name) for name in ("x", "scales", "topk_weights", "src_idx"))
        assert x is not None
        views: Views = {
            **by_token,
            "x": expanded(x).view(framework),
            "topk_idx": None,
            "num_recv": Result.of(np.array([routing.num_recv])).view(framework),
            "expert_offsets": Result.of(routing.offsets).view(framework),
            "expert_idx": Result.of(experts).view(framework),
        }
        if inputs.signals:
            num_tiles = -(-num_rows // handle.tile_rows)
            views["tile_ready"] = Result.of(np.full(num_tiles, DispatchResult.signal)).view(framework)
        if scales is not None:
            result = expanded(scales)
            views["scales"] = (_by_column(result) if inputs.scales_by_column else result).view(framework)
        if weights is not None:
            of_rows = Result((num_rows,), "float32", fill=0)
            of_rows.values[row, 0] = values_of(weights)[token, choice]
            views["topk_weights"] = of_rows.view(framework)
        if src_idx is not None:  # a handle that was made of an array has none
            sources = np.full((num_rows, 3), -1, np.int32)
            sources[row] = np.column_stack([values_of(src_idx)[token], choice])
            views["src_idx"] = Result.of(sources).view(framework)
        return views


def _positions(topk_idx: np.ndarray, offsets: np.ndarray, num_rows: int) -> np.ndarray:
    """Find the row of each choice, `[rows by token, num_topk]`; -1 for choices of other ranks and for dropped rows.

    `topk_idx` has local expert numbers, -1 for none, and the shape of the result. `offsets` is `[num_local_experts + 1]`.
    """
    flat = topk_idx.reshape(-1)
    (entries,) = np.nonzero(flat >= 0)
    entries = entries[np.argsort(flat[entries], kind="stable")]
    experts = flat[entries]
    first = np.searchsorted(experts, experts)  # the first entry of the same expert
    positions = np.full(flat.shape, -1, np.int64)
    positions[entries] = offsets[experts] + np.arange(len(entries)) - first
    positions[positions >= num_rows] = -1
    return positions.reshape(topk_idx.shape)


def _by_column(scales: Result) -> Result:
    num_rows, num_scales = scales.shape
    padded = -(-num_rows // SCALE_COLUMN_ALIGNMENT) * SCALE_COLUMN_ALIGNMENT
    result = Result((num_scales, padded), scales.dtype, fill=0)
    result.values[:, :num_rows] = scales.values.T
    return result
