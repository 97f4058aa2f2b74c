"""Bandwidth and host time of dispatch and combine beside the copy ceiling measured in the same run.

    mpirun -n 8 python bench/throughput.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

Routing: `unknown` counts on the GPU and tells the host, `known` repeats a handle, `worst` fixes the shapes (num_worst_tokens).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..buffer import Buffer
from ..results import DispatchHandle
from . import report, timing
from .machine import Machine
from .results import Row, document, row_bytes

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WORKS = (*(f"dispatch_{kind}_{routing}" for kind in ("bf16", "fp8") for routing in ("unknown", "known", "worst")), "combine_bf16")
NUM_SETS = 2  # calls take turns among this many inputs, so that none finds its rows in the L2 cache


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `words` or the command line."""
    parser = report.options(__doc__)
    parser.add_argument("--tokens", type=report.numbers, default=[4096, 8192], help="tokens of each rank, such as 4096,8192")
    parser.add_argument("--sms", type=report.numbers, default=[8, 16, 24, 32, 64], help="numbers of SMs to try, such as 24,64")
    parser.add_argument("--calls", type=int, default=20, help="calls in a loop")
    parser.add_argument("--repeats", type=int, default=11, help="loops; their median counts")
    parser.add_argument("--warmup", type=int, default=5, help="calls before the first loop")
    args = parser.parse_args(words)
    if args.quick:
        args.calls, args.repeats, args.warmup = 2, 2, 1
    return args


def num_steps(args: argparse.Namespace) -> int:
    """How often `run` calls `step`."""
    return len(args.sms) * len(args.tokens) * len(WORKS)


@dataclass
class Inputs:
    """One set of arguments on the device, and what is known about its routing."""

    bf16: Any
    fp8: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    handle: DispatchHandle
    experts_out: Any  # rows for combine
    num_rows: float  # rows received, mean over the ranks
    num_remote_rows: float


class Bench:
    """The arrays, the clock and the cases of one backend."""

    def __init__(self, comm: Intracomm, args: argparse.Namespace, step: Callable[[str], None]) -> None:
        self.comm, self.args, self.step = comm, args, step
        self.machine = Machine(comm, args.backend)
        self.rng = np.random.default_rng([args.seed, comm.rank])
        self.clock = timing.clock(self.machine.on_gpu)

    def make_inputs(self, buffer: Buffer, num_tokens: int) -> Inputs:
        """Random tokens and routing; each routing is dispatched once, for its handle and its counts."""
        args, rng, upload = self.args, self.rng, self.machine.upload
        chosen = rng.random((num_tokens, args.experts), dtype=np.float32).argpartition(args.topk, axis=1)[:, : args.topk]
        bf16 = self.machine.bf16(rng, num_tokens, args.hidden)
        fp8 = upload(rng.integers(0, 256, (num_tokens, args.hidden), dtype=np.uint8))
        scales = upload(rng.random((num_tokens, args.hidden // 128), dtype=np.float32))
        topk_idx = upload(np.ascontiguousarray(chosen, np.int64))
        topk_weights = upload(rng.random((num_tokens, args.topk), dtype=np.float32))
        sent = buffer.dispatch(bf16, topk_idx, topk_weights)
        experts_out = self.machine.bf16(rng, sent.handle.num_recv_rows, args.hidden)
        remote = int((sent.recv_src_idx[:, 0] != self.comm.rank).sum())
        means = (self.comm.allreduce(n) / self.comm.size for n in (sent.handle.num_recv_rows, remote))
        return Inputs(bf16, fp8, scales, topk_idx, topk_weights, sent.handle, experts_out, *means)

    def cases(self, buffer: Buffer, sets: list[Inputs], num_tokens: int) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """Yield each work and its call."""
        worst = self.comm.size * num_tokens
        for name in ("bf16", "fp8"):
            rows = [getattr(s, name) for s in sets]
            scales = [s.scales if name == "fp8" else None for s in sets]

            def fresh(i: int, rows: list = rows, scales: list = scales, most: int | None = None) -> None:
                s = sets[i % NUM_SETS]
                buffer.dispatch(
                    rows[i % NUM_SETS], s.topk_idx, s.topk_weights, x_scales=scales[i % NUM_SETS], num_worst_tokens=most
                )

            def known(i: int, rows: list = rows, scales: list = scales) -> None:
                buffer.dispatch(rows[i % NUM_SETS], x_scales=scales[i % NUM_SETS], handle=sets[i % NUM_SETS].handle)

            def fixed(i: int, fresh: Callable[..., None] = fresh) -> None:
                fresh(i, most=worst)

            yield f"dispatch_{name}_unknown", fresh
            yield f"dispatch_{name}_known", known
            yield f"dispatch_{name}_worst", fixed
        yield "combine_bf16", lambda i: buffer.combine(sets[i % NUM_SETS].experts_out, sets[i % NUM_SETS].handle)

    def run(self, sms: int) -> tuple[float, list[Row]]:
        """All cases at one number of SMs: the copy ceiling in GB/s, and the rows."""
        args, comm, rows = self.args, self.comm, []
        sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=args.experts)
        with Buffer(comm, num_max_tokens_per_rank=max(args.tokens), **sizes, num_sms=sms, backend=args.backend) as buffer:
            ceiling = buffer.copy_ceiling() / 1e9
            for num_tokens in args.tokens:
                sets = [self.make_inputs(buffer, num_tokens) for _ in range(NUM_SETS)]
                num_rows, num_remote = (sum(getattr(s, n) for s in sets) / NUM_SETS for n in ("num_rows", "num_remote_rows"))
                for work, call in self.cases(buffer, sets, num_tokens):
                    self.step(f"{work}, {num_tokens} tokens, {sms} SMs")
                    seconds = timing.measure(buffer, comm, self.clock, call, args)
                    waits = work.endswith("unknown")
                    host = None if waits else 1e6 * timing.measure_host(buffer, comm, call, args)
                    gb_s, remote_gb_s = (n * row_bytes(work, args.hidden) / seconds / 1e9 for n in (num_rows, num_remote))
                    rows.append(Row(work, num_tokens, sms, 1e6 * seconds, gb_s, remote_gb_s, host))
        return ceiling, rows


def run(comm: Intracomm, args: argparse.Namespace, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Collective.

    Args:
        comm: The ranks that take part.
        args: What `parse_args` gives.
        step: Called before each of `num_steps(args)` measurements, with what is measured.

    Returns:
        The result file's contents (`bench_results.document`) on rank 0, None on the others.
    """
    bench = Bench(comm, args, step)
    ceilings, rows = {}, []
    for sms in args.sms:
        ceilings[sms], found = bench.run(sms)
        rows += found
    rows.sort(key=lambda row: (row.tokens, row.work, row.sms))
    settings = {**bench.machine.described(), **report.described(args, timing.BOUNDARY[args.backend])}
    return document(rows, ceilings, settings, args.commit) if comm.rank == 0 else None


def main() -> None:
    """The program."""
    report.program(MPI.COMM_WORLD, parse_args(), run)
