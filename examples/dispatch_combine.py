"""Route random tokens to their experts and back, check every row, and print the bandwidth. Uses GPUs if there are any.

mpirun -n 4 python examples/dispatch_combine.py
"""

import time

import numpy as np
from common import array_library, comm, parse, say
from mpi4py import MPI

from deepep_rt import Buffer

rank, num_ranks = comm.rank, comm.size


def tokens_of(source, args):
    """Make the tokens of a rank from its seed. Every rank can make those of all others, and so knows what it must receive."""
    rng = np.random.default_rng(source)
    x = rng.standard_normal((args.tokens, args.hidden), dtype=np.float32).astype(np.float16)
    topk_idx = rng.random((args.tokens, args.experts)).argsort(axis=1)[:, : args.topk].copy()
    return x, topk_idx, rng.random((args.tokens, args.topk), dtype=np.float32)


def check_dispatch(sent, to_host, args):
    """Compare every row with that of its source, in the order (source rank, source token)."""
    parts = []
    for source in range(num_ranks):
        x, topk_idx, weights = tokens_of(source, args)
        owner, local_idx = np.divmod(topk_idx, args.experts // num_ranks)
        token = np.flatnonzero((owner == rank).any(axis=1))
        here = owner[token] == rank
        origin = np.stack([np.full_like(token, source), token], axis=1)
        parts.append((x[token], np.where(here, local_idx[token], -1), np.where(here, weights[token], 0), origin))
    received = (sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, sent.recv_src_idx)
    for name, array, expected in zip(("rows", "experts", "weights", "order"), received, zip(*parts, strict=True), strict=True):
        assert np.array_equal(to_host(array), np.concatenate(expected)), f"rank {rank}: wrong {name} after dispatch"


def check_combine(out, gains, args):
    """Compare with the sum in float64. A rank rounds a row to float16 before it sends it back, and the sum once more."""
    x, topk_idx, weights = tokens_of(rank, args)
    expected = x.astype(np.float64) * (gains[topk_idx] * weights).sum(axis=1, keepdims=True)
    error = np.abs(out - expected).max() / np.abs(expected).max()
    assert error < 2**-9, f"rank {rank}: combine is off by {error:.1e} of the largest value"


def report(name, call, buffer, rows, remote_rows, row_bytes, ceiling):
    """Print the time of a call (slowest rank, median of 5 loops) and its bandwidth. A token counts once for each of its ranks."""

    def loop(num_calls=10):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        buffer.synchronize()
        return comm.allreduce((time.perf_counter() - start) / num_calls, MPI.MAX)

    loop(1)
    seconds = sorted(loop() for _ in range(5))[2]
    speed, remote = (comm.allreduce(n) / num_ranks * row_bytes / seconds / 1e9 for n in (rows, remote_rows))
    others = f", to and from other ranks {remote:.2f} GB/s, {100e9 * remote / ceiling:.0f} % of the copy ceiling"
    say(f"{name:9}{seconds * 1e6:9.1f} us {speed:8.2f} GB/s{others if num_ranks > 1 else ''}")


def main():
    sizes = {"tokens": ("tokens of each rank", 4096, 256), "hidden": ("length of a row", 7168, 2048)}
    sizes |= {"topk": ("experts of a token", 8, 8), "experts": ("of all ranks, rounded down to a multiple of them", 256, 256)}
    args = parse(__doc__, sizes)
    args.experts -= args.experts % num_ranks
    xp = array_library(args.on_gpu)
    to_host = xp.asnumpy if args.on_gpu else np.asarray
    gains = 1 + np.arange(args.experts, dtype=np.float32) / args.experts  # expert e multiplies a row by gains[e]
    local_gains = xp.asarray(gains.reshape(num_ranks, -1)[rank])
    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=args.topk, num_experts=args.experts)

    with Buffer(comm, **sizes, dtype="float16", backend=args.backend) as buffer:
        x, topk_idx, topk_weights = (xp.asarray(array) for array in tokens_of(rank, args))

        sent = buffer.dispatch(x, topk_idx, topk_weights)  # each token to the ranks of its experts
        factors = local_gains[sent.recv_topk_idx] * sent.recv_topk_weights  # the weight of an expert on another rank is 0
        y = (sent.recv_x * factors.sum(axis=1, keepdims=True)).astype(x.dtype)  # the work of the experts
        out = buffer.combine(y, sent.handle).x  # back to the tokens' ranks, added up

        check_dispatch(sent, to_host, args)
        check_combine(to_host(out), gains, args)
        ceiling, to_others = buffer.copy_ceiling(), "to other ranks" if num_ranks > 1 else "within this rank"
        say(f"{buffer.backend}: {num_ranks} ranks, {args.tokens} tokens of {args.hidden} x float16 each,", end=" ")
        say(f"top-{args.topk} of {args.experts} experts; copy ceiling {ceiling / 1e9:.2f} GB/s {to_others}")
        remote_rows = int((sent.recv_src_idx[:, 0] != rank).sum())
        counts = (sent.handle.num_recv_rows, remote_rows, 2 * args.hidden, ceiling)
        report("dispatch", lambda: buffer.dispatch(x, handle=sent.handle), buffer, *counts)
        report("combine", lambda: buffer.combine(y, sent.handle), buffer, *counts)
    comm.Barrier()
    say("OK")


if __name__ == "__main__":
    main()
