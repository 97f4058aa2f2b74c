"""Replay a CUDA graph of both modes with new data."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..buffer import info_of
from ..errors import EPInputError
from .arrays import row_keys
from .expected import ExpertRouting, Routing, summed, weighted
from .plan import RoundPlan
from .session import Session


def run_round(session: Session, plan: RoundPlan) -> None:
    """Replay the graph of this Buffer. The first round with a graph captures it."""
    if session.graph is None:
        session.graph = Graph(session)
    session.graph.replay(plan)


class Graph:
    """A graph with dispatch and combine of both modes, and its input arrays."""

    def __init__(self, session: Session) -> None:
        self.session, self.arrays = session, session.arrays
        shape, xp = session.plan.shape, session.arrays.xp
        self.hidden, self.topk = shape.hidden, shape.topk
        self.worst = session.buffer.config.num_max_recv_tokens
        self.capacity = shape.tokens * session.options.num_ranks  # of an expert in low-latency calls
        raw = xp.zeros((shape.tokens, shape.hidden), np.uint16)
        self.x = self.arrays.typed(raw, "bfloat16", raw.shape)
        self.idx = xp.full((shape.tokens, shape.topk), -1, np.int64)
        self.weights = xp.zeros((shape.tokens, shape.topk), np.float32)
        session.activity = "the capture of a graph"
        session.check_kept()  # a capture cannot allocate, so the pool needs free space
        session.settle()
        self.warm_up()
        session.align()
        stream = xp.cuda.get_current_stream()
        stream.begin_capture()
        self.results = self._calls()
        self.graph = stream.end_capture()

    def warm_up(self) -> None:
        """Make the calls of the graph, which allocates the memory of their results. Collective."""
        self._calls()
        self.session.buffer.synchronize()

    def _calls(self) -> tuple[Any, Any, Any, Any]:
        buffer = self.session.buffer
        sent = buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, use_fp8=False)
        decoded = buffer.low_latency_combine(sent.recv_x, self.idx, self.weights, sent.handle)
        routed = buffer.dispatch(self.x, self.idx, self.weights, num_worst_tokens=self.worst)
        return sent, decoded, routed, buffer.combine(routed.recv_x, routed.handle)

    def replay(self, plan: RoundPlan) -> None:
        """Write new inputs, overwrite the outputs, replay and check."""
        session, arrays = self.session, self.arrays
        choices = session.choices(plan)
        routing = Routing(choices, session.rank, session.plan.num_experts, (self.worst,) * len(choices))
        x_key, weights_key = (session.key(plan, 0, what) for what in ("x", "weights"))
        mine, tokens = np.full(len(routing.mine), session.rank), np.arange(len(routing.mine))
        arrays.write(self.x, arrays.numbers(row_keys(x_key, mine, tokens), self.hidden, "bfloat16"))
        arrays.write(self.idx, arrays.put(session.own_choices(plan)))
        arrays.write(self.weights, arrays.numbers(row_keys(weights_key, mine, tokens), self.topk, "float32"))
        sent, decoded, routed, summed_up = self.results
        for output in (sent.recv_x, decoded.x, routed.recv_x, routed.recv_topk_idx, summed_up.x):
            arrays.poison(output)
        session.activity = "the replay of a graph"
        self.graph.launch()
        self._check(plan, routing, x_key)

    def _check(self, plan: RoundPlan, routing: Routing, x_key: int) -> None:
        session, arrays, hidden = self.session, self.arrays, self.hidden
        sent, decoded, routed, summed_up = self.results
        tokens = np.arange(len(routing.mine))

        def sent_rows(keys: np.ndarray) -> Any:
            return arrays.numbers(keys, hidden, "bfloat16")

        def own_rows(at: np.ndarray) -> Any:
            return sent_rows(row_keys(x_key, np.full(len(at), session.rank), at))

        def compare(call: str, name: str, got: Any, keys: np.ndarray, make: Any) -> None:
            shape = tuple(got.shape)
            session.check.rows(plan.number, f"replayed {call}", name, got, shape, "bfloat16", keys, make)

        experts = ExpertRouting(routing.choices, session.rank, session.plan.num_experts, self.capacity)
        entries, call = experts.entries, "replayed low_latency_dispatch"
        flat = arrays.rows(sent.recv_x, 2).reshape(experts.local * self.capacity, -1)
        keys, at = row_keys(x_key, entries.source, entries.token), entries.expert * self.capacity + entries.row
        session.check.raw_rows(plan.number, call, "recv_x", flat, keys, sent_rows, at=at)
        compare("dispatch", "recv_x", routed.recv_x, row_keys(x_key, *routing.kept), sent_rows)
        session.check.array(plan.number, "replayed dispatch", "recv_topk_idx", routed.recv_topk_idx, routing.local_choices)
        # Experts return their input, so a row of the sum is the sum of copies of the token's row.
        expert_ranks, ranks = np.where(experts.fits, routing.mine // routing.local, -1), routing.num_ranks
        own = own_rows(tokens)
        wanted = weighted(arrays, expert_ranks, hidden, self.weights, lambda choice: own, num_ranks=ranks, reduce_early=True)
        compare("low_latency_combine", "x", decoded.x, tokens, lambda part: wanted[part[0] : part[-1] + 1])
        total = summed(arrays, routing, session.buffer.config.node_size, hidden, "bfloat16", lambda peer, at: own_rows(at))
        compare("combine", "x", summed_up.x, tokens, lambda part: total[part[0] : part[-1] + 1])


class OldRouting:
    """A graph of a combine along the routing of one generation of a Buffer with slots. In a later one it sends nothing and gives NaN."""

    def __init__(self, session: Session) -> None:
        self.session, shape = session, session.plan.shape
        arrays, xp = session.arrays, session.arrays.xp
        x = arrays.typed(xp.zeros((1, shape.hidden), np.uint16), "bfloat16", (1, shape.hidden))
        idx = xp.full((1, shape.topk), -1, np.int64)
        idx[0, 0] = session.rank * shape.local_experts
        self.since = info_of(session.buffer).since
        session.activity = "the capture of a graph along a routing"
        sent = session.buffer.dispatch(x, idx)
        session.buffer.synchronize()
        stream = xp.cuda.get_current_stream()
        stream.begin_capture()
        self.sums = session.buffer.combine(sent.recv_x, sent.handle).x
        self.graph = stream.end_capture()

    def check(self, number: int) -> None:
        """Replay the graph after a change of the members. It must give NaN, and a report that names the generation."""
        session, arrays = self.session, self.session.arrays
        if info_of(session.buffer).since == self.since:  # a shrink that left out nobody
            return
        session.activity = "the replay of a graph along a routing of before"
        arrays.poison(self.sums)
        self.graph.launch()
        arrays.synchronize()
        report = ""
        try:
            session.buffer.check()
        except EPInputError as error:
            report = str(error)
        bits = arrays.raw(self.sums).view(np.uint16)
        are_numbers = ((bits & 0x7FFF) <= 0x7F80).any()  # of bfloat16
        session.check.value(number, "a combine along a routing of before", "x is NaN", bool(are_numbers), False)
        session.check.value(number, "a combine along a routing of before", "the report", "generation" in report, True)
