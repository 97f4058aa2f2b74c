"""Measure how long a process takes until it has its first Buffer, stage by stage, and further Buffers, with their kernels in the cache.

    python bench/start.py                              # one rank
    python bench/start.py --launcher "mpirun -n 4"     # a rank on each of four GPUs
    python bench/start.py --memory heap                # virtual memory of CUDA only

Each start is a fresh program, so this one runs without mpirun and gives the launcher's command to its children. A first start is not
counted: it compiles the kernels, and Python's bytecode. The times are milliseconds of rank 0, and medians over the starts. The stages of
a Buffer begin once all ranks are there. Starts with different memory take turns.

A start in stages imports all modules before it makes the Buffer, so CUDA does not start meanwhile. After each of them, a start in one
piece does what a program does.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

from deepep_rt._install import CHECKOUT, or_exit

with or_exit("this benchmark", "bench"):
    from deepep_rt import _env
    from deepep_rt.bench import program
    from deepep_rt.bench.ranks import check_writable
    from deepep_rt.bench.report import markdown_table
    from deepep_rt.bench.results import provenance, python_build, write
    from deepep_rt.errors import EPConfigError, EPError, EPUnavailableError

OURS = "from import deepep_rt to the Buffer"
"""The sum of the stages from the import of the package on."""

OURS_WITHOUT_CUDA = f"{OURS}, without the start of CUDA"
WHOLE = f"{OURS}, in one piece"

_START_OF_CUDA = "Buffer: start of CUDA"  # as start_child.py calls it
_CHILD = Path(__file__).with_name("start_child.py")
_LIMIT_S = 600  # the first start may compile all kernels


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        launcher: The command that starts ranks, such as "mpirun -n 2". Empty: one rank without a launcher.
        tokens: `num_max_tokens_per_rank`.
        low_latency: Whether the Buffer has room for low-latency calls. It loads the kernels of both modes then.
        starts: Starts that count, with each memory.
        memory: Values of DEEPEP_RT_SYMMETRIC_MEMORY. Empty on the host backend, whose ranks share no memory.
    """

    launcher: str = ""
    tokens: int = 4096
    low_latency: bool = False
    starts: int = 7
    memory: tuple[str, ...] = ("heap", "nvshmem")

    def __post_init__(self) -> None:
        if self.backend == "host":
            self.memory = ("",)
        if self.quick:
            self.starts = 1
        if self.starts < 1:
            raise EPConfigError(f"starts={self.starts}; expected 1 or more. Pass --starts 7.")

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of the Buffer."""
        return {
            "num_max_tokens_per_rank": self.tokens,
            "hidden": self.hidden,
            "num_topk": self.topk,
            "num_experts": self.experts,
            "low_latency": self.low_latency,
        }


def run(settings: Settings) -> dict[str, Any]:
    """Start the program several times, and return the result for JSON.

    Raises:
        EPConfigError: if a launcher has started this process.
        EPUnavailableError: if a start fails. The error has what it printed.
    """
    if launch := _env.launch():
        raise EPConfigError(
            f"{launch.launcher} started this process; expected none, because each start has ranks of its own. Run python bench/start.py "
            f'--launcher "mpirun -n {launch.size}"'
        )
    for memory in settings.memory:
        start_once(settings, memory, is_counted=False)
    turns = [
        {memory: start_once(settings, memory) | start_once(settings, memory, in_stages=False) for memory in settings.memory}
        for _ in range(settings.starts)
    ]
    rows = [row for memory in settings.memory for row in rows_of(memory, [turn[memory] for turn in turns])]
    first = turns[0][settings.memory[0]]
    boundary = "clock of the host; rank 0; median of fresh processes"
    return {
        **provenance(settings.commit),
        **settings.described(boundary),
        **python_build(),
        "machine": first["gpu"] or f"{os.cpu_count()} processors",
        "num_ranks": first["num_ranks"],
        "rows": rows,
    }


def rows_of(memory: str, starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarise starts with one memory: the stages of the first Buffer, their sums, and the further Buffers."""
    ms = [dict(start["ms"]) for start in starts]
    for stages in ms:
        ours = ours_ms(stages)
        stages[OURS], stages[OURS_WITHOUT_CUDA] = ours, ours - stages.get(_START_OF_CUDA, 0.0)
    ms = [stages | {WHOLE: start["whole_ms"]} | start["later_ms"] for stages, start in zip(ms, starts, strict=True)]
    return [{"stage": stage, "memory": memory, **_summary([stages[stage] for stages in ms])} for stage in ms[0]]


