"""Handles of the CUDA backend as arrays. Kernels keep the tables of a handle in one piece of GPU memory, so an export is one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...arrays.view import Framework, View
from ...cuda import driver
from ...kernels import structs
from ...kernels.layout import Layout
from ...results import DispatchHandle, LowLatencyHandle
from ..base import BufferInfo, Entries
from .expert_rows import RowsByExpert


@dataclass(frozen=True)
class _Tables:
    """Tables in memory of the caller. Calls use them like a slot of the Buffer."""

    ptr: int

    def add_stream(self, stream: int) -> None:
        """Do nothing: the caller's library tracks the streams of its memory."""


class CudaHandleTables:
    """See `base.HandleTables`."""

    def __init__(self, info: BufferInfo, layout: Layout) -> None:
        self._info = info
        self._map, self._low_latency_map = layout.handle, layout.low_latency_handle
        self.num_words, self.num_low_latency_words = self._map.num_bytes // 4, self._low_latency_map.num_bytes // 4
        self._expert_map = layout.expert_tables(info.config.num_max_recv_tokens)
        self.num_expert_words = self.num_words + self._expert_map.num_bytes // 4
        first = self._low_latency_map.offsets["num_recv_per_expert"] // 4
        self.low_latency_counts = slice(first, first + info.config.num_local_experts)

    def save(self, handle: DispatchHandle, out: View, stream: int | None) -> None:
        assert stream is not None
        num_bytes = self._map.num_bytes
        by_token = handle.routing if handle.layout == "token" else handle.routing.by_token.routing
        driver.copy_async(out.ptr, by_token.ptr, num_bytes, stream)
        if handle.layout == "expert":
            assert handle.routing.by_token.num_recv_rows == self._info.config.num_max_recv_tokens, (
                "the host has waited for counts"
            )
            driver.copy_async(out.ptr + num_bytes, handle.routing.tables["positions"], self._expert_map.num_bytes, stream)

    def load(self, words: View, num_tokens: int, num_recv_rows: int, layout: str = "token") -> DispatchHandle:
        config, serial, tables = self._info.config, self._info.serial, _Tables(words.ptr)
        if layout == "token":
            return DispatchHandle(num_tokens, num_recv_rows, None, serial, tables, {})
        by_token = DispatchHandle(num_tokens, config.num_max_recv_tokens, None, serial, tables, {})
        first = words.ptr + self._map.num_bytes
        routing = RowsByExpert(by_token, tables, {name: first + offset for name, offset in self._expert_map.offsets.items()})
        return DispatchHandle(num_tokens, num_recv_rows, None, serial, routing, {}, layout=layout)

    def load_low_latency(self, words: View, num_tokens: int, has_weights: bool, capacity: int) -> LowLatencyHandle:
        routing = _Tables(words.ptr), None  # no hook
        return LowLatencyHandle(num_tokens, self._info.serial, routing, has_weights, words.framework, capacity)

    def rows_between_ranks(self, handle: DispatchHandle, framework: Framework) -> View:
        num_ranks = self._info.config.num_ranks
        return self._view(handle.routing, self._map.offsets["num_rows"], (num_ranks, num_ranks), framework)

    def first_rows(self, handle: DispatchHandle, framework: Framework) -> View:
        return self._view(handle.routing, self._map.offsets["first_row"], (self._info.config.num_ranks,), framework)

    def entries(self, handle: LowLatencyHandle, framework: Framework) -> Entries:
        config, offsets = self._info.config, self._low_latency_map.offsets
        entry = structs.LlEntry.dtype(config.constants())
        source, token, row = (structs.offset(entry, name) // 4 for name in ("source", "token", "row"))
        slot, _ = handle.routing
        return Entries(
            words=self._view(slot, offsets["entries"], (config.worst_recv_tokens, entry.itemsize // 4), framework),
            num_entries=self._view(slot, offsets["num_entries"], (1,), framework),
            source=source,
            token=token,
            rows=slice(row, row + config.num_topk),
        )

    def _view(self, slot: Any, offset: int, shape: tuple[int, ...], framework: Framework) -> View:
        return View(slot.ptr + offset, shape, "int32", self._info.device, slot, framework)
