"""Combines with `y_ready` with the kernels on the CPU: a product writes rows tile by tile while they leave."""

from __future__ import annotations

import functools
import gc

import ml_dtypes  # noqa: F401  (dtypes for NumPy)
import numpy as np
import pytest

from deepep_rt import EPTimeoutError
from deepep_rt.cuda import driver
from deepep_rt.jit.launch import launch_local
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import array_at, callers_stream
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import THROUGHPUT, assert_same, broken, fails, inputs_of, seeds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SIZES = {**THROUGHPUT, "num_experts": 6, "num_max_tokens_per_rank": 60}
LONG = {**THROUGHPUT, "num_experts": 4, "num_max_tokens_per_rank": 100, "hidden": 1024, "dtype": "float32", "num_sms": 1}
"""With several chunks for each copy warp, and a few rows in each."""
TILE_ROWS = 64
ALL_ROWS = dict(layout="expert", expert_alignment=TILE_ROWS)


_SPEED = 1 / 16
"""The chance that a product writes a tile when it gets to work."""


class Product:
    """Work that writes the rows of each tile, and then sets its word. It begins together with the combine, and tiles come slowly, in
    about ascending order. It is on a stream of its own, unless there is another one.

    Before, the rows are NaN. Tiles of `never` get neither rows nor words. With `begins`, it begins before the combine.
    """

    def __init__(self, machine, rank, y, rng, never=(), stream=None, begins=False, words=None):
        num_tiles = -(-len(y) // TILE_ROWS)
        self._machine, self._rank, self._has_begun = machine, rank, begins
        self._y, self._never, self._rng = y, set(never), rng
        self.rows = machine.put(rank, np.full(y.shape, np.nan, y.dtype))
        self.words = machine.put(rank, np.zeros(num_tiles, np.int32)) if words is None else words
        self._left = list(np.argsort(np.arange(num_tiles) + rng.uniform(0, 3, num_tiles)))
        machine.queue(rank, self._write, machine.new_stream(rank) if stream is None else stream)

    def _write(self):
        self._has_begun |= any(self._machine.is_working(self._rank, kernel) for kernel in ("combine_tiles", "await_tiles"))
        if self._left and self._has_begun and self._rng.random() < _SPEED:
            tile = self._left.pop(0)
            if tile not in self._never:
                rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
                array_at(self.rows.ptr, self.rows.shape, self.rows.dtype)[rows] = self._y[rows]
                array_at(self.words.ptr, self.words.shape, "int32")[tile] = 1
        return not self._left


class Layer:
    """A dispatch by expert of all ranks, and rows to combine."""

    def __init__(self, machine, buffers, seed, *, dtype="bfloat16", worst=None, members=None):
        self.machine, self.buffers, self.rng = machine, buffers, np.random.default_rng(seed)
        machine.timeout_steps = 100  # the clock passes while all kernels wait for a product
        self.members = range(len(buffers)) if members is None else members
        inputs = inputs_of(self.config, seed)

        def dispatch(rank):
            mine, put = inputs[rank], functools.partial(machine.put, rank)
            return buffers[rank].dispatch(
                put(mine.x), put(mine.topk_idx), put(mine.topk_weights), **ALL_ROWS, num_worst_tokens=worst
            )

        self.sent = dict(zip(self.members, machine.each_rank(dispatch, self.members), strict=True))
        self.num_tokens = {rank: len(inputs[rank].x) for rank in self.members}
        self.y = {}
        for rank, sent in self.sent.items():
            shape = sent.handle.num_recv_rows, self.config.hidden
            self.y[rank] = np.random.default_rng([seed, rank]).standard_normal(shape, np.float32).astype(dtype)
        machine.run()

    @property
    def config(self):
        return self.buffers[self.members[0]].config

    def combine(self, rank, arrays, **more):
        """Queue a combine of a rank. `arrays` are its rows, and what makes the call wait for them."""
        rows, words = arrays
        return self.buffers[rank].combine(rows, self.sent[rank].handle, **more, **({} if words is None else {"y_ready": words}))

    def options(self, rank, how):
        """Return the options of a combine of a rank."""
        given = {}
        if how in ("weighted", "returned"):
            weights = self.sent[rank].views["topk_weights"]
            given = dict(topk_weights=self.machine.put(rank, np.array(array_at(weights.ptr, weights.shape, "float32"))))
        if how == "weighted":
            given["weighted"] = True
        if how == "bias":
            bias = np.full((self.num_tokens[rank], self.config.hidden), 0.375, self.y[rank].dtype)
            given["bias"] = self.machine.put(rank, bias)
        return given | {"topk": dict(reduce="topk"), "fp8": dict(compress="fp8")}.get(how, {})

    def expected(self, how, factor=1):
        """Return what ordinary combines give each rank, of rows times a factor."""

        def combine(rank):
            y = (factor * self.y[rank]).astype(self.y[rank].dtype)
            return self.combine(rank, (self.machine.put(rank, y), None), **self.options(rank, how))

        back = self.machine.each_rank(combine, self.members)
        self.machine.run()
        return dict(zip(self.members, map(results, back), strict=True))

    def check(self, how="", ordinary=()):
        """Compare combines that wait for tiles with ordinary ones. Ranks of `ordinary` make such calls together with the others."""
        want, back = self.expected(how), {}
        self.expected("", -1)  # the memory where sums arrive holds others
        for rank in self.members:
            arrays = self.machine.put(rank, self.y[rank]), None
            if rank not in ordinary:
                product = Product(self.machine, rank, self.y[rank], self.rng)
                arrays = product.rows, product.words
            back[rank] = self.combine(rank, arrays, **self.options(rank, how))
        self.machine.run(most_turns=64)
        for rank, found in back.items():
            self.buffers[rank].check()
            for name, values in results(found).items():
                assert_same(values, want[rank][name])


def results(back):
    """Copy the arrays of a result."""
    return {name: np.array(array_at(view.ptr, view.shape, view.dtype)) for name, view in back.views.items() if view is not None}


@pytest.mark.parametrize("seed", seeds(8))
def test_tiles(seed):
    arch, how = ("sm_90", "sm_80")[seed % 2], ("weighted", "returned", "", "bias")[seed % 4]
    with Machine(3, seed, arch, weak_memory=seed % 4 < 2) as machine:
        buffers = machine.buffers(**SIZES, statistics=seed == 4)
        for step in range(2):
            Layer(machine, buffers, 10 * seed + step, worst=(None, 100)[step]).check(how)
        assert "combine_tiles" in machine.launched


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 64), ("float16", 72), ("bfloat16", 392)])
def test_types_and_sizes(dtype, hidden):
    """Rows of 144 and 784 bytes are no multiple of a line."""
    with Machine(2, hidden) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 4, "hidden": hidden, "dtype": "float32"})
        Layer(machine, buffers, 3, dtype=dtype).check("weighted")


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_numbers_of_ranks(num_ranks):
    with Machine(num_ranks, 2, weak_memory=True) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 2 * num_ranks})
        Layer(machine, buffers, 4).check("weighted")


