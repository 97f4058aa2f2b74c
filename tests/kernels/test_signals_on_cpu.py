"""Dispatches with `signals=True` with the kernels on the CPU: a consumer reads each tile of rows as soon as its word says so."""

from __future__ import annotations

import functools
import itertools

import ml_dtypes  # noqa: F401  (dtypes for NumPy)
import numpy as np
import oracle
import pytest
from scenarios import Again, Sum

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.cuda import driver
from deepep_rt.jit.launch import launch_local
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import array_at, callers_stream
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import THROUGHPUT, ThroughputRound, assert_same, broken, fails, inputs_of, run_rounds, seeds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SIZES = {**THROUGHPUT, "num_max_tokens_per_rank": 90, "num_sms": 3}
OPTIONS = dict(layout="expert", expert_alignment=64, zero_padding=True)
TILE_ROWS, WORST = 64, 320
SMALL = {**THROUGHPUT, "num_experts": 4}
"""Of two ranks. With `WORST`, all rows fit, and the last tiles have padding only."""
_MAX_IDLE_READS, _MOST_TURNS = 1000, 64


def bytes_of(view):
    """Return the rows of a result as bytes."""
    return array_at(view.ptr, (view.shape[0], view.row_bytes), "uint8")


class Consumer:
    """Work on the caller's stream that copies the rows of each tile once it is ready."""

    def __init__(self, machine, rank, sent):
        views = sent.views
        self._machine, self._rank = machine, rank
        self._rows = bytes_of(views["x"])
        self._ready = array_at(views["tile_ready"].ptr, views["tile_ready"].shape, "int32")
        self._tickets = array_at(views["tickets"].ptr, views["tickets"].shape, "int32")
        self._tile_rows, self._signal, self._owner = sent.handle.tile_rows, sent.signal, sent
        self._num_idle_reads = 0
        self.read_again()

    def _take_tickets(self):
        assert not self._tickets.any()
        self._tickets[:] = 3
        return True

    def read_again(self, checks_tickets=True):
        """Queue the work, for the next rows."""
        if checks_tickets:
            self._machine.queue(self._rank, self._take_tickets)
        self.seen = np.full(self._rows.shape, 77, np.uint8)
        self.order, self.num_reads = [], 0
        self._left = set(range(len(self._ready)))
        self._machine.queue(self._rank, functools.partial(self._read, self.seen, self.order, self._left))

    def _read(self, seen, order, left):
        works = self._machine.is_working(self._rank)
        found = []
        for tile in sorted(left):
            assert self._ready[tile] in (0, self._signal)
            if self._ready[tile]:
                rows = slice(tile * self._tile_rows, (tile + 1) * self._tile_rows)
                seen[rows] = self._rows[rows]
                found.append(tile)
        order += found
        left -= set(found)
        self.num_reads += bool(found)
        self._num_idle_reads = 0 if works or found else self._num_idle_reads + 1
        assert self._num_idle_reads < _MAX_IDLE_READS, f"no kernel runs, and tiles {sorted(left)} are not ready"
        return not left


class Watched:
    """A Buffer whose dispatches with signals get consumers."""

    def __init__(self, machine, rank, buffer, consumers):
        self._machine, self._rank, self._buffer, self._consumers = machine, rank, buffer, consumers

    def __getattr__(self, name):
        return getattr(self._buffer, name)

    def dispatch(self, *arrays, signals=False, **options):
        sent = self._buffer.dispatch(*arrays, signals=signals, **options)
        if signals:
            self._consumers.append((sent, Consumer(self._machine, self._rank, sent)))
        return sent


class TileRound(ThroughputRound):
    """A round of dispatches by expert with signals, whose consumers must see the final rows."""

    def __init__(self, machine, buffers, seed, *, again=1, options=None, **fixed):
        options, self.machine, self.consumers = options or {}, machine, []
        kept = {
            "zero_padding": True,
            "signals": True,
            **{name: value for name, value in options.items() if name == "scales_layout"},
        }
        fixed = {"sums": (Sum(),), "again": (Again(options=kept),) * again, **fixed}
        super().__init__(machine, buffers, seed, "expert", options=dict(expert_alignment=TILE_ROWS) | kept | options, **fixed)

    def run(self, rank):
        watched = Watched(self.machine, rank, self._buffers[rank], self.consumers)
        self.round.call(watched, rank, functools.partial(self.members.put, rank))

    def check(self):
        super().check()
        assert self.consumers
        for sent, consumer in self.consumers:
            assert_same(consumer.seen, bytes_of(sent.views["x"]))


