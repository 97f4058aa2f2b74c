"""Examine a machine: collect the reports of all ranks, apply all rules to them, and report the findings as text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import _env
from ..comm.store_client import StoreClient
from ..errors import EPConfigError, EPError
from .catalog import FINDING_TYPES
from .facts import LEVELS, Finding, JobReport, differences, fact, is_broken
from .job_rules import RULES
from .network_facts import has_several_nodes, transport_of
from .network_rules import NETWORK_RULES
from .rank_rules import RANK_RULES
from .runner import ALONE, NetworkRequest, gather, launch_variables, run_probes
from .screen import show
from .slot_rules import SLOT_RULES

__all__ = ["as_json", "examine", "findings", "is_broken", "show"]

_STORE_S = 5.0  # the limit of a connection


# --- reports of the ranks ----------------------------------------------------------------------------------------------------------


def examine(
    sizes: Mapping[str, Any],
    num_ranks: int | None,
    backend: str,
    *,
    transport: str = "auto",
    measure_network: bool = False,
    max_ranks: int | None = None,
    rendezvous: str | None = None,
) -> tuple[JobReport, bool]:
    """Examine this machine and gather the other ranks' reports. Return them, and whether this rank prints them. Collective.

    `sizes` are arguments of `Config` except for `num_ranks`, which is by default the ranks of the launcher. `num_experts` is optional.
    `measure_network` measures between the ranks. `max_ranks` is that of a Buffer with slots, whose ranks meet at `rendezvous`.
    """
    launch = launch_variables()
    other_launch: dict[str, Any] = {"size": _env.world_size(), "local_rank": _env.local_rank()}
    report = {**run_probes(), "launch": launch, "other_launch": other_launch}
    if rendezvous is not None:
        report["store"] = {"place": rendezvous, "error": _store_error(rendezvous)}
    rank, reports, failure, network = 0, [{**report, **ALONE}], None, None
    # A shell may define torchrun's variables. Only a measurement needs the other processes.
    without_mpi = measure_network and _env.meets_without_mpi()
    if without_mpi or fact(report, "mpi", "error") is None:
        request = NetworkRequest(_ranks_per_node(sizes), backend != "host", transport, without_mpi) if measure_network else None
        rank, reports, failure, network = gather(report, network=request)
        if without_mpi and failure is not None:
            failure, network = None, {"failure": f"the processes of torchrun did not meet: {failure}"}
    if len(reports) == 1:  # without MPI's answer, the launcher's variables tell the rank
        rank = launch["rank"] if launch else 0
        if other_launch["size"] > 1:
            rank = rank or other_launch["local_rank"] or 0  # srun may have started torchrun, once on each host
    return JobReport(reports, sizes, num_ranks, backend, failure, network, transport, max_ranks), rank == 0


def _store_error(place: str) -> str:
    """Connect to a store. Return why that fails, or an empty text."""
    host, _, port = place.partition("/")[0].rpartition(":")
    try:
        StoreClient(host, int(port), _env.store_token(), _STORE_S).close()
    except EPError as error:
        return str(error)
    return ""


def _ranks_per_node(sizes: Mapping[str, Any]) -> int | None:
    """Return the declared ranks of a node. None: those of a host. Another finding reports a wrong number."""
    try:
        declared = sizes.get("ranks_per_node") or _env.ranks_per_node()
    except EPConfigError:
        return None
    return declared if isinstance(declared, int) and declared > 0 else None


# --- findings ----------------------------------------------------------------------------------------------------------------------


def findings(job: JobReport) -> list[Finding]:
    """Apply every rule. Return the findings by level and type, the worst first.

    Equal findings about several ranks become one.
    """
    made = [finding for rule in (*RULES, *NETWORK_RULES, *SLOT_RULES) for finding in _apply(rule, job)]
    ranks: dict[Finding, list[int]] = {}
    for report in job.reports:
        for rule in RANK_RULES:
            for finding in _apply(rule, job, report):
                ranks.setdefault(finding, []).append(report["rank"])
    for finding, at in ranks.items():
        is_everywhere = len(at) == len(job.reports)
        made.append(finding if is_everywhere else Finding(finding.type, finding.level, finding.what, tuple(at)))
    names = list(FINDING_TYPES)
    return sorted(made, key=lambda finding: (LEVELS.index(finding.level), names.index(finding.type.name)))


def _apply(rule: Callable[..., Iterator[Finding]], *arguments: Any) -> list[Finding]:
    """Apply a rule. If unexpected facts make it raise, the error is the finding."""
    try:
        return list(rule(*arguments))
    except Exception as error:
        return [Finding.of("probe-failed", "warning", f"the rule {rule.__name__}: {type(error).__name__}: {error}")]


# --- documents for programs --------------------------------------------------------------------------------------------------------


def as_json(job: JobReport, found: Sequence[Finding]) -> dict[str, Any]:
    """Make the document for programs: `status` ("ok" or "broken"), `findings`, `size_hint`, `differences`,
    `network` (what was measured, or None), `transport` (see `transport_document`), `ranks` (the reports).
    """
    return {
        "status": "broken" if is_broken(found) else "ok",
        "findings": [
            {
                "kind": finding.type.name,
                "level": finding.level,
                "what": finding.what,
                "ranks": list(finding.ranks) or [report["rank"] for report in job.reports],
                "meaning": finding.type.meaning,
                "remedy": finding.type.remedy,
            }
            for finding in found
        ],
        "size_hint": job.size_hint(),
        "differences": differences(job.reports),
        "network": job.network,
        "transport": transport_document(job),
        "ranks": list(job.reports),
    }


def transport_document(job: JobReport) -> dict[str, Any] | None:
    """Describe the transport between nodes: `name` and `reason`, or `error`. None: there is one node, or no GPU."""
    if not job.uses_gpus or not has_several_nodes(job):
        return None
    found = transport_of(job)
    return {"error": found} if isinstance(found, str) else found._asdict()
