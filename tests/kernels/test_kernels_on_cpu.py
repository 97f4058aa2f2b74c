"""The CUDA kernels, compiled for the CPU, against the oracles: every rank of a Buffer in this process, threads in random order.

Each test tries a few orders. More of them: `KERNELS_ON_CPU_SEEDS=500 python -m pytest tests/kernels/test_kernels_on_cpu.py`.
A failure's name ends with its seed; `KERNELS_ON_CPU_SEEDS=17:18` tries that one alone.
"""

from __future__ import annotations

import os
import re
import shutil

import ml_dtypes
import numpy as np
import oracle
import pytest
from low_latency_oracle import check_dispatch, expected_combine, expected_dispatch, outputs

from deepep_rt import EPTimeoutError
from deepep_rt.kernels import source as sources
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

LOW_LATENCY = dict(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True, low_latency_sms=2)
FORMATS = [dict(use_fp8=False), dict(), dict(round_scale=True), dict(use_ue8m0=True)]


def seeds(count):
    """The seeds of a test: `count` of them, unless the environment asks for others."""
    first, _, last = os.environ.get("KERNELS_ON_CPU_SEEDS", str(count)).rpartition(":")
    return range(int(first or 0), int(last))


def inputs_of(config, seed):
    """What each rank gives: a random number of tokens, of whose choices some are none."""
    made = []
    for rank in range(config.num_ranks):
        rng = np.random.default_rng([seed, rank])
        sizes = int(rng.integers(0, config.num_max_tokens_per_rank + 1)), config.hidden, config.num_topk, config.num_experts
        kinds = dict(dtype="bfloat16", idx_dtype=("int32", "int64")[seed % 2])
        made.append(oracle.make_inputs(seed, rank, *sizes, skip_probability=0.1, **kinds))
    return made


