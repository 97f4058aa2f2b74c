"""Run a round of the throughput mode: dispatch, combine, and both again with the same routing. Rows lie by token or by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays.dtypes import DTYPES
from ..backends.inputs import most_recv_rows
from ..errors import EPOutOfMemoryError
from ..prepared import PreparedThroughput
from ..results import CombineResult, DispatchHandle, DispatchResult
from .arrays import row_keys
from .expected import Received, Routing, summed
from .plan import Call, RoundPlan
from .session import Session


def run_round(session: Session, plan: RoundPlan) -> None:
    """Make the calls of a round and check all results. Rows by expert need room for the rows by token: without it there is no call."""
    config, num_experts, num_ranks = session.buffer.config, session.plan.num_experts, session.options.num_ranks
    choices = session.choices(plan)
    by_token = Routing(choices, session.rank, num_experts)
    num_recv, room = [by_token.num_sent_to(rank) for rank in range(num_ranks)], config.num_max_recv_tokens
    by_expert, grows = plan.kind == "expert_rows", session.buffer.describe().grows
    if by_expert and max(num_recv) > room and (plan.worst is not None or not grows):
        return
    if plan.worst is not None:
        most = most_recv_rows(config, "expert", plan.alignment) if by_expert else room
        plan = replace(plan, worst=tuple(min(worst, most) for worst in plan.worst))
    worst = plan.worst or (None,) * num_ranks
    received = (
        [Received(choices, rank, num_experts, plan.alignment, worst[rank]) for rank in range(num_ranks)] if by_expert else []
    )
    routing = by_token if by_expert else Routing(choices, session.rank, num_experts, plan.worst)

    def exchange(number: int, handle: DispatchHandle | None) -> _Exchange:
        call = plan.calls[number]
        if by_expert:
            return _ByExpert(session, plan, call, number, routing, handle, received)
        return _ByToken(session, plan, call, number, routing, handle)

    if not by_expert and plan.worst is None and max(num_recv) > room and not grows:
        exchange(0, None).run_without_room(room, num_recv)
        return
    handle = None
    for number in range(len(plan.calls)):
        handle = exchange(number, handle).run()


class _Exchange:
    """One dispatch and its combine. A subclass for each layout of rows knows the places of rows, and what the calls return.

    `number` is that of the call in the round, and `routing` is by token. `handle` is that of the first call. None: this is the first one.
    """

    arrays_of_dispatch: tuple[str, ...]
    layout = ""
    """What the names of calls say of the layout."""
    num_rows: int
    places: np.ndarray
    """Defined rows of this rank. The others are undefined."""
    sources: tuple[np.ndarray, ...]
    """The coordinates of the defined rows in keys of contents that this rank makes."""
    weights_shape: tuple[int, ...]
    """The shape of the weights of a row that a combine adds up or multiplies with."""

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
        self.compress = None if call.reduce == "topk" else call.compress
        self.prepared: PreparedThroughput | None = None

    def run(self) -> DispatchHandle:
        """Make both calls. Return the handle."""
        sent = self._dispatch()
        check_sent = self._dispatch_check(sent)
        check_sent()
        back = self._combine(sent.handle)
        check_back = self._combine_check(back)
        check_back()
        self.session.keep_or_poison(self.plan, sent, check_sent, self.arrays_of_dispatch)
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
        words = self._words_of_x
        x = arrays.typed(arrays.words(self._keys("x", mine, self.tokens), words), call.dtype, (num_tokens, self.hidden))
        scales = None
        if call.scale_words:
            raw = arrays.words(self._keys("scales", mine, self.tokens), call.scale_words)
            scales = arrays.typed(raw, call.scale_dtype, (num_tokens, call.scale_words))
        idx = arrays.put(session.own_choices(self.plan).astype(self.plan.idx_dtype)) if call.has_idx else None
        weights = None
        if call.has_weights:
            raw = arrays.numbers(self._keys("weights", mine, self.tokens), self.topk, "float32")
            weights = arrays.typed(raw, "float32", (num_tokens, self.topk))
        if call.is_prepared:
            self._prepare(x, topk_idx=idx, topk_weights=weights, x_scales=scales)
        more = self._layout_options()
        if self.plan.worst is not None:
            more["num_worst_tokens"] = self.plan.worst[self.rank]

        def dispatch(where: dict[str, Any]) -> DispatchResult:
            if self.prepared is not None:
                return self.prepared.dispatch()
            return session.buffer.dispatch(x, idx, weights, x_scales=scales, **more, **where)

        if call.is_prepared:
            dispatch(arrays.stream_arguments(call.mode))  # a prepared call overwrites these rows with the next ones
        return session.timed("dispatch", call.mode, dispatch)

    def _layout_options(self) -> dict[str, Any]:
        """Return the options of the dispatch that depend on the layout."""
        return {"handle": self.handle} if self.call.is_repeat else {"expert_alignment": self.plan.alignment}

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
        what = f"dispatch{self.layout} {self.number}" + (" with a handle" if self.call.is_repeat else "")
        made_in, check = self.plan.number, self.check

        def run() -> None:
            self._check_rows(sent, what)
            for name, wanted in self._small_arrays().items():
                if wanted is None:
                    check.value(made_in, what, name, getattr(sent, name), None)
                else:
                    check.array(made_in, what, name, getattr(sent, name), wanted)

        return run

    def _check_rows(self, sent: DispatchResult, what: str) -> None:
        """Check received rows, their scales and all values of the host."""
        raise NotImplementedError

    def _small_arrays(self) -> dict[str, np.ndarray | None]:
        """Compute the other arrays of the result on the host, by their names. None: the result has none."""
        raise NotImplementedError

    # --- combine -----------------------------------------------------------------------------------------------------------------

    def _combine(self, handle: DispatchHandle) -> CombineResult:
        call, session = self.call, self.session
        y = self._filled("y", (self.hidden,), call.combine_dtype)
        if (prepared := self.prepared) is not None:
            return session.timed("combine", call.combine_mode, lambda where: prepared.combine(y))
        how: dict[str, Any] = dict(topk_weights=self._weights_of_rows(), bias=self._biases(), compress=self.compress)
        how |= self._sum_options()
        return session.timed("combine", call.combine_mode, lambda where: session.buffer.combine(y, handle, **how, **where))

    def _sum_options(self) -> dict[str, Any]:
        """Return the options of the combine that depend on the layout."""
        return {}

    def _filled(self, what: str, shape: tuple[int, ...], dtype: str) -> Any:
        """Make an array with a row for each received row. Undefined rows are NaN, because no call may read them."""
        arrays = self.arrays
        made = arrays.not_numbers((self.num_rows, *shape), dtype)
        if len(self.places):
            numbers = arrays.numbers(self._keys(what, *self.sources), int(np.prod(shape, dtype=np.int64)), dtype)
            arrays.scatter(arrays.rows(made), self.places, numbers)
        return made

    def _weights_of_rows(self) -> Any:
        return self._filled("sums_weights", self.weights_shape, "float32") if self.call.sums_weights else None

    def _biases(self) -> Any:
        shape = len(self.tokens), self.hidden
        biases = [self.arrays.typed(self._bias(i), self.call.combine_dtype, shape) for i in range(self.call.biases)]
        return {0: None, 1: biases[0] if biases else None, 2: biases}[self.call.biases]

    def _combine_check(self, back: CombineResult) -> Callable[[], None]:
        what = f"combine{self.layout} {self.number}" + (f" with compress={self.compress!r}" if self.compress else "")

        def run() -> None:
            biases = [self._bias(i) for i in range(self.call.biases)]
            self._compare(what, "x", back.x, self.hidden, self.call.combine_dtype, self._sums(biases))
            self._check_weights(back, what)

        return run

    def _sums(self, biases: list[Any]) -> Any:
        """Compute the sums of the combine, as unsigned integers."""
        raise NotImplementedError

    def _check_weights(self, back: CombineResult, what: str) -> None:
        raise NotImplementedError

    def _summed(self, width: int, dtype: str, row: Callable[[int, np.ndarray], Any], *how: Any) -> Any:
        config = self.session.buffer.config
        return summed(self.arrays, self.routing, config.node_size, width, dtype, row, *how)

    def _compare(self, what: str, name: str, got: Any, width: int, dtype: str, wanted: Any) -> None:
        """Compare an array with a row for each token of this rank."""
        at, shape = np.arange(len(self.tokens)), (len(self.tokens), width)
        cut = lambda part: wanted[part[0] : part[-1] + 1]  # noqa: E731
        self.check.rows(self.plan.number, what, name, got, shape, dtype, at, cut)

    # --- contents ----------------------------------------------------------------------------------------------------------------

    @property
    def _words_of_x(self) -> int:
        return self.hidden * DTYPES[self.call.dtype].itemsize // 4

    def _bias(self, number: int) -> Any:
        keys = self._keys(f"bias{number}", np.full(len(self.tokens), self.rank), self.tokens)
        return self.arrays.numbers(keys, self.hidden, self.call.combine_dtype)

    def _keys(self, what: str, *coordinates: np.ndarray) -> np.ndarray:
        return row_keys(self.keys[what], *coordinates)


class _ByToken(_Exchange):
    """Rows lie by token: a row for each token that has an expert of the rank."""

    def __init__(
        self, session: Session, plan: RoundPlan, call: Call, number: int, routing: Routing, handle: DispatchHandle | None
    ) -> None:
        super().__init__(session, plan, call, number, routing, handle)
        kept = routing.kept
        self.num_rows, self.places = routing.num_rows, np.arange(len(kept.token))
        self.sources, self.weights_shape = (np.full(len(kept.token), self.rank), *kept), (self.topk,)
        # The next call reads the handle, which may share memory with recv_src_idx.
        is_last = number + 1 == len(plan.calls)
        self.arrays_of_dispatch = (
            *("recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", *(["recv_src_idx"] if is_last else [])),
            *("num_recv_tokens", "num_recv_tokens_per_expert"),
        )

    def _check_rows(self, sent: DispatchResult, what: str) -> None:
        call, routing, check, arrays, made_in = self.call, self.routing, self.check, self.arrays, self.plan.number
        kept, num_rows = routing.kept, routing.num_rows

        def rows(name: str, key: str, got: Any, width: int, words: int, dtype: str) -> None:
            make = lambda keys: arrays.words(keys, words)  # noqa: E731
            note = lambda row: f"which is token {kept.token[row]} of rank {kept.source[row]}"  # noqa: E731
            check.rows(made_in, what, name, got, (num_rows, width), dtype, self._keys(key, *kept), make, note)

        rows("recv_x", "x", sent.recv_x, self.hidden, self._words_of_x, call.dtype)
        if call.scale_words:
            rows("recv_x_scales", "scales", sent.recv_x_scales, call.scale_words, call.scale_words, call.scale_dtype)
        else:
            check.value(made_in, what, "recv_x_scales", sent.recv_x_scales, None)
        check.value(made_in, what, "recv_src_idx.shape", tuple(sent.recv_src_idx.shape), (num_rows, 2))
        src_idx = np.stack(kept, axis=1).astype(np.int32)
        check.array(made_in, what, "recv_src_idx", sent.recv_src_idx[: len(src_idx)], src_idx)
        listed = self._counts.tolist() if self.plan.worst is None else None
        check.value(made_in, what, "num_recv_tokens_per_expert_list", sent.num_recv_tokens_per_expert_list, listed)
        check.value(made_in, what, "num_recv_rows", sent.handle.num_recv_rows, num_rows)

    @property
    def _counts(self) -> np.ndarray:
        return -(-self.routing.num_per_expert // self.plan.alignment) * self.plan.alignment

    def _small_arrays(self) -> dict[str, np.ndarray | None]:
        call, routing = self.call, self.routing
        return {
            "recv_topk_idx": routing.local_choices.astype(self.plan.idx_dtype) if call.has_idx else None,
            "recv_topk_weights": self._weights_here() if call.has_weights else None,
            "num_recv_tokens": np.array([routing.num_sent_here], np.int32),
            "num_recv_tokens_per_expert": self._counts.astype(np.int32),
        }

    def _weights_here(self) -> np.ndarray:
        """Compute `recv_topk_weights` on the host. Weights of other ranks' experts and of undefined rows are 0."""
        kept = self.routing.kept
        numbers = self.session.on_host.numbers(self._keys("weights", *kept), self.topk, "float32").view(np.float32)
        made = np.zeros((self.num_rows, self.topk), np.float32)
        made[: len(numbers)] = numbers
        made[self.routing.local_choices < 0] = 0
        return made

    def _rows_of(self, what: str, width: int, dtype: str) -> Callable[[int, np.ndarray], Any]:
        """Make the function that generates a rank's rows for tokens of this rank."""

        def row(peer: int, tokens: np.ndarray) -> Any:
            keys = self._keys(what, np.full(len(tokens), peer), np.full(len(tokens), self.rank), tokens)
            return self.arrays.numbers(keys, width, dtype)

        return row

    def _sums(self, biases: list[Any]) -> Any:
        dtype, path = self.call.combine_dtype, self.session.buffer.config.path
        return self._summed(self.hidden, dtype, self._rows_of("y", self.hidden, dtype), biases, self.compress, path)

    def _check_weights(self, back: CombineResult, what: str) -> None:
        if not self.call.sums_weights:
            self.check.value(self.plan.number, what, "topk_weights", back.topk_weights, None)
            return
        wanted = self._summed(self.topk, "float32", self._rows_of("sums_weights", self.topk, "float32"))
        self._compare(what, "topk_weights", back.topk_weights, self.topk, "float32", wanted)


