"""The low-latency calls: every bit of what arrives and comes back, hooks, counters, and wrong calls."""

from __future__ import annotations

from typing import Any

import low_latency_oracle
import numpy as np
import oracle
import spmd
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, raises, same_bits

from deepep_rt import Buffer, EPDestroyedError, EPInputError

HIDDEN, NUM_TOPK, MAX_TOKENS = 256, 4, 16
FORMATS = (
    dict(use_fp8=False),
    dict(use_fp8=True),
    dict(use_fp8=True, round_scale=True),
    dict(use_fp8=True, use_ue8m0=True),
    dict(use_fp8=True, round_scale=True, use_ue8m0=True),
)
NUM_ROUNDS = 40


def _buffer(comm: MPI.Intracomm, **settings: Any) -> Buffer:
    defaults = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_max_tokens_per_rank=MAX_TOKENS, num_experts=4 * comm.Get_size())
    return make_buffer(comm, dtype="bfloat16", **{"low_latency": True, **defaults, **settings})


def _tokens(rank: int) -> int:
    return (5, 0, 16, 3)[rank % 4]


def _inputs(comm: MPI.Intracomm, seed: int, num_tokens=_tokens, **settings: Any) -> list[oracle.RankInputs]:
    defaults = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=4 * comm.Get_size(), dtype="bfloat16", skip_probability=0.2)
    return inputs_of_all(comm, seed, num_tokens, **{**defaults, **settings})


def _outputs(buffer: Buffer, seed: int, **settings: Any) -> list[np.ndarray]:
    """What each rank's experts are taken to have computed."""
    c = buffer.config
    shape = (c.num_local_experts, c.num_max_recv_tokens, c.hidden)
    return [low_latency_oracle.outputs(seed, rank, shape, **settings) for rank in range(c.num_ranks)]


def _arrived(buffer: Buffer, rank: int, inputs: list[oracle.RankInputs], options: dict[str, bool]) -> low_latency_oracle.Arrived:
    renamed = {{"use_fp8": "fp8", "use_ue8m0": "ue8m0"}.get(name, name): value for name, value in options.items()}
    return low_latency_oracle.expected_dispatch(rank, inputs, buffer.config.num_experts, **renamed)


def _check_same(what: str, got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == wanted.dtype, (what, got.dtype)
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    bad = np.argwhere(np.ascontiguousarray(got).view(np.uint16) != wanted.view(np.uint16))
    assert not len(bad), f"{what}: {len(bad)} differ, first at {bad[0]}: {got[tuple(bad[0])]} != {wanted[tuple(bad[0])]}"


def _check_round(comm: MPI.Intracomm, buffer: Buffer, inputs: list[oracle.RankInputs], seed: int, **options: Any) -> None:
    """Dispatch, and combine in both ways, with weights known early and late."""
    rank = comm.Get_rank()
    mine, y = inputs[rank], _outputs(buffer, seed, special=bool(seed % 2))
    options = options or dict(use_fp8=False)
    expected = _arrived(buffer, rank, inputs, options)
    sent = [
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=weights, **options)
        for weights in (mine.topk_weights, None)
    ]
    for reduce_early in (True, False):
        wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=reduce_early)
        for result in sent:
            back = buffer.low_latency_combine(
                y[rank], mine.topk_idx, mine.topk_weights, result.handle, allow_multiple_reduction=reduce_early
            )
            assert back.hook is None
            _check_same(f"combine, reduce_early={reduce_early}, has_weights={result.handle.has_weights}", back.x, wanted)
    for result in sent:
        assert result.hook is None
        assert result.handle.num_tokens == len(mine.x)
        low_latency_oracle.check_dispatch(result, expected)


def _here(array: np.ndarray) -> Any:
    """An array that the backend can write to: calls refuse host memory for that on GPUs."""
    if spmd.backend == "host":
        return array.copy()
    import cupy

    return cupy.asarray(array.view(np.uint8)).view(array.dtype)


def _home(array: Any) -> np.ndarray:
    return array.view(np.uint8).get().view(np.dtype(array.dtype.name)) if hasattr(array, "get") else array