def queued(machine, buffer, rank, mine, **options):
    """Queue a dispatch of all arguments of a rank, with signals. Return the result and its consumer."""
    x, idx, weights = (machine.put(rank, values) for values in (mine.x, mine.topk_idx, mine.topk_weights))
    sent = buffer.dispatch(x, idx, weights, **{**OPTIONS, "num_worst_tokens": WORST, **options}, signals=True)
    return sent, Consumer(machine, rank, sent)


def expected_rows(rank, inputs, config, worst=WORST):
    """Return the rows by expert of a rank as bytes, with zeros as padding."""
    rows = oracle.expected_expert_rows(rank, inputs, config.num_experts, num_worst_tokens=worst, expert_alignment=TILE_ROWS)
    return rows.x.view(np.uint8)


def quick_rounds(machine, buffers, seed, count, worst=WORST):
    """Queue dispatches of new routings, and then compare what consumers saw with the oracle."""
    config, made = buffers[0].config, []
    for i in range(count):
        inputs = inputs_of(config, 100 * seed + i)
        for rank, buffer in enumerate(buffers):
            _, consumer = queued(machine, buffer, rank, inputs[rank], num_worst_tokens=worst)
            made.append((rank, inputs, consumer))
    machine.run(most_turns=_MOST_TURNS)
    for rank, inputs, consumer in made:
        assert_same(consumer.seen, expected_rows(rank, inputs, config, worst))


def signal_round(machine, buffers, seed, **options):
    """Compare what consumers see with an ordinary dispatch, for a new routing and along the routing of its handle."""
    inputs = inputs_of(buffers[0].config, seed)

    def run(rank):
        given, buffer, mine = {**OPTIONS, **options}, buffers[rank], inputs[rank]
        x, idx, weights = (machine.put(rank, values) for values in (mine.x, mine.topk_idx, mine.topk_weights))
        plain = buffer.dispatch(x, idx, weights, **given)
        wanted = {name: view and array_at(view.ptr, view.shape, view.dtype, plain) for name, view in plain.views.items()}
        sent = buffer.dispatch(x, idx, weights, **given, signals=True)
        first = Consumer(machine, rank, sent)
        again = machine.put(rank, mine.x[::-1].copy())
        order = dict(zero_padding=True, signals=True)
        second = Consumer(machine, rank, buffer.dispatch(again, handle=sent.handle, **order))
        third = Consumer(machine, rank, buffer.dispatch(x, handle=plain.handle, **order))
        return plain, wanted, sent, first, second, third, buffer.dispatch(again, handle=plain.handle, zero_padding=True)

    for plain, wanted, sent, first, second, third, repeated in machine.each_rank(run):
        as_bytes = bytes_of(plain.views["x"])
        assert_same(first.seen, as_bytes)
        assert_same(third.seen, as_bytes)
        assert_same(second.seen, bytes_of(repeated.views["x"]))
        for name, view in sent.views.items():
            if name in wanted and name != "x" and view is not None:
                assert_same(array_at(view.ptr, view.shape, view.dtype), wanted[name])


@pytest.mark.parametrize("seed", seeds(6))
def test_tiles(seed):
    arch = ("sm_90", "sm_80")[seed % 3 == 2]
    with Machine(3, seed, arch, weak_memory=seed % 2 == 0) as machine:
        buffers = machine.buffers(**SIZES, statistics=seed == 4)
        for step in range(2):
            signal_round(machine, buffers, 10 * seed + step)
        signal_round(machine, buffers, 10 * seed + 2, num_worst_tokens=(704, 330)[seed % 2], expert_alignment=(64, 128)[seed % 2])


# --- forms of the arguments -----------------------------------------------------------------------------------------------------------


