"""Test deepep_rt.torch on GPUs: the checks of the host backend, and streams, graphs and a host that does not wait."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import captured, make, routing  # noqa: E402
from paths import ROOT  # noqa: E402

from deepep_rt.torch import combine, dispatch  # noqa: E402


def _checks(name):
    try:
        module = __import__(name)
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    checks = [f for found, f in inspect.getmembers(module, inspect.isfunction) if found.startswith("check_")]
    return [pytest.param(f, id=f"{name}.{f.__name__}") for f in sorted(checks, key=lambda f: f.__code__.co_firstlineno)]


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    """Make the checks of the host backend use GPUs."""
    monkeypatch.setattr("spmd.backend", "cuda")


@pytest.mark.parametrize(
    "check", [check for name in ("torch_autograd", "torch_ties", "torch_compiled", "torch_grouped") for check in _checks(name)]
)
def test_check(check, comm):
    """Gradients, backward passes of all ranks, and compiled functions."""
    import spmd

    assert spmd.run_check(check, comm)


def test_reduce_overhead(comm):
    """A decoding step replays as a CUDA graph with new inputs. Its bits are those of the plain step."""
    from torch_compiled import _decode

    each = sizes(comm, num_max_tokens_per_rank=16, dtype="bfloat16", low_latency=True)
    torch._dynamo.reset()
    run = torch.compile(_decode, mode="reduce-overhead", fullgraph=True)
    with make(comm, **each) as buffer:
        generator = torch.Generator("cuda").manual_seed(comm.Get_rank())
        for seed in range(8):
            x = torch.randn(12, each["hidden"], device="cuda", generator=generator).bfloat16()
            idx, weights = routing(comm, seed, 12, each["num_topk"], each["num_experts"])
            (plain, counts), (graph, graph_counts) = (f(buffer, x, idx, weights, True, True, None) for f in (_decode, run))
            assert torch.equal(plain, graph)
            assert torch.equal(counts, graph_counts)
        buffer.check()
    counters = torch._dynamo.utils.counters["inductor"]
    assert not counters["cudagraph_skips"], counters
    torch._dynamo.reset()


def test_reduce_overhead_in_training(comm):
    """CUDA graphs leave the throughput calls out, and the results stay right."""
    import torch_compiled
    import torch_layers as t

    torch._dynamo.reset()
    run = torch.compile(torch_compiled.layer_by_expert, mode="reduce-overhead", fullgraph=True)
    with make(comm, **sizes(comm)) as buffer:
        for seed in range(4):
            tokens, mats = t.tokens_of_all(comm, seed, lambda rank: 24 + rank), t.matrices(comm, 1)
            mine, weights_of = tokens[comm.Get_rank()], t.local(comm, mats)
            x, idx, weights = mine.leaves()
            torch.compiler.cudagraph_mark_step_begin()
            out = run(buffer, x, idx, weights, weights_of, num_worst_tokens=256 * comm.Get_size()).clone()
            t.backward(out, mine)
            t.compare(comm, tokens, mats, (out, x, weights, weights_of), 2 * t.BOUND)
    torch._dynamo.reset()


@pytest.mark.parametrize("check", _checks("torch_groups"))
def test_communicator(check, comm, monkeypatch):
    import spmd
    import torch_groups

    own_gpu = torch.cuda.device_count() >= comm.Get_size()
    monkeypatch.setattr(torch_groups, "backend", "nccl" if own_gpu else "gloo")  # NCCL needs a GPU for each rank
    assert spmd.run_check(check, comm)


class Step:
    """A layer with inputs at fixed addresses. The host does not wait for the number of rows."""

    def __init__(self, comm, seed, buffer, **how):
        import torch_layers as t

        self.t, self.comm, self.buffer, self.how = t, comm, buffer, how
        self.set(seed)
        self.x, self.idx, self.weights = self.mine.leaves()
        self.mats = t.local(comm, self.all_mats)
        self.seed_grad = self.mine.seed_grad.cuda()

    def set(self, seed):
        self.tokens = self.t.tokens_of_all(self.comm, seed, lambda rank: 24 + rank)
        self.all_mats = self.t.matrices(self.comm, 1)
        self.mine = self.tokens[self.comm.Get_rank()]

    def fill(self, seed):
        """Write other numbers to the same memory."""
        self.set(seed)
        with torch.no_grad():
            for ours, new in zip(
                (self.x, self.idx, self.weights, self.seed_grad),
                (self.mine.x, self.mine.idx, self.mine.weights, self.mine.seed_grad),
                strict=True,
            ):
                ours.copy_(new)

    def forward(self, x=None):
        x = self.x if x is None else x
        worst = 64 * self.comm.Get_size()
        return self.t.layer(self.buffer, x, self.idx, self.weights, self.mats, num_worst_tokens=worst, **self.how)

    def gradients(self, out):
        return torch.autograd.grad(out, (self.x, self.weights, self.mats), self.seed_grad)

    def check(self, out, gradients):
        for tensor, gradient in zip((self.x, self.weights, self.mats), gradients, strict=True):
            tensor.grad = gradient.clone()
        self.t.compare(self.comm, self.tokens, self.all_mats, (out, self.x, self.weights, self.mats), 2 * self.t.BOUND)


def sizes(comm, **more):
    import torch_layers as t

    each = dict(
        hidden=t.HIDDEN, num_topk=t.TOPK, num_experts=t.EACH * comm.Get_size(), num_max_tokens_per_rank=64, dtype="float32"
    )
    return {**each, **more}


def test_real_size(comm):
    """Use hidden 7168 and whole numbers in bfloat16, so every sum is exact. The experts double the rows and ignore the weights."""
    with make(comm, num_max_tokens_per_rank=512) as buffer:
        generator = torch.Generator("cuda").manual_seed(comm.Get_rank())
        for seed, worst in enumerate((None, 512 * comm.Get_size(), None)):
            idx, weights = routing(comm, seed, 300 + 20 * comm.Get_rank(), 8, buffer.config.num_experts)
            weights.requires_grad_()
            x, grad = (torch.randint(-3, 4, (len(idx), 7168), device="cuda", generator=generator).bfloat16() for _ in range(2))
            x.requires_grad_()
            sent = dispatch(buffer, x, idx, weights, num_worst_tokens=worst)
            out = combine(buffer, sent.recv_x * 2, sent.handle)
            each = buffer.config.num_experts // comm.Get_size()
            copies = sum(((idx >= each * r) & (idx < each * (r + 1))).any(1) for r in range(comm.Get_size()))[:, None]
            assert torch.equal(out, (2 * x * copies).detach())
            torch.autograd.backward([out, sent.recv_topk_weights], [grad, torch.full_like(sent.recv_topk_weights, 3)])
            assert torch.equal(x.grad, 2 * grad * copies)
            assert torch.equal(weights.grad, 3.0 * (idx >= 0))


@pytest.mark.parametrize("fp8", [False, True])
def test_fp8_real_size(comm, fp8):
    """The error of a number is at most 1/16 of it, forward and backward. The error of a sum is at most that part of all summands."""
    with make(comm, num_max_tokens_per_rank=512) as buffer:
        idx, _ = routing(comm, 3, 400, 8, buffer.config.num_experts, skip=0)
        generator = torch.Generator("cuda").manual_seed(comm.Get_rank())
        x, grad = (torch.randn(400, 7168, device="cuda", generator=generator).bfloat16() for _ in range(2))
        x.requires_grad_()
        sent = dispatch(buffer, x, idx, fp8=fp8)
        out = combine(buffer, sent.recv_x, sent.handle, fp8_grad=fp8)
        out.backward(grad)
        each = buffer.config.num_experts // comm.Get_size()
        copies = sum(((idx >= each * r) & (idx < each * (r + 1))).any(1) for r in range(comm.Get_size()))[:, None]
        relative = 1 / 16 + 2**-7 if fp8 else 2**-8
        for name, got, expected in (("forward", out, x.detach()), ("backward", x.grad, grad)):
            allowed = copies * (relative * expected.float().abs() + (1e-4 if fp8 else 0))
            error = (got.float() - copies * expected.float()).abs()
            assert (error <= allowed).all(), f"{name}: {(error - allowed).max().item()} above the bound"


def test_side_streams(comm):
    """Run dispatch and combine on one stream and experts on another, forward and backward. Each stream waits for late work."""
    import torch_layers as t

    with make(comm, **sizes(comm)) as buffer:
        ran_on = []
        for name in ("dispatch", "combine"):
            plain = getattr(buffer, name)

            def spy(*args, _plain=plain, **options):
                ran_on.append(torch.cuda.current_stream().cuda_stream)
                return _plain(*args, **options)

            setattr(buffer, name, spy)
        calls, compute = torch.cuda.Stream(), torch.cuda.Stream()

        def on_compute_stream(x, idx, weights, mats):
            compute.wait_stream(calls)
            with torch.cuda.stream(compute):
                torch.cuda._sleep(int(5e6))
                y = t.experts(x, idx, weights, mats)
            calls.wait_stream(compute)
            return y

        def late(grad):
            torch.cuda._sleep(int(5e6))
            return grad * 1

        step = Step(comm, 1, buffer, run=on_compute_stream)
        for seed in range(2, 8):
            torch.cuda._sleep(int(5e6))
            step.fill(seed)
            calls.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(calls):
                torch.cuda._sleep(int(5e6))
                out = step.forward(step.x * 1)
            out.register_hook(late)
            torch.cuda.current_stream().wait_stream(calls)
            gradients = step.gradients(out)
            calls.wait_stream(torch.cuda.current_stream())
            step.check(out, gradients)
        assert len(ran_on) == 6 * 4
        assert set(ran_on) == {calls.cuda_stream}, "autograd did not use the stream of the forward pass"


def make_busy():
    """Give the GPU about 0.2 s of work, and return an event after it."""
    torch.cuda._sleep(int(4e8))
    busy = torch.cuda.Event()
    busy.record()
    return busy


def test_the_host_does_not_wait_for_the_gpu(comm, monkeypatch):
    """The GPU is busy before a step, and still busy with earlier work when forward and backward have returned."""
    from cuda.bindings import driver as cuda

    waits = []
    for name in ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH", "cuMemAlloc", "cuMemFree"):
        plain = getattr(cuda, name)
        monkeypatch.setattr(cuda, name, lambda *args, _name=name, _plain=plain: (waits.append(_name), _plain(*args))[1])
    with make(comm, **sizes(comm)) as buffer:
        step = Step(comm, 1, buffer, fp8=True, fp8_grad=True)
        plain = Step(comm, 1, buffer)
        known = dispatch(buffer, plain.x, plain.idx, plain.weights).handle

        def cached():
            sent = dispatch(buffer, plain.x, handle=known)
            combine(buffer, sent.recv_x, sent.handle, bias=plain.x).backward(plain.seed_grad)

        runs = {
            "num_worst_tokens": lambda: plain.gradients(plain.forward()),
            "num_worst_tokens, FP8": lambda: step.gradients(step.forward()),
            "a known routing": cached,
        }
        for name, run in runs.items():
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            comm.Barrier()
            waits.clear()
            torch.cuda.set_sync_debug_mode("error")  # PyTorch's own operators raise instead of waiting
            try:
                busy = make_busy()
                run()
                assert not busy.query(), f"{name}: the host waited for the GPU, or took longer than 0.2 s"
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not waits, f"{name}: {waits}"
            torch.cuda.synchronize()
            comm.Barrier()
        # A counterexample: a dispatch without num_worst_tokens waits for its counts.
        busy = make_busy()
        dispatch(buffer, plain.x, plain.idx)
        assert busy.query()
        buffer.synchronize()
        assert waits


def test_profile_shows_no_synchronisation(comm):
    """A trace of PyTorch's profiler has no synchronisation in a step. It does record a deliberate one."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with make(comm, **sizes(comm)) as buffer:
        step = Step(comm, 1, buffer)
        for _ in range(3):
            step.gradients(step.forward())
        torch.cuda.synchronize()
        comm.Barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            with record_function("a step"):
                step.gradients(step.forward())
            with record_function("deliberate"):
                torch.cuda.current_stream().synchronize()
        comm.Barrier()
    events = trace.events()

    def waits(name):
        span = next(e.time_range for e in events if e.name == name and "CPU" in str(e.device_type))
        return [e.name for e in events if "Synchronize" in e.name and span.start <= e.time_range.start <= span.end]

    assert waits("deliberate"), "the profiler does not record calls of the CUDA runtime, so this test proves nothing"
    assert not waits("a step")


