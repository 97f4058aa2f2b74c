"""Dispatch and combine of the host backend: the ranks agree on a call, and then rows travel straight into the results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...arrays.compressed_rows import compress, expand
from ...arrays.host_memory import Result, from_float32, rows_of, to_float32, values_of
from ...results import DispatchHandle, Views
from ..base import BufferInfo, CombineInputs, DispatchInputs
from ..overflow import OverflowLog, too_many_rows
from .headers import CallAgreement
from .messages import MessageChannel
from .routing import Routing, choices_by_expert, new_routing, tokens_by_rank


class Throughput:
    """Dispatch and combine by messages between processes."""

    def __init__(self, info: BufferInfo, channel: MessageChannel, agreement: CallAgreement, overflow: OverflowLog) -> None:
        self._config, self._serial, self._rank, self._overflow = info.config, info.serial, channel.rank, overflow
        self.channel, self.agreement, self.statistics = channel, agreement, channel.statistics

    def dispatch(self, inputs: DispatchInputs) -> tuple[DispatchHandle, Views]:
        """Send rows to the ranks of their experts; returns the handle, and what arrived."""
        with self.channel.call():
            if inputs.handle is None:
                handle = self._new_handle(inputs)
                return handle, self._send_rows(handle, handle.routing, inputs)
            return inputs.handle, self._send_rows(inputs.handle, self._agree_on_handle(inputs, inputs.handle), inputs)

    def combine(self, inputs: CombineInputs, excluded: np.ndarray | None = None) -> Views:
        """Send rows to the ranks of their tokens, which add them up: see `_add_up`.

        `excluded`, `[num_tokens, num_ranks]` bool, are rows that arrive and are not added.
        """
        given = [rows_of(view) for view in (inputs.x, inputs.topk_weights) if view is not None]
        if inputs.compress and self._compresses_rows:
            given[0] = compress(to_float32(given[0], inputs.x.dtype), inputs.compress)
        routing, parts, lost = self.return_rows(inputs, given)
        if self.statistics is not None:
            num_received = sum(len(tokens) for peer, tokens in enumerate(routing.sent_tokens) if peer not in lost)
            self.statistics.add_rows(int(routing.num_received.sum()), num_received, given[0].shape[1])
        return self._add_up(inputs, routing, parts, lost, excluded)

    def return_rows(self, inputs: CombineInputs, given: list[np.ndarray]) -> tuple[Routing, list[list[np.ndarray]], set[int]]:
        """Send rows to the ranks of their tokens. `inputs` has a handle of rows by token, and `given` arrays of bytes with a row for each
        of them.

        Return the routing that both ranks of each pair know, the arrays from each rank, and the lost ranks.
        """
        with self.channel.call():
            routing: Routing = inputs.handle.routing
            headers = self.agreement.new_headers(inputs.signature, routing.serial)
            headers.report_size(routing.num_received, max(part.shape[1] for part in given))
            sizes = [len(tokens) for tokens in routing.sent_tokens]
            send_mask, recv_mask = self.agreement.exchange_row_counts(headers, "kPhaseCombineWindow", routing.num_received, sizes)
            routing = routing.restricted(recv_mask, send_mask)  # rows go back to the sources of the dispatch
            parts, lost = self._exchange_sums(given, routing)
            return routing, parts, lost

    def _new_handle(self, inputs: DispatchInputs) -> DispatchHandle:
        """Agree on a dispatch, and work out its routing."""
        config, rank, framework = self._config, self._rank, inputs.x.framework
        assert inputs.topk_idx is not None  # or there would be a handle
        idx, num_worst_tokens = self.channel.choices_of_members(values_of(inputs.topk_idx)), inputs.num_worst_tokens
        tokens = tokens_by_rank(idx, config)
        sizes = [len(t) for t in tokens]
        headers = self.agreement.new_headers(inputs.signature, 0)
        headers.num_worst_tokens[:] = -1 if num_worst_tokens is None else num_worst_tokens
        headers.num_rows[:] = sizes
        headers.num_choices[:] = choices_by_expert(idx, config)
        headers.report_size(sizes, inputs.x.row_bytes)
        headers.report_bad_expert(inputs.topk_idx, config.num_experts)
        received = self.agreement.exchange(headers, "kPhaseRoute")

        num_sent = received.num_rows
        self._check_room(num_sent.sum(0), received.num_worst_tokens)
        routing = new_routing(
            self.agreement.next_serial(),
            rank,
            tokens,
            num_sent,
            received.num_worst_tokens,
            keeps_rows_between=not config.has_network,
        )
        num_per_expert = received.num_choices.sum(0)
        if self.statistics is not None:
            most = self._config.worst_recv_tokens if self.agreement.is_low_latency else None
            self.statistics.add_choices(num_per_expert if most is None else np.minimum(num_per_expert, most))
        num_per_expert = -(-num_per_expert // inputs.expert_alignment) * inputs.expert_alignment
        num_recv = int(num_sent[:, rank].sum())
        num_recv_rows = num_recv if num_worst_tokens is None else num_worst_tokens
        if num_recv > num_recv_rows:
            self._overflow.warn_of_rows(num_recv, num_recv_rows)
        views = {
            "num_recv": Result.of(np.array([num_recv])).view(framework),
            "num_recv_per_expert": Result.of(num_per_expert).view(framework),
            "src_idx": Result((num_recv_rows, 2), "int32", fill=255).view(framework),  # filled when the rows arrive
        }
        counts = num_per_expert.tolist() if num_worst_tokens is None else None
        return DispatchHandle(inputs.x.shape[0], num_recv_rows, counts, self._serial, routing, views)

    def _check_room(self, num_recv: np.ndarray, num_worst_tokens: np.ndarray) -> None:
        """Raise on all ranks if a rank receives more rows than the Buffer has room for.

        On one node every row has room. Low-latency calls have room of their own.
        """
        fullest, most = int(np.where(num_worst_tokens < 0, num_recv, 0).argmax()), self._config.num_max_recv_tokens
        if num_worst_tokens[fullest] < 0 and num_recv[fullest] > most and not self.agreement.is_low_latency:
            raise too_many_rows(fullest, int(num_recv[fullest]), most)

    def _agree_on_handle(self, inputs: DispatchInputs, handle: DispatchHandle) -> Routing:
        """Agree on a dispatch along the routing of a handle; returns its part that both ranks of each pair know."""
        routing: Routing = handle.routing
        sizes = [len(tokens) for tokens in routing.sent_tokens]
        headers = self.agreement.new_headers(inputs.signature, routing.serial)
        headers.report_size(sizes, inputs.x.row_bytes)
        if inputs.topk_idx is not None:
            headers.report_bad_expert(inputs.topk_idx, self._config.num_experts)
            if not headers.has_problem and not routing.is_chosen_by(
                self.channel.choices_of_members(values_of(inputs.topk_idx)), self._config
            ):
                headers.report_other_ranks()
        masks = self.agreement.exchange_row_counts(headers, "kPhaseDispatchWindow", sizes, routing.num_received)
        return routing.restricted(*masks)

    def _send_rows(self, handle: DispatchHandle, routing: Routing, inputs: DispatchInputs) -> Views:
        """Send rows, their scales, expert numbers and weights along a routing that all ranks agree on."""
        framework, num_recv_rows = inputs.x.framework, handle.num_recv_rows
        optional = {"x": inputs.x, "scales": inputs.scales, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
        given = {name: view for name, view in optional.items() if view is not None}
        sources = [rows_of(view) for view in given.values()]
        results = {name: Result((num_recv_rows, *view.shape[1:]), view.dtype) for name, view in given.items()}
        outgoing = [[np.take(rows, tokens, axis=0) for rows in sources] for tokens in routing.sent_tokens]
        incoming: list[list[np.ndarray]] = [
            [result.rows[first : first + count] for result in results.values()] for first, count in routing.row_ranges
        ]
        num_rows = routing.num_rows
        if inputs.handle is None:
            lost = self._exchange_with_tokens(handle, routing, outgoing, incoming)
        else:
            lost = self._exchange(outgoing, incoming)
        if self.statistics is not None:
            num_received = sum(count for peer, (_, count) in enumerate(routing.row_ranges) if peer not in lost)
            row_bytes = inputs.x.row_bytes + (inputs.scales.row_bytes if inputs.scales else 0)
            self.statistics.add_dispatched_rows(sum(map(len, routing.sent_tokens)), num_received, row_bytes)

        for result in results.values():
            result.rows[num_rows:] = 0
        self._blank_other_experts(results, num_rows)
        views: Views = dict.fromkeys(optional)
        views.update({name: result.view(framework) for name, result in results.items()})
        for name, view in handle.views.items():  # copies, because the caller may write to results
            views[name] = Result.of(values_of(view).reshape(view.shape)).view(framework)
        return views

    def _exchange_with_tokens(
        self, handle: DispatchHandle, routing: Routing, outgoing: list[list[np.ndarray]], incoming: list[list[np.ndarray]]
    ) -> set[int]:
        """Exchange rows along a new routing, and write into its handle which tokens they are; returns the lost ranks."""
        src_idx = values_of(handle.views["src_idx"])
        ranges = routing.row_ranges
        arrived = [np.empty((count, 1), np.int32) for _, count in ranges]
        for peer, tokens in enumerate(routing.sent_tokens):
            outgoing[peer].append(tokens)
            incoming[peer].append(arrived[peer])
        lost = self._exchange(outgoing, incoming)
        routing.num_received[list(lost)] = 0  # the routing is new, so no other call has used it
        for peer, (first, count) in enumerate(ranges):
            if peer not in lost:
                src_idx[first : first + count, 0] = peer
                src_idx[first : first + count, 1:] = arrived[peer]
        return lost

    def _exchange(self, outgoing: list[list[np.ndarray]], incoming: list[list[np.ndarray]]) -> set[int]:
        """Exchange the arrays of each rank, this one included; returns the ranks whose arrays did not arrive."""
        for source, target in zip(outgoing[self._rank], incoming[self._rank], strict=True):
            target.reshape(-1)[:] = source.reshape(-1)
        return self.channel.exchange_rows(outgoing, incoming, self.agreement.phase("kPhaseDispatchRows"))

    def _blank_other_experts(self, results: dict[str, Result], num_rows: int) -> None:
        """Turn expert numbers into local ones, and blank the entries of other ranks and of padding."""
        if "topk_idx" not in results:
            return
        idx = results["topk_idx"].values
        num_local = self._config.num_local_experts
        idx -= self._rank * num_local
        is_other = (idx < 0) | (idx >= num_local)
        is_other[num_rows:] = True
        idx[is_other] = -1
        if "topk_weights" in results:
            results["topk_weights"].values[is_other] = 0

    def _exchange_sums(self, given: list[np.ndarray], routing: Routing) -> tuple[list[list[np.ndarray]], set[int]]:
        """Exchange the rows of a combine; returns the arrays of each rank, and the lost ranks."""
        outgoing = [[part[first : first + count] for part in given] for first, count in routing.row_ranges]
        incoming = [[np.empty((len(tokens), part.shape[1]), np.uint8) for part in given] for tokens in routing.sent_tokens]
        incoming[self._rank] = outgoing[self._rank]
        return incoming, self.channel.exchange_rows(outgoing, incoming, self.agreement.phase("kPhaseCombineRows"))

    def _add_up(
        self,
        inputs: CombineInputs,
        routing: Routing,
        parts: list[list[np.ndarray]],
        lost: set[int],
        excluded: np.ndarray | None,
    ) -> Views:
        """Add up the rows of each node in rank order and the sums of nodes in node order, which gives the same bits every time.

        A sum of another node crosses the network as a row, so it is rounded to the rows' type, and compressed on request. On the direct
        path, compressed rows cross instead. Low-latency calls send every row across, and add up all rows in rank order.
        """
        num_tokens, dtype, framework = inputs.handle.num_tokens, inputs.x.dtype, inputs.x.framework
        ranks = self._config.num_ranks
        node_size = ranks if self.agreement.is_low_latency else self._config.node_size
        total = np.zeros((num_tokens, self._config.hidden), np.float32)
        weights = None if inputs.topk_weights is None else Result((num_tokens, self._config.num_topk), "float32", fill=0)
        with np.errstate(all="ignore"):  # an inf - inf stands in the caller's numbers
            for first in range(0, ranks, node_size):
                node = [peer for peer in range(first, first + node_size) if peer not in lost]
                tokens = [routing.sent_tokens[peer] for peer in node]
                rows = [self._as_floats(parts[peer][0], inputs) for peer in node]
                if excluded is not None:
                    rows = [part[~excluded[sent, peer]] for peer, sent, part in zip(node, tokens, rows, strict=True)]
                    tokens = [sent[~excluded[sent, peer]] for peer, sent in zip(node, tokens, strict=True)]
                if first <= self._rank < first + node_size:
                    _add_node(total, tokens, rows)
                else:
                    _add_node(total, tokens, *self._between_nodes(rows, inputs))
                if weights is not None:
                    values = [parts[peer][1].view(np.float32) for peer in node]
                    _add_node(weights.values, [routing.sent_tokens[peer] for peer in node], values)
            for bias in inputs.biases:
                total += to_float32(rows_of(bias), dtype)
            out = Result(total.shape, dtype)
            from_float32(total, dtype, out.rows)
        return {"x": out.view(framework), "topk_weights": None if weights is None else weights.view(framework)}

    @property
    def _compresses_rows(self) -> bool:
        """Whether `compress` changes each row. Otherwise it changes what crosses from node to node."""
        return self.agreement.is_low_latency or not self._config.has_network

    def _as_floats(self, rows: np.ndarray, inputs: CombineInputs) -> np.ndarray:
        """Convert the bytes of rows that arrived to float32."""
        if inputs.compress and self._compresses_rows:
            return expand(rows, inputs.x.shape[1], inputs.compress)
        return to_float32(rows, inputs.x.dtype)

    def _between_nodes(
        self, rows: list[np.ndarray], inputs: CombineInputs
    ) -> tuple[list[np.ndarray], Callable[[np.ndarray], np.ndarray] | None]:
        """Return the rows of another node as they are added up, and what happens to their sum on its way."""
        hidden, dtype, form = self._config.hidden, inputs.x.dtype, inputs.compress

        def crossed(values: np.ndarray) -> np.ndarray:
            return expand(compress(values, form), hidden, form) if form else values

        def rounded(sums: np.ndarray) -> np.ndarray:
            made = Result(sums.shape, dtype)
            from_float32(sums, dtype, made.rows)
            return to_float32(made.rows, dtype)

        if form and self._config.path == "direct":
            return [crossed(part) for part in rows], None
        return rows, lambda sums: crossed(rounded(sums))


def _add_node(
    total: np.ndarray,
    tokens: list[np.ndarray],
    rows: list[np.ndarray],
    crossed: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Add up the rows of a node's ranks in rank order, and add the sums to `total[tokens]`, `[num_tokens, n]` float32.

    `tokens` and `rows`, `[rows, n]` float32, have an item for each rank of the node. `crossed` returns sums as they arrive from the node.
    """
    sums, is_summed = np.zeros_like(total), np.zeros(len(total), bool)
    for sent, part in zip(tokens, rows, strict=True):
        sums[sent] += part
        is_summed[sent] = True
    total[is_summed] += sums[is_summed] if crossed is None else crossed(sums[is_summed])
