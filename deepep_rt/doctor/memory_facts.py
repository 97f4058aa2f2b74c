"""Tell which memory a Buffer of the job would share between GPUs, from the settings and from what was tried."""

from __future__ import annotations

from .. import _env
from .facts import JobReport, fact
from .network_facts import has_several_nodes, transport_of

NVSHMEM = "NVSHMEM"
VIRTUAL_MEMORY = "CUDA virtual memory"
DRIVER = "CUDA driver, not shared"


def setting_of(job: JobReport) -> str:
    """Return DEEPEP_RT_SYMMETRIC_MEMORY of the job, or its default."""
    variables = fact(job.reports[0], "settings", "variables") or {}
    return variables.get("DEEPEP_RT_SYMMETRIC_MEMORY") or _env.DEFAULT_SYMMETRIC_MEMORY


def provider_of(job: JobReport) -> str:
    """Return what provides the memory of a Buffer: `NVSHMEM`, `VIRTUAL_MEMORY` or `DRIVER`."""
    if has_several_nodes(job):
        found = transport_of(job)
        if isinstance(found, str) or found.name == "nvshmem":
            return NVSHMEM
        if (job.declared_ranks_per_node or len(next(iter(job.hosts.values())))) == 1:
            return DRIVER
    setting = setting_of(job)
    return NVSHMEM if setting == "nvshmem" or (setting == "auto" and unshared(job)) else VIRTUAL_MEMORY


def unshared(job: JobReport) -> dict[int, str]:
    """Return the ranks whose GPU shares no virtual memory, each with the reason. Ranks that did not try it are left out."""
    found = {report["rank"]: fact(report, "driver", "not_shared") for report in job.reports}
    return {rank: why for rank, why in found.items() if why}
