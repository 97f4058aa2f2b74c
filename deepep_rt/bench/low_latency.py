"""Measure low-latency dispatch and combine, with and without CUDA graphs.

    mpirun -n 8 python bench/low_latency.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

`graph`: mean of a call in a captured chain. `D quantised`: the same for dispatches of bytes that travel as they are, with a float32 scale
for each 128, as FP8 rows have. `C fp8`, `C log10`: for combines with `compress=`. `step`: time of each replay of a graph of dispatch and
combine, replayed back to back. `cold`: both in a captured chain, after a kernel that fills the caches with other data. The time of that
kernel alone is subtracted.
`prepared`: calls of `Buffer.prepare_low_latency`.
`send`, `receive`: GPU times of the two launches of a call with a hook. All rows have arrived before the hook is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..arrays.compressed_rows import COMPRESSIONS, LOW_LATENCY_CHANNELS
from ..arrays.dtypes import FP8_GROUP
from ..buffer import Buffer
from ..errors import EPUnavailableError
from ..results import LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle
from . import program, timing
from .machine import Machine
from .results import LowLatencyRow as Row
from .results import document

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BOUNDARY = {
    "cuda": "CUDA events; slowest rank of each repeat; p50 over the repeats unless p99 is said. Of the host: calls in rows of ten",
    "host": "wall clock of the host; slowest rank of each repeat; p50 over the repeats",
}

_QUEUED = 50  # replays in a GPU's queue
_SWEPT_BYTES = 128 << 20  # more than the L2 cache of a GPU holds


@dataclass(kw_only=True)
class Settings(program.NodeSettings):
    """The settings of this benchmark."""

    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of tokens of each rank
    sms: int | None = None  # `low_latency_sms`. None: the library's default
    on_timeout: str = "raise"
    bf16: bool = False  # dispatch bfloat16 rows instead of FP8
    replays: int = 1000  # steps that are timed
    chain: int = 10  # calls in a captured chain
    loops: int = 5  # of calls without a graph
    calls: int = 50  # in such a loop
    repeats: int = 30  # of the other measurements
    host_calls: int = 100  # calls for the time of the host

    def __post_init__(self) -> None:
        if self.quick:
            self.loops, self.calls, self.repeats, self.host_calls = 2, 2, 3, 5
            self.replays, self.chain = 20, 2


def num_steps(settings: Settings) -> int:
    """Count the calls of `step` in `run`."""
    return len(settings.tokens)


class Bench:
    """Inputs for one number of tokens, and the timed calls."""

    def __init__(self, comm: Intracomm, settings: Settings, machine: Machine, buffer: Buffer, num_tokens: int) -> None:
        self.comm, self.settings, self.buffer = comm, settings, buffer
        rng = np.random.default_rng([settings.seed, comm.rank, num_tokens])
        chosen = rng.random((num_tokens, settings.experts), dtype=np.float32).argpartition(settings.topk, axis=1)[
            :, : settings.topk
        ]
        self.x = machine.bf16(rng, num_tokens, settings.hidden)
        self.idx = machine.upload(np.ascontiguousarray(chosen, np.int64))
        self.weights = machine.upload(rng.random((num_tokens, settings.topk), dtype=np.float32))
        self.bytes = machine.upload(rng.integers(0, 256, (num_tokens, settings.hidden), np.uint8))
        self.scales = machine.upload(rng.random((num_tokens, -(-settings.hidden // FP8_GROUP)), dtype=np.float32))
        config = buffer.config
        rows = config.num_local_experts * config.worst_recv_tokens
        self.y = machine.bf16(rng, rows, settings.hidden).reshape(
            config.num_local_experts, config.worst_recv_tokens, settings.hidden
        )
        self.handle = self.dispatch().handle

    def dispatch(self, **options: Any) -> LowLatencyDispatchResult:
        use_fp8 = not self.settings.bf16
        return self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, use_fp8=use_fp8, **options)

    def dispatch_quantised(self) -> LowLatencyDispatchResult:
        given = dict(topk_weights=self.weights, x_scales=self.scales, use_fp8=False)
        return self.buffer.low_latency_dispatch(self.bytes, self.idx, **given)

    def combine(self, handle: LowLatencyHandle | None = None, **options: Any) -> LowLatencyCombineResult:
        return self.buffer.low_latency_combine(self.y, self.idx, self.weights, handle or self.handle, **options)

    def both(self) -> tuple[LowLatencyDispatchResult, LowLatencyCombineResult]:
        sent = self.dispatch()
        return sent, self.combine(sent.handle)

    def align(self) -> None:
        """Wait for this GPU and for all ranks, so that they start the next measurement together."""
        self.buffer.synchronize()
        self.comm.Barrier()

    def times(self, run: Callable[[], Any], repeats: int) -> np.ndarray:
        """Time repeats. Return the slowest rank of each. `run` returns the microseconds of one."""
        mine = np.array([run() for _ in range(repeats)])
        slowest = np.empty_like(mine)
        self.comm.Allreduce(mine, slowest, MPI.MAX)
        return slowest

    def host(self, call: Callable[[], Any]) -> float:
        """Return the microseconds of the host in a call.

        As in decoding, calls follow each other. After ten calls the host waits, so that the GPU keeps up.
        """
        self.align()
        spent = []
        for i in range(self.settings.host_calls):
            spent.append(timing.host_seconds(call))
            if i % 10 == 9:
                self.buffer.synchronize()
        self.buffer.synchronize()
        return 1e6 * self.comm.allreduce(float(np.median(spent)), MPI.MAX)

    def one_by_one(self, clock: timing.CudaClock | timing.WallClock, step: Callable[[], Any]) -> float:
        """Return the microseconds of a dispatch and a combine, without a graph."""

        def run() -> float:
            self.align()
            return 1e6 * clock.loop(lambda i: step(), self.settings.calls)

        return float(np.median(self.times(run, self.settings.loops)))

    def step_times(self) -> np.ndarray:
        """Return the microseconds of each step on the slowest rank."""
        self.align()
        return self.times(lambda: 1e6 * timing.host_seconds(self.both), self.settings.replays)

    def row(self, num_tokens: int, clock: timing.CudaClock | timing.WallClock) -> Row:
        return Row(num_tokens, self.one_by_one(clock, self.both), self.host(self.dispatch), self.host(self.combine))


class GraphBench(Bench):
    """Measurements that need a GPU."""

    def capture(self, call: Callable[[], Any], count: int) -> tuple[Any, list]:
        """Capture `count` calls. Return the graph and its results, which the caller keeps as long as the graph."""
        import cupy

        held = [call() for _ in range(count)]  # allocates the memory of results, which a capture cannot do
        self.align()
        del held
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        results = [call() for _ in range(count)]
        return stream.end_capture(), results

    def chain(self, call: Callable[[], Any]) -> float:
        import cupy

        count = self.settings.chain
        graph, results = self.capture(call, count)

        def run() -> float:
            self.align()
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            graph.launch()
            start.record()
            graph.launch()
            graph.launch()
            end.record()
            end.synchronize()
            return 1e3 * cupy.cuda.get_elapsed_time(start, end) / (2 * count)

        found = float(np.median(self.times(run, self.settings.repeats)))
        self.align()
        results.clear()  # after the last replay has ended
        return found

    def cold(self) -> float:
        """Time a dispatch and a combine that find nothing of theirs in the caches."""
        import cupy

        other = cupy.zeros(_SWEPT_BYTES // 4, np.float32)

        def sweep() -> None:
            cupy.add(other, 1, out=other)

        def step() -> Any:
            sweep()
            return self.both()

        return self.chain(step) - self.chain(sweep)

    def compressed_chain(self, compress: str) -> float | None:
        """Time combines with compressed rows, if this Buffer and the GPUs of all ranks can make them."""
        if self.settings.hidden % LOW_LATENCY_CHANNELS:
            return None
        try:
            self.combine(compress=compress)
        except EPUnavailableError:
            return None
        return self.chain(lambda: self.combine(compress=compress))

    def step_times(self) -> np.ndarray:
        """Return the microseconds of each replayed step on the slowest rank.

        The GPU has many replays in its queue, because a launch by the host takes as long as a step.
        """
        import cupy

        graph, results = self.capture(self.both, 1)
        spent: list[float] = []
        while len(spent) < self.settings.replays:
            events = [cupy.cuda.Event() for _ in range(min(_QUEUED, self.settings.replays - len(spent)) + 1)]
            self.align()
            with timing.queued(cupy.cuda.get_current_stream().ptr):
                for _ in range(10):
                    graph.launch()
                for event in events:
                    event.record()
                    graph.launch()
            spent += [1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in itertools.pairwise(events)]
        self.align()
        results.clear()  # after the last replay has ended
        return self.times(iter(spent).__next__, len(spent))

    def parts(self, call: Callable[..., Any]) -> list[float]:
        """Time sending and receiving separately. In between, the host waits until all ranks have sent."""
        import cupy

        def timed(part: Callable[[], Any]) -> tuple[float, Any]:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self.align()
            with timing.queued(cupy.cuda.get_current_stream().ptr):
                start.record()
                result = part()
                end.record()
            return 1e3 * cupy.cuda.get_elapsed_time(start, end), result

        def run() -> list[float]:
            sending, result = timed(lambda: call(return_recv_hook=True))
            return [sending, timed(result.hook)[0]]

        return [float(us) for us in np.median(self.times(run, self.settings.repeats), axis=0)]

    def row(self, num_tokens: int, clock: timing.CudaClock | timing.WallClock) -> Row:
        p50, p99 = np.percentile(self.step_times(), (50, 99)).tolist()
        return Row(
            num_tokens,
            self.one_by_one(clock, self.both),
            self.host(self.dispatch),
            self.host(self.combine),
            self.chain(self.dispatch),
            self.chain(self.combine),
            self.chain(self.both),
            p50,
            p99,
            *self.parts(self.dispatch),
            *self.parts(self.combine),
            *(self.compressed_chain(compress) for compress in COMPRESSIONS),
            **{
                **self.prepared(clock),
                "graph_cold_us": self.cold(),
                "graph_dispatch_quantised_us": self.chain(self.dispatch_quantised),
            },
        )

    def prepared(self, clock: timing.CudaClock | timing.WallClock) -> dict[str, float]:
        """Time prepared calls: both one after the other, and the host in each."""
        calls = self.buffer.prepare_low_latency(self.x, self.idx, self.weights, y=self.y, use_fp8=not self.settings.bf16)

        def both() -> None:
            calls.dispatch()
            calls.combine()

        return {
            "prepared_call_us": self.one_by_one(clock, both),
            "host_prepared_dispatch_us": self.host(calls.dispatch),
            "host_prepared_combine_us": self.host(calls.combine),
        }


def bench_type(on_gpu: bool) -> type[Bench]:
    """Choose the measurements of a backend."""
    return GraphBench if on_gpu else Bench


def run(comm: Intracomm, settings: Settings, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Arguments and result as in `throughput.run`."""
    machine = Machine(comm, settings.backend)
    clock = timing.clock(machine.on_gpu)
    sizes: dict[str, Any] = dict(
        hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts, backend=settings.backend
    )
    more: dict[str, Any] = {**settings.nodes, "on_timeout": settings.on_timeout}
    more |= {} if settings.sms is None else {"low_latency_sms": settings.sms}
    rows, sms = [], None
    ceilings: dict[int, dict[str, float]] = {}
    stream = timing.bench_stream(machine.on_gpu)
    for num_tokens in settings.tokens:
        step(f"low latency, {num_tokens} tokens")
        with Buffer(comm, num_max_tokens_per_rank=max(num_tokens, 128), low_latency=True, **sizes, **more) as buffer:
            with stream:
                rows.append(bench_type(machine.on_gpu)(comm, settings, machine, buffer, num_tokens).row(num_tokens, clock))
            known = ceilings.setdefault(buffer.config.num_sms, {})
            for method, rate in buffer.copy_ceilings().items():
                known[method] = max(rate, known.get(method, 0.0))
            sms = buffer.config.low_latency_sms
    described = {**machine.described(), **settings.described(BOUNDARY[settings.backend]), "low_latency_sms": sms}
    return document(rows, ceilings, described, settings.commit) if comm.rank == 0 else None


def main() -> None:
    """Run the program `bench/low_latency.py`."""
    parser = program.parser(__doc__)
    parser.add_argument("--tokens", type=program.numbers, default=Settings.tokens, help="tokens of each rank")
    parser.add_argument("--sms", type=int, default=None, help="low_latency_sms; default: the library's")
    program.add_node_options(parser)
    parser.add_argument("--on-timeout", choices=("raise", "mask"), default=Settings.on_timeout)
    parser.add_argument("--bf16", action="store_true", help="dispatch bfloat16 rows instead of FP8")
    parser.add_argument("--replays", type=int, default=Settings.replays)
    parser.add_argument("--chain", type=int, default=Settings.chain, help="calls in a captured chain")
    program.run_program(MPI.COMM_WORLD, parser.parse_args(), Settings, run)
