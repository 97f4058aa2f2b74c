"""Rounds of calls on the simulated machine, which tests queue, run and compare with the oracles."""

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
from deepep_rt.cuda import driver
from deepep_rt.kernels import source as sources

from .device_arrays import DeviceArray, array_at, callers_stream
from .machine import Machine

LOW_LATENCY = dict(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True, low_latency_sms=2)
FORMATS = [dict(use_fp8=False), dict(), dict(round_scale=True), dict(use_ue8m0=True)]
COMPRESSED = dict(num_max_tokens_per_rank=24, hidden=640, num_topk=2, num_experts=6, num_sms=2)
LONG_COMPRESSED = dict(
    COMPRESSED, num_max_tokens_per_rank=40, hidden=3200, num_sms=1
)  # several parts and chunks for each copy warp
THROUGHPUT = dict(num_max_tokens_per_rank=40, hidden=64, num_topk=2, num_experts=6, num_sms=2)


def seeds(count):
    """Return the seeds of a test: `count` of them, unless the environment sets others. Only the first one is quick."""
    first, _, last = os.environ.get("KERNELS_ON_CPU_SEEDS", str(count)).rpartition(":")
    first, *others = range(int(first or 0), int(last))
    return [first, *(pytest.param(seed, marks=pytest.mark.full) for seed in others)]


def inputs_of(config, seed):
    """Make the inputs of each rank: a random number of tokens, with some choices of -1."""
    made = []
    for rank in range(config.num_ranks):
        rng = np.random.default_rng([seed, rank])
        sizes = int(rng.integers(0, config.num_max_tokens_per_rank + 1)), config.hidden, config.num_topk, config.num_experts
        dtypes = dict(dtype="bfloat16", idx_dtype=("int32", "int64")[seed % 2])
        made.append(oracle.make_inputs(seed, rank, *sizes, skip_probability=0.1, **dtypes))
    return made


