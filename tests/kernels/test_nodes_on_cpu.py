"""Throughput calls over several nodes, on the CPU. The network carries puts in pieces, late and in any order (network.cpp)."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
from scenarios import Scenario, Sum

from deepep_rt import EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.backends.cuda import expert_rows, link_rates, network_memory
from deepep_rt.cuda import driver
from deepep_rt.kernels import layout, nodes_layout, structs
from tests.kernels_on_cpu import compiler, fake_driver
from tests.kernels_on_cpu.device_arrays import DeviceArray
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import (
    ThroughputRound,
    assert_same,
    broken,
    compressed_rounds,
    expert_rounds,
    fails,
    in_place_rounds,
    low_latency_rounds,
    opaque_rounds,
    run_rounds,
    seeds,
    throughput_rounds,
)

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SIZES = dict(num_max_tokens_per_rank=40, hidden=64, num_topk=2, num_experts=8, num_sms=2)
TWO_BY_TWO = dict(**SIZES, ranks_per_node=2)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """Make chunks of four tokens and two slots, so that chunks wait for credits."""
    for name, number in (("_CHUNK_BYTES", 512), ("_MOST_SLOTS", 2)):
        monkeypatch.setattr(nodes_layout, name, dict.fromkeys(("nvshmem", "mpi", "wire"), number))


@pytest.fixture
def small_windows(monkeypatch):
    """Let combines with `reduce="topk"` take windows of four tokens."""
    monkeypatch.setattr(layout.Layout, "choice_window", 4)


@pytest.mark.full
@pytest.mark.parametrize("seed", seeds(2))
def test_relay_between_two_nodes(seed):
    with Machine(4, seed, num_sms=(None, 1)[seed % 2], weak_memory=True, transport="mpi") as machine:
        throughput_rounds(machine, machine.buffers(**TWO_BY_TWO), seed, 4)


@pytest.mark.parametrize("seed", seeds(2))
def test_direct_path(seed):
    with Machine(4, seed, "sm_80", num_sms=(None, 1)[seed % 2]) as machine:
        throughput_rounds(machine, machine.buffers(**TWO_BY_TWO, path="direct"), seed, 4 if seed else 2)


@pytest.mark.parametrize("path", ["hierarchical", "direct"])
@pytest.mark.parametrize(
    ("seed", "arch", "dtype"),
    [
        (0, "sm_90", "bfloat16"),
        *(pytest.param(1, *kind, marks=pytest.mark.full) for kind in (("sm_80", "bfloat16"), ("sm_90", "float32"))),
    ],
)
def test_nodes_that_reach_each_other(seed, arch, dtype, path):
    """Kernels write to the memory of other nodes themselves. A stage for float32 holds two rows of other types."""
    with Machine(4, seed, arch, num_sms=(None, 1)[seed % 2], weak_memory=True, transport="nvlink") as machine:
        throughput_rounds(machine, machine.buffers(**TWO_BY_TWO, path=path, dtype=dtype), seed, 4)


@pytest.mark.parametrize(
    ("seed", "arch", "path"),
    [(0, "sm_90", "hierarchical"), *(pytest.param(1, arch, "direct", marks=pytest.mark.full) for arch in ("sm_80", "sm_90"))],
)
def test_wire(seed, arch, path, monkeypatch):
    """A kernel carries the puts of both modes."""
    monkeypatch.setattr(network_memory.Wire, "NUM_BLOCKS", 2)
    with Machine(4, seed, arch, weak_memory=True, transport="wire") as machine:
        buffers = machine.buffers(**{**TWO_BY_TWO, "hidden": 256}, path=path, low_latency=True, low_latency_sms=2)
        for count in range(2):
            throughput_rounds(machine, buffers, 10 * seed + count, 2)
            if arch != "sm_80":  # its low-latency rows are other ones
                low_latency_rounds(machine, buffers, 10 * seed + count, 2)
                opaque_rounds(machine, buffers, 10 * seed + count, 2)  # messages of an odd number of words


def test_a_silent_rank_of_a_wire(monkeypatch):
    """The kernel that waits ends, and so does the wire. Each launch of a call has one of the wire."""
    monkeypatch.setattr(network_memory.Wire, "NUM_BLOCKS", 1)
    with Machine(2, 0, weak_memory=True, transport="wire") as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 4}, ranks_per_node=1)
        made = ThroughputRound(machine, buffers, 5)
        x, idx = ([machine.put(rank, getattr(made.inputs[rank], name)) for rank in range(2)] for name in ("x", "topk_idx"))
        handles = [buffers[rank].dispatch(x[rank], idx[rank], num_worst_tokens=80).handle for rank in range(2)]
        machine.run()
        with machine.recorded() as launches:
            sent = [buffers[rank].dispatch(x[rank], handle=handles[rank]) for rank in range(2)]
        machine.run()
        assert sorted({launch.name for _, launch in launches}) == ["dispatch_nodes", "wire"]
        for rank in range(2):
            expected = made.round.expected(rank)
            assert_same(sent[rank].recv_x[: expected.num_kept], expected.x[: expected.num_kept])
        buffers[0].dispatch(x[0], handle=handles[0])
        machine.run()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1 on node 1"):
            buffers[0].check()


@pytest.mark.parametrize(
    ("seed", "arch", "path", "how"),
    [
        (0, "sm_90", "hierarchical", {}),
        pytest.param(1, "sm_80", "hierarchical", dict(with_weights=False), marks=pytest.mark.full),
        pytest.param(2, "sm_90", "direct", dict(with_weights=False), marks=pytest.mark.full),
        pytest.param(3, "sm_80", "direct", {}, marks=pytest.mark.full),
        pytest.param(4, "sm_90", "hierarchical", dict(compress="fp8"), marks=pytest.mark.full),
        pytest.param(5, "sm_90", "direct", dict(compress="fp8"), marks=pytest.mark.full),
    ],
)
def test_rows_that_peers_read_in_place(seed, arch, path, how):
    hidden = dict(hidden=640) if how.get("compress") else {}
    with Machine(4, seed, arch, num_sms=(None, 1)[seed % 2], weak_memory=True, transport=("nvlink", "mpi")[seed % 2]) as machine:
        in_place_rounds(machine, machine.buffers(**{**TWO_BY_TWO, **hidden}, path=path), seed, 4, **how)


@pytest.mark.parametrize("seed", seeds(2))
def test_nodes_of_one_rank(seed):
    with Machine(3, seed) as machine:
        throughput_rounds(machine, machine.buffers(**{**SIZES, "num_experts": 6}, ranks_per_node=1), seed, 4)


def test_expert_rows(monkeypatch):
    monkeypatch.setattr(expert_rows, "CHOICES_PER_BLOCK", 32)  # several blocks find the rows of these few tokens
    with Machine(3, 1) as machine:
        expert_rounds(machine, machine.buffers(**{**SIZES, "num_experts": 6}, ranks_per_node=1), 1, 4)


@pytest.mark.full
@pytest.mark.parametrize("path", ["hierarchical", "direct"])
@pytest.mark.parametrize("seed", seeds(2))
def test_expert_rows_between_two_nodes(seed, path):
    arch, transport = (("sm_90", "mpi"), ("sm_80", "nvshmem"))[seed % 2]
    with Machine(4, seed, arch, num_sms=(None, 1)[seed % 2], weak_memory=seed % 2 == 0, transport=transport) as machine:
        expert_rounds(machine, machine.buffers(**TWO_BY_TWO, path=path), seed, 4)


def choice_sums(dtype, weighted, settings):
    """Return what combine with reduce="topk" gives each rank, and what the oracle expects. Most ranks drop rows."""
    how = Sum(weights=True, weighted=weighted, biases=2, reduce="topk", values="odd")
    kinds = dict(dtype=dtype, drawn=dict(skip_probability=0.3), options=dict(expert_alignment=2), worst=lambda *_: 40)
    row = Scenario("sums of choices over nodes", "expert", lambda rank: 9, sums=(how,), changed=change_first_token, **kinds)
    with Machine(4, 2, weak_memory=True) as machine:
        buffers = machine.buffers(**{**SIZES, "num_topk": 5, "dtype": dtype}, **settings)
        made = row.start(buffers[0].config)
        machine.each_rank(lambda rank: made.call(buffers[rank], rank, functools.partial(machine.put, rank)))
        kernel = "combine_choices_nodes" if buffers[0].config.has_network else "combine_choices"
        assert machine.launched.count(kernel) == 4 * 40 // 4
        back = [made.back[rank][0] for rank in range(4)]
        returned = [np.zeros(1) if weighted else np.array(one.topk_weights) for one in back]
        return [np.array(one.x) for one in back], [made.wanted_sum(rank, 0)[0] for rank in range(4)], returned


def change_first_token(one, rank, ranks, each):
    """Let a token name an expert in all choices, and another token none."""
    if rank in (1, 2):
        one.topk_idx[0] = (0, -1)[rank - 1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "weighted", "settings"),
    [
        ("bfloat16", True, dict(ranks_per_node=2)),
        ("bfloat16", False, dict(ranks_per_node=2, path="direct")),
        ("float16", True, dict(ranks_per_node=2, path="direct")),
        ("float32", False, dict(ranks_per_node=1)),
    ],
)
@pytest.mark.usefixtures("small_windows")
def test_sums_of_choices_have_the_same_bits_on_one_node(dtype, weighted, settings):
    with np.errstate(all="ignore"):
        one_node, wanted, weights = choice_sums(dtype, weighted, {})
        found, _, returned = choice_sums(dtype, weighted, settings)
        for rank in range(4):
            assert_same(found[rank], one_node[rank])
            is_number = ~np.isnan(wanted[rank])  # NumPy's NaN may have another sign
            assert_same(np.where(is_number, found[rank], 0), np.where(is_number, wanted[rank], 0))
            assert_same(returned[rank], weights[rank])


@pytest.mark.parametrize(
    ("seed", "num_ranks", "ranks_per_node", "path"),
    [
        (2, 3, 1, "hierarchical"),
        pytest.param(4, 4, 2, "hierarchical", marks=pytest.mark.full),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, 4, 2, "hierarchical"), (1, 4, 2, "direct"))),
        pytest.param(3, 4, 2, "hierarchical", marks=pytest.mark.full),
    ],
)
def test_compressed_sums(seed, num_ranks, ranks_per_node, path):
    arch, transport = "sm_80" if seed == 3 else "sm_90", {0: "mpi", 4: "nvlink"}.get(seed, "nvshmem")
    with Machine(num_ranks, seed, arch, transport=transport, num_sms=(None, 1)[seed % 2], weak_memory=seed % 4 == 0) as machine:
        sizes = dict(hidden=640, num_max_tokens_per_rank=20, num_experts=2 * num_ranks, ranks_per_node=ranks_per_node, path=path)
        kinds = dict(kinds=("log10", None)) if arch == "sm_80" else {}
        compressed_rounds(machine, machine.buffers(**{**SIZES, **sizes}), seed, 3, **kinds)


def crossings(inputs, config, group_size):
    """Count the tokens that go from each rank to each group of ranks on another node, `[rank, group]`."""
    counts = np.zeros((config.num_ranks, config.num_ranks // group_size), int)
    for rank, mine in enumerate(inputs):
        owner = np.where(mine.topk_idx >= 0, mine.topk_idx // config.num_local_experts, -1)
        for group in range(counts.shape[1]):
            if group * group_size // config.node_size != rank // config.node_size:
                counts[rank, group] = ((owner >= 0) & (owner // group_size == group)).any(1).sum()
    return counts


@pytest.mark.parametrize(("path", "compiled_before"), [("hierarchical", ("sm_90", "mpi")), ("direct", ("sm_80", "nvshmem"))])
def test_bytes_on_the_network(path, compiled_before):
    """On the hierarchical path each token crosses the network once for each other node, and so does each sum."""
    arch, transport = compiled_before
    with Machine(4, 0, arch, transport=transport) as machine:
        buffers = machine.buffers(**TWO_BY_TWO, path=path)
        inputs, config, nodes = (
            ThroughputRound(machine, buffers, 7).inputs,
            buffers[0].config,
            buffers[0]._backend.runtime.layout.nodes,
        )
        sent = {}

        def dispatch(rank):
            arrays = [machine.put(rank, array) for array in (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)]
            sent[rank] = buffers[rank].dispatch(*arrays, num_worst_tokens=config.num_max_recv_tokens)

        def combine(rank):
            y = np.ones((config.num_max_recv_tokens, config.hidden), inputs[rank].x.dtype)
            buffers[rank].combine(machine.put(rank, y), sent[rank].handle)

        tokens = crossings(inputs, config, config.node_size if path == "hierarchical" else 1)
        sizes = buffers[0]._backend.runtime.layout.constants
        hellos = config.num_ranks * (config.num_nodes - 1) * structs.Hello.size(sizes)
        counts = config.num_ranks * nodes.num_flows * structs.FlowCounts.size(sizes)
        for call, idx_bytes, others in ((dispatch, inputs[0].topk_idx.itemsize, counts + hellos), (combine, 0, hellos)):
            before = machine.put_bytes
            machine.each_rank(call)
            chunk = nodes.chunk(config.row_bytes, 0, idx_bytes, with_weights=call is dispatch)
            heads = (-(-tokens // chunk.num_tokens)).sum() * chunk.offsets["rows"] if call is dispatch else 0
            assert machine.put_bytes - before == tokens.sum() * config.row_bytes + heads + others


@pytest.mark.parametrize("seed", seeds(2))
def test_a_silent_node_is_named(seed):
    with Machine(4, seed, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        made = ThroughputRound(machine, buffers, 5)
        machine.each_rank(lambda rank: made.run(rank))
        machine.cut(2, 0)
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 2 on node 1: ") as caught:
            machine.each_rank(lambda rank: ThroughputRound(machine, buffers, 5, worst=None).run(rank))
        assert (caught.value.rank, caught.value.peer, caught.value.node) == (0, 2, 1)
        for rank, buffer in enumerate(buffers):
            with pytest.raises(EPTimeoutError) as caught:
                buffer.check()
            assert caught.value.peer != rank


def dispatch(machine, buffer, rank, inputs, *, with_weights=True):
    """Dispatch the tokens of a rank without a wait for the counts."""
    weights = machine.put(rank, inputs.topk_weights) if with_weights else None
    x, idx = machine.put(rank, inputs.x), machine.put(rank, inputs.topk_idx)
    return buffer.dispatch(x, idx, weights, num_worst_tokens=buffer.config.num_max_recv_tokens)


def test_a_node_that_comes_late():
    """Ranks that have timed out say nothing more, so the others do not take what they say for a wrong call."""
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        inputs = ThroughputRound(machine, buffers, 5).inputs
        for ranks in ((0, 1), (2, 3)):
            for rank in ranks:
                dispatch(machine, buffers[rank], rank, inputs[rank])
            machine.run()
        for buffer in buffers:
            with pytest.raises(EPTimeoutError):
                buffer.check()


def test_ranks_that_differ():
    """No rank sends rows, all ranks raise, and the Buffers stay usable."""
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        made = ThroughputRound(machine, buffers, 5)
        y = np.ones((buffers[0].config.num_max_recv_tokens, 64), made.inputs[0].x.dtype)
        back = []
        for rank, buffer in enumerate(buffers):
            sent = dispatch(machine, buffer, rank, made.inputs[rank], with_weights=rank != 3)
            back.append(buffer.combine(machine.put(rank, y), sent.handle))
        machine.run()
        assert all(np.isnan(result.x.astype(np.float32)).all() for result in back)
        for buffer in buffers:
            with pytest.raises(EPInputError, match=r"rank 3.*topk_weights|topk_weights.*rank 3"):
                buffer.check()
        throughput_rounds(machine, buffers, 1, 1)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("path", ["hierarchical", pytest.param("direct", marks=pytest.mark.full)])
def test_ranks_that_differ_in_the_order_of_sums(path):
    """A rank makes a call with one launch, and the others one with several. Their later calls match again."""
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO, path=path)
        inputs = ThroughputRound(machine, buffers, 5).inputs
        back = []
        for rank, buffer in enumerate(buffers):
            x, idx, weights = (machine.put(rank, a) for a in (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights))
            sent = buffer.dispatch(x, idx, weights, layout="expert", num_worst_tokens=90)
            y = machine.put(rank, np.ones((90, 64), inputs[rank].x.dtype))
            how = dict(topk_weights=machine.put(rank, np.ones(90, np.float32)), reduce="rank" if rank == 3 else "topk")
            back.append(buffer.combine(y, sent.handle, **how))
        machine.run()
        assert machine.launched.count("combine_choices_nodes") == 3 * 40 // 4
        for result in back:
            assert np.isnan(result.x.astype(np.float32)).all()
            assert np.isnan(result.topk_weights).all()
        for buffer in buffers:
            with pytest.raises(EPInputError, match=r"rank 3: combine($|,)|reduce='topk'"):
                buffer.check()
        expert_rounds(machine, buffers, 1, 2)


@pytest.mark.full
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("num_done", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_choices_without_a_node_are_nan(weighted, num_done):
    """The network fails before the first window of tokens, or between two windows."""
    with Machine(4, 1, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        x, idx = np.ones((8, 64), np.float16), np.tile(np.array([[0, 7]], np.int32), (8, 1))
        sent = machine.each_rank(
            lambda rank: buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx), layout="expert")
        )
        back = []
        for rank, buffer in enumerate(buffers):
            num_rows = sent[rank].handle.num_recv_rows
            y = machine.put(rank, np.ones((num_rows, 64), np.float16))
            how = dict(topk_weights=machine.put(rank, np.ones(num_rows, np.float32)), weighted=weighted)
            back.append(buffer.combine(y, sent[rank].handle, **how, reduce="topk"))
        while machine.launched.count("list_choices") < 4 * (num_done + 1):
            machine._gpus.advance(64)
        machine.cut(2, 0)
        machine.run()
        with pytest.raises(EPTimeoutError) as caught:
            buffers[0].check()
        assert (caught.value.rank, caught.value.peer, caught.value.node) == (0, 2, 1)
        assert np.isnan(back[0].x).all()
        assert weighted or np.isnan(back[0].topk_weights).all()


@pytest.mark.full
def test_more_rows_than_a_rank_has_memory_for():
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO, num_max_recv_tokens=60)
        x = np.zeros((40, 64), np.float16)
        idx = np.tile(np.array([[2, 3]], np.int32), (40, 1))  # all tokens go to rank 1
        errors = {}

        def dispatch(rank):
            try:
                buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx))
                buffers[rank].synchronize()
            except EPOutOfMemoryError as error:
                errors[rank] = str(error)

        machine.each_rank(dispatch)
        assert len(errors) == 4
        assert len(set(errors.values())) == 1
        assert "num_max_recv_tokens=60; expected at least 160, the rows that this dispatch brings to rank 1" in errors[0]
        throughput_rounds(machine, buffers, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["mpi", "nvshmem"])
@pytest.mark.parametrize(("path", "layout"), [("hierarchical", "token"), ("direct", "expert")])
def test_memory_grows_for_more_rows(layout, path, transport):
    """On the ranks that need it: calls, handles and combines give the same bits as with room from the start."""
    with Machine(4, 1, weak_memory=True, transport=transport, can_sleep=True) as machine:
        buffers = machine.buffers(**TWO_BY_TWO, num_max_recv_tokens=20, path=path)
        fixed = dict(worst=None, tokens=lambda rank: 40 if rank else 12)
        rounds = [ThroughputRound(machine, buffers, i, layout, **fixed) for i in range(5)]
        run_rounds(machine, rounds)
        assert max(made.round.sent[0].handle.num_recv_rows for made in rounds) > 40
        x = np.ones((40, 64), ml_dtypes.bfloat16)
        idx = np.tile(np.array([[2, 3]], np.int32), (40, 1))  # all tokens go to rank 1: the largest number of rows

        def step(rank):
            sent = buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx), layout=layout)
            return calls_along(machine, buffers[rank], rank, sent.handle, layout), sent.handle.num_recv_rows

        found = machine.each_rank(step)
        assert [rows for _, rows in found] == [0, 160 if layout == "token" else 320, 0, 0]
        for results, _ in found:
            sums = [result for result in results if result.shape == (40, 64)]
            assert all((result == (2 if layout == "expert" else 1)).all() for result in sums)
            assert sums


@pytest.mark.parametrize("transport", ["nvshmem", pytest.param("mpi", marks=pytest.mark.full)])
def test_sleep(transport):
    """Memory of a node loses its contents, and that of the network stays. Handles and calls go on, of both modes."""
    with Machine(4, 1, weak_memory=True, transport=transport, can_sleep=True) as machine:
        buffers = machine.buffers(**{**TWO_BY_TWO, "hidden": 256}, low_latency=True, low_latency_sms=2)
        x, idx = np.ones((40, 256), ml_dtypes.bfloat16), np.tile(np.array([[2, 7]], np.int32), (40, 1))
        handles = machine.each_rank(lambda rank: buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx)).handle)
        for cycle in range(2):
            throughput_rounds(machine, buffers, cycle, 1)
            low_latency_rounds(machine, buffers, cycle, 3)
            for step in ("sleep", "wake"):
                for buffer in buffers:
                    getattr(buffer, step)()
            again = machine.each_rank(lambda rank: buffers[rank].dispatch(machine.put(rank, x), handle=handles[rank]).recv_x)
            assert [len(rows) for rows in again] == [0, 160, 0, 160]
            assert all((rows == 1).all() for rows in again)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["token", "expert"])
def test_no_memory_to_grow(layout, monkeypatch):
    """All ranks raise the same error, and the Buffers stay usable."""

    def grow(memory, num_bytes, timeout_s, heard):
        raise EPOutOfMemoryError("rank 1: the GPU has no memory")

    with Machine(4, 0, weak_memory=True, transport="mpi", can_sleep=True) as machine:
        buffers = machine.buffers(**TWO_BY_TWO, num_max_recv_tokens=80)
        monkeypatch.setattr(fake_driver._SymmetricMemory, "grow", grow)
        x = np.zeros((40, 64), np.float16)
        idx = np.tile(np.array([[2, 3]], np.int32), (40, 1))
        errors = {}

        def dispatch(rank):
            try:
                buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx), layout=layout)
                buffers[rank].synchronize()
            except EPOutOfMemoryError as error:
                errors[rank] = str(error), error.num_recv_tokens

        machine.each_rank(dispatch)
        assert len(errors) == 4
        assert len(set(errors.values())) == 1
        text, num_rows = errors[0]
        assert "the GPU of rank 1 has no memory for the 160 rows that this dispatch brings to it" in text
        assert num_rows == 160
        monkeypatch.undo()
        machine.each_rank(lambda rank: buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx)))
        throughput_rounds(machine, buffers, 1, 1)


def calls_along(machine, buffer, rank, handle, layout):
    """Make all calls that use the handle of a dispatch. Return what they give."""
    x, y = (machine.put(rank, np.ones((n, 64), ml_dtypes.bfloat16)) for n in (40, handle.num_recv_rows))
    sent = buffer.dispatch(x, handle=handle)
    rows = sent.views["x"]  # in memory that has grown, if the rows are many
    again = DeviceArray(rank, rows.ptr, rows.shape, rows.dtype)
    found = [sent.recv_x, buffer.combine(y, handle).x, buffer.combine(again, handle).x]
    if layout == "expert":
        return [*found, buffer.combine(y, handle, reduce="topk").x]
    step = buffer.prepare_throughput(x, handle)
    return [*found, step.dispatch().recv_x, step.combine(y).x]


@pytest.mark.parametrize("path", ["hierarchical", pytest.param("direct", marks=pytest.mark.full)])
def test_calls_after_a_dispatch_with_too_many_rows(path):
    """Rank 1 raises in the dispatch and makes no other call. The others may have made some before they hear of it."""
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO, num_max_recv_tokens=60, num_slots=12, path=path)
        x = np.zeros((40, 64), ml_dtypes.bfloat16)
        idx = np.tile(np.array([[2, 3]], np.int32), (40, 1))  # all tokens go to rank 1
        idx[:10, 1] = 0  # some go to rank 0 too
        for layout in ("token", "expert"):
            errors, handles, results = {}, {}, []

            def step(rank, layout=layout, errors=errors, handles=handles, results=results):
                buffer = buffers[rank]
                try:
                    handles[rank] = buffer.dispatch(machine.put(rank, x), machine.put(rank, idx), layout=layout).handle
                    buffer.synchronize()
                except EPOutOfMemoryError as error:
                    errors[rank] = str(error)
                for _ in range(2 if rank in handles else 0):
                    results.extend(calls_along(machine, buffer, rank, handles[rank], layout))
                buffer.synchronize()

            machine.each_rank(step)
            assert len(errors) == 4
            assert len(set(errors.values())) == 1
            assert 1 not in handles
            assert handles
            for result in results:
                assert np.isnan(result.astype(np.float32)).all()
            throughput_rounds(machine, buffers, 1, 1)


def test_a_rank_without_room():
    """All ranks raise, and the Buffers stay usable once there is room."""
    with Machine(4, 0, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**TWO_BY_TWO, num_slots=1, on_exhausted="error")
        made = ThroughputRound(machine, buffers, 5, worst=None, drawn={}, tokens=lambda rank: 30)
        errors = {}

        def arguments(rank):
            return machine.put(rank, made.inputs[rank].x), machine.put(rank, made.inputs[rank].topk_idx)

        def run(rank):
            kept = dispatch(machine, buffers[rank], rank, made.inputs[rank])
            if rank != 1:
                del kept
            try:
                buffers[rank].dispatch(*arguments(rank))
                buffers[rank].synchronize()
            except EPOutOfMemoryError as error:
                errors[rank] = str(error)

        machine.each_rank(run)
        assert len(errors) == 4
        assert all(text.startswith("rank 1 has no room in its pool") for text in errors.values())
        again = machine.each_rank(lambda rank: buffers[rank].dispatch(*arguments(rank)))
        for rank in range(4):
            expected = made.round.expected(rank)
            assert_same(again[rank].recv_x[: expected.num_kept], expected.x[: expected.num_kept])


ONE_A_NODE = 2, dict(**{**SIZES, "num_experts": 4}, ranks_per_node=1)
TWO_A_NODE = 4, TWO_BY_TWO
MPI, NVLINK = dict(transport="mpi"), dict(transport="nvlink", weak_memory=True)
CREDITS, CHUNKS = (rf"return has_tag\(p, kNetwork{name}[^;]*;" for name in ("Credits", "Arrived"))
SUMS, EXPOSED = r"ok = await_sums\(p, epoch, flow, chunk\);", r"ok = await_row\(p, epoch, index, at_row\);"
OWN, LINES = r"is_own\(first \+ lane\) \?", r"first_line\(memory\)"
WRITTEN, RELEASE = r"bulk\.wait_group %0", r"fence_release_sys\(\);  // each lane: w"


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "how", "file", "pattern", "replacement"),
    [
        pytest.param(ONE_A_NODE, MPI, "nodes.cuh", CREDITS, "return true;", id="credits"),
        pytest.param(ONE_A_NODE, NVLINK, "nodes.cuh", CREDITS, "return true;", id="far-credits"),
        pytest.param(ONE_A_NODE, MPI, "nodes.cuh", CHUNKS, "return true;", id="chunks"),
        pytest.param(ONE_A_NODE, MPI, "combine_nodes.cuh", SUMS, ";", id="sums"),
        pytest.param(ONE_A_NODE, NVLINK, "combine_nodes.cuh", SUMS, ";", id="far-sums"),
        pytest.param(TWO_A_NODE, MPI, "combine_nodes.cuh", EXPOSED, ";", id="exposed-rows"),
        pytest.param(TWO_A_NODE, MPI, "combine_nodes_send.cuh", OWN, "true ?", id="other-rows"),
        pytest.param(ONE_A_NODE, MPI, "dispatch_nodes.cu", LINES, "memory", id="lines-of-dispatch"),
        pytest.param(ONE_A_NODE, MPI, "combine_nodes.cu", LINES, "memory", id="lines-of-combine"),
        pytest.param(ONE_A_NODE, NVLINK, "../common/bulk.cuh", WRITTEN, "bulk.wait_group.read %0", id="written-rows"),
        pytest.param(ONE_A_NODE, {**NVLINK, "arch": "sm_80"}, "copies.cuh", RELEASE, "// w", id="release"),
    ],
)
def test_a_missing_wait_fails(tmp_path, sizes, how, file, pattern, replacement):
    folder, (num_ranks, settings) = broken(tmp_path, f"nodes/{file}", pattern, replacement), sizes

    def run(machine, seed):
        throughput_rounds(machine, machine.buffers(**settings), seed, 4)

    assert fails(folder, run, num_ranks, **how)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"if \(exposes_in_place\(p\)\)\s+wait_epoch", "if (false) wait_epoch", id="wait"),
        pytest.param(r"if \(kRanksPerNode > 1 && routes[^;]*;", "", id="flags"),
    ],
)
def test_a_mistake_at_the_end_of_rows_in_place_fails(tmp_path, pattern, replacement):
    """Without its flags, the wait times out."""
    folder = broken(tmp_path, "nodes/combine_nodes.cuh", pattern, replacement)
    assert fails(folder, lambda machine, seed: in_place_rounds(machine, machine.buffers(**TWO_BY_TWO), seed, 4), 4, **NVLINK)


def test_a_rank_that_never_ends_its_reads(tmp_path):
    """A rank that exposes rows in place names it, and its sums are NaN."""
    folder = broken(tmp_path, "nodes/combine_nodes.cuh", r"(lane >= kRanksPerNode) \|\| was_aborted\(p\)", r"\1 || p.rank == 1")
    with Machine(4, 0, cuda_src=folder, **NVLINK) as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        inputs, back = ThroughputRound(machine, buffers, 5, tokens=lambda rank: 9).inputs, []
        for rank, buffer in enumerate(buffers):
            sent = dispatch(machine, buffer, rank, inputs[rank])
            rows = sent.views["x"]
            back.append(buffer.combine(DeviceArray(rank, rows.ptr, rows.shape, rows.dtype), sent.handle))
        machine.run()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1") as caught:
            buffers[0].check()
        assert caught.value.phase == "the rows of combine on another rank of this node"
        assert [bool(np.isnan(one.x.astype(np.float32)).all()) for one in back] == [True, False, False, False]


def windows_without_rows(machine, seed):
    """No row crosses, so a rank may be a launch ahead of the other one."""
    buffers = machine.buffers(**{**SIZES, "num_experts": 4}, ranks_per_node=1)
    x, idx = np.ones((8, 64), np.float16), np.zeros((8, 2), np.int32)
    arrays = [(x, idx), (x[:0], idx[:0])]
    sent = machine.each_rank(
        lambda rank: buffers[rank].dispatch(*(machine.put(rank, one) for one in arrays[rank]), layout="expert")
    )
    y = [np.full((one.handle.num_recv_rows, 64), seed % 5 + 1, np.float16) for one in sent]
    back = machine.each_rank(lambda rank: buffers[rank].combine(machine.put(rank, y[rank]), sent[rank].handle, reduce="topk"))
    assert (np.array(back[0].x) == 2 * (seed % 5 + 1)).all()


@pytest.mark.full
@pytest.mark.usefixtures("small_windows")
def test_counts_of_two_launches(tmp_path):
    """A rank tells how many rows it sends before the other one has read what it told in the launch before."""
    for seed in range(3):
        with Machine(2, seed, transport="mpi") as machine:
            windows_without_rows(machine, seed)
    folder = broken(tmp_path, "nodes/combine_choices_nodes.cu", r"epoch % 2 \* kNumFlows \+ ", "")
    assert fails(folder, windows_without_rows, 2, transport="mpi")


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        pytest.param(r"if \(!await_rows\(p, epoch\)\) return;", "", id="rows"),
        pytest.param(r"ok = wait_epoch\(p, flags [^;]*;", ";", id="rows-of-near-ranks"),
        pytest.param(r"before \+ num_done == routes.num_items", "before == 0", id="flag-after-the-first-rows"),
        pytest.param(r"is_own \? row.position \+ 1 : 0", "0", id="own-rows"),
    ],
)
def test_a_mistake_in_sums_of_choices_fails(tmp_path, pattern, replacement):
    folder = broken(tmp_path, "nodes/combine_choices_nodes.cu", pattern, replacement)
    assert fails(
        folder, lambda machine, seed: expert_rounds(machine, machine.buffers(**TWO_BY_TWO), seed, 4), 4, weak_memory=True
    )


@pytest.mark.parametrize("transport", ["nvshmem", pytest.param("mpi", marks=pytest.mark.full)])
def test_measurement_of_links(transport, monkeypatch):
    """All that is measured moves, and calls work after it."""
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: 2.0)
    for name in ("_NEAR_BYTES", "_FAR_BYTES"):
        monkeypatch.setattr(link_rates, name, 1 << 13)
    with Machine(4, 0, weak_memory=True, transport=transport) as machine:
        buffers = machine.buffers(**TWO_BY_TWO)
        before = machine.put_bytes
        rates = machine.each_rank(lambda rank: link_rates.measured_rates(buffers[rank]._backend.runtime))
        assert machine.put_bytes > before
        assert len(set(rates)) == 1
        assert rates[0].near_latency_s == 0.002 / min(64, buffers[0]._backend.runtime.layout.nodes.num_exposed_chunks)
        throughput_rounds(machine, buffers, 1, 1)