@pytest.mark.parametrize("arch", ["sm_90", pytest.param(["sm_80", "sm_90"], marks=pytest.mark.full)])
def test_ordinary_combines_in_the_same_call(arch):
    """Rank 1 has all rows before its call."""
    with Machine(2, 1, arch, weak_memory=True) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 4})
        Layer(machine, buffers, 5).check("weighted", ordinary=(1,))


@pytest.mark.full
@pytest.mark.parametrize(("num_slots", "members"), [(3, (0, 2)), (4, (1, 2, 3))])
def test_absent_slots(num_slots, members):
    with Machine(num_slots, 2, weak_memory=num_slots == 4) as machine:
        buffers = machine.buffers(members=members, **{**SIZES, "num_experts": 2 * num_slots})
        Layer(machine, buffers, 6, members=members).check("weighted")


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("topk", {}),
        pytest.param("fp8", dict(hidden=128), marks=pytest.mark.full),
        ("weighted", dict(ranks_per_node=1)),
        *(
            pytest.param(how, dict(ranks_per_node=2, path=path), marks=pytest.mark.full)
            for how, path in (("returned", "hierarchical"), ("bias", "direct"), ("topk", "direct"))
        ),
    ],
)
def test_all_words_before_an_ordinary_combine(how, settings):
    """Where no kernel sends rows tile by tile, a kernel waits for all tiles. Rank 1 does not wait, and makes the same call."""
    with Machine(4, 3, weak_memory=True) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 8, "num_max_tokens_per_rank": 40, **settings})
        Layer(machine, buffers, 8).check(how, ordinary=(1,))
        assert machine.launched.count("await_tiles") == 3
        assert "combine_tiles" not in machine.launched


