"""Decode a few tokens a step through one MoE layer with the low-latency calls. Check the results and print times.

Uses GPUs if there are any: mpirun -n 4 python examples/low_latency_decode.py
"""

import time

import numpy as np
from common import array_library, cast, comm, need, parse, say
from mpi4py import MPI

from deepep_rt import Buffer

bfloat16 = need("ml_dtypes").bfloat16
TOKENS, HIDDEN, TOPK, EXPERTS, STEPS = 16, 2048, 8, 8 * comm.size, 10  # TOKENS: of each rank in a batch; EXPERTS: of all ranks
GAINS = 1 + np.arange(EXPERTS, dtype=np.float32) / EXPERTS  # expert e multiplies a row by GAINS[e]


def experts(sent, xp):
    """Run this rank's experts on `[num_local_experts, rows, hidden]`. The host does not wait for the counts."""
    rows = cast(sent.recv_x, np.float32)
    if sent.recv_x_scales is not None:  # FP8: each 128 channels have a scale
        rows *= xp.repeat(sent.recv_x_scales, 128, axis=2)
    rows *= xp.asarray(np.split(GAINS, comm.size)[comm.rank])[:, None, None]
    filled = (
        xp.arange(rows.shape[1]) < sent.num_recv_tokens_per_expert[:, None]
    )  # the other rows are undefined, and no rank reads them
    return cast(xp.where(filled[:, :, None], rows, 0), bfloat16)


def one_batch(buffer, use_fp8, xp, batch):
    """Dispatch, run the experts and combine, one after the other."""
    x, topk_idx, weights = batch
    sent = buffer.low_latency_dispatch(x, topk_idx, topk_weights=weights, use_fp8=use_fp8)  # send each token to its experts
    y = experts(sent, xp)
    return [buffer.low_latency_combine(y, topk_idx, weights, sent.handle).x]  # send back, multiply by the weights, add up


def two_micro_batches(buffer, use_fp8, xp, *batches):
    """Run the experts of one micro-batch while the rows of the other travel. A call only sends, and its hook receives."""
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
    """Time a few steps with new tokens each. The first one also compiles, so its time does not count."""
    seconds, rng = [], np.random.default_rng(comm.rank)
    for _ in range(STEPS + 1):
        batches = []
        for _ in range(num_batches):
            x = cast(xp.asarray(rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)), bfloat16)
            topk_idx = rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOPK].copy()  # a random router
            batches.append((x, xp.asarray(topk_idx), xp.asarray(rng.random((TOKENS, TOPK), dtype=np.float32))))
        buffer.synchronize()
        comm.Barrier()
        start = time.perf_counter()
        outs = step(buffer, use_fp8, xp, *batches)
        buffer.synchronize()
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))

        for out, (x, topk_idx, weights) in zip(outs, batches, strict=True):
            expected = cast(x, np.float32) * (xp.asarray(GAINS)[topk_idx] * weights).sum(axis=1, keepdims=True)
            error, limit = abs(cast(out, np.float32) - expected), 0.08 if use_fp8 else 0.015  # FP8 rounds by up to 1/16
            assert (error <= limit * abs(expected) + 1e-3).all(), f"rank {comm.rank}: off by up to {float(error.max()):.1e}"
    say(f"{step.__name__:18}{1e6 * np.median(seconds[1:]):9.1f} us a step with {num_batches} x {TOKENS} tokens")


def main():
    args = parse(__doc__, bf16=dict(action="store_true", help="send bfloat16 rows, which GPUs without FP8 do in any case"))
    sizes = dict(num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)
    with Buffer(comm, **sizes, low_latency=True, backend=args.backend) as buffer:
        on_gpu = buffer.backend == "cuda"
        xp, use_fp8 = array_library(on_gpu), not args.bf16
        if on_gpu:
            use_fp8 &= int(xp.cuda.Device().compute_capability) >= 89
        kind = "FP8" if use_fp8 else "bfloat16"
        say(f"{buffer.backend}: {comm.size} ranks, {HIDDEN} channels, top-{TOPK} of {EXPERTS} experts, {kind} dispatch")
        decode(one_batch, 1, buffer, use_fp8, xp)
        decode(two_micro_batches, 2, buffer, use_fp8, xp)
    comm.Barrier()
    say("OK")


if __name__ == "__main__":
    main()
