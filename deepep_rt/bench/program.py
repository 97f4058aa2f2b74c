"""Hold the settings that all benchmarks share, and run one of them as a program (`bench/*.py`)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _env
from ..errors import EPError
from .ranks import check_writable, fail_together
from .references import Reference, load
from .report import print_result
from .results import write

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(kw_only=True)
class Settings:
    """The settings of every benchmark.

    Args:
        backend: "cuda" or "host".
        hidden: Elements of a row.
        topk: Experts of a token.
        experts: Experts over all ranks.
        seed: Seed of the random rows and routing.
        quick: Make a few calls of each type only, as a trial.
        commit: The commit to record where the package is not in a git checkout.
    """

    backend: str = "cuda"
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    seed: int = 0
    quick: bool = False
    commit: str | None = None

    def described(self, boundary: str) -> dict[str, Any]:
        """Describe the measurement for the result file."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        del values["commit"]
        return {"boundary": boundary, "settings": values}


_Settings = TypeVar("_Settings", bound=Settings)


def parser(description: str | None, *, compares: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark. Each benchmark adds its options.

    Args:
        description: The help text.
        compares: Whether results compare with those of files (`--compare`).
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--backend", choices=("cuda", "host"), default=Settings.backend)
    made.add_argument("--hidden", type=int, default=Settings.hidden)
    made.add_argument("--topk", type=int, default=Settings.topk)
    made.add_argument("--experts", type=int, default=Settings.experts)
    made.add_argument("--seed", type=int, default=Settings.seed)
    made.add_argument("--quick", action="store_true", help="make a few calls of each type only, as a trial")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    made.set_defaults(compare=None)
    if compares:
        made.add_argument(
            "--compare",
            type=Path,
            metavar="FILE",
            help="print the figures of another result, or of bench/reference/*.json, next to ours",
        )
    made.add_argument("--commit", help="the commit to record, where this is no git checkout")
    return made


def numbers(text: str) -> tuple[int, ...]:
    """Parse a list such as 24,64."""
    return tuple(int(part) for part in text.split(","))


def run_program(
    comm: Intracomm,
    args: argparse.Namespace,
    settings: type[_Settings],
    run: Callable[[Intracomm, _Settings], dict[str, Any] | None],
    show: Callable[[dict[str, Any], list[Reference]], None] = print_result,
) -> None:
    """Measure, print, write and compare. After an EPError, rank 0 prints its message, and the exit status is 1.

    Args:
        comm: The ranks.
        args: The command line.
        settings: The class of settings.
        run: Measures with the settings on all ranks.
        show: Prints a result and its comparisons with references.
    """
    try:
        with fail_together(comm) as ranks, _env.without_tunings():
            references = load(args.compare) if args.compare else []
            if args.json:
                check_writable(ranks, args.json, "--json", is_file=True)
            names = [field.name for field in dataclasses.fields(settings)]
            result = run(ranks, settings(**{name: getattr(args, name) for name in names if hasattr(args, name)}))
    except EPError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    if result is None:
        return
    show(result, references)
    if args.json:
        write(args.json, result)