def assert_same(got, want):
    """Compare two arrays bit for bit."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert (got.view(np.uint8) == want.view(np.uint8)).all(), np.argwhere(got != want)[:4]


class LowLatencyRound:
    """A dispatch and a combine of all ranks. `dispatch`, `receive`, `combine` and `finish` queue work, and `check` compares the results.

    Args:
        seed: Decides inputs and options.
        calling: The ranks that make the calls; None: all.
        options: Options to set instead of random ones: `format`, `early` (the dispatch sends the weights), `reduce`, `hooks`,
            `compress`.
    """

    def __init__(self, machine, buffers, seed, calling=None, **options):
        self.machine, self.buffers, self.config = machine, buffers, buffers[0].config
        rng = np.random.default_rng([seed, 3])
        random_options = dict(
            format=FORMATS[rng.integers(4)], early=rng.random() < 0.5, reduce=rng.random() < 0.7, hooks=rng.random() < 0.3
        )
        self.options = {**random_options, "compress": None, **options}
        self.calling = range(self.config.num_ranks) if calling is None else calling
        self.inputs = inputs_of(self.config, seed)
        shape = self.config.num_local_experts, self.config.worst_recv_tokens, self.config.hidden
        self.y = [outputs(seed, rank, shape, special=seed % 3 == 0) for rank in range(self.config.num_ranks)]
        self.idx = {r: machine.put(r, self.inputs[r].topk_idx) for r in self.calling}
        self.weights = {r: machine.put(r, self.inputs[r].topk_weights) for r in self.calling}

    def dispatch(self):
        self.sent = {}
        for r in self.calling:
            early = self.weights[r] if self.options["early"] else None
            arguments = dict(topk_weights=early, return_recv_hook=self.options["hooks"], **self.options["format"])
            self.sent[r] = self.buffers[r].low_latency_dispatch(self.machine.put(r, self.inputs[r].x), self.idx[r], **arguments)

    def receive(self):
        self._call_hooks(self.sent)

    def combine(self):
        self.back = {}
        for r in self.calling:
            arguments = dict(allow_multiple_reduction=self.options["reduce"], return_recv_hook=self.options["hooks"])
            arguments["compress"] = self.options["compress"]
            y = self.machine.put(r, self.y[r])
            self.back[r] = self.buffers[r].low_latency_combine(y, self.idx[r], self.weights[r], self.sent[r].handle, **arguments)

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
        """Compare the results; `live` and `answering` as in the oracle."""
        options, experts = self.options, self.config.num_experts
        kind = dict(options["format"])
        fp8 = dict(fp8=kind.pop("use_fp8", True), round_scale=kind.get("round_scale", False), ue8m0=kind.get("use_ue8m0", False))
        for r in self.calling:
            check_dispatch(self.sent[r], expected_dispatch(r, self.inputs, experts, live=live, **fp8))
            shares = dict(reduce_early=options["reduce"], live=live, answering=answering, compress=options["compress"])
            assert_same(self.back[r].x, expected_combine(r, self.inputs, self.y, experts, **shares))


def low_latency_rounds(machine, buffers, seed, count, **options):
    """Queue some rounds, and then run them."""
    rounds = [LowLatencyRound(machine, buffers, 100 * seed + i, **options).all() for i in range(count)]
    machine.run()
    for made in rounds:
        made.check()


def compressed_low_latency_rounds(machine, buffers, seed, count, kinds=("fp8", None, "log10"), **options):
    """Queue rounds whose rows come back compressed, in each format in turn, between rounds without. Then run them."""
    rounds = []
    for i in range(count):
        compress = kinds[(seed + i) % len(kinds)]
        given = dict(compress=compress, **({"reduce": True} if compress else {}), **options)
        rounds.append(LowLatencyRound(machine, buffers, 100 * seed + i, **given).all())
    machine.run()
    for made in rounds:
        made.check()


def overlapped_rounds(machine, buffers, seed, count):
    """Queue rounds with other rounds between a call and its hook, and with as many open hooks as allowed."""
    rounds = [LowLatencyRound(machine, buffers, 100 * seed + i, hooks=True) for i in range(count)]
    distance = buffers[0].config.num_slots - 1
    for i in range(count + 2 * distance):
        for step, made in ((0, "dispatch"), (distance, "receive"), (distance, "combine"), (2 * distance, "finish")):
            if 0 <= i - step < count:
                getattr(rounds[i - step], made)()
    machine.run()
    for made in rounds:
        made.check()


class PreparedRound(LowLatencyRound):
    """A round in which some ranks make prepared calls, and the others ordinary ones.

    Args:
        preparing: The ranks that prepare calls.
        steps: Their prepared calls, each with its x, topk_idx, topk_weights and y, which this writes in place. None: prepare them.
    """

    def __init__(self, machine, buffers, seed, preparing, steps=None, **options):
        super().__init__(machine, buffers, seed, **options)
        settings = dict(dtype="bfloat16", idx_dtype="int64", skip_probability=0.1)
        sizes = 3, self.config.hidden, self.config.num_topk, self.config.num_experts
        self.inputs = [oracle.make_inputs(seed, rank, *sizes, **settings) for rank in range(self.config.num_ranks)]
        self.idx, self.weights = {}, {}
        self.steps = steps or {rank: self._prepare(rank) for rank in preparing}
        for rank, one in enumerate(self.inputs):
            if rank in self.steps:
                mine = one.x, one.topk_idx, one.topk_weights, self.y[rank]
                for array, values in zip(self.steps[rank][1], mine, strict=True):
                    array_at(array.ptr, array.shape, array.dtype)[...] = values
            else:
                self.idx[rank], self.weights[rank] = machine.put(rank, one.topk_idx), machine.put(rank, one.topk_weights)

    def _prepare(self, rank):
        mine, options = self.inputs[rank], self.options
        arrays = [self.machine.put(rank, values) for values in (mine.x, mine.topk_idx, mine.topk_weights, self.y[rank])]
        how = dict(allow_multiple_reduction=options["reduce"], return_recv_hook=options["hooks"], compress=options["compress"])
        return self.buffers[rank].prepare_low_latency(*arrays[:3], **how, **options["format"]), arrays

    def dispatch(self):
        self.calling = [rank for rank in range(self.config.num_ranks) if rank not in self.steps]
        super().dispatch()
        self.sent |= {rank: step.dispatch() for rank, (step, _) in self.steps.items()}

    def combine(self):
        super().combine()
        self.back |= {rank: step.combine(arrays[3]) for rank, (step, arrays) in self.steps.items()}
        self.calling = range(self.config.num_ranks)


def prepared_rounds(machine, buffers, seed, count, **options):
    """Run rounds of prepared calls, between rounds of ordinary ones. Rank 0 makes ordinary calls in all of them."""
    rng = np.random.default_rng([seed, 6])
    random_options = dict(format=FORMATS[rng.integers(4)], reduce=rng.random() < 0.7, hooks=rng.random() < 0.5)
    options = {**random_options, **options, "early": True}
    steps = None
    for i in range(count):
        made = PreparedRound(machine, buffers, 100 * seed + i, range(1, machine.num_ranks), steps, **options).all()
        steps = made.steps
        machine.run()
        made.check()
        low_latency_rounds(machine, buffers, 100 * seed + 50 + i, 1)


def throughput_rounds(machine, buffers, seed, count):
    """Run rounds of all ranks in turn. In some, the host waits for the counts; some repeat the dispatch with its handle."""
    rounds = [ThroughputRound(machine, buffers, 100 * seed + i) for i in range(count)]
    machine.each_rank(lambda rank: [made.run(rank) for made in rounds])
    for made in rounds:
        made.check()


def compressed_rounds(machine, buffers, seed, count, kinds=("fp8", None, "log10")):
    """Run rounds whose rows come back compressed, in each format in turn, between rounds without."""
    rounds = [ThroughputRound(machine, buffers, 100 * seed + i, compress=kinds[i % len(kinds)]) for i in range(count)]
    machine.each_rank(lambda rank: [made.run(rank) for made in rounds])
    for made in rounds:
        made.check()


def long_compressed_rounds(machine, buffers, seed, count):
    compressed_rounds(machine, buffers, seed, count, kinds=("log10", "fp8"))


class ThroughputRound:
    """A dispatch and a combine of all ranks. `compress`: the form of the rows on the way back."""

    def __init__(self, machine, buffers, seed, compress=None):
        self.machine, self.buffers, self.config = machine, buffers, buffers[0].config
        rng = np.random.default_rng([seed, 4])
        ranks, experts = range(self.config.num_ranks), self.config.num_experts
        self.inputs = inputs_of(self.config, seed)
        most = self.config.num_max_recv_tokens
        self.worst = [None, most, int(rng.integers(1, most))][rng.integers(3)]
        self.alignment = int(rng.integers(1, 5))
        options = dict(num_worst_tokens=self.worst, expert_alignment=self.alignment)
        self.expected = [oracle.expected_dispatch(r, self.inputs, experts, **options) for r in ranks]
        draw = np.random.default_rng([seed, 5])
        self.y = [draw.standard_normal(e.x.shape, np.float32).astype(ml_dtypes.bfloat16) for e in self.expected]
        self.weights = [draw.random((len(e.x), self.config.num_topk), np.float32) for e in self.expected]
        self.sent, self.again, self.back = {}, {}, {}
        self.compress = compress

    def run(self, rank):
        put, mine, buffer = self.machine.put, self.inputs[rank], self.buffers[rank]
        x, idx, weights = put(rank, mine.x), put(rank, mine.topk_idx), put(rank, mine.topk_weights)
        options = dict(num_worst_tokens=self.worst, expert_alignment=self.alignment)
        sent = self.sent[rank] = buffer.dispatch(x, idx, weights, **options)
        if self.alignment == 1:
            self.again[rank] = buffer.dispatch(x, handle=sent.handle)
        how = dict(topk_weights=put(rank, self.weights[rank]), compress=self.compress)
        self.back[rank] = buffer.combine(put(rank, self.y[rank]), sent.handle, **how)

    def check(self):
        for rank, expected in enumerate(self.expected):
            oracle.check_dispatch(self.sent[rank], expected, has_counts=self.worst is None)
            if rank in self.again:
                assert_same(self.again[rank].recv_x[: expected.num_kept], expected.x[: expected.num_kept])
            options = dict(all_worst=[self.worst] * self.config.num_ranks, all_weights=self.weights, compress=self.compress)
            options.update(node_size=self.config.node_size, path=self.config.path)
            oracle.check_sums(self.back[rank], rank, self.inputs, self.y, self.config.num_experts, **options)


def prepared_throughput_rounds(machine, buffers, seed, count):
    """Queue rounds along one routing, each with new rows in the same arrays, and then run them. Rank 0 makes ordinary calls.

    Peers write the rows of each dispatch to the memory of the last one, while ranks run at different speeds. A combine of these rows
    notices if they come too early.
    """
    config, put = buffers[0].config, machine.put
    routing = inputs_of(config, seed)
    all_x = [inputs_of(config, 100 * seed + i) for i in range(count)]
    for i, inputs in enumerate(all_x):  # the number of tokens is that of the routing
        draw = np.random.default_rng([seed, i, 8])
        for one, first in zip(inputs, routing, strict=True):
            one.x, one.topk_idx = draw.standard_normal(first.x.shape, np.float32).astype(first.x.dtype), first.topk_idx
            one.topk_weights = None
    found = []
    for rank, buffer in enumerate(buffers):
        x, idx = put(rank, routing[rank].x), put(rank, routing[rank].topk_idx)
        handle = buffer.dispatch(x, idx, num_worst_tokens=config.num_max_recv_tokens).handle
        step = buffer.prepare_throughput(x, handle) if rank else None
        for inputs in all_x:
            fresh, out = put(rank, inputs[rank].x), put(rank, np.zeros_like(inputs[rank].x))
            num_bytes = inputs[rank].x.nbytes
            driver.copy_async(x.ptr, fresh.ptr, num_bytes, callers_stream(rank))
            received = (step.dispatch() if step else buffer.dispatch(x, handle=handle)).views["x"]
            y = DeviceArray(rank, received.ptr, received.shape, received.dtype)
            back = step.combine(y) if step else buffer.combine(y, handle)
            driver.copy_async(out.ptr, back.views["x"].ptr, num_bytes, callers_stream(rank))
            found.append((rank, inputs, out))
    machine.run()
    for rank, inputs, out in found:
        y = [oracle.expected_dispatch(r, inputs, config.num_experts).x for r in range(config.num_ranks)]
        wanted, _ = oracle.expected_sums(rank, inputs, y, config.num_experts, node_size=config.node_size)
        assert_same(array_at(out.ptr, out.shape, out.dtype), wanted)


def expert_rounds(machine, buffers, seed, count):
    """Run rounds whose rows lie expert by expert, between rounds by token."""
    kinds = (ExpertRound, ThroughputRound)
    rounds = [kinds[i % 2](machine, buffers, 100 * seed + i) for i in range(count)]
    machine.each_rank(lambda rank: [made.run(rank) for made in rounds])
    for made in rounds:
        made.check()


class ExpertRound:
    """A dispatch and a combine of all ranks, with rows that lie expert by expert."""

    def __init__(self, machine, buffers, seed):
        self.machine, self.buffers, self.config = machine, buffers, buffers[0].config
        rng = np.random.default_rng([seed, 6])
        ranks, experts = range(self.config.num_ranks), self.config.num_experts
        self.inputs = inputs_of(self.config, seed)
        self.weighted, self.alignment = bool(rng.integers(2)), int(rng.integers(1, 9))
        most = self.config.num_max_recv_tokens * self.config.num_topk
        self.worst = [None, most, int(rng.integers(1, most))][rng.integers(3)]
        options = dict(num_worst_tokens=self.worst, expert_alignment=self.alignment)
        self.options = dict(**options, layout="expert", zero_padding=bool(rng.integers(2)))
        self.expected = [oracle.expected_expert_rows(r, self.inputs, experts, **options) for r in ranks]
        draw = np.random.default_rng([seed, 7])
        self.y = [draw.standard_normal(e.x.shape, np.float32).astype(ml_dtypes.bfloat16) for e in self.expected]
        for y, expected in zip(self.y, self.expected, strict=True):
            y[expected.experts < 0] = np.nan  # combine must not read padding
        num_biases = int(draw.integers(3))
        self.biases = [
            [draw.standard_normal(one.x.shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(num_biases)]
            for one in self.inputs
        ]
        self.sent, self.again, self.back, self.choices = {}, {}, {}, {}

    def run(self, rank):
        put, mine, buffer = self.machine.put, self.inputs[rank], self.buffers[rank]
        x, idx, weights = put(rank, mine.x), put(rank, mine.topk_idx), put(rank, mine.topk_weights)
        sent = self.sent[rank] = buffer.dispatch(x, idx, weights, **self.options)
        if self.alignment == 1:
            self.again[rank] = buffer.dispatch(x, handle=sent.handle)
        weights = put(rank, self.expected[rank].weights)
        y, how = put(rank, self.y[rank]), dict(topk_weights=weights, weighted=self.weighted)
        self.back[rank] = buffer.combine(y, sent.handle, **how)
        biases = [put(rank, bias) for bias in self.biases[rank]]
        self.choices[rank] = buffer.combine(y, sent.handle, **how, reduce="topk", bias=biases)

    def check(self):
        with_padding, experts = self.options["zero_padding"], self.config.num_experts
        by_token = []
        for rank, expected in enumerate(self.expected):
            oracle.check_expert_rows(self.sent[rank], expected, has_counts=self.worst is None, with_padding=with_padding)
            if rank in self.again:
                kept = expected.experts >= 0
                assert_same(self.again[rank].recv_x[kept], expected.x[kept])
            weights = expected.weights if self.weighted else None
            by_token.append(oracle.rows_by_token(rank, self.inputs, experts, self.y[rank], expected, weights=weights))
        for rank, back in self.back.items():
            wanted, _ = oracle.expected_sums(rank, self.inputs, by_token, experts, node_size=self.config.node_size)
            assert_same(back.x, wanted)
            if not self.weighted and self.worst is None:
                mine = self.inputs[rank]
                assert_same(back.topk_weights, np.where(mine.topk_idx >= 0, mine.topk_weights, np.float32(0)))
        for rank, back in self.choices.items():
            how = dict(weighted=self.weighted, biases=self.biases[rank])
            wanted = oracle.expected_choice_sums(rank, self.inputs, self.y, self.expected, **how)
            assert_same(back.x, wanted)
            if not self.weighted:
                assert_same(back.topk_weights, self.back[rank].topk_weights)


def broken(tmp_path, file, pattern, replacement):
    """Copy the kernels, with a piece of one replaced."""
    folder = shutil.copytree(sources.source_dir(), tmp_path / "cuda_src")
    text = (folder / file).read_text()
    assert len(re.findall(pattern, text)) == 1, f"{file} has changed; find the piece that matched {pattern!r}"
    (folder / file).write_text(re.sub(pattern, replacement, text))
    return folder


def fails(folder, run, **options):
    """Return whether one of 20 seeds shows that the kernels in `folder` are broken."""
    for seed in range(20):
        try:
            with Machine(2, seed, cuda_src=folder, **options) as machine:
                run(machine, seed)
        except (AssertionError, EPTimeoutError):
            return True
    return False
