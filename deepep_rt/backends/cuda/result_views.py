"""Views of the results of throughput calls, which lie in memory that a call has reserved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.view import View
from ...results import Views
from .runtime import CudaRuntime


@dataclass(frozen=True, slots=True)
class ArrivingRows:
    """Addresses of what a launched routing and its dispatch write. Work behind it on its stream may read there."""

    topk_idx: int
    src_idx: int
    num_recv: int
    num_recv_per_expert: int
    capacity: int  # rows that fit
    idx_bytes: int


OnLaunch = Callable[[ArrivingRows], None]
"""Launches more kernels behind a dispatch. It may not fail for a reason of one rank: the other ranks have made the call."""


def dispatch_views(
    runtime: CudaRuntime,
    arrays: Sequence[Any],
    offsets: dict[str, int],
    num_rows: int,
    *,
    rows: tuple[int, Any],
    counts: tuple[int, Any],
    stream: int,
) -> Callable[[], Views]:
    """Return the function that makes the results of a dispatch.

    Args:
        runtime: Of the Buffer.
        arrays: x, topk_idx, topk_weights, scales: results have their dtypes and shapes, but for the number of rows.
        offsets: Of the results, from the address in `rows`.
        num_rows: Rows of the results.
        rows: An address, and the owner of the memory there.
        counts: The same, for the counts.
        stream: The stream of the call.
    """
    framework = arrays[0].framework
    # The function does not hold the arguments: the caller may drop them before it reads the results.
    formats = [(view.dtype, view.shape) if view else None for view in arrays]

    def make_views() -> Views:
        result = runtime.result
        named = zip(("x", "topk_idx", "topk_weights", "scales"), formats, strict=True)
        results = {name: (format_[0], (num_rows, *format_[1][1:])) for name, format_ in named if format_}
        results["src_idx"] = "int32", (num_rows, 2)
        (base, rows_owner), (counts_base, counts_owner) = rows, counts
        views: Views = {
            name: result(base + offsets[name], shape, dtype, rows_owner, framework, stream)
            for name, (dtype, shape) in results.items()
        }
        for name, shape in (("num_recv", (1,)), ("num_recv_per_expert", (runtime.config.num_local_experts,))):
            ptr = counts_base + runtime.layout.counts.offsets[name]
            views[name] = result(ptr, shape, "int32", counts_owner, framework, stream)
        return views

    return make_views


def arriving_rows(
    first: int, offsets: dict[str, int], tables: int, table_offsets: dict[str, int], capacity: int, idx_bytes: int
) -> ArrivingRows:
    """Say where a dispatch with a new routing writes.

    The counts are those of the handle. The routing writes them before the host gets them. A dispatch that fails after that does not write
    the caller's counts, and the rows of the result are as many as the host knows.

    Args:
        first: Address of the results, while they arrive.
        offsets: Of the results.
        tables: Address of the handle's tables.
        table_offsets: Of these tables.
        capacity: Rows that fit.
        idx_bytes: Bytes of an expert number.
    """
    return ArrivingRows(
        topk_idx=first + offsets["topk_idx"],
        src_idx=first + offsets["src_idx"],
        num_recv=tables + table_offsets["num_recv"],
        num_recv_per_expert=tables + table_offsets["num_recv_per_expert"],
        capacity=capacity,
        idx_bytes=idx_bytes,
    )


def combine_views(
    runtime: CudaRuntime, x: View, num_tokens: int, out: int, out_weights: int | None, owner: Any, stream: int
) -> Callable[[], Views]:
    """Return the function that makes the results of a combine.

    Args:
        runtime: Of the Buffer.
        x: The rows of the call, whose dtype and framework the result has.
        num_tokens: Rows of the result.
        out: Their address.
        out_weights: Address of the summed weights, or None.
        owner: The owner of the memory there.
        stream: The stream of the call.
    """
    dtype, framework, config = x.dtype, x.framework, runtime.config

    def make_views() -> Views:
        result = runtime.result
        views: Views = {"x": result(out, (num_tokens, config.hidden), dtype, owner, framework, stream)}
        if out_weights is not None:
            shape = num_tokens, config.num_topk
            views["topk_weights"] = result(out_weights, shape, "float32", owner, framework, stream)
        return views

    return make_views
