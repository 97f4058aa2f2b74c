"""Test deepep_rt.compat on GPUs: the programs for DeepEP V1 and V2, and streams, events and graphs."""

from __future__ import annotations

import functools

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import captured  # noqa: E402

from deepep_rt import EPInputError, EPUnavailableError  # noqa: E402
from deepep_rt.jit import compiler  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402

PROGRAMS = [
    "run_normal",
    "run_growth",
    "run_ranks_only",
    "run_low_latency",
    "run_smaller_maxima",
    "run_quantised_rows",
    "run_two_in_flight",
    "run_handles_taken_apart",
    "run_copied_results",
    "run_gradients",
    "run_errors",
]


def _checks_of_v2():
    try:
        import deepep_v2
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    return [check for name, check in vars(deepep_v2).items() if name.startswith("check_")]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("check", _checks_of_v2())
def test_program_for_v2(check, nodes, comm, monkeypatch):
    import deepep_v2

    if nodes == 2:
        if comm.Get_size() % 2:
            pytest.skip("two nodes of as many ranks need an even number of ranks")
        monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", str(comm.Get_size() // 2))
    monkeypatch.setattr(deepep_v2, "device", "cuda")
    check(comm)


def test_elastic_buffer_in_a_graph(comm):
    """Without CPU sync, a graph captures a dispatch, the fields of its handle, and a combine. Each replay computes them anew."""
    from deepep_rt import compat

    size, tokens = comm.Get_size(), 24
    buffer = compat.ElasticBuffer(None, num_max_tokens_per_rank=tokens, hidden=512, num_topk=4, comm=comm)
    x = torch.zeros(tokens, 512, dtype=torch.bfloat16, device="cuda")
    idx = torch.zeros(tokens, 4, dtype=torch.int64, device="cuda")

    def step():
        received, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4 * size, do_cpu_sync=False)
        return received, handle.psum_num_recv_tokens_per_scaleup_rank, buffer.combine(received, handle)[0]

    graph, (_, psum, out) = captured(comm, step, warm_up=True)
    generator = torch.Generator("cuda").manual_seed(comm.Get_rank())
    for _ in range(5):
        x.copy_(torch.randint(1, 9, x.shape, device="cuda", generator=generator))
        idx.copy_(torch.rand(tokens, 4 * size, device="cuda", generator=generator).argsort(1)[:, :4])
        graph.replay()
        torch.cuda.synchronize()
        ranks = torch.zeros(tokens, size, device="cuda").scatter_(1, idx // 4, 1.0)
        assert torch.equal(out.float(), x.float() * ranks.sum(1, keepdim=True))
        sent = comm.alltoall(ranks.sum(0).int().tolist())
        assert psum.tolist() == torch.tensor(sent).cumsum(0).tolist()
    buffer.destroy()


@pytest.fixture
def program():
    if not has_fp8(compiler.target_arch()):
        pytest.skip("the program needs GPUs that convert to FP8; other tests make the same calls without FP8")
    import deepep_v1

    return deepep_v1


def test_gpus_without_fp8_raise_an_error(comm):
    """Callers that ask for FP8 unpack a pair, so bfloat16 rows without scales would break them."""
    if has_fp8(compiler.target_arch()):
        return
    import deepep_v1

    world = deepep_v1.World(comm, "cuda")
    num_experts = 2 * world.num_ranks
    x = torch.randn((4, deepep_v1.HIDDEN), device="cuda").bfloat16()
    topk_idx = deepep_v1.routing(world, 1, 4, 2, num_experts)
    with world.buffer(low_latency_mode=True) as buffer:
        with pytest.raises(EPUnavailableError, match="use_fp8=False"):
            buffer.low_latency_dispatch(x, topk_idx, 4, num_experts)
        assert buffer.low_latency_dispatch(x, topk_idx, 4, num_experts, use_fp8=False)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, program, comm):
    getattr(program, name)(program.World(comm, "cuda"))
    torch.cuda.synchronize()


