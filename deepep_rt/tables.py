"""A routing as plain numbers: what a `DispatchHandle` knows, in one int32 array of a fixed size.

Compiled programs (JAX) pass arrays around, no Python objects. With its routing in an array, a call depends on its arguments alone: it may
be repeated, in any order, and nothing has to be kept or dropped at the right time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import arrays, layout
from .arrays import HOST, View
from .config import Config
from .inputs import Site
from .results import DispatchHandle

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class _DeviceTables:
    """Stands for the backend's own memory of a handle, which has the same contents."""

    ptr: int


def num_words(config: Config, backend: str) -> int:
    """Length of the array."""
    if backend == "cuda":
        return layout.handle(config).num_bytes // 4
    return 1 + config.num_ranks * (3 + config.num_max_tokens_per_rank)


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
    routing, ranks = handle._routing, config.num_ranks
    words[0] = routing.serial
    per_rank = words[1 : 1 + 3 * ranks].reshape(3, ranks)
    per_rank[:] = routing.num_received, routing.first_row, [len(tokens) for tokens in routing.sent_tokens]
    sent = words[1 + 3 * ranks :].reshape(ranks, config.num_max_tokens_per_rank)
    for row, tokens in zip(sent, routing.sent_tokens, strict=True):
        row[: len(tokens)], row[len(tokens) :] = tokens, -1


def _load_host(config: Config, words: np.ndarray) -> object:
    from .host import Routing

    ranks = config.num_ranks
    num_received, first_row, num_sent = words[1 : 1 + 3 * ranks].reshape(3, ranks).copy()
    sent = words[1 + 3 * ranks :].reshape(ranks, config.num_max_tokens_per_rank)
    tokens = tuple(row[:count].copy() for row, count in zip(sent, num_sent, strict=True))
    return Routing(int(words[0]), tokens, num_received.astype("int64"), first_row.astype("int64"))
