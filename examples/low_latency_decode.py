"""Decodes a few tokens a step through one MoE layer with the low-latency calls, and checks and times it; on GPUs if there are any.

mpirun -n 4 python examples/low_latency_decode.py
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

from deepep_rt import Buffer

try:
    from ml_dtypes import bfloat16
except ImportError:
    sys.exit("NumPy and CuPy have bfloat16 and FP8 from ml_dtypes: pip install ml_dtypes")

comm = MPI.COMM_WORLD
TOKENS, HIDDEN, TOPK, EXPERTS, STEPS = 16, 2048, 8, 8 * comm.size, 10  # tokens of each rank in a batch; experts of all ranks
GAINS = 1 + np.arange(EXPERTS, dtype=np.float32) / EXPERTS  # expert e is a toy: it multiplies a row by GAINS[e]


def to_float32(array, xp):
    """Look bfloat16 or FP8 numbers up by their bits, as not every CuPy computes with them."""
    bits = np.dtype(f"uint{8 * array.itemsize}")
    numbers = np.arange(256**array.itemsize).astype(bits).view(array.dtype).astype(np.float32)
    return xp.asarray(numbers)[array.view(bits)]


def to_bfloat16(array):
    """Keep the upper half of float32, rounded to the nearest."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(bfloat16)


def experts(sent, xp):
    """The work of this rank's experts on `[num_local_experts, rows, hidden]`; the host does not wait for the counts."""
    rows = to_float32(sent.recv_x, xp)
    if sent.recv_x_scales is not None:  # FP8: each 128 channels have a scale
        rows *= xp.repeat(sent.recv_x_scales, 128, axis=2)
    rows *= xp.asarray(np.split(GAINS, comm.size)[comm.rank])[:, None, None]
    filled = xp.arange(rows.shape[1]) < sent.num_recv_tokens_per_expert[:, None]  # nobody reads the other rows
    return to_bfloat16(xp.where(filled[:, :, None], rows, 0))


def one_batch(buffer, use_fp8, xp, batch):
    x, topk_idx, weights = batch
    sent = buffer.low_latency_dispatch(x, topk_idx, topk_weights=weights, use_fp8=use_fp8)  # each token to its experts
    y = experts(sent, xp)
    return [buffer.low_latency_combine(y, topk_idx, weights, sent.handle).x]  # back, times the weights, and added up


def two_micro_batches(buffer, use_fp8, xp, *batches):
    """While the experts work on one, the other is on its way: a call only sends, and its hook receives the result."""
    sent, back = [], []
    for x, topk_idx, weights in batches:
        sent.append(buffer.low_latency_dispatch(x, topk_idx, topk_weights=weights, use_fp8=use_fp8, return_recv_hook=True))
    for (_, topk_idx, weights), arriving in zip(batches, sent, strict=True):
        arriving.hook()
        y = experts(arriving, xp)
        back.append(buffer.low_latency_combine(y, topk_idx, weights, arriving.handle, return_recv_hook=True))
    for arriving in back:
        arriving.hook()
    return [arriving.x for arriving in back]


def decode(step, num_batches, buffer, use_fp8, xp):
    """A few steps with new tokens each. The first one, which also compiles, does not count for the time."""
    seconds, rng = [], np.random.default_rng(comm.rank)
    for _ in range(STEPS + 1):
        batches = []
        for _ in range(num_batches):
            x = to_bfloat16(xp.asarray(rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)))
            topk_idx = rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOPK].copy()  # a random router
            batches.append((x, xp.asarray(topk_idx), xp.asarray(rng.random((TOKENS, TOPK), dtype=np.float32))))
        buffer.synchronize()
        comm.Barrier()
        start = time.perf_counter()
        outs = step(buffer, use_fp8, xp, *batches)
        buffer.synchronize()
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))

        for out, (x, topk_idx, weights) in zip(outs, batches, strict=True):
            expected = to_float32(x, xp) * (xp.asarray(GAINS)[topk_idx] * weights).sum(axis=1, keepdims=True)
            error, limit = abs(to_float32(out, xp) - expected), 0.08 if use_fp8 else 0.015  # FP8 rounds by up to 1/16
            assert (error <= limit * abs(expected) + 1e-3).all(), f"rank {comm.rank}: off by up to {float(error.max()):.1e}"
    if comm.rank == 0:
        print(f"{step.__name__:18}{1e6 * np.median(seconds[1:]):9.1f} us a step with {num_batches} x {TOKENS} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--bf16", action="store_true", help="send bfloat16 rows, which GPUs without FP8 do in any case")
    args = parser.parse_args()
    sizes = dict(num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)
    with Buffer(comm, **sizes, low_latency=True, backend=args.backend) as buffer:
        xp, use_fp8 = np, not args.bf16
        if buffer.backend == "cuda":
            import cupy as xp

            xp.cuda.Device(comm.Split_type(MPI.COMM_TYPE_SHARED).rank % xp.cuda.runtime.getDeviceCount()).use()  # the buffer's
            use_fp8 &= int(xp.cuda.Device().compute_capability) >= 89
        if comm.rank == 0:
            kind = "FP8" if use_fp8 else "bfloat16"
            print(f"{buffer.backend}: {comm.size} ranks, {HIDDEN} channels, top-{TOPK} of {EXPERTS} experts, {kind} dispatch")
        decode(one_batch, 1, buffer, use_fp8, xp)
        decode(two_micro_batches, 2, buffer, use_fp8, xp)
    comm.Barrier()
    if comm.rank == 0:
        print("OK")


if __name__ == "__main__":
    main()