class _ByExpert(_Exchange):
    """Rows lie by expert: a row for each choice of an expert of the rank, expert by expert. `received` has those of each rank.

    The rows by token of `routing` lie below them.
    """

    arrays_of_dispatch = ("recv_x", "recv_x_scales", "recv_topk_weights", "recv_src_idx", "recv_expert_idx", "expert_offsets")
    layout = " by expert"

    def __init__(
        self,
        session: Session,
        plan: RoundPlan,
        call: Call,
        number: int,
        routing: Routing,
        handle: DispatchHandle | None,
        received: list[Received],
    ) -> None:
        super().__init__(session, plan, call, number, routing, handle)
        self.received, self.here = received, received[self.rank]
        kept = self.here.kept
        self.num_rows, self.places = self.here.num_rows, kept.position
        self.sources, self.weights_shape = (kept.source, kept.token, kept.choice), ()

    def _layout_options(self) -> dict[str, Any]:
        more = {**super()._layout_options(), "zero_padding": self.call.zero_padding}
        if not self.call.is_repeat:
            more["layout"] = "expert"
        if self.call.scale_words and self.call.by_column:
            more["scales_layout"] = "column"
        return more

    def _check_rows(self, sent: DispatchResult, what: str) -> None:
        call, here, check, arrays, made_in = self.call, self.here, self.check, self.arrays, self.plan.number
        kept, num_rows = here.kept, here.num_rows
        is_padding = np.setdiff1d(np.arange(num_rows), kept.position)

        def rows(name: str, key: str, got: Any, words: int) -> None:
            check.value(made_in, what, f"{name}.shape[0]", got.shape[0], num_rows)
            if got.shape[0] != num_rows:
                return
            keys, make = self._keys(key, kept.source, kept.token), lambda keys: arrays.words(keys, words)
            check.raw_rows(made_in, what, name, arrays.rows(got), keys, make, at=kept.position)
            if call.zero_padding:
                zeros = lambda part: arrays.xp.zeros((len(part), words), np.uint32)  # noqa: E731
                note = lambda row: "which is padding"  # noqa: E731
                check.raw_rows(made_in, what, name, arrays.rows(got), is_padding, zeros, note, is_padding)

        rows("recv_x", "x", sent.recv_x, self._words_of_x)
        if call.scale_words:
            scales = sent.recv_x_scales
            rows("recv_x_scales", "scales", scales[:, :num_rows].T.copy() if call.by_column else scales, call.scale_words)
        else:
            check.value(made_in, what, "recv_x_scales", sent.recv_x_scales, None)
        listed = here.counts.tolist() if here.has_list else None
        check.value(made_in, what, "num_recv_tokens_per_expert_list", sent.num_recv_tokens_per_expert_list, listed)

    def _small_arrays(self) -> dict[str, np.ndarray | None]:
        here, kept, num_rows = self.here, self.here.kept, self.num_rows
        src_idx, experts = np.full((num_rows, 3), -1, np.int32), np.full(num_rows, -1, np.int32)
        src_idx[kept.position] = np.stack([kept.source, kept.token, kept.choice], axis=1)
        experts[kept.position] = kept.expert
        weights = None
        if self.call.has_weights:
            weights = np.zeros(num_rows, np.float32)
            numbers = self.session.on_host.numbers(self._keys("weights", kept.source, kept.token), self.topk, "float32")
            weights[kept.position] = numbers.view(np.float32)[np.arange(len(kept.choice)), kept.choice]
        return {
            "recv_topk_weights": weights,
            "recv_src_idx": src_idx,
            "recv_expert_idx": experts,
            "expert_offsets": np.minimum(here.all_offsets, num_rows).astype(np.int32),
            "num_recv_tokens": np.array([here.num_recv], np.int32),
            "num_recv_tokens_per_expert": here.counts.astype(np.int32),
        }

    @property
    def _is_weighted(self) -> bool:
        return self.call.sums_weights and self.call.is_weighted

    def _sum_options(self) -> dict[str, Any]:
        return {"weighted": self._is_weighted, "reduce": self.call.reduce}

    @cached_property
    def _has_row(self) -> list[np.ndarray]:
        """Which choices of this rank's tokens have a row at each rank."""
        return [received.has_row(self.rank) for received in self.received]

    def _sums(self, biases: list[Any]) -> Any:
        arrays, dtype, has_row = self.arrays, self.call.combine_dtype, self._has_row
        if self.call.reduce == "topk":
            total = self._added_up(self.tokens, np.any(has_row, axis=0))
            for bias in biases:
                total += arrays.to_float32(bias, dtype)
            return arrays.from_float32(total, dtype)

        def row(peer: int, tokens: np.ndarray) -> Any:
            return arrays.from_float32(self._added_up(tokens, has_row[peer][tokens]), dtype)

        return self._summed(self.hidden, dtype, row, biases, self.compress, self.session.buffer.config.path)

    def _check_weights(self, back: CombineResult, what: str) -> None:
        call, check, made_in = self.call, self.check, self.plan.number
        if not call.sums_weights or call.is_weighted:
            check.value(made_in, what, "topk_weights", back.topk_weights, None)
            return
        weights = np.zeros((len(self.tokens), self.topk), np.float32)
        token, choice = np.nonzero(np.any(self._has_row, axis=0))
        keys = self._keys("sums_weights", np.full(len(token), self.rank), token, choice)
        weights[token, choice] = self.session.on_host.numbers(keys, 1, "float32").view(np.float32)[:, 0]
        check.array(made_in, what, "topk_weights", back.topk_weights, weights)

    def _added_up(self, tokens: np.ndarray, is_added: np.ndarray) -> Any:
        """Add up the rows of some choices of this rank's tokens in float32, in the order of the choices."""
        arrays, xp, dtype = self.arrays, self.arrays.xp, self.call.combine_dtype
        total = xp.zeros((len(tokens), self.hidden), np.float32)
        for choice in range(self.topk):
            coordinates = np.full(len(tokens), self.rank), tokens, np.full(len(tokens), choice)
            term = arrays.to_float32(arrays.numbers(self._keys("y", *coordinates), self.hidden, dtype), dtype)
            if self._is_weighted:
                term = arrays.numbers(self._keys("sums_weights", *coordinates), 1, "float32").view(np.float32) * term
            total += xp.where(arrays.put(is_added[:, choice])[:, None], term, xp.float32(0))
        return total