FORMS = {
    "scales": dict(scales=3, hidden=392),
    "scales-by-column": dict(scales=3, hidden=392, options=dict(scales_layout="column")),
    "no-weights": dict(weights=False, again=0),
    "int32": dict(drawn=dict(idx_dtype="int32", skip_probability=0.3)),
    "one-rank-without-tokens": dict(tokens=lambda rank: 0 if rank == 1 else 33),
    "no-tokens": dict(tokens=lambda rank: 0),
    "all-choices-are-minus-one": dict(drawn=dict(skip_probability=1.0), tokens=lambda rank: 9),
    "all-on-one-rank": dict(drawn=dict(pattern="one_rank"), tokens=lambda rank: 40),
    "half-of-the-room": dict(worst=lambda rank, arriving, most: arriving // 2),
    "undefined-padding": dict(options=dict(zero_padding=False)),
    "bytes": dict(dtype="uint8", hidden=80, sums=(Sum(dtype="bfloat16"),)),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("scales-by-column", "half-of-the-room") else pytest.param(name, marks=pytest.mark.full) for name in FORMS],
)
def test_forms(name):
    """Rows of 144 or 784 bytes are no multiple of a line. All arrays are those of the oracle, also along a routing and after a combine."""
    fixed = {"worst": None, "tokens": lambda rank: 40 - 9 * rank, "drawn": {}, "hidden": 72, **FORMS[name]}
    arch = ("sm_90", "sm_80")[len(name) % 2]
    with Machine(2, len(name), arch, weak_memory=arch == "sm_80") as machine:
        buffers = machine.buffers(**{**SMALL, "hidden": fixed["hidden"]})
        run_rounds(machine, [TileRound(machine, buffers, 3, **fixed)])


@pytest.mark.parametrize("by_column", [False, pytest.param(True, marks=pytest.mark.full)])
def test_rows_that_the_call_converts(by_column):
    """Of bfloat16 to FP8."""
    with Machine(2, 5) as machine:
        buffers = machine.buffers(**{**SMALL, "hidden": 256})
        options = dict(use_fp8=True, **(dict(scales_layout="column") if by_column else {}))
        run_rounds(machine, [TileRound(machine, buffers, 4, options=options, again=0, worst=None, tokens=lambda rank: 20 + rank)])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_few_entries_for_signals(tmp_path, seed):
    """A copy warp waits for room to name the next row that it has written."""
    folder = broken(tmp_path, "experts/expand_tiles.cu", r"kRingEntries = 32", "kRingEntries = 2")
    with Machine(2, seed, cuda_src=folder) as machine:
        quick_rounds(machine, machine.buffers(**SMALL), seed, 4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_old_gpus_among_new_ones(seed):
    with Machine(2, seed, ["sm_80", "sm_90"], weak_memory=True, num_sms=(None, 2)[seed]) as machine:
        quick_rounds(machine, machine.buffers(**SMALL), seed, 3)


@pytest.mark.full
def test_one_rank():
    """It waits for no other rank."""
    with Machine(1, 1) as machine:
        buffers = machine.buffers(**{**SMALL, "num_experts": 2})
        run_rounds(machine, [TileRound(machine, buffers, seed, tokens=lambda rank: 40, worst=None) for seed in (1, 2)])


@pytest.mark.parametrize(("num_slots", "members"), [(3, (0, 2)), pytest.param(4, (1, 2, 3), marks=pytest.mark.full)])
def test_absent_slots(num_slots, members):
    with Machine(num_slots, 2, weak_memory=num_slots == 4) as machine:
        buffers = machine.buffers(members=members, **{**THROUGHPUT, "num_experts": 2 * num_slots})
        run_rounds(machine, [TileRound(machine, buffers, 5, tokens=lambda rank: 30 - rank, drawn={}, worst=None)])
        for rank in members:
            buffers[rank].check()


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "transport"),
    [(2, 1, "nvshmem"), *(pytest.param(4, 2, transport, marks=pytest.mark.full) for transport in ("mpi", "nvshmem"))],
)
def test_two_nodes(num_ranks, ranks_per_node, transport):
    """All words are written together, once all rows are here."""
    with Machine(num_ranks, 1, transport=transport, weak_memory=num_ranks == 4) as machine:
        buffers = machine.buffers(**{**THROUGHPUT, "num_experts": 2 * num_ranks}, ranks_per_node=ranks_per_node)
        options = dict(drawn={}, tokens=lambda rank: 30 - rank)
        limits = None, lambda rank, arriving, most: most
        made = [TileRound(machine, buffers, seed, worst=worst, **options) for seed, worst in enumerate(limits, 1)]
        run_rounds(machine, made)
        consumers = [consumer for one in made for _, consumer in one.consumers]
        assert {consumer.num_reads for consumer in consumers} == {1}
        assert "expand_tiles" not in machine.launched


