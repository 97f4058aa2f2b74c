"""Test deepep_rt.jax on GPUs: the checks of the host backend, training, command buffers, and a Buffer that PyTorch uses too."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from deepep_rt import EPInputError

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import make, routing, rows, same  # noqa: E402
from paths import ROOT  # noqa: E402

sys.path.insert(0, str(ROOT / "examples"))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX reads it at its first use
TIMEOUT_S = 60.0  # ranks compile for different times

HOST_ONLY = {
    "check_errors_of_a_call",  # GPUs report a bad expert later: test_bad_expert
    "check_gradients_of_all_ranks",  # XLA for GPUs leaves out gradient calls whose results nothing reads (docs/jax.md)
}


def _checks():
    if importlib.util.find_spec("jax") is None:
        return []
    try:
        import decode_in_jit
        import in_jit
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    members = [member for module in (in_jit, decode_in_jit) for member in inspect.getmembers(module, inspect.isfunction)]
    found = [check for name, check in members if name.startswith("check_") and name not in HOST_ONLY]
    found.sort(key=lambda check: (check.__module__, check.__code__.co_firstlineno))
    return [pytest.param(check, id=f"{check.__module__}.{check.__name__}") for check in found]


@pytest.mark.parametrize("check", _checks())
def test_check(check, jax, comm, monkeypatch):
    import spmd

    monkeypatch.setattr(spmd, "backend", "cuda")
    monkeypatch.setattr(spmd, "more_settings", {"timeout_s": TIMEOUT_S})
    monkeypatch.setattr(spmd, "ABORT_AFTER_S", TIMEOUT_S + 20)
    assert spmd.run_check(check, comm)


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["default", "small_command_buffers"])
def test_hundred_steps(jax, comm, options):
    """Train inside of one compiled function. XLA captures the steps between calls in CUDA graphs, but no call."""
    import in_jit
    import jax.numpy as jnp

    from deepep_rt import jax as ep

    ranks, rank, steps, tokens, hidden, topk, local = comm.Get_size(), comm.Get_rank(), 100, 256, 512, 4, 4
    experts = local * ranks
    rng = np.random.default_rng(0)
    x, target = (jnp.asarray(rng.standard_normal((ranks, tokens, hidden), np.float32)) for _ in range(2))
    idx = jnp.asarray(np.argsort(rng.random((ranks, tokens, experts)), axis=2)[..., :topk].astype(np.int32))
    weights = jnp.asarray(rng.random((ranks, tokens, topk), np.float32))
    matrices = jnp.asarray(rng.standard_normal((experts, hidden, hidden), np.float32) / hidden**0.5)

    def step(layer, trained, x, idx, target):
        def loss_of(trained):
            matrices, weights = trained
            return jnp.square(layer(x, idx, weights, matrices) - target).sum() / (ranks * tokens * hidden)

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        return loss, jax.tree.map(lambda p, g: p - 100 * g, trained, gradients)

    mine = slice(rank * local, (rank + 1) * local)
    with make(comm, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, num_experts=experts, dtype="float32") as buffer:

        def layer(x, idx, weights, matrices):
            sent = ep.dispatch(buffer, x, idx, weights)
            y = in_jit._apply(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, matrices)
            return ep.combine(buffer, y, sent.handle).x

        trained, given = (matrices[mine], weights[rank]), (x[rank], idx[rank], target[rank])
        compiled = jax.jit(lambda *a: step(layer, *a)).lower(trained, *given).compile(compiler_options=options)
        comm.Barrier()
        losses = []
        with in_jit._calls(buffer) as calls:
            start = time.perf_counter()
            for _ in range(steps):
                loss, trained = compiled(trained, *given)
                losses.append(loss)
            jax.block_until_ready(trained)
            seconds = time.perf_counter() - start
            assert "".join(calls) == "dckc" * steps, "calls were captured, or made out of order"
        buffer.synchronize()
    graphs = compiled.as_text().count("command_buffer")
    if rank == 0:
        print(f"{1e6 * seconds / steps:.0f} us a step of 4 calls; command buffers in the program: {graphs}")

    alone = jax.jit(lambda *a: step(in_jit._apply, *a))
    x, idx, weights, target = (a.reshape(ranks * tokens, -1) for a in (x, idx, weights, target))
    expected, expected_losses = (matrices, weights), []
    for _ in range(steps):
        loss, expected = alone(expected, x, idx, target)
        expected_losses.append(loss)
    total = np.zeros(steps, np.float32)
    comm.Allreduce(np.array(losses, np.float32), total)
    np.testing.assert_allclose(total, np.array(expected_losses), rtol=1e-4)
    assert total[-1] < 0.9 * total[0], "the loss did not fall"
    np.testing.assert_allclose(trained[0], expected[0][mine], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(trained[1], expected[1].reshape(ranks, tokens, -1)[rank], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("graphs", [True, False], ids=["command_buffers", "without"])
def test_decoding(jax, comm, graphs):
    """Run a step of several layers with many inputs. XLA replays it as a CUDA graph without Python, or calls back each time."""
    from deepep_rt import jax as ep

    layers, steps, tokens, hidden, experts = 8, 50, 16, 1024, 8 * comm.Get_size()
    options = {"xla_gpu_graph_min_graph_size": 1} if graphs else {"xla_gpu_enable_command_buffer": ""}
    settings = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=4, num_experts=experts, low_latency=True)
    with make(comm, **settings) as buffer:

        def layer(x, idx, weights):
            sent = ep.low_latency_dispatch(buffer, x, idx, weights, use_fp8=False)
            return x + ep.low_latency_combine(buffer, sent.recv_x, idx, weights, sent.handle).x

        def step(x, idx, weights):
            for i in range(layers):
                x = layer(x, idx[i], weights[i])
            return x

        x = rows(comm, 5, tokens, hidden).cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        routings = [routing(comm, seed, layers * tokens, 4, experts, dtype=torch.int32) for seed in range(3)]
        routings = [[jax.device_put(a.cpu().numpy().reshape(layers, tokens, 4)) for a in pair] for pair in routings]
        compiled = jax.jit(step).lower(x, *routings[0]).compile(compiler_options=options)
        eager = [_without_jit(buffer, x, *map(np.asarray, pair)) for pair in routings]
        given = jax.device_put(x)
        comm.Barrier()
        calls, combine = [], buffer.low_latency_combine
        buffer.low_latency_combine = lambda *args, **kw: calls.append(1) or combine(*args, **kw)
        for i in range(steps):
            out = compiled(given, *routings[i % 3])
            np.testing.assert_array_equal(np.asarray(out).view(np.uint16), eager[i % 3].view(np.uint16))
        jax.block_until_ready(out)
        comm.Barrier()
        num_calls, start = len(calls), time.perf_counter()
        for i in range(steps):
            out = compiled(given, *routings[i % 3])
        jax.block_until_ready(out)
        seconds = time.perf_counter() - start
        if comm.Get_rank() == 0:
            print(
                f"{1e6 * seconds / steps / layers:.0f} us a layer; {num_calls} combines called back for {steps} steps of {layers}"
            )
        assert num_calls < steps * layers / 2 if graphs else num_calls == steps * layers
        buffer.synchronize()


def _without_jit(buffer, x, idx, weights):
    for layer_idx, layer_weights in zip(idx, weights, strict=True):
        sent = buffer.low_latency_dispatch(x, layer_idx, topk_weights=layer_weights, use_fp8=False)
        back = buffer.low_latency_combine(sent.recv_x, layer_idx, layer_weights, sent.handle).x
        x = (x.astype(np.float32) + np.asarray(back).astype(np.float32)).astype(ml_dtypes.bfloat16)
    return x


@pytest.mark.parametrize("num_worst_tokens", [None, 200])
def test_same_bits_as_the_host_backend(jax, comm, num_worst_tokens):
    """Results for wide bfloat16 rows are equal bit for bit. Padding is zero, although the pool holds other values before."""
    from gpu_buffers import poison

    from deepep_rt import jax as ep

    with make(comm, num_max_tokens_per_rank=256) as buffer, make(comm, "host", num_max_tokens_per_rank=256) as host:
        worst = comm.Get_size() * 256 if num_worst_tokens is None else num_worst_tokens
        idx, weights = (a.cpu().numpy() for a in routing(comm, 1, 256, 8, buffer.config.num_experts, dtype=torch.int32))
        x = rows(comm, 2, 256, 7168).cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        sent = host.dispatch(x, idx, weights, num_worst_tokens=worst)
        back = host.combine(sent.recv_x, sent.handle).x
        poison(buffer)

        @jax.jit
        def both(x, idx, weights):
            got = ep.dispatch(buffer, x, idx, weights, num_worst_tokens=num_worst_tokens)
            return got, ep.combine(buffer, got.recv_x, got.handle).x

        for _ in range(3):
            got, out = both(x, idx, weights)
            np.testing.assert_array_equal(np.asarray(got.recv_topk_idx), sent.recv_topk_idx)
            np.testing.assert_array_equal(np.asarray(got.recv_topk_weights), sent.recv_topk_weights)
            np.testing.assert_array_equal(np.asarray(got.recv_x).view(np.uint16), sent.recv_x.view(np.uint16))
            np.testing.assert_array_equal(np.asarray(out).view(np.uint16), back.view(np.uint16))


def test_frameworks_share_a_buffer(jax, comm):
    """PyTorch on its stream, JAX outside of compiled functions, and compiled functions use one Buffer in turns."""
    from deepep_rt import jax as ep

    sizes = dict(hidden=512, dtype="float32", num_max_tokens_per_rank=128)
    with make(comm, **sizes) as buffer, make(comm, "host", **sizes) as host:
        idx, weights = routing(comm, 3, 100, 8, buffer.config.num_experts, dtype=torch.int32)
        x = rows(comm, 3, 100, 512, dtype=torch.float32)
        expected = host.dispatch(x.cpu(), idx.cpu(), weights.cpu())
        count = expected.recv_x.shape[0]
        compiled = jax.jit(lambda *arrays: ep.dispatch(buffer, *arrays))
        arrays = [a.cpu().numpy() for a in (x, idx, weights)]
        for _ in range(5):
            got = jax.block_until_ready(compiled(*arrays))
            with torch.cuda.stream(torch.cuda.Stream()):
                sent = buffer.dispatch(x, idx, weights)
                same(sent.recv_x, expected.recv_x)
            plain = buffer.dispatch(*map(jax.device_put, arrays))
            assert isinstance(plain.recv_x, jax.Array)
            np.testing.assert_array_equal(np.asarray(plain.recv_x), expected.recv_x.numpy())
            np.testing.assert_array_equal(np.asarray(got.recv_x)[:count], expected.recv_x.numpy())
            assert not np.asarray(got.recv_x)[count:].any()
            out = ep.combine(buffer, got.recv_x, got.handle).x
            np.testing.assert_array_equal(np.asarray(out), host.combine(expected.recv_x, expected.handle).x.numpy())


def test_the_buffer_keeps_results_until_xla_has_read_them(jax, comm):
    """The program drops a result at once. The Buffer reuses its memory only after XLA has read it."""
    import jax.numpy as jnp

    big = jnp.full((8192, 8192), 1 / 8192, jnp.float32)

    @jax.jit
    def late(x):
        a = big
        for _ in range(10):
            a = a @ big
        return 2 * x + 0 * a[0, 0].astype(x.dtype)

    with make(comm, hidden=512, num_max_tokens_per_rank=64, num_slots=1) as buffer:
        # Each rank gets rows, because XLA computes nothing without rows.
        idx = jnp.tile(jnp.arange(8, dtype=jnp.int32) * (buffer.config.num_experts // 8), (64, 1))
        inputs = [jax.block_until_ready(jnp.full((64, 512), i, jnp.bfloat16)) for i in range(6)]
        jax.block_until_ready(late(buffer.dispatch(inputs[0], idx).recv_x))
        results = [late(buffer.dispatch(x, idx).recv_x) for x in inputs for _ in range(3)]
        assert not results[-1].is_ready()  # XLA is still busy after the program dropped the results
        for i, found in enumerate(results):
            assert (np.asarray(found.astype(jnp.float32)) == 2 * (i // 3)).all()


def test_bad_expert(jax, comm):
    """The GPU reports the number after the call. `synchronize` or the next call raises the error."""
    from deepep_rt import jax as ep

    with make(comm, hidden=512, check_inputs=True) as buffer:
        idx, _ = (a.cpu().numpy() for a in routing(comm, 4, 40, 8, buffer.config.num_experts, dtype=torch.int32))
        idx[3, 2] = buffer.config.num_experts
        x = np.zeros((40, 512), ml_dtypes.bfloat16)

        def call():
            with ep.errors():
                jax.block_until_ready(jax.jit(lambda x, idx: ep.dispatch(buffer, x, idx).recv_x)(x, idx))
                buffer.synchronize()

        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {buffer.config.num_experts}"):
            call()
        idx[3, 2] = -1
        call()


def test_jax_on_the_cpu(jax, comm):
    from deepep_rt import jax as ep

    with make(comm, hidden=512) as buffer, jax.default_device(jax.local_devices(backend="cpu")[0]):

        def call():
            with ep.errors():
                jax.block_until_ready(ep.dispatch(buffer, np.zeros((4, 512), ml_dtypes.bfloat16), np.zeros((4, 8), np.int32)))

        with pytest.raises(EPInputError, match="JAX computes on the CPU"):
            call()


def test_example(jax, comm, monkeypatch):
    import moe_jax

    monkeypatch.setattr(sys, "argv", ["moe_jax.py", "--backend", "cuda"])
    moe_jax.main()