def same(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert (got.view(np.uint8) == want.view(np.uint8)).all(), np.argwhere(got != want)[:4]


class LowLatencyRound:
    """A dispatch and a combine of all ranks. `dispatch`, `receive`, `combine` and `finish` queue them, `check` compares what came of them.

    Args:
        seed: Decides inputs and options.
        calling: The ranks that make the calls; None: all.
        options: Options that the seed shall not decide: `format`, `early` (weights travel with the dispatch), `reduce`, `hooks`.
    """

    def __init__(self, machine, buffers, seed, calling=None, **options):
        self.machine, self.buffers, self.config = machine, buffers, buffers[0].config
        rng = np.random.default_rng([seed, 3])
        drawn = dict(
            format=FORMATS[rng.integers(4)], early=rng.random() < 0.5, reduce=rng.random() < 0.7, hooks=rng.random() < 0.3
        )
        self.options = {**drawn, **options}
        self.calling = range(self.config.num_ranks) if calling is None else calling
        self.inputs = inputs_of(self.config, seed)
        shape = self.config.num_local_experts, self.config.num_max_recv_tokens, self.config.hidden
        self.y = [outputs(seed, rank, shape, special=seed % 3 == 0) for rank in range(self.config.num_ranks)]
        self.idx = {r: machine.put(r, self.inputs[r].topk_idx) for r in self.calling}
        self.weights = {r: machine.put(r, self.inputs[r].topk_weights) for r in self.calling}

    def dispatch(self):
        self.sent = {}
        for r in self.calling:
            early = self.weights[r] if self.options["early"] else None
            how = dict(topk_weights=early, return_recv_hook=self.options["hooks"], **self.options["format"])
            self.sent[r] = self.buffers[r].low_latency_dispatch(self.machine.put(r, self.inputs[r].x), self.idx[r], **how)

    def receive(self):
        self._call_hooks(self.sent)

    def combine(self):
        self.back = {}
        for r in self.calling:
            how = dict(allow_multiple_reduction=self.options["reduce"], return_recv_hook=self.options["hooks"])
            y = self.machine.put(r, self.y[r])
            self.back[r] = self.buffers[r].low_latency_combine(y, self.idx[r], self.weights[r], self.sent[r].handle, **how)

    def finish(self):
        self._call_hooks(self.back)

    def all(self):
        for step in (self.dispatch, self.receive, self.combine, self.finish):
            step()
        return self

    def _call_hooks(self, results):
        for result in results.values() if self.options["hooks"] else ():
            result.hook()

    def check(self, live=None, answering=None):
        """`live` and `answering` as in the oracle."""
        options, experts = self.options, self.config.num_experts
        kind = dict(options["format"])
        fp8 = dict(fp8=kind.pop("use_fp8", True), round_scale=kind.get("round_scale", False), ue8m0=kind.get("use_ue8m0", False))
        for r in self.calling:
            check_dispatch(self.sent[r], expected_dispatch(r, self.inputs, experts, live=live, **fp8))
            shares = dict(reduce_early=options["reduce"], live=live, answering=answering)
            same(self.back[r].x, expected_combine(r, self.inputs, self.y, experts, **shares))


def low_latency_rounds(machine, buffers, seed, count, **options):
    """Rounds that are queued one after the other before any of them runs."""
    rounds = [LowLatencyRound(machine, buffers, 100 * seed + i, **options).all() for i in range(count)]
    machine.run()
    for made in rounds:
        made.check()


def overlapped_rounds(machine, buffers, seed, count):
    """Rounds whose halves lie apart, with as many hooks open as there may be."""
    rounds = [LowLatencyRound(machine, buffers, 100 * seed + i, hooks=True) for i in range(count)]
    apart = buffers[0].config.num_slots - 1
    for i in range(count + 2 * apart):
        for step, made in ((0, "dispatch"), (apart, "receive"), (apart, "combine"), (2 * apart, "finish")):
            if 0 <= i - step < count:
                getattr(rounds[i - step], made)()
    machine.run()
    for made in rounds:
        made.check()


@pytest.mark.parametrize("seed", seeds(6))
def test_low_latency(seed):
    with Machine(2, seed, num_sms=(None, 1, 2)[seed % 3], weak_memory=seed % 2 == 1) as machine:
        low_latency_rounds(machine, machine.buffers(**LOW_LATENCY), seed, 6)


@pytest.mark.parametrize("seed", seeds(4))
def test_open_hooks(seed):
    with Machine(2, seed, weak_memory=seed % 4 == 1) as machine:
        overlapped_rounds(machine, machine.buffers(**LOW_LATENCY, num_slots=2 + seed % 2), seed, 8)


@pytest.mark.parametrize("seed", seeds(2))
def test_many_tokens(seed):
    """Which another kernel combines."""
    with Machine(4, seed) as machine:
        sizes = dict(num_max_tokens_per_rank=12, num_topk=4, num_experts=8, low_latency_sms=1)
        low_latency_rounds(machine, machine.buffers(**{**LOW_LATENCY, **sizes}), seed, 3, reduce=True)
        assert "ll_combine_large" in machine.launched


@pytest.mark.parametrize("seed", seeds(2))
def test_mask_mode(seed):
    with Machine(2, seed) as machine:
        low_latency_rounds(machine, machine.buffers(**LOW_LATENCY, on_timeout="mask"), seed, 3, reduce=True)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_silent_rank_is_masked(seed):
    """The others go on without it, in this call and in the next ones."""
    with Machine(3, seed) as machine:
        buffers = machine.buffers(**{**LOW_LATENCY, "num_experts": 6}, on_timeout="mask")
        LowLatencyRound(machine, buffers, seed, reduce=True).all()
        machine.run()
        rounds = [LowLatencyRound(machine, buffers, seed + i, calling=[0, 2], reduce=True).all() for i in (1, 2)]
        machine.run()
        for made in rounds:
            made.check(live=[0, 2])
        assert [buffers[r].query_masked_ranks() for r in (0, 2)] == [[1], [1]]


def test_a_silent_rank_is_named():
    with Machine(2, 0) as machine:
        buffers = machine.buffers(**LOW_LATENCY)
        LowLatencyRound(machine, buffers, 1, calling=[0], hooks=False).all()
        machine.run()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            LowLatencyRound(machine, buffers, 2, calling=[0]).all()


# --- throughput -----------------------------------------------------------------------------------------------------------------------

THROUGHPUT = dict(num_max_tokens_per_rank=40, hidden=64, num_topk=2, num_experts=6, num_sms=2)


def throughput_rounds(machine, buffers, seed, count):
    """Rounds of all ranks, one after the other; the host waits for the counts of some, and makes some again with the same routing."""
    rounds = [ThroughputRound(machine, buffers, 100 * seed + i) for i in range(count)]
    machine.each_rank(lambda rank: [made.play(rank) for made in rounds])
    for made in rounds:
        made.check()


class ThroughputRound:
    """A dispatch and a combine of all ranks."""

    def __init__(self, machine, buffers, seed):
        self.machine, self.buffers, self.config = machine, buffers, buffers[0].config
        rng = np.random.default_rng([seed, 4])
        ranks, experts = range(self.config.num_ranks), self.config.num_experts
        self.inputs = inputs_of(self.config, seed)
        most = self.config.num_max_recv_tokens
        self.worst = [None, most, int(rng.integers(1, most))][rng.integers(3)]
        self.alignment = int(rng.integers(1, 5))
        how = dict(num_worst_tokens=self.worst, expert_alignment=self.alignment)
        self.expected = [oracle.expected_dispatch(r, self.inputs, experts, **how) for r in ranks]
        draw = np.random.default_rng([seed, 5])
        self.y = [draw.standard_normal(e.x.shape, np.float32).astype(ml_dtypes.bfloat16) for e in self.expected]
        self.weights = [draw.random((len(e.x), self.config.num_topk), np.float32) for e in self.expected]
        self.sent, self.again, self.back = {}, {}, {}

    def play(self, rank):
        put, mine, buffer = self.machine.put, self.inputs[rank], self.buffers[rank]
        x, idx, weights = put(rank, mine.x), put(rank, mine.topk_idx), put(rank, mine.topk_weights)
        how = dict(num_worst_tokens=self.worst, expert_alignment=self.alignment)
        sent = self.sent[rank] = buffer.dispatch(x, idx, weights, **how)
        if self.alignment == 1:
            self.again[rank] = buffer.dispatch(x, handle=sent.handle)
        self.back[rank] = buffer.combine(put(rank, self.y[rank]), sent.handle, topk_weights=put(rank, self.weights[rank]))

    def check(self):
        for rank, expected in enumerate(self.expected):
            oracle.check_dispatch(self.sent[rank], expected, has_counts=self.worst is None)
            if rank in self.again:
                same(self.again[rank].recv_x[: expected.num_kept], expected.x[: expected.num_kept])
            how = dict(all_worst=[self.worst] * self.config.num_ranks, all_weights=self.weights)
            total, size, weights = oracle.expected_combine(rank, self.inputs, self.y, self.config.num_experts, **how)
            allowed = oracle.combine_tolerance("bfloat16", size, self.config.num_ranks)
            assert (np.abs(self.back[rank].x.astype(np.float64) - total) <= allowed).all()
            assert np.allclose(self.back[rank].topk_weights, weights, rtol=1e-6)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_throughput(arch, seed):
    with Machine(3, seed, arch, num_sms=(None, 1)[seed % 2], weak_memory=seed % 4 > 1) as machine:
        throughput_rounds(machine, machine.buffers(**THROUGHPUT), seed, 4)


# --- the tests notice -----------------------------------------------------------------------------------------------------------------


def broken(tmp_path, file, pattern, replacement):
    """A copy of the kernels in which a piece of one is replaced."""
    folder = shutil.copytree(sources.source_dir(), tmp_path / "cuda_src")
    text = (folder / file).read_text()
    assert len(re.findall(pattern, text)) == 1, f"{file} has changed; find the piece that {pattern!r} was"
    (folder / file).write_text(re.sub(pattern, replacement, text))
    return folder


def notices(folder, play, **options):
    """Whether one of some seeds shows that the kernels in `folder` are wrong."""
    for seed in range(20):
        try:
            with Machine(2, seed, cuda_src=folder, **options) as machine:
                play(machine, seed)
        except (AssertionError, EPTimeoutError):
            return True
    return False


BROKEN = [
    pytest.param(
        overlapped_rounds,
        "low_latency/low_latency.cuh",
        r"if \(!has_room && ",
        "if (false && ",
        id="no-wait-for-acknowledgements",
    ),
    pytest.param(
        low_latency_rounds,
        "low_latency/ll_combine_receive.cuh",
        r"st_vec\(from\[j\], empty_vec\(\)\);",
        "",
        id="rows-are-not-reset",
    ),
    pytest.param(
        low_latency_rounds,
        "low_latency/ll_dispatch_send.cuh",
        r"next;\n    __syncthreads\(\);",
        "next;",
        id="a-block-does-not-meet",
    ),
    pytest.param(
        throughput_rounds,
        "common/work.cuh",
        r"num_blocks, 1\) == gridDim.x - 1",
        "num_blocks, 1) == 0",
        id="flag-of-the-first-block",
    ),
    pytest.param(throughput_rounds, "throughput/combine.cu", r"ok = wait_epoch\(p, flags [^;]*;", ";", id="sums-do-not-wait"),
]


@pytest.mark.parametrize(("play", "file", "pattern", "replacement"), BROKEN)
def test_a_broken_kernel_is_noticed(tmp_path, play, file, pattern, replacement):
    folder, sizes = broken(tmp_path, file, pattern, replacement), THROUGHPUT if play is throughput_rounds else LOW_LATENCY
    assert notices(folder, lambda machine, seed: play(machine, machine.buffers(**sizes), seed, 8))


@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        pytest.param("throughput/combine.cu", r"fence_release_sys\(\);\n      raise_flag", "raise_flag", id="no-fence"),
        pytest.param(
            "throughput/combine.cu", r"kRowBytes\);\n    __syncwarp\(\);", "kRowBytes);", id="other-lanes-are-not-waited-for"
        ),
        pytest.param(
            "throughput/recv_window.cuh",
            r"st_release_sys\(&theirs->flag, epoch\)",
            "st_relaxed_sys(&theirs->flag, epoch)",
            id="no-release",
        ),
    ],
)
def test_a_missing_order_of_memory_is_noticed(tmp_path, file, pattern, replacement):
    folder = broken(tmp_path, file, pattern, replacement)
    options = dict(arch="sm_80", weak_memory=True)
    assert notices(folder, lambda machine, seed: throughput_rounds(machine, machine.buffers(**THROUGHPUT), seed, 8), **options)
