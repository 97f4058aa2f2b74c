"""Shared by the GPU tests: Buffers, inputs, and comparisons bit for bit."""

from __future__ import annotations

import os

import numpy as np
import torch

from deepep_rt import Buffer
from deepep_rt.cuda import driver

TIMEOUT_S = 20.0
more = {}  # a test may add settings for all of its Buffers here
SHARED_GPUS = bool(os.environ.get("DEEPEP_RT_SHARE_GPUS"))
TAKE_TURNS = SHARED_GPUS and not os.environ.get(
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)  # under MPS with a share of the SMs for each rank, ranks run at the same time


def make(comm, backend="cuda", **sizes):
    defaults = dict(num_max_tokens_per_rank=512, hidden=7168, num_topk=8, num_experts=32 * comm.Get_size(), timeout_s=TIMEOUT_S)
    return Buffer(comm, backend=backend, **{**defaults, **more, **sizes})


def routing(comm, seed, num_tokens, num_topk, num_experts, *, dtype=torch.int64, skip=0.1, one_rank=False):
    rng = np.random.default_rng([seed, comm.Get_rank()])
    each = num_experts // comm.Get_size()
    pool = each if one_rank else num_experts
    idx = np.argsort(rng.random((num_tokens, pool)), axis=1)[:, :num_topk] if num_tokens else np.zeros((0, num_topk), np.int64)
    idx = np.where(rng.random(idx.shape) < skip, -1, idx)
    weights = rng.random(idx.shape, np.float32)
    return torch.from_numpy(np.ascontiguousarray(idx)).to("cuda", dtype), torch.from_numpy(weights).cuda()


def rows(comm, seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + comm.Get_rank())
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device="cuda", generator=generator)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def tokens(comm, buffer, seed, num_tokens, **how):
    """Make rows, expert numbers and weights for a Buffer."""
    config = buffer.config
    idx, weights = routing(comm, seed, num_tokens, config.num_topk, config.num_experts, **how)
    return rows(comm, seed, num_tokens, config.hidden), idx, weights


def some(comm, seed, most):
    """Draw the number of tokens of this rank."""
    return int(np.random.default_rng([seed, comm.Get_rank()]).integers(0, most + 1))


def rounds(comm, num_rounds, *, every=5, cycles=20e6):
    """Count rounds. In one of `every`, the GPU of one rank is late."""
    rng = np.random.default_rng(7)  # the same on all ranks
    for i in range(num_rounds):
        late = int(rng.integers(comm.Get_size()))
        if i % every == 0 and comm.Get_rank() == late:
            torch.cuda._sleep(int(cycles))
        yield i


def poison(buffer):
    """Fill all memory of results with bytes that no test expects."""
    backend = buffer._backend
    torch.cuda.synchronize()
    backend.comm.Barrier()
    for region in ("pool", "landing", "sums"):
        driver.fill(
            backend.runtime.memory.ptr + backend.runtime.regions.offsets[region], 0xA5, backend.runtime.regions.sizes[region]
        )
    torch.cuda.synchronize()
    backend.comm.Barrier()


def captured(comm, work, *, warm_up=False, **how):
    """Capture work in a CUDA graph, once the GPUs of all ranks are idle. Return the graph and the results.

    `warm_up`: do the work once before, so that there is memory for results.
    """
    held = work() if warm_up else None
    torch.cuda.synchronize()
    comm.Barrier()
    del held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        results = work()
    return graph, results


def replays(comm, gpu, host, seeds, num_tokens, step, before=lambda: None):
    """Capture `step(buffer, x, idx, weights)` once, and replay it with the tokens of each seed.

    Yield the seed, the results of the replay, and what the host backend returns. `before`: a call between the new tokens and a replay.
    """
    given = tokens(comm, gpu, seeds[0] - 1, num_tokens)
    graph, results = captured(comm, lambda: step(gpu, *given), warm_up=True)
    for seed in seeds:
        for mine, new in zip(given, tokens(comm, gpu, seed, num_tokens), strict=True):
            mine.copy_(new)
        before()
        graph.replay()
        yield seed, results, step(host, *cpu(*given))


def replay_often(graph, sums, num_replays, every, write, negate):
    """Replay a graph without a wait. `negate` changes the sign of its sums; in each of `every` replays, `write(number)` changes its inputs.

    Yield the number of a replay before each such change. All signs before it were right.
    """
    before, num_wrong = torch.zeros_like(sums), torch.zeros(1, dtype=torch.int64, device="cuda")
    for i in range(num_replays):
        if i % every:
            negate()
        else:
            write(i)
        graph.replay()
        if i % every:
            num_wrong += (sums != -before).sum()
        before.copy_(sums)
        if (i + 1) % every == 0:
            assert num_wrong.item() == 0
            yield i


def same(a, b):
    if a is None or b is None:
        assert a is b
        return
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def cpu(*tensors):
    return [None if t is None else t.cpu() for t in tensors]


def write(ptr, array):
    """Copy a NumPy array to device memory."""
    driver.copy_async(ptr, array.ctypes.data, array.nbytes, 0)
    driver.synchronize(0)


def read(ptr, array):
    """Copy device memory to a NumPy array."""
    driver.copy_async(array.ctypes.data, ptr, array.nbytes, 0)
    driver.synchronize(0)
