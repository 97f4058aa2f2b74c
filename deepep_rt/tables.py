"""A routing as plain numbers: what a `DispatchHandle` knows, in one int32 array of a fixed size.

Compiled programs (JAX) pass arrays around, no Python objects. With its routing in an array, a call depends on its arguments alone: it may
be repeated, in any order, and nothing has to be kept or dropped at the right time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from . import arrays, layout
from .arrays import HOST, View
from .config import Config
from .inputs import Site
from .results import DispatchHandle


@dataclass(frozen=True)
class _DeviceTables:
    """Stands for the backend's own memory of a handle, which has the same contents."""

    ptr: int


def num_words(config: Config, backend: str) -> int:
    """Length of the array."""
    if backend == "cuda":
        return layout.handle(config).num_bytes // 4
    return 1 + config.num_ranks * (3 + config.num_ranks + config.num_max_tokens_per_rank)


def save(handle: DispatchHandle, config: Config, out: View, stream: int | None) -> None:
    """Write the routing of a handle to `out`, `[num_words]` int32; on GPUs in the order of the stream."""
    if stream is None:
        _save_host(handle, config, arrays.host_bytes(out).view("int32"))
    else:
        copy(handle._routing.ptr, out, stream)


def load(site: Site, view: View, num_tokens: int, num_recv_rows: int) -> DispatchHandle:
    """A handle over such an array, which has to outlive the calls that it is given to."""
    on_host = view.device == HOST
    routing = _load_host(site.config, arrays.host_bytes(view).view("int32")) if on_host else _DeviceTables(view.ptr)
    return DispatchHandle(num_tokens, num_recv_rows, None, site.serial, routing, {})


def copy(source: int, out: View, stream: int | None) -> None:
    """Fill `out` from memory of the same kind (host, or GPU in the order of the stream)."""
    if stream is None:
        ctypes.memmove(out.ptr, source, out.nbytes)
    else:
        from . import driver

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
    from .host import Routing

    per_rank, num_sent, sent = _parts(config, words)
    num_received, first_row, counts = per_rank.astype("int64")
    tokens = tuple(row[:count].copy() for row, count in zip(sent, counts, strict=True))
    return Routing(int(words[0]), tokens, num_received, first_row, num_sent.copy())


def _parts(config: Config, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What comes after the serial number: three numbers for each rank, `num_sent`, and the tokens that go to each rank."""
    ranks = config.num_ranks
    per_rank, num_sent, sent = np.split(words[1:], np.cumsum([3 * ranks, ranks * ranks]))
    return per_rank.reshape(3, ranks), num_sent.reshape(ranks, ranks), sent.reshape(ranks, config.num_max_tokens_per_rank)
