"""Measure where the host spends the time of a call: each step in Python, and each request to the CUDA driver.

    python bench/host_path.py                      # one GPU, CuPy's arrays
    python bench/host_path.py --arrays torch

The table has the microseconds of a step, and in parentheses how often a call takes it. A step does not include the steps inside of it.
Rows that begin with `cu` are requests to the driver, through its bindings. `rest` is what no step covers: the methods themselves, and their
results. The destruction of events is in the step that drops them. With a new routing, the host also waits for the GPU ("wait for counts").
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from deepep_rt._install import or_exit

with or_exit("this benchmark", "bench"):
    import numpy as np
    from mpi4py import MPI
    from stages import Stages, wrapper_costs

    from deepep_rt import buffer as buffer_module
    from deepep_rt.backends import call_forms, call_lock, inputs
    from deepep_rt.backends.cuda import forms, low_latency, monitor, result_memory, stream_order, throughput
    from deepep_rt.bench import program
    from deepep_rt.bench.machine import Machine
    from deepep_rt.bench.report import markdown_table
    from deepep_rt.bench.results import provenance, python_build
    from deepep_rt.buffer import Buffer
    from deepep_rt.cuda import driver, slots
    from deepep_rt.errors import EPUnavailableError
    from deepep_rt.jit import launch

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

REST, VIEWS, CHECKS, LAUNCH, MEMORY = "rest", "view of an array", "checks of arguments", "launch", "memory"
ORDER, LOOK, FORM = "order by stream", "look for a form", "known form"
FUNCTIONS: list[tuple[str, Any, str]] = [
    *(("lock and context", call_lock.CallLock, name) for name in ("__enter__", "__exit__")),
    ("stream of the call", buffer_module, "begin_call"),
    *((CHECKS, buffer_module, f"{layout}{name}_inputs") for layout in ("low_latency_", "") for name in ("dispatch", "combine")),
    (VIEWS, inputs, "as_view"),
    *((ORDER, stream_order.CallOrder, name) for name in ("enqueue_waits", "record_end", "record_prepared_end", "event")),
    *((MEMORY, slots.Slots, name) for name in ("acquire", "release")),
    *((MEMORY, result_memory.ResultMemory, name) for name in ("reserve", "keep", "allocate_sums")),
    *(("parameters", low_latency.LowLatencyKernels, f"{name}_params") for name in ("dispatch", "combine")),
    ("parameters", throughput.RowMover, "dispatch_launch"),
    ("parameters", throughput.RowMover, "combine_launch"),
    (LOOK, call_forms.CallForms, "repeat"),
    *((FORM, kind, "__call__") for kind in forms.FORMS),
    *((LAUNCH, launch.Launcher, name) for name in ("__call__", "launch")),
    (LAUNCH, launch.PreparedLaunch, "__call__"),
    *(("reports of kernels", monitor.Monitor, name) for name in ("check_peers", "check_inputs")),
    ("wait for counts", monitor.Monitor, "await_counts"),
]
"""Name of a step, class or module, and function."""
BINDINGS: list[tuple[Any, str]] = [(driver, "driver"), (launch, "driver")]
_CALLS_IN_A_ROW = 10  # then the host waits, so that the GPU keeps up


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        arrays: "cupy" or "torch". The host backend takes NumPy's.
        tokens: Tokens of each rank.
        calls: Calls in a round.
        rounds: Rounds. The fastest counts.
    """

    experts: int = 64
    arrays: str = "cupy"
    tokens: int = 32
    calls: int = 200
    rounds: int = 40

    def __post_init__(self) -> None:
        if self.quick:
            self.calls, self.rounds = 20, 2


@dataclass
class Arrays:
    """Arguments of calls, in the library of the caller."""

    x: Any  # [num_tokens, hidden] bfloat16
    topk_idx: Any
    topk_weights: Any
    low_latency_y: Any  # [num_local_experts, num_ranks * num_max_tokens_per_rank, hidden] bfloat16
    y: Any  # [num_worst_tokens, hidden] bfloat16