def capture(comm, work):
    """Return a CUDA graph of `work`, and its results. PyTorch requires warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    return captured(comm, work)


def test_graph_of_the_forward_pass(comm):
    with make(comm, **sizes(comm)) as buffer:
        step = Step(comm, 1, buffer)
        graph, out = capture(comm, lambda: step.forward().detach())
        for seed in range(2, 7):
            step.fill(seed)
            graph.replay()
            expected, _ = step.t.dense(step.tokens, step.all_mats)
            step.t.close(out, expected[comm.Get_rank()][0], step.t.BOUND, "the output of a replay")
        comm.Barrier()


def test_graph_of_a_step(comm):
    """Capture forward and backward in one graph."""
    with make(comm, **sizes(comm, num_slots=4)) as buffer:  # all results of a step fit at once, because a capture cannot allocate
        step = Step(comm, 1, buffer)

        def work():
            out = step.forward()
            return out.detach(), step.gradients(out)

        graph, (out, gradients) = capture(comm, work)
        for seed in range(2, 7):
            step.fill(seed)
            graph.replay()
            step.check(out, gradients)
        comm.Barrier()


def test_memory_is_not_reused_too_early(comm):
    """Run many steps of several layers with late ranks. Autograd keeps more results than fit the Buffer."""
    import torch_layers as t

    rng = np.random.default_rng(5)  # the same on all ranks
    with make(comm, **sizes(comm, num_slots=2)) as buffer:
        for seed in range(30):
            tokens = t.tokens_of_all(comm, seed, lambda rank: int(np.random.default_rng([seed, rank]).integers(0, 65)))  # noqa: B023
            mats = t.matrices(comm, seed)
            mine, weights_of = tokens[comm.Get_rank()], t.local(comm, mats)
            late, layers = int(rng.integers(comm.Get_size())), int(rng.integers(1, 4))
            x, idx, weights = mine.leaves()
            out = x
            for _ in range(layers):
                out = t.layer(buffer, out, idx, weights, weights_of)
                if comm.Get_rank() == late:
                    torch.cuda._sleep(int(1e7))
            t.backward(out, mine)
            t.compare(comm, tokens, mats, (out, x, weights, weights_of), layers * t.BOUND, layers)


@pytest.mark.parametrize("options", [[], ["--distributed", "gloo"], ["--distributed", "nccl"]], ids=["mpi", "gloo", "nccl"])
def test_example(comm, options, monkeypatch, capsys):
    """Run the example in this process, which mpirun has started."""
    import runpy
    import socket

    if "nccl" in options and torch.cuda.device_count() < comm.Get_size():
        return  # NCCL needs a GPU for each rank
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["moe_torch.py", *options])
    runpy.run_path(str(ROOT / "examples" / "moe_torch.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    if comm.Get_rank() == 0:
        assert lines[0].startswith("cuda: ")
        assert lines[-1] == "OK"
