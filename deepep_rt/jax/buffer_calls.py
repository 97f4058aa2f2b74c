"""The calls of a Buffer that callbacks make, with results in XLA's memory."""

from __future__ import annotations

from typing import Any

from ..arrays.view import View, host_bytes
from ..backends.base import Backend
from ..buffer import Buffer, backend_of


def run_dispatch(
    buffer: Buffer,
    stream: int | None,
    arguments: list[View],
    results: list[View],
    rows: int,
    layout: str,
    alignment: int,
) -> None:
    """Dispatch along a new routing, and copy rows, experts or their offsets, counts, weights and the routing."""
    by_expert = layout == "expert"
    sizes: dict[str, Any] = dict(num_worst_tokens=rows, expert_alignment=alignment)
    sent = buffer.dispatch(*arguments, **sizes, layout=layout, zero_padding=by_expert, stream=stream)
    recv_x, experts, num_recv, per_expert, table, *recv_weights = results
    backend = backend_of(buffer)
    assert sent.num_recv_tokens is not None
    if by_expert:
        _copy(backend, stream, (sent.recv_x, recv_x))
    else:
        _copy_rows(stream, sent.recv_x, sent.num_recv_tokens, recv_x)
    counts = ((sent.num_recv_tokens, num_recv), (sent.num_recv_tokens_per_expert, per_expert))
    weights = ((sent.recv_topk_weights, out) for out in recv_weights)
    _copy(backend, stream, (sent.expert_offsets if by_expert else sent.recv_topk_idx, experts), *counts, *weights)
    backend.tables.save(sent.handle, table, stream)


def run_known_dispatch(
    buffer: Buffer,
    stream: int | None,
    arguments: list[View],
    results: list[View],
    num_tokens: int,
    num_recv_rows: int,
    layout: str,
) -> None:
    """Dispatch along the routing of a handle, and copy the rows. Padding is zero."""
    table, num_recv, x = arguments
    backend, by_expert = backend_of(buffer), layout == "expert"
    handle = backend.tables.load(table, num_tokens, num_recv_rows, layout)
    sent = buffer.dispatch(x, handle=handle, zero_padding=by_expert, stream=stream)
    if by_expert:
        _copy(backend, stream, (sent.recv_x, results[0]))
    else:
        _copy_rows(stream, sent.recv_x, num_recv, results[0])


def run_combine(
    buffer: Buffer,
    stream: int | None,
    arguments: list[View],
    results: list[View],
    num_tokens: int,
    num_recv_rows: int,
    layout: str,
    weighted: bool,
    reduce: str,
    compress: str | None,
) -> None:
    """Combine, and copy the sums of rows and of weights."""
    table, x, *weights = arguments
    backend = backend_of(buffer)
    handle = backend.tables.load(table, num_tokens, num_recv_rows, layout)
    how: dict[str, Any] = dict(weighted=weighted, reduce=reduce, compress=compress)
    back = buffer.combine(x, handle, topk_weights=weights[0] if weights else None, **how, stream=stream)
    _copy(backend, stream, *zip((back.x, back.topk_weights), results, strict=False))


def _copy_rows(stream: int | None, rows: View, num_kept: View, out: View) -> None:
    """Copy the rows that arrived, and set the other rows to zero, because sums over all rows (gradients of experts) include them."""
    assert rows.nbytes == out.nbytes
    if stream is not None:
        from ..jit.launch import launch_zero_padding

        launch_zero_padding(stream, rows.ptr, out.ptr, num_kept.ptr, out.shape[0], out.row_bytes)
    else:
        num_bytes = int(host_bytes(num_kept).view("int32")[0]) * out.row_bytes
        target = host_bytes(out)
        target[:num_bytes], target[num_bytes:] = host_bytes(rows)[:num_bytes], 0


def _copy(backend: Backend, stream: int | None, *pairs: tuple[View | None, View]) -> None:
    for source, out in pairs:
        assert source is not None
        assert source.nbytes == out.nbytes
        backend.copy(source.ptr, out, stream)