# --- replays --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(3))
def test_replays(seed):
    """Replays of a graph, queued without a pause. Each has other tokens in the same arrays, and its consumer sees the rows of its own."""
    with Machine(2, seed, ("sm_90", "sm_80")[seed == 2], weak_memory=seed > 0) as machine:
        buffers = machine.buffers(**SMALL)
        config, every = buffers[0].config, []
        for number in range(5):
            one = [
                oracle.make_inputs(10 * seed + number, rank, 30 + rank, config.hidden, 2, 4, dtype="bfloat16")
                for rank in range(2)
            ]
            every.append(one)
        arrays = [
            [machine.put(rank, getattr(every[0][rank], name)) for name in ("x", "topk_idx", "topk_weights")] for rank in range(2)
        ]
        with machine.recorded(all_work=True) as work:
            sent = [buffers[rank].dispatch(*arrays[rank], **OPTIONS, num_worst_tokens=WORST, signals=True) for rank in range(2)]
        consumers = [Consumer(machine, rank, sent[rank]) for rank in range(2)]
        seen = [[consumer.seen for consumer in consumers]]
        for inputs in every[1:]:
            for rank, mine in enumerate(inputs):
                for array, values in zip(arrays[rank], (mine.x, mine.topk_idx, mine.topk_weights), strict=True):
                    driver.copy_async(array.ptr, machine.put(rank, values).ptr, values.nbytes, callers_stream(rank))
            machine.replay(work)
            for consumer in consumers:
                consumer.read_again()
            seen.append([consumer.seen for consumer in consumers])
        machine.run()
        for inputs, found in zip(every, seen, strict=True):
            for rank in range(2):
                assert_same(found[rank], expected_rows(rank, inputs, config))
        quick_rounds(machine, buffers, seed, 1)


def test_a_replay_without_its_fill_fails():
    """The consumer of a replay would take the words of the call before."""
    with Machine(2, 1) as machine:
        buffers = machine.buffers(**SMALL)
        inputs = inputs_of(buffers[0].config, 7)
        with machine.recorded() as launches:
            made = [queued(machine, buffers[rank], rank, inputs[rank]) for rank in range(2)]
        machine.run()
        for sent, consumer in made:
            bytes_of(sent.views["x"])[:] = 5
            consumer.read_again(checks_tickets=False)
        machine.replay(launches)
        machine.run()
        assert any((consumer.seen == 5).any() for _, consumer in made)


# --- failures -------------------------------------------------------------------------------------------------------------------------


def is_poisoned(sent, *, with_tail=True):
    """Return whether all rows are NaN, of every type, and all tiles ready. `with_tail`: also the rows after those of the last expert."""
    tiles, offsets = (sent.views[name] for name in ("tile_ready", "expert_offsets"))
    end = None if with_tail else array_at(offsets.ptr, offsets.shape, "int32")[-1]
    return (bytes_of(sent.views["x"])[:end] == 255).all() and (array_at(tiles.ptr, tiles.shape, "int32") == sent.signal).all()


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.full)])
def test_tiles_of_a_lost_rank(arch):
    """Rank 1 makes no more calls. The tiles of rank 0 become ready, with NaN."""
    with Machine(2, 3, arch, weak_memory=arch == "sm_80") as machine:
        buffers = machine.buffers(**SMALL)
        inputs = inputs_of(buffers[0].config, 8)
        known = [queued(machine, buffers[rank], rank, inputs[rank])[0].handle for rank in range(2)]
        machine.run()
        repeated = buffers[0].dispatch(machine.put(0, inputs[0].x), handle=known[0], signals=True)
        calls = [(repeated, Consumer(machine, 0, repeated)), queued(machine, buffers[0], 0, inputs[0])]
        machine.run()
        for sent, consumer in calls:
            assert (consumer.seen == 255).all()
            assert is_poisoned(sent)
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            buffers[0].check()


