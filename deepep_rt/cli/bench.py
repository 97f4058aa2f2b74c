"""Define `python -m deepep_rt bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench import run


def bench(
    what: Annotated[str, typer.Argument(help="throughput, low-latency, all, or jitter.")] = "all",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: bench-DATE-TIME.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Make a few calls of each type only, as a trial.")] = False,
    compare: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Compare with these results or references; may be repeated.")
    ] = None,
    from_: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Draw this result without measuring; may be repeated.")
    ] = None,
    backend: Annotated[str, typer.Option(help="cuda, host (NumPy and MPI, at small sizes), or auto.")] = "auto",
    hidden: Annotated[int | None, typer.Option(help="Elements of a row. Default: 7168; 512 without a GPU.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts of a token. Default: 8.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks. Default: 256.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where this is no git checkout.")] = None,
) -> None:
    """Measure the speed of calls on all ranks. Write a report with pictures. Example: mpirun -n 8 python -m deepep_rt bench."""
    if from_:
        run.draw(from_, out, compare or [])
    else:
        sizes = run.AskedSizes(hidden, topk, experts)
        run.measure(what, out, compare or [], quick=quick, backend=backend, sizes=sizes, commit=commit)
