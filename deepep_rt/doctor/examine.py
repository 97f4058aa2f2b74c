"""Collect the reports of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _env
from ..errors import EPConfigError
from .facts import JobReport, fact
from .runner import ALONE, NetworkRequest, gather, launch_variables, run_probes


def examine(
    sizes: Mapping[str, Any], num_ranks: int | None, backend: str, *, transport: str = "auto", measure_network: bool = False
) -> tuple[JobReport, bool]:
    """Examine this machine and gather the other ranks' reports. Collective under a launcher.

    Args:
        sizes: Arguments of `Config` except for `num_ranks`. `num_experts` is optional.
        num_ranks: Ranks of the Buffer. Default: the ranks of the launcher.
        backend: "auto", "cuda" or "host", as for `Buffer`.
        transport: "auto", "nvshmem" or "mpi", as for `NetworkOptions`.
        measure_network: Whether to measure between the ranks.

    Returns:
        The reports, and whether this rank prints them.
    """
    launch = launch_variables()
    other_launch: dict[str, Any] = {"size": _env.world_size(), "local_rank": _env.local_rank()}
    report = {**run_probes(), "launch": launch, "other_launch": other_launch}
    rank, reports, failure, network = 0, [{**report, **ALONE}], None, None
    if fact(report, "mpi", "error") is None:
        request = NetworkRequest(_ranks_per_node(sizes), backend != "host", transport) if measure_network else None
        rank, reports, failure, network = gather(report, network=request)
    if len(reports) == 1:  # without MPI's answer, the launcher's variables tell the rank
        rank = launch["rank"] if launch else 0
        if other_launch["size"] > 1:
            rank = rank or other_launch["local_rank"] or 0  # srun may have started torchrun, once on each host
    return JobReport(reports, sizes, num_ranks, backend, failure, network, transport), rank == 0


def _ranks_per_node(sizes: Mapping[str, Any]) -> int | None:
    """Return the declared ranks of a node. None: those of a host. Another finding reports a wrong number."""
    try:
        declared = sizes.get("ranks_per_node") or _env.ranks_per_node()
    except EPConfigError:
        return None
    return declared if isinstance(declared, int) and declared > 0 else None
