"""Run the benchmarks on all ranks of the current mpirun, and write a report with pictures (`python -m deepep_rt bench`)."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import _env
from ..config import Config
from ..errors import EPConfigError
from . import report
from .ranks import check_writable, fail_together, need, world
from .references import Reference, load
from .results import read, write

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BENCHMARKS = ("throughput", "low-latency")
"""The benchmarks of "all". Jitter takes longer, and makes a table instead of a page."""

LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun", "hydra", "srun", "slurmstepd")
"""Processes that forward the output of their ranks."""


class AskedSizes(NamedTuple):
    """The sizes that the command line asks for. None: 7168, 8 and 256 on GPUs, and smaller ones without."""

    hidden: int | None = None
    topk: int | None = None
    experts: int | None = None


def measure(
    what: str, out: Path | None, compare: Sequence[Path], *, quick: bool, backend: str, sizes: AskedSizes, commit: str | None
) -> None:
    """Run benchmarks on all ranks of the current mpirun, and write results and a report with pictures. Rank 0 prints.

    `what` is "throughput", "low-latency", "all" (these two), or "jitter" (a table without comparisons). The folder `out` is created if it
    does not exist. Default: `bench-` and the time, in the current folder.

    Raises:
        EPConfigError: if an argument is wrong, or a file cannot be read.
        EPUnavailableError: if a library is missing, or if `backend` is "cuda" and there is no GPU.
    """
    # Figures of machines compare only with the same settings, so a stored tuning of this machine has no part in them.
    with fail_together(world()) as comm, _env.without_tunings():
        if what not in (*BENCHMARKS, "all", "jitter"):
            raise EPConfigError(
                f"what={what!r}; expected one of {', '.join((*BENCHMARKS, 'all', 'jitter'))}. Choose one of them."
            )
        if backend not in ("auto", "cuda", "host"):
            raise EPConfigError(f"--backend={backend!r}; expected auto, cuda or host. Choose one of them.")
        if what == "jitter":
            _measure_jitter(comm, out, quick, backend, sizes, commit)
            return
        need("matplotlib", "ml_dtypes")
        references, folder = [reference for file in compare for reference in load(file)], _folder(comm, out)
        results = []
        for name in BENCHMARKS if what == "all" else [what]:
            result = _run(comm, name, quick, backend, sizes, commit)
            if result is not None:
                report.print_result(result, references)
                write(folder / f"{name.replace('-', '_')}.json", result)  # before drawing, which may fail: measuring took minutes
                results.append(result)
        if results:
            _draw(results, references, folder)


def _measure_jitter(comm: Intracomm, out: Path | None, quick: bool, backend: str, sizes: AskedSizes, commit: str | None) -> None:
    """Measure, print the table and write it as Markdown and JSON."""
    need("ml_dtypes")
    folder = _folder(comm, out)
    result = _run(comm, "jitter", quick, backend, sizes, commit)
    if result is not None:
        write(folder / "jitter.json", result)
        from .jitter import markdown

        text = markdown(result)
        (folder / "jitter.md").write_text(text)
        print(text, end="")


def draw(files: Sequence[Path], out: Path | None, compare: Sequence[Path]) -> None:
    """Write a report with pictures of result files without measuring. Arguments and errors are those of `measure`."""
    need("matplotlib")
    if _rank() == 0:
        results, references = [read(file) for file in files], [other for file in compare for other in load(file)]
        folder = _folder(None, out)
        for result in results:
            report.print_result(result, references)
        _draw(results, references, folder)


def _rank() -> int:
    """Return this rank. It is 0 without MPI, because drawing needs no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.rank


def _folder(comm: Intracomm | None, out: Path | None) -> Path:
    """Choose the folder that rank 0 writes to."""
    folder = out or Path(f"bench-{datetime.datetime.now():%Y-%m-%d-%H%M%S}")
    check_writable(comm, folder, "--out")
    return folder


def _draw(results: Sequence[dict[str, Any]], references: Sequence[Reference], folder: Path) -> None:
    from . import page as bench_page

    print(f"the report is {bench_page.write(results, references, folder)}")


def _run(comm: Intracomm, name: str, quick: bool, backend: str, sizes: AskedSizes, commit: str | None) -> dict[str, Any] | None:
    from ..backends.agreement import agree
    from ..comm.convert import communicator_of

    topk, experts = sizes.topk or 8, sizes.experts or -(-256 // comm.size) * comm.size
    config = Config(comm.size, 128, sizes.hidden or 7168, topk, experts)
    on_gpu = agree(communicator_of(comm), config, backend, "copy") == "cuda"
    hidden = sizes.hidden or (7168 if on_gpu else 512)
    common: dict[str, Any] = dict(hidden=hidden, topk=topk, experts=experts, quick=quick, commit=commit)
    common["backend"] = "cuda" if on_gpu else "host"
    make = {"throughput": _throughput, "low-latency": _low_latency, "jitter": _jitter}[name]
    total, run = make(comm, common, sizes)
    with _progress(name, total, quiet=comm.rank > 0) as step:
        return run(step)


_Step = Callable[[str], None]
_Run = Callable[[_Step], dict[str, Any] | None]


def _throughput(comm: Intracomm, common: dict[str, Any], sizes: AskedSizes) -> tuple[int, _Run]:
    from . import throughput

    if common["backend"] == "host":  # calls are slow
        common |= {"tokens": (64, 256), "calls": 5}
    elif common["quick"]:
        common |= {"tokens": (1024,), "sms": (16, 24)}
    settings = throughput.Settings(**common)
    return throughput.num_steps(settings), lambda step: throughput.run(comm, settings, step)


def _low_latency(comm: Intracomm, common: dict[str, Any], sizes: AskedSizes) -> tuple[int, _Run]:
    from . import low_latency

    if common["backend"] == "host":
        common["tokens"] = (1, 4, 16, 64)
    elif common["quick"]:
        common["tokens"] = (1, 128)
    settings = low_latency.Settings(**common)
    return low_latency.num_steps(settings), lambda step: low_latency.run(comm, settings, step)


def _jitter(comm: Intracomm, common: dict[str, Any], sizes: AskedSizes) -> tuple[int, _Run]:
    from . import jitter

    if common["backend"] == "host":
        common["replays"] = 200
    settings, experts = jitter.make_settings(**common), jitter.experts_of(comm.size, sizes.experts)
    return jitter.num_steps(settings, experts), lambda step: jitter.run(comm, settings, experts, step)


# --- progress ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(name: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: a bar on a terminal, otherwise a line for each tenth. Yield what to call before each step."""
    console = Console(stderr=True, force_terminal=_ends_on_a_terminal() or None, highlight=False, quiet=quiet)
    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # The bar is drawn between measurements only, because a thread that redraws would disturb the timed calls.
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=quiet) as progress:
        task, numbers = progress.add_task("", total=total), itertools.count()

        def step(doing: str) -> None:
            done = next(numbers)
            progress.update(task, description=doing, completed=done, refresh=True)
            if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
                console.print(f"{name}: {done} of {total} done; {doing}", markup=False, soft_wrap=True)

        yield step


def _ends_on_a_terminal() -> bool:
    """Check whether an mpirun on this machine passes standard error on to a terminal. A rank itself sees only a pipe."""
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
            name, parent = stat[stat.index("(") + 1 : stat.rindex(")")], int(stat.rpartition(")")[2].split()[1])
            if not name.startswith(LAUNCHERS):
                return False
            if os.readlink(f"/proc/{pid}/fd/2").startswith(("/dev/pts/", "/dev/tty")):
                return True
        except (OSError, ValueError):
            return False
        pid = parent
    return False
