"""Run scenarios with the kernels on the simulated machine: rounds of calls that tests queue, run and compare with the oracles."""

from __future__ import annotations

import functools
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import oracle
import pytest
from scenario_table import FORMATS, OPAQUE, drawn
from scenarios import Sum, by_buffer

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.cuda import driver
from deepep_rt.kernels import source as sources

from .device_arrays import DeviceArray, array_at, callers_stream
from .machine import Machine
from .slots import config_of, members_of

LOW_LATENCY = dict(num_max_tokens_per_rank=4, hidden=256, num_topk=2, num_experts=4, low_latency=True, low_latency_sms=2)
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


class Members:
    """The ranks of a round. Absent slots have no tokens, and the oracle sees -1 where calls name their experts."""

    def __init__(self, machine, buffers):
        self._put, self.ranks = machine.put, members_of(buffers)
        self._named = []  # choices with -1, and as calls name them

    def row(self, row):
        """Return the row for these ranks."""
        return replace(row, changed=functools.partial(self._change, row.changed))

    def _change(self, change, one, rank, ranks, each):
        if change is not None:
            change(one, rank, ranks, each)
        if rank not in self.ranks:
            one.x, one.topk_idx, one.topk_weights = one.x[:0], one.topk_idx[:0], one.topk_weights[:0]
            one.scales = None if one.scales is None else one.scales[:0]
            return
        named = one.topk_idx
        one.topk_idx = np.where(np.isin(named // each, self.ranks), named, -1).astype(named.dtype)
        self._named.append((one.topk_idx, named))

    def given(self, array):
        """Return an array as calls get it."""
        return next((named for known, named in self._named if known is array), array)

    def put(self, rank, array):
        """Copy an argument of a call to the memory of a rank's GPU."""
        return self._put(rank, self.given(array))


class LowLatencyRound:
    """A dispatch and a combine of all ranks. `dispatch`, `receive`, `combine` and `finish` queue work, and `check` compares the results.

    Args:
        seed: Decides inputs and options.
        calling: The ranks that make the calls; None: all.
        format: Options of the dispatch; None: random ones.
        compress: The form of the rows on the way back.
        options: Options to set instead of random ones: `early` (the dispatch sends the weights), `reduce`, `hooks`, and those of a row.
    """

    def __init__(self, machine, buffers, seed, calling=None, format=None, compress=None, **options):
        self.machine, self.buffers, config = machine, buffers, config_of(buffers)
        self.members = Members(machine, buffers)
        row = drawn("low_latency", seed, config.num_max_tokens_per_rank)
        how = replace(row.sums[0], compress=compress)
        if "reduce" in options:
            how = replace(how, reduce="rank" if options.pop("reduce") else "topk")
        if "early" in options:
            options["early"] = (options.pop("early"),)
        if format is not None:
            options |= dict(options={"use_fp8": True, **format}, dtype="bfloat16", scales=0, changed=None)
        row = self.members.row(replace(row, sums=(how,), **options))
        self.round, self.num_ranks = row.start(config), config.num_ranks
        self.inputs, self.y = self.round.inputs, self.round.outputs(how)
        self.calling = self.members.ranks if calling is None else calling

    def _put(self, rank):
        return functools.partial(self.members.put, rank)

    def dispatch(self):
        for rank in self.calling:
            self.round.dispatch(self.buffers[rank], rank, self._put(rank))

    def receive(self):
        for rank in self.round.sent:
            self.round.receive(rank)

    def combine(self):
        for rank in self.calling:
            self.round.combine(self.buffers[rank], rank, self._put(rank))

    def finish(self):
        for rank in self.round.back:
            self.round.finish(rank)

    def run(self, rank):
        """Make all calls of one rank."""
        self.round.call(self.buffers[rank], rank, self._put(rank))

    def all(self):
        for step in (self.dispatch, self.receive, self.combine, self.finish):
            step()
        return self

    def check(self, **live):
        """Compare the results; `live` and `answering` as in the oracle."""
        for rank in self.round.back:
            self.round.check(rank, **live)


def low_latency_rounds(machine, buffers, seed, count, **options):
    """Queue some rounds, and then run them."""
    rounds = [LowLatencyRound(machine, buffers, 100 * seed + i, **options).all() for i in range(count)]
    machine.run()
    for made in rounds:
        made.check()


def opaque_rounds(machine, buffers, seed, count):
    """Queue rounds of quantised rows of one kind, and some of bfloat16. Then run them."""
    opaque = dict(options=FORMATS[0], **list(OPAQUE.values())[seed % len(OPAQUE)])
    rounds = []
    for i in range(count):
        kind = dict(format=dict(use_fp8=False)) if i % 4 == 3 else opaque
        rounds.append(LowLatencyRound(machine, buffers, 100 * seed + i, **kind).all())
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
    distance = config_of(buffers).num_slots - 1
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
        drawn = dict(skip_probability=0.1, idx_dtype="int64")
        super().__init__(machine, buffers, seed, tokens=lambda rank: 3, drawn=drawn, **options)
        self.steps = steps or {rank: self._prepare(rank) for rank in preparing}
        self.calling = [rank for rank in self.members.ranks if rank not in self.steps]
        for rank, (_, arrays) in self.steps.items():
            for array, values in zip(arrays, self._arrays(rank), strict=True):
                array_at(array.ptr, array.shape, array.dtype)[...] = values

    def _arrays(self, rank):
        mine = self.inputs[rank]
        return [
            mine.x,
            self.members.given(mine.topk_idx),
            mine.topk_weights,
            self.y[rank],
            *([] if mine.scales is None else [mine.scales]),
        ]

    def _prepare(self, rank):
        row, arrays = self.round.row, [self.machine.put(rank, values) for values in self._arrays(rank)]
        (total,) = row.sums
        how = dict(allow_multiple_reduction=total.reduce == "rank", return_recv_hook=row.hooks, compress=total.compress)
        scales = dict(x_scales=arrays[4]) if arrays[4:] else {}
        return self.buffers[rank].prepare_low_latency(*arrays[:3], **scales, **how, **row.options), arrays

    def dispatch(self):
        super().dispatch()
        self.round.sent |= {rank: [step.dispatch()] for rank, (step, _) in self.steps.items()}

    def combine(self):
        super().combine()
        self.round.back |= {rank: [step.combine(arrays[3])] for rank, (step, arrays) in self.steps.items()}


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


class ThroughputRound:
    """A dispatch, perhaps another one with its handle, and combines of all ranks. `fixed`: what of the row is not random."""

    def __init__(self, machine, buffers, seed, layout="token", **fixed):
        self.members, self._buffers, config = Members(machine, buffers), buffers, config_of(buffers)
        row = drawn(layout, seed, config.num_max_tokens_per_rank, dtypes=["bfloat16"], scales=[0])
        self.round = self.members.row(replace(row, **fixed)).start(config)
        self.inputs = self.round.inputs

    def run(self, rank):
        self.round.call(self._buffers[rank], rank, functools.partial(self.members.put, rank))

    def check(self):
        for rank in self.round.sent:
            self.round.check(rank)


def run_rounds(machine, rounds):
    """Run rounds of all ranks in turn, and compare their results."""
    machine.each_rank(lambda rank: [made.run(rank) for made in rounds], rounds[0].members.ranks)
    for made in rounds:
        made.check()


def run_table(num_ranks, rows):
    """Run rows of the table, but for rows that look at results before the GPUs have written them."""
    for settings, group in by_buffer([row for row in rows if not row.overwrites], num_ranks):
        with Machine(num_ranks, 1) as machine:
            buffers = machine.buffers(**{"num_max_tokens_per_rank": 64, **settings})
            for row in group:
                made = row.start(buffers[0].config)
                machine.each_rank(lambda rank: made.call(buffers[rank], rank, functools.partial(machine.put, rank)))  # noqa: B023
                for rank in range(num_ranks):
                    made.check(rank)


def throughput_rounds(machine, buffers, seed, count):
    """In some rounds, the host waits for the counts; some repeat the dispatch with its handle."""
    run_rounds(machine, [ThroughputRound(machine, buffers, 100 * seed + i) for i in range(count)])


def compressed_rounds(machine, buffers, seed, count, kinds=("fp8", None, "log10")):
    """Run rounds whose rows come back compressed, in each format in turn, between rounds without."""
    sums = [(Sum(weights=True, compress=kinds[i % len(kinds)]),) for i in range(count)]
    run_rounds(machine, [ThroughputRound(machine, buffers, 100 * seed + i, sums=sums[i]) for i in range(count)])


def long_compressed_rounds(machine, buffers, seed, count):
    compressed_rounds(machine, buffers, seed, count, kinds=("log10", "fp8"))


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


def in_place_rounds(machine, buffers, seed, count, compress=None, with_weights=True):
    """Queue dispatches, each with a combine of rows that lie where it has brought rows, and then run them.

    Work behind the combine writes there at once, and so do peers in the next dispatch. A combine of the same rows in other memory has to
    give the same bits. In some rounds, a rank has its rows elsewhere in both combines.
    """
    config, put, found = buffers[0].config, machine.put, []
    shape = config.num_max_recv_tokens, config.hidden
    for i in range(count):
        for rank, (buffer, mine) in enumerate(zip(buffers, inputs_of(config, 100 * seed + i), strict=True)):
            draw = np.random.default_rng([seed, i, rank, 9])
            y = put(rank, draw.standard_normal(shape, np.float32).astype(mine.x.dtype))
            weights = put(rank, draw.random((shape[0], config.num_topk), np.float32)) if with_weights else None
            sent = buffer.dispatch(put(rank, mine.x), put(rank, mine.topk_idx), num_worst_tokens=shape[0])
            ptr, num_bytes, rubbish = (
                sent.views["x"].ptr,
                shape[0] * config.row_bytes,
                put(rank, np.full(shape, 77, mine.x.dtype)),
            )
            assert buffer._backend.throughput.results.offset_in_pool(ptr, num_bytes) is not None
            driver.copy_async(ptr, y.ptr, num_bytes, callers_stream(rank))
            for in_place in (rank != i % config.num_ranks, False):
                rows = DeviceArray(rank, ptr, shape, y.dtype) if in_place else y
                back = buffer.combine(rows, sent.handle, topk_weights=weights, compress=compress)
                driver.copy_async(ptr, rubbish.ptr, num_bytes, callers_stream(rank))
                found.append((back.x, back.topk_weights))
    machine.run()
    for (x, weights), (copied, copied_weights) in zip(found[::2], found[1::2], strict=True):
        assert_same(x, copied)
        if with_weights:
            assert_same(weights, copied_weights)


def expert_rounds(machine, buffers, seed, count):
    """Run rounds whose rows lie expert by expert, between rounds by token."""
    layouts = ("expert", "token")
    run_rounds(machine, [ThroughputRound(machine, buffers, 100 * seed + i, layouts[i % 2]) for i in range(count)])


def broken(tmp_path, file, pattern, replacement):
    """Copy the kernels, with a piece of one replaced."""
    folder = shutil.copytree(sources.source_dir(), tmp_path / "cuda_src")
    text = (folder / file).read_text()
    assert len(re.findall(pattern, text)) == 1, f"{file} has changed; find the piece that matched {pattern!r}"
    (folder / file).write_text(re.sub(pattern, replacement, text))
    return folder


def fails(folder, run, num_ranks=2, **options):
    """Return whether one of 100 seeds shows that the kernels in `folder` are broken. Some defects show in one of ten only."""
    for seed in range(100):
        try:
            with Machine(num_ranks, seed, cuda_src=folder, **options) as machine:
                run(machine, seed)
        except (AssertionError, EPTimeoutError):
            return True
        except EPInputError as error:  # a rank that has read an old word takes it for another call
            if "disagree" not in str(error):
                raise
            return True
    return False