def check_every_format(comm: MPI.Intracomm) -> None:
    with _buffer(comm) as buffer:
        for seed, options in enumerate(FORMATS):
            _check_round(comm, buffer, _inputs(comm, seed), seed, **options)


def check_index_types_and_patterns(comm: MPI.Intracomm) -> None:
    with _buffer(comm) as buffer:
        for seed, (idx_dtype, pattern) in enumerate((t, p) for t in ("int32", "int64") for p in ("random", "one_rank", "skewed")):
            _check_round(comm, buffer, _inputs(comm, seed, idx_dtype=idx_dtype, pattern=pattern, skip_probability=0), seed)


def check_no_tokens(comm: MPI.Intracomm) -> None:
    last = comm.Get_size() - 1
    with _buffer(comm) as buffer:
        for num_tokens in (lambda rank: 0, lambda rank: 7 * (rank == 0), lambda rank: 16 * (rank == last)):
            _check_round(comm, buffer, _inputs(comm, 3, num_tokens), 3, use_fp8=True)
            _check_round(comm, buffer, _inputs(comm, 4, num_tokens, pattern="one_rank"), 4)
        _check_round(comm, buffer, _inputs(comm, 5, skip_probability=1.0), 5, use_fp8=True)


def check_full_batches_to_one_rank(comm: MPI.Intracomm) -> None:
    """One expert gets as many tokens as it has rows."""
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 6, lambda rank: MAX_TOKENS, pattern="one_rank", skip_probability=0)
        for one in inputs:
            one.topk_idx[:, 1:] = -1
            one.topk_idx[:, 0] = buffer.config.num_experts - 1
        _check_round(comm, buffer, inputs, 6, use_fp8=True)


def check_an_expert_chosen_twice(comm: MPI.Intracomm) -> None:
    experts, room = 4 * comm.Get_size(), MAX_TOKENS
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 7, lambda rank: room // 2, skip_probability=0)
        for one in inputs:
            one.topk_idx[:, 2] = one.topk_idx[:, 0] = np.arange(room // 2) % experts
        _check_round(comm, buffer, inputs, 7, use_fp8=True)
        _check_round(comm, buffer, inputs, 8)


def check_one_choice_and_one_expert_each(comm: MPI.Intracomm) -> None:
    ranks = comm.Get_size()
    with _buffer(comm, num_topk=1, num_experts=ranks) as buffer:
        _check_round(comm, buffer, _inputs(comm, 8, num_topk=1, num_experts=ranks), 8, use_fp8=True)


def check_rows_that_are_no_multiple_of_a_group(comm: MPI.Intracomm) -> None:
    with _buffer(comm, hidden=24) as buffer:
        _check_round(comm, buffer, _inputs(comm, 9, hidden=24), 9)
        mine = _inputs(comm, 9, hidden=24)[comm.Get_rank()]
        with raises(EPInputError, "hidden=24", "128", "use_fp8=False"):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx)


def check_special_numbers_in_fp8(comm: MPI.Intracomm) -> None:
    """Zeros, infinities, NaN and the smallest numbers; groups of very different sizes."""
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 10, lambda rank: 12)
        for rank, one in enumerate(inputs):
            rng = np.random.default_rng([10, rank])
            one.x[:] = (one.x.astype(np.float32) * np.exp2(rng.integers(-100, 100, (12, 1)))).astype(one.x.dtype)
            one.x[0] = 0
            one.x[1, :3] = np.nan, 1, -np.nan
            one.x[2, 130:132] = np.inf, -np.inf
            one.x[3, :128] = np.nan
            one.x.view(np.uint16)[4] = rng.integers(0, 1 << 16, HIDDEN)
            one.x.view(np.uint16)[5] = rng.integers(0, 1 << 7, HIDDEN)  # subnormal
            one.x[6, ::2] = -0.0
        for options in FORMATS[1:4]:
            _check_round(comm, buffer, inputs, 11, **options)


