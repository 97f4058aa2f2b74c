"""Measure the jitter of low-latency steps: p50, p99 and maximum of many, by the numbers of experts and tokens.

    mpirun -n 8 python -m deepep_rt bench jitter --out jitter

A step is a dispatch and a combine. On GPUs it is a replay of a CUDA graph. The host does not wait between replays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..buffer import Buffer
from . import low_latency, timing
from .machine import Machine
from .report import markdown_table
from .results import provenance

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
    """The times of many steps in microseconds."""

    experts: int
    tokens: int
    steps: int
    p50_us: float
    p99_us: float
    max_us: float


def make_settings(**common: Any) -> low_latency.Settings:
    """Make the settings of the low-latency benchmark with the defaults of this one."""
    return low_latency.Settings(**{"tokens": TOKENS, "replays": STEPS, **common})


def experts_of(num_ranks: int, experts: int | None = None) -> tuple[int, ...]:
    """List the numbers of experts: `experts`, or `EXPERTS` rounded up so that each rank has as many."""
    return (experts,) if experts else tuple(-(-number // num_ranks) * num_ranks for number in EXPERTS)


def num_steps(settings: low_latency.Settings, experts: Sequence[int]) -> int:
    """Count the calls of `step` in `run`."""
    return len(experts) * len(settings.tokens)


def summarise(experts: int, tokens: int, us: np.ndarray) -> Row:
    """Summarise the step times of one number of experts and of tokens."""
    p50, p99 = (float(np.percentile(us, share)) for share in (50, 99))
    return Row(experts, tokens, len(us), p50, p99, float(us.max()))


def run(
    comm: Intracomm, settings: low_latency.Settings, experts: Sequence[int], step: Callable[[str], None] = lambda doing: None
) -> dict[str, Any] | None:
    """Measure on all ranks with each of `experts`, numbers over all ranks. Return the result for JSON on rank 0, and None on the others.

    `step` is called with a description before each measurement.
    """
    machine = Machine(comm, settings.backend)
    stream = timing.bench_stream(machine.on_gpu)
    rows = []
    for number in experts:
        one = dataclasses.replace(settings, experts=number)
        sizes: dict[str, Any] = dict(hidden=one.hidden, num_topk=one.topk, num_experts=number, backend=one.backend)
        for tokens in one.tokens:
            step(f"{number} experts, {tokens} tokens")
            with Buffer(comm, num_max_tokens_per_rank=max(tokens, 128), low_latency=True, **sizes) as buffer, stream:
                bench = low_latency.bench_type(machine.on_gpu)(comm, one, machine, buffer, tokens)
                rows.append(summarise(number, tokens, bench.step_times()))
    if comm.rank:
        return None
    described = settings.described(_BOUNDARY[settings.backend])
    described["settings"]["experts"] = list(experts)
    return {**provenance(settings.commit), **machine.described(), **described, "rows": [asdict(row) for row in rows]}


def markdown(result: Mapping[str, Any]) -> str:
    """Write the table, and a line about the machine and the measurement."""
    settings = result["settings"]
    what = f"{result['num_ranks']} ranks, {result['machine']}, hidden {settings['hidden']}, top-{settings['topk']}"
    rows = []
    for row in result["rows"]:
        us = row["p50_us"], row["p99_us"], row["max_us"]
        rows.append([row["experts"], row["tokens"], row["steps"], *(f"{time:.1f}" for time in us), f"{us[1] / us[0]:.3f}"])
    text = f"Low-latency steps: {what}. {result['boundary']}. {result['date']}."
    return f"{text}\n\n{markdown_table(_COLUMNS, rows)}\n"
