"""Scenarios: what each protects, in words, the inputs of all ranks, the calls of a rank, and a check of what they give.

`scenario_table` has the rows. Three executors run them: `tests/programs/table.py` on ranks under mpirun, `tests/gpu/test_same_checks.py`
the same program on GPUs, and `tests/kernels_on_cpu/rounds.py` kernels on the CPU, with all ranks in one process.

`oracle` and `low_latency_oracle` work out the results. Everything depends on the row alone, so each rank knows the inputs of all ranks.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import low_latency_oracle
import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 and float8)
import numpy as np
import oracle
from oracle import RankInputs

from deepep_rt import Buffer
from deepep_rt.config import Config

OVERWRITTEN = {
    "token": ("recv_src_idx", "num_recv_tokens_per_expert"),
    "expert": ("recv_src_idx", "recv_expert_idx", "expert_offsets", "num_recv_tokens", "num_recv_tokens_per_expert"),
}
Put = Callable[[np.ndarray], Any]
"""Returns an argument of a call for an array."""


@dataclass(frozen=True)
class Again:
    """A dispatch along the handle of the first one, with other rows. It sends `topk_idx` and the weights, or one of them, or none."""

    with_idx: bool = False
    with_weights: bool = False
    dtype: str = ""  # of x; "": that of the first dispatch
    scales: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sum:
    """A combine. In low-latency calls, `reduce="topk"` is `allow_multiple_reduction=False`."""

    dtype: str = ""  # of its rows; "": that of x
    weights: bool = False
    weighted: bool = False
    biases: int = 0
    reduce: str = "rank"
    compress: str | None = None
    values: str = "normal"  # of its rows: see `_values`
    named: str = ""  # the choices that a low-latency combine names: see `_named`


SUM = Sum()


@dataclass(frozen=True)
class Scenario:
    """Calls of all ranks: a dispatch, dispatches along its handle, and combines.

    Attributes:
        protects: What breaks if this fails.
        layout: Of `Buffer.dispatch`, or "low_latency".
        tokens: The tokens of a rank.
        topk, each, hidden: `num_topk`, the experts of a rank, and `hidden`.
        dtype, scales: Of x, and the float32 scales of its rows.
        drawn: More options of `oracle.make_inputs`.
        changed: Changes the inputs of a rank: (inputs, rank, number of ranks, experts of a rank).
        weights: Whether the dispatch sends the weights. Low-latency rounds dispatch once for each item of `early`.
        options: More options of the dispatch.
        worst: `num_worst_tokens` of a rank: (rank, rows that arrive, most rows of this Buffer).
        again, sums: The calls that follow. They take turns with the handles of the dispatches.
        overwrites: Whether the caller writes to the first result before the calls that follow, which must not change its handle.
        buffer: More settings of the Buffer, or a function of the number of ranks.
        early, hooks: Of low-latency calls: for each dispatch, whether it sends the weights; whether all calls return hooks.
        needs: The numbers of ranks that it can run on, besides those that have `topk` experts.
    """

    protects: str
    layout: str = "token"
    tokens: Callable[[int], int] = lambda rank: 5 + 3 * rank
    topk: int = 4
    each: int = 4
    hidden: int = 32
    dtype: str = "float32"
    scales: int = 0
    drawn: Mapping[str, Any] = field(default_factory=dict)
    changed: Callable[[RankInputs, int, int, int], None] | None = None
    weights: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    worst: Callable[[int, int, int], int] | None = None
    again: Sequence[Again] = ()
    sums: Sequence[Sum] = ()
    overwrites: bool = False
    buffer: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] = field(default_factory=dict)
    early: Sequence[bool] = (True, False)
    hooks: bool = False
    seed: int = 1
    needs: Callable[[int], bool] = lambda ranks: True

    @property
    def needs_fp8(self) -> bool:
        """Whether a GPU needs FP8 numbers for it."""
        return bool(self.options.get("use_fp8")) or any(one.compress for one in self.sums)

    def settings(self, num_ranks: int) -> dict[str, Any]:
        """Return the settings of its Buffer."""
        width = "bfloat16" if np.dtype(self.dtype).itemsize < 2 else self.dtype
        more = self.buffer(num_ranks) if callable(self.buffer) else self.buffer
        sizes = dict(hidden=self.hidden, num_topk=self.topk, num_experts=self.each * num_ranks, dtype=width)
        usual = dict(low_latency=True, num_max_tokens_per_rank=16) if self.layout == "low_latency" else {}
        return {**sizes, **usual, **more}

    def inputs(self, config: Config, *, seed: int | None = None, **options: Any) -> list[RankInputs]:
        """Make the inputs of all ranks for the Buffer of this configuration."""
        hidden = config.hidden // 2 if self.drawn.get("packed") else config.hidden
        drawn = {name: value for name, value in self.drawn.items() if name != "packed"}
        made = []
        for rank in range(config.num_ranks):
            sizes = self.tokens(rank), hidden, config.num_topk, config.num_experts
            kinds = {"dtype": self.dtype, "num_scales": self.scales, "num_ranks": config.num_ranks, **drawn, **options}
            one = oracle.make_inputs(self.seed if seed is None else seed, rank, *sizes, **kinds)
            if self.changed is not None:
                self.changed(one, rank, config.num_ranks, config.num_local_experts)
            made.append(one)
        return made

    def start(self, config: Config) -> Round:
        """Make the inputs of a run."""
        return LowLatencyRound(self, config) if self.layout == "low_latency" else ThroughputRound(self, config)


def by_buffer(rows: Iterable[Scenario], num_ranks: int) -> Iterator[tuple[dict[str, Any], list[Scenario]]]:
    """Yield the settings of each Buffer, and its rows: those that follow each other and need the same Buffer."""
    fitting = [row for row in rows if row.topk <= row.each * num_ranks and row.needs(num_ranks)]
    for settings, group in itertools.groupby(fitting, lambda row: row.settings(num_ranks)):
        yield settings, list(group)


class Round(ABC):
    """A run of a scenario. `call` makes the calls of a rank, and `check` compares what they have given it."""

    def __init__(self, row: Scenario, config: Config, inputs: list[RankInputs] | None = None) -> None:
        self.row, self.config = row, config
        self.inputs = inputs or row.inputs(config)
        self.sent: dict[int, Any] = {}
        self.back: dict[int, list[Any]] = {}
        self._kept: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` made for this key. Checks ask for the same expected results several times."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @abstractmethod
    def call(self, buffer: Buffer, rank: int, put: Put = np.asarray) -> None:
        """Make the calls of a rank. `put` turns arrays into those of the library that the caller uses."""

    @abstractmethod
    def check(self, rank: int) -> None:
        """Compare what a rank has got with the oracle, bit for bit."""


class ThroughputRound(Round):
    """A run with throughput calls."""

    def __init__(self, row: Scenario, config: Config) -> None:
        super().__init__(row, config)
        self.again: dict[int, list[Any]] = {}
        self.worst = [None if row.worst is None else row.worst(r, self._expected(r).num_recv, self._most) for r in self.ranks]
        self._is_host = False

    @property
    def ranks(self) -> range:
        return range(self.config.num_ranks)

    @property
    def _alignment(self) -> int:
        return self.row.options.get("expert_alignment", 1)

    @property
    def _most(self) -> int:
        if self.row.layout == "token":
            return self.config.num_max_recv_tokens
        return self.config.num_max_recv_tokens * self.config.num_topk + self.config.num_local_experts * (self._alignment - 1)

    def inputs_of(self, call: int) -> list[RankInputs]:
        """Return the inputs of the first dispatch, or of the dispatch `again[call - 1]`, which keeps the routing."""
        if call == 0:
            return self.inputs

        def make() -> list[RankInputs]:
            how = self.row.again[call - 1]
            kinds = dict(dtype=how.dtype or self.row.dtype, num_scales=self.row.scales if how.scales is None else how.scales)
            fresh = self.row.inputs(self.config, seed=self.row.seed + 1000 * call, **kinds)
            for old, new in zip(self.inputs, fresh, strict=True):
                new.topk_idx = old.topk_idx
            return fresh

        return self.kept(("inputs", call), make)

    def _expected(self, rank: int, call: int = 0, worst: int | None = None) -> Any:
        def make() -> Any:
            options = self.row.options if call == 0 else self.row.again[call - 1].options
            given = [_sent_as(one, options) for one in self.inputs_of(call)]
            work_out = oracle.expected_dispatch if self.row.layout == "token" else oracle.expected_expert_rows
            expected = work_out(rank, given, self.config.num_experts, num_worst_tokens=worst, expert_alignment=self._alignment)
            has_weights = self.row.weights if call == 0 else self.row.again[call - 1].with_weights
            return expected if has_weights else replace(expected, **{_weights_of(expected): None})

        return self.kept(("expected", rank, call, worst), make)

    def expected(self, rank: int, call: int = 0) -> Any:
        """Work out what a dispatch gives a rank."""
        return self._expected(rank, call, self.worst[rank])

    def values(self, number: int) -> tuple[list[np.ndarray], list[np.ndarray] | None, list[list[np.ndarray]]]:
        """Return the rows, weights and biases of all ranks of the combine `sums[number]`."""

        def make() -> Any:
            how, row = self.row.sums[number], self.row
            y, weights, biases = [], [], []
            for rank in self.ranks:
                rng, expected = np.random.default_rng([row.seed, number, rank, 7]), self.expected(rank)
                shape, dtype = (len(expected.x), self.config.hidden), how.dtype or row.dtype
                rows = _values(how.values, rng, shape).astype(dtype)
                if row.layout == "expert":
                    rows[expected.experts < 0] = np.nan  # combine must not read padding
                y.append(rows)
                kinds = "ordered" if how.values == "ordered" else "normal"
                weights.append(_values(kinds, rng, (shape[0], self.config.num_topk) if row.layout == "token" else shape[:1]))
                mine = len(self.inputs[rank].topk_idx), self.config.hidden
                rng = np.random.default_rng([row.seed, rank, 8])  # the biases of all sums are the same
                biases.append([_values(how.values, rng, mine).astype(dtype) for _ in range(how.biases)])
            return y, weights if how.weights else None, biases

        return self.kept(("values", number), make)

    def call(self, buffer: Buffer, rank: int, put: Put = np.asarray) -> None:
        row, mine = self.row, self.inputs[rank]
        self._is_host = buffer.backend == "host"
        worst = {} if self.worst[rank] is None else dict(num_worst_tokens=self.worst[rank])

        def dispatch(one: RankInputs, with_idx: bool, with_weights: bool, **how: Any) -> Any:
            given = {"topk_idx": one.topk_idx if with_idx else None, "topk_weights": one.topk_weights if with_weights else None}
            arrays = {**given, "x_scales": one.scales}
            arrays = {name: put(array) for name, array in arrays.items() if array is not None}
            return buffer.dispatch(put(one.x), **arrays, **how)

        layout = {} if row.layout == "token" else dict(layout=row.layout)
        sent = self.sent[rank] = dispatch(mine, True, row.weights, **worst, **layout, **row.options)
        handles, self.again[rank], self.back[rank] = [sent.handle], [], []
        if row.overwrites:
            self.check_dispatches(rank)
            for name in OVERWRITTEN[row.layout]:
                getattr(sent, name)[:] = 77
        for call, how in enumerate(row.again, 1):
            one, named = self.inputs_of(call)[rank], worst if how.with_weights else {}
            options = {"handle": handles[-1], **named, **how.options}
            self.again[rank].append(dispatch(one, how.with_idx, how.with_weights, **options))
            handles.append(self.again[rank][-1].handle)
        for number, how in enumerate(row.sums):
            y, weights, biases = self.values(number)
            bias = tuple(put(one) for one in biases[rank])
            options = {} if how.compress is None else dict(compress=how.compress)
            options |= dict(weighted=how.weighted, reduce=how.reduce) if row.layout == "expert" else {}
            given = None if weights is None else put(weights[rank])
            handle = handles[number % len(handles)]
            bias = bias[0] if len(bias) == 1 else bias or None
            self.back[rank].append(buffer.combine(put(y[rank]), handle, topk_weights=given, bias=bias, **options))

    def check(self, rank: int) -> None:
        self.check_dispatches(rank)
        for number, got in enumerate(self.back[rank]):
            _label(f"combine {number}, {self.row.sums[number]}", self.check_sum, rank, number, got)

    def check_dispatches(self, rank: int) -> None:
        sent = self.sent[rank]
        assert sent.handle.num_tokens == len(self.inputs[rank].x)
        assert sent.views["x"].ptr % 64 == 0, "not aligned for JAX"
        assert sent.recv_x is sent.recv_x
        for call, got in enumerate([sent, *self.again[rank]]):
            if call or not (self.row.overwrites and self.again[rank]):
                _label(f"dispatch {call}", self.check_rows, rank, call, got)

    def check_rows(self, rank: int, call: int, got: Any) -> None:
        """Compare the result of the first dispatch, or of `again[call - 1]`."""
        expected, how = self.expected(rank, call), self.row if call == 0 else self.row.again[call - 1]
        options, with_idx = how.options, call == 0 or how.with_idx
        has_counts = self.row.worst is None
        if self.row.layout == "token":
            oracle.check_dispatch(got, expected, has_counts=has_counts, with_idx=with_idx)
            assert not self._is_host or not got.recv_x[expected.num_kept :].view(np.uint8).any(), "padding is not zero"
        else:
            by_column, with_padding = options.get("scales_layout") == "column", options.get("zero_padding", False)
            oracle.check_expert_rows(got, expected, has_counts=has_counts, by_column=by_column, with_padding=with_padding)

    def check_sum(self, rank: int, number: int, got: Any) -> None:
        """Compare the result of `sums[number]`."""
        x, weights = self.wanted_sum(rank, number)
        oracle.same_bits("x", got.x, x)
        if weights is None:
            assert got.topk_weights is None
        else:
            oracle.same_bits("topk_weights", got.topk_weights, weights)

    def wanted_sum(self, rank: int, number: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Work out the sums and weights of `sums[number]`."""
        how, config, inputs, experts = self.row.sums[number], self.config, self.inputs, self.config.num_experts
        y, weights, biases = self.values(number)
        given = dict(compress=how.compress, biases=biases[rank], node_size=config.node_size, path=config.path)
        if self.row.layout == "token":
            return oracle.expected_sums(rank, inputs, y, experts, all_worst=self.worst, all_weights=weights, **given)
        received = [self.expected(r) for r in self.ranks]
        if weights is not None:
            received = [replace(one, weights=mine) for one, mine in zip(received, weights, strict=True)]
        back = None if weights is None or how.weighted else oracle.returned_weights(rank, inputs, received)
        if how.reduce == "topk":
            return oracle.expected_choice_sums(rank, inputs, y, received, weighted=how.weighted, biases=biases[rank]), back
        factors = [one.weights if how.weighted else None for one in received]
        by_token = [oracle.rows_by_token(r, inputs, experts, y[r], received[r], weights=factors[r]) for r in self.ranks]
        return oracle.expected_sums(rank, inputs, by_token, experts, **given)[0], back


