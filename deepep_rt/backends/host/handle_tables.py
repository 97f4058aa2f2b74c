"""A routing as plain numbers: what a `DispatchHandle` or a `LowLatencyHandle` knows, in one int32 array of a fixed size.

Compiled programs (JAX) pass arrays around, no Python objects. With its routing in an array, a call depends on its arguments alone: it may
be repeated, in any order, and nothing has to be kept or dropped at the right time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from ...arrays import view as arrays
from ...arrays.view import HOST, View
from ...config import Config
from ...kernels import layout
from ...results import DispatchHandle, LowLatencyHandle
from ..calls import BufferInfo


@dataclass(frozen=True)
class _DeviceTables:
    """Stands for the backend's own memory of a handle, which has the same contents."""

    ptr: int


def num_words(config: Config, backend: str) -> int:
    """Length of the array of a dispatch."""
    if backend == "cuda":
        return layout.handle(config).num_bytes // 4
    return 1 + config.num_ranks * (3 + config.num_ranks + config.num_max_tokens_per_rank)


def save(handle: DispatchHandle, config: Config, out: View, stream: int | None) -> None:
    """Write the routing of a handle to `out`, `[num_words]` int32; on GPUs in the order of the stream."""
    if stream is None:
        _save_host(handle, config, arrays.host_bytes(out).view("int32"))
    else:
        copy(handle._routing.ptr, out, stream)


def load(info: BufferInfo, view: View, num_tokens: int, num_recv_rows: int) -> DispatchHandle:
    """A handle over such an array, which has to outlive the calls that it is given to."""
    on_host = view.device == HOST
    routing = _load_host(info.config, arrays.host_bytes(view).view("int32")) if on_host else _DeviceTables(view.ptr)
    return DispatchHandle(num_tokens, num_recv_rows, None, info.serial, routing, {})


def num_low_latency_words(config: Config, backend: str) -> int:
    """Length of the array of a low-latency dispatch."""
    if backend == "cuda":
        return layout.low_latency_handle(config).num_bytes // 4
    return sum(_low_latency_sizes(config).values())


def low_latency_counts(config: Config, backend: str) -> slice:
    """Where in that array the numbers of rows of the local experts are."""
    start = layout.low_latency_handle(config).offsets["num_recv_per_expert"] // 4 if backend == "cuda" else 0
    return slice(start, start + config.num_local_experts)


def save_low_latency(handle: LowLatencyHandle, config: Config, out: View) -> None:
    """Write the routing of a handle of the host backend to `out`, `[num_low_latency_words]` int32. (On GPUs the call has done that.)"""
    routing, parts = handle._routing, _low_latency_parts(config, arrays.host_bytes(out).view("int32"))
    _save_host(routing.rows, config, parts["rows"])
    parts["num_rows"][0] = routing.rows.num_recv_rows
    parts["counts"][:] = routing.counts
    recv_idx = parts["recv_idx"].reshape(-1, config.num_topk)
    recv_idx[...] = -1
    recv_idx[routing.row, routing.choice] = routing.expert
    given = {"topk_idx": routing.topk_idx}
    if handle._has_weights:
        given |= {"weights": routing.weights.view("int32"), "own_weights": routing.own_weights.view("int32")}
    for name, values in given.items():
        parts[name][: values.size] = values.ravel()


def load_low_latency(info: BufferInfo, view: View, num_tokens: int, has_weights: bool) -> LowLatencyHandle:
    """A handle over such an array, which has to outlive the call that it is given to."""
    routing: object = (_DeviceTables(view.ptr), None)  # no hook
    if view.device == HOST:
        routing = _load_low_latency_host(info, arrays.host_bytes(view).view("int32"), num_tokens, has_weights)
    return LowLatencyHandle(num_tokens, info.serial, routing, has_weights, view.framework)


def copy(source: int, out: View, stream: int | None) -> None:
    """Fill `out` from memory of the same kind (host, or GPU in the order of the stream)."""
    if stream is None:
        ctypes.memmove(out.ptr, source, out.nbytes)
    else:
        from ...cuda import driver

        driver.copy_async(out.ptr, source, out.nbytes, stream)


def _save_host(handle: DispatchHandle, config: Config, words: np.ndarray) -> None:
    routing = handle._routing
    words[0] = routing.serial
    per_rank, num_sent, sent = _parts(config, words)
    per_rank[:] = routing.num_received, routing.first_row, [len(tokens) for tokens in routing.sent_tokens]
    num_sent[:] = routing.num_sent
    for row, tokens in zip(sent, routing.sent_tokens, strict=True):
        row[: len(tokens)], row[len(tokens) :] = tokens, -1


def _load_host(config: Config, words: np.ndarray) -> object:
    from .backend import Routing

    per_rank, num_sent, sent = _parts(config, words)
    num_received, first_row, counts = per_rank.astype("int64")
    tokens = tuple(row[:count].copy() for row, count in zip(sent, counts, strict=True))
    return Routing(int(words[0]), tokens, num_received, first_row, num_sent.copy())


def _parts(config: Config, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What comes after the serial number: three numbers for each rank, `num_sent`, and the tokens that go to each rank."""
    ranks = config.num_ranks
    per_rank, num_sent, sent = np.split(words[1:], np.cumsum([3 * ranks, ranks * ranks]))
    return per_rank.reshape(3, ranks), num_sent.reshape(ranks, ranks), sent.reshape(ranks, config.num_max_tokens_per_rank)


def _low_latency_sizes(config: Config) -> dict[str, int]:
    """Parts of the host backend's array, in order."""
    rows, tokens, topk = config.num_max_recv_tokens, config.num_max_tokens_per_rank, config.num_topk
    sizes = {"counts": config.num_local_experts, "num_rows": 1, "rows": num_words(config, "host")}
    return sizes | {"recv_idx": rows * topk, "topk_idx": tokens * topk, "weights": rows * topk, "own_weights": tokens * topk}


def _low_latency_parts(config: Config, words: np.ndarray) -> dict[str, np.ndarray]:
    sizes = _low_latency_sizes(config)
    return dict(zip(sizes, np.split(words, np.cumsum(list(sizes.values())[:-1])), strict=True))


def _load_low_latency_host(info: BufferInfo, words: np.ndarray, num_tokens: int, has_weights: bool) -> object:
    from .low_latency import ExpertRouting

    config, parts = info.config, _low_latency_parts(info.config, words)
    num_rows = int(parts["num_rows"][0])
    rows = DispatchHandle(num_tokens, num_rows, None, info.serial, _load_host(config, parts["rows"]), {})

    def table(name: str, length: int) -> np.ndarray:
        return parts[name].reshape(-1, config.num_topk)[:length]

    topk_idx, recv_idx = table("topk_idx", num_tokens).astype("int64"), table("recv_idx", num_rows)
    weights = own_weights = None
    if has_weights:
        weights, own_weights = table("weights", num_rows).view("float32"), table("own_weights", num_tokens).view("float32")
    return ExpertRouting.of(rows, topk_idx, recv_idx, weights, own_weights, config)
