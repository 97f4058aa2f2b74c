"""How even low-latency steps are: p50, p99 and maximum of many, by the number of experts and of tokens.

    mpirun -n 8 python -m deepep_rt bench jitter --out jitter

A step is a dispatch and a combine. On GPUs it is a CUDA graph that is replayed, without a wait of the host between replays.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..buffer import Buffer
from . import low_latency as bench_low_latency
from . import report
from . import timing as bench_timing
from .machine import Machine
from .results import about

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

EXPERTS = (64, 128, 256, 512)
TOKENS = (8, 32, 128)
STEPS = 10_000

_COLUMNS = ("experts", "tokens", "steps", "p50 us", "p99 us", "max us", "p99 / p50")
_BOUNDARY = {
    "cuda": "CUDA events between replays of a graph of dispatch and combine, queued in advance; slowest rank of each step",
    "host": "wall clock of the host around dispatch and combine; slowest rank of each step",
}


@dataclass(frozen=True)
class Row:
    """The times of many steps; microseconds."""

    experts: int
    tokens: int
    steps: int
    p50_us: float
    p99_us: float
    max_us: float


def parse_args(words: Sequence[str]) -> argparse.Namespace:
    """Read the options of `bench_low_latency`, with these defaults; `--experts` is one number, or else all of `EXPERTS`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--experts", type=int)
    own, others = parser.parse_known_args(words)
    tokens = ",".join(map(str, TOKENS))
    args = bench_low_latency.parse_args(["--tokens", tokens, "--replays", str(STEPS), *others])
    # Ranks hold equally many experts.
    args.experts = [own.experts] if own.experts else [-(-number // own.ranks) * own.ranks for number in EXPERTS]
    return args


def num_steps(args: argparse.Namespace) -> int:
    """Count the calls of `step` in `run`."""
    return len(args.experts) * len(args.tokens)


def row_of(experts: int, tokens: int, us: np.ndarray) -> Row:
    """Sum up the times of one number of experts and of tokens."""
    p50, p99 = (float(np.percentile(us, share)) for share in (50, 99))
    return Row(experts, tokens, len(us), p50, p99, float(us.max()))


def run(comm: Intracomm, args: argparse.Namespace, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure on all ranks.

    Args:
        comm: The ranks.
        args: What `parse_args` returned.
        step: Called before each number of experts and of tokens, with what it is.

    Returns:
        The result, for JSON, on rank 0; None on the others.
    """
    machine = Machine(comm, args.backend)
    stream = bench_timing.own_stream() if machine.on_gpu else contextlib.nullcontext()
    kind = bench_low_latency.GraphBench if machine.on_gpu else bench_low_latency.Bench
    rows = []
    for experts in args.experts:
        one = argparse.Namespace(**{**vars(args), "experts": experts})
        sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=experts, backend=args.backend)
        for tokens in args.tokens:
            step(f"{experts} experts, {tokens} tokens")
            with Buffer(comm, num_max_tokens_per_rank=max(tokens, 128), low_latency=True, **sizes) as buffer, stream:
                rows.append(row_of(experts, tokens, kind(comm, one, machine, buffer, tokens).step_times()))
    settings = {**machine.described(), **report.described(args, _BOUNDARY[args.backend])}
    return {**about(args.commit), **settings, "rows": [asdict(row) for row in rows]} if comm.rank == 0 else None


def markdown(result: Mapping[str, Any]) -> str:
    """The table, and what it was measured on."""
    settings = result["settings"]
    what = f"{result['num_ranks']} ranks, {result['machine']}, hidden {settings['hidden']}, top-{settings['topk']}"
    rows = []
    for row in result["rows"]:
        us = row["p50_us"], row["p99_us"], row["max_us"]
        rows.append([row["experts"], row["tokens"], row["steps"], *(f"{time:.1f}" for time in us), f"{us[1] / us[0]:.3f}"])
    text = f"Low-latency steps: {what}. {result['boundary']}. {result['date']}."
    return f"{text}\n\n{report.markdown_table(_COLUMNS, rows)}\n"
