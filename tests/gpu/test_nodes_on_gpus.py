"""Throughput calls over declared nodes on GPUs, against the host backend with the same nodes, bit for bit: both paths, all transports."""

from __future__ import annotations

import gc
import os

import pytest

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
torch = pytest.importorskip("torch")

from gpu_buffers import captured, cpu, make, poison, rounds, routing, rows, same, some, tokens  # noqa: E402
from gpu_low_latency import same_sent  # noqa: E402
from gpu_throughput import check_graph, check_known_routing_and_fixed_size, check_rounds, round_trip, same_dispatch  # noqa: E402
from mpi4py import MPI  # noqa: E402

from deepep_rt import EPInputError, EPOutOfMemoryError, EPTimeoutError, EPUnavailableError, NetworkOptions  # noqa: E402
from deepep_rt.backends.cuda.network_memory import Wire  # noqa: E402
from deepep_rt.comm.nixl_traffic import nixl_objection  # noqa: E402
from deepep_rt.cuda.networked_heap import NetworkedHeap  # noqa: E402

NUM_SMS = min(16, 128 // MPI.COMM_WORLD.Get_size())  # the blocks of all ranks run at once on one GPU


def _topologies():
    """Name the node sizes that this number of ranks allows, largest first, and both paths where they differ."""
    size = MPI.COMM_WORLD.Get_size()
    nodes = [node for node in range(size // 2, 0, -1) if size % node == 0]
    return [(node, path) for node in nodes for path in ("hierarchical", "direct") if node > 1 or path == "hierarchical"]


@pytest.fixture(
    params=_topologies(), ids=lambda topology: f"{MPI.COMM_WORLD.Get_size() // topology[0]}x{topology[0]}-{topology[1]}"
)
def topology(request):
    return request.param


@pytest.fixture(params=["nvshmem", "nvshmem-puts", "wire", "mpi", *([] if nixl_objection() else ["nixl"])])
def settings(request, topology, monkeypatch):
    """With nvshmem, kernels write to other nodes over NVLink. With nvshmem-puts, they leave that to NVSHMEM, as over a NIC."""
    (node, path), (transport, *puts), num_sms = topology, request.param.split("-"), NUM_SMS
    if puts:
        monkeypatch.setattr(NetworkedHeap, "network_peers", (0,) * MPI.COMM_WORLD.Get_size())
    if transport == "wire":  # its blocks run at the same time
        monkeypatch.setattr(Wire, "NUM_BLOCKS", 2)
        num_sms = min(NUM_SMS, 128 // MPI.COMM_WORLD.Get_size() - 2)
    return dict(ranks_per_node=node, path=path, network=NetworkOptions(transport=transport), num_sms=num_sms)


def pair(comm, settings, **sizes):
    """Make a Buffer on GPUs and one of the host backend, with the same sizes and nodes."""
    common = {"num_max_recv_tokens": None, **sizes}
    return make(comm, **common, **settings), make(comm, "host", **common, ranks_per_node=settings["ranks_per_node"])


def dispatch_to_the_end(buffer, *arrays, **options):
    """Dispatch, and wait for the call: on some ranks only the wait finds out about the others."""
    buffer.dispatch(*arrays, **options)
    buffer.synchronize()


def test_sizes(comm, settings):
    for hidden, num_topk, idx_dtype in (
        (7168, 8, torch.int64),
        (520, 4, torch.int32),
        (2880, 32, torch.int64),
        (7184, 1, torch.int32),
    ):
        gpu, host = pair(comm, settings, hidden=hidden, num_topk=num_topk)
        with gpu, host:
            poison(gpu)
            round_trip(comm, gpu, host, 1, 37 + 11 * comm.Get_rank(), num_topk, idx_dtype=idx_dtype)
            round_trip(comm, gpu, host, 2, 0 if comm.Get_rank() % 2 else 500, num_topk, idx_dtype=idx_dtype)
            round_trip(comm, gpu, host, 3, 64, num_topk, idx_dtype=idx_dtype, one_rank=True)


def test_payloads(comm, settings):
    gpu, host = pair(comm, settings)
    with gpu, host:
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16):
            poison(gpu)
            got, _ = round_trip(comm, gpu, host, 5, 130, 8, dtype=dtype, scales=True)
            assert got.recv_x.dtype == dtype
    gpu, host = pair(comm, settings, hidden=1024, dtype="float32")
    with gpu, host:
        idx, weights = routing(comm, 6, 100, 8, gpu.config.num_experts)
        x = rows(comm, 6, 100, 1024, dtype=torch.float32)
        got, want = gpu.dispatch(x, idx, weights), host.dispatch(*cpu(x, idx, weights))
        same_dispatch(got, want)
        y = rows(comm, 7, got.recv_x.shape[0], 1024, dtype=torch.float32)
        same(gpu.combine(y, got.handle).x, host.combine(y.cpu(), want.handle).x)


def test_rounds(comm, settings):
    gpu, host = pair(comm, settings, hidden=1024, num_max_tokens_per_rank=256)
    with gpu, host:
        check_rounds(comm, gpu, host, 60, (NUM_SMS, 3, 8))


def test_rows_in_place(comm, settings):
    """The experts' outputs lie in the result of the dispatch. Work behind the combine overwrites them, and a rank of each node is late."""
    gpu, host = pair(comm, settings, hidden=7168, num_max_tokens_per_rank=256)
    with gpu, host:
        for seed in range(12):
            x = rows(comm, seed, 256, 7168)
            idx, weights = routing(comm, seed, 256, 8, gpu.config.num_experts)
            got, want = gpu.dispatch(x, idx, weights), host.dispatch(*cpu(x, idx, weights))
            got.recv_x.mul_(0.5)
            if (comm.Get_rank() + seed) % 2:
                torch.cuda._sleep(2_000_000)
            result = gpu.combine(got.recv_x, got.handle, topk_weights=got.recv_topk_weights)
            got.recv_x.fill_(float("nan"))
            expected = host.combine(want.recv_x * 0.5, want.handle, topk_weights=want.recv_topk_weights)
            same(result.x, expected.x)
            same(result.topk_weights, expected.topk_weights)


def sums_of_choices(comm, buffer, seed, num_tokens, *, dtype, weighted, is_host):
    """Dispatch rows by expert, and let the ranks of the tokens add up the rows of all choices."""
    config = buffer.config
    arrays = [
        rows(comm, seed, num_tokens, config.hidden, dtype=dtype),
        *routing(comm, seed, num_tokens, config.num_topk, config.num_experts),
    ]
    bias = rows(comm, seed + 3, num_tokens, config.hidden, dtype=dtype)
    if is_host:
        arrays, (bias,) = cpu(*arrays), cpu(bias)
    sent = buffer.dispatch(*arrays, layout="expert", expert_alignment=8)
    y = rows(comm, seed + 2, sent.handle.num_recv_rows, config.hidden, dtype=dtype).to(bias.device)
    return buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=weighted, bias=bias, reduce="topk")


def test_sums_of_choices(comm, settings):
    """In one window and in several, of which some have no token."""
    few = dict(num_max_recv_tokens=300 * comm.Get_size())  # room for few tokens at a time
    for dtype, sizes in (
        ("bfloat16", dict(hidden=7168, num_topk=8)),
        ("float32", dict(hidden=520, num_topk=32)),
        ("float16", dict(hidden=1024, num_topk=3, **few)),
        ("bfloat16", dict(hidden=1024, num_topk=8, **few)),
    ):
        gpu, host = pair(comm, settings, dtype=dtype, **sizes)
        if "num_max_recv_tokens" in sizes:
            assert gpu._backend.runtime.layout.choice_window < 300
        with gpu, host:
            poison(gpu)
            for i in rounds(comm, 6):
                gpu.num_sms = (NUM_SMS, 3)[i % 2]
                how = dict(dtype=getattr(torch, dtype), weighted=i % 3 == 0)
                num_tokens = (300, some(comm, i, 300), 0 if comm.Get_rank() % 2 else 200)[i % 3]
                got, want = (sums_of_choices(comm, b, 7 * i, num_tokens, **how, is_host=b is host) for b in (gpu, host))
                try:
                    same(got.x, want.x)
                    assert (got.topk_weights is None) == (want.topk_weights is None) == how["weighted"]
                    if want.topk_weights is not None:
                        same(got.topk_weights, want.topk_weights)
                except AssertionError:
                    gpu.synchronize()  # after a time-out the rows are NaN, and this tells the reason
                    raise


def test_graphs_of_sums_of_choices(comm, settings):
    gpu, host = pair(comm, settings, hidden=1024, num_max_recv_tokens=300 * comm.Get_size())
    with gpu, host:
        idx, weights = routing(comm, 1, 200, 8, gpu.config.num_experts)
        x = rows(comm, 1, 200, 1024)
        sent, want = gpu.dispatch(x, idx, weights, layout="expert"), host.dispatch(*cpu(x, idx, weights), layout="expert")
        y = rows(comm, 2, sent.handle.num_recv_rows, 1024)
        how = dict(weighted=True, reduce="topk")
        graph, back = captured(
            comm, lambda: gpu.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, **how), warm_up=True
        )
        for seed in range(3, 9):
            y.copy_(rows(comm, seed, *y.shape))
            back.x.fill_(7)
            graph.replay()
            same(back.x, host.combine(*cpu(y), want.handle, topk_weights=want.recv_topk_weights, **how).x)
            round_trip(comm, gpu, host, seed, 50, 8)


def test_garbage_that_a_relay_collects(comm, request):
    """Results of other streams and events of PyTorch become garbage, and the collector finds them in the relay's thread."""
    settings = dict(ranks_per_node=1, network=NetworkOptions(transport="mpi"), num_sms=NUM_SMS)
    other = torch.cuda.Stream()
    gc.collect()
    gc.freeze()  # all modules: otherwise a collection takes a tenth of a second, and 32 turns take a millisecond
    request.addfinalizer(gc.unfreeze)
    for seed in range(4):
        gpu, host = pair(comm, settings, hidden=1024, num_topk=1, timeout_s=8.0)
        with gpu, host:
            traffic, turns = gpu._backend.runtime.network._relay._traffic, 0
            turn = traffic.turn

            def collect(turn=turn):
                nonlocal turns
                turns += 1
                if turns % 32 == 0:
                    gc.collect()
                return turn()

            traffic.turn = collect
            for i in range(20):
                got, _ = round_trip(comm, gpu, host, 100 * seed + i, 60, 1)
                with torch.cuda.stream(other):
                    event = torch.cuda.Event()
                    event.record()
                    kept = [gpu.dispatch(rows(comm, i, 60, 1024), handle=got.handle, async_finish=True), event]
                kept.append(kept)
                del kept, event


def test_known_routing_and_fixed_size(comm, settings):
    gpu, host = pair(comm, settings)
    with gpu, host:
        check_known_routing_and_fixed_size(comm, gpu, host)


def test_graph(comm, settings):
    gpu, host = pair(comm, settings, hidden=1024)
    with gpu, host:
        check_graph(comm, gpu, host, 5, every=1)


def test_low_latency_calls_in_between(comm, settings):
    gpu, host = pair(comm, settings, hidden=1024, num_max_tokens_per_rank=64, low_latency=True)
    with gpu, host:
        for seed in range(6):
            round_trip(comm, gpu, host, 10 * seed, 60, 8)
            x, idx, weights = tokens(comm, gpu, seed, 50)
            sent, want = gpu.low_latency_dispatch(x, idx, use_fp8=False), host.low_latency_dispatch(*cpu(x, idx), use_fp8=False)
            same_sent(sent, want)
            how = dict(allow_multiple_reduction=False)
            got = gpu.low_latency_combine(sent.recv_x, idx, weights, sent.handle, **how)
            same(got.x, host.low_latency_combine(want.recv_x, *cpu(idx, weights), want.handle, **how).x)


def test_ranks_that_differ(comm, settings):
    gpu, host = pair(comm, settings, hidden=512)
    with gpu, host:
        x, idx, weights = tokens(comm, gpu, 1, 40)
        mine = None if comm.Get_rank() == comm.Get_size() - 1 else weights
        with pytest.raises(EPInputError, match="topk_weights"):
            dispatch_to_the_end(gpu, x, idx, mine, num_worst_tokens=400)
        comm.Barrier()
        round_trip(comm, gpu, host, 2, 40, 8)


def test_sleep(comm, settings):
    """Virtual memory sleeps, and the network's stays. Handles, graphs and calls of both modes give the same bits after it."""
    node = settings["ranks_per_node"]
    sizes = dict(hidden=512, num_max_tokens_per_rank=64, low_latency=True)
    with make(comm, **sizes, **settings) as gpu, make(comm, "host", **sizes, ranks_per_node=node) as host:
        if not gpu.describe().grows:
            with pytest.raises(EPUnavailableError, match="cannot sleep"):
                gpu.sleep()
            return
        x, idx, weights = tokens(comm, gpu, 5, 40)
        sent = gpu.dispatch(x, idx, weights)
        want = sent.recv_x.clone()
        graph, replayed = captured(
            comm, lambda: gpu.dispatch(x, idx, weights, num_worst_tokens=64 * comm.Get_size()).recv_x, warm_up=True
        )
        for cycle in range(5):
            gpu.sleep()
            gpu.wake()
            graph.replay()
            same(gpu.dispatch(x, handle=sent.handle).recv_x, want)
            same(replayed[: len(want)], want)
            round_trip(comm, gpu, host, 10 + cycle, 40, 8)
            quick = [one.low_latency_dispatch(*args, use_fp8=False) for one, args in ((gpu, (x, idx)), (host, cpu(x, idx)))]
            same_sent(*quick)


def uneven(comm, gpu, num_tokens):
    """Make rows and a routing that brings rank 0 almost all of them. The last rank gets some of rank 0."""
    idx = torch.zeros(num_tokens, 8, dtype=torch.int64, device="cuda") + torch.arange(8, device="cuda")
    if comm.Get_rank() == 0:
        idx[:, 7] = gpu.config.num_experts - 1
    return rows(comm, 1, num_tokens, 512), idx


def test_more_rows_than_expected(comm, settings):
    """Memory that grows takes them, in all calls. Other memory raises on all ranks. Both serve later calls."""
    node = settings["ranks_per_node"]
    with (
        make(comm, hidden=512, num_max_recv_tokens=100, **settings) as gpu,
        make(comm, "host", hidden=512, ranks_per_node=node) as host,
    ):
        x, idx = uneven(comm, gpu, 80)
        if not gpu.describe().grows:
            with pytest.raises(EPOutOfMemoryError, match=r"num_max_recv_tokens=100; expected at least \d+.* rank 0"):
                dispatch_to_the_end(gpu, x, idx)
            comm.Barrier()
            return
        for layout in ("token", "expert", "token"):
            options = dict(layout=layout, zero_padding=layout == "expert")
            sent, want = gpu.dispatch(x, idx, **options), host.dispatch(*cpu(x, idx), **options)
            same(sent.recv_x, want.recv_x)
            y = rows(comm, 2, sent.handle.num_recv_rows, 512)
            same(gpu.combine(y, sent.handle).x, host.combine(*cpu(y), want.handle).x)
            same(gpu.dispatch(x, handle=sent.handle).recv_x, want.recv_x)
            round_trip(comm, gpu, host, 3, 20, 8)


def test_calls_after_a_dispatch_with_too_many_rows(comm, settings):
    """Rank 0 raises in the dispatch and makes no other call. The others may have made some before they hear of it."""
    gpu, host = (
        make(comm, hidden=512, num_max_recv_tokens=160, **settings),
        make(comm, "host", hidden=512, num_max_recv_tokens=160, ranks_per_node=settings["ranks_per_node"]),
    )
    with gpu, host:
        if gpu.describe().grows:
            return  # test_more_rows_than_expected
        x, idx = uneven(comm, gpu, 120)
        for layout in ("token", "expert"):
            results = []
            with pytest.raises(EPOutOfMemoryError, match=r"num_max_recv_tokens=160; expected at least \d+.* rank 0"):  # noqa: PT012
                torch.cuda._sleep(20_000_000)  # so that the hosts of most ranks return before a kernel reports
                handle = gpu.dispatch(x, idx, layout=layout).handle
                y = rows(comm, 2, handle.num_recv_rows, 512)
                results += [gpu.combine(y, handle).x, gpu.dispatch(x, handle=handle).recv_x]
                if layout == "expert":
                    results.append(gpu.combine(y, handle, reduce="topk").x)
                gpu.synchronize()
            torch.cuda.synchronize()
            assert all(result.isnan().all() for result in results)
            comm.Barrier()
            round_trip(comm, gpu, host, 2, 20, 8)


def test_a_silent_rank_is_named(comm, settings):
    last = comm.Get_size() - 1
    gpu = make(comm, hidden=512, timeout_s=2.0, **settings)
    x, idx, weights = tokens(comm, gpu, 1, 40)
    if comm.Get_rank() != last:
        with pytest.raises(EPTimeoutError) as caught:
            dispatch_to_the_end(gpu, x, idx, weights)
        error = caught.value
        assert error.rank == comm.Get_rank()
        assert error.node is None or error.node == error.peer // settings["ranks_per_node"]
    comm.Barrier()
    gpu.destroy(in_touch=False)


def test_describe(comm, settings):
    with make(comm, hidden=512, **settings) as gpu:
        text = str(gpu.describe())
        assert settings["path"] in text
        assert gpu.config.transport == settings["network"].transport


def test_measured_path(comm, monkeypatch):
    """`path="auto"` measures the links. The rates are positive, and all ranks choose the same path."""
    if comm.Get_size() < 4:
        pytest.skip("nodes of two ranks need four ranks")
    monkeypatch.setenv("DEEPEP_RT_REMEASURE", "1")
    for transport in ("nvshmem", "mpi"):
        with make(comm, ranks_per_node=2, network=NetworkOptions(transport=transport)) as gpu:
            found = gpu.describe()
            assert min(vars(found.measured).values()) > 0
            assert len(set(comm.allgather(gpu.config.path))) == 1
            if comm.Get_rank() == 0:
                print(f"\n{transport}: {found}")
            assert gpu.copy_ceiling(num_rows=256, iterations=2) > 0
