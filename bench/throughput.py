"""Bandwidth and host time of dispatch and combine beside the copy ceiling measured in the same run.

    mpirun -n 8 python bench/throughput.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

Routing: `unknown` counts on the GPU and tells the host, `known` repeats a handle, `worst` fixes the shapes (num_worst_tokens).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report
import timing
from machine import Machine
from mpi4py import MPI

from deepep_rt import Buffer

comm = MPI.COMM_WORLD
NUM_SETS = 2  # calls take turns among this many inputs, so that none finds its rows in the L2 cache


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--tokens", type=numbers, default=[4096, 8192], help="tokens of each rank, such as 4096,8192")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=numbers, default=[8, 16, 24, 32, 64], help="numbers of SMs to try, such as 24,64")
    parser.add_argument("--calls", type=int, default=20, help="calls in a loop")
    parser.add_argument("--repeats", type=int, default=11, help="loops; their median counts")
    parser.add_argument("--warmup", type=int, default=5, help="calls before the first loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two loops of two calls: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="print ratios to another result, or to bench/reference/*.json"
    )
    parser.add_argument("--commit", help="the commit to record, where this is no git checkout")
    args = parser.parse_args()
    if args.quick:
        args.calls, args.repeats, args.warmup = 2, 2, 1
    return args


@dataclass
class Inputs:
    """One set of arguments on the device, and what is known about its routing."""

    bf16: Any
    fp8: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    handle: Any = None
    experts_out: Any = None  # rows for combine
    num_rows: float = 0  # rows received, mean over the ranks
    num_remote_rows: float = 0


class Bench:
    """The arrays, the clock and the cases of one backend."""

    def __init__(self, args):
        self.args = args
        self.machine = Machine(comm, args.backend)
        self.rng = np.random.default_rng([args.seed, comm.rank])
        self.clock = timing.CudaClock() if self.machine.on_gpu else timing.WallClock()

    def make_inputs(self, buffer, num_tokens):
        """Random tokens and routing; each routing is dispatched once, for its handle and its counts."""
        args, rng = self.args, self.rng
        chosen = rng.random((num_tokens, args.experts), dtype=np.float32).argpartition(args.topk, axis=1)[:, : args.topk]
        inputs = Inputs(
            bf16=self.machine.bf16(self.rng, num_tokens, args.hidden),
            fp8=self.machine.upload(rng.integers(0, 256, (num_tokens, args.hidden), dtype=np.uint8)),
            scales=self.machine.upload(rng.random((num_tokens, args.hidden // 128), dtype=np.float32)),
            topk_idx=self.machine.upload(np.ascontiguousarray(chosen, np.int64)),
            topk_weights=self.machine.upload(rng.random((num_tokens, args.topk), dtype=np.float32)),
        )
        sent = buffer.dispatch(inputs.bf16, inputs.topk_idx, inputs.topk_weights)
        inputs.handle = sent.handle
        inputs.experts_out = self.machine.bf16(self.rng, sent.handle.num_recv_rows, args.hidden)
        remote = int((sent.recv_src_idx[:, 0] != comm.rank).sum())
        inputs.num_rows, inputs.num_remote_rows = (comm.allreduce(n) / comm.size for n in (sent.handle.num_recv_rows, remote))
        return inputs

    def cases(self, buffer, sets, num_tokens):
        """Yield (work, bytes of a row, call, whether the host waits in it)."""
        worst = comm.size * num_tokens
        hidden = self.args.hidden
        for name, row_bytes in (("bf16", 2 * hidden), ("fp8", hidden + hidden // 128 * 4)):
            rows = [getattr(s, name) for s in sets]
            scales = [s.scales if name == "fp8" else None for s in sets]

            def fresh(i, rows=rows, scales=scales, **options):
                s = sets[i % NUM_SETS]
                buffer.dispatch(rows[i % NUM_SETS], s.topk_idx, s.topk_weights, x_scales=scales[i % NUM_SETS], **options)

            def known(i, rows=rows, scales=scales):
                buffer.dispatch(rows[i % NUM_SETS], x_scales=scales[i % NUM_SETS], handle=sets[i % NUM_SETS].handle)

            yield f"dispatch_{name}_unknown", row_bytes, fresh, True
            yield f"dispatch_{name}_known", row_bytes, known, False
            yield f"dispatch_{name}_worst", row_bytes, lambda i, fresh=fresh: fresh(i, num_worst_tokens=worst), False
        yield (
            "combine_bf16",
            2 * hidden,
            lambda i: buffer.combine(sets[i % NUM_SETS].experts_out, sets[i % NUM_SETS].handle),
            False,
        )

    def run(self, sms):
        """All cases at one number of SMs: the copy ceiling in GB/s, and the rows."""
        args, rows = self.args, []
        sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=args.experts)
        with Buffer(comm, num_max_tokens_per_rank=max(args.tokens), **sizes, num_sms=sms, backend=args.backend) as buffer:
            ceiling = buffer.copy_ceiling() / 1e9
            for num_tokens in args.tokens:
                sets = [self.make_inputs(buffer, num_tokens) for _ in range(NUM_SETS)]
                num_rows, num_remote = (sum(getattr(s, n) for s in sets) / NUM_SETS for n in ("num_rows", "num_remote_rows"))
                for work, row_bytes, call, host_waits in self.cases(buffer, sets, num_tokens):
                    seconds = timing.measure(buffer, comm, self.clock, call, args)
                    host = None if host_waits else 1e6 * timing.measure_host(buffer, comm, call, args)
                    speeds = (n * row_bytes / seconds / 1e9 for n in (num_rows, num_remote))
                    rows.append(report.Row(work, num_tokens, sms, 1e6 * seconds, *speeds, host))
        return ceiling, rows


def main():
    args = parse_args()
    bench = Bench(args)
    ceilings, rows = {}, []
    for sms in args.sms:
        ceilings[sms], found = bench.run(sms)
        rows += found
    if comm.rank:
        return
    rows.sort(key=lambda row: (row.tokens, row.work, row.sms))
    title = f"{comm.size} x {bench.machine.name()}, hidden {args.hidden}, top-{args.topk} of {args.experts}, random routing"
    report.print_table(rows, max(ceilings.values()), title)
    if args.json:
        settings = {
            **bench.machine.described(),
            "boundary": timing.BOUNDARY[args.backend],
            "settings": {name: value for name, value in vars(args).items() if name not in ("json", "compare", "commit")},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report.document(rows, ceilings, settings, args.commit), indent=1) + "\n")
    if args.compare:
        report.print_comparison(rows, args.compare)


if __name__ == "__main__":
    main()
