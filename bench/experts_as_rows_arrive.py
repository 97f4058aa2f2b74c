"""Measure a layer whose experts start while their rows arrive (`signals=True`), and the same layer in sequence.

    mpirun -n 2 python bench/experts_as_rows_arrive.py --json bench/results/NAME.json

A layer is a dispatch by expert with a new routing, two grouped products with SwiGLU in between, and a weighted combine. Both layers have
the same kernels: the first product is `deepep_rt.torch.grouped_product`, the second one PyTorch's `grouped_mm`. They take turns. Before
anything is measured, their results are compared bit for bit. It needs GPUs, and PyTorch with Triton.

"fixed" are the same layers with `num_worst_tokens`, a tenth more than the most rows of a rank. There the host does not wait for counts.

With `--traces FOLDER` it writes a trace of both layers for each rank, which `examples/trace_picture.py` draws, to a folder for each row of
the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    import numpy as np
    import torch
    from mpi4py import MPI
    from torch.profiler import ProfilerActivity, profile, record_function

    from deepep_rt.backends.inputs import most_recv_rows
    from deepep_rt.bench import program
    from deepep_rt.bench.machine import Machine
    from deepep_rt.bench.report import markdown_table
    from deepep_rt.bench.results import provenance
    from deepep_rt.buffer import Buffer
    from deepep_rt.errors import EPError, EPUnavailableError
    from deepep_rt.torch import grouped_mlp, grouped_product
    from deepep_rt.torch.grouped import has_kernel, swiglu

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_BOUNDARY = "CUDA events around layers that follow each other, mean of these; slowest rank of each repeat; median of the repeats"
_COLUMNS = (
    "rows",
    "tokens",
    "SMs",
    "dispatch us",
    "product us",
    "rest us",
    "sequence us",
    "as rows arrive us",
    "less by %",
    "fixed: sequence us",
    "as rows arrive us",
    "less by %",
)
_ROOM = 1.1  # rows of `num_worst_tokens`, as a part of the most rows of a rank
_ALIGNMENT = 128
_WARM_UP = 3  # layers before one that is traced


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        tokens: Tokens of each rank.
        intermediate: Channels between the products, after SwiGLU.
        sms: SMs of dispatch and combine.
        rows: The type of the rows on their way: bf16, fp8.
        layers: Layers of a run.
        repeats: Runs. The result is their median.
        traces: The folder for traces of both layers, in a folder for each row of the table. Empty: none.
    """

    tokens: tuple[int, ...] = (4096, 8192)
    intermediate: int = 2048
    sms: tuple[int, ...] = (24, 48)
    rows: tuple[str, ...] = ("bf16", "fp8")
    layers: int = 10
    repeats: int = 7
    traces: str = ""

    def __post_init__(self) -> None:
        if self.quick:
            self.layers, self.repeats = 2, 2


@dataclass(frozen=True)
class Row:
    """Times in microseconds. `rest_us` are SwiGLU, the second product and combine."""

    rows: str
    tokens: int
    sms: int
    dispatch_us: float
    product_us: float
    rest_us: float
    sequence_us: float
    as_rows_arrive_us: float
    fixed_sequence_us: float
    fixed_as_rows_arrive_us: float