def test_a_rank_that_is_lost_with_its_rows(monkeypatch):
    """Rank 1 sends the small arrays and no rows. Consumers may have seen tiles of rank 0's own rows before all become NaN."""
    with Machine(2, 4) as machine:
        buffers = machine.buffers(**SMALL)
        quick_rounds(machine, buffers, 1, 1)
        inputs = inputs_of(buffers[0].config, 9)
        with monkeypatch.context() as patches:
            patches.setattr(buffers[1]._backend.runtime.launcher("expand_tiles"), "launch", lambda *_: None)
            x, idx, weights = (machine.put(1, values) for values in (inputs[1].x, inputs[1].topk_idx, inputs[1].topk_weights))
            buffers[1].dispatch(x, idx, weights, **OPTIONS, num_worst_tokens=WORST, signals=True)
            sent, consumer = queued(machine, buffers[0], 0, inputs[0])
            machine.run()
        assert is_poisoned(sent)
        wanted, poisoned = expected_rows(0, inputs, buffers[0].config), np.full(64, True)
        for tile in consumer.order:
            rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
            poisoned[tile] = (consumer.seen[rows] == 255).all()
            assert poisoned[tile] or (consumer.seen[rows] == wanted[rows]).all(), tile
        assert len(consumer.order) == WORST // TILE_ROWS
        assert poisoned[: len(consumer.order)].any()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1") as caught:
            buffers[0].check()
        assert "rows" in caught.value.phase


DIFFERENCES = {
    "kind": (({}, dict(signals=False)), "with layout='expert' and signals=True, rank 1: dispatch with layout='expert'"),
    "x": (({}, dict(dtype="float16")), "bfloat16, rank 1: float16"),
    "expert_alignment": (({}, dict(expert_alignment=128)), "64, rank 1: 128"),
}


@pytest.mark.parametrize(
    "nodes", [{}, pytest.param(dict(ranks_per_node=1), marks=pytest.mark.full)], ids=["one-node", "two-nodes"]
)
@pytest.mark.parametrize(
    ("name", "worst"),
    [
        case if case in (("kind", None), ("x", WORST)) else pytest.param(*case, marks=pytest.mark.full)
        for case in itertools.product(DIFFERENCES, (None, WORST))
    ],
)
def test_ranks_that_differ(name, worst, nodes):
    """All ranks raise, no consumer waits for ever, and the next calls are right."""
    calls, text = DIFFERENCES[name]
    with Machine(2, 1, transport="mpi") as machine:
        buffers = machine.buffers(**SMALL, **nodes)
        inputs = inputs_of(buffers[0].config, 8)
        poisoned = []

        def run(rank):
            mine, buffer, how = (
                inputs[rank],
                buffers[rank],
                {**OPTIONS, "signals": True, "num_worst_tokens": worst, **calls[rank]},
            )
            x, idx = machine.put(rank, mine.x.astype(how.pop("dtype", "bfloat16"))), machine.put(rank, mine.topk_idx)
            with pytest.raises(EPInputError, match=rf"the ranks disagree on the {name} .*rank 0: .*{text}"):  # noqa: PT012
                sent = buffer.dispatch(x, idx, **how)
                if how["signals"]:
                    poisoned.append((sent, Consumer(machine, rank, sent)))
                buffer.synchronize()

        machine.each_rank(run)
        assert len(poisoned) >= (0 if worst is None else 1)
        for sent, consumer in poisoned:
            assert is_poisoned(sent, with_tail=not nodes)
            assert_same(consumer.seen, bytes_of(sent.views["x"]))
        made = TileRound(machine, buffers, 6, tokens=lambda rank: 20, worst=None)
        run_rounds(machine, [made])
        for buffer in buffers:
            buffer.check()


