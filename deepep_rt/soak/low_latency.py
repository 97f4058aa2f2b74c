"""Run a round of the low-latency mode: one or more micro-batches. With hooks, their halves overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import FP8_GROUP
from ..results import LowLatencyCombineResult, LowLatencyDispatchResult
from .arrays import row_keys
from .expected import ExpertRouting, to_fp8, weighted
from .plan import RoundPlan, Step, excluded_of
from .session import Session

_STATS_START = 7


def run_round(session: Session, plan: RoundPlan) -> None:
    """Make the calls of a round and check all results."""
    batches = [_Batch(session, plan, step, number) for number, step in enumerate(plan.steps)]
    for batch in batches:
        batch.dispatch()
    for batch in batches:
        batch.receive()
        batch.combine()
    for batch in batches:
        batch.finish()


class _Batch:
    """A low-latency dispatch and its combine."""

    def __init__(self, session: Session, plan: RoundPlan, step: Step, number: int) -> None:
        self.session, self.plan, self.step, self.number = session, plan, step, number
        self.arrays, self.check, self.rank = session.arrays, session.check, session.rank
        choices = session.choices(plan, number)
        self.hidden, self.topk = session.plan.shape.hidden, session.plan.shape.topk
        self.most = max(1, *plan.tokens) if step.has_fewer else session.plan.shape.tokens
        self.capacity = session.options.num_ranks * self.most
        self.routing = ExpertRouting(choices, self.rank, session.plan.num_experts, self.capacity)
        self.excluded = excluded_of(session.options, plan, number, self.rank, choices[self.rank])
        self.tokens = np.arange(plan.tokens[self.rank])
        self.keys = {what: session.key(plan, number, what) for what in ("x", "weights", "y", "scales")}
        self.own = session.own_choices(plan, number)
        self.idx = self.arrays.put(self.own.astype(plan.idx_dtype))
        mine = np.full(len(self.tokens), self.rank)
        self.weights = self.arrays.numbers(row_keys(self.keys["weights"], mine, self.tokens), self.topk, "float32").view(
            np.float32
        )
        rows, scales = self._rows_of(mine, self.tokens)
        dtype = "uint8" if step.is_quantised else "bfloat16"
        self.x = self.arrays.typed(rows, dtype, (len(self.tokens), self.hidden))
        self.scales = scales if step.is_quantised else None
        self.recv_stats: Any = None
        self.wait_stats: Any = None
        if step.stats:
            self.recv_stats = self.arrays.put(np.full(self.routing.local, _STATS_START, np.int32))
            self.wait_stats = self.arrays.put(np.full(session.options.num_ranks, _STATS_START, np.int64))

    # --- dispatch ----------------------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Send rows. Without a hook, receive too."""
        step, buffer = self.step, self.session.buffer
        self.out = self.arrays.not_numbers((len(self.tokens), self.hidden), "bfloat16") if step.out else None
        options: dict[str, Any] = dict(
            use_fp8=step.use_fp8,
            round_scale=step.round_scale,
            use_ue8m0=step.use_ue8m0,
            return_recv_hook=step.hook,
            cumulative_local_expert_recv_stats=self.recv_stats,
            wait_recv_cost_stats=self.wait_stats,
            x_scales=self.scales,
            num_max_tokens=self.most if step.has_fewer else None,
        )

        if step.is_prepared:
            options |= {"out": self.out, **self._options_of_combine(), **self.arrays.stream_arguments(step.mode)}
            self.prepared = buffer.prepare_low_latency(self.x, self.idx, self.weights, **options)
            if not step.hook and not step.stats:
                self.prepared.dispatch()  # the next one overwrites its rows

        def call(where: dict[str, Any]) -> LowLatencyDispatchResult:
            if step.is_prepared:
                return self.prepared.dispatch()
            weights = self.weights if step.early_weights else None
            return buffer.low_latency_dispatch(self.x, self.idx, topk_weights=weights, **options, **where)

        self.sent: LowLatencyDispatchResult = self.session.timed("low_latency_dispatch", step.mode, call, has_hook=step.hook)

    def _options_of_combine(self) -> dict[str, Any]:
        step = self.step
        return dict(allow_multiple_reduction=step.reduce_early, compress=step.compress, zero_copy=step.zero_copy)

    def receive(self) -> None:
        """Call the hook and check the received rows."""
        if self.sent.hook is not None:
            self.session.activity = "the hook of low_latency_dispatch"
            self.sent.hook()
            self.sent.event.wait()
        self._check_arrived()
        if self.step.stats:
            wanted = self.routing.num_per_expert.astype(np.int32) + _STATS_START
            self._array("cumulative_local_expert_recv_stats", self.recv_stats, wanted)
            grew = (self.wait_stats >= _STATS_START).all()
            self._array("wait_recv_cost_stats did not shrink", self.arrays.xp.asarray(grew).reshape(1), np.array([True]))

    def _check_arrived(self) -> None:
        counts, step, config = self.routing.num_per_expert, self.step, (self.routing.local, self.capacity)
        self._array("num_recv_tokens_per_expert", self.sent.num_recv_tokens_per_expert, counts.astype(np.int32))
        dtype = "float8_e4m3fn" if step.use_fp8 else "uint8" if step.is_quantised else "bfloat16"
        self._check_rows("recv_x", self.sent.recv_x, (*config, self.hidden), dtype, 0)
        if step.is_quantised:
            self._check_rows("recv_x_scales", self.sent.recv_x_scales, (*config, 4 * self._scale_words), "uint8", 1)
        elif step.use_fp8:
            dtype = "uint8" if step.use_ue8m0 else "float32"
            self._check_rows("recv_x_scales", self.sent.recv_x_scales, (*config, self.hidden // FP8_GROUP), dtype, 1)
        else:
            self._value("recv_x_scales", self.sent.recv_x_scales, None)

    def _check_rows(self, name: str, got: Any, shape: tuple[int, ...], dtype: str, part: int) -> None:
        """Compare the rows of each expert. `part` is 0 for rows, 1 for scales."""
        found = None if got is None else (tuple(got.shape), np.dtype(got.dtype).name)
        self._value(f"{name}.shape and dtype", found, (shape, dtype))
        if found != (shape, dtype):
            return
        entries, call = self.routing.entries, self._call("dispatch")

        def note(number: int) -> str:
            expert, row, source, token, choice = (int(values[number]) for values in entries)
            return f"row {row} of local expert {expert}, which is choice {choice} of token {token} of rank {source}"

        keys = row_keys(self.keys["scales" if self.step.is_quantised and part else "x"], entries.source, entries.token)
        rows, at = self._flat(got), entries.expert * self.capacity + entries.row
        self.check.raw_rows(self.plan.number, call, name, rows, keys, lambda k: self._sent_rows(k, part), note, at)

    def _flat(self, array: Any) -> Any:
        """View `[local experts, capacity, ...]` as `[local experts * capacity, row bytes]`."""
        return self.arrays.rows(array, 2).reshape(self.routing.local * self.capacity, -1)

    @property
    def _scale_words(self) -> int:
        """Words of 4 bytes in the scales of a quantised row."""
        return max(1, self.hidden // 64)

    def _rows_of(self, source: np.ndarray, token: np.ndarray) -> tuple[Any, Any]:
        """Generate rows that ranks send, and the scales of quantised ones."""
        keys = row_keys(self.keys["x"], source, token)
        if not self.step.is_quantised:
            return self.arrays.numbers(keys, self.hidden, "bfloat16"), None
        return self._bytes(keys, self.hidden // 4), self._bytes(row_keys(self.keys["scales"], source, token), self._scale_words)

    def _bytes(self, keys: np.ndarray, num_words: int) -> Any:
        """Generate any bytes, `[len(keys), 4 * num_words]`. One of 8 words is the one that marks empty inboxes."""
        words = self.arrays.words(keys, num_words)
        words[(words & self.arrays.xp.uint32(7)) == 0] = 0xFFFFFFFF
        return words.view(np.uint8)

    def _sent_rows(self, keys: np.ndarray, part: int) -> Any:
        """Generate received rows, or their scales if `part` is 1."""
        if self.step.is_quantised:
            return self._bytes(keys, self._scale_words if part else self.hidden // 4)
        rows = self.arrays.numbers(keys, self.hidden, "bfloat16")
        if not self.step.use_fp8:
            return rows
        return to_fp8(self.arrays, rows, round_scale=self.step.round_scale, ue8m0=self.step.use_ue8m0)[part]

    # --- combine -----------------------------------------------------------------------------------------------------------------

    def combine(self) -> None:
        """Write the experts' outputs and send them. Without a hook, receive too."""
        step, buffer = self.step, self.session.buffer
        idx = self.idx
        if self.excluded.any():
            idx = self.arrays.put(np.where(self.excluded, -1, self.own).astype(self.plan.idx_dtype))
        self.combine_idx = idx  # read until the call or its hook has run
        shape = self.routing.local, self.capacity, self.hidden
        if step.zero_copy:
            y = buffer.get_low_latency_combine_buffer(self.sent.handle)
            self.arrays.fill_not_numbers(y)
        else:
            y = self.arrays.not_numbers(shape, "bfloat16")  # undefined rows stay NaN, because no call may read them
        entries = self.routing.entries
        where = entries.expert + self.rank * self.routing.local, entries.source, entries.token, entries.choice
        made = self.arrays.numbers(row_keys(self.keys["y"], *where), self.hidden, "bfloat16")
        self.arrays.scatter(self._flat(y), entries.expert * self.capacity + entries.row, made)
        self.y = y
        options = {**self._options_of_combine(), "out": self.out, "return_recv_hook": step.combine_hook}

        def call(where: dict[str, Any]) -> LowLatencyCombineResult:
            if step.is_prepared:
                return self.prepared.combine(y)
            return buffer.low_latency_combine(y, idx, self.weights, self.sent.handle, **options, **where)

        self.back: LowLatencyCombineResult = self.session.timed(
            "low_latency_combine", step.combine_mode, call, has_hook=step.combine_hook
        )

    def finish(self) -> None:
        """Call the hook of the combine, check the sums, and keep or overwrite both results."""
        if self.back.hook is not None:
            self.session.activity = "the hook of low_latency_combine"
            self.back.hook()
            self.back.event.wait()
        self._check_sums()
        if self.step.out:
            self._value("x is out", self.arrays.is_same_memory(self.back.x, self.out), True)
        self.session.keep_or_poison(
            self.plan, self.sent, self._check_arrived, ("recv_x", "recv_x_scales", "num_recv_tokens_per_expert")
        )
        self.session.keep_or_poison(self.plan, self.back, self._check_sums, ("x",))

    def _check_sums(self) -> None:
        mine = self.routing.mine

        def row(choice: int) -> Any:
            where = np.full(len(self.tokens), self.rank), self.tokens, np.full(len(self.tokens), choice)
            return self.arrays.numbers(row_keys(self.keys["y"], mine[:, choice], *where), self.hidden, "bfloat16")

        expert_ranks = np.where(self.routing.fits & ~self.excluded, mine // self.routing.local, -1)
        num_ranks, early, compress = self.session.options.num_ranks, self.step.reduce_early, self.step.compress
        given = self.arrays, expert_ranks, self.hidden, self.weights, row
        wanted = weighted(*given, num_ranks=num_ranks, reduce_early=early, compress=compress)
        self.check.rows(
            self.plan.number,
            self._call("combine"),
            "x",
            self.back.x,
            (len(self.tokens), self.hidden),
            "bfloat16",
            self.tokens,
            lambda part: wanted[part[0] : part[-1] + 1],
        )

    # --- checks ------------------------------------------------------------------------------------------------------------------

    def _call(self, name: str) -> str:
        return f"low_latency_{name} {self.number}"

    def _array(self, name: str, got: Any, want: np.ndarray) -> None:
        self.check.array(self.plan.number, self._call("dispatch"), name, got, want)

    def _value(self, name: str, got: Any, want: Any) -> None:
        self.check.value(self.plan.number, self._call("dispatch"), name, got, want)