class LowLatencyRound(Round):
    """A run with low-latency calls: `call` makes them one after another, and its four parts may lie apart."""

    def call(self, buffer: Buffer, rank: int, put: Put = np.asarray) -> None:
        self.dispatch(buffer, rank, put)
        self.receive(rank)
        self.combine(buffer, rank, put)
        self.finish(rank)

    def send(self, buffer: Buffer, rank: int, put: Put = np.asarray, *, early: bool = True, **options: Any) -> Any:
        """Make a dispatch. `early`: with the weights."""
        mine = self.inputs[rank]
        weights = put(mine.topk_weights) if early else None
        scales = {} if mine.scales is None else dict(x_scales=put(mine.scales))
        return buffer.low_latency_dispatch(
            put(mine.x), put(mine.topk_idx), topk_weights=weights, **{**scales, **self.row.options, **options}
        )

    def send_back(self, buffer: Buffer, rank: int, sent: Any, how: Sum = SUM, put: Put = np.asarray, **options: Any) -> Any:
        """Make the combine that follows a dispatch."""
        mine, named = self.inputs[rank], self._named(rank, how)
        idx = mine.topk_idx if named is None else np.where(named, mine.topk_idx, -1)
        options = dict(allow_multiple_reduction=how.reduce == "rank", compress=how.compress, **options)
        y = put(self.outputs(how)[rank])
        return buffer.low_latency_combine(y, put(idx), put(mine.topk_weights), sent.handle, **options)

    def dispatch(self, buffer: Buffer, rank: int, put: Put = np.asarray) -> None:
        self.sent[rank] = [self.send(buffer, rank, put, early=early, return_recv_hook=self.row.hooks) for early in self.row.early]

    def receive(self, rank: int) -> None:
        _call_hooks(self.sent[rank], self.row.hooks)

    def combine(self, buffer: Buffer, rank: int, put: Put = np.asarray) -> None:
        self.back[rank] = []
        for how, sent in itertools.product(self.row.sums, self.sent[rank]):
            self.back[rank].append(self.send_back(buffer, rank, sent, how, put, return_recv_hook=self.row.hooks))
            if self.row.hooks and len(self.row.sums) * len(self.row.early) > 1:
                self.back[rank][-1].hook()  # there is memory for few open hooks

    def finish(self, rank: int) -> None:
        _call_hooks(self.back[rank], self.row.hooks and len(self.row.sums) * len(self.row.early) == 1)

    def outputs(self, how: Sum) -> list[np.ndarray]:
        """Return the outputs of each rank's experts."""
        most = self.row.options.get("num_max_tokens", self.config.num_max_tokens_per_rank)
        shape = self.config.num_local_experts, self.config.num_ranks * most, self.config.hidden
        constant = {"ones": 1.0, "negative zeros": -0.0}.get(how.values)
        if constant is not None:
            return [np.full(shape, constant, "bfloat16")] * self.config.num_ranks
        special = how.values == "special"
        ranks = range(self.config.num_ranks)
        return self.kept(
            ("y", special), lambda: [low_latency_oracle.outputs(self.row.seed, r, shape, special=special) for r in ranks]
        )

    def _named(self, rank: int, how: Sum) -> np.ndarray | None:
        """Return which choices combine names, `[num_tokens, num_topk]` bool."""
        if not how.named:
            return None
        rng, idx = np.random.default_rng([self.row.seed, rank, 5]), self.inputs[rank].topk_idx
        if how.named == "some choices":
            return rng.random(idx.shape) < 0.5
        kept = rng.random((len(idx), self.config.num_ranks)) < {"some ranks": 0.5, "no rank": 0.0}[how.named]
        owner = idx // self.config.num_local_experts
        return (owner >= 0) & np.take_along_axis(kept, np.maximum(owner, 0), 1)

    def check(self, rank: int, live: Any = None, answering: Any = None) -> None:
        """`live`, `answering`: as in the oracle."""
        for (how, _), got in zip(itertools.product(self.row.sums, self.sent[rank]), self.back[rank], strict=True):
            assert self.row.hooks or got.hook is None
            _label(f"{how}", self.check_sum, rank, got, how, live, answering)
        self.check_dispatches(rank, live)

    def check_sum(self, rank: int, got: Any, how: Sum = SUM, live: Any = None, answering: Any = None) -> None:
        """Compare the result of a combine."""
        named, experts = self._named(rank, how), self.config.num_experts
        shares = dict(reduce_early=how.reduce == "rank", live=live, answering=answering, named=named, compress=how.compress)
        oracle.same_bits("x", got.x, low_latency_oracle.expected_combine(rank, self.inputs, self.outputs(how), experts, **shares))

    def check_dispatches(self, rank: int, live: Any = None) -> None:
        for sent in self.sent[rank]:
            assert self.row.hooks or sent.hook is None
            assert sent.handle.num_tokens == len(self.inputs[rank].x)
            self.check_dispatch(rank, sent, live)

    def check_dispatch(self, rank: int, sent: Any, live: Any = None, **options: Any) -> None:
        """Compare the result of a dispatch."""
        names = {"use_fp8": "fp8", "use_ue8m0": "ue8m0", "round_scale": "round_scale"}
        kinds = {names[name]: value for name, value in {**self.row.options, **options}.items() if name in names}
        key = "arrived", rank, tuple(live or ()), tuple(kinds.items())
        wanted = self.kept(
            key, lambda: low_latency_oracle.expected_dispatch(rank, self.inputs, self.config.num_experts, live=live, **kinds)
        )
        low_latency_oracle.check_dispatch(sent, wanted)


