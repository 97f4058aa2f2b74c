"""Overlap the communication of one micro-batch with the matrix products of another, and draw when each part ran.

Uses GPUs if there are any: mpirun -n 4 python examples/overlap_micro_batches.py --picture timeline.png

With `return_recv_hook=True` a low-latency call only sends, and its hook receives. Between the two it occupies no SM. Work that a program
launches there, on the same stream, runs while rows travel and slow ranks catch up.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # with ranks that share cores, NumPy's threads delay each other
import numpy as np
from common import array_library, cast, comm, need, parse, say
from timeline import draw, measure

from deepep_rt import Buffer

bfloat16 = need("ml_dtypes").bfloat16
TOPK, EXPERTS = 4, 4 * comm.size


def overlapped(buffer, attention, experts, batches, done):
    """Run A and B in turns. `done` records the time of the part that was just launched, and returns its result."""
    sent, back = {}, {}
    for name, (tokens, topk_idx, weights) in batches.items():
        x = done(name, "attention", attention(name, tokens))  # for B, while A's rows travel
        arriving = buffer.low_latency_dispatch(x, topk_idx, topk_weights=weights, use_fp8=False, return_recv_hook=True)
        sent[name] = done(name, "send", arriving)
    for name, (_, topk_idx, weights) in batches.items():
        done(name, "receive", sent[name].hook())
        y = done(name, "experts", experts(sent[name].recv_x))  # for A, while B's rows travel; for B, while A's outputs travel
        arriving = buffer.low_latency_combine(y, topk_idx, weights, sent[name].handle, return_recv_hook=True)
        back[name] = done(name, "send back", arriving)
    for name in batches:
        done(name, "get back", back[name].hook())
    return [back[name].x for name in batches]


def one_after_the_other(buffer, attention, experts, batches, done):
    """Run A, then B, with calls that send and receive."""
    outs = []
    for name, (tokens, topk_idx, weights) in batches.items():
        x = done(name, "attention", attention(name, tokens))
        sent = done(name, "dispatch", buffer.low_latency_dispatch(x, topk_idx, topk_weights=weights, use_fp8=False))
        y = done(name, "experts", experts(sent.recv_x))
        outs.append(done(name, "combine", buffer.low_latency_combine(y, topk_idx, weights, sent.handle)).x)
    return outs


def main():
    sizes = {"tokens": ("of each rank in a micro-batch", 64, 16), "hidden": ("length of a row", 7168, 1024)}
    picture = dict(metavar="FILE", help="draw a typical step of rank 0 (.png, .svg, ...; needs matplotlib)")
    args = parse(__doc__, sizes, picture=picture, even=dict(action="store_true", help="as much attention on all ranks"))
    if args.picture:
        need("matplotlib")  # exit now if it is missing
    xp, dtype = array_library(args.on_gpu), np.float16 if args.on_gpu else np.float32
    rng = np.random.default_rng(comm.rank)
    matrix = xp.asarray((rng.standard_normal((args.hidden,) * 2, dtype=np.float32) / args.hidden**0.5).astype(dtype))
    batches = {}
    for name in "AB":
        tokens = xp.asarray(rng.standard_normal((args.tokens, args.hidden), dtype=np.float32).astype(dtype))
        topk_idx = rng.random((args.tokens, EXPERTS)).argsort(axis=1)[:, :TOPK].copy()  # a random router
        batches[name] = tokens, xp.asarray(topk_idx), xp.asarray(rng.random((args.tokens, TOPK), dtype=np.float32))

    def attention(name, x):  # contexts differ in length: even ranks have twice the work for B, odd ones for A
        for _ in range(3 if args.even or comm.rank % 2 == "AB".index(name) else 6):
            x = x @ matrix
        return cast(x, bfloat16)

    def experts(rows):  # all experts of a rank have the same matrix
        return cast((cast(rows, dtype).reshape(-1, args.hidden) @ matrix).reshape(rows.shape), bfloat16)

    sizes = dict(num_max_tokens_per_rank=args.tokens, hidden=args.hidden, num_topk=TOPK, num_experts=EXPERTS)
    with Buffer(comm, **sizes, low_latency=True, backend=args.backend) as buffer:
        found = {}
        for step in (overlapped, one_after_the_other):
            work = (buffer, attention, experts, batches)
            found[step.__name__.replace("_", " ")] = measure(step, work, xp if args.on_gpu else None, lambda: matrix @ matrix)
        outs, expected = (outs for outs, _ in found.values())
        same = all(bool((a.view(np.uint16) == b.view(np.uint16)).all()) for a, b in zip(outs, expected, strict=True))
        assert same, f"rank {comm.rank}: not the same bits"
        setting = f"{comm.size} ranks ({buffer.backend}), 2 x {args.tokens} tokens of {args.hidden} x bfloat16"
    setting += "" if args.on_gpu else "; without GPUs, rows travel within the sending part"
    say(f"{setting}: " + ", ".join(f"{timeline.slowest:.0f} us {name}" for name, (_, timeline) in found.items()) + ", same bits")
    if args.picture and comm.rank == 0:
        draw(args.picture, f"A step of rank 0 of {setting}", {name: timeline for name, (_, timeline) in found.items()})
    comm.Barrier()
    say("OK")


if __name__ == "__main__":
    main()
