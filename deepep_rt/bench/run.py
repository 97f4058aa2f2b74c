"""Run the benchmarks under the current mpirun (`python -m deepep_rt bench`), and write a report with pictures."""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..config import Config
from ..errors import EPConfigError, EPUnavailableError
from . import report
from .ranks import make_room, together
from .references import Reference, load
from .results import read, write

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PROGRAMS = {"throughput": "throughput", "low-latency": "low_latency"}
_ALONE = {"jitter": "jitter"}  # not among all: it takes long, and makes one table instead of a page
LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun", "hydra", "srun", "slurmstepd")
"""Processes that forward the output of their ranks."""


class AskedSizes(NamedTuple):
    """The problem to measure; None: 7168, 8 and 256 on GPUs, less without."""

    hidden: int | None = None
    topk: int | None = None
    experts: int | None = None


def measure(
    what: str, out: Path | None, compare: Sequence[Path], *, quick: bool, backend: str, sizes: AskedSizes, commit: str | None
) -> None:
    """Run benchmarks on all ranks of the current mpirun, and write results and a report with pictures. Rank 0 prints.

    Args:
        what: "throughput", "low-latency", "all" (these two), or "jitter" (a table only; nothing is compared).
        out: Folder for what is written, made if need be; default: `bench-` and the time, in the current one.
        compare: Results or references to draw and to list beside.
        quick: A few calls of each kind.
        backend: As in `Buffer`.
        sizes: Of the problem.
        commit: To be recorded, where this is no git checkout.

    Raises:
        EPConfigError: if an argument is wrong, or a file cannot be read.
        EPUnavailableError: if a library is missing, or there is no GPU where one was asked for.
    """
    from mpi4py import MPI

    with together(MPI.COMM_WORLD) as comm:
        if what not in (*PROGRAMS, "all", *_ALONE):
            raise EPConfigError(f"there is no benchmark {what!r}; expected one of {', '.join((*PROGRAMS, 'all', *_ALONE))}")
        if backend not in ("auto", "cuda", "host"):
            raise EPConfigError(f"--backend is {backend!r}; expected auto, cuda or host")
        if what == "jitter":
            _measure_jitter(comm, out, quick, backend, sizes, commit)
            return
        _need("matplotlib", "ml_dtypes")
        references, folder = [reference for file in compare for reference in load(file)], _folder(comm, out)
        results = []
        for name in PROGRAMS if what == "all" else [what]:
            result = _run(comm, name, quick, backend, sizes, commit)
            if result is not None:
                report.print_result(result, references)
                write(folder / f"{name.replace('-', '_')}.json", result)  # before anything is drawn: it took minutes
                results.append(result)
        if results:
            _draw(results, references, folder)


def _measure_jitter(comm: Intracomm, out: Path | None, quick: bool, backend: str, sizes: AskedSizes, commit: str | None) -> None:
    """Measure, print the table and write it as Markdown and JSON."""
    _need("ml_dtypes")
    folder = _folder(comm, out)
    result = _run(comm, "jitter", quick, backend, sizes, commit)
    if result is not None:
        write(folder / "jitter.json", result)
        from .jitter import markdown

        text = markdown(result)
        (folder / "jitter.md").write_text(text)
        print(text, end="")


def draw(files: Sequence[Path], out: Path | None, compare: Sequence[Path]) -> None:
    """Write a report with pictures of result files, and measure nothing. Arguments and errors as in `measure`."""
    _need("matplotlib")
    if _rank() == 0:
        results, references = [read(file) for file in files], [other for file in compare for other in load(file)]
        folder = _folder(None, out)
        for result in results:
            report.print_result(result, references)
        _draw(results, references, folder)


def _rank() -> int:
    """Return this rank; 0 where there is no MPI, because reports can be written anywhere."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.rank


def _need(*libraries: str) -> None:
    """Check that the report can be written, before anything is measured."""
    for name in libraries:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise EPUnavailableError(
                f"the benchmarks need {name}, which cannot be imported ({error}); pip install 'deepep_rt[bench]'"
            ) from None


def _folder(comm: Intracomm | None, out: Path | None) -> Path:
    """Where rank 0 writes."""
    folder = out or Path(f"bench-{datetime.datetime.now():%Y-%m-%d-%H%M%S}")
    make_room(comm, folder, "--out")
    return folder


def _draw(results: Sequence[dict[str, Any]], references: Sequence[Reference], folder: Path) -> None:
    from . import page as bench_page

    print(f"the report is {bench_page.write(results, references, folder)}")


def _run(comm: Intracomm, name: str, quick: bool, backend: str, sizes: AskedSizes, commit: str | None) -> dict[str, Any] | None:
    from ..backends.agreement import agree
    from ..comm.convert import communicator_of

    program = importlib.import_module(f".{(PROGRAMS | _ALONE)[name]}", __package__)
    experts = sizes.experts or -(-256 // comm.size) * comm.size
    config = Config(comm.size, 128, sizes.hidden or 7168, sizes.topk or 8, experts)
    on_gpu = agree(communicator_of(comm), config, backend, "copy") == "cuda"
    words = ["--backend", "cuda" if on_gpu else "host", "--topk", str(sizes.topk or 8)]
    if name == "jitter":
        words += ["--ranks", str(comm.size)] + (["--experts", str(sizes.experts)] if sizes.experts else [])
    else:
        words += ["--experts", str(experts)]
    words += ["--hidden", str(sizes.hidden or (7168 if on_gpu else 512))]
    words += ["--quick"] * quick + (["--commit", commit] if commit else [])
    if name == "jitter":
        words += [] if on_gpu else ["--replays", "200"]
    elif not on_gpu:  # SMs mean nothing there, and time is dear
        words += ["--tokens", "64,256", "--sms", "24", "--calls", "5"] if name == "throughput" else ["--tokens", "1,4,16,64"]
    elif quick:
        words += ["--tokens", "1024", "--sms", "16,24"] if name == "throughput" else ["--tokens", "1,128"]
    args = program.parse_args(words)
    with _progress(name, program.num_steps(args), quiet=comm.rank > 0) as step:
        return program.run(comm, args, step)


# --- progress ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(name: str, total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal, otherwise print a line for each tenth, on standard error. Give the function to call before each step."""
    console = Console(stderr=True, force_terminal=_ends_on_a_terminal() or None, highlight=False, quiet=quiet)
    columns = TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    # A thread that redraws would take time from the calls that are timed, so the bar is drawn between measurements only.
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
