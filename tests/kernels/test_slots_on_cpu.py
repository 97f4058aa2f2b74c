"""Buffers with slots, on the CPU: kernels with absent slots, changes of the members, and ranks that die in the middle of a call.

Addresses of absent slots are in no memory, so each access there is an error. Results are compared, bit for bit, with the same calls where
choices of absent slots are -1.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
from unittest import mock

import low_latency_oracle
import numpy as np
import pytest
from scenario_table import FORMATS, OPAQUE
from scenarios import Again, Sum

from deepep_rt import EPError, EPInputError, EPPeerLostError, EPTimeoutError, EPUnavailableError
from deepep_rt.comm import failure_notice
from deepep_rt.kernels import layout, tuning
from deepep_rt.kernels import source as sources
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import DeviceArray, array_at
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LowLatencyRound, PreparedRound, ThroughputRound, broken, run_rounds, seeds
from tests.kernels_on_cpu.slots import config_of

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SIZES = dict(num_max_tokens_per_rank=12, hidden=512, num_topk=3, num_sms=2, low_latency=True, low_latency_sms=1)
SOME_OF_EIGHT = ((7,), (0, 7), (1, 2, 4, 5, 6), (0, 1, 2, 3, 4, 5, 6))
ALL_KINDS = (("sm_90", 2), ("sm_90", 3), ("sm_90", 4), ("sm_90", 8), ("sm_80", 2), ("sm_80", 3))
THROUGHPUT_KERNELS = {"route", "dispatch", "combine", "combine_fp8", "combine_log10", "combine_choices"}
LOW_LATENCY_KERNELS = {"ll_dispatch", "ll_dispatch_opaque"} | {
    f"ll_combine{large}{form}" for large in ("", "_large") for form in ("", "_fp8", "_log10")
}


def sizes(num_slots):
    return {**SIZES, "num_experts": 2 * num_slots}


def sets_of(num_slots, seed):
    """List the sets of members: all of up to 4 slots, some of 8. With 4 or more slots, later seeds take turns with every other set."""
    counts = range(1, num_slots + 1)
    every = [members for count in counts for members in itertools.combinations(range(num_slots), count)]
    found = every if num_slots <= 4 else SOME_OF_EIGHT
    return found if seed == 0 or num_slots < 4 else found[(seed + 1) // 2 % 2 :: 2]


def kinds(*quick):
    """Return architectures and numbers of slots. Only some are quick."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.full) for case in ALL_KINDS]


def on(arch, kernels):
    """Return those of the kernels that an architecture has."""
    return {name for name in kernels if arch != "sm_80" or not name.endswith("_fp8")}


def most(rank, arriving, room):
    return room


def half(rank, arriving, room):
    return arriving // 2


def many_or_few(first, rank):
    """Return the tokens of a rank. Another kernel combines many."""
    return (12, 2)[(first + rank) % 2]


def low_latency_round(machine, buffers, seed, arch="sm_90", **options):
    """Make a round with random options. With masks, calls refuse the rows of choices; old GPUs do not convert to FP8."""
    if config_of(buffers).on_timeout == "mask":
        options["reduce"] = True
    if arch == "sm_80" and "dtype" not in options:
        options["format"] = FORMATS[0]
    return LowLatencyRound(machine, buffers, seed, **options)


def throughput_calls(machine, buffers, seed, arch="sm_90"):
    """Make rounds of all throughput kernels: new and known routings, with and without counts, all forms of rows, biases and weights."""
    make, first = functools.partial(ThroughputRound, machine, buffers), 60 * seed + 1  # a multiple of 6 has no tokens
    full, weighted = Sum(weights=True, biases=2), Sum(weights=True, weighted=True)
    choices = [Sum(weights=True, biases=1, reduce="topk"), Sum(weights=True, weighted=True, reduce="topk")]
    compressed = [Sum(weights=True, compress=form) for form in ("log10", "fp8")[: 1 + (arch != "sm_80")]]
    rounds = [
        make(first, worst=None, again=(Again(with_idx=True),), sums=(full,)),
        make(first + 1, worst=most, sums=(full, *compressed)),
        make(first + 2, worst=half, again=(Again(),), sums=(Sum(), full)),
        make(first + 3, "expert", worst=None, sums=(weighted, choices[0])),
        make(first + 4, "expert", worst=most, again=(Again(),), sums=(choices[1], Sum())),
        make(first + 6),
    ]
    run_rounds(machine, rounds)
    check_tables(buffers, rounds[0])
    check(buffers)