# --- broken kernels -------------------------------------------------------------------------------------------------------------------


TILES, PREPARE = "experts/expand_tiles.cu", "experts/prepare_tiles.cu"
WEAK = dict(arch="sm_80", weak_memory=True)
OLD = dict(arch="sm_80")


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "how"),
    [
        pytest.param(TILES, r"fence_release_sys\(\);\n      raise_word", "raise_word", WEAK, id="no-fence"),
        pytest.param(
            TILES,
            r"fence_release_sys\(\);\n    for \(; signalled",
            "for (; signalled",
            dict(weak_memory=True),
            id="no-fence-of-the-signal-warp",
        ),
        pytest.param(
            TILES, r"row_bytes\);\n      __syncwarp\(\);  // lane 0", "row_bytes);  //", WEAK, id="no-wait-for-lanes-of-a-copy"
        ),
        pytest.param(
            TILES,
            r"st_release_block\(&sent.written, count\)",
            "st_release_block(&sent.written, count + !all)",
            {},
            id="told-too-early",
        ),
        pytest.param(TILES, r"(    done = [^\n]*\n)(    const u32 now[^\n]*\n)", r"\2\1", {}, id="the-last-rows-are-never-told"),
        pytest.param(
            TILES,
            r"kRingEntries = 32((?s:.*?))while \(turn [^;]*;",
            r"kRingEntries = 2\1",
            {},
            id="entries-are-overwritten",
        ),
        pytest.param(TILES, r"return seen == epoch;", "return true;", {}, id="no-wait-for-a-row"),
        pytest.param(TILES, r"bulk_wait_written<1>\(\);", "", {}, id="copies-are-counted-too-early"),
        pytest.param(
            TILES, r"bulk_wait_written<0>\(\);\n  if \(before", "if (before", {}, id="the-last-copy-is-counted-too-early"
        ),
        pytest.param(TILES, r"__syncwarp\(\);  // each lane releases[^\n]*", "", OLD, id="no-wait-for-lanes-of-an-expert-row"),
        pytest.param(TILES, r"~0u\) == 1\)", "~0u) == 2)", {}, id="ready-before-the-last-row"),
        pytest.param(TILES, r"~0u\) == 1\)", "~0u) <= 2)", {}, id="ready-before-the-last-row-and-after-it"),
        pytest.param(TILES, r"bulk_wait_written<0>\(\);\n  \} else", "} else", {}, id="padding-is-counted-too-early"),
        pytest.param(
            TILES, r"if \(lane_idx\(\) == 0\) count_down", "if (false) count_down", {}, id="padding-is-not-counted-down"
        ),
        pytest.param(PREPARE, r"p.tile_rows\), 0\) \+ 1;", "p.tile_rows), 0);", {}, id="padding-is-not-counted"),
        pytest.param(
            TILES,
            r"(item % kNumMaxTokens)\)\.x, epoch\);\n    \}",
            r"\1).y, epoch); }",
            {},
            id="the-token-instead-of-the-row",
        ),
        pytest.param(
            TILES, r"fits \? row.x : kNoRow", "fits ? item % kNumMaxTokens : kNoRow", OLD, id="the-place-instead-of-the-row"
        ),
        pytest.param(TILES, r"first_row\[source\] \+ entry.x", "first_row[source] + place", {}, id="the-place-of-an-own-row"),
        pytest.param(PREPARE, r"make_int2\(row, list\[row\]\)", "make_int2(list[row], row)", {}, id="token-and-row"),
    ],
)
def test_broken_kernels_fail(tmp_path, file, pattern, replacement, how):
    folder = broken(tmp_path, file, pattern, replacement)
    assert fails(folder, lambda machine, seed: quick_rounds(machine, machine.buffers(**SMALL), seed, 4), **how)


@pytest.mark.full
def test_a_counter_of_places_that_is_not_reset_fails(tmp_path):
    """The dispatch after it loses rows."""
    folder = broken(tmp_path, TILES, r"state->dispatch_items = ", "")
    assert fails(folder, lambda machine, seed: signal_round(machine, machine.buffers(**SMALL), seed))


