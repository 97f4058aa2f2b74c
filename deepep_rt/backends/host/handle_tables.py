"""Handles of the host backend as arrays of a fixed size: see `base.HandleTables`."""

from __future__ import annotations

import numpy as np

from ...arrays.host_memory import Result
from ...arrays.view import Framework, View, host_bytes
from ...results import DispatchHandle, LowLatencyHandle
from ..base import BufferInfo, Entries
from .expert_rows import RowsByExpert
from .routing import ExpertRouting, Routing, new_expert_routing

_NUM_FIRST = 2  # the routing's serial number, and the generation
_NUM_PER_RANK = 4  # num_received, first_row, number of sent_tokens, num_chosen


class HostHandleTables:
    """See `base.HandleTables`.

    The array of a dispatch holds the routing's serial number, the generation of the dispatch, four numbers for each rank, and the tokens
    that go to rank 0, to rank 1, and so on.
    """

    def __init__(self, info: BufferInfo) -> None:
        self._info = info
        config = info.config
        rows, tokens, topk = config.worst_recv_tokens, config.num_max_tokens_per_rank, config.num_topk
        self.num_words = _NUM_FIRST + _NUM_PER_RANK * config.num_ranks + config.num_max_sent_rows
        most, experts = config.num_max_recv_tokens, config.num_local_experts
        self._expert_sizes = self.num_words, most * topk, experts + 1, experts, 1  # the rows by token, then a RowsByExpert
        self.num_expert_words = sum(self._expert_sizes)
        parts = {"counts": config.num_local_experts, "num_rows": 1, "rows": self.num_words, "recv_idx": rows * topk}
        parts |= {"topk_idx": tokens * topk, "weights": rows * topk, "own_weights": tokens * topk}
        self._parts = parts
        self.num_low_latency_words = sum(parts.values())
        self.low_latency_counts = slice(0, config.num_local_experts)

    def save(self, handle: DispatchHandle, out: View, stream: int | None) -> None:
        words = host_bytes(out).view("int32")
        if handle.layout == "token":
            self._save_routing(handle, words)
            return
        by_expert: RowsByExpert = handle.routing
        by_token, positions, *parts = np.split(words, np.cumsum(self._expert_sizes[:-1]))
        self._save_routing(by_expert.by_token, by_token)
        positions[:] = by_expert.positions.reshape(-1)
        for part, values in zip(parts, (by_expert.offsets, by_expert.ends, by_expert.num_recv), strict=True):
            part[:] = values

    def load(self, words: View, num_tokens: int, num_recv_rows: int, layout: str = "token") -> DispatchHandle:
        array = host_bytes(words).view("int32")
        if layout == "token":
            return self._load_handle(array, num_tokens, num_recv_rows)
        rows, positions, offsets, ends, num_recv = np.split(array, np.cumsum(self._expert_sizes[:-1]))
        by_token = self._load_handle(rows, num_tokens, self._info.config.num_max_recv_tokens)
        positions = positions.reshape(-1, self._info.config.num_topk)
        routing = RowsByExpert(by_token, positions, offsets, ends, int(num_recv[0]))
        return DispatchHandle(num_tokens, num_recv_rows, None, self._info.serial, routing, {}, layout=layout, born=by_token.born)

    def save_low_latency(self, handle: LowLatencyHandle, out: View) -> None:
        """Write the routing of a handle to `out`, `[num_low_latency_words]` int32."""
        routing, parts = handle.routing, self._split(host_bytes(out).view("int32"))
        self._save_routing(routing.rows, parts["rows"])
        parts["num_rows"][0] = routing.rows.num_recv_rows
        parts["counts"][:] = routing.counts
        recv_idx = parts["recv_idx"].reshape(-1, self._info.config.num_topk)
        recv_idx[...] = -1
        recv_idx[routing.row, routing.choice] = routing.expert
        given = {"topk_idx": routing.topk_idx}
        if handle.has_weights:
            given |= {"weights": routing.weights.view("int32"), "own_weights": routing.own_weights.view("int32")}
        for name, values in given.items():
            parts[name][: values.size] = values.ravel()

    def load_low_latency(self, words: View, num_tokens: int, has_weights: bool, capacity: int) -> LowLatencyHandle:
        parts, topk = self._split(host_bytes(words).view("int32")), self._info.config.num_topk
        num_rows = int(parts["num_rows"][0])
        rows = self._load_handle(parts["rows"], num_tokens, num_rows)

        def table(name: str, length: int) -> np.ndarray:
            return parts[name].reshape(-1, topk)[:length]

        weights = own_weights = None
        if has_weights:
            weights, own_weights = table("weights", num_rows).view("float32"), table("own_weights", num_tokens).view("float32")
        routing = new_expert_routing(
            rows,
            table("topk_idx", num_tokens).astype("int64"),
            table("recv_idx", num_rows),
            weights,
            own_weights,
            self._info.config.num_local_experts,
            capacity,
        )
        return LowLatencyHandle(num_tokens, self._info.serial, routing, has_weights, words.framework, capacity, born=rows.born)

    def rows_between_ranks(self, handle: DispatchHandle, framework: Framework) -> View:
        assert handle.routing.rows_between is not None, "several nodes, or a handle of an array: see first_rows"
        return Result.of(handle.routing.rows_between).view(framework)

    def first_rows(self, handle: DispatchHandle, framework: Framework) -> View:
        return Result.of(handle.routing.first_row).view(framework)

    def entries(self, handle: LowLatencyHandle, framework: Framework) -> Entries:
        routing: ExpertRouting = handle.routing
        origins = routing.rows.views["src_idx"]
        table = np.column_stack([host_bytes(origins).view("int32").reshape(-1, 2)[routing.row], routing.slot])
        return Entries(
            words=Result.of(table).view(framework),
            num_entries=Result.of(np.array([len(table)])).view(framework),
            source=0,
            token=1,
            rows=slice(2, 3),
        )

    def _save_routing(self, handle: DispatchHandle, words: np.ndarray) -> None:
        routing: Routing = handle.routing
        words[:_NUM_FIRST] = routing.serial, handle.born
        per_rank, sent = self._split_routing(words)
        counts = [len(tokens) for tokens in routing.sent_tokens]
        per_rank[:] = routing.num_received, routing.first_row, counts, routing.num_chosen
        sent[: sum(counts)], sent[sum(counts) :] = np.concatenate(routing.sent_tokens), -1

    def _load_handle(self, words: np.ndarray, num_tokens: int, num_recv_rows: int) -> DispatchHandle:
        per_rank, sent = self._split_routing(words)
        num_received, first_row, counts, num_chosen = per_rank.astype("int64")
        tokens = tuple(np.split(sent[: counts.sum()].copy(), np.cumsum(counts)[:-1]))
        routing = Routing(int(words[0]), tokens, num_received, first_row, num_chosen)
        return DispatchHandle(num_tokens, num_recv_rows, None, self._info.serial, routing, {}, born=int(words[1]))

    def _split_routing(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts after the first words: `[_NUM_PER_RANK, num_ranks]`, and the tokens for all ranks."""
        ranks = self._info.config.num_ranks
        per_rank, sent = np.split(words[_NUM_FIRST:], [_NUM_PER_RANK * ranks])
        return per_rank.reshape(_NUM_PER_RANK, ranks), sent

    def _split(self, words: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(self._parts.values())[:-1])
        return dict(zip(self._parts, np.split(words, ends), strict=True))