def check_sums_have_an_order(comm: MPI.Intracomm) -> None:
    """Terms whose float32 sum depends on their order, and sums of negative zeros, which are positive."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 12, lambda rank: 8, skip_probability=0)
        terms = np.array([1.0, 1e8, -1e8, 3.0, 2e8, -2e8, 0.01], np.float32)
        for one in inputs:
            one.topk_weights[:] = np.random.default_rng(12).choice(terms, one.topk_weights.shape)
        y = [np.ones_like(a) for a in _outputs(buffer, 12)]
        zeros = [np.full_like(a, -0.0) for a in y]
        mine = inputs[rank]
        handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        for reduce_early in (True, False):
            for given in (y, zeros):
                wanted = low_latency_oracle.expected_combine(rank, inputs, given, 4 * ranks, reduce_early=reduce_early)
                back = buffer.low_latency_combine(
                    given[rank], mine.topk_idx, mine.topk_weights, handle, allow_multiple_reduction=reduce_early
                )
                _check_same("x", back.x, wanted)


def check_out(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs, y = _inputs(comm, 13), _outputs(buffer, 13)
        mine = inputs[rank]
        handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=True)
        out = _here(np.full_like(mine.x, 7))
        back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, handle, out=out)
        _check_same("out", _home(out), wanted)
        _check_same("x", _home(back.x), wanted)
        out = _here(np.full_like(mine.x, 7))
        back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, handle, out=out, return_recv_hook=True)
        assert (_home(out) == 7).all(), "written before the hook"
        back.hook()
        _check_same("out", _home(out), wanted)


def check_zero_copy(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        config = buffer.config
        for seed in (14, 15):
            inputs, outputs = _inputs(comm, seed), _outputs(buffer, seed)
            mine = inputs[rank]
            handle = buffer.low_latency_dispatch(_here(mine.x), mine.topk_idx, use_fp8=False).handle
            y = buffer.get_low_latency_combine_buffer(handle)
            assert tuple(y.shape) == (config.num_local_experts, config.num_max_recv_tokens, HIDDEN)
            y.view(np.uint8)[...] = _here(outputs[rank].view(np.uint8))
            for reduce_early in (True, False):
                back = buffer.low_latency_combine(
                    y, mine.topk_idx, mine.topk_weights, handle, zero_copy=True, allow_multiple_reduction=reduce_early
                )
                wanted = low_latency_oracle.expected_combine(rank, inputs, outputs, config.num_experts, reduce_early=reduce_early)
                _check_same("x", _home(back.x), wanted)
            with raises(EPInputError, "zero_copy", "get_low_latency_combine_buffer"):
                buffer.low_latency_combine(outputs[rank], mine.topk_idx, mine.topk_weights, handle, zero_copy=True)


def check_counters(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 16)
        mine = inputs[rank]
        counts = np.array([len(found) for found in _arrived(buffer, rank, inputs, {}).entries])
        stats = _here(np.full(buffer.config.num_local_experts, 100, np.int32))
        waits = _here(np.zeros(ranks, np.int64))
        counters = dict(cumulative_local_expert_recv_stats=stats, wait_recv_cost_stats=waits, use_fp8=False)
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, **counters)
        buffer.synchronize()
        assert (_home(stats) == 100 + counts).all()
        first = _home(waits).copy()
        others = np.arange(ranks) != rank
        assert (first[others] >= (spmd.backend == "host")).all(), first  # on a GPU a row may be there before anybody waits
        assert (first < 60e9).all(), first
        sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, return_recv_hook=True, **counters)
        sent.hook()
        buffer.synchronize()
        assert (_home(stats) == 100 + 2 * counts).all()
        assert (_home(waits) >= first).all()


def check_hooks(comm: MPI.Intracomm) -> None:
    """Two calls of each kind in flight; what arrives is that of the own call, whatever was called in between."""
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        batches = [_inputs(comm, seed) for seed in (17, 18)]
        for options in FORMATS[:2]:
            sent = [
                buffer.low_latency_dispatch(
                    inputs[rank].x, inputs[rank].topk_idx, topk_weights=weights, return_recv_hook=True, **options
                )
                for inputs, weights in zip(batches, (batches[0][rank].topk_weights, None), strict=True)
            ]
            for result, inputs in zip(sent, batches, strict=True):
                result.hook()
                low_latency_oracle.check_dispatch(result, _arrived(buffer, rank, inputs, options))
            for reduce_early in (True, False):
                y = [_outputs(buffer, seed) for seed in (17, 18)]
                back = [
                    buffer.low_latency_combine(
                        given[rank],
                        inputs[rank].topk_idx,
                        inputs[rank].topk_weights,
                        result.handle,
                        allow_multiple_reduction=reduce_early,
                        return_recv_hook=True,
                    )
                    for given, inputs, result in zip(y, batches, sent, strict=True)
                ]
                for result in back:
                    result.hook()
                for result, inputs, given in zip(back, batches, y, strict=True):
                    wanted = low_latency_oracle.expected_combine(
                        rank, inputs, given, buffer.config.num_experts, reduce_early=reduce_early
                    )
                    _check_same("x", result.x, wanted)


def check_hooks_that_were_lost(comm: MPI.Intracomm) -> None:
    """An exception took rank 0 past its hook, and nobody can call it any more: the next call does, or a later hook."""
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 1)
        mine, y = inputs[rank], _outputs(buffer, 1)
        given = mine.x, mine.topk_idx
        for seed in range(3):
            sent = buffer.low_latency_dispatch(*given, use_fp8=False, return_recv_hook=True)
            if rank:
                sent.hook()
            del sent
            _check_round(comm, buffer, inputs, seed)
        sent = buffer.low_latency_dispatch(*given, topk_weights=mine.topk_weights, use_fp8=False)
        hooks = [
            buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, sent.handle, return_recv_hook=True).hook
            for _ in range(2)
        ]
        if rank:
            hooks[0]()
        del hooks[0]
        hooks[0]()
        _check_round(comm, buffer, inputs, 3)


def check_an_interrupted_low_latency_call(comm: MPI.Intracomm) -> None:
    """Host only: rank 0 is thrown out before its rows come, and nobody waits for it. The next call takes neither it nor its rows for its
    own, so that the Buffer stays usable.
    """
    if spmd.backend != "host":
        return

    def fail(*_: Any) -> None:
        raise InterruptedError("between notices and rows")

    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 4, lambda rank: 3 if rank else 0)  # so few rows that MPI takes them at once
        for one in inputs:
            one.topk_idx[:] = np.arange(NUM_TOPK)  # experts of rank 0
        given = inputs[rank].x, inputs[rank].topk_idx
        if rank == 0:
            buffer._backend._channel.exchange_rows = fail
            with raises(InterruptedError):
                buffer.low_latency_dispatch(*given, use_fp8=False)
            del buffer._backend._channel.exchange_rows
        else:
            buffer.low_latency_dispatch(*given, use_fp8=False)
        _check_round(comm, buffer, _inputs(comm, 5), 5)


def check_hooks_have_an_order(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        inputs, y = _inputs(comm, 19), _outputs(buffer, 19)
        mine = inputs[rank]

        def dispatch(hook: bool) -> Any:
            return buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False, return_recv_hook=hook)

        def combine(sent: Any, hook: bool) -> Any:
            return buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, sent.handle, return_recv_hook=hook)

        wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=True)
        for _ in range(2):
            first, second = dispatch(True), dispatch(True)
            with raises(EPInputError, "2 open hooks", "num_slots=2"):
                dispatch(True)
            with raises(EPInputError, "low_latency_dispatch", "hooks are open"):
                dispatch(False)
            with raises(EPInputError, "order"):
                second.hook()
            with raises(EPInputError, "handle", "hook", "not called yet"):
                combine(first, False)
            first.hook()
            with raises(EPInputError, "called already"):
                first.hook()
            one = combine(first, True)  # hooks of combine are counted by themselves
            third = dispatch(True)
            two = combine(first, True)
            with raises(EPInputError, "low_latency_combine", "2 open hooks"):
                combine(first, True)
            with raises(EPInputError, "low_latency_combine", "hooks are open"):
                combine(first, False)
            with raises(EPInputError, "order"):
                two.hook()
            one.hook()
            two.hook()
            with raises(EPInputError, "order"):
                third.hook()
            second.hook()
            third.hook()
            for result in (first, second, third):
                low_latency_oracle.check_dispatch(result, _arrived(buffer, rank, inputs, {}))
                _check_same("x", combine(result, False).x, wanted)
            _check_same("x", one.x, wanted)
            _check_same("x", two.x, wanted)
            _check_round(comm, buffer, inputs, 19)


def check_more_slots(comm: MPI.Intracomm) -> None:
    rank = comm.Get_rank()
    for num_slots in (1, 3):
        with _buffer(comm, num_slots=num_slots) as buffer:
            batches = [_inputs(comm, 20 + number) for number in range(num_slots)]
            options = dict(use_fp8=False, return_recv_hook=True)
            sent = [buffer.low_latency_dispatch(b[rank].x, b[rank].topk_idx, **options) for b in batches]
            with raises(EPInputError, "open hooks", f"num_slots={num_slots}"):
                buffer.low_latency_dispatch(batches[0][rank].x, batches[0][rank].topk_idx, **options)
            for result in sent:
                result.hook()
            for result, inputs in zip(sent, batches, strict=True):
                low_latency_oracle.check_dispatch(result, _arrived(buffer, rank, inputs, {}))


def check_beside_throughput_calls(comm: MPI.Intracomm) -> None:
    """Both kinds of calls on one Buffer, also between a call and its hook."""
    rank = comm.Get_rank()
    with _buffer(comm) as buffer:
        experts = buffer.config.num_experts
        for seed in range(30, 33):
            inputs, others = _inputs(comm, seed), _inputs(comm, seed + 10)
            mine, other = inputs[rank], others[rank]
            y = _outputs(buffer, seed)
            before = buffer.dispatch(other.x, other.topk_idx, other.topk_weights)
            sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False, return_recv_hook=True)
            between = buffer.dispatch(other.x, other.topk_idx, other.topk_weights)
            sent.hook()
            back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, sent.handle, return_recv_hook=True)
            summed = [buffer.combine(result.recv_x, result.handle).x for result in (before, between)]
            back.hook()
            low_latency_oracle.check_dispatch(sent, _arrived(buffer, rank, inputs, {}))
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=True)
            _check_same("x", back.x, wanted)
            expected = oracle.expected_dispatch(rank, others, experts)
            for result in (before, between):
                oracle.check_dispatch(result, expected)
            assert same_bits(*summed)
            with raises(EPInputError, "LowLatencyHandle", "DispatchResult"):
                buffer.combine(before.recv_x, sent.handle)
            with raises(EPInputError, "DispatchHandle", "LowLatencyDispatchResult"):
                buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, before.handle)


def check_random_rounds(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    held: list[tuple[Any, low_latency_oracle.Arrived]] = []
    with _buffer(comm) as buffer:
        for number in range(NUM_ROUNDS):
            rng = np.random.default_rng([21, number])  # the same on all ranks: they make the same choices
            sizes = rng.integers(0, MAX_TOKENS + 1 if number % 7 else 1, ranks)
            inputs = _inputs(
                comm,
                2000 + number,
                lambda r, sizes=sizes: int(sizes[r]),
                skip_probability=float(rng.choice([0.0, 0.3, 0.9])),
                pattern=str(rng.choice(["random", "one_rank", "skewed"])),
                idx_dtype=str(rng.choice(["int32", "int64"])),
            )
            options = FORMATS[int(rng.integers(0, len(FORMATS)))]
            early, with_hook, reduce_early = (bool(rng.integers(0, 2)) for _ in range(3))
            mine, y = inputs[rank], _outputs(buffer, number, special=bool(rng.integers(0, 2)))
            sent = buffer.low_latency_dispatch(
                mine.x,
                mine.topk_idx,
                topk_weights=mine.topk_weights if early else None,
                return_recv_hook=with_hook,
                **options,
            )
            if with_hook:
                sent.hook()
            held.append((sent, _arrived(buffer, rank, inputs, options)))
            back = buffer.low_latency_combine(
                y[rank],
                mine.topk_idx,
                mine.topk_weights,
                sent.handle,
                allow_multiple_reduction=reduce_early,
                return_recv_hook=with_hook,
            )
            if with_hook:
                back.hook()
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=reduce_early)
            _check_same(f"round {number}", back.x, wanted)
            if number % 8 == 7:  # results stay what they were, however many calls came after them
                for result, expected in held:
                    low_latency_oracle.check_dispatch(result, expected)
                held.clear()


def check_local_mistakes_can_be_retried(comm: MPI.Intracomm) -> None:
    """One rank's wrong argument raises there, before anything is sent; when it calls again, all go on."""
    rank = comm.Get_rank()
    with _buffer(comm) as buffer, _buffer(comm) as stranger:
        inputs, y = _inputs(comm, 22, lambda rank: 5), _outputs(buffer, 22)
        mine, mine_y = inputs[rank], y[rank]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        handle = buffer.low_latency_dispatch(x, idx, use_fp8=False).handle
        foreign = stranger.low_latency_dispatch(x, idx, use_fp8=False).handle
        many = np.zeros((MAX_TOKENS + 1, HIDDEN), x.dtype)
        mistakes = [
            (("float32", "bfloat16"), lambda: buffer.low_latency_dispatch(x.astype(np.float32), idx)),
            (("[5, 128]", "256"), lambda: buffer.low_latency_dispatch(np.zeros((5, 128), x.dtype), idx)),
            (("x.shape=[17, ", "16 tokens"), lambda: buffer.low_latency_dispatch(many, np.zeros((17, NUM_TOPK), idx.dtype))),
            (("topk_idx", "shape"), lambda: buffer.low_latency_dispatch(x, idx[:3])),
            (("topk_weights", "float64"), lambda: buffer.low_latency_dispatch(x, idx, topk_weights=weights.astype("f8"))),
            (("use_ue8m0", "use_fp8"), lambda: buffer.low_latency_dispatch(x, idx, use_fp8=False, use_ue8m0=True)),
            (
                ("wait_recv_cost_stats", "int32", "int64"),
                lambda: buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=np.zeros(comm.Get_size(), np.int32)),
            ),
            (("y", "shape"), lambda: buffer.low_latency_combine(mine_y[:, 1:].copy(), idx, weights, handle)),
            (("y", "float16"), lambda: buffer.low_latency_combine(mine_y.astype(np.float16), idx, weights, handle)),
            (("topk_weights", "shape"), lambda: buffer.low_latency_combine(mine_y, idx, weights[:2], handle)),
            (("another Buffer",), lambda: buffer.low_latency_combine(mine_y, idx, weights, foreign)),
            (("handle='handle'", "LowLatencyDispatchResult"), lambda: buffer.low_latency_combine(mine_y, idx, weights, "handle")),
            (("out", "shape"), lambda: buffer.low_latency_combine(mine_y, idx, weights, handle, out=x[:3])),
        ]
        for words, call in mistakes:
            if rank == 0:
                with raises(EPInputError, *words):
                    call()
        _check_round(comm, buffer, inputs, 22)
        _check_round(comm, stranger, inputs, 23)


