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
from ..network import TRANSPORTS, NetworkOptions
from .ranks import check_writable, fail_together
from .references import Reference, load
from .report import print_result
from .results import write

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(kw_only=True)
class Settings:
    """The settings of every benchmark."""

    backend: str = "cuda"  # "cuda" or "host"
    hidden: int = 7168  # elements of a row
    topk: int = 8  # experts of a token
    experts: int = 256  # over all ranks
    seed: int = 0  # of the random rows and routing
    quick: bool = False  # make a few calls of each type only, as a trial
    commit: str | None = None  # to record where the package is not in a git checkout

    def described(self, boundary: str) -> dict[str, Any]:
        """Describe the measurement for the result file."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        del values["commit"]
        return {"boundary": boundary, "settings": values}


@dataclass(kw_only=True)
class NodeSettings(Settings):
    """Those of a benchmark that runs over several nodes too."""

    ranks_per_node: int | None = None  # as for `Buffer`. The copy ceiling is then that of puts to other nodes
    transport: str = "auto"  # these three as for `NetworkOptions`
    wire_bandwidth: int = NetworkOptions.wire_bandwidth
    wire_latency: int = NetworkOptions.wire_latency

    @property
    def nodes(self) -> dict[str, Any]:
        """The arguments of a Buffer about its nodes."""
        network = NetworkOptions(transport=self.transport, wire_bandwidth=self.wire_bandwidth, wire_latency=self.wire_latency)
        return {"ranks_per_node": self.ranks_per_node, "network": network}


_Settings = TypeVar("_Settings", bound=Settings)


def parser(description: str | None, *, compares: bool = True) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark. Each benchmark adds its options.

    `compares` says whether results compare with those of files (`--compare`).
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


def add_node_options(made: argparse.ArgumentParser) -> None:
    """Add the options of `NodeSettings` to a parser."""
    made.add_argument("--ranks-per-node", type=int, default=None, help="reach other ranks as over a network; 1: all of them")
    made.add_argument("--transport", choices=TRANSPORTS, default=NodeSettings.transport, help="what carries rows between nodes")
    made.add_argument("--wire-bandwidth", type=int, default=NodeSettings.wire_bandwidth, help="GB/s, of --transport wire")
    made.add_argument("--wire-latency", type=int, default=NodeSettings.wire_latency, help="microseconds, of --transport wire")


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
    """Measure on all ranks, print with `show`, write and compare. After an EPError, rank 0 prints its message, and the exit status is 1."""
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