def _call_hooks(results: Sequence[Any], hooks: bool) -> None:
    for result in results if hooks else ():
        result.hook()


def _label(words: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from error


def _weights_of(expected: Any) -> str:
    return "topk_weights" if isinstance(expected, oracle.Received) else "weights"


def _sent_as(one: RankInputs, options: Mapping[str, Any]) -> RankInputs:
    """Return inputs as a dispatch with these options sends them."""
    if not options.get("use_fp8"):
        return one
    codes, scales = low_latency_oracle.to_fp8(one.x, options.get("round_scale") or options.get("use_ue8m0", False))
    return replace(one, x=codes, scales=low_latency_oracle.to_ue8m0(scales) if options.get("use_ue8m0") else scales)


_TIES = (
    1.0,
    -1.0,
    1 + 2.0**-7,
    2.0**-8,
    -(2.0**-8),
    2.0**-9,
    2.0**-8 + 2.0**-12,
    3.3895e38,
    9.2e-41,
    np.inf,
    -np.inf,
    np.nan,
    -0.0,
)
_ORDERED = (1.0, 1e8, -1e8, 3.0, 1e-3, 2e8, -2e8, 7.0)


def _values(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw float32: "normal", "integers", "ordered" (sums depend on the order of terms), "ties" (of bfloat16, and special numbers), or
    "odd" (also zeros with a sign, subnormal numbers and infinities).
    """
    if kind == "integers":
        return rng.integers(-8, 9, shape).astype(np.float32)
    if kind == "odd":
        factors = rng.choice([1, 1, 1, 1, -0.0, 1e-39, 1e-6, np.inf], shape, p=[0.15] * 6 + [0.09, 0.01])
        return (rng.standard_normal(shape) * factors).astype(np.float32)
    listed = {"ordered": _ORDERED, "ties": _TIES}.get(kind)
    return rng.standard_normal(shape, np.float32) if listed is None else rng.choice(np.array(listed, np.float32), shape)
