"""Run a round of the throughput mode: dispatch, combine, and both again with the same routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.dtypes import DTYPES
from ..errors import EPOutOfMemoryError
from ..prepared import PreparedThroughput
from ..results import CombineResult, DispatchHandle, DispatchResult
from .arrays import row_keys
from .expected import Routing, summed
from .plan import Call, RoundPlan, experts_of
from .session import Session

_ARRAYS = (
    "recv_x",
    "recv_x_scales",
    "recv_topk_idx",
    "recv_topk_weights",
    "recv_src_idx",
    "num_recv_tokens",
    "num_recv_tokens_per_expert",
)


def run_round(session: Session, plan: RoundPlan) -> None:
    """Make the calls of a round and check all results."""
    choices = [experts_of(session.options, plan, 0, rank) for rank in range(session.options.num_ranks)]
    room = session.buffer.config.num_max_recv_tokens
    if plan.worst is not None:
        plan = replace(plan, worst=tuple(min(worst, room) for worst in plan.worst))
    routing = Routing(choices, session.rank, session.plan.num_experts, plan.worst)
    num_recv = [routing.num_sent_to(rank) for rank in range(routing.num_ranks)]
    if plan.worst is None and max(num_recv) > room:
        _Exchange(session, plan, plan.calls[0], 0, routing, None).run_without_room(room, num_recv)
        return
    handle = None
    for number, call in enumerate(plan.calls):
        handle = _Exchange(session, plan, call, number, routing, handle).run()


class _Exchange:
    """One dispatch and its combine."""

    def __init__(
        self, session: Session, plan: RoundPlan, call: Call, number: int, routing: Routing, handle: DispatchHandle | None
    ) -> None:
        self.session, self.plan, self.call, self.number, self.routing, self.handle = session, plan, call, number, routing, handle
        self.arrays, self.check, self.rank = session.arrays, session.check, session.rank
        self.hidden, self.topk = session.plan.shape.hidden, session.plan.shape.topk
        self.tokens = np.arange(plan.tokens[self.rank])
        self.keys = {
            what: session.key(plan, number, what) for what in ("x", "scales", "weights", "y", "sums_weights", "bias0", "bias1")
        }
        self.compress = call.compress
        self.prepared: PreparedThroughput | None = None

    def run(self) -> DispatchHandle:
        """Make both calls. Return the handle."""
        sent = self._dispatch()
        check_sent = self._dispatch_check(sent)
        check_sent()
        back = self._combine(sent.handle)
        check_back = self._combine_check(back)
        check_back()
        # The next call reads the handle, which may share memory with recv_src_idx.
        is_last = self.number + 1 == len(self.plan.calls)
        self.session.keep_or_poison(
            self.plan, sent, check_sent, _ARRAYS if is_last else [n for n in _ARRAYS if n != "recv_src_idx"]
        )
        self.session.keep_or_poison(self.plan, back, check_back, ("x", "topk_weights"))
        return sent.handle

    def run_without_room(self, room: int, num_recv: list[int]) -> None:
        """Make a dispatch that brings a rank more rows than it has room for. All ranks must raise."""
        words = [f"num_max_recv_tokens={room}", f"at least {max(num_recv)}", f"rank {num_recv.index(max(num_recv))}"]
        found = []
        self.session.is_timed = False  # ranks with room may return, and all ranks count as many times
        try:
            self._dispatch()
            self.session.buffer.synchronize()  # on GPUs, a rank with room hears of it once its kernel has ended
        except EPOutOfMemoryError as error:
            found = [word for word in words if word in str(error)]
        self.check.value(self.plan.number, "dispatch 0", "words of its error", found, words)

    # --- dispatch ----------------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> DispatchResult:
        call, arrays, session = self.call, self.arrays, self.session
        mine, num_tokens = np.full(len(self.tokens), self.rank), len(self.tokens)
        words = self.hidden * DTYPES[call.dtype].itemsize // 4
        x = arrays.typed(arrays.words(self._keys("x", mine, self.tokens), words), call.dtype, (num_tokens, self.hidden))
        scales = None
        if call.scale_words:
            raw = arrays.words(self._keys("scales", mine, self.tokens), call.scale_words)
            scales = arrays.typed(raw, call.scale_dtype, (num_tokens, call.scale_words))
        idx = arrays.put(self.routing.mine.astype(self.plan.idx_dtype)) if call.has_idx else None
        weights = None
        if call.has_weights:
            raw = arrays.numbers(self._keys("weights", mine, self.tokens), self.topk, "float32")
            weights = arrays.typed(raw, "float32", (num_tokens, self.topk))
        if call.is_prepared:
            self._prepare(x, topk_idx=idx, topk_weights=weights, x_scales=scales)
        more: dict[str, Any] = {"handle": self.handle} if call.is_repeat else {"expert_alignment": self.plan.alignment}
        if self.plan.worst is not None:
            more["num_worst_tokens"] = self.plan.worst[self.rank]

        def dispatch(where: dict[str, Any]) -> DispatchResult:
            if self.prepared is not None:
                return self.prepared.dispatch()
            return session.buffer.dispatch(x, idx, weights, x_scales=scales, **more, **where)

        if call.is_prepared:
            dispatch(arrays.stream_arguments(call.mode))  # a prepared call overwrites these rows with the next ones
        return session.timed("dispatch", call.mode, dispatch)

    def _prepare(self, x: Any, **arrays: Any) -> None:
        """Prepare both calls. A graph may hold the memory for it; this rank then makes ordinary calls."""
        call, session = self.call, self.session
        assert self.handle is not None
        session.check_kept()  # the pool needs room, because the rows of a prepared call cannot be copied
        options: dict[str, Any] = dict(y_weights=self._weights_of_rows(), bias=self._biases(), compress=self.compress)
        where = self.arrays.stream_arguments(call.mode)
        try:
            self.prepared = session.buffer.prepare_throughput(x, self.handle, **arrays, **options, **where)
        except EPOutOfMemoryError:
            if session.graph is None:
                raise

    def _dispatch_check(self, sent: DispatchResult) -> Callable[[], None]:
        """Make the function that checks all results of the dispatch, now or in a later round."""
        call, routing, check, arrays, made_in = self.call, self.routing, self.check, self.arrays, self.plan.number
        what = f"dispatch {self.number}" + (" with a handle" if call.is_repeat else "")
        kept, num_rows = routing.kept, routing.num_rows
        aligned = -(-routing.num_per_expert // self.plan.alignment) * self.plan.alignment
        src_idx = np.stack(kept, axis=1).astype(np.int32)

        def note(row: int) -> str:
            return f"which is token {kept.token[row]} of rank {kept.source[row]}"

        def run() -> None:
            words = self.hidden * DTYPES[call.dtype].itemsize // 4
            keys, shape = self._keys("x", *kept), (num_rows, self.hidden)
            check.rows(made_in, what, "recv_x", sent.recv_x, shape, call.dtype, keys, lambda k: arrays.words(k, words), note)
            if call.scale_words:
                keys, shape = self._keys("scales", *kept), (num_rows, call.scale_words)
                make = lambda k: arrays.words(k, call.scale_words)  # noqa: E731
                check.rows(made_in, what, "recv_x_scales", sent.recv_x_scales, shape, call.scale_dtype, keys, make, note)
            else:
                check.value(made_in, what, "recv_x_scales", sent.recv_x_scales, None)
            if call.has_idx:
                wanted = routing.local_choices.astype(self.plan.idx_dtype)
                check.array(made_in, what, "recv_topk_idx", sent.recv_topk_idx, wanted)
            else:
                check.value(made_in, what, "recv_topk_idx", sent.recv_topk_idx, None)
            if call.has_weights:
                check.array(made_in, what, "recv_topk_weights", sent.recv_topk_weights, self._weights_here())
            else:
                check.value(made_in, what, "recv_topk_weights", sent.recv_topk_weights, None)
            check.value(made_in, what, "recv_src_idx.shape", tuple(sent.recv_src_idx.shape), (num_rows, 2))
            check.array(made_in, what, "recv_src_idx", sent.recv_src_idx[: len(src_idx)], src_idx)
            total = np.array([routing.num_sent_here], np.int32)
            check.array(made_in, what, "num_recv_tokens", sent.num_recv_tokens, total)
            counts = sent.num_recv_tokens_per_expert
            check.array(made_in, what, "num_recv_tokens_per_expert", counts, aligned.astype(np.int32))
            listed = aligned.tolist() if self.plan.worst is None else None
            check.value(made_in, what, "num_recv_tokens_per_expert_list", sent.num_recv_tokens_per_expert_list, listed)
            check.value(made_in, what, "num_recv_rows", sent.handle.num_recv_rows, num_rows)

        return run

    def _weights_here(self) -> np.ndarray:
        """Compute `recv_topk_weights` on the host. Weights of other ranks' experts and of undefined rows are 0."""
        kept = self.routing.kept
        numbers = self.session.on_host.numbers(self._keys("weights", *kept), self.topk, "float32").view(np.float32)
        made = np.zeros((self.routing.num_rows, self.topk), np.float32)
        made[: len(numbers)] = numbers
        made[self.routing.local_choices < 0] = 0
        return made

    # --- combine -----------------------------------------------------------------------------------------------------------------

    def _combine(self, handle: DispatchHandle) -> CombineResult:
        call, arrays, session, kept = self.call, self.arrays, self.session, self.routing.kept
        num_rows, num_kept = self.routing.num_rows, len(self.routing.kept.token)
        here = np.full(num_kept, self.rank)
        # Undefined rows are NaN, because no call may read them.
        y = arrays.not_numbers((num_rows, self.hidden), call.combine_dtype)
        arrays.write(y, arrays.numbers(self._keys("y", here, *kept), self.hidden, call.combine_dtype))
        if (prepared := self.prepared) is not None:
            return session.timed("combine", call.combine_mode, lambda where: prepared.combine(y))
        weights, bias = self._weights_of_rows(), self._biases()
        return session.timed(
            "combine",
            call.combine_mode,
            lambda where: session.buffer.combine(y, handle, topk_weights=weights, bias=bias, compress=self.compress, **where),
        )

    def _weights_of_rows(self) -> Any:
        if not self.call.sums_weights:
            return None
        arrays, kept = self.arrays, self.routing.kept
        weights, here = arrays.not_numbers((self.routing.num_rows, self.topk), "float32"), np.full(len(kept.token), self.rank)
        arrays.write(weights, arrays.numbers(self._keys("sums_weights", here, *kept), self.topk, "float32"))
        return weights

    def _biases(self) -> Any:
        shape = len(self.tokens), self.hidden
        biases = [self.arrays.typed(self._bias(i), self.call.combine_dtype, shape) for i in range(self.call.biases)]
        return {0: None, 1: biases[0] if biases else None, 2: biases}[self.call.biases]

    def _combine_check(self, back: CombineResult) -> Callable[[], None]:
        call, arrays, check, made_in = self.call, self.arrays, self.check, self.plan.number
        what, num_tokens = f"combine {self.number}", len(self.tokens)
        if self.compress:
            what += f" with compress={self.compress!r}"

        def rows_of(name: str, width: int, dtype: str) -> Callable[[int, np.ndarray], Any]:
            def row(peer: int, tokens: np.ndarray) -> Any:
                keys = self._keys(name, np.full(len(tokens), peer), np.full(len(tokens), self.rank), tokens)
                return arrays.numbers(keys, width, dtype)

            return row

        def compare(name: str, got: Any, width: int, dtype: str, wanted: Any) -> None:
            at = np.arange(num_tokens)
            check.rows(made_in, what, name, got, (num_tokens, width), dtype, at, lambda part: wanted[part[0] : part[-1] + 1])

        def run() -> None:
            dtype = call.combine_dtype
            biases = [self._bias(i) for i in range(call.biases)]
            config = self.session.buffer.config
            node_size, path = config.node_size, config.path
            y = rows_of("y", self.hidden, dtype)
            wanted = summed(arrays, self.routing, node_size, self.hidden, dtype, y, biases, self.compress, path)
            compare("x", back.x, self.hidden, dtype, wanted)
            if not call.sums_weights:
                check.value(made_in, what, "topk_weights", back.topk_weights, None)
                return
            weights_of = rows_of("sums_weights", self.topk, "float32")
            wanted = summed(arrays, self.routing, node_size, self.topk, "float32", weights_of)
            compare("topk_weights", back.topk_weights, self.topk, "float32", wanted)

        return run

    def _bias(self, number: int) -> Any:
        keys = self._keys(f"bias{number}", np.full(len(self.tokens), self.rank), self.tokens)
        return self.arrays.numbers(keys, self.hidden, self.call.combine_dtype)

    def _keys(self, what: str, *coordinates: np.ndarray) -> np.ndarray:
        return row_keys(self.keys[what], *coordinates)
