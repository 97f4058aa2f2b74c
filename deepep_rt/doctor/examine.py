"""Collect the reports of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _env
from .facts import JobReport, fact
from .runner import ALONE, gather, launch_variables, run_probes


def examine(sizes: Mapping[str, Any], num_ranks: int | None, backend: str) -> tuple[JobReport, bool]:
    """Examine this machine and gather the other ranks' reports. Collective under a launcher.

    Args:
        sizes: Arguments of `Config` except for `num_ranks`. `num_experts` is optional.
        num_ranks: Ranks of the Buffer. Default: the ranks of the launcher.
        backend: "auto", "cuda" or "host", as for `Buffer`.

    Returns:
        The reports, and whether this rank prints them.
    """
    launch = launch_variables()
    other_launch: dict[str, Any] = {"size": _env.world_size(), "local_rank": _env.local_rank()}
    report = {**run_probes(), "launch": launch, "other_launch": other_launch}
    rank, reports, failure = 0, [{**report, **ALONE}], None
    if fact(report, "mpi", "error") is None:
        rank, reports, failure = gather(report)
    if len(reports) == 1:  # without MPI's answer, the launcher's variables tell the rank
        rank = launch["rank"] if launch else 0
        if other_launch["size"] > 1:
            rank = rank or other_launch["local_rank"] or 0  # srun may have started torchrun, once on each host
    return JobReport(reports, sizes, num_ranks, backend, failure), rank == 0
