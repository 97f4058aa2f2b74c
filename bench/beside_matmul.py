"""Measure calls beside a large matrix product on another stream, and each of them alone.

    mpirun -n 2 python bench/beside_matmul.py --json bench/results/NAME.json
    mpirun -n 2 python bench/beside_matmul.py --buffers 2     # two micro-batches: two Buffers on two streams

`dispatch` repeats a handle, BF16. `both` is that dispatch and a combine. `low_latency` is a step of FP8 dispatch and BF16 combine in a CUDA
graph of 10 steps. With two Buffers each makes these calls on a stream of its own, and a time is that of one call of each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    import numpy as np
    from mpi4py import MPI
    from side_by_side import Load
    from side_by_side import run as run_side_by_side

    from deepep_rt.bench import low_latency, program
    from deepep_rt.bench.machine import Machine
    from deepep_rt.bench.report import markdown_table
    from deepep_rt.bench.results import BYTE_FORMULA, provenance, row_bytes
    from deepep_rt.buffer import Buffer
    from deepep_rt.errors import EPConfigError, EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WORKS = ("dispatch", "combine", "both", "low_latency")
_ROWS_OF_WORK = {
    "dispatch": ("dispatch_bf16",),
    "combine": ("combine_bf16",),
    "both": ("dispatch_bf16", "combine_bf16"),
    "low_latency": ("dispatch_fp8", "combine_bf16"),
}
_DOUBLINGS = 6  # of the units of a run in which no unit of a load counts
_CHAIN = 10  # steps in a graph: the launch of a graph takes the host as long as a step
_COLUMNS = (
    *("work", "Buffers", "SMs", "MB", "alone us", "beside us", "slower by %", "GB/s beside"),
    *("product alone us", "product beside us", "product slower by %"),
)
_BOUNDARY = {
    "cuda": "CUDA events between calls and between products, mean of those that ran while all streams had work; slowest rank of each "
    "repeat; median of the repeats",
    "host": "wall clock between calls and between products, mean of those that ran while all had work, products in a thread; slowest rank "
    "of each repeat; median of the repeats",
}


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        tokens: Tokens of each rank in dispatch and combine.
        low_latency_tokens: Tokens of each rank in low-latency calls.
        sms: Numbers of SMs of a call.
        matrix: Rows and columns of the square matrices.
        buffers: Buffers that make calls at the same time, each on a stream of its own: 1 or 2.
        leave_sms: Let the product leave the SMs free that the calls occupy. Only on GPUs.
        normal_priority: Give the streams of calls the priority of the product's stream, instead of a higher one.
        window_ms: Milliseconds that a run takes at least, if nothing slows it down.
        repeats: Runs. The result is their median.
    """

    tokens: int = 4096
    low_latency_tokens: int = 128
    sms: tuple[int, ...] = (8, 16, 24)
    matrix: int = 8192
    buffers: int = 1
    leave_sms: bool = False
    normal_priority: bool = False
    window_ms: float = 100.0
    repeats: int = 7

    def __post_init__(self) -> None:
        if self.buffers not in (1, 2):
            raise EPConfigError(f"--buffers={self.buffers}; expected 1 or 2. Pass one of them")
        if self.leave_sms and self.backend == "host":
            raise EPConfigError("--leave-sms with --backend=host; expected GPUs. Leave one of them out")
        if self.quick:
            self.window_ms, self.repeats = 10.0, 2


@dataclass(frozen=True)
class Row:
    """Times of calls and of the product, in microseconds. `bytes` are those that a rank receives in a call, `remote_bytes` from others."""

    work: str
    buffers: int
    tokens: int
    sms: int
    bytes: float
    remote_bytes: float
    alone_us: float
    beside_us: float
    matmul_alone_us: float
    matmul_beside_us: float


def slower_percent(alone: float, beside: float) -> float:
    """Return by how many percent of the time alone something takes longer."""
    return 100 * (beside / alone - 1)


