"""The low-latency calls of the host backend, made of its dispatch and combine.

Rows travel as in dispatch, once to each rank, and are then sorted by expert. On the way back, an expert's rank adds up its rows of a
token, and combine does the rest; or it sends every row separately. All rows travel in the call itself. A hook only writes the results.

No rows come from masked ranks: the message channel excludes these ranks, and so they are neither sent nor added up.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from ...arrays.host_memory import Result, fp8_rows, from_float32, rows_of, to_float32, values_of
from ...arrays.view import Framework, View, host_bytes
from ...errors import EPInputError
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle, Views
from ..base import BufferInfo, CombineInputs, DispatchInputs, LowLatencyCombineInputs, LowLatencyDispatchInputs, LowLatencyMemory
from ..hooks import Hooks, check_hook_called
from ..overflow import OverflowLog
from .handle_tables import HostHandleTables
from .routing import ExpertRouting, Routing, new_expert_routing
from .throughput import Throughput


class LowLatency:
    """Low-latency dispatch and combine."""

    def __init__(
        self, info: BufferInfo, throughput: Throughput, overflow: OverflowLog, hooks: Hooks, tables: HostHandleTables
    ) -> None:
        self._config, self._serial, self._overflow, self._hooks, self._tables = info.config, info.serial, overflow, hooks, tables
        self._throughput, self._channel, self._agreement = throughput, throughput.channel, throughput.agreement
        self._combine_memory: Result | None = None

    def combine_view(self, framework: Framework, capacity: int) -> View:
        """The memory of `Buffer.get_low_latency_combine_buffer`, as a View of this framework."""
        config = self._config
        if self._combine_memory is None:
            shape = (config.num_local_experts, config.worst_recv_tokens, config.hidden)
            self._combine_memory = Result(shape, "bfloat16", fill=0)
        whole = self._combine_memory.view(framework)
        return dataclasses.replace(whole, shape=(config.num_local_experts, capacity, config.hidden))

    def dispatch(self, inputs: LowLatencyDispatchInputs, with_hook: bool) -> LowLatencyDispatchResult:
        """Send tokens to their experts; with a hook, the results are written when it is called."""
        self._hooks.dispatch.check_can_start(with_hook)
        x, scales = inputs.x, inputs.x_scales
        if inputs.use_fp8:
            x, scales = fp8_rows(x, inputs.round_scale, inputs.use_ue8m0)
        capacity = self._config.num_ranks * inputs.num_max_tokens
        start = time.perf_counter_ns()
        with self._agreement.low_latency_call(inputs.signature(x.dtype, scales.dtype if scales else None)):
            sources = self._channel.peers
            rows, arrived = self._throughput.dispatch(
                DispatchInputs(x, inputs.topk_idx, inputs.topk_weights, scales, None, None, 1)
            )
        waited_ns = time.perf_counter_ns() - start

        recv_idx, weights = arrived["topk_idx"], arrived["topk_weights"]
        assert recv_idx is not None
        routing = new_expert_routing(
            rows,
            values_of(inputs.topk_idx).astype(np.int64),
            values_of(recv_idx),
            None if weights is None else values_of(weights),
            None if inputs.topk_weights is None else values_of(inputs.topk_weights).copy(),
            self._config.num_local_experts,
            capacity,
        )
        shape = (self._config.num_local_experts, capacity)
        results = {
            name: Result((*shape, view.shape[1]), view.dtype, fill=0)
            for name, view in (("x", x), ("scales", scales))
            if view is not None
        }
        num_recv = Result(shape[:1], "int32", fill=0)

        def receive() -> None:
            _sort_by_expert(results, arrived, routing)
            self._write_counts(num_recv, routing, inputs, capacity)
            if inputs.wait_stats is not None:
                # All rows come in one exchange, so each source is charged with the whole wait.
                host_bytes(inputs.wait_stats).view(np.int64)[sources] += waited_ns

        hook = self._hooks.dispatch.append(receive) if with_hook else None
        if hook is None:
            receive()
        framework = inputs.x.framework
        views: Views = {"scales": None, "num_recv_per_expert": num_recv.view(framework)}
        views.update({name: result.view(framework) for name, result in results.items()})
        kept = dataclasses.replace(routing, hook_state=hook.state if hook else None)
        handle = LowLatencyHandle(x.shape[0], self._serial, kept, weights is not None, framework, capacity)
        if inputs.into is not None:
            self._write_into(inputs.into, results, handle)
        return LowLatencyDispatchResult(handle=handle, event=Event(), hook=hook, make_views=lambda: views)

    def combine(self, inputs: LowLatencyCombineInputs, with_hook: bool) -> LowLatencyCombineResult:
        """Add up the experts' rows at the ranks of their tokens; with a hook, the result is written when it is called."""
        routing: ExpertRouting = inputs.handle.routing
        check_hook_called(routing.hook_state)
        excluded = self._find_excluded(inputs, routing)
        if routing.own_weights is not None and not np.array_equal(
            values_of(inputs.topk_weights), routing.own_weights, equal_nan=True
        ):
            raise EPInputError(
                "topk_weights differ from those of low_latency_dispatch; expected the same. Pass the same to both calls, or none to "
                "low_latency_dispatch"
            )
        self._hooks.combine.check_can_start(with_hook)
        if inputs.reduce_early:
            total = self._reduce_at_experts(inputs, routing, excluded)
        else:
            total = self._reduce_at_source(inputs, routing, excluded)
        out = inputs.out
        if out is None:
            out = Result((inputs.handle.num_tokens, self._config.hidden), "bfloat16", fill=0).view(inputs.y.framework)

        def receive() -> None:
            rows_of(out)[...] = total

        hook = self._hooks.combine.append(receive) if with_hook else None
        if hook is None:
            receive()
        return LowLatencyCombineResult(event=Event(), hook=hook, make_views=lambda: {"x": out})

    def _write_into(self, memory: LowLatencyMemory, results: dict[str, Result], handle: LowLatencyHandle) -> None:
        """Copy the results and the handle to the caller's memory."""
        for name, out in (("x", memory.recv_x), ("scales", memory.recv_scales)):
            if out is not None:
                rows_of(out)[...] = results[name].rows
        self._tables.save_low_latency(handle, memory.tables)

    def _write_counts(self, num_recv: Result, routing: ExpertRouting, inputs: LowLatencyDispatchInputs, capacity: int) -> None:
        """Count the rows of each expert, and warn if some were dropped."""
        counts = np.minimum(routing.counts, capacity).astype(np.int32)
        fullest = int(routing.counts.argmax())
        if routing.counts[fullest] > capacity:
            self._overflow.warn_of_expert(fullest, int(routing.counts[fullest]))
        num_recv.values[:, 0] = counts
        if inputs.recv_stats is not None:
            stats = host_bytes(inputs.recv_stats).view(np.int32)
            stats += counts

    def _find_excluded(self, inputs: LowLatencyCombineInputs, routing: ExpertRouting) -> np.ndarray:
        """Find the choices of the dispatch that `topk_idx` excludes from the sum with -1, `[num_tokens, num_topk]` bool.

        Raise EPInputError if `topk_idx` names other experts. Where experts' ranks add rows up, they send one row for all of a token's
        choices there, so it must exclude all of these choices or none.
        """
        given, dispatched = values_of(inputs.topk_idx), routing.topk_idx
        if given.shape != dispatched.shape:
            raise EPInputError(
                f"topk_idx.shape={given.shape}; expected {dispatched.shape}. Pass the topk_idx of low_latency_dispatch"
            )
        owner = np.where(dispatched >= 0, dispatched // self._config.num_local_experts, -1)
        excluded = (given == -1) & (dispatched >= 0)
        differs = (given != dispatched) & ~excluded
        if inputs.reduce_early:
            for rank in set(owner[excluded].tolist()) - set(self._channel.masked):  # no rows come from masked ranks
                is_owner = owner == rank
                differs |= excluded & is_owner & (is_owner & ~excluded).any(axis=1, keepdims=True)
        if differs.any():
            token, choice = np.argwhere(differs)[0]
            raise EPInputError(
                f"topk_idx[{token}, {choice}]={given[token, choice]}; expected {dispatched[token, choice]}, as in low_latency_dispatch, or "
                f"-1 for all of the token's experts on that rank. Pass the same topk_idx to both calls"
            )
        return excluded

    def _reduce_at_experts(self, inputs: LowLatencyCombineInputs, routing: ExpertRouting, excluded: np.ndarray) -> np.ndarray:
        """Add up the local rows of each token, and send the sum as bfloat16. The rank of the token adds up the sums."""
        with self._agreement.low_latency_call(inputs.signature):
            weights = routing.weights
            if weights is None:
                _, arrived = self._throughput.dispatch(
                    DispatchInputs(inputs.topk_weights, None, None, None, routing.rows, None, 1)
                )
                assert arrived["x"] is not None
                weights = values_of(arrived["x"])
            sums = Result((routing.rows.num_recv_rows, self._config.hidden), "bfloat16")
            kept = routing.is_kept
            rows = _expert_rows(inputs)[routing.slot[kept]]
            _weighted_sum(rows, routing.row[kept], routing.choice[kept], weights, sums.rows)
            excluded_ranks = np.zeros((len(excluded), self._config.num_ranks), bool)
            token, choice = np.nonzero(excluded)
            excluded_ranks[token, routing.topk_idx[token, choice] // self._config.num_local_experts] = True
            sums_view = sums.view(inputs.y.framework)
            total = self._throughput.combine(
                CombineInputs(sums_view, routing.rows, None, (), compress=inputs.compress), excluded_ranks
            )["x"]
            assert total is not None
            return rows_of(total)

    def _reduce_at_source(self, inputs: LowLatencyCombineInputs, routing: ExpertRouting, excluded: np.ndarray) -> np.ndarray:
        """Send the row of each choice. The rank of the token adds them up."""
        token, choice = np.nonzero(routing.topk_idx >= 0)
        owner = routing.topk_idx[token, choice] // self._config.num_local_experts
        by_owner = [np.flatnonzero(owner == rank) for rank in range(self._config.num_ranks)]
        parts, lost = self._exchange_choices(inputs, routing, [len(entries) for entries in by_owner])

        rows = np.empty((len(token), parts[0].shape[1]), np.uint8)
        has_arrived = np.zeros(len(token), bool)
        for rank, (entries, part) in enumerate(zip(by_owner, parts, strict=True)):
            if rank not in lost and len(part) == len(entries):
                rows[entries] = part
                has_arrived[entries] = True
        has_arrived &= ~excluded[token, choice]
        total = np.empty((inputs.handle.num_tokens, rows.shape[1]), np.uint8)
        weights = values_of(inputs.topk_weights)
        _weighted_sum(rows[has_arrived], token[has_arrived], choice[has_arrived], weights, total)
        return total

    def _exchange_choices(
        self, inputs: LowLatencyCombineInputs, routing: ExpertRouting, num_expected: list[int]
    ) -> tuple[list[np.ndarray], set[int]]:
        """Send the row of each choice to the rank of its token.

        Return the rows from each rank, none where the two ranks disagree on them, and the ranks whose rows did not arrive.
        """
        tokens: Routing = routing.rows.routing
        y = _expert_rows(inputs)
        ends = np.searchsorted(routing.row, [tokens.first_row, tokens.first_row + tokens.num_received])
        slots = [routing.slot[first:end] for first, end in ends.T]  # entries lie in the order of their source ranks
        num_sent = [len(part) for part in slots]
        with self._agreement.low_latency_call(inputs.signature), self._channel.call():
            headers = self._agreement.new_headers(inputs.signature, tokens.serial)
            headers.report_size(num_sent, y.shape[1])
            send_mask, recv_mask = self._agreement.exchange_row_counts(headers, "kPhaseLlCombineRoom", num_sent, num_expected)
            zero = np.zeros((1, y.shape[1]), np.uint8)  # stands for a row that was dropped, and so was not computed
            slots = [part if sends else part[:0] for part, sends in zip(slots, send_mask, strict=True)]
            outgoing = [np.where(part[:, None] < 0, zero, y[part]) for part in slots]
            incoming = [
                np.empty((count if arrives else 0, y.shape[1]), np.uint8)
                for count, arrives in zip(num_expected, recv_mask, strict=True)
            ]
            incoming[self._channel.rank] = outgoing[self._channel.rank]
            lost = self._channel.exchange_rows(
                [[part] for part in outgoing], [[part] for part in incoming], "kPhaseLlCombineRows"
            )
        if self._channel.statistics is not None:
            num_received = sum(len(part) for rank, part in enumerate(incoming) if rank not in lost)
            self._channel.statistics.add_rows(sum(map(len, outgoing)), num_received, y.shape[1])
        return incoming, lost


def _expert_rows(inputs: LowLatencyCombineInputs) -> np.ndarray:
    """`y` as `[experts * capacity, row_bytes]` uint8."""
    return host_bytes(inputs.y).reshape(inputs.y.shape[0] * inputs.y.shape[1], -1)


def _sort_by_expert(results: dict[str, Result], arrived: Views, routing: ExpertRouting) -> None:
    """Copy the rows that arrived to the slots of their experts."""
    kept = routing.is_kept
    for name, result in results.items():
        view = arrived[name]
        assert view is not None
        rows = result.rows.reshape(result.shape[0] * result.shape[1], view.row_bytes)
        rows[routing.slot[kept]] = rows_of(view)[routing.row[kept]]


def _weighted_sum(rows: np.ndarray, target: np.ndarray, choice: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """Add bfloat16 `rows[i]` times `weights[target[i], choice[i]]` to `out[target[i]]`, in the order of choices, in float32.

    Products and sums are rounded separately, and the result to bfloat16. Targets without rows become zero.
    """
    total = np.zeros((out.shape[0], out.shape[1] // 2), np.float32)
    with np.errstate(all="ignore"):  # an inf - inf stands in the caller's numbers
        for k in range(weights.shape[1]):
            entries = np.flatnonzero(choice == k)
            targets = target[entries]  # each at most once
            total[targets] += weights[targets, k][:, None] * to_float32(rows[entries], "bfloat16")
        from_float32(total, "bfloat16", out)