@dataclass(frozen=True)
class Row:
    """A kind of call: its microseconds without and with the wrappers, and microseconds and number of each step in a call."""

    call: str
    us: float
    wrapped_us: float
    steps: dict[str, tuple[float, float]]


def make_calls(buffer: Buffer, arrays: Arrays) -> dict[str, Callable[[], Any]]:
    """Return the kinds of calls. Results live until the next call of the kind, as in a program."""
    x, idx, weights = arrays.x, arrays.topk_idx, arrays.topk_weights
    held: dict[str, Any] = {}
    sent = buffer.dispatch(x, idx, weights, num_worst_tokens=arrays.y.shape[0]).handle
    low = buffer.low_latency_dispatch(x, idx, topk_weights=weights).handle
    prepared = buffer.prepare_low_latency(x, idx, weights)
    prepared.dispatch()  # its combines follow it
    calls: dict[str, Callable[[], Any]] = {
        "low-latency dispatch": lambda: buffer.low_latency_dispatch(x, idx, topk_weights=weights),
        "low-latency combine": lambda: buffer.low_latency_combine(arrays.low_latency_y, idx, weights, low),
        "prepared dispatch": prepared.dispatch,
        "prepared combine": lambda: prepared.combine(arrays.low_latency_y),
        "dispatch, new routing": lambda: buffer.dispatch(x, idx, weights),
        "dispatch, known routing": lambda: buffer.dispatch(x, handle=sent),
        "combine": lambda: buffer.combine(arrays.y, sent),
        "dispatch, async_finish": lambda: buffer.dispatch(x, handle=sent, async_finish=True),
    }

    def holding(name: str, call: Callable[[], Any]) -> Callable[[], None]:
        def make() -> None:
            held[name] = call()

        return make

    return {name: holding(name, call) for name, call in calls.items()}


def measure(buffer: Buffer, arrays: Arrays, num_calls: int, num_rounds: int, wait: Callable[[], Any]) -> list[Row]:
    """Measure all kinds of calls of a Buffer with `low_latency=True`. `wait` waits for the GPU."""

    def round_ns(call: Callable[[], Any]) -> int:
        """Make a round of calls. Return their nanoseconds."""
        spent = 0
        for i in range(num_calls):
            begin = perf_counter_ns()
            call()
            spent += perf_counter_ns() - begin
            if i % _CALLS_IN_A_ROW == _CALLS_IN_A_ROW - 1:
                wait()
        wait()
        return spent

    plain = make_calls(buffer, arrays)
    costs, stages, rows = wrapper_costs(), Stages(), []
    with _without_garbage_collection():
        for name, call in plain.items():  # with and without wrappers one after the other, because processors change their speed
            plain_ns = min(round_ns(call) for _ in range(num_rounds))
            with stages.installed(FUNCTIONS, BINDINGS):
                wrapped = stages.wrap(REST, make_calls(buffer, arrays)[name])  # anew, because prepared calls keep functions
                round_ns(wrapped)
                best_ns, steps = math.inf, {}
                for _ in range(num_rounds):
                    stages.reset()
                    if (ns := round_ns(wrapped)) < best_ns:
                        best_ns, steps = ns, stages.corrected(costs, plain_ns)
            each = {step: (ns / num_calls / 1e3, count / num_calls) for step, (ns, count) in steps.items()}
            rows.append(Row(name, plain_ns / num_calls / 1e3, best_ns / num_calls / 1e3, each))
    return rows


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the collector out of the measurements: wrappers would make it run more often."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(comm: Intracomm, settings: Settings) -> dict[str, Any] | None:
    """Measure on each rank. Return the result for JSON on rank 0, None on the others.

    Raises:
        EPUnavailableError: if the library of the arrays is missing, or has no GPU.
    """
    machine = Machine(comm, settings.backend)
    sizes: dict[str, Any] = dict(hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts)
    with Buffer(
        comm, num_max_tokens_per_rank=max(settings.tokens, 8), **sizes, low_latency=True, backend=settings.backend
    ) as buffer:
        arrays = make_arrays(buffer, machine, settings)
        rows = measure(buffer, arrays, settings.calls, settings.rounds, buffer.synchronize)
        del arrays
    if comm.rank:
        return None
    described = {**machine.described(), **settings.described("clock of the host in rows of ten calls; rank 0; fastest round")}
    if not machine.on_gpu:
        described["settings"]["arrays"] = "numpy"
    return {**provenance(settings.commit), **described, **python_build(), "rows": [asdict(row) for row in rows]}