def test_program_between_nodes(program, comm, monkeypatch):
    """Declare two nodes on one host."""
    if comm.Get_size() % 2:
        pytest.skip("two nodes of as many ranks need an even number of ranks")
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", str(comm.Get_size() // 2))
    world = program.World(comm, "cuda")
    program.run_internode(world, comm.Get_size() // 2)
    program.run_internode_growth(world)
    program.run_handles_taken_apart(world)


@pytest.mark.parametrize("name", ["run_normal", "run_low_latency"])
def test_program_with_a_group_and_deepeps_settings(name, program, comm):
    """Use gloo, because ranks may share a GPU. DeepEP's tests make the GPU and bfloat16 the default of new tensors."""
    with program.settings_of_deepep_tests("cuda"), program.world_of_a_group(comm, "cuda") as world:
        getattr(program, name)(world)


def test_program_on_a_side_stream(program, comm):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        program.run_normal(program.World(comm, "cuda"))
        program.run_low_latency(program.World(comm, "cuda"))
    torch.cuda.current_stream().wait_stream(side)


def _normal(program, world, buffer, seed=1, tokens=64):
    """Return the arguments of a dispatch with top-k."""
    topk_idx = program.routing(world, seed, tokens, 4, 4 * world.num_ranks)
    layout = program.layout_of(buffer, topk_idx, 4 * world.num_ranks)
    return world.random_rows(tokens, seed), dict(layout, topk_idx=topk_idx, topk_weights=world.random_weights(tokens, 4, seed))


def test_the_host_waits_for_counts_only(program, comm):
    """PyTorch raises an error if one of its operations synchronises. The wait for counts is no operation of PyTorch."""
    world = program.World(comm, "cuda")
    with world.buffer(int(1e8), low_latency_mode=True) as buffer:
        x, given = _normal(program, world, buffer)
        num_experts, topk_idx, weights = 4 * world.num_ranks, given["topk_idx"], given["topk_weights"]

        def step():
            recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, **given)
            again, *_ = buffer.dispatch(x, handle=handle)
            buffer.combine(recv_x, handle, topk_weights=recv_weights)
            worst, _, _, _, worst_handle, _ = buffer.dispatch(x, **given, num_worst_tokens=64 * world.num_ranks)
            buffer.combine(worst, worst_handle)
            tables = [handle[0], handle[3], worst_handle[0]]
            for hooked in (False, True):
                packed, _, handle, event, hook = buffer.low_latency_dispatch(
                    x, topk_idx, 64, num_experts, async_finish=not hooked, return_recv_hook=hooked
                )
                hook() if hooked else event.current_stream_wait()
                y = program.from_fp8(packed)
                _, event, hook = buffer.low_latency_combine(
                    y, topk_idx, weights, handle, async_finish=not hooked, return_recv_hook=hooked
                )
                hook() if hooked else event.current_stream_wait()
                tables += [handle[0], handle[1]]
            buffer.get_dispatch_layout(topk_idx, num_experts)
            return again, tables

        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_async_calls_do_not_wait_for_the_current_stream(program, comm):
    """With a previous event, a call waits for that event only. Its counts arrive while the current stream is busy."""
    if torch.cuda.device_count() < comm.Get_size():
        return  # ranks that share a GPU run one after another, so a busy rank stops the others
    world = program.World(comm, "cuda")
    with world.buffer(int(1e8)) as buffer:
        x, given = _normal(program, world, buffer)
        for _ in range(2):  # these calls allocate all memory
            event = buffer.dispatch(x, **given, previous_event=buffer.capture(), async_finish=True)[-1]
            event.current_stream_wait()
        del event
        torch.cuda.synchronize()
        comm.Barrier()
        ready = buffer.capture()
        torch.cuda._sleep(6_000_000_000)  # about three seconds
        busy_until = torch.cuda.Event()
        busy_until.record()
        recv_x, _, _, counts, handle, event = buffer.dispatch(x, **given, previous_event=ready, async_finish=True)
        assert not busy_until.query(), "dispatch waited for the current stream"
        assert len(counts) == 4
        combined, _, event = buffer.combine(recv_x, handle, previous_event=event, async_finish=True)
        event.event.event.synchronize()
        assert not busy_until.query(), "combine waited for the current stream"
        event.current_stream_wait()
        assert program.difference(combined, x.float() * given["is_token_in_rank"].sum(1, keepdim=True)) < 1e-5


