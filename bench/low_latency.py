"""Times of low-latency dispatch and combine, with and without CUDA graphs.

    mpirun -n 8 python bench/low_latency.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

`graph`: a captured chain of calls, mean of a call. `step`: dispatch and combine captured together and replayed, each replay timed alone.
`send`, `receive`: the two launches of a call with a hook, when everything has arrived before the hook is called.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
import timing
from machine import Machine
from mpi4py import MPI
from rich.table import Table

from deepep_rt import Buffer

comm = MPI.COMM_WORLD
BOUNDARY = "CUDA events; slowest rank of each repeat; p50 over the repeats unless p99 is said"


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=int, default=None, help="low_latency_sms; default: the library's")
    parser.add_argument("--ranks-per-node", type=int, default=None, help="reach other ranks through NVSHMEM; 1: all of them")
    parser.add_argument("--on-timeout", choices=("raise", "mask"), default="raise")
    parser.add_argument("--bf16", action="store_true", help="dispatch bfloat16 rows instead of FP8")
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--chain", type=int, default=10, help="calls in a captured chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print the figures of bench/reference/*.json beside ours")
    parser.add_argument("--commit", help="the commit to record, where this is no git checkout")
    return parser.parse_args()


@dataclass(frozen=True)
class Row:
    """One number of tokens; microseconds. None: not measured without a GPU."""

    tokens: int
    call_us: float  # dispatch and combine, launched one by one
    host_dispatch_us: float
    host_combine_us: float
    graph_dispatch_us: float | None = None
    graph_combine_us: float | None = None
    graph_both_us: float | None = None
    step_p50_us: float | None = None
    step_p99_us: float | None = None
    dispatch_send_us: float | None = None
    dispatch_receive_us: float | None = None
    combine_send_us: float | None = None
    combine_receive_us: float | None = None


class Bench:
    """Inputs for one number of tokens, and the calls that are timed."""

    def __init__(self, args, machine, buffer, num_tokens):
        self.args, self.buffer = args, buffer
        rng = np.random.default_rng([args.seed, comm.rank, num_tokens])
        chosen = rng.random((num_tokens, args.experts), dtype=np.float32).argpartition(args.topk, axis=1)[:, : args.topk]
        self.x = machine.bf16(rng, num_tokens, args.hidden)
        self.idx = machine.upload(np.ascontiguousarray(chosen, np.int64))
        self.weights = machine.upload(rng.random((num_tokens, args.topk), dtype=np.float32))
        config = buffer.config
        rows = config.num_local_experts * config.num_max_recv_tokens
        self.y = machine.bf16(rng, rows, args.hidden).reshape(config.num_local_experts, config.num_max_recv_tokens, args.hidden)
        self.handle = self.dispatch().handle

    def dispatch(self, **options):
        return self.buffer.low_latency_dispatch(
            self.x, self.idx, topk_weights=self.weights, use_fp8=not self.args.bf16, **options
        )

    def combine(self, handle=None, **options):
        return self.buffer.low_latency_combine(self.y, self.idx, self.weights, handle or self.handle, **options)

    def both(self):
        sent = self.dispatch()
        return sent, self.combine(sent.handle)

    def meet(self):
        self.buffer.synchronize()
        comm.Barrier()

    def times(self, run, repeats):
        """Slowest rank of each repeat; `run` gives the microseconds of one."""
        mine = np.array([run() for _ in range(repeats)])
        slowest = np.empty_like(mine)
        comm.Allreduce(mine, slowest, MPI.MAX)
        return slowest

    def host(self, call):
        """Microseconds of the host in a call, the GPU being idle."""
        self.meet()
        spent = []
        for _ in range(100):
            spent.append(timing.host_seconds(call))
            self.buffer.synchronize()
        return 1e6 * comm.allreduce(float(np.median(spent)), MPI.MAX)

    def one_by_one(self, clock):
        def run():
            self.meet()
            return 1e6 * clock.loop(lambda i: self.both(), 50)

        return float(np.median(self.times(run, 5)))


class GraphBench(Bench):
    """What needs a GPU."""

    def capture(self, call, count):
        """A graph of `count` calls, and their results, which have to live as long."""
        import cupy

        held = [call() for _ in range(count)]  # memory of results is allocated now
        self.meet()
        del held
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        results = [call() for _ in range(count)]
        return stream.end_capture(), results

    def chain(self, call):
        import cupy

        count = self.args.chain
        graph, results = self.capture(call, count)

        def run():
            self.meet()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            graph.launch()
            start.record()
            graph.launch()
            graph.launch()
            end.record()
            end.synchronize()
            return 1e3 * cupy.cuda.get_elapsed_time(start, end) / (2 * count)

        found = float(np.median(self.times(run, 30)))
        self.meet()
        results.clear()  # not before the last replay has ended
        return found

    def steps(self):
        """p50 and p99 of a replayed step."""
        import cupy

        graph, results = self.capture(self.both, 1)
        events = [cupy.cuda.Event() for _ in range(self.args.replays + 1)]
        self.meet()
        for _ in range(10):
            graph.launch()
        for event in events:
            event.record()
            graph.launch()
        events[-1].synchronize()  # the buffer knows nothing of replays
        self.meet()
        results.clear()  # not before the last replay has ended
        pairs = itertools.pairwise(events)
        found = self.times(lambda: 1e3 * cupy.cuda.get_elapsed_time(*next(pairs)), self.args.replays)
        return [float(np.percentile(found, share)) for share in (50, 99)]

    def parts(self, call):
        """Sending and receiving apart; the host waits in between until all ranks have sent."""
        import cupy

        def run():
            self.meet()
            events = [cupy.cuda.Event() for _ in range(4)]
            events[0].record()
            result = call(return_recv_hook=True)
            events[1].record()
            self.meet()
            events[2].record()
            result.hook()
            events[3].record()
            events[3].synchronize()
            return [1e3 * cupy.cuda.get_elapsed_time(a, b) for a, b in (events[:2], events[2:])]

        return [float(us) for us in np.median(self.times(run, 30), axis=0)]

    def row(self, num_tokens, clock):
        p50, p99 = self.steps()
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


def print_table(rows, title, theirs):
    table = Table("tokens", title=title, caption=f"us; D: dispatch, C: combine. {BOUNDARY}.")
    names = ("graph D", "C", "D+C", "step p50", "p99", "D send", "recv", "C send", "recv", "one by one", "host D", "C")
    fields = ("graph_dispatch_us", "graph_combine_us", "graph_both_us", "step_p50_us", "step_p99_us", "dispatch_send_us")
    fields += ("dispatch_receive_us", "combine_send_us", "combine_receive_us", "call_us", "host_dispatch_us", "host_combine_us")
    for name in (*names, *theirs):
        table.add_column(name, justify="right")
    for row in rows:
        figures = [getattr(row, field) for field in fields] + [found.get(str(row.tokens)) for found in theirs.values()]
        table.add_row(str(row.tokens), *("-" if figure is None else f"{figure:.1f}" for figure in figures))
    report.console().print(table)


def peers(path):
    """{system: {tokens: us of dispatch and combine in a graph}}."""
    systems = json.loads(path.read_text())["systems"] if path else {}
    found = {
        name: {tokens: figures.get("graph_both") for tokens, figures in entry.get("low_latency_us", {}).items()}
        for name, entry in systems.items()
    }
    return {name.partition(" (")[0]: figures for name, figures in found.items() if figures}


def main():
    args = parse_args()
    machine = Machine(comm, args.backend)
    clock = timing.CudaClock() if machine.on_gpu else timing.WallClock()
    sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=args.experts, backend=args.backend)
    more = {"ranks_per_node": args.ranks_per_node, "on_timeout": args.on_timeout}
    more |= {} if args.sms is None else {"low_latency_sms": args.sms}
    rows, ceilings = [], {}
    stream = timing.own_stream() if machine.on_gpu else None  # graphs cannot be captured on the default stream
    for num_tokens in args.tokens:
        with Buffer(comm, num_max_tokens_per_rank=max(num_tokens, 128), low_latency=True, **sizes, **more) as buffer:
            if machine.on_gpu:
                with stream:
                    rows.append(GraphBench(args, machine, buffer, num_tokens).row(num_tokens, clock))
            else:
                bench = Bench(args, machine, buffer, num_tokens)
                rows.append(Row(num_tokens, bench.one_by_one(clock), bench.host(bench.dispatch), bench.host(bench.combine)))
            ceilings[buffer.config.num_sms] = buffer.copy_ceiling() / 1e9
            sms = buffer.config.low_latency_sms
    if comm.rank:
        return
    kind = "BF16" if args.bf16 else "FP8"
    kind += "" if args.ranks_per_node is None else f", nodes of {args.ranks_per_node}"
    title = f"{comm.size} x {machine.name()}, hidden {args.hidden}, top-{args.topk} of {args.experts}, {kind} dispatch, {sms} SMs"
    print_table(rows, title, peers(args.compare))
    if args.json:
        settings = {
            **machine.described(),
            "boundary": BOUNDARY,
            "low_latency_sms": sms,
            "settings": {name: value for name, value in vars(args).items() if name not in ("json", "compare", "commit")},
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report.document(rows, ceilings, settings, args.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