def make_arrays(buffer: Buffer, machine: Machine, settings: Settings) -> Arrays:
    """Make arguments with random rows and routing, in the library that the settings name."""
    config, rng, num_tokens = buffer.config, np.random.default_rng(settings.seed), settings.tokens
    scores = rng.random((num_tokens, settings.experts), dtype=np.float32)
    idx = np.ascontiguousarray(scores.argpartition(settings.topk, axis=1)[:, : settings.topk], np.int64)
    local_rows = config.num_local_experts * config.worst_recv_tokens
    made = Arrays(
        machine.bf16(rng, num_tokens, settings.hidden),
        machine.upload(idx),
        machine.upload(rng.random(idx.shape, dtype=np.float32)),
        machine.bf16(rng, local_rows, settings.hidden).reshape(config.num_local_experts, -1, settings.hidden),
        machine.bf16(rng, config.num_ranks * num_tokens, settings.hidden),
    )
    if settings.backend == "cuda" and settings.arrays == "torch":
        made = Arrays(*(_as_tensor(array) for array in vars(made).values()))
    return made


def _as_tensor(array: Any) -> Any:
    """Copy an array of CuPy to a tensor of PyTorch. Bytes travel, because CuPy's DLPack has no bfloat16."""
    try:
        import torch
    except ImportError as error:
        raise EPUnavailableError(
            f"--arrays=torch: torch cannot be imported ({error}). Install it, or pass --arrays cupy"
        ) from None
    same_size = {"bfloat16": torch.bfloat16, "int64": torch.int64, "float32": torch.float32}[array.dtype.name]
    return torch.from_dlpack(array.view(f"i{array.dtype.itemsize}")).clone().view(same_size)


def markdown(rows: list[Mapping[str, Any]]) -> str:
    """Write the table: a row for each step, a column for each kind of call."""
    names = {name: None for row in rows for name in row["steps"] if name != REST}
    steps = [*(name for name in names if not name.startswith("cu")), REST, *(name for name in names if name.startswith("cu"))]

    def cell(row: Mapping[str, Any], step: str) -> str:
        us, count = row["steps"].get(step, (0.0, 0.0))
        return f"{us:.2f} ({count:.3g})" if count and step != REST else f"{us:.2f}" if count else ""

    lines = [[step, *(cell(row, step) for row in rows)] for step in steps]
    requests = [sum(count for name, (_, count) in row["steps"].items() if name.startswith("cu")) for row in rows]
    lines += [
        ["sum", *(f"{row['us']:.2f}" for row in rows)],
        ["with wrappers", *(f"{row['wrapped_us']:.2f}" for row in rows)],
        ["requests to the driver", *(f"{number:.3g}" for number in requests)],
    ]
    return f"{markdown_table(['us of a call (times)', *(row['call'] for row in rows)], lines)}\n"


def show(result: Mapping[str, Any]) -> None:
    """Print the table, and a line about the machine and the measurement."""
    build = f"Python {result['python']}{'' if result['has_global_lock'] else ' without the global lock'}"
    settings = result["settings"]
    what = f"{result['machine']}, arrays of {settings['arrays']}, {settings['tokens']} tokens"
    print(f"{build}, {what}. {result['boundary']}. {result['date']}.\n")
    print(markdown(result["rows"]), end="")


def main() -> None:
    """Run the program."""
    parser = program.parser(__doc__, compares=False)
    parser.set_defaults(experts=Settings.experts)
    parser.add_argument("--arrays", choices=("cupy", "torch"), default=Settings.arrays, help="the library of the arguments")
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="tokens of each rank")
    parser.add_argument("--calls", type=int, default=Settings.calls, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=Settings.rounds, help="rounds; the fastest counts")
    program.run_program(MPI.COMM_WORLD, parser.parse_args(), Settings, run, lambda result, _: show(result))


if __name__ == "__main__":
    main()