@pytest.mark.parametrize(("how", "settings"), [("", {}), ("topk", {}), ("", dict(ranks_per_node=1))])
def test_a_tile_that_never_comes(how, settings):
    """The rank with the product says what it waited for. The sums of both ranks are NaN."""
    with Machine(2, 1) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 4, "num_sms": 1, **settings})
        layer, back = Layer(machine, buffers, 7), {}
        machine.timeout_steps = 8
        for rank in range(2):
            arrays = machine.put(rank, layer.y[rank]), None
            if rank == 0:
                product = Product(machine, rank, layer.y[rank], layer.rng, never=(1,))
                arrays = product.rows, product.words
            back[rank] = layer.combine(rank, arrays, **layer.options(rank, how))
        machine.run(most_turns=1 << 12)
        with pytest.raises(
            EPTimeoutError, match=r"rank 0 waited 1 s for rank 0.*: the rows of its experts, whose words in y_ready"
        ) as caught:
            buffers[0].check()
        assert caught.value.phase == "the rows of its experts, whose words in y_ready are not set"
        assert caught.value.call_idx == (2 if settings else 1), "over nodes, the dispatch has the same epochs"
        assert np.isnan(results(back[0])["x"].astype(np.float32)).all()
        with pytest.raises(EPTimeoutError, match="rank 1 waited 1 s for rank 0"):
            buffers[1].check()
        assert np.isnan(results(back[1])["x"].astype(np.float32)).all()