def start_once(settings: Settings, memory: str, *, is_counted: bool = True, in_stages: bool = True) -> dict[str, Any]:
    """Start the program once. Return milliseconds of the stages as `ms` and of further Buffers as `later_ms`, `gpu` and `num_ranks`.

    A start that is not `in_stages` returns only the milliseconds of all of them, as `whole_ms`.

    Args:
        settings: The launcher and the sizes.
        memory: A value of DEEPEP_RT_SYMMETRIC_MEMORY; empty: none.
        is_counted: Whether a kernel that is not in the cache is an error.
        in_stages: See above.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launcher, child = shlex.split(settings.launcher), str(_CHILD)
        words = [sys.executable, child, str(monotonic_ns()), str(path), settings.backend, json.dumps(settings.sizes)]
        words += [] if in_stages else ["--whole"]
        done = subprocess.run(
            [*launcher, *words],
            env=environment(is_counted, memory),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode or not path.exists():
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise EPUnavailableError(
                f"{shlex.join([*launcher, sys.executable, child])} ended with status {done.returncode}; expected a Buffer. See what it "
                f"printed, and pass --backend host where there is no GPU:\n{said}"
            )
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def environment(is_cached: bool, memory: str) -> dict[str, str]:
    """Return the environment of a start: it imports this package, and Python keeps its bytecode.

    Args:
        memory: A value of DEEPEP_RT_SYMMETRIC_MEMORY; empty: none.
        is_cached: Whether a kernel that is not in the cache is an error there.
    """
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))}
    if is_cached:
        changes["DEEPEP_RT_ASSERT_CACHED"] = "1"
    if memory:
        changes["DEEPEP_RT_SYMMETRIC_MEMORY"] = memory
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | changes


def ours_ms(stages: Mapping[str, float]) -> float:
    """Return the milliseconds from the import of the package to the end of the Buffer."""
    names = list(stages)
    return sum(stages[name] for name in names[names.index("import deepep_rt") :])


def _summary(ms: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(ms), "fastest_ms": min(ms)}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table: a row for each stage, with columns for each memory. Stages of the Buffer that did not occur have no row."""
    columns = list(dict.fromkeys(row["memory"] for row in rows))
    found = {(row["stage"], row["memory"]): row for row in rows}
    lines = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        cells = [found.get((stage, memory)) for memory in columns]
        if stage.startswith("Buffer") and not any(cell and cell["median_ms"] for cell in cells):
            continue
        lines.append([stage, *(f"{cell[name]:.1f}" if cell else "-" for cell in cells for name in ("median_ms", "fastest_ms"))])
    heads = [f"{memory} {name}".strip() for memory in columns for name in ("median", "fastest")]
    return f"{markdown_table(['ms of a start', *heads], lines)}\n"


def show(result: Mapping[str, Any]) -> None:
    """Print the table, and a line about the machine and the measurement."""
    settings = result["settings"]
    modes = "both modes" if settings["low_latency"] else "throughput mode"
    what = f"{result['machine']}, {result['num_ranks']} ranks, {settings['tokens']} tokens, {modes}"
    print(f"Python {result['python']}, {what}. {settings['starts']} starts; {result['boundary']}. {result['date']}.\n")
    print(markdown(result["rows"]), end="")


def main() -> None:
    """Run the program."""
    parser = program.parser(__doc__, compares=False)
    parser.add_argument("--launcher", default=Settings.launcher, help='the command that starts ranks, such as "mpirun -n 2"')
    parser.add_argument("--tokens", type=int, default=Settings.tokens, help="num_max_tokens_per_rank")
    parser.add_argument("--low-latency", action="store_true", help="a Buffer for both modes")
    parser.add_argument("--starts", type=int, default=Settings.starts, help="starts that count")
    parser.add_argument(
        "--memory", nargs="+", choices=("heap", "nvshmem", "auto"), default=Settings.memory, help="of the GPUs of a host"
    )
    args = vars(parser.parse_args())
    args["memory"] = tuple(args["memory"])
    path = args.pop("json")
    del args["compare"]
    try:
        if path:
            check_writable(None, path, "--json", is_file=True)
        result = run(Settings(**args))
    except EPError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    show(result)
    if path:
        write(path, result)


if __name__ == "__main__":
    main()