class Bench:
    """The product and the clock of one rank.

    Raises:
        EPUnavailableError: on all ranks, if a rank on GPUs has no PyTorch with CUDA.
    """

    def __init__(self, comm: Intracomm, settings: Settings, machine: Machine) -> None:
        self.comm, self.settings, self.machine = comm, settings, machine
        self.rng = np.random.default_rng([settings.seed, comm.rank])
        self.product = Load(
            product_on_gpu(comm, settings.matrix) if machine.on_gpu else product_on_host(settings.matrix), None, self._stream()
        )
        # The streams of the Buffers. They live longer than all memory that was used on them.
        self.streams = [self._stream(0 if settings.normal_priority else -1) for _ in range(settings.buffers)]
        self.product_alone = self.alone([self.product])

    def _stream(self, priority: int = 0) -> Any:
        if not self.machine.on_gpu:
            return None
        import cupy

        return cupy.cuda.Stream(non_blocking=True, priority=priority)

    def timed(self, loads: list[Load]) -> list[float]:
        """Return the seconds of a unit of each load, of the slowest rank.

        A run may be too short: no unit of a load counts if a busy machine does not begin and end one in time. All ranks then repeat the
        run with twice the units.

        Raises:
            EPConfigError: if no unit counts after `_DOUBLINGS` such repetitions.
        """
        slowest: list[np.ndarray] = []
        doublings = 0
        while len(slowest) < self.settings.repeats:
            self.comm.Barrier()
            seconds = np.empty(len(loads))
            self.comm.Allreduce(np.array(run_side_by_side(loads)), seconds, MPI.MAX)
            if np.isfinite(seconds).all():
                slowest.append(seconds)
                continue
            if doublings == _DOUBLINGS:
                units = [load.units for load in loads if load.units]
                raise EPConfigError(
                    f"loads ran with {units} units, and no unit of one of them began and ended while all ran; expected one. "
                    f"Pass a larger --window-ms"
                )
            doublings += 1
            for load in loads:
                load.units = load.units and 2 * load.units
        return np.median(slowest, axis=0).tolist()

    def alone(self, loads: list[Load]) -> float:
        """Find how many units take `window_ms`, for these loads at once. Return the seconds of a unit."""
        units = 4
        for _ in range(2):
            for load in loads:
                load.units = units
            seconds = max(self.timed(loads))
            units = max(8, math.ceil(1e-3 * self.settings.window_ms / seconds))
        return seconds

    def row(self, work: str, tokens: int, sms: int, topk_idx: np.ndarray, loads: list[Load]) -> Row:
        """Measure calls alone, and then beside the product."""
        settings, comm = self.settings, self.comm
        alone = self.alone(loads)
        self.product.units = None
        product, *beside = self.timed([self.product, *loads])
        rows = num_sent_rows(topk_idx, settings.experts // comm.size, comm.size)
        received = comm.allreduce(rows) / comm.size
        remote = comm.allreduce(rows - num_sent_rows(topk_idx, settings.experts // comm.size, comm.size, comm.rank)) / comm.size
        each = sum(row_bytes(part, settings.hidden) for part in _ROWS_OF_WORK[work])
        steps = _CHAIN if work == "low_latency" and self.machine.on_gpu else 1
        us = [1e6 * seconds for seconds in (alone / steps, max(beside) / steps, self.product_alone, product)]
        return Row(work, settings.buffers, tokens, sms, received * each, remote * each, *us)


def num_sent_rows(topk_idx: np.ndarray, num_local_experts: int, num_ranks: int, only: int | None = None) -> int:
    """Count the rows of tokens: each token once for each rank that has one of its experts. `only` counts the rows to one rank."""
    ranks = topk_idx // num_local_experts
    return sum(int((ranks == rank).any(axis=1).sum()) for rank in (range(num_ranks) if only is None else [only]))


# --- the product ---------------------------------------------------------------------------------------------------------------------


def product_on_gpu(comm: Intracomm, size: int) -> Callable[[], Any]:
    """Return a product of square BF16 matrices, which PyTorch queues on the current stream of CuPy. Collective.

    Raises:
        EPUnavailableError: on all ranks, if a rank has no PyTorch with CUDA.
    """
    reason = ""
    try:
        import torch

        if not torch.cuda.is_available():
            reason = f"torch {torch.__version__} finds no GPU"
    except ImportError as error:
        reason = f"torch cannot be imported ({error})"
    if reason := next(filter(None, comm.allgather(reason)), ""):
        raise EPUnavailableError(f"{reason}; expected PyTorch with CUDA for the matrix product. Install it")
    import cupy

    torch.cuda.set_device(cupy.cuda.Device().id)
    left, right, out = (
        torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(3)
    )  # zeros would take less power, and so run faster

    def multiply() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.mm(left, right, out=out)

    multiply()
    torch.cuda.synchronize()
    return multiply


def leave_sms(num_sms: int) -> None:
    """Let later products of this process leave SMs to other kernels; 0: none. PyTorch's interface for it is experimental.

    Only its calls of cuBLASLt pass the number on.

    Raises:
        EPUnavailableError: if this PyTorch has none.
    """
    import torch

    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if set_carveout is None:
        raise EPUnavailableError(
            f"torch {torch.__version__} cannot leave SMs to other kernels; expected 2.7 or newer. Install it, or leave out --leave-sms"
        )
    torch.backends.cuda.preferred_blas_library("cublaslt" if num_sms else "default")
    set_carveout(num_sms or None)


def product_on_host(size: int) -> Callable[[], Any]:
    """Return a product of int32 matrices. NumPy makes it in one thread, and would take all cores of the ranks for floats."""
    left, right, out = (np.ones((size, size), np.int32) for _ in range(3))
    return lambda: np.matmul(left, right, out=out)


# --- the calls -----------------------------------------------------------------------------------------------------------------------


def _chosen(bench: Bench, num_tokens: int) -> np.ndarray:
    settings = bench.settings
    scores = bench.rng.random((num_tokens, settings.experts), dtype=np.float32)
    return np.ascontiguousarray(scores.argpartition(settings.topk, axis=1)[:, : settings.topk], np.int64)


def _throughput_rows(bench: Bench, sms: int, step: Callable[[str], None]) -> Iterator[Row]:
    settings = bench.settings
    topk_idx = _chosen(bench, settings.tokens)
    with contextlib.ExitStack() as buffers:
        calls: dict[str, list[Load]] = {work: [] for work in WORKS[:3]}
        for stream in bench.streams:
            sizes: dict[str, Any] = dict(hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts)
            sizes |= dict(num_max_tokens_per_rank=settings.tokens, num_sms=sms, backend=settings.backend)
            buffer = buffers.enter_context(Buffer(bench.comm, **sizes))
            for work, call in _throughput_calls(bench, buffer, topk_idx, stream).items():
                calls[work].append(Load(call, 0, stream))
        for work, loads in calls.items():
            step(f"{work}, {sms} SMs")
            yield bench.row(work, settings.tokens, sms, topk_idx, loads)


def _throughput_calls(bench: Bench, buffer: Buffer, topk_idx: np.ndarray, stream: Any) -> dict[str, Callable[[], Any]]:
    machine, settings = bench.machine, bench.settings
    with stream or contextlib.nullcontext():
        x = machine.bf16(bench.rng, settings.tokens, settings.hidden)
        handle = buffer.dispatch(x, machine.upload(topk_idx)).handle
        y = machine.bf16(bench.rng, handle.num_recv_rows, settings.hidden)
    held: dict[str, Any] = {}  # as in a program, a result lives until the next call has returned

    def dispatch() -> None:
        held["dispatch"] = buffer.dispatch(x, handle=handle)

    def combine() -> None:
        held["combine"] = buffer.combine(y, handle)

    def both() -> None:
        dispatch()
        combine()

    return {"dispatch": dispatch, "combine": combine, "both": both}


def _low_latency_row(bench: Bench, sms: int, step: Callable[[str], None]) -> Row:
    settings, machine, comm = bench.settings, bench.machine, bench.comm
    sizes: dict[str, Any] = dict(hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts)
    sizes |= dict(low_latency=True, low_latency_sms=sms, backend=settings.backend)
    made = low_latency.Settings(
        **{name: getattr(settings, name) for name in ("backend", "hidden", "topk", "experts", "seed")}, sms=sms
    )
    step(f"low_latency, {sms} SMs")
    with contextlib.ExitStack() as resources:
        # All Buffers come first: a graph that was captured while its Buffer was alone has launches that overlap.
        streams, num_tokens = bench.streams, settings.low_latency_tokens
        buffers = [resources.enter_context(Buffer(comm, num_max_tokens_per_rank=num_tokens, **sizes)) for _ in streams]
        loads = []
        for buffer, stream in zip(buffers, streams, strict=True):
            with stream or contextlib.nullcontext():
                calls = low_latency.bench_type(machine.on_gpu)(comm, made, machine, buffer, num_tokens)
                queue: Callable[[], Any] = calls.both
                if isinstance(calls, low_latency.GraphBench):
                    graph, results = calls.capture(calls.both, _CHAIN)
                    resources.callback(results.clear)
                    queue = graph.launch
            resources.callback(buffer.synchronize)  # before the results of the graph go
            loads.append(Load(queue, 0, stream))
        return bench.row("low_latency", num_tokens, sms, machine.download(calls.idx), loads)


def run(comm: Intracomm, settings: Settings, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Arguments and result as in `throughput.run`."""
    machine = Machine(comm, settings.backend)
    bench = Bench(comm, settings, machine)
    rows: list[Row] = []
    for sms in settings.sms:
        if settings.leave_sms:
            leave_sms(sms * settings.buffers)
        rows += _throughput_rows(bench, sms, step)
        rows.append(_low_latency_row(bench, sms, step))
    if settings.leave_sms:
        leave_sms(0)
    if comm.rank:
        return None
    described = {**machine.described(), **settings.described(_BOUNDARY[settings.backend]), "byte_formula": BYTE_FORMULA}
    return {**provenance(settings.commit), **described, "rows": [asdict(row) for row in rows]}


def markdown(result: Mapping[str, Any]) -> str:
    """Write the table, and a line about the machine and the measurement."""
    settings, lines = result["settings"], []
    for row in result["rows"]:
        alone, beside, product, product_beside = (
            row[name] for name in ("alone_us", "beside_us", "matmul_alone_us", "matmul_beside_us")
        )
        gb_s = row["bytes"] * row["buffers"] / beside / 1e3
        lines.append(
            [
                *(row["work"], row["buffers"], row["sms"], f"{row['bytes'] / 1e6:.4g}", f"{alone:.1f}", f"{beside:.1f}"),
                *(f"{slower_percent(alone, beside):.1f}", f"{gb_s:.4g}", f"{product:.0f}", f"{product_beside:.0f}"),
                f"{slower_percent(product, product_beside):.1f}",
            ]
        )
    left = ", which leaves the SMs of the calls free" if settings["leave_sms"] else ""
    text = (
        f"Calls beside a product of {settings['matrix']} x {settings['matrix']} matrices{left}: {result['num_ranks']} ranks, "
        f"{result['machine']}, hidden {settings['hidden']}, top-{settings['topk']} of {settings['experts']}, {settings['tokens']} tokens, "
        f"{settings['low_latency_tokens']} in low latency. MB: {result['byte_formula']}. {result['boundary']}. {result['date']}."
    )
    return f"{text}\n\n{markdown_table(_COLUMNS, lines)}\n"


def main() -> None:
    """Run the program."""
    parser = program.parser(__doc__, compares=False)
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="tokens of each rank")
    parser.add_argument(
        "--low-latency-tokens", type=int, default=Settings.low_latency_tokens, help="the same in low-latency calls"
    )
    parser.add_argument("--sms", type=program.numbers, default=Settings.sms, help="numbers of SMs to try, such as 8,16,24")
    parser.add_argument("--matrix", type=int, default=Settings.matrix, help="rows and columns of the matrices")
    parser.add_argument("--buffers", type=int, default=Settings.buffers, help="2: two Buffers on two streams")
    parser.add_argument("--leave-sms", action="store_true", help="let the product leave the SMs free that the calls occupy")
    parser.add_argument(
        "--normal-priority", action="store_true", help="of the streams of calls; default: higher than the product's"
    )
    parser.add_argument("--window-ms", type=float, default=Settings.window_ms, help="the least time of a run")
    parser.add_argument("--repeats", type=int, default=Settings.repeats, help="runs; their median counts")
    program.run_program(MPI.COMM_WORLD, parser.parse_args(), Settings, run, lambda result, _: print(markdown(result), end=""))


if __name__ == "__main__":
    main()
