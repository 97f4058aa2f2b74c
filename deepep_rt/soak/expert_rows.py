"""Run a round of the throughput mode with rows that lie expert by expert: dispatch, combine, and both again with the same routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import DTYPES
from ..backends.inputs import most_recv_rows
from ..results import CombineResult, DispatchHandle, DispatchResult
from .arrays import row_keys
from .expected import ExpertRouting, Routing, summed
from .plan import ExpertCall, RoundPlan, experts_of
from .session import Session

_ARRAYS = ("recv_x", "recv_x_scales", "recv_topk_weights", "recv_src_idx", "recv_expert_idx", "expert_offsets")


def run_round(session: Session, plan: RoundPlan) -> None:
    """Make the calls of a round and check all results. On several nodes, the rows by token may have no room: then there is no call."""
    config, num_experts = session.buffer.config, session.plan.num_experts
    choices = [experts_of(session.options, plan, 0, rank) for rank in range(session.options.num_ranks)]
    by_token = Routing(choices, session.rank, num_experts)
    if max(by_token.num_sent_to(rank) for rank in range(by_token.num_ranks)) > config.num_max_recv_tokens:
        return
    most = most_recv_rows(config, "expert", plan.alignment)
    worst = None if plan.worst is None else [min(limit, most) for limit in plan.worst]
    received = [
        Received(choices, rank, num_experts, plan.alignment, None if worst is None else worst[rank])
        for rank in range(session.options.num_ranks)
    ]
    handle = None
    for number, call in enumerate(plan.expert_calls):
        handle = _Exchange(session, plan, call, number, by_token, received, handle).run()


class _Kept(NamedTuple):
    """Rows that fit, `[n]` int64 each."""

    position: np.ndarray
    expert: np.ndarray
    source: np.ndarray
    token: np.ndarray
    choice: np.ndarray


class Received:
    """The rows by expert of one rank.

    Args:
        choices: For each rank `[tokens, topk]`, experts or -1.
        rank: The rank.
        num_experts: Experts over all ranks.
        alignment: `expert_alignment`.
        worst: `num_worst_tokens`. None: all rows fit.
    """

    def __init__(self, choices: list[np.ndarray], rank: int, num_experts: int, alignment: int, worst: int | None) -> None:
        self.routing = ExpertRouting(choices, rank, num_experts, sum(idx.size for idx in choices))
        self.counts = -(-self.routing.num_per_expert // alignment) * alignment
        self.all_offsets = np.concatenate([[0], np.cumsum(self.counts)])
        self.num_recv = int(self.all_offsets[-1])
        self.num_rows = self.num_recv if worst is None else worst
        self.has_list = worst is None

    @cached_property
    def kept(self) -> _Kept:
        """List the rows that fit."""
        entries = self.routing.entries
        position = self.all_offsets[entries.expert] + entries.row
        fits = position < self.num_rows
        return _Kept(position[fits], *(part[fits] for part in (entries.expert, entries.source, entries.token, entries.choice)))

    def has_row(self, source: int) -> np.ndarray:
        """Tell which choices of a source's tokens have a row here, `[tokens, topk]` bool."""
        found, mine = np.zeros(self.routing.choices[source].shape, bool), self.kept.source == source
        found[self.kept.token[mine], self.kept.choice[mine]] = True
        return found