def check_tables(buffers, made):
    """Compare the numbers of rows in the tables of the handles, which say that absent slots get none."""
    config, slots = config_of(buffers), range(config_of(buffers).num_ranks)
    owners = [inputs.topk_idx // config.num_local_experts for inputs in made.round.inputs]
    rows = np.array([[(of == rank).any(1).sum() for rank in slots] for of in owners], np.int32)
    offset = buffers[buffers.members[0]]._backend.runtime.layout.handle.offsets["num_rows"]
    for sent in made.round.sent.values():
        assert (array_at(sent.handle.routing.ptr + offset, rows.shape, "int32") == rows).all()


def low_latency_calls(machine, buffers, seed, arch="sm_90"):
    """Make rounds of all low-latency kernels: all formats of rows, with and without hooks, early and late weights, sums of each kind."""
    make, first = functools.partial(low_latency_round, machine, buffers, arch=arch), 60 * seed + 1
    rounds = [make(first + i, format=format_, reduce=i % 2 == 0) for i, format_ in enumerate(FORMATS[:4])]
    for i, kind in enumerate(list(OPAQUE.values())[seed % 2 :: 2]):
        rounds.append(make(first + 6 + i, options=FORMATS[0], hooks=i % 2 == 1, **kind))
    for i, form in itertools.product(range(2), (None, "log10", "fp8")[: 2 + (arch != "sm_80")]):
        tokens = functools.partial(many_or_few, i)
        rounds.append(make(first + 12 + i, compress=form, reduce=True, tokens=tokens, format=FORMATS[i]))
    rounds += [make(first + 17 + i) for i in range(3)]
    for made in rounds:
        made.all()
    overlapped = [make(first + 24 + i, hooks=True) for i in range(2)]
    for step in ("dispatch", "receive", "combine", "finish"):
        for made in overlapped:
            getattr(made, step)()
    machine.run()
    for made in (*rounds, *overlapped):
        made.check()
    check(buffers)


def few_calls(machine, buffers, seed, arch="sm_90"):
    """Make a throughput round and some low-latency rounds. Those of every sixth seed have no tokens."""
    run_rounds(machine, [ThroughputRound(machine, buffers, seed, ("token", "expert")[seed % 2])])
    rounds = [low_latency_round(machine, buffers, seed + i, arch).all() for i in range(2)]
    machine.run()
    for made in rounds:
        made.check()
    check(buffers)


def check(buffers):
    """Raise what kernels report, and see that no rank is masked."""
    for rank in buffers.members:
        buffers[rank].check()
        assert buffers[rank].query_masked_ranks() == []


# --- absent slots ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(("arch", "num_slots"), kinds(("sm_90", 4), ("sm_80", 2)))
def test_throughput_calls(arch, num_slots, seed, monkeypatch):
    monkeypatch.setattr(layout, "_MIN_CHOICE_WINDOW", 8)  # a combine of choices has several launches
    if seed == 1:
        monkeypatch.setattr(tuning, "_FEW_BLOCKS", 2)
        monkeypatch.setattr(tuning, "_COPY_BLOCKS", {90: 1})
    is_weak, launched = (seed % 2 == 1) != (arch == "sm_80"), set()
    for number, members in enumerate(sets_of(num_slots, seed)):
        with Machine(num_slots, 100 * seed + number, arch, num_sms=(None, 1)[number % 2], weak_memory=is_weak) as machine:
            buffers = machine.buffers(members=members, check_inputs=number % 2 == 0, **sizes(num_slots))
            throughput_calls(machine, buffers, seed + number, arch)
            launched |= set(machine.launched)
    assert launched >= on(arch, THROUGHPUT_KERNELS)


@pytest.mark.parametrize("seed", seeds(6))
def test_late_counts(seed):
    """The choices of many experts often come after the rows for each rank."""
    for members in ((0, 2), (1, 2), (0, 1)):
        with Machine(3, seed, weak_memory=True) as machine:
            buffers = machine.buffers(members=members, **{**sizes(3), "num_max_tokens_per_rank": 2, "num_experts": 96})
            run_rounds(
                machine, [ThroughputRound(machine, buffers, 10 * seed + i, worst=None, again=(), sums=()) for i in range(8)]
            )


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(("arch", "num_slots"), kinds(("sm_90", 4)))
def test_low_latency_calls(arch, num_slots, seed):
    launched = set()
    for number, members in enumerate(sets_of(num_slots, seed)):
        with Machine(num_slots, 100 * seed + number, arch, num_sms=(None, 1)[number % 2], weak_memory=seed % 2 == 1) as machine:
            buffers = machine.buffers(members=members, check_inputs=number % 2 == 0, **sizes(num_slots))
            low_latency_calls(machine, buffers, seed + number, arch)
            launched |= set(machine.launched)
    assert launched >= on(arch, LOW_LATENCY_KERNELS)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize(("arch", "num_slots"), kinds(("sm_90", 3)))
def test_low_latency_calls_with_masks(arch, num_slots, seed):
    launched = set()
    for number, members in enumerate(sets_of(num_slots, seed)):
        with Machine(num_slots, 100 * seed + number, arch, num_sms=(None, 1)[number % 2], weak_memory=seed % 2 == 1) as machine:
            buffers = machine.buffers(members=members, on_timeout="mask", **sizes(num_slots))
            low_latency_calls(machine, buffers, seed + number, arch)
            launched |= set(machine.launched)
    assert launched >= on(arch, LOW_LATENCY_KERNELS)


@pytest.mark.parametrize("seed", seeds(4))
def test_statistics(seed):
    """Rows of absent slots do not count, and no rank waits for them."""
    members, num_slots = ((0, 2), (1, 2))[seed % 2], 3
    with Machine(num_slots, seed, weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(members=members, statistics=True, **sizes(num_slots))
        first = 6 * seed + 1
        made = [ThroughputRound(machine, buffers, first, worst=None, again=(Again(),), sums=(Sum(), Sum(compress="log10")))]
        made.append(ThroughputRound(machine, buffers, first + 1, "expert", worst=None, again=(), sums=(Sum(reduce="topk"),)))
        run_rounds(machine, made)
        options = dict(format=FORMATS[0], tokens=functools.partial(many_or_few, seed), drawn=dict(skip_probability=0.2))
        quick = [LowLatencyRound(machine, buffers, first + i, reduce=i == 0, early=i == 0, **options).all() for i in range(2)]
        machine.run()
        for one in quick:
            one.check()
        each, slots = config_of(buffers).num_local_experts, range(num_slots)
        owners = [[inputs.topk_idx // each for inputs in one.round.inputs] for one in (*made, *quick)]
        rows = [np.array([[(of == rank).any(1).sum() for rank in slots] for of in one]) for one in owners]
        choices = [np.array([[(of == rank).sum() for rank in slots] for of in one]) for one in owners]
        moved = {  # from a rank to a rank
            "dispatch": 2 * rows[0] + rows[1],
            "combine": (2 * rows[0] + choices[1]).T,
            "low_latency_dispatch": rows[2] + rows[3],
            "low_latency_combine": (rows[2] + choices[3]).T,
        }
        for rank in members:
            counted = buffers[rank].statistics()
            for kind, sent in moved.items():
                found = getattr(counted, kind)
                assert (found.rows_sent, found.rows_received) == (sent[rank].sum(), sent[:, rank].sum()), kind
                assert not np.delete(found.wait_s, members).any(), kind
            assert sum(counted.rows_by_expert) == sum(number[:, rank].sum() for number in choices)


@pytest.mark.parametrize("call", ["dispatch", "known dispatch", "combine", "choices"])
def test_ranks_that_differ(call):
    """The members say so, and name each other. Their later calls match again."""
    members = (1, 2)
    with Machine(3, 1) as machine:
        buffers, put = machine.buffers(members=members, **sizes(3)), machine.put
        idx, x = np.tile(np.array([0, 2, 4]), (9, 1)), np.ones((9, 512), "bfloat16")
        by_expert = dict(layout="expert") if call == "choices" else {}

        def dispatch(rank, **how):
            return buffers[rank].dispatch(put(rank, x), put(rank, idx), num_worst_tokens=36, **by_expert, **how)

        if call == "dispatch":
            for rank in members:
                dispatch(rank, expert_alignment=rank)
            name, values = "expert_alignment", (1, 2)
        else:
            handles = {rank: dispatch(rank).handle for rank in members}
            for rank in members:
                if call == "known dispatch":
                    buffers[rank].dispatch(put(rank, np.ones((9, 512 // rank), np.uint8)), handle=handles[rank])
                else:
                    y = put(rank, np.ones((36, 512), ("bfloat16", "float16")[rank - 1]))
                    buffers[rank].combine(y, handles[rank], **(dict(reduce="topk") if call == "choices" else {}))
            name, values = ("bytes of a row of x ", (512, 256)) if call == "known dispatch" else ("x", ("bfloat16", "float16"))
        machine.run()
        text = rf"the ranks disagree on .*{re.escape(name)}.*rank 1: {values[0]}, rank 2: {values[1]}"
        for rank in members:
            with pytest.raises(EPInputError, match=text):
                buffers[rank].check()
        few_calls(machine, buffers, 1)


def test_copy_ceilings_need_all_slots():
    with Machine(3, 1) as machine:
        buffers = machine.buffers(members=(0, 2), **sizes(3))
        with pytest.raises(EPUnavailableError, match=r"members=\(0, 2\)"):
            buffers[0].copy_ceilings(row_bytes=64, num_rows=3, iterations=2)


# --- changes of the members -----------------------------------------------------------------------------------------------------------


def random_members(rng, num_slots, before=()):
    """Draw a set of members that shares a rank with `before`, and differs from it."""
    while True:
        members = tuple(int(slot) for slot in np.flatnonzero(rng.random(num_slots) < 0.6))
        if members and members != tuple(before) and (not before or set(members) & set(before)):
            return members


class Graph:
    """Calls of all members that can run again with the same Params, as the replays of captured graphs.

    `make` makes their round. The dispatches of its scenario have a fixed number of rows.
    """

    def __init__(self, machine, buffers, make):
        self._machine, self._buffers, self._make, self._owners = machine, buffers, make, list(buffers)
        self._arrays = []  # ranks, and their arguments on the host and on the GPU
        self._made = self._make()
        with machine.recorded() as self._launches:
            self._call(self._made, buffers.members)
        machine.run()
        self._made.check()

    def _call(self, made, ranks):
        """Make ordinary calls."""
        for rank in ranks:
            made.round.call(self._buffers[rank], rank, functools.partial(self._put, made, rank))

    def _put(self, made, rank, array):
        found = made.members.put(rank, array)
        self._arrays.append((rank, array, found))
        return found

    def replay(self):
        """Run the calls of the members of now. New members make ordinary calls."""
        again, ranks = self._make(), self._buffers.members
        old = [rank for rank in ranks if self._buffers[rank] is self._owners[rank]]
        self._overwrite_arguments(again.round, old)
        for name in ("sent", "again", "back"):
            before = getattr(self._made.round, name, {})
            getattr(again.round, name, {}).update({rank: before[rank] for rank in old if before})
        for rank in old:
            sent = again.round.sent[rank]
            for result in (*(sent if isinstance(sent, list) else [sent]), *again.round.back[rank]):
                overwrite(result)
        self._call(again, [rank for rank in ranks if rank not in old])
        self._machine.replay([launch for launch in self._launches if self._machine.rank_of(launch) in old])
        self._machine.run()
        again.check()

    def _overwrite_arguments(self, again, ranks):
        """Write the rows and weights of combines, whose places depend on the members."""
        for number in range(len(again.row.sums)) if hasattr(again, "values") else ():
            for old, new in zip(self._made.round.values(number)[:2], again.values(number)[:2], strict=True):
                for rank, array, found in self._arrays if old else ():
                    if rank in ranks and array is old[rank]:
                        array_at(found.ptr, found.shape, found.dtype)[...] = new[rank]


def overwrite(result):
    """Overwrite the rows of a result."""
    rows = result.views["x"]
    array_at(rows.ptr, (rows.nbytes,), "uint8")[...] = 77


def graphs(machine, buffers, seed, arch):
    """Make graphs of each kind: route, dispatch and combine; and both low-latency calls."""
    sums = (Sum(weights=True, biases=1), Sum(compress="log10"))
    of_choices = (Sum(weights=True, weighted=True), Sum(weights=True, reduce="topk"))
    made = [
        functools.partial(ThroughputRound, machine, buffers, seed, worst=most, again=(Again(),), sums=sums),
        functools.partial(ThroughputRound, machine, buffers, seed + 1, "expert", worst=most, again=(), sums=of_choices),
    ]
    for i, form in enumerate(("log10", None, None)):
        how = dict(reduce=i != 1, hooks=False, compress=form)
        made.append(functools.partial(low_latency_round, machine, buffers, seed + i, arch, **how))
    return [Graph(machine, buffers, make) for make in made]


@pytest.mark.parametrize("seed", seeds(12))
def test_changes_of_members(seed):
    """Calls are right after each change, and graphs of before go on. Memory has other contents then."""
    rng, num_slots = np.random.default_rng([seed, 3]), (3, 4)[seed % 4 == 3]
    options, arch = dict(on_timeout="mask") if seed % 3 == 2 else {}, ("sm_90", "sm_80")[seed % 4 == 1]
    with Machine(num_slots, seed, arch, weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(members=random_members(rng, num_slots), **options, **sizes(num_slots))
        few_calls(machine, buffers, 60 * seed + 1, arch)
        held = graphs(machine, buffers, 60 * seed + 1, arch)
        for change in range(1, 5):
            members = random_members(rng, num_slots, buffers.members)
            leaving = [rank for rank in buffers.members if rank not in members and rng.random() < 0.5]
            machine.change_members(buffers, members, aborts=change % 2 == 0, leaving=leaving)
            for graph in held[:: 1 if change % 2 else -1]:
                graph.replay()
            few_calls(machine, buffers, 60 * seed + 6 * change + 1, arch)


@pytest.mark.parametrize("seed", seeds(4))
def test_sleep(seed):
    """The members of a generation sleep and wake, and have the same members then. Graphs go on, in this generation and the next."""
    with Machine(3, seed, weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(members=((0, 2), (1, 2))[seed % 2], **sizes(3))
        few_calls(machine, buffers, 6 * seed + 1)
        held = graphs(machine, buffers, 6 * seed + 1, "sm_90")
        for members in (buffers.members, (0, 1, 2)):
            for rank in members:
                buffers[rank].sleep()
            buffers.pages.renew(members)
            for rank in members:
                buffers[rank].wake()
            few_calls(machine, buffers, 6 * seed + 2)
            for graph in held:
                graph.replay()
            if len(members) < 3:
                machine.change_members(buffers, (0, 1, 2), aborts=False)


@pytest.mark.parametrize("keeps_results", [False, True])
def test_loss_while_members_sleep(keeps_results):
    """The others wake in the next generation. Its flags begin anew, and results that a sleep has kept are back.

    With few calls before, a flag of before would have the epoch of a call.
    """
    with Machine(3, 5 + keeps_results) as machine:
        buffers, held = machine.buffers(members=(0, 1, 2), **sizes(3)), []
        made = ThroughputRound(machine, buffers, 9, "token")
        run_rounds(machine, [made])
        if not keeps_results:
            few_calls(machine, buffers, 1)
            held = graphs(machine, buffers, 1, "sm_90")
        rows = {rank: made.round.sent[rank].views["x"] for rank in buffers.members}
        before = {rank: array_at(view.ptr, (view.nbytes,), "uint8").copy() for rank, view in rows.items()}
        for rank in buffers.members:
            buffers[rank].sleep(keep_results=keeps_results)
        machine.change_members(buffers, (0, 2))
        for rank in buffers.members if keeps_results else ():
            assert (array_at(rows[rank].ptr, (rows[rank].nbytes,), "uint8") == before[rank]).all()
        for seed in (2, 3):
            few_calls(machine, buffers, seed)
            for graph in held:
                graph.replay()


OLD_CALLS = {
    "dispatch": dict(),
    "combine": dict(),
    "combine_fp8": dict(compress="fp8"),
    "combine_log10": dict(compress="log10"),
    "combine_choices": dict(reduce="topk"),
    "combine of rows by expert": dict(reduce="rank"),
}
"""Calls along a known routing, and their options."""


def memory_of(buffers, rank):
    """Copy the symmetric memory of a rank."""
    return array_at(buffers[rank]._backend.runtime.memory.ptr, (buffers.pages.num_bytes,), "uint8").copy()


@pytest.mark.parametrize("seed", seeds(4))
def test_launches_with_an_old_routing(seed):
    """A replay of a graph with such a call sends nothing, fills its results with NaN, and says why. It waits for nothing."""
    rng, num_slots, (before, after) = np.random.default_rng(seed), 3, [((0, 1, 2), (1, 2)), ((0, 2), (0, 1, 2))][seed % 2]
    with Machine(num_slots, seed, weak_memory=seed % 4 == 3) as machine:
        buffers, held = machine.buffers(members=before, **sizes(num_slots)), []
        x, y = ({rank: machine.put(rank, np.ones((count, 512), "bfloat16")) for rank in before} for count in (9, 100))
        idx = {rank: machine.put(rank, rng.integers(-1, 6, (9, 3))) for rank in before}
        for name, options in OLD_CALLS.items():
            by_expert, rows = (dict(layout="expert"), 100) if "reduce" in options else ({}, 36)
            handles = {
                rank: buffers[rank].dispatch(x[rank], idx[rank], num_worst_tokens=rows, **by_expert).handle for rank in before
            }
            machine.run()
            with machine.recorded() as launches:
                for rank, handle in handles.items():
                    if name == "dispatch":
                        result = buffers[rank].dispatch(x[rank], handle=handle)
                    else:
                        result = buffers[rank].combine(DeviceArray(rank, y[rank].ptr, (rows, 512), "bfloat16"), handle, **options)
                    held.append((rank, [one for one in launches if machine.rank_of(one) == rank], result))
            machine.run()
            assert name.split()[0] in {launch.name for _, launch in launches}
        machine.change_members(buffers, after)
        clock_s = machine.clock_s
        for number in rng.permutation(len(held)):
            rank, launches, result = held[number]
            if rank not in after:
                continue
            overwrite(result)
            others = {other: memory_of(buffers, other) for other in after if other != rank}
            machine.replay(launches)
            machine.run()
            assert all((memory_of(buffers, other) == memory).all() for other, memory in others.items())
            rows = result.views["x"]
            assert (array_at(rows.ptr, (rows.nbytes,), "uint8") == 255).all()
            with pytest.raises(EPInputError, match="handle is of generation 0, and the Buffer is in generation 1"):
                buffers[rank].check()
            buffers[rank].check()
        assert machine.clock_s == clock_s
        few_calls(machine, buffers, seed + 1)


@pytest.mark.parametrize("seed", seeds(4))
def test_low_latency_launches_with_an_old_routing(seed):
    """So does a replay of a low-latency combine without its dispatch: no peer gets a row, a weight or a header of it."""
    rng, num_slots, (before, after) = np.random.default_rng(seed), 3, [((0, 1, 2), (1, 2)), ((0, 2), (0, 1, 2))][seed % 2]
    with Machine(num_slots, seed, weak_memory=seed % 4 == 3) as machine:
        options = dict(on_timeout="mask") if seed in (1, 2) else {}
        buffers, held = machine.buffers(members=before, **options, **sizes(num_slots)), []
        y = {rank: machine.put(rank, np.ones((2, 36, 512), "bfloat16")) for rank in before}
        for i, (count, compress) in enumerate(itertools.product((9, 2), (None, "log10", "fp8"))):
            x, idx = np.ones((count, 512), "bfloat16"), rng.permuted(np.tile(np.arange(6), (count, 1)), axis=1)[:, :3]
            given = {rank: [machine.put(rank, values) for values in (x, idx, np.ones(idx.shape, np.float32))] for rank in before}
            handles = {}
            for rank, (x_there, idx_there, weights) in given.items():
                late = dict(topk_weights=weights) if (i + seed) % 2 else {}
                handles[rank] = buffers[rank].low_latency_dispatch(x_there, idx_there, use_fp8=False, **late).handle
            machine.run()
            with machine.recorded() as launches:
                for rank, (_, idx_there, weights) in given.items():
                    result = buffers[rank].low_latency_combine(y[rank], idx_there, weights, handles[rank], compress=compress)
                    held.append((rank, [one for one in launches if machine.rank_of(one) == rank], result))
            machine.run()
        machine.change_members(buffers, after)
        clock_s = machine.clock_s
        for number in rng.permutation(len(held)):
            rank, launches, result = held[number]
            if rank not in after:
                continue
            overwrite(result)
            others = {other: memory_of(buffers, other) for other in after if other != rank}
            machine.replay(launches)
            machine.run()
            assert all((memory_of(buffers, other) == memory).all() for other, memory in others.items())
            rows = result.views["x"]
            assert (array_at(rows.ptr, (rows.nbytes,), "uint8") == 255).all()
            with pytest.raises(EPInputError, match="handle is of generation 0, and the Buffer is in generation 1"):
                buffers[rank].check()
            buffers[rank].check()
        assert machine.clock_s == clock_s
        few_calls(machine, buffers, seed + 1)


def test_handles_hooks_and_prepared_calls_of_before():
    """Handles and hooks are refused. Prepared calls of the low-latency mode go on, also those with an open hook."""
    with Machine(3, 1) as machine:
        refuse_old_calls(machine, (0, 1, 2), (0, 2))


def refuse_old_calls(machine, members, now):
    prepared = dict(format=FORMATS[0], reduce=True, early=True, hooks=True)
    buffers, put = machine.buffers(members=members, num_slots=4, **sizes(3)), machine.put
    x, idx, weights = np.ones((4, 512), "bfloat16"), np.tile(np.array([0, 2, 4]), (4, 1)), np.ones((4, 3), np.float32)
    steps = PreparedRound(machine, buffers, 3, members, **prepared).all().steps
    calls, known = {}, {}
    for rank in members:
        buffer, given, late = buffers[rank], (put(rank, x), put(rank, idx)), put(rank, weights)
        rows, y = put(rank, np.ones((36, 512), "bfloat16")), put(rank, np.ones((2, 36, 512), "bfloat16"))
        handle = buffer.dispatch(*given, num_worst_tokens=36).handle
        known[rank] = buffer.prepare_throughput(given[0], handle)
        sent, other = (buffer.low_latency_dispatch(*given, topk_weights=late, use_fp8=False) for _ in range(2))
        calls[rank] = [
            functools.partial(buffer.dispatch, given[0], handle=handle),
            functools.partial(buffer.combine, rows, handle),
            functools.partial(buffer.prepare_throughput, given[0], handle),
            functools.partial(buffer.low_latency_combine, y, given[1], late, sent.handle),
            buffer.low_latency_combine(y, given[1], late, other.handle, return_recv_hook=True).hook,
            buffer.low_latency_dispatch(*given, use_fp8=False, return_recv_hook=True).hook,
            steps[rank][0].dispatch().hook,
        ]
    machine.run()
    machine.change_members(buffers, now)
    for rank in now:
        for call in calls[rank]:
            with pytest.raises(EPInputError, match="older generation"):
                call()
        known[rank].dispatch()
        machine.run()
        with pytest.raises(EPInputError, match="handle is of generation 0, and the Buffer is in generation 1"):
            buffers[rank].check()
    few_calls(machine, buffers, 1)
    for seed in range(3):
        made = PreparedRound(machine, buffers, seed, now, {rank: steps[rank] for rank in now}, **prepared).all()
        machine.run()
        made.check()


@pytest.mark.parametrize("hooks", [False, True])
def test_prepared_combine_of_before(hooks):
    """Its dispatch was in an older generation, perhaps only the sending half of it. So the tables may hold anything."""
    with Machine(2, 1) as machine:
        refuse_old_prepared_combine(machine, hooks)


def refuse_old_prepared_combine(machine, hooks):
    buffers = machine.buffers(members=(0, 1), **sizes(2))
    made = PreparedRound(machine, buffers, 3, (0, 1), format=FORMATS[0], reduce=True, early=True, hooks=hooks)
    made.dispatch()
    machine.run()
    machine.change_members(buffers, (1,))
    step, arrays = made.steps[1]
    with pytest.raises(EPInputError, match="older generation"):
        step.combine(arrays[3])


@pytest.mark.parametrize("seed", seeds(4))
def test_a_change_ends_calls_that_wait(seed):
    """It waits for no rank. The one that was left out makes its part of the calls later, in memory that no member has."""
    with Machine(3, seed, weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(members=(0, 1, 2), **sizes(3))
        few_calls(machine, buffers, 6 * seed + 1)
        out, made = buffers[2], [ThroughputRound(machine, buffers, 6 * seed + 1, worst=most)]
        made += [low_latency_round(machine, buffers, 6 * seed + 1 + i, hooks=False) for i in range(3)]
        for rank in (0, 1):
            for one in made:
                one.run(rank)
        machine.timeout_steps = 64
        machine.advance(20 << 3 * seed)
        clock_s = machine.clock_s
        machine.change_members(buffers, (0, 1))
        assert machine.clock_s - clock_s <= 3 / 2, "seconds of nine kernels, each of which looks after some polls of many loads"
        for one in made:
            one.round.call(out, 2, functools.partial(one.members.put, 2))
        few_calls(machine, buffers, 6 * seed + 2)
        has_timed_out(out)


def has_timed_out(buffer):
    """Check that the rank has waited in vain. The Buffer keeps the error, and so this frame, but not that of a test with results."""
    with pytest.raises(EPTimeoutError, match=r"rank 2 waited 1 s for rank [01]"):
        buffer.check()


def test_waits_of_a_new_generation_count():
    """The first call counts its wait, after a call with a longer one."""
    x, idx = np.ones((4, 512), "bfloat16"), np.tile(np.array([0, 2, 4]), (4, 1))
    with Machine(3, 1) as machine:
        buffers = machine.buffers(members=(0, 2), statistics=True, timeout_s=8.0, **sizes(3))

        def waited(seconds):
            before, start = buffers[0].statistics().low_latency_dispatch.wait_s[2], machine.clock_s
            buffers[0].low_latency_dispatch(machine.put(0, x), machine.put(0, idx))
            while machine.clock_s < start + seconds:
                machine.advance(1 << 14)
            buffers[2].low_latency_dispatch(machine.put(2, x), machine.put(2, idx))
            machine.run()
            return buffers[0].statistics().low_latency_dispatch.wait_s[2] - before

        assert waited(3) > 2
        machine.change_members(buffers, (0, 2))
        assert waited(2) > 1


@pytest.mark.parametrize("mode", ["throughput", "low_latency", "masks"])
def test_threads_that_wait_seldom_read_memory_of_the_host(mode):
    """Thousands of them would fill the bus to the host, and calls take milliseconds. One reads for all, once in each step of the clock."""
    options = dict(on_timeout="mask") if mode == "masks" else {}
    with Machine(3, 1) as machine:
        buffers = machine.buffers(members=(0, 1, 2), **options, **sizes(3))
        machine.timeout_steps = 64
        page = buffers[0]._backend.runtime.page
        machine.watch(ctypes.addressof(page.lost))
        if mode == "throughput":
            made = ThroughputRound(machine, buffers, 1, worst=most, again=(), sums=())
        else:
            made = low_latency_round(machine, buffers, 1, hooks=False)
        made.run(0)
        while machine.clock_s < 1 / 4:
            machine.advance(1 << 14)
        assert 4 < machine.watched_loads < 100  # in 16 steps; threads with an old time read too
        for rank in (1, 2):
            made.run(rank)
        machine.run()


# --- death in the middle --------------------------------------------------------------------------------------------------------------


class Death:
    """Lets a rank die at a random time of the calls of all members. The hosts of the others hear of it a little later.

    `is_cut_off`: the others have lost touch with it, but its kernels go on.
    """

    def __init__(self, machine, buffers, rng, *, is_cut_off):
        self._machine, self._buffers, self._is_cut_off = machine, buffers, is_cut_off
        self.rank = int(rng.choice(buffers.members))
        self.others = [rank for rank in buffers.members if rank != self.rank]
        self._at, self._now = int(2 ** rng.uniform(0, 8)), 0
        self._told_at = {rank: self._at + int(rng.integers(0, 6)) for rank in self.others}
        self._told_s, self._ended_s, self.errors = 0.0, {}, {}
        machine.timeout_steps = 64

    def _step(self):
        self._now += 1
        if self._now == self._at:
            self._machine.stop(self.rank, kernels=not self._is_cut_off)
        for rank, at in self._told_at.items():
            if at == self._now:
                self._buffers[rank]._backend.lose(self.rank, "its process has ended")
                self._told_s = self._machine.clock_s

    def run(self, rounds, ranks=None):
        """Run rounds of all members, or of some. Ranks stop with the first error of a lost rank, which `errors` has afterwards."""
        self._ended_s, self.errors = {}, {}

        def program(rank):
            try:
                for made in rounds:
                    made.run(rank)
                self._buffers[rank].synchronize()
            except EPTimeoutError as error:
                self.errors[rank] = error.with_traceback(None)  # its frames hold results, which must end before the GPUs
            self._ended_s[rank] = self._machine.clock_s

        with mock.patch.object(failure_notice, "_GRACE_S", math.inf):  # kernels notice the loss, before the host gives up
            self._machine.each_rank(program, ranks or self._buffers.members, self._step)
        while self._now < max(self._told_at.values()):  # the calls have ended before
            self._step()
        self._check_ends()

    def _check_ends(self):
        """Check that no wait has lasted until it timed out, and that errors name the rank."""
        for rank in self.others:
            assert self._ended_s[rank] - self._told_s <= 1 / 2, "of timeout_s, which is 1"
        for rank, error in self.errors.items():
            if rank != self.rank:  # one that is cut off waits in vain
                assert isinstance(error, EPPeerLostError), error
                assert (error.ranks, error.peer, error.rank) == ((self.rank,), self.rank, rank)
                assert f"Rank {self.rank} is lost: its process has ended. In a Buffer with slots, shrink() goes on" in str(error)

    def is_noticed(self, made):
        """Let the others make one more call. All of them raise the error."""
        self._told_s = self._machine.clock_s
        self.run([made], self.others)
        assert sorted(self.errors) == self.others

    def is_overcome(self, seed, arch="sm_90"):
        """Check that the others go on without the rank, and then with a new process in its slot."""
        members, now = self._buffers.members, self._machine.clock_s
        self._machine.change_members(self._buffers, self.others)
        assert self._machine.clock_s - now <= 1 / 2, "of timeout_s, which is 1"
        few_calls(self._machine, self._buffers, 6 * seed + 1, arch)
        self._machine.start(self.rank)
        self._machine.change_members(self._buffers, members, aborts=False)
        few_calls(self._machine, self._buffers, 6 * seed + 4, arch)


def mixed_rounds(machine, buffers, rng, seed, arch):
    """Draw some rounds of both modes."""
    rounds = []
    for number in range(int(rng.integers(1, 4))):
        kind = rng.integers(3)
        if kind == 2:
            rounds.append(low_latency_round(machine, buffers, 6 * seed + 1 + number, arch))
        else:
            rounds.append(ThroughputRound(machine, buffers, 6 * seed + 1 + number, ("token", "expert")[kind]))
    return rounds


@pytest.mark.parametrize("seed", seeds(24))
def test_death(seed):
    """All waits end at once, and name the rank that is lost. The others go on without it, whether it is dead or cut off."""
    rng, num_slots, arch = np.random.default_rng([seed, 9]), (3, 4)[seed % 4 == 3], ("sm_90", "sm_80")[seed % 4 == 1]
    options = dict(statistics=True) if seed % 5 == 2 else {}
    with Machine(num_slots, seed, arch, num_sms=(None, 2)[seed % 3 == 1], weak_memory=seed % 2 == 1) as machine:
        members = (0, 2) if seed % 6 == 5 else tuple(range(num_slots))
        buffers = machine.buffers(members=members, **options, **sizes(num_slots))
        death = Death(machine, buffers, rng, is_cut_off=seed % 3 == 2)
        rounds = mixed_rounds(machine, buffers, rng, seed, arch)
        death.run(rounds)
        for made in rounds:
            for rank in set(death.others) - set(death.errors):
                made.round.check(rank)
        death.is_noticed(mixed_rounds(machine, buffers, rng, seed + 50, arch)[0])
        death.is_overcome(seed, arch)


@pytest.mark.parametrize("seed", seeds(4))
def test_a_rank_that_gives_up_does_not_hold_others(seed):
    """Rank 1 gives its dispatch up, because it gets nothing from rank 2. Rank 0 has got all from rank 2, and waits for rank 1 alone."""
    ended_s = {}
    with Machine(3, seed, weak_memory=seed % 2 == 1) as machine:
        buffers = machine.buffers(members=(0, 1, 2), **sizes(3))
        machine.timeout_steps = 64
        made = ThroughputRound(machine, buffers, 6 * seed + 1, worst=most, again=(), sums=())
        buffers.pages.cut(2, 1)
        for rank in buffers.members:
            made.run(rank)
        while machine.clock_s == 0:
            machine.advance(1000)
        for rank in (0, 1):
            buffers[rank]._backend.lose(2, "its process has ended")

        def program(rank):
            with pytest.raises(EPPeerLostError, match="Rank 2 is lost: its process has ended"):
                buffers[rank].synchronize()
            ended_s[rank] = machine.clock_s

        machine.each_rank(program, (0, 1), lambda: None)
        assert max(ended_s.values()) <= 1 / 8, "of timeout_s, which is 1"


@pytest.mark.parametrize("seed", seeds(24))
def test_death_with_masks(seed):
    """Low-latency calls go on at once without the rank, and are right for all others. Throughput calls raise."""
    rng, num_slots = np.random.default_rng([seed, 9]), (3, 4)[seed % 4 == 3]
    options = dict(statistics=True) if seed % 5 == 2 else {}
    with Machine(num_slots, seed, num_sms=(None, 2)[seed % 3 == 1], weak_memory=seed % 2 == 1) as machine:
        members = (1, 2) if seed % 6 == 5 else tuple(range(num_slots))
        buffers = machine.buffers(members=members, on_timeout="mask", **options, **sizes(num_slots))
        death = Death(machine, buffers, rng, is_cut_off=seed % 3 == 2)
        rounds = [low_latency_round(machine, buffers, 6 * seed + 1 + number) for number in range(int(rng.integers(1, 5)))]
        death.run(rounds)
        assert not set(death.errors) & set(death.others)
        for made in rounds:
            check_around(made, death.rank, death.others)
        rounds = [low_latency_round(machine, buffers, 6 * seed + 301 + number, calling=death.others) for number in range(2)]
        death.run(rounds, death.others)
        assert not death.errors
        for made in rounds:
            made.check(live=death.others)
        for rank in death.others:
            assert buffers[rank].query_masked_ranks() == [death.rank]
            assert buffers[rank]._backend.lost_ranks() == (death.rank,)
        death.is_noticed(ThroughputRound(machine, buffers, 6 * seed + 1))
        death.is_overcome(seed)


def check_around(made, lost, others):
    """Compare the results of a low-latency round in which a rank may have been lost. Its rows may be there or not, and all others are."""
    the_round, present = made.round, made.members.ranks
    inputs, experts, (how,) = the_round.inputs, the_round.config.num_experts, the_round.row.sums
    names = {"use_fp8": "fp8", "use_ue8m0": "ue8m0", "round_scale": "round_scale"}
    formats = {names[name]: value for name, value in the_round.row.options.items() if name in names}
    received = {}  # by each rank: the ranks whose rows it has got
    for rank in others:
        (sent,) = the_round.sent[rank]
        for live in (present, others):
            if has_rows(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts, live=live, **formats), lost):
                received[rank] = live
        assert rank in received, f"rank {rank} has wrong rows"
    shares = dict(reduce_early=True, live=present, compress=how.compress, received=received)
    for rank in others:
        (back,), y = the_round.back[rank], the_round.outputs(how)
        sums = [
            low_latency_oracle.expected_combine(rank, inputs, y, experts, answering=answering, **shares).view(np.uint16)
            for answering in (present, others)
        ]
        for token, row in enumerate(np.asarray(back.x).view(np.uint16)):
            assert any((row == one[token]).all() for one in sums), f"token {token} of rank {rank} has a wrong sum"


def has_rows(sent, wanted, lost):
    """Return whether a dispatch has brought these rows. Those of the lost rank may be undefined."""
    room = sent.recv_x.shape[1]
    if np.asarray(sent.num_recv_tokens_per_expert).tolist() != [min(len(found), room) for found in wanted.entries]:
        return False
    for got, rows in ((sent.recv_x, wanted.x), (sent.recv_x_scales, wanted.scales)):
        for expert, entries in enumerate(wanted.entries if rows is not None else ()):
            for row, (source, *_) in enumerate(entries[:room]):
                if source != lost and got[expert, row].tobytes() != rows[expert][row].tobytes():
                    return False
    return True


# --- broken kernels -------------------------------------------------------------------------------------------------------------------


def absent_slots(seed, monkeypatch):
    test_throughput_calls("sm_90", 3, seed, monkeypatch)


def late_counts(seed, monkeypatch):
    test_late_counts(seed)


def differing_ranks(seed, monkeypatch):
    test_ranks_that_differ("dispatch")


def old_routings(seed, monkeypatch):
    test_launches_with_an_old_routing(seed)


def deaths(seed, monkeypatch):
    test_death(seed)


def other_losses(seed, monkeypatch):
    test_a_rank_that_gives_up_does_not_hold_others(seed)


def masked_deaths(seed, monkeypatch):
    test_death_with_masks(seed)


IF_ABSENT = {
    "windows-are-published": (absent_slots, "throughput/recv_window.cuh", r"    if \(is_absent\(p, peer\)\) return;\n", ""),
    "windows-are-awaited": (absent_slots, "throughput/recv_window.cuh", r"  if \(is_absent\(p, peer\)\) return true;\n", ""),
    "signatures-are-compared": (
        absent_slots,
        "throughput/recv_window.cuh",
        r" && !is_absent\(p, lane\) && \(window",
        " && (window",
    ),
    "choices-are-kept": (absent_slots, "throughput/route.cu", r"      if \(is_absent\(p, rank\)\) continue;\n", ""),
    "counts-are-read": None,  # the kernel would read 0 twice, and skip the wait for it
    "counts-are-awaited": (late_counts, "throughput/route.cu", r"    if \(from_peers && is_absent\(p, i\)\) continue;\n", ""),
    "counts-are-sent": (absent_slots, "throughput/route.cu", r" \|\| is_absent\(p, warp\)", ""),
    "differences-are-sought": (differing_ranks, "throughput/route.cu", r"is_absent\(p, other\) \|\| ", ""),
    "windows-are-compared": (absent_slots, "throughput/route.cu", r" \|\| is_absent\(p, peer\)\) return", ") return"),
    "rows-are-counted": (absent_slots, "throughput/route.cu", r" && !is_absent\(p, peer\) &&", " &&"),
    "flags-of-rows": (absent_slots, "throughput/dispatch.cu", r" && !is_absent\(p, lane\)\) \{", ") {"),
    "flags-of-choices": (absent_slots, "experts/combine_choices.cu", r"if \(!is_absent\(p, r\)\) st_release", "st_release"),
    "choices-are-awaited": (absent_slots, "experts/combine_choices.cu", r" && !is_absent\(p, lane\)\) ok", ") ok"),
}
"""Kernels that treat an absent slot as a member in one place. None: that changes no result."""
BROKEN = {
    **{name: case for name, case in IF_ABSENT.items() if case is not None},
    "old-routings": (old_routings, "throughput/recv_window.cuh", r"now != then", "false"),
    "no-generation-in-tables": (
        absent_slots,
        "throughput/route.cu",
        r"if constexpr \(kHasSlots\) \*at<u32>\(p.handle, kHandleGeneration\) = [^;]*;",
        "",
    ),
    "simple-waits-of-a-lost-rank": (deaths, "common/wait.cuh", r"lost = lost_for\(p, peer, now\);\n  if", "lost = 0;\n  if"),
    "waits-of-a-lost-rank": (deaths, "common/wait.cuh", r"lost = lost_for\(p, peer, now\);\n    if", "lost = 0;\n    if"),
    "masked-waits-of-a-lost-rank": (
        masked_deaths,
        "common/wait.cuh",
        r"lost = lost_for\(p, peer, now\);\n    if",
        "lost = 0;\n    if",
    ),
    "any-loss-masks": (masked_deaths, "common/wait.cuh", r"kMasksOnTimeout \? lost & 1u << peer : lost", "lost"),
    "other-losses-do-not-count": (
        other_losses,
        "common/wait.cuh",
        r"kMasksOnTimeout \? lost & 1u << peer : lost",
        "lost & 1u << peer",
    ),
    "the-wrong-rank-is-named": (deaths, "common/wait.cuh", r"lost \? __ffs\(lost\) - 1 : peer", "peer"),
}
"""For each: calls that notice it, the file, a piece of it, and what stands there instead."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "file", "pattern", "replacement"), [pytest.param(*case, id=name) for name, case in BROKEN.items()]
)
def test_broken_kernels_fail(tmp_path, monkeypatch, run, file, pattern, replacement):
    folder = broken(tmp_path, file, pattern, replacement)
    monkeypatch.setitem(globals(), "Machine", functools.partial(Machine, cuda_src=folder))
    for seed in range(20):
        try:
            run(seed, monkeypatch)
        except (AssertionError, EPError, pytest.fail.Exception):
            return
    pytest.fail("no seed shows that the kernels are broken")


def test_each_look_at_absent_slots_has_a_broken_kernel():
    files = [path for path in sources.source_dir().rglob("*") if path.suffix in (".cu", ".cuh")]
    assert sum(path.read_text().count("is_absent(p, ") for path in files) == len(IF_ABSENT)


@pytest.mark.parametrize("options", [{}, dict(on_timeout="mask")])
def test_absent_slots_are_masked(options):
    """Without its mask, low-latency calls use the memory of an absent slot, and this is noticed."""
    with pytest.raises(AssertionError, match="is in no memory of a GPU"), Machine(3, 1) as machine:  # noqa: PT012
        buffers = machine.buffers(members=(0, 2), **options, **sizes(3))
        for rank in buffers.members:
            runtime = buffers[rank]._backend.runtime
            array_at(runtime.state + runtime.layout.local.offsets["masked"], (3,), "uint32")[:] = 0
        low_latency_round(machine, buffers, 1).all()
        machine.run()
