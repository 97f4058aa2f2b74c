"""Measure how long a process takes until it has its first Buffer, stage by stage, with its kernels in the cache.

    python bench/start.py                              # one rank
    python bench/start.py --launcher "mpirun -n 2"     # a rank on each of two GPUs

Each start is a fresh program, so this one runs without mpirun and gives the launcher's command to its children. A first start is not
counted: it compiles the kernels, and Python's bytecode. The times are milliseconds of rank 0, and medians over the starts. The stages of
the Buffer begin once all ranks are there.
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
"""The last row: the sum of the stages from the import of the package on."""

_CHILD = Path(__file__).with_name("start_child.py")
_LIMIT_S = 600  # the first start may compile all kernels


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        launcher: The command that starts ranks, such as "mpirun -n 2". Empty: one rank without a launcher.
        tokens: `num_max_tokens_per_rank`.
        low_latency: Whether the Buffer has room for low-latency calls. It loads the kernels of both modes then.
        starts: Starts that count.
    """

    launcher: str = ""
    tokens: int = 4096
    low_latency: bool = False
    starts: int = 7

    def __post_init__(self) -> None:
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
    start_once(settings, is_counted=False)
    starts = [start_once(settings) for _ in range(settings.starts)]
    rows = [{"stage": stage, **_summary([start["ms"][stage] for start in starts])} for stage in starts[0]["ms"]]
    rows.append({"stage": OURS, **_summary([ours_ms(start["ms"]) for start in starts])})
    boundary = "clock of the host; rank 0; median of fresh processes"
    return {
        **provenance(settings.commit),
        **settings.described(boundary),
        **python_build(),
        "machine": starts[0]["gpu"] or f"{os.cpu_count()} processors",
        "num_ranks": starts[0]["num_ranks"],
        "rows": rows,
    }


def start_once(settings: Settings, *, is_counted: bool = True) -> dict[str, Any]:
    """Start the program once. Return the milliseconds of its stages as `ms`, with its `gpu` and `num_ranks`.

    Args:
        settings: The launcher and the sizes.
        is_counted: Whether a kernel that is not in the cache is an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launcher, child = shlex.split(settings.launcher), str(_CHILD)
        words = [sys.executable, child, str(monotonic_ns()), str(path), settings.backend, json.dumps(settings.sizes)]
        done = subprocess.run(
            [*launcher, *words], env=environment(is_counted), capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        if done.returncode or not path.exists():
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise EPUnavailableError(
                f"{shlex.join([*launcher, sys.executable, child])} ended with status {done.returncode}; expected a Buffer. See what it "
                f"printed, and pass --backend host where there is no GPU:\n{said}"
            )
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def environment(is_cached: bool) -> dict[str, str]:
    """Return the environment of a start: it imports this package, and Python keeps its bytecode.

    Args:
        is_cached: Whether a kernel that is not in the cache is an error there.
    """
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))}
    if is_cached:
        changes["DEEPEP_RT_ASSERT_CACHED"] = "1"
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | changes


def ours_ms(stages: Mapping[str, float]) -> float:
    """Return the milliseconds from the import of the package to the end of the Buffer."""
    names = list(stages)
    return sum(stages[name] for name in names[names.index("import deepep_rt") :])


def _summary(ms: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(ms), "fastest_ms": min(ms)}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table: a row for each stage. Stages that did not occur have none."""
    lines = [
        [row["stage"], f"{row['median_ms']:.1f}", f"{row['fastest_ms']:.1f}"]
        for row in rows
        if row["median_ms"] or not row["stage"].startswith("Buffer")
    ]
    return f"{markdown_table(['ms of a start', 'median', 'fastest'], lines)}\n"


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
    args = vars(parser.parse_args())
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