def check_buffer_without_low_latency(comm: MPI.Intracomm) -> None:
    mine = _inputs(comm, 24)[comm.Get_rank()]
    with (
        make_buffer(
            comm, num_experts=4 * comm.Get_size(), hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, dtype="bfloat16"
        ) as buffer,
        _buffer(comm) as other,
    ):
        handle = other.low_latency_dispatch(mine.x, mine.topk_idx, use_fp8=False).handle
        y = _outputs(other, 24)[comm.Get_rank()]
        for call in (
            lambda: buffer.low_latency_dispatch(mine.x, mine.topk_idx),
            lambda: buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle),
            lambda: buffer.get_low_latency_combine_buffer(handle),
        ):
            with raises(EPInputError, "low_latency=True"):
                call()
        sent = buffer.dispatch(mine.x, mine.topk_idx)
        assert buffer.combine(sent.recv_x, sent.handle).x.shape == mine.x.shape


def check_low_latency_bad_expert_number(comm: MPI.Intracomm) -> None:
    """Host only: every rank learns of it in the same call."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts, guilty = 4 * ranks, ranks - 1
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 25, lambda rank: 5)
        mine = inputs[rank]
        for value in (experts, -2, 1 << 40):
            idx = mine.topk_idx.copy()
            if rank == guilty:
                idx[3, 1] = value
            for hook in (False, True):
                with raises(EPInputError, "token 3", f"expert {value}", *([] if rank == guilty else [f"rank {guilty}"])):
                    buffer.low_latency_dispatch(mine.x, idx, return_recv_hook=hook)
        _check_round(comm, buffer, inputs, 25)


def check_low_latency_arguments_that_are_wrong(comm: MPI.Intracomm) -> None:
    """Host only."""
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 27, lambda rank: 5)
        mine, y = inputs[comm.Get_rank()], _outputs(buffer, 27)[comm.Get_rank()]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights)
        with raises(EPInputError, "topk_weights differ", "low_latency_dispatch"):
            buffer.low_latency_combine(y, idx, weights + 1, sent.handle)
        given = weights.copy()
        changed = buffer.low_latency_dispatch(x, idx, topk_weights=given)
        given *= 2  # in place
        with raises(EPInputError, "topk_weights differ", "low_latency_dispatch"):
            buffer.low_latency_combine(y, idx, given, changed.handle)
        given[:] = np.nan
        same = buffer.low_latency_dispatch(x, idx, topk_weights=given)
        buffer.low_latency_combine(y, idx, given, same.handle)
        fixed = np.zeros_like(x)
        fixed.flags.writeable = False
        with raises(EPInputError, "out is read-only"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, out=fixed)
        counts = np.zeros(buffer.config.num_local_experts, np.int32)
        counts.flags.writeable = False
        with raises(EPInputError, "cumulative_local_expert_recv_stats is read-only"):
            buffer.low_latency_dispatch(x, idx, cumulative_local_expert_recv_stats=counts)
        waits = np.zeros(comm.Get_size(), np.int64)
        buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=waits)
        assert waits[comm.Get_rank()] == 0, "nobody waits for itself"
        waits.flags.writeable = False
        with raises(EPInputError, "wait_recv_cost_stats is read-only"):
            buffer.low_latency_dispatch(x, idx, wait_recv_cost_stats=waits)
        _check_round(comm, buffer, inputs, 27)
        open_ = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
    with raises(EPDestroyedError, "this Buffer was destroyed"):
        open_.hook()


def check_low_latency_ranks_that_disagree(comm: MPI.Intracomm) -> None:
    """Host only."""
    if comm.Get_size() == 1:
        return
    odd = comm.Get_rank() % 2
    with _buffer(comm) as buffer:
        inputs = _inputs(comm, 26, lambda rank: 5)
        mine, y = inputs[comm.Get_rank()], _outputs(buffer, 26)[comm.Get_rank()]
        x, idx, weights = mine.x, mine.topk_idx, mine.topk_weights
        sent, other = (buffer.low_latency_dispatch(x, idx, topk_weights=weights) for _ in range(2))
        with raises(EPInputError, "kind", "rank 0: low_latency_dispatch", "rank 1: dispatch"):
            buffer.dispatch(x, idx) if odd else buffer.low_latency_dispatch(x, idx, use_fp8=False)
        with raises(EPInputError, "x of this call", "bfloat16", "float8_e4m3fn"):
            buffer.low_latency_dispatch(x, idx, use_fp8=bool(odd))
        with raises(EPInputError, "x_scales", "uint8", "float32"):
            buffer.low_latency_dispatch(x, idx, use_ue8m0=bool(odd))
        with raises(EPInputError, "topk_weights", "None"):
            buffer.low_latency_dispatch(x, idx, topk_weights=weights if odd else None)
        with raises(EPInputError, "kind", "rank 1: low_latency_combine with allow_multiple_reduction=False"):
            buffer.low_latency_combine(y, idx, weights, sent.handle, allow_multiple_reduction=not odd)
        for reduce_early in (True, False):
            with raises(EPInputError, "handle"):
                buffer.low_latency_combine(
                    y, idx, weights, (other if odd else sent).handle, allow_multiple_reduction=reduce_early
                )
        _check_round(comm, buffer, inputs, 26)


if __name__ == "__main__":
    main(__name__)
