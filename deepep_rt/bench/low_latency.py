"""Times of low-latency dispatch and combine, with and without CUDA graphs.

    mpirun -n 8 python bench/low_latency.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

`graph`: a captured chain of calls, mean of a call. `step`: dispatch and combine captured together, one replay after the other, each timed.
`send`, `receive`: the two launches of a call with a hook on the GPU, when everything has arrived before the hook is called.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..buffer import Buffer
from ..results import LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle
from . import report, timing
from .machine import Machine
from .results import LowLatencyRow as Row
from .results import document

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BOUNDARY = {
    "cuda": "CUDA events; slowest rank of each repeat; p50 over the repeats unless p99 is said. Of the host: calls in rows of ten",
    "host": "wall clock of the host; slowest rank of each repeat; p50 over the repeats",
}

_QUEUED = 50  # replays that a GPU is given at once


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `words` or the command line."""
    parser = report.options(__doc__)
    parser.add_argument("--tokens", type=report.numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="tokens of each rank")
    parser.add_argument("--sms", type=int, default=None, help="low_latency_sms; default: the library's")
    parser.add_argument("--ranks-per-node", type=int, default=None, help="reach other ranks through NVSHMEM; 1: all of them")
    parser.add_argument("--on-timeout", choices=("raise", "mask"), default="raise")
    parser.add_argument("--bf16", action="store_true", help="dispatch bfloat16 rows instead of FP8")
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--chain", type=int, default=10, help="calls in a captured chain")
    args = parser.parse_args(words)
    args.loops, args.calls, args.repeats, args.host_calls = (2, 2, 3, 5) if args.quick else (5, 50, 30, 100)
    if args.quick:
        args.replays, args.chain = 20, 2
    return args


def num_steps(args: argparse.Namespace) -> int:
    """How often `run` calls `step`."""
    return len(args.tokens)


class Bench:
    """Inputs for one number of tokens, and the calls that are timed."""

    def __init__(self, comm: Intracomm, args: argparse.Namespace, machine: Machine, buffer: Buffer, num_tokens: int) -> None:
        self.comm, self.args, self.buffer = comm, args, buffer
        rng = np.random.default_rng([args.seed, comm.rank, num_tokens])
        chosen = rng.random((num_tokens, args.experts), dtype=np.float32).argpartition(args.topk, axis=1)[:, : args.topk]
        self.x = machine.bf16(rng, num_tokens, args.hidden)
        self.idx = machine.upload(np.ascontiguousarray(chosen, np.int64))
        self.weights = machine.upload(rng.random((num_tokens, args.topk), dtype=np.float32))
        config = buffer.config
        rows = config.num_local_experts * config.num_max_recv_tokens
        self.y = machine.bf16(rng, rows, args.hidden).reshape(config.num_local_experts, config.num_max_recv_tokens, args.hidden)
        self.handle = self.dispatch().handle

    def dispatch(self, **options: bool) -> LowLatencyDispatchResult:
        use_fp8 = not self.args.bf16
        return self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, use_fp8=use_fp8, **options)

    def combine(self, handle: LowLatencyHandle | None = None, **options: bool) -> LowLatencyCombineResult:
        return self.buffer.low_latency_combine(self.y, self.idx, self.weights, handle or self.handle, **options)

    def both(self) -> tuple[LowLatencyDispatchResult, LowLatencyCombineResult]:
        sent = self.dispatch()
        return sent, self.combine(sent.handle)

    def meet(self) -> None:
        self.buffer.synchronize()
        self.comm.Barrier()

    def times(self, run: Callable[[], Any], repeats: int) -> np.ndarray:
        """Slowest rank of each repeat; `run` gives the microseconds of one."""
        mine = np.array([run() for _ in range(repeats)])
        slowest = np.empty_like(mine)
        self.comm.Allreduce(mine, slowest, MPI.MAX)
        return slowest

    def host(self, call: Callable[[], Any]) -> float:
        """Microseconds of the host in a call. As in decoding, one comes right after the other; in rows of ten, so that the GPU keeps up."""
        self.meet()
        spent = []
        for i in range(self.args.host_calls):
            spent.append(timing.host_seconds(call))
            if i % 10 == 9:
                self.buffer.synchronize()
        self.buffer.synchronize()
        return 1e6 * self.comm.allreduce(float(np.median(spent)), MPI.MAX)

    def one_by_one(self, clock: timing.CudaClock | timing.WallClock) -> float:
        def run() -> float:
            self.meet()
            return 1e6 * clock.loop(lambda i: self.both(), self.args.calls)

        return float(np.median(self.times(run, self.args.loops)))

    def step_times(self) -> np.ndarray:
        """Microseconds of each step on the slowest rank."""
        self.meet()
        return self.times(lambda: 1e6 * timing.host_seconds(self.both), self.args.replays)

    def row(self, num_tokens: int, clock: timing.CudaClock | timing.WallClock) -> Row:
        return Row(num_tokens, self.one_by_one(clock), self.host(self.dispatch), self.host(self.combine))