def few_sms(machine, seed):
    """Run dispatches on GPUs that have fewer SMs free than there are sending blocks."""
    quick_rounds(machine, machine.buffers(**{**SMALL, "num_sms": 6}), seed, 2)


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.full)])
def test_few_sms(arch):
    """A block that has sent does not wait for rows of a block that waits for its SM."""
    with Machine(2, 1, arch, num_sms=1) as machine:
        few_sms(machine, 1)


@pytest.mark.full
def test_blocks_that_always_help_fail(tmp_path):
    folder = broken(tmp_path, TILES, r"return static_cast<int>\(__shfl_sync[^;]*;", "return true;")
    assert fails(folder, few_sms, num_sms=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"if \(routes.idle \|\| was_aborted\(p\)\) poison_tiles\(p\);", "", id="no-poison"),
        pytest.param(r"routes.idle \|\| was_aborted", "was_aborted", id="ranks-that-differ"),
    ],
)
def test_a_mistake_after_a_failure_fails(tmp_path, pattern, replacement):
    """Consumers then wait for ever, or rows are no NaN."""
    folder = broken(tmp_path, TILES, pattern, replacement)

    def run(machine, seed):
        buffers = machine.buffers(**SMALL)
        inputs = inputs_of(buffers[0].config, 8)
        made = [queued(machine, buffers[rank], rank, inputs[rank], expert_alignment=64 + 64 * rank) for rank in range(2)]
        machine.run()
        for sent, consumer in made:
            assert is_poisoned(sent)
            assert (consumer.seen == 255).all()
        for buffer in buffers:
            with pytest.raises(EPInputError):
                buffer.check()

    with Machine(2, 0) as machine:
        run(machine, 0)
    assert fails(folder, run)


# --- prepare_tiles --------------------------------------------------------------------------------------------------------------------


