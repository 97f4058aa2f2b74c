"""Examine a machine, and report the findings as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .examine import examine
from .facts import Finding, JobReport, differences
from .findings import findings, is_broken
from .network_facts import has_several_nodes, transport_of
from .screen import show

__all__ = ["as_json", "examine", "findings", "is_broken", "show"]


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