class GraphBench(Bench):
    """What needs a GPU."""

    def capture(self, call: Callable[[], Any], count: int) -> tuple[Any, list]:
        """A graph of `count` calls, and their results, which have to live as long."""
        import cupy

        held = [call() for _ in range(count)]  # memory of results is allocated now
        self.meet()
        del held
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        results = [call() for _ in range(count)]
        return stream.end_capture(), results

    def chain(self, call: Callable[[], Any]) -> float:
        import cupy

        count = self.args.chain
        graph, results = self.capture(call, count)

        def run() -> float:
            self.meet()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            graph.launch()
            start.record()
            graph.launch()
            graph.launch()
            end.record()
            end.synchronize()
            return 1e3 * cupy.cuda.get_elapsed_time(start, end) / (2 * count)

        found = float(np.median(self.times(run, self.args.repeats)))
        self.meet()
        results.clear()  # not before the last replay has ended
        return found

    def step_times(self) -> np.ndarray:
        """Microseconds of each replayed step on the slowest rank.

        The GPU has so many queued that it does not wait for the host, whose launches take as long.
        """
        import cupy

        graph, results = self.capture(self.both, 1)
        spent: list[float] = []
        while len(spent) < self.args.replays:
            events = [cupy.cuda.Event() for _ in range(min(_QUEUED, self.args.replays - len(spent)) + 1)]
            self.meet()
            with timing.queued(cupy.cuda.get_current_stream().ptr):
                for _ in range(10):
                    graph.launch()
                for event in events:
                    event.record()
                    graph.launch()
            spent += [1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in itertools.pairwise(events)]
        self.meet()
        results.clear()  # not before the last replay has ended
        return self.times(iter(spent).__next__, len(spent))

    def parts(self, call: Callable[..., Any]) -> list[float]:
        """Sending and receiving apart; the host waits in between until all ranks have sent."""
        import cupy

        def timed(part: Callable[[], Any]) -> tuple[float, Any]:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self.meet()
            with timing.queued(cupy.cuda.get_current_stream().ptr):
                start.record()
                result = part()
                end.record()
            return 1e3 * cupy.cuda.get_elapsed_time(start, end), result

        def run() -> list[float]:
            sending, result = timed(lambda: call(return_recv_hook=True))
            return [sending, timed(result.hook)[0]]

        return [float(us) for us in np.median(self.times(run, self.args.repeats), axis=0)]

    def row(self, num_tokens: int, clock: timing.CudaClock | timing.WallClock) -> Row:
        p50, p99 = np.percentile(self.step_times(), (50, 99)).tolist()
        return Row(
            num_tokens,
            self.one_by_one(clock),
            self.host(self.dispatch),
            self.host(self.combine),
            self.chain(self.dispatch),
            self.chain(self.combine),
            self.chain(self.both),
            p50,
            p99,
            *self.parts(self.dispatch),
            *self.parts(self.combine),
        )


def run(comm: Intracomm, args: argparse.Namespace, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Arguments and result as in `throughput.run`."""
    machine = Machine(comm, args.backend)
    clock = timing.clock(machine.on_gpu)
    sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=args.experts, backend=args.backend)
    more = {"ranks_per_node": args.ranks_per_node, "on_timeout": args.on_timeout}
    more |= {} if args.sms is None else {"low_latency_sms": args.sms}
    rows, sms = [], None
    ceilings: dict[int, float] = {}
    # graphs cannot be captured on the default stream
    stream, kind = (timing.own_stream(), GraphBench) if machine.on_gpu else (contextlib.nullcontext(), Bench)
    for num_tokens in args.tokens:
        step(f"low latency, {num_tokens} tokens")
        with Buffer(comm, num_max_tokens_per_rank=max(num_tokens, 128), low_latency=True, **sizes, **more) as buffer:
            with stream:
                rows.append(kind(comm, args, machine, buffer, num_tokens).row(num_tokens, clock))
            ceiling = buffer.copy_ceiling() / 1e9
            ceilings[buffer.config.num_sms] = max(ceiling, ceilings.get(buffer.config.num_sms, 0.0))
            sms = buffer.config.low_latency_sms
    settings = {**machine.described(), **report.described(args, BOUNDARY[args.backend]), "low_latency_sms": sms}
    return document(rows, ceilings, settings, args.commit) if comm.rank == 0 else None


def main() -> None:
    """The program."""
    report.program(MPI.COMM_WORLD, parse_args(), run)
