"""The throughput calls on GPUs: sizes, graphs, pools, frameworks and the host's time, against the host backend, bit for bit."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of every GPU, in every rank
torch = pytest.importorskip("torch")

from gpu_buffers import SHARED_GPUS, cpu, make, poison, routing, rows, same, tokens  # noqa: E402
from gpu_throughput import check_graph, check_known_routing_and_fixed_size, check_rounds, round_trip, same_dispatch  # noqa: E402

from deepep_rt import EPOutOfMemoryError  # noqa: E402
from deepep_rt.arrays.view import View  # noqa: E402
from deepep_rt.jit import compiler  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402


# Rows of the first and the last size are no multiples of 128 bytes.
@pytest.mark.parametrize("hidden", [520, 2880, 4096, 5120, 7168, 7184])
@pytest.mark.parametrize(
    ("num_topk", "idx_dtype"), [(1, torch.int32), (4, torch.int64), (8, torch.int64), (9, torch.int32), (32, torch.int64)]
)
def test_sizes(comm, hidden, num_topk, idx_dtype):
    with make(comm, hidden=hidden, num_topk=num_topk) as gpu, make(comm, "host", hidden=hidden, num_topk=num_topk) as host:
        poison(gpu)
        round_trip(comm, gpu, host, 1, 37 + 11 * comm.Get_rank(), num_topk, idx_dtype=idx_dtype)
        poison(gpu)
        round_trip(comm, gpu, host, 2, 0 if comm.Get_rank() % 2 else 200, num_topk, idx_dtype=idx_dtype)
        poison(gpu)
        round_trip(comm, gpu, host, 3, 64, num_topk, idx_dtype=idx_dtype, one_rank=num_topk <= 32)


@pytest.mark.parametrize("hidden", [7168, 7184])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_payloads(comm, dtype, hidden):
    with make(comm, hidden=hidden) as gpu, make(comm, "host", hidden=hidden) as host:
        poison(gpu)
        got, _ = round_trip(comm, gpu, host, 5, 130, 8, dtype=dtype, scales=True)
        assert got.recv_x.dtype == dtype


def test_200_rounds(comm):
    """With a delay on one rank in every fifth round. They show early reuse of memory."""
    sizes = dict(hidden=1024, num_max_tokens_per_rank=256)
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        check_rounds(comm, gpu, host, 200, (24, 3, 64))


def test_known_routing_and_fixed_size(comm):
    with make(comm) as gpu, make(comm, "host") as host:
        check_known_routing_and_fixed_size(comm, gpu, host)


def test_counts_belong_to_the_caller(comm):
    """A write to them does not change the handle."""
    with make(comm) as gpu, make(comm, "host") as host:
        first, want = round_trip(comm, gpu, host, 15, 100, 8)
        for counts in (first.num_recv_tokens, first.num_recv_tokens_per_expert):
            counts.fill_(77)
        x = rows(comm, 16, 100, 7168)
        again, theirs = gpu.dispatch(x, handle=first.handle), host.dispatch(x.cpu(), handle=want.handle)
        same(again.num_recv_tokens, theirs.num_recv_tokens)
        same(again.num_recv_tokens_per_expert, theirs.num_recv_tokens_per_expert)


def test_graph(comm):
    with make(comm) as gpu, make(comm, "host") as host:
        check_graph(comm, gpu, host, 10, every=3)


def test_pool_is_full(comm):
    """The caller holds more results than the pool has room for. The Buffer copies them, or raises."""
    with make(comm, num_slots=1) as gpu, make(comm, "host") as host:
        held = [round_trip(comm, gpu, host, 60 + i, 400, 8) for i in range(6)]
        for got, want in held:
            same_dispatch(got, want)
    with make(comm, num_slots=1, on_exhausted="error") as gpu:
        idx, weights = routing(comm, 70, 400, 8, gpu.config.num_experts, skip=0)
        held = []

        def fill():
            for _ in range(9):
                held.append(gpu.dispatch(rows(comm, 70, 400, 7168), idx, weights, num_worst_tokens=400 * comm.Get_size()))

        with pytest.raises(EPOutOfMemoryError, match="num_slots"):
            fill()
        held.clear()
        assert gpu.dispatch(rows(comm, 70, 400, 7168), idx, weights).recv_x.shape[0] >= 0


def test_other_frameworks(comm):
    with make(comm, hidden=512, dtype="float32") as gpu, make(comm, "host", hidden=512, dtype="float32") as host:
        idx, weights = routing(comm, 80, 50, 8, gpu.config.num_experts, dtype=torch.int32)
        x = rows(comm, 80, 50, 512, dtype=torch.float32)
        want = host.dispatch(*cpu(x, idx, weights))
        reference = host.combine(want.recv_x, want.handle).x.numpy()
        cupy = pytest.importorskip("cupy")
        with cupy.cuda.Device(gpu._backend.info.device):
            sent = gpu.dispatch(*map(cupy.asarray, (x, idx, weights)))
            assert isinstance(sent.recv_x, cupy.ndarray)
            np.testing.assert_array_equal(cupy.asnumpy(sent.recv_x), want.recv_x.numpy())
            np.testing.assert_array_equal(cupy.asnumpy(gpu.combine(sent.recv_x, sent.handle).x), reference)
        jax = pytest.importorskip("jax")
        device = next(d for d in jax.local_devices() if d.local_hardware_id == gpu._backend.info.device)
        arrays = [jax.device_put(t.cpu().numpy(), device) for t in (x, idx, weights)]
        with torch.cuda.stream(torch.cuda.ExternalStream(gpu._backend.runtime.order.own_stream)):
            torch.cuda._sleep(int(50e6))  # so JAX's stream has to wait for the rows
        sent = gpu.dispatch(*arrays, num_worst_tokens=50 * comm.Get_size())
        np.testing.assert_array_equal(np.asarray(sent.recv_x)[: len(want.recv_x)], want.recv_x.numpy())
        sent = gpu.dispatch(*arrays)
        assert isinstance(sent.recv_x, jax.Array)
        np.testing.assert_array_equal(np.asarray(sent.recv_x), want.recv_x.numpy())
        back = gpu.combine(sent.recv_x + 0, sent.handle).x
        assert isinstance(back, jax.Array)
        np.testing.assert_array_equal(np.asarray(back), reference)


def test_host_time(comm):
    """The host's time of a call that does not wait for counts: at most 60 us, or 25 us for low latency.

    The times of one machine's CPUs differ by a factor of up to 1.8, so the test takes the best ten calls of the best rank. Machines differ
    by more than 2, in Python or in the driver. The test measures PyTorch's smallest operation and the construction of twenty Views. If
    one takes longer than usual, the limits grow by the same factor.
    """
    if SHARED_GPUS:
        return  # times of ranks that share a GPU mean nothing

    def host_us(call):
        """Time of one call in ten successive calls, as in decoding."""
        times = []
        for _ in range(100):
            start = time.perf_counter()
            for _ in range(10):
                call()
            times.append((time.perf_counter() - start) / 10)
            torch.cuda.synchronize()
        return 1e6 * min(comm.allgather(min(times)))

    with make(comm, low_latency=True, num_max_tokens_per_rank=128) as gpu:
        x, idx, weights = tokens(comm, gpu, 97, 64)
        fp8 = has_fp8(compiler.target_arch())
        known, quick = gpu.dispatch(x, idx, weights).handle, gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=fp8)
        y = rows(comm, 98, *quick.recv_x.shape)
        spent = {
            "dispatch": (60, host_us(lambda: gpu.dispatch(x, handle=known))),
            "dispatch, num_worst_tokens": (60, host_us(lambda: gpu.dispatch(x, idx, weights, num_worst_tokens=128))),
            "low_latency_dispatch": (25, host_us(lambda: gpu.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=fp8))),
            "low_latency_combine": (25, host_us(lambda: gpu.low_latency_combine(y, idx, weights, quick.handle))),
        }
        one = torch.zeros(1, device="cuda")
        yardsticks = {
            "add_": (8, host_us(lambda: one.add_(1))),
            "Views": (5, host_us(lambda: [View(0, (1, 2), "int32", 0, None, one) for _ in range(20)])),
        }
        print({name: f"{us:.1f} us" for name, (_, us) in {**spent, **yardsticks}.items()})
        slowness = max(1.0, *(us / usual for usual, us in yardsticks.values()))
        assert not [name for name, (limit, us) in spent.items() if us > limit * slowness], (spent, yardsticks)