class Layer:
    """The inputs and weights of a rank."""

    def __init__(self, comm: Intracomm, settings: Settings, buffer: Buffer, tokens: int, rows: str) -> None:
        self._buffer, self._fp8 = buffer, rows == "fp8"
        random = torch.Generator("cuda").manual_seed(1000 * settings.seed + comm.rank)
        experts, hidden, inner = settings.experts // comm.size, settings.hidden, settings.intermediate

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

        self.x = normal(tokens, hidden)
        self.weights, self.idx = torch.rand(tokens, settings.experts, generator=random, device="cuda").topk(settings.topk)
        self.w1 = (normal(experts, 2 * inner, hidden) * hidden**-0.5).transpose(1, 2)
        self.w2 = (normal(experts, hidden, inner) * inner**-0.5).transpose(1, 2)
        if not has_kernel(self.w1, 128, 128):
            raise EPUnavailableError(
                "no product in Triton for these sizes; expected Triton, and multiples of 128. Change --hidden or --intermediate"
            )
        self.scales = None
        if self._fp8:
            self.w1 = self.w1.to(torch.float8_e4m3fn)
            self.scales = torch.rand(experts, 2 * inner // 128, hidden // 128, generator=random, device="cuda")

    def dispatch(self, signals: bool, num_rows: int | None = None) -> Any:
        options = dict(
            layout="expert", expert_alignment=_ALIGNMENT, num_worst_tokens=num_rows, use_fp8=self._fp8, signals=signals
        )
        return self._buffer.dispatch(self.x, self.idx, self.weights, **options)

    def product(self, sent: Any) -> Any:
        return grouped_product(sent, self.w1, weight_scales=self.scales)

    def rest(self, sent: Any, inner: Any) -> Any:
        y = torch.nn.functional.grouped_mm(swiglu(inner), self.w2, offs=sent.expert_offsets[1:])
        return self._buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x

    def run(self, signals: bool, num_rows: int | None = None) -> Any:
        sent = self.dispatch(signals, num_rows)
        y = grouped_mlp(sent, self.w1, self.w2, w1_scales=self.scales)
        return self._buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x


def _timed(comm: Intracomm, settings: Settings, calls: list[Callable[[], Any]]) -> list[float]:
    """Return the microseconds of each call, in turns."""
    found = np.zeros((settings.repeats, len(calls)))
    for repeat in range(settings.repeats):
        for i, call in enumerate(calls):
            torch.cuda.synchronize()
            comm.Barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            held = call()
            begin.record()
            for _ in range(settings.layers):
                held = call()
            end.record()
            torch.cuda.synchronize()
            del held
            found[repeat, i] = 1e3 * begin.elapsed_time(end) / settings.layers
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return np.median(found, axis=0).tolist()


def _row(comm: Intracomm, settings: Settings, buffer: Buffer, tokens: int, rows: str, sms: int) -> Row:
    buffer.num_sms = sms
    layer = Layer(comm, settings, buffer, tokens, rows)
    sent = layer.dispatch(signals=False)
    num_rows = round(_ROOM * comm.allreduce(sent.handle.num_recv_rows, MPI.MAX)) // _ALIGNMENT * _ALIGNMENT
    num_rows = min(num_rows, most_recv_rows(buffer.config, "expert", _ALIGNMENT))
    wanted = layer.run(signals=False)
    for signals, rows_of_call in ((True, None), (False, num_rows), (True, num_rows)):
        if not comm.allreduce(torch.equal(wanted, layer.run(signals, rows_of_call)), MPI.LAND):
            raise EPError("the layers differ; expected the same bits")
    del wanted
    inner = layer.product(sent)
    calls = [
        lambda: layer.dispatch(signals=False),
        lambda: layer.product(sent),
        lambda: layer.rest(sent, inner),
        lambda: layer.run(signals=False),
        lambda: layer.run(signals=True),
        lambda: layer.run(False, num_rows),
        lambda: layer.run(True, num_rows),
    ]
    if settings.traces:
        _write_traces(
            comm, Path(settings.traces) / f"{rows}_{tokens}_{sms}", {"in sequence": calls[-2], "as rows arrive": calls[-1]}
        )
    return Row(rows, tokens, sms, *_timed(comm, settings, calls))


def _write_traces(comm: Intracomm, folder: Path, layers: Mapping[str, Callable[[], Any]]) -> None:
    """Write a trace in which each layer is a range, for the rank of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    begins = torch.zeros(1, pin_memory=True)
    has_begun, one = begins.numpy(), torch.ones(1, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for name, layer in layers.items():
            for _ in range(_WARM_UP):
                held = layer()
            begins.copy_(one, non_blocking=True)
            held = layer()
            while not has_begun[0]:  # the GPU still has a layer to do, and ends it together with the others
                continue
            with record_function(name):
                torch.cuda.synchronize()
            del held
            begins.zero_()
            comm.Barrier()
    path = folder / f"rank{comm.rank}.json"
    trace.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    _begin_at_copies(content["traceEvents"])
    path.write_text(json.dumps(content))


def _begin_at_copies(events: list[dict[str, Any]]) -> None:
    """Let each range begin with the copy that tells the host of it, because the profiler takes 0.2 ms to begin a range."""
    copies = sorted(event["ts"] + event["dur"] for event in events if event.get("cat") == "gpu_memcpy")
    ranges = sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["ts"])
    for begin, event in zip(copies, ranges, strict=True):
        event["ts"], event["dur"] = begin, event["dur"] + event["ts"] - begin


def run(comm: Intracomm, settings: Settings, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Arguments and result as in `throughput.run`."""
    machine = Machine(comm, settings.backend)
    if not machine.on_gpu:
        raise EPUnavailableError("no GPUs; expected GPUs, on which a kernel waits for rows. Run this on a machine with GPUs")
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    found: list[Row] = []
    for tokens in settings.tokens:
        sizes = dict(hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts)
        with Buffer(comm, num_max_tokens_per_rank=tokens, **sizes) as buffer:
            for rows in settings.rows:
                for sms in settings.sms:
                    step(f"{rows}, {tokens} tokens, {sms} SMs")
                    found.append(_row(comm, settings, buffer, tokens, rows, sms))
    if comm.rank:
        return None
    return {
        **provenance(settings.commit),
        **machine.described(),
        **replace(settings, traces="").described(_BOUNDARY),  # a path tells nothing
        "rows": [asdict(row) for row in found],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Write the table, and a line about the machine and the measurement."""
    settings, lines = result["settings"], []
    for row in result["rows"]:
        line = [
            row["rows"],
            row["tokens"],
            row["sms"],
            *(f"{row[name]:.0f}" for name in ("dispatch_us", "product_us", "rest_us")),
        ]
        for fixed in ("", "fixed_"):
            sequence, arriving = row[f"{fixed}sequence_us"], row[f"{fixed}as_rows_arrive_us"]
            line += [f"{sequence:.0f}", f"{arriving:.0f}", f"{100 * (1 - arriving / sequence):.1f}"]
        lines.append(line)
    text = (
        f"Experts as rows arrive: {result['num_ranks']} ranks, {result['machine']}, hidden {settings['hidden']}, intermediate "
        f"{settings['intermediate']}, top-{settings['topk']} of {settings['experts']}. {result['boundary']}. {result['date']}."
    )
    return f"{text}\n\n{markdown_table(_COLUMNS, lines)}\n"


def main() -> None:
    """Run the program."""
    parser = program.parser(__doc__, compares=False)
    parser.add_argument("--tokens", type=program.numbers, default=Settings.tokens, help="tokens of each rank, such as 4096,8192")
    parser.add_argument("--intermediate", type=int, default=Settings.intermediate, help="channels between the products")
    parser.add_argument("--sms", type=program.numbers, default=Settings.sms, help="SMs of dispatch and combine, such as 16,24")
    parser.add_argument("--rows", type=lambda text: tuple(text.split(",")), default=Settings.rows, help="bf16, fp8, or both")
    parser.add_argument("--layers", type=int, default=Settings.layers, help="layers of a run")
    parser.add_argument("--repeats", type=int, default=Settings.repeats, help="runs; their median counts")
    parser.add_argument("--traces", default=Settings.traces, metavar="FOLDER", help="write traces of both layers there")
    program.run_program(MPI.COMM_WORLD, parser.parse_args(), Settings, run, lambda result, _: print(markdown(result), end=""))


if __name__ == "__main__":
    main()