class Preparation:
    """A launch of prepare_tiles for a random routing. If `has_failed`, counts and tokens are any numbers."""

    RANKS, RANK, MAX_TOKENS, TOPK, TOKENS = 3, 1, 70, 4, 61

    def __init__(self, machine, seed, num_experts, *, has_idx=True, has_failed=False, finds_order=True):
        rng, self.has_idx, self.has_failed, self.finds_order = np.random.default_rng(seed), has_idx, has_failed, finds_order
        self.num_experts, put = num_experts, functools.partial(machine.put, 0)
        idx = rng.integers(-1, num_experts * self.RANKS, (self.TOKENS, self.TOPK)).astype(("int32", "int64")[seed % 2])
        self.num_rows = rng.integers(0, 50, (self.RANKS, self.RANKS), dtype=np.int32)
        self.lists = np.full((self.RANKS, self.MAX_TOKENS), 1 << 30, np.int32)
        for rank in range(self.RANKS):
            tokens = np.flatnonzero((idx // num_experts == rank).any(1))
            self.num_rows[self.RANK, rank] = len(tokens)
            self.lists[rank, : len(tokens)] = tokens
        counts = rng.integers(0, 150, num_experts) * (rng.random(num_experts) < 0.2)
        offsets = np.concatenate([[0], np.cumsum(-(-counts // TILE_ROWS) * TILE_ROWS)])
        self.limit = int(offsets[-1]) + (0, 64, 100, -70)[seed % 4]
        self.offsets = np.minimum(offsets, max(self.limit, 0)).astype(np.int32)
        self.limit = max(self.limit, 0)
        self.ends = np.minimum(offsets[:-1] + counts, self.limit).astype(np.int32)
        if has_failed:
            self.num_rows[self.RANK] = (-5, 1 << 30, 33)
            self.lists = rng.integers(-(1 << 31), 1 << 31, self.lists.shape).astype(np.int32)
            self.ends[::2] = -1
        self.idx = idx
        self.order = put(np.full((self.RANKS, self.MAX_TOKENS, 2), -77, np.int32))
        self.left = put(np.full(-(-self.limit // TILE_ROWS) + 1, -77, np.int32))
        values = dict(
            topk_idx=put(idx).ptr if has_idx else 0,
            num_rows=put(self.num_rows).ptr,
            send_list=put(self.lists).ptr,
            order=self.order.ptr,
            offsets=put(self.offsets).ptr,
            ends=put(self.ends).ptr,
            tile_left=self.left.ptr,
            finds_order=finds_order,
            idx_bytes=idx.itemsize,
            num_tokens=self.TOKENS,
            num_topk=self.TOPK,
            num_experts=num_experts,
            num_ranks=self.RANKS,
            max_tokens=self.MAX_TOKENS,
            rank=self.RANK,
            num_expert_rows=self.limit,
            tile_rows=TILE_ROWS,
        )
        launch_local("prepare_tiles", callers_stream(0), values, self.RANKS + 1)

    def first_expert(self, token, rank):
        """Return the first expert of a token on a rank."""
        local = self.idx[token] - rank * self.num_experts
        return int(local[(local >= 0) & (local < self.num_experts)].min())

    def check(self):
        order, left = (array_at(one.ptr, one.shape, one.dtype) for one in (self.order, self.left))
        for rank in range(self.RANKS):
            count = int(np.clip(self.num_rows[self.RANK, rank], 0, self.MAX_TOKENS)) if self.finds_order else 0
            rows, tokens = order[rank, :count].T
            assert (order[rank, count:] == -77).all(), "nothing is written past the rows"
            np.testing.assert_array_equal(np.sort(rows), np.arange(count))
            np.testing.assert_array_equal(tokens, self.lists[rank, rows])
            if self.has_idx and not self.has_failed:
                firsts = np.array([self.first_expert(token, rank) for token in tokens])
                bins = firsts if self.num_experts <= 1024 else firsts * 1024 // self.num_experts
                assert (np.diff(bins) >= 0).all()
        want = np.ones(-(-self.limit // TILE_ROWS), np.int32)
        for expert, (begin, end) in enumerate(itertools.pairwise(self.offsets)):
            for row in range(begin, min(max(self.ends[expert], begin), end)):
                want[row // TILE_ROWS] += 1
        np.testing.assert_array_equal(left, [*want, -77])


def prepare(machine, seed):
    cases = [dict(num_experts=5), dict(num_experts=1500), dict(num_experts=1024, has_idx=False)]
    cases += [dict(num_experts=7, has_failed=True), dict(num_experts=3, finds_order=False)]
    made = [Preparation(machine, seed + i, **case) for i, case in enumerate(cases)]
    machine.run()
    for one in made:
        one.check()


@pytest.mark.parametrize("seed", seeds(4))
def test_preparation(seed):
    """The order is a permutation of the rows, by their first expert. Each tile counts its rows and one more."""
    with Machine(1, seed, ("sm_90", "sm_80")[seed % 2], num_sms=(None, 1)[seed % 2]) as machine:
        prepare(machine, seed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"expert < least\)", "expert > least)", id="not-by-the-first-expert"),
        pytest.param(
            r"max\(min\(filled - first, p.tile_rows\), 0\)", "min(filled - first, p.tile_rows)", id="tiles-of-padding-only"
        ),
        pytest.param(r"0\), p.max_tokens\);", "0), 1 << 20);", id="any-number-of-rows"),
        pytest.param(r" \|\| token >= p.num_tokens", "", id="any-token"),
        pytest.param(r"token < 0 \|\| ", "", id="negative-tokens"),
        pytest.param(r"p.tile_rows\), 0\) \+ 1;", "p.tile_rows), 0);", id="padding-is-not-counted"),
        pytest.param(r"\} else if \(p.finds_order\) \{", "} else {", id="an-order-that-is-there"),
    ],
)
def test_a_mistake_in_the_preparation_fails(tmp_path, pattern, replacement):
    folder = broken(tmp_path, PREPARE, pattern, replacement)
    assert fails(folder, prepare, 1)


@pytest.mark.full
def test_a_mistake_in_the_sort_fails(tmp_path):
    folder = broken(tmp_path, "experts/counting_sort.cuh", r"place \+= shared.sums\[w\]", "place += 0")
    assert fails(folder, prepare, 1)