@pytest.mark.parametrize("how", ["weighted", pytest.param("topk", marks=pytest.mark.full)])
def test_a_product_on_the_stream_of_the_caller(how):
    """The program queues a product on its stream. The combine follows on the Buffer's own stream, and runs beside the product.

    While all calls are on one stream, events are recorded late. So the first such call waits for the product, and the first one that gets
    used memory. From the third one on, a product may wait for the combine to begin.
    """
    kept = []  # results that live make the memory of others come from the other stream alone

    def clear_late(words):
        """Return work that takes long, and then clears the words that are still set from the call before."""
        delay = iter(range(40))

        def work():
            if next(delay, None) is not None:
                return False
            array_at(words.ptr, words.shape, "int32")[:] = 0
            return True

        return work

    def run(machine, layer, words, begins):
        want, back = layer.expected(how), {}
        gc.collect()  # memory of a result that goes behind the product would make the next call wait for the product
        for rank in range(2):
            stream = callers_stream(rank)
            machine.queue(rank, clear_late(words[rank]))
            cleared = driver.CudaEvent(stream)
            product = Product(machine, rank, layer.y[rank], layer.rng, stream=stream, begins=begins, words=words[rank])
            options = dict(async_finish=True, previous_event=cleared.handle, **layer.options(rank, how))
            back[rank] = layer.combine(rank, (product.rows, product.words), **options)
            back[rank].event.wait()
        machine.run(most_turns=64)
        for rank, found in back.items():
            layer.buffers[rank].check()
            assert_same(results(found)["x"], want[rank]["x"])
        kept.append(back)

    def all_steps(machine):
        layer = Layer(machine, machine.buffers(**{**SIZES, "num_experts": 4}), 20)
        words = {rank: machine.put(rank, np.ones(-(-len(y) // TILE_ROWS), np.int32)) for rank, y in layer.y.items()}
        for step in range(6):
            run(machine, layer, words, begins=step < 2)
        kept.clear()

    with Machine(2, 6, weak_memory=True) as machine:
        all_steps(machine)


def wait_for_many_tiles(machine, seed):
    """Launch await_tiles with more tiles than it has threads. The tiles after the first of each thread come last."""
    runtime = machine.buffers(**{**SIZES, "num_experts": 2})[0]._backend.runtime
    num_tiles = 600
    words = machine.put(0, np.zeros(num_tiles, np.int32))
    rng = np.random.default_rng(seed)
    left = [*(256 + rng.permutation(num_tiles - 256)), *rng.permutation(256)]

    def set_words():
        assert machine.is_working(0, "await_tiles"), f"{len(left)} tiles are not written"
        array_at(words.ptr, words.shape, "int32")[left[-64:]] = 1
        del left[-64:]
        return not left

    runtime.launcher("await_tiles")(callers_stream(0), 1, {"tile_ready": words.ptr, "num_tiles": num_tiles})
    machine.queue(0, set_words, machine.new_stream(0))
    machine.run(most_turns=64)
    assert not machine.is_working(0)


@pytest.mark.parametrize("seed", seeds(3))
def test_more_tiles_than_threads(seed):
    with Machine(1, seed) as machine:
        wait_for_many_tiles(machine, seed)


# --- order_chunks ---------------------------------------------------------------------------------------------------------------------


class Order:
    """A launch of order_chunks for random positions. If `has_failed`, counts and positions are any numbers."""

    RANKS, RANK, MOST, TOPK = 3, 1, 20, 3

    def __init__(self, machine, seed, *, chunk_rows=1, has_failed=False):
        rng, put = np.random.default_rng(seed), functools.partial(machine.put, 0)
        self.chunk_rows, self.has_failed = chunk_rows, has_failed
        self.num_rows = rng.integers(0, self.MOST * chunk_rows + 1, (self.RANKS, self.RANKS), dtype=np.int32)
        self.capacity = int(self.num_rows[:, self.RANK].sum()) - (0, 7)[seed % 2]
        self.num_expert_rows = 2000
        self.positions = rng.integers(-1, self.num_expert_rows, (max(self.capacity, 0), self.TOPK)).astype(np.int32)
        if has_failed:
            self.num_rows[:, self.RANK] = (-5, 1 << 30, 33)
            self.positions = rng.integers(-(1 << 31), 1 << 31, self.positions.shape).astype(np.int32)
        self.order = put(np.full((self.RANKS + 1, self.MOST), -77, np.int32))
        values = dict(
            positions=put(self.positions).ptr,
            num_rows=put(self.num_rows).ptr,
            order=self.order.ptr,
            num_topk=self.TOPK,
            num_ranks=self.RANKS,
            rank=self.RANK,
            capacity=self.capacity,
            max_chunks=self.MOST,
            chunk_rows=chunk_rows,
            num_expert_rows=self.num_expert_rows,
        )
        launch_local("order_chunks", callers_stream(0), values, self.RANKS)

    def check(self):
        order, first = array_at(self.order.ptr, self.order.shape, "int32"), 0
        for source in range(self.RANKS):
            listed = max(int(self.num_rows[source, self.RANK]), 0)
            count = int(np.clip(self.capacity - first, 0, min(listed, self.MOST * self.chunk_rows)))
            chunks = -(-count // self.chunk_rows)
            assert (order[source, chunks:] == -77).all(), "nothing is written past the chunks"
            np.testing.assert_array_equal(np.sort(order[source, :chunks]), np.arange(chunks))
            if not self.has_failed:
                rows = [
                    self.positions[first + chunk * self.chunk_rows : first + min((chunk + 1) * self.chunk_rows, count)]
                    for chunk in order[source, :chunks]
                ]
                last = np.array([max(int(part.max()), 0) for part in rows], np.int64)
                assert (np.diff(last * 1024 // self.num_expert_rows) >= 0).all()
            first += listed
        assert (order[self.RANKS] == -77).all()


def find_orders(machine, seed):
    cases = [dict(), dict(chunk_rows=4), dict(has_failed=True)]
    made = [Order(machine, seed + i, **case) for i, case in enumerate(cases)]
    machine.run()
    for one in made:
        one.check()


@pytest.mark.parametrize("seed", seeds(4))
def test_order(seed):
    """The order is a permutation of the chunks of each rank, by the last row that they need."""
    with Machine(1, seed, ("sm_90", "sm_80")[seed % 2]) as machine:
        find_orders(machine, seed)


# --- broken kernels -------------------------------------------------------------------------------------------------------------------


SUMS, ORDER = "experts/combine_tiles.cu", "experts/order_chunks.cu"
WEAK, OLD = dict(weak_memory=True), dict(arch="sm_80", weak_memory=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "how"),
    [
        pytest.param(SUMS, r"if \(!await_tile\(p, epoch, mine, before_wait\)\) return false;", "", {}, id="no-wait-for-tiles"),
        pytest.param(SUMS, r"await_tile\(p, epoch, mine, ", "await_tile(p, epoch, lane == 0 ? mine : -1, ", {}, id="the-first-choice-only"),
        pytest.param(SUMS, r"if \(lane == 0\) bulk_wait_read<kCombineStages - 1>\(\);", "", {}, id="stage-is-filled-too-early"),
        pytest.param(SUMS, r"__syncwarp\(\);  // all lanes have written their parts", "", {}, id="chunk-leaves-before-it-is-whole"),
        pytest.param(SUMS, r"fence_bulk_copies_of_shared\(\);", "", WEAK, id="chunk-leaves-without-a-fence"),
        pytest.param(SUMS, r"fence_release_sys\(\);\n      raise_flag", "raise_flag", OLD, id="no-fence"),
        pytest.param(SUMS, r"(routes, c\), \[\] \{\}\)\) return;)\n    __syncwarp\(\);", r"\1", OLD, id="no-wait-for-lanes"),
        pytest.param(SUMS, r"bulk_wait_written<0>\(\);  // of the last chunks", "", WEAK, id="told-too-early"),
        pytest.param(SUMS, r"return ordered_chunk\(p, routes, item\);", "return chunk_at(p, routes, item);", {}, id="another-flag"),
        pytest.param(SUMS, r"\(c.first \+ i\) \* kNumTopk", "i * kNumTopk", {}, id="weights-of-another-row"),
    ],
)  # fmt: skip
def test_broken_kernels_fail(tmp_path, file, pattern, replacement, how):
    folder = broken(tmp_path, file, pattern, replacement)

    def run(machine, seed):
        Layer(machine, machine.buffers(**LONG), seed, dtype="float32").check("returned")

    assert fails(folder, run, **how)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"if \(!await_product\(.*\)\) return;", "", id="no-wait"),
        pytest.param(r"tile \+= kLocalThreads", "tile += 1 << 20", id="some-tiles-only"),
    ],
)
def test_a_wait_for_few_tiles_fails(tmp_path, pattern, replacement):
    assert fails(broken(tmp_path, "experts/await_tiles.cu", pattern, replacement), wait_for_many_tiles, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"last = max\(last, positions\[i\]\)", "last = positions[i]", id="not-by-the-last-row"),
        pytest.param(r"first \+= max\(rows", "first -= max(rows", id="rows-of-another-rank"),
        pytest.param(
            r"min\(static_cast<i64>\(p.capacity\) - first, ", "min(static_cast<i64>(1) << 40, ", id="more-than-the-capacity"
        ),
        pytest.param(
            r"static_cast<i64>\(p.max_chunks\) \* p.chunk_rows\)", "static_cast<i64>(1) << 40)", id="any-number-of-chunks"
        ),
        pytest.param(r"\+ p.chunk_rows - 1\) / p.chunk_rows", ") / p.chunk_rows", id="a-part-of-a-chunk"),
    ],
)
def test_a_mistake_in_the_order_fails(tmp_path, pattern, replacement):
    folder = broken(tmp_path, ORDER, pattern, replacement)
    assert fails(folder, find_orders, 1)