class _Exchange:
    """One dispatch and its combine."""

    def __init__(
        self,
        session: Session,
        plan: RoundPlan,
        call: ExpertCall,
        number: int,
        by_token: Routing,
        received: list[Received],
        handle: DispatchHandle | None,
    ) -> None:
        self.session, self.plan, self.call, self.number, self.handle = session, plan, call, number, handle
        self.by_token, self.received, self.here = by_token, received, received[session.rank]
        self.arrays, self.check, self.rank = session.arrays, session.check, session.rank
        self.hidden, self.topk = session.plan.shape.hidden, session.plan.shape.topk
        self.tokens = np.arange(plan.tokens[self.rank])
        self.keys = {what: session.key(plan, number, what) for what in ("x", "scales", "weights", "y", "sums_weights", "bias0")}
        self.reduce, self.compress = call.reduce, None if call.reduce == "topk" else call.compress

    def run(self) -> DispatchHandle:
        """Make both calls. Return the handle."""
        sent = self._dispatch()
        check_sent = self._dispatch_check(sent)
        check_sent()
        back = self._combine(sent.handle)
        check_back = self._combine_check(back)
        check_back()
        self.session.keep_or_poison(self.plan, sent, check_sent, _ARRAYS)
        self.session.keep_or_poison(self.plan, back, check_back, ("x", "topk_weights"))
        return sent.handle

    # --- dispatch ----------------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> DispatchResult:
        call, arrays, session = self.call, self.arrays, self.session
        mine, num_tokens = np.full(len(self.tokens), self.rank), len(self.tokens)
        words = self.hidden * DTYPES[call.dtype].itemsize // 4
        x = arrays.typed(arrays.words(self._keys("x", mine, self.tokens), words), call.dtype, (num_tokens, self.hidden))
        scales = None
        if call.scale_words:
            raw = arrays.words(self._keys("scales", mine, self.tokens), call.scale_words)
            scales = arrays.typed(raw, "float32", (num_tokens, call.scale_words))
        idx = arrays.put(self.by_token.mine.astype(self.plan.idx_dtype)) if not call.is_repeat or call.has_weights else None
        weights = None
        if call.has_weights:
            raw = arrays.numbers(self._keys("weights", mine, self.tokens), self.topk, "float32")
            weights = arrays.typed(raw, "float32", (num_tokens, self.topk))
        more: dict[str, Any] = {"handle": self.handle}
        if not call.is_repeat:
            more = {"expert_alignment": self.plan.alignment, "layout": "expert"}
        if self.plan.worst is not None:
            more["num_worst_tokens"] = self.here.num_rows
        if call.scale_words and call.by_column:
            more["scales_layout"] = "column"
        return session.timed(
            "dispatch",
            call.mode,
            lambda where: session.buffer.dispatch(
                x, idx, weights, x_scales=scales, zero_padding=call.zero_padding, **more, **where
            ),
        )

    def _dispatch_check(self, sent: DispatchResult) -> Callable[[], None]:
        """Make the function that checks all results of the dispatch, now or in a later round."""
        call, here, check, arrays, made_in = self.call, self.here, self.check, self.arrays, self.plan.number
        kept, num_rows = here.kept, here.num_rows
        what = f"dispatch by expert {self.number}" + (" with a handle" if call.is_repeat else "")
        src_idx, experts = np.full((num_rows, 3), -1, np.int32), np.full(num_rows, -1, np.int32)
        src_idx[kept.position] = np.stack([kept.source, kept.token, kept.choice], axis=1)
        experts[kept.position] = kept.expert
        is_padding = np.flatnonzero(experts < 0)

        def rows(name: str, got: Any, width: int, make: Callable[[np.ndarray], Any], keys: np.ndarray, is_zero: bool) -> None:
            check.value(made_in, what, f"{name}.shape[0]", got.shape[0], num_rows)
            if got.shape[0] != num_rows:
                return
            check.raw_rows(made_in, what, name, arrays.rows(got), keys, make, at=kept.position)
            if is_zero:
                zeros = lambda part: arrays.xp.zeros((len(part), width), np.uint32)  # noqa: E731
                check.raw_rows(
                    made_in, what, name, arrays.rows(got), is_padding, zeros, lambda row: "which is padding", is_padding
                )

        def run() -> None:
            words = self.hidden * DTYPES[call.dtype].itemsize // 4
            keys = self._keys("x", kept.source, kept.token)
            rows("recv_x", sent.recv_x, words, lambda k: arrays.words(k, words), keys, call.zero_padding)
            if not call.scale_words:
                check.value(made_in, what, "recv_x_scales", sent.recv_x_scales, None)
            else:
                scales = sent.recv_x_scales
                if call.by_column:
                    scales = scales[:, :num_rows].T.copy()
                keys = self._keys("scales", kept.source, kept.token)
                rows(
                    "recv_x_scales",
                    scales,
                    call.scale_words,
                    lambda k: arrays.words(k, call.scale_words),
                    keys,
                    call.zero_padding,
                )
            if call.has_weights:
                weights = np.zeros(num_rows, np.float32)
                weights[kept.position] = self._weight_of(kept)
                check.array(made_in, what, "recv_topk_weights", sent.recv_topk_weights, weights)
            else:
                check.value(made_in, what, "recv_topk_weights", sent.recv_topk_weights, None)
            check.array(made_in, what, "recv_src_idx", sent.recv_src_idx, src_idx)
            check.array(made_in, what, "recv_expert_idx", sent.recv_expert_idx, experts)
            offsets = np.minimum(here.all_offsets, num_rows).astype(np.int32)
            check.array(made_in, what, "expert_offsets", sent.expert_offsets, offsets)
            check.array(made_in, what, "num_recv_tokens", sent.num_recv_tokens, np.array([here.num_recv], np.int32))
            counts = here.counts.astype(np.int32)
            check.array(made_in, what, "num_recv_tokens_per_expert", sent.num_recv_tokens_per_expert, counts)
            listed = here.counts.tolist() if here.has_list else None
            check.value(made_in, what, "num_recv_tokens_per_expert_list", sent.num_recv_tokens_per_expert_list, listed)

        return run

    def _weight_of(self, kept: _Kept) -> np.ndarray:
        """Compute the weight of each row on the host."""
        numbers = self.session.on_host.numbers(self._keys("weights", kept.source, kept.token), self.topk, "float32")
        return numbers.view(np.float32)[np.arange(len(kept.choice)), kept.choice]

    # --- combine -----------------------------------------------------------------------------------------------------------------

    def _combine(self, handle: DispatchHandle) -> CombineResult:
        call, arrays, session, kept = self.call, self.arrays, self.session, self.here.kept
        # Padding is NaN, because no call may read it.
        y = arrays.not_numbers((self.here.num_rows, self.hidden), call.combine_dtype)
        keys = self._keys("y", kept.source, kept.token, kept.choice)
        if len(kept.position):
            arrays.scatter(arrays.rows(y), kept.position, arrays.numbers(keys, self.hidden, call.combine_dtype))
        weights = None
        if call.sums_weights:
            weights = arrays.not_numbers((self.here.num_rows,), "float32")
            keys = self._keys("sums_weights", kept.source, kept.token, kept.choice)
            if len(kept.position):
                arrays.scatter(arrays.rows(weights), kept.position, arrays.numbers(keys, 1, "float32"))
        bias = arrays.typed(self._bias(), call.combine_dtype, (len(self.tokens), self.hidden)) if call.has_bias else None
        how: dict[str, Any] = dict(
            topk_weights=weights, weighted=self._is_weighted, reduce=self.reduce, compress=self.compress, bias=bias
        )
        return session.timed("combine", call.combine_mode, lambda where: session.buffer.combine(y, handle, **how, **where))

    @property
    def _is_weighted(self) -> bool:
        return self.call.sums_weights and self.call.is_weighted

    def _combine_check(self, back: CombineResult) -> Callable[[], None]:
        call, arrays, check, made_in = self.call, self.arrays, self.check, self.plan.number
        what, num_tokens, dtype = f"combine by expert {self.number}", len(self.tokens), call.combine_dtype
        if self.compress:
            what += f" with compress={self.compress!r}"
        has_row = [received.has_row(self.rank) for received in self.received]

        def run() -> None:
            biases = [self._bias()] if call.has_bias else []
            if self.reduce == "topk":
                total = self._added_up(self.tokens, np.any(has_row, axis=0))
                for bias in biases:
                    total += arrays.to_float32(bias, dtype)
                wanted = arrays.from_float32(total, dtype)
            else:
                config = self.session.buffer.config

                def row(peer: int, tokens: np.ndarray) -> Any:
                    return arrays.from_float32(self._added_up(tokens, has_row[peer][tokens]), dtype)

                wanted = summed(
                    arrays, self.by_token, config.node_size, self.hidden, dtype, row, biases, self.compress, config.path
                )
            at = np.arange(num_tokens)
            cut = lambda part: wanted[part[0] : part[-1] + 1]  # noqa: E731
            check.rows(made_in, what, "x", back.x, (num_tokens, self.hidden), dtype, at, cut)
            if not call.sums_weights or call.is_weighted:
                check.value(made_in, what, "topk_weights", back.topk_weights, None)
                return
            weights = np.zeros((num_tokens, self.topk), np.float32)
            token, choice = np.nonzero(np.any(has_row, axis=0))
            keys = self._keys("sums_weights", np.full(len(token), self.rank), token, choice)
            weights[token, choice] = self.session.on_host.numbers(keys, 1, "float32").view(np.float32)[:, 0]
            check.array(made_in, what, "topk_weights", back.topk_weights, weights)

        return run

    def _added_up(self, tokens: np.ndarray, is_added: np.ndarray) -> Any:
        """Add up the rows of some choices of this rank's tokens in float32, in the order of the choices."""
        arrays, xp = self.arrays, self.arrays.xp
        total = xp.zeros((len(tokens), self.hidden), np.float32)
        for choice in range(self.topk):
            coordinates = np.full(len(tokens), self.rank), tokens, np.full(len(tokens), choice)
            term = arrays.to_float32(
                arrays.numbers(self._keys("y", *coordinates), self.hidden, self.call.combine_dtype), self.call.combine_dtype
            )
            if self._is_weighted:
                term = arrays.numbers(self._keys("sums_weights", *coordinates), 1, "float32").view(np.float32) * term
            total += xp.where(arrays.put(is_added[:, choice])[:, None], term, xp.float32(0))
        return total

    def _bias(self) -> Any:
        keys = self._keys("bias0", np.full(len(self.tokens), self.rank), self.tokens)
        return self.arrays.numbers(keys, self.hidden, self.call.combine_dtype)

    def _keys(self, what: str, *coordinates: np.ndarray) -> np.ndarray:
        return row_keys(self.keys[what], *coordinates)