def test_a_program_may_drop_arguments_while_an_async_call_runs(program, comm):
    """PyTorch does not reuse the memory of arguments before the call has read it, even if the program drops the event too."""
    world = program.World(comm, "cuda")
    with world.buffer(int(1e8), low_latency_mode=True) as buffer:
        for seed in range(5):
            x, given = _normal(program, world, buffer, seed)
            known, *_ = buffer.dispatch(x, **given)
            known = known.clone()
            shape = x.shape
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # the call starts after this, when the host has made the calls below
            recv_x, _, _, _, handle, event = buffer.dispatch(x, **given, num_worst_tokens=64 * world.num_ranks, async_finish=True)
            done = event.event
            del x, given, event
            trash = [torch.full(shape, 7, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
            done.current_stream_wait()
            assert torch.equal(recv_x[: known.shape[0]], known)
            del trash, handle


@pytest.mark.parametrize("tokens", [64, 300], ids=["fits", "grows"])
def test_bad_expert(program, comm, monkeypatch, tokens):
    """The kernels find an expert number out of range on one rank. That rank raises an error, and all ranks can make further calls."""
    monkeypatch.setenv("DEEPEP_RT_DEBUG", "1")
    world = program.World(comm, "cuda")
    with world.buffer(int(1e6)) as buffer:
        x, given = _normal(program, world, buffer)
        expected, *_ = buffer.dispatch(x, **given)
        large, more = _normal(program, world, buffer, tokens=tokens)
        if comm.Get_rank() == 0:
            bad = more["topk_idx"].clone()
            bad[3, 1] = 4 * world.num_ranks
            with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {4 * world.num_ranks}"):
                buffer.dispatch(large, **{**more, "topk_idx": bad})
        else:
            buffer.dispatch(large, **more)
        for _ in range(3):
            got, *_ = buffer.dispatch(x, **given)
            assert torch.equal(got, expected)


def test_normal_calls_in_a_graph(program, comm):
    world = program.World(comm, "cuda")
    worst = 64 * world.num_ranks
    with world.buffer(int(1e8)) as buffer:
        x, given = _normal(program, world, buffer)

        def step():
            recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(x, **given, num_worst_tokens=worst)
            combined, _, _ = buffer.combine(recv_x, handle)
            return recv_x, recv_idx, handle[0], handle[3], combined

        graph, results = captured(comm, step, warm_up=True)
        for seed in (5, 6):
            fresh, other = _normal(program, world, buffer, seed)
            x.copy_(fresh)
            given["topk_idx"].copy_(other["topk_idx"])
            graph.replay()
            eager = step()
            num_recv = int(eager[2][-1, world.rank])
            for name, replayed, expected in zip(("rows", "experts", "matrix", "sources", "sums"), results, eager, strict=True):
                n = num_recv if name in ("rows", "experts", "sources") else None
                assert torch.equal(replayed[:n], expected[:n]), name
        torch.cuda.synchronize()
        comm.Barrier()
        del graph, results


def test_low_latency_calls_in_a_graph(program, comm):
    world = program.World(comm, "cuda")
    tokens, num_experts = 16, 2 * world.num_ranks
    x = torch.empty((tokens, program.HIDDEN), dtype=torch.bfloat16, device="cuda")
    topk_idx = torch.empty((tokens, 2), dtype=torch.int64, device="cuda")
    weights = torch.rand((tokens, 2), device="cuda", generator=world.generator(1))
    with world.buffer(low_latency_mode=True) as buffer:

        def fill(seed):
            x.copy_(torch.randn(x.shape, device="cuda", generator=world.generator(seed)))
            topk_idx.copy_(program.routing(world, seed, tokens, 2, num_experts))

        def step(hooked):
            packed, count, handle, _, hook = buffer.low_latency_dispatch(
                x, topk_idx, tokens, num_experts, round_scale=True, use_ue8m0=True, return_recv_hook=hooked
            )
            hook() if hooked else None
            combined, _, hook = buffer.low_latency_combine(
                program.from_fp8(packed), topk_idx, weights, handle, return_recv_hook=hooked
            )
            hook() if hooked else None
            return packed[1], count, handle[0], handle[1], combined

        for hooked in (False, True):
            fill(1)
            graph, results = captured(comm, functools.partial(step, hooked), warm_up=True)
            for seed in (2, 3):
                fill(seed)
                graph.replay()
                scales, count, info, ranges, combined = results
                eager = step(hooked)
                for name, replayed, expected in zip(("counts", "sources", "ranges", "sums"), results[1:], eager[1:], strict=True):
                    assert torch.equal(replayed, expected), name
                for e in range(2):
                    assert torch.equal(scales[e, : int(count[e])], eager[0][e, : int(count[e])])
            torch.cuda.synchronize()
            comm.Barrier()
            del graph, results, scales, count, info, ranges, combined, eager


def test_a_capture_does_not_make_memory(program, comm):
    world = program.World(comm, "cuda")
    with world.buffer(low_latency_mode=True) as buffer:
        x = torch.zeros((8, program.HIDDEN), dtype=torch.bfloat16, device="cuda")
        topk_idx = torch.zeros((8, 1), dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(EPInputError, match="before the capture"), torch.cuda.graph(graph):
            buffer.low_latency_dispatch(x, topk_idx, 8, world.num_ranks)


def test_masks(program, comm, monkeypatch):
    """Run last, because Buffers with masked ranks do not free their symmetric memory."""
    if comm.Get_size() == 1:
        return  # one rank has no other rank to mask
    monkeypatch.setenv("DEEPEP_RT_TIMEOUT_S", "10")
    program.run_masks(program.World(comm, "cuda"))
    program.run_lost_ranks(program.World(comm, "cuda"))
    torch.cuda.synchronize()
